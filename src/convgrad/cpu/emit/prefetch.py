"""Lines of memory that are asked for while something else is computed, so that they are near when their turn comes.

Asking for a line changes no value and never faults, so an address may be wrong: beyond a tensor, or of a box that
another thread takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..ir.builder import Function, Module, Value
from ..plan.records import Ahead
from ..target import LINE

BURST = 4  # so few lines are asked for at once; more are spread over the products


def tabulate(m: Module, ahead: Ahead) -> Function:
    """A function that lists the offsets of the lines, region after region, each filled up to whole slices: (table)."""
    f = m.function("list_lines", ["p:table"])
    (table,) = f.args
    first = 0
    for region, slices in zip(ahead.regions, ahead.slices, strict=True):
        position = f.variable("i64", first)
        with ExitStack() as stack:
            offset: Value = 0
            for count, step in region:
                offset = f.add(offset, f.mul(stack.enter_context(f.loop(0, count)), step))
            index = f.get(position, "i64")
            f.store(offset, f.at(table, index, "i64"), "i64", 8)
            f.set(position, "i64", f.add(index, 1))
        end = first + slices * ahead.each
        with f.loop(f.get(position, "i64"), end) as spare:
            f.store(0, f.at(table, spare, "i64"), "i64", 8)
        first = end
    return f


def slice_of(f: Function, ahead: Ahead, table: str, call: Value, bases: Sequence[str]) -> tuple[str, str]:
    """What the tile's call of that number asks for: a base, and where its offsets lie in the table."""
    call = f.min(call, sum(ahead.slices) - 1)
    base, first = bases[0], ahead.slices[0]
    for other, slices in zip(bases[1:], ahead.slices[1:], strict=True):
        base = f.op(f"select i1 {f.test('slt', call, first)}, ptr {base}, ptr {other}")
        first += slices
    return base, f.at(table, f.mul(call, ahead.each), "i64")


def ask_for_run(f: Function, start: str, size: int) -> None:
    """Ask for so many bytes that lie together, wherever they begin."""
    for byte in (*range(0, size, LINE), size - 1):
        f.prefetch(f.at(start, byte, "i8"))


class Fetch:
    """Asks for the lines of one slice, inside the tile."""

    def __init__(self, f: Function, ahead: Ahead, base: str, offsets: str) -> None:
        self.f, self.ahead, self.base, self.offsets = f, ahead, base, offsets
        self.position = f.variable("i64", 0)
        if ahead.each <= BURST:
            for i in range(ahead.each):
                self._line(i)

    def step(self) -> None:
        """Ask for the next line, if they are spread and it is time; the last one again when there is none."""
        if self.ahead.each <= BURST:
            return
        f, pause = self.f, self.ahead.pause
        index = f.get(self.position, "i64")
        f.set(self.position, "i64", f.add(index, 1))
        if pause == 1:
            self._line(f.min(index, self.ahead.each - 1))
            return
        with f.when(f.test("eq", f.op(f"and i64 {index}, {pause - 1}"), 0)):
            self._line(f.min(f.div(index, pause), self.ahead.each - 1))

    def _line(self, index: Value) -> None:
        f = self.f
        offset = f.load(f.at(self.offsets, index, "i64"), "i64", 8)
        f.prefetch(f.at(self.base, offset, "i8"))
