"""The kernel of a weight gradient: loops over tasks, boxes of pixels, blocks of lanes, register tiles and taps.

Tasks sum over the boxes of one slice. If there are several slices, their sums are then added, in order.
"""

from __future__ import annotations

from typing import NamedTuple

from ..emit.frame import Frame
from ..emit.prefetch import portion_of
from ..emit.slices import add_slices
from ..ir.builder import Function, Module, Value
from .records import Boxes, WeightGradient
from .sides import Place, inputs, next_box, of_block, pack_sides, packers, place, results, with_stop
from .tile import tiles
from .write import write_sums


class _Kernel(NamedTuple):
    """What the loops need: the plan, the frame, addresses of tensors, functions to call, and tables of the taps."""

    plan: WeightGradient
    frame: Frame
    tensors: dict[str, str]
    packers: dict[str, Function]
    tile: Function
    last_tile: Function | None
    write_sums: Function | None  # None: tiles write all sums themselves
    entries: str
    ranges: str


class _Box(NamedTuple):
    """A box of a task."""

    start: list[Value]
    counts: list[Value]  # pixels along each axis
    packed: dict[str, str]  # where tiles read the two sides
    first: Value  # 1 for the first box of the task, whose sums begin at zero
    last: Value  # 1 for the last one, with which they are whole
    sums: str  # of the task
    taps: tuple[Value, Value]  # of the task: the first, and the one after the last
    coming: list[str]  # where the next box begins in the tensors, to be prefetched


class _Block(NamedTuple):
    """A block of lanes of a task."""

    number: Value  # in its group
    local: Value  # in the task
    rows: str  # where tiles read the side in the rows
    lanes: str  # and the one in the lanes


def write(plan: WeightGradient) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    k = _kernel(m, plan)
    frame = k.frame
    if plan.prefetch is not None:
        frame.list_lines(plan.prefetch)
    with frame.items("first", plan.tasks) as task:
        _sum_task(k, task)
    if plan.boxes.slices > 1:
        frame.barrier()
        with frame.items("second", plan.units * plan.parts.tiles) as item:
            _add_slices(k, item)
    return frame.end(stream=plan.output.stream)


def _kernel(m: Module, plan: WeightGradient) -> _Kernel:
    """Write the functions and the tables that the loops use."""
    packer = packers(m, plan)
    entries = m.table("tap_entries", plan.taps.entries)
    weights = m.table("tap_weights", plan.taps.weights)
    ranges = m.table("tap_ranges", [end for tap in plan.taps.ranges.valid for ends in tap for end in ends])
    body, last = tiles(m, plan, entries)
    writer = None if plan.output.direct else write_sums(m, plan, weights)

    frame = Frame(m, plan.buffers, plan.sum)
    tensors = {name: frame.tensors[role] for name, role in zip("xyw", plan.tensors.names, strict=True)}
    return _Kernel(plan, frame, tensors, packer, body, last, writer, entries, ranges)


def _sum_task(k: _Kernel, task: Value) -> None:
    """Sum over the boxes of a task, and write the sums, unless tiles do or there are other slices."""
    f, plan, boxes = k.frame.f, k.plan, k.plan.boxes
    unit, tap_part, part = f.split(task, [plan.units, plan.parts.tap_parts, boxes.slices])
    here = with_stop(f, plan, place(f, plan, unit))
    if boxes.slices == 1:
        sums = k.frame.at["accumulators"]
    else:
        number = task if plan.parts.tap_parts == 1 else f.add(f.mul(unit, boxes.slices), part)
        sums = f.at(k.frame.at["sums"], f.mul(number, plan.task_sums), plan.sum)
    tap = f.mul(tap_part, plan.tap_part)
    taps = (tap, f.min(f.add(tap, plan.tap_part), plan.tile_taps))
    first, last = (f.div(f.mul(p, boxes.number), boxes.slices) for p in (part, f.add(part, 1)))
    with f.loop(first, last) as box:
        start, counts = _start(f, boxes, box), []
        for size, at, most in zip(boxes.sizes, start, boxes.box, strict=True):
            counts.append(f.min(f.sub(size, at), most) if size != most else most)
        packed = pack_sides(f, plan, k.tensors, k.frame.at, k.packers, (here, start))
        begins = f.choose(f.test("eq", box, first), 1, 0)
        ends = f.choose(f.test("eq", box, f.sub(last, 1)), 1, 0)
        coming = _coming(k, task, box, last)
        with f.loop(here.lane_start, here.lane_stop) as block:
            _sum_block(k, here, _Box(start, counts, packed, begins, ends, sums, taps, coming), block)
    if boxes.slices == 1:
        _write(k, here, sums, (0, plan.parts.tiles), taps)


def _start(f: Function, boxes: Boxes, box: Value) -> list[Value]:
    """The first pixel of a box."""
    return [f.mul(b, size) for b, size in zip(f.split(box, boxes.counts), boxes.box, strict=True)]


def _coming(k: _Kernel, task: Value, box: Value, last: Value) -> list[str]:
    """Where the box after this one begins in the tensors that are prefetched: one of this task or of the following."""
    f, plan, boxes = k.frame.f, k.plan, k.plan.boxes
    if plan.prefetch is None:
        return []
    following = k.frame.following(task, plan.tasks)
    more = f.test("slt", f.add(box, 1), last)
    unit, _, part = f.split(f.choose(more, task, following), [plan.units, plan.parts.tap_parts, boxes.slices])
    here = place(f, plan, unit)
    first = f.div(f.mul(part, boxes.number), boxes.slices)
    start = _start(f, boxes, f.choose(more, f.add(box, 1), first))
    return next_box(f, plan, k.tensors, here, start)[-len(plan.prefetch.regions) :]


def _sum_block(k: _Kernel, here: Place, box: _Box, number: Value) -> None:
    """Add the products of a box to the sums of a block of lanes, tile by tile."""
    f, plan, tiles = k.frame.f, k.plan, k.plan.parts.tiles
    local = f.sub(number, here.lane_start)
    block = _Block(number, local, *of_block(f, plan, box.packed, local))
    with f.loop(0, tiles) as t:
        if plan.roles.lane_groups is None:
            _sum_taps(k, here, box, block, t)
        else:
            index = f.add(f.mul(local, tiles), t)
            sums = f.at(box.sums, f.mul(index, plan.tile_sums), plan.sum)
            tap = f.mul(t, plan.parts.tap_step)
            f.call(k.tile, block.rows, block.lanes, sums, box.first, tap, *box.counts, *_lines(k, box, index))


def _sum_taps(k: _Kernel, here: Place, box: _Box, block: _Block, t: Value) -> None:
    """Add the products of a box to the sums of tile t of a block, tap by tap."""
    f, plan = k.frame.f, k.plan
    row_side, _ = plan.sides
    row = f.min(f.mul(t, plan.rows), plan.parts.row_part - plan.rows)
    with f.loop(*box.taps) as tap:
        entry = f.load(f.at(k.entries, tap, "i64"), "i64", 8)
        index, sums = _tile_sums(k, box, block, t, tap)
        x_at, y_at, counts, odd = _inside(k, box, tap)
        x_at = f.add(x_at, entry)
        row_at, lane_at = (x_at, y_at) if row_side is plan.x else (y_at, x_at)
        destination = _destination(k, here, block, row, box.last) if plan.output.direct else []
        rows = f.at(block.rows, f.add(f.mul(row, row_side.row_step), row_at), plan.row_unit)
        lanes = f.at(block.lanes, lane_at, plan.sum)
        last = f.test("eq", block.number, plan.roles.blocks - 1)
        arguments = (rows, lanes, sums, box.first, *counts, *odd, *destination, *_lines(k, box, index))
        f.call_either(last, k.last_tile, k.tile, *arguments)


def _tile_sums(k: _Kernel, box: _Box, block: _Block, t: Value, tap: Value) -> tuple[Value, str]:
    """The number of the call of a tile in its box, for tile t of a block and a tap, and where its sums are."""
    f, plan = k.frame.f, k.plan
    call = f.add(f.mul(f.add(f.mul(block.local, plan.parts.tiles), t), len(plan.taps.weights)), tap)
    return call, f.at(box.sums, f.mul(call, plan.rows * plan.block), plan.sum)


def _destination(k: _Kernel, here: Place, block: _Block, row: Value, whole: Value) -> list[Value]:
    """Where a tile writes its sums in w, how many lanes it has, and whether they are whole."""
    f, plan = k.frame.f, k.plan
    group, row_step, _ = plan.output.strides
    lane = f.mul(block.number, plan.block)
    at = f.mul(f.add(here.first_row, row), row_step)
    address = f.at(k.tensors["w"], f.add(f.mul(here.group, group), at, lane), results(plan).elements.storage)
    return [address, f.min(f.sub(plan.roles.lane_channels, lane), plan.block), whole]


def _lines(k: _Kernel, box: _Box, call: Value) -> tuple[str, ...]:
    """What a tile prefetches in its call of that number."""
    if k.plan.prefetch is None:
        return ()
    return portion_of(k.frame.f, k.plan.prefetch, k.frame.at["lines"], call, box.coming)


def _inside(k: _Kernel, box: _Box, tap: Value) -> tuple[Value, Value, list[Value], list[Value]]:
    """The part of a box for which a tap is inside x: elements to it in x and in y as tiles read them, and its counts.

    Of ragged pairs also whether the first pixel of the first pair is outside, and whether the last pair has only one.
    """
    f, plan = k.frame.f, k.plan
    x_at: Value = 0
    y_at: Value = 0
    inside: list[Value] = []
    odd: list[Value] = []
    for axis, count in enumerate(box.counts):
        paired = plan.roles.pairs and axis == len(box.counts) - 1
        if plan.always_inside(axis):
            inside.append(f.div(f.add(count, 1), 2) if paired else count)
            odd = [0, f.rem(count, 2)] if paired and plan.ragged else odd
            continue
        at = f.at(k.ranges, f.add(f.mul(tap, 2 * len(box.counts)), 2 * axis), "i64")
        low, high = (f.sub(f.load(f.at(at, i, "i64"), "i64", 8), box.start[axis]) for i in range(2))
        low = f.max(low, 0)
        high = f.min(high, count)
        if paired:
            # Pairs begin at even pixels; where the first of a pair is outside, the packed x is zero.
            odd = [f.rem(low, 2), f.rem(f.max(high, 0), 2)] if plan.ragged else []
            low, high = f.div(low, 2), f.div(f.max(f.add(high, 1), 0), 2)
        inside.append(f.sub(high, low))
        x_at = f.add(x_at, f.mul(low, plan.x.steps[axis]))
        y_at = f.add(y_at, f.mul(low, plan.y.steps[axis]))
    return x_at, y_at, inside, odd


# Slices of the sum.


def _add_slices(k: _Kernel, item: Value) -> None:
    """Add the sums of all slices for one tile of each block of lanes, in order, and write them."""
    f, plan = k.frame.f, k.plan
    unit, tile = f.split(item, [plan.units, plan.parts.tiles])
    here = with_stop(f, plan, place(f, plan, unit))
    sums = f.at(k.frame.at["sums"], f.mul(unit, plan.boxes.slices * plan.task_sums), plan.sum)
    size = plan.tile_sums
    with f.loop(0, f.sub(here.lane_stop, here.lane_start)) as local, f.loop(0, size, plan.lanes) as inner:
        i = f.add(f.mul(f.add(f.mul(local, plan.parts.tiles), tile), size), inner)
        add_slices(f, inputs(plan), sums, i, plan.boxes.slices, plan.task_sums)
    _write(k, here, sums, (tile, f.add(tile, 1)), (0, plan.tile_taps))


def _write(k: _Kernel, here: Place, sums: str, tiles: tuple[Value, Value], taps: tuple[Value, Value]) -> None:
    """Write the sums of some tiles and taps of a task, unless the tiles have done that."""
    if k.write_sums is None:
        return
    data: list[Value] = [k.tensors["x"], k.tensors["y"]] if k.plan.repairs else []
    data += taps if k.plan.parts.tap_parts > 1 else ()
    k.frame.f.call(k.write_sums, sums, k.tensors["w"], *here, *tiles, *data)
