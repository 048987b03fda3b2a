"""The code of prefetching the next box, which `plan/prefetch.py` plans; and `prefetch_contiguous`, for other code.

A prefetch changes no value and never faults, so its address may be wrong: beyond a tensor, or of a box that another
thread takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..ir.builder import Function, Module, Value
from ..plan.prefetch import Prefetch
from ..target import LINE


def list_lines(m: Module, prefetch: Prefetch) -> Function:
    """A function that lists the offsets of all lines, those of a region filled up to whole portions: (table)."""
    f = m.function("list_lines", ["p:table"])
    (table,) = f.args
    first = 0
    for region, portions in zip(prefetch.regions, prefetch.portions, strict=True):
        position = f.variable("i64", first)
        with ExitStack() as stack:
            offset: Value = 0
            for count, step in region:
                offset = f.add(offset, f.mul(stack.enter_context(f.loop(0, count)), step))
            index = f.get(position, "i64")
            f.store(offset, f.at(table, index, "i64"), "i64", 8)
            f.set(position, "i64", f.add(index, 1))
        end = first + portions * prefetch.lines_per_call
        with f.loop(f.get(position, "i64"), end) as spare:
            f.store(0, f.at(table, spare, "i64"), "i64", 8)
        first = end
    return f


def portion_of(f: Function, prefetch: Prefetch, table: str, call: Value, bases: Sequence[str]) -> tuple[str, str]:
    """What the call of that number prefetches: the base of a region, and where the offsets from it are listed."""
    call = f.min(call, sum(prefetch.portions) - 1)
    base, first = bases[0], prefetch.portions[0]
    for other, portions in zip(bases[1:], prefetch.portions[1:], strict=True):
        base = f.op(f"select i1 {f.test('slt', call, first)}, ptr {base}, ptr {other}")
        first += portions
    return base, f.at(table, f.mul(call, prefetch.lines_per_call), "i64")


def prefetch_contiguous(f: Function, start: str, size: int) -> None:
    """Prefetch so many contiguous bytes, wherever in a line they begin."""
    for byte in (*range(0, size, LINE), size - 1):
        f.prefetch(f.at(start, byte, "i8"))


class Fetch:
    """Prefetches one portion, inside a tile: at its start, or line after line as `step` is called."""

    def __init__(self, f: Function, prefetch: Prefetch, base: str, offsets: str) -> None:
        self.f, self.prefetch, self.base, self.offsets = f, prefetch, base, offsets
        self.position = f.variable("i64", 0)
        if prefetch.burst:
            for i in range(prefetch.lines_per_call):
                self._line(i)

    def step(self) -> None:
        """Prefetch the next line if it is time for one; at the end the last one again."""
        if self.prefetch.burst:
            return
        f, last, pause = self.f, self.prefetch.lines_per_call - 1, self.prefetch.steps_per_line
        index = f.get(self.position, "i64")
        f.set(self.position, "i64", f.add(index, 1))
        if pause == 1:
            self._line(f.min(index, last))
            return
        with f.when(f.test("eq", f.op(f"and i64 {index}, {pause - 1}"), 0)):
            self._line(f.min(f.div(index, pause), last))

    def _line(self, index: Value) -> None:
        """Prefetch the line of an index in the portion."""
        f = self.f
        offset = f.load(f.at(self.offsets, index, "i64"), "i64", 8)
        f.prefetch(f.at(self.base, offset, "i8"))
