"""The two sides of the sum in a kernel: packed for a box, read in place, and where the next box is prefetched from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..pack.rows import pack_box, zero
from .records import Mode, Side, WeightGradient


def inputs(plan: WeightGradient) -> Elements:
    """The elements of x and y."""
    tensors = plan.tensors
    return Elements(tensors.dtype, plan.lanes, tensors.sum, tensors.converts_f16)


def results(plan: WeightGradient) -> Results:
    """How w is written."""
    tensors, output = plan.tensors, plan.output
    rounds = plan.roles.pairs and not output.accumulate
    n = Elements(tensors.out_dtype, plan.lanes, tensors.sum, tensors.converts_f16, rounds)
    return Results(n, output.accumulate, output.stream)


class Place(NamedTuple):
    """What a task sums: its group, its first row, the row that its sides begin with, and its blocks of lanes.

    The last part begins early, so that every part has the same number of rows: those from `first_row` up to `row` are
    written by the part before it.
    """

    group: Value
    row: Value
    first_row: Value
    lane_start: Value
    lane_stop: Value


def place(f: Function, plan: WeightGradient, unit: Value) -> Place:
    """What a unit of the result is."""
    parts, roles = plan.parts, plan.roles
    group, row_part, lane_part = f.split(unit, [roles.groups, parts.row_parts, parts.lane_parts])
    row = f.mul(row_part, parts.row_part)
    first_row = f.min(row, roles.row_channels - parts.row_part)
    return Place(group, row, first_row, f.mul(lane_part, parts.lane_part), 0)


def with_stop(f: Function, plan: WeightGradient, here: Place) -> Place:
    """The same, with the end of its blocks of lanes."""
    return here._replace(lane_stop=f.min(f.add(here.lane_start, plan.parts.lane_part), plan.roles.blocks))


# Packers.


def packers(m: Module, plan: WeightGradient) -> dict[str, Function]:
    """The functions that pack the sides for a box; a side that is read in place has none."""
    n = inputs(plan)
    clear = zero(m, n)
    if plan.roles.pairs:
        n = replace(n, sum="i16")  # pairs are packed as they are
        clear = zero(m, n, "zero_packed")
    found = {}
    for side in (plan.x, plan.y):
        if side.mode is not Mode.IN_PLACE:
            lanes = n.lanes * (plan.roles.per_step if side.mode is Mode.ROWS else 1)
            found[side.name] = pack_box(m, replace(n, lanes=lanes), side.pack, clear)
    return found


# A box.


def pack_sides(
    f: Function, plan: WeightGradient, tensors: dict[str, str], at: dict[str, str],
    functions: dict[str, Function], where: tuple[Place, Sequence[Value]],
) -> dict[str, str]:  # fmt: skip
    """Pack a box of both sides; gives where tiles read them. `where` is the task, and the first pixel of the box."""
    here, start = where
    addresses, storage = {}, inputs(plan).storage
    for side in (plan.x, plan.y):
        begin, packer = _corner(f, side, start), functions.get(side.name)
        tensor, base = tensors[side.name], f.mul(here.group, side.channel[0])
        if packer is None:
            shift = [f.mul(b, p.stride) for b, p in zip(begin, side.packs, strict=True)]
            first = f.mul(here.lane_start, side.at_once) if side.by_block else here.first_row
            addresses[side.name] = f.at(tensor, f.add(base, f.mul(first, side.channel[1]), *shift), storage)
            continue
        to = addresses[side.name] = at[side.name]
        begin = [f.add(*(f.mul(begin[i], size) for i, size in terms)) for terms in side.starts]
        raw = [at[f"{side.name}_raw"]] if side.pairs_by_copy else []
        if not side.by_block:
            source = f.at(tensor, f.add(base, f.mul(here.first_row, side.channel[1])), storage)
            f.call(packer, source, to, *begin, side.at_once, *raw)
            continue
        with f.loop(here.lane_start, here.lane_stop) as block:
            first = f.mul(block, side.at_once)
            count = f.min(f.sub(side.channels, first), side.at_once)
            source = f.at(tensor, f.add(base, f.mul(first, side.channel[1])), storage)
            part = f.at(to, f.mul(f.sub(block, here.lane_start), side.size), plan.sum)
            f.call(packer, source, part, *begin, count, *raw)
    return addresses


def _corner(f: Function, side: Side, start: Sequence[Value]) -> list[Value]:
    """Where a side begins, along each axis, for a box of y that begins there."""
    return [f.add(f.mul(s, g), low) for s, g, low in zip(start, side.in_stride, side.low, strict=True)]


def of_block(f: Function, plan: WeightGradient, packed: dict[str, str], local: Value) -> list[str]:
    """The sides in the rows and in the lanes, for one of a task's blocks of lanes."""
    found = []
    for side in plan.sides:
        address = packed[side.name]
        if side.by_block:
            size = plan.block if side.mode is Mode.IN_PLACE else side.size
            address = f.at(address, f.mul(local, size), plan.sum)
        found.append(address)
    return found


def next_box(
    f: Function, plan: WeightGradient, tensors: dict[str, str], here: Place, start: Sequence[Value]
) -> list[str]:
    """Where x and y begin for a box, with the channels of a task."""
    found = []
    for side in (plan.x, plan.y):
        begin = _corner(f, side, start)
        lanes = f.mul(here.lane_start, side.at_once if side.by_block else plan.block)
        first = lanes if side.by_block else here.first_row
        shift = [f.mul(b, p.stride) for b, p in zip(begin, side.packs, strict=True)]
        at = f.add(f.mul(here.group, side.channel[0]), f.mul(first, side.channel[1]), *shift)
        found.append(f.at(tensors[side.name], at, inputs(plan).storage))
    return found
