"""The list of a box's pixels: phase by phase, where each reads its input and where it writes its results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..ir.builder import Function, Module, Value
from ..plan.records import entry_steps
from .records import Cut, Gather

PHASE = 14  # numbers of a phase in the table of phases: first tap, taps, and per axis residue, start and stop


def phase_numbers(cut: Cut) -> list[int]:
    """The table of phases."""
    return [n for p in cut.phases for n in (p.first, p.count, *p.residues, *p.starts, *p.stops)]


def phase_range(f: Function, cut: Cut, table: str, phase: Value) -> str:
    """Where a phase has its range in the list: its first pixel, where its short tile begins, and its end."""
    return f.at(table, f.add(f.mul(phase, 3), 2 * cut.pixels), "i64")


@dataclass(frozen=True)
class _Steps:
    """Elements between neighbouring positions of a phase along each axis, and between neighbouring results."""

    read: Sequence[int]
    write: Sequence[int]


def list_pixels(m: Module, plan: Gather, phases: str) -> Function:
    """A function that lists the pixels of a box: (table, start of each axis).

    First where each reads, then where it writes, then the ranges of the phases. What is left of a phase's last tile
    repeats its last pixel: it computes and writes the same values again.
    """
    f = m.function("list_pixels", ["p:table", "i:s0", "i:s1", "i:s2", "i:s3"])
    table, *start = f.args
    cut = plan.cut
    steps = _Steps(_read_steps(plan), _write_steps(plan))
    origin: Value = 0
    if not plan.output.staged:
        for axis_map, s in zip(cut.maps, start, strict=True):
            origin = f.add(origin, f.mul(f.mul(s, axis_map.out_stride), axis_map.out_step))
    position = f.variable("i64", 0)
    with f.loop(0, len(cut.phases)) as phase:
        row = f.at(phases, f.add(f.mul(phase, PHASE), 2), "i64")
        begin = _list_phase(f, cut, steps, (table, position), (row, start, origin))
        total = f.get(position, "i64")
        ends = _tile_ends(f, cut, begin, total)
        range_ = phase_range(f, cut, table, phase)
        for i, number in enumerate(ends):
            f.store(number, f.at(range_, i, "i64"), "i64", 8)
        with f.loop(total, ends[-1]) as spare:
            last = f.sub(total, 1)
            for part in (0, cut.pixels):
                value = f.load(f.at(table, f.add(last, part), "i64"), "i64", 8)
                f.store(value, f.at(table, f.add(spare, part), "i64"), "i64", 8)
        f.set(position, "i64", ends[-1])
    return f


def _read_steps(plan: Gather) -> list[int]:
    """Elements between the inputs of neighbouring positions."""
    cut = plan.cut
    if plan.source.in_place:
        return [a.packed_stride * p.stride for a, p in zip(cut.maps, cut.packs, strict=True)]
    steps = entry_steps(cut.packs)
    return [a.packed_stride * s * plan.source.pitch for a, s in zip(cut.maps, steps, strict=True)]


def _write_steps(plan: Gather) -> list[int]:
    """Elements between neighbouring results: in the tensor, or in the staging, which has the box's results densely."""
    maps = plan.cut.maps
    if not plan.output.staged:
        return [a.out_step for a in maps]
    steps = [plan.block] * 4
    for i in (2, 1, 0):
        steps[i] = steps[i + 1] * maps[i + 1].box * maps[i + 1].out_stride
    return steps


def _list_phase(
    f: Function, cut: Cut, steps: _Steps, to: tuple[str, str], of: tuple[str, Sequence[Value], Value]
) -> Value:
    """List the pixels of a phase that are in the box; returns the first position.

    `to` is the table and the variable with the next position in it; `of` is the phase's numbers, where the box starts,
    and where the results of the box begin.
    """
    (table, position), (row, start, origin) = to, of
    residues, starts, stops = (
        [f.load(f.at(row, 4 * part + axis, "i64"), "i64", 8) for axis in range(4)] for part in range(3)
    )
    writing = origin
    ends: list[tuple[Value, Value]] = []
    for axis, axis_map in enumerate(cut.maps):
        writing = f.add(writing, f.mul(residues[axis], steps.write[axis]))
        low = f.max(f.sub(starts[axis], start[axis]), 0)
        ends.append((low, f.min(f.sub(stops[axis], start[axis]), axis_map.box)))
    begin = f.get(position, "i64")
    with ExitStack() as stack:
        reading: Value = 0
        for axis, axis_map in enumerate(cut.maps):
            q = stack.enter_context(f.loop(*ends[axis]))
            reading = f.add(reading, f.mul(q, steps.read[axis]))
            writing = f.add(writing, f.mul(q, steps.write[axis] * axis_map.out_stride))
        index = f.get(position, "i64")
        f.store(reading, f.at(table, index, "i64"), "i64", 8)
        f.store(writing, f.at(table, f.add(index, cut.pixels), "i64"), "i64", 8)
        f.set(position, "i64", f.add(index, 1))
    return begin


def _tile_ends(f: Function, cut: Cut, begin: Value, total: Value) -> tuple[Value, Value, Value]:
    """Where the whole tiles of a phase begin and end, and where its last one ends.

    The last tile is a short one if that holds what is left; and then it is none if nothing is.
    """
    count = f.sub(total, begin)
    whole = f.mul(f.div(f.add(count, cut.rows - 1 - cut.short_rows), cut.rows), cut.rows)
    size = f.choose(f.test("slt", whole, count), f.add(whole, cut.short_rows), whole)
    return begin, f.add(begin, whole), f.add(begin, size)
