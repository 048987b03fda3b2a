"""Code for a Reduce plan: w, each weight summing over all pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod

from ..emit.frame import Frame, buffers
from ..emit.nan_repair import NanRepair
from ..emit.prefetch import Fetch, prefetch_contiguous, slice_of
from ..emit.store import Results
from ..emit.tile import Tile
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import size_of
from ..pack.box import PackBox, Pairing, transposable
from ..pack.rows import pack_box, zero
from ..pack.unpack import Square, transposed_sums, unpack_square
from ..plan.records import Reduce
from ..target import LINE

_COUNTS = ("i:n0", "i:n1", "i:n2", "i:n3")


def _fetch(plan: Reduce) -> tuple[str, ...]:
    """Arguments of a tile that fetches lines."""
    return () if plan.prefetch is None else ("p:base", "p:offsets")


def write(plan: Reduce) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    given = Elements(plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
    result = Elements(plan.out_dtype, plan.lanes, plan.sum, plan.converts_f16, plan.pairs and not plan.accumulate)
    moved_as = Elements(plan.dtype, plan.lanes, "i16", plan.converts_f16) if plan.pairs else given
    clear = zero(m, given)
    clear_packed = zero(m, moved_as, "zero_packed") if plan.pairs else clear
    packers: dict[str, Function | None] = {"x": None, "y": None}
    in_block = plan.block if plan.clane % plan.block == 0 else None
    inputs, outputs = plan.share or (1, 1)
    for side, channel, pitch, join in (
        ("x", plan.x_channel, plan.x_pitch, plan.x_join),
        ("y", plan.y_channel, plan.y_pitch, plan.y_join),
    ):
        if plan.lies(side):
            continue
        packs, starts, twin = plan.packing(side)
        known = in_block and (in_block // outputs * inputs if side == "x" else in_block)
        if side == plan.row_side and not plan.share:
            known = plan.row_part
        pairing = Pairing.IMAGES if twin is not None else Pairing(plan.joining(side))
        packing = PackBox(f"pack_{side}", packs, channel[1], pitch, known, pairing=pairing, pair=join, image_step=twin)
        moved = moved_as
        if plan.strings(side):
            columns, _ = starts[-1][-1]
            first = plan.x_low[columns] if side == "x" and plan.box_counts[columns] == 1 else None
            moved = replace(moved_as, lanes=2 * plan.lanes) if plan.pairs else moved_as
            packing = replace(packing, row_packed=True, first=first)
        packers[side] = pack_box(m, moved, packing, clear_packed)
    tap_entries = m.table("tap_entries", plan.entries)
    tap_weights = m.table("tap_weights", plan.taps)
    reach = m.table("reach", [end for tap in plan.reach for ends in tap for end in ends])
    work = _shared_tile(m, plan, tap_entries) if plan.share else _tile(m, "tile", plan, result, plan.vectors)
    tail = _tile(m, "tile_tail", plan, result, plan.tail) if plan.tail else None
    write_sums = _write_sums(m, plan, given, result, tap_weights)

    frame = Frame(m, buffers(plan.sizes), plan.sum)
    f, at = frame.f, frame.at
    pointers = {name: frame.tensors[role] for name, role in zip("xyw", plan.operands, strict=True)}
    boxes = plan.box_counts
    total = prod(boxes)
    data = [pointers["x"], pointers["y"]] if plan.mends else []
    if plan.prefetch is not None:
        frame.list_lines(plan.prefetch)

    with frame.items("first", plan.tasks) as task:
        unit, part = f.split(task, [plan.tasks // plan.slices, plan.slices])
        group, row, first_row, lane_start = _place(f, plan, unit)
        lane_stop = f.min(f.add(lane_start, plan.lane_part), plan.lane_blocks)
        slab = at["slab"] if plan.slices == 1 else f.at(at["sums"], f.mul(task, plan.slab), plan.sum)
        first_box, last_box = (f.div(f.mul(p, total), plan.slices) for p in (part, f.add(part, 1)))
        with f.loop(first_box, last_box) as box:
            place = f.split(box, boxes)
            start = [f.mul(b, size) for b, size in zip(place, plan.box, strict=True)]
            counts = [
                f.min(f.sub(n, s), b) if n != b else b for n, s, b in zip(plan.sizes_y, start, plan.box, strict=True)
            ]
            bands = _bands(f, plan, pointers, at, given, packers, group, first_row, lane_start, lane_stop, start)
            fresh = f.test("eq", box, first_box)
            begin = f.choose(fresh, 1, 0)
            complete = f.choose(f.test("eq", box, f.sub(last_box, 1)), 1, 0)
            coming: list[str] = []
            if plan.prefetch is not None:
                following = frame.following(task, plan.tasks)
                both = _coming(f, plan, pointers, given, task, following, box, last_box)
                coming = both[-len(plan.prefetch.regions) :]

            def fetched(call: Value, coming: list[str] = coming) -> tuple[str, ...]:
                return () if plan.prefetch is None else slice_of(f, plan.prefetch, at["lines"], call, coming)

            with f.loop(lane_start, lane_stop) as block:
                local = f.sub(block, lane_start)
                row_band, lanes = _operands(f, plan, bands, local)
                with f.loop(0, plan.tiles) as t:
                    if plan.share:
                        index = f.add(f.mul(local, plan.tiles), t)
                        sums = f.at(slab, f.mul(index, plan.rows * plan.block), plan.sum)
                        f.call(work, row_band, lanes, sums, begin, f.mul(t, plan.tap_step), *counts, *fetched(index))
                    else:
                        row_channel = f.min(f.mul(t, plan.rows), plan.row_part - plan.rows)
                        with f.loop(0, len(plan.taps)) as tap:
                            entry = f.load(f.at(tap_entries, tap, "i64"), "i64", 8)
                            index = f.add(f.mul(f.add(f.mul(local, plan.tiles), t), len(plan.taps)), tap)
                            sums = f.at(slab, f.mul(index, plan.rows * plan.block), plan.sum)
                            x_part, y_part, inside, odd = _inside(f, plan, reach, tap, start, counts)
                            x_part = f.add(x_part, entry)
                            a, b = (x_part, y_part) if plan.row_side == "x" else (y_part, x_part)
                            target: tuple[Value, ...] = ()
                            if plan.direct:
                                lane = f.mul(block, plan.block)
                                own = f.mul(f.add(first_row, row_channel), plan.w_strides[1])
                                place_at = f.at(
                                    pointers["w"], f.add(f.mul(group, plan.w_strides[0]), own, lane), result.storage
                                )
                                target = (place_at, f.min(f.sub(plan.clane, lane), plan.block), complete)
                            row_base = f.at(row_band, f.add(f.mul(row_channel, plan.row_step), a), plan.row_unit)
                            arguments = (row_base, f.at(lanes, b, plan.sum), sums, begin, *inside, *odd, *target)
                            last_block = f.test("eq", block, plan.lane_blocks - 1)
                            f.call_either(last_block, tail, work, *arguments, *fetched(index))
        if plan.slices == 1 and not plan.direct:
            f.call(write_sums, slab, pointers["w"], group, row, first_row, lane_start, lane_stop, 0, plan.tiles, *data)
    if plan.slices > 1:
        frame.barrier()
        units = plan.tasks // plan.slices
        with frame.items("second", units * plan.tiles) as item:
            of, tile = f.split(item, [units, plan.tiles])
            group, row, first_row, lane_start = _place(f, plan, of)
            lane_stop = f.min(f.add(lane_start, plan.lane_part), plan.lane_blocks)
            slab = f.at(at["sums"], f.mul(of, plan.slices * plan.slab), plan.sum)
            size = plan.slab // plan.lane_part // plan.tiles
            with f.loop(0, f.sub(lane_stop, lane_start)) as local, f.loop(0, size, plan.lanes) as inner:
                i = f.add(f.mul(f.add(f.mul(local, plan.tiles), tile), size), inner)
                sum_ = f.load(f.at(slab, i, plan.sum), given.vector, size_of(plan.sum))
                for s in range(1, plan.slices):
                    more = f.load(f.at(slab, f.add(i, s * plan.slab), plan.sum), given.vector, size_of(plan.sum))
                    sum_ = f.op(f"fadd {given.vector} {sum_}, {more}")
                f.store(sum_, f.at(slab, i, plan.sum), given.vector, size_of(plan.sum))
            tiles = (tile, f.add(tile, 1))
            f.call(write_sums, slab, pointers["w"], group, row, first_row, lane_start, lane_stop, *tiles, *data)
    return frame.end(stream=plan.stream)


def _coming(
    f: Function, plan: Reduce, pointers: dict[str, str], given: Elements, task: Value, following: Value, box: Value,
    last_box: Value,
) -> list[str]:  # fmt: skip
    """Where the next box begins in x and in y: that of this task, or the first of the following one."""
    total = prod(plan.box_counts)
    more = f.test("slt", f.add(box, 1), last_box)
    unit, part = f.split(f.choose(more, task, following), [plan.tasks // plan.slices, plan.slices])
    group, _, first_row, lane_start = _place(f, plan, unit)
    first_box = f.div(f.mul(part, total), plan.slices)
    box = f.choose(more, f.add(box, 1), first_box)
    start = [f.mul(b, size) for b, size in zip(f.split(box, plan.box_counts), plan.box, strict=True)]
    corner = [f.add(f.mul(s, g), low) for s, g, low in zip(start, plan.x_in_stride, plan.x_low, strict=True)]
    found = []
    for side, channel, begin, packs in (
        ("x", plan.x_channel, corner, plan.x_packs),
        ("y", plan.y_channel, start, plan.y_packs),
    ):
        inputs, outputs = plan.share if plan.share and side == "x" else (1, 1)
        first = f.mul(lane_start, plan.block // outputs * inputs)
        if side == plan.row_side and not plan.share:
            first = first_row
        shift = [f.mul(b, p.stride) for b, p in zip(begin, packs, strict=True)]
        at = f.add(f.mul(group, channel[0]), f.mul(first, channel[1]), *shift)
        found.append(f.at(pointers[side], at, given.storage))
    return found


def _inside(
    f: Function, plan: Reduce, reach: str, tap: Value, start: list[Value], counts: list[Value]
) -> tuple[Value, Value, list[Value], list[Value]]:
    """The part of a box that a tap meets inside x: elements into the bands of x and y, and its counts.

    Of ragged pairs also whether the first of the first pair is not met, and whether the second of the last is not.
    """
    odd: list[Value] = []
    x_part: Value = 0
    y_part: Value = 0
    inside: list[Value] = []
    for axis, count in enumerate(counts):
        paired = plan.pairs and axis == 3
        if all(ends[axis] == (0, plan.sizes_y[axis]) for ends in plan.reach):
            inside.append(f.div(f.add(count, 1), 2) if paired else count)
            odd = [0, f.rem(count, 2)] if paired and plan.ragged else odd
            continue
        at = f.at(reach, f.add(f.mul(tap, 8), 2 * axis), "i64")
        low, high = (f.sub(f.load(f.at(at, i, "i64"), "i64", 8), start[axis]) for i in range(2))
        low = f.max(low, 0)
        high = f.min(high, count)
        if paired:
            # Pairs begin at even pixels; where the first of a pair is not met, x is zero in the band.
            odd = [f.rem(low, 2), f.rem(f.max(high, 0), 2)] if plan.ragged else []
            low, high = f.div(low, 2), f.div(f.max(f.add(high, 1), 0), 2)
        inside.append(f.sub(high, low))
        x_part = f.add(x_part, f.mul(low, plan.x_walk[axis]))
        y_part = f.add(y_part, f.mul(low, plan.y_walk[axis]))
    return x_part, y_part, inside, odd


def _place(f: Function, plan: Reduce, unit: Value) -> tuple[Value, Value, Value, Value]:
    """What a task computes: its group, its first row, the row its bands begin with, and its first block of lanes.

    The last part begins early, so that every part has the same number of rows; it leaves out what is not its own.
    """
    group, row_part, lane_part = f.split(unit, [plan.groups, plan.row_parts, plan.lane_parts])
    row = f.mul(row_part, plan.row_part)
    return group, row, f.min(row, plan.crow - plan.row_part), f.mul(lane_part, plan.lane_part)


def _bands(
    f: Function, plan: Reduce, pointers: dict[str, str], at: dict[str, str], given: Elements,
    packers: dict[str, Function | None], group: Value, first_row: Value, lane_start: Value,
    lane_stop: Value, start: list[Value],
) -> dict[str, str]:  # fmt: skip
    """Pack a box of both sides; a side that is read in place gives its address."""
    bands = {}
    corner = [f.add(f.mul(s, g), low) for s, g, low in zip(start, plan.x_in_stride, plan.x_low, strict=True)]
    for side, channel, begin in (("x", plan.x_channel, corner), ("y", plan.y_channel, list(start))):
        packer = packers[side]
        raw = [at[f"{side}_raw"]] if plan.joining(side) == "copy" else []
        base = f.add(f.mul(group, channel[0]))
        if packer is None:
            steps = [p.stride for p in (plan.x_packs if side == "x" else plan.y_packs)]
            shift = [f.mul(b, s) for b, s in zip(begin, steps, strict=True)]
            first = first_row if side == plan.row_side else f.mul(lane_start, plan.block)
            bands[side] = f.at(pointers[side], f.add(base, f.mul(first, channel[1]), *shift), given.storage)
            continue
        bands[side] = at[f"{side}"]
        begin = [f.add(*(f.mul(begin[i], size) for i, size in terms)) for terms in plan.packing(side).starts]
        if side == plan.row_side and not plan.share:
            source = f.at(pointers[side], f.add(base, f.mul(first_row, channel[1])), given.storage)
            f.call(packer, source, bands[side], *begin, plan.row_part, *raw)
            continue
        entries = plan.x_steps * plan.x_pitch if side == "x" else plan.y_steps * plan.y_pitch
        inputs, outputs = plan.share if plan.share and side == "x" else (1, 1)
        with f.loop(lane_start, lane_stop) as block:
            first = f.mul(block, plan.block // outputs * inputs)
            count = f.min(f.sub(plan.clane // outputs * inputs, first), plan.block // outputs * inputs)
            source = f.at(pointers[side], f.add(base, f.mul(first, channel[1])), given.storage)
            to = f.at(bands[side], f.mul(f.sub(block, lane_start), entries), plan.sum)
            f.call(packer, source, to, *begin, count, *raw)
    return bands


def _operands(f: Function, plan: Reduce, bands: dict[str, str], local: Value) -> tuple[str, str]:
    """The row side and the lane side of one block of lanes."""
    if plan.share:
        x = f.at(bands["x"], f.mul(local, plan.x_steps * plan.x_pitch), plan.sum)
        return x, f.at(bands["y"], f.mul(local, plan.y_steps * plan.y_pitch), plan.sum)
    lane_side = "y" if plan.row_side == "x" else "x"
    entries = plan.x_steps * plan.x_pitch if lane_side == "x" else plan.y_steps * plan.y_pitch
    if plan.lanes_in_place:
        entries = plan.block
    return bands[plan.row_side], f.at(bands[lane_side], f.mul(local, entries), plan.sum)


@contextmanager
def _pixels(
    f: Function, plan: Reduce, counts: Sequence[Value], pointers: Sequence[str], steps: Sequence[Sequence[int]],
    units: Sequence[str],
) -> Iterator[tuple[list[str], Value]]:  # fmt: skip
    """Walk over the pixels of a box, in order; gives the addresses at each, and its place along the last axis."""
    with ExitStack() as stack:
        now = list(pointers)
        i: Value = 0
        for axis in range(4):
            if plan.box[axis] > 1 or any(ends[axis] != (0, plan.sizes_y[axis]) for ends in plan.reach):
                i = stack.enter_context(f.loop(0, counts[axis]))
                now = [f.at(p, f.mul(i, s[axis]), u) for p, s, u in zip(now, steps, units, strict=True)]
            else:
                i = 0
        yield now, i


def _begin(f: Function, plan: Reduce, vectors: int, sums: str, fresh: Value, align: int) -> Tile:
    """A tile with the sums so far; `fresh` is 1 for the first box, whose sums begin at zero."""
    tile = Tile(f, [["zeroinitializer"] * vectors for _ in range(plan.rows)], plan.lanes, plan.sum)
    _go_on(f, plan, tile, sums, fresh, align)
    return tile


def _go_on(f: Function, plan: Reduce, tile: Tile, sums: str, fresh: Value, align: int) -> None:
    """Fill a tile of zeros with the sums so far."""
    kind = tile.kind
    with f.when(f.test("eq", fresh, 0)):
        for r, row in enumerate(tile.places):
            for v, place in enumerate(row):
                at = f.at(sums, r * plan.block + v * plan.lanes, plan.sum)
                f.set(place, kind, f.load(at, kind, align))


def _end(f: Function, plan: Reduce, tile: Tile, sums: str, align: int) -> None:
    for r, row in enumerate(tile.values()):
        for v, value in enumerate(row):
            f.store(value, f.at(sums, r * plan.block + v * plan.lanes, plan.sum), tile.kind, align)


def _align(plan: Reduce) -> int:
    size = plan.lanes * size_of(plan.sum)
    return min(LINE, size & -size)


def _tile(m: Module, name: str, plan: Reduce, result: Elements, vectors: int) -> Function:
    """A function that adds a box's products to one tile of so many vectors.

    (rows, lanes, sums, fresh, counts of each axis; then, of ragged pairs, which ends are odd; then, if it writes whole
    sums, where to, lanes left, whether whole).
    """
    ends = ["i:low", "i:high"] if plan.ragged else []
    direct = ["p:to", "i:left", "i:complete"] if plan.direct else []
    f = m.function(name, ["p:rows", "p:lanes", "p:sums", "i:fresh", *_COUNTS, *ends, *direct, *_fetch(plan)])
    rows, lanes, sums, fresh, *rest = f.args
    counts, rest = rest[:4], rest[4:]
    odd, rest = rest[: len(ends)], rest[len(ends) :]
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *rest[-2:])
    align = _align(plan)
    places = [f.at(rest[0], r * plan.w_strides[1], result.storage) for r in range(plan.rows)] if plan.direct else []
    if plan.asks_for_results and places:
        with f.when(f.test("ne", rest[2], 0)):
            for place in places:
                prefetch_contiguous(f, place, vectors * result.bytes)
    tile = _begin(f, plan, vectors, sums, fresh, align)
    maps = (plan.x_walk, plan.y_walk) if plan.row_side == "x" else (plan.y_walk, plan.x_walk)
    units = (plan.row_unit, plan.sum)
    lane_align = plan.item if plan.lanes_in_place else align

    def in_rows(a: str) -> list[str]:
        return [f.at(a, r * plan.row_step, plan.row_unit) for r in range(plan.rows)]

    with _pixels(f, plan, counts, (rows, lanes), maps, units) as ((a, b), _):
        if fetch is not None:
            fetch.step()
        add = tile.add_pairs if plan.pairs else tile.add_broadcast
        add(in_rows(a), b, lane_align)
    if plan.ragged:
        # A pixel that is not met is paired with data: zero times an infinity is NaN. Then once more, without it.
        with f.when(tile.may_be_nan()):
            tile.set([["zeroinitializer"] * vectors] * plan.rows)
            _go_on(f, plan, tile, sums, fresh, align)
            with _pixels(f, plan, counts, (rows, lanes), maps, units) as ((a, b), i):
                first = f.both(f.test("eq", i, 0), f.test("ne", odd[0], 0))
                last = f.both(f.test("eq", i, f.sub(counts[3], 1)), f.test("ne", odd[1], 0))
                second = f.op(f"select i1 {first}, i32 -65536, i32 -1")
                keep = f.op(f"select i1 {last}, i32 65535, i32 -1")
                tile.add_pairs(in_rows(a), b, lane_align, f.op(f"and i32 {second}, {keep}"))
    if plan.direct:
        branch = f.either(f.test("ne", rest[2], 0))
        Results(result, stream=plan.stream).store_rows(f, tile.values(), places, rest[1])
        f.otherwise(branch)
        _end(f, plan, tile, sums, align)
        f.join(branch)
    else:
        _end(f, plan, tile, sums, align)
    return f


def _shared_tile(m: Module, plan: Reduce, entries: str) -> Function:
    """The same where groups share the lanes: rows are taps, and channels of x within a group.

    (x, y, sums, fresh, first tap, counts of each axis). Taps beyond the last repeat it.
    """
    if plan.share is None:
        raise ValueError("groups do not share lanes in this plan")
    inputs, outputs = plan.share
    f = m.function("tile", ["p:x", "p:y", "p:sums", "i:fresh", "i:tap", *_COUNTS, *_fetch(plan)])
    x, y, sums, fresh, tap, *rest = f.args
    counts = rest[:4]
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *rest[4:])
    align = _align(plan)
    tile = _begin(f, plan, plan.vectors, sums, fresh, align)
    last = len(plan.taps) - 1
    shifted = []
    for i in range(plan.tap_step):
        entry = f.load(f.at(entries, f.min(f.add(tap, i), last), "i64"), "i64", 8)
        shifted.append(f.at(x, entry, plan.sum))
    steps = [plan.x_walk] * plan.tap_step + [plan.y_walk]
    with _pixels(f, plan, counts, [*shifted, y], steps, [plan.sum] * len(steps)) as (here, _):
        if fetch is not None:
            fetch.step()
        tile.add_tap_groups(here[:-1], here[-1], align, inputs, outputs)
    _end(f, plan, tile, sums, align)
    return f


def _mend_sums(m: Module, plan: Reduce, n: Elements) -> Function:
    """A function that mends the sums of a tile where groups share the lanes: (sums, block, which tile, lanes, x, y)."""
    if plan.share is None:
        raise ValueError("groups do not share lanes in this plan")
    inputs, outputs = plan.share
    x_step, y_step = plan.x_channel[1], plan.y_channel[1]
    mend = NanRepair(m, plan.tap_ranges, n, plan.share, (x_step, y_step), plan.block)
    f = m.function("mend_sums", ["p:sums", "i:block", "i:tile", "i:lanes", "p:x", "p:y"])
    sums, block, tile, lanes, x, y = f.args
    first = f.mul(tile, plan.tap_step)
    with f.loop(0, f.min(f.sub(len(plan.taps), first), plan.tap_step)) as step, f.loop(0, lanes, plan.lanes) as lane:
        at = f.at(sums, f.add(f.mul(step, inputs * plan.block), lane), plan.sum)
        channel = f.add(f.mul(block, plan.block), lane)
        x_at = f.at(x, f.mul(f.mul(f.div(channel, outputs), inputs), x_step), n.storage)
        y_at = f.at(y, f.mul(channel, y_step), n.storage)
        mend.repair(f, x_at, y_at, f.add(first, step), at, f.min(f.sub(lanes, lane), plan.lanes))
    return f


def _write_sums(m: Module, plan: Reduce, given: Elements, n: Elements, tap_weights: str) -> Function:
    """A function that writes a task's sums to w.

    (sums, w, group, first own row, first row, lane blocks from, to, tiles from, to; then, to mend sums, x and y).
    """
    names = ["p:sums", "p:to", "i:group", "i:own", "i:first", "i:from", "i:until", "i:top", "i:bottom"]
    mend = _mend_sums(m, plan, given) if plan.mends else None
    f = m.function("write_sums", [*names, "p:x", "p:y"] if mend else names)
    sums, to, group, own, first, lane_from, lane_until, top, bottom, *data = f.args
    group_step, row_step, lane_step = plan.w_strides
    taps = plan.tap_step if plan.share else len(plan.taps)
    square = transposable(plan.lanes) and not plan.share
    together = taps > 1 and lane_step != 1 and plan.taps == tuple(range(taps))
    turn, turn_all = None, None
    if square and together and row_step == taps and not plan.accumulate:
        turn_all = _turn_tile(m, plan, n)
    elif square and together:
        # Taps lie together in w: lanes by taps are turned into taps by lanes.
        square_of_taps = Square(lane_step, plan.rows * plan.block)
        turn = unpack_square(m, "transpose_taps", Results(n, plan.accumulate), square_of_taps)
    outputs = plan.share[1] if plan.share else 1
    with f.loop(lane_from, lane_until) as block, f.loop(top, bottom) as t:
        index = f.add(f.mul(f.sub(block, lane_from), plan.tiles), t)
        tile = f.at(sums, f.mul(index, (1 if plan.share else taps) * plan.rows * plan.block), plan.sum)
        lanes = f.min(f.sub(plan.clane, f.mul(block, plan.block)), plan.block)
        if plan.share:
            # Rows are (tap, channel of x); lanes are (group, channel of y).
            if mend is not None:
                f.call(mend, tile, block, t, lanes, *data)
            with f.loop(0, plan.rows) as r:
                step, channel = f.split(r, [plan.tap_step, plan.share[0]])
                tap = f.add(f.mul(t, plan.tap_step), step)
                with f.when(f.test("slt", tap, len(plan.taps))):
                    offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
                    with f.loop(0, lanes) as lane:
                        g, c = f.split(f.add(f.mul(block, plan.block), lane), [0, outputs])
                        at = f.add(offset, f.mul(channel, row_step), f.mul(g, group_step), f.mul(c, lane_step))
                        value = f.load(
                            f.at(tile, f.add(f.mul(r, plan.block), lane), plan.sum), plan.sum, size_of(plan.sum)
                        )
                        Results(n, plan.accumulate).store_one(f, value, f.at(to, at, n.storage))
        else:
            local = f.min(f.mul(t, plan.rows), plan.row_part - plan.rows)
            least = f.max(own, f.add(first, f.mul(t, plan.rows)))
            place = f.add(f.mul(group, group_step), f.mul(f.add(first, local), row_step))
            corner = f.add(place, f.mul(f.mul(block, plan.block), lane_step))
            if plan.asks_for_results:
                following = f.at(to, f.add(corner, plan.rows * row_step), n.storage)  # the tile that is next
                _ask_for_sums(f, plan, n, following, tap_weights, lanes, turned=turn_all is not None)
            done: Value = 0
            if turn_all is not None:
                # Rows of two tiles, or of two tasks, are written by both: they are the same, bit by bit.
                done = f.mul(f.div(lanes, plan.lanes), plan.lanes)
                with f.loop(0, done, plan.lanes) as lane:
                    at = f.add(corner, f.mul(lane, lane_step))
                    f.call(turn_all, f.at(tile, lane, plan.sum), f.at(to, at, n.storage))
            with f.loop(0, plan.rows) as r, f.when(f.test("sge", f.add(first, local, r), least)):
                start = f.add(corner, f.mul(r, row_step))
                row = f.at(tile, f.mul(r, plan.block), plan.sum)
                if turn is not None:
                    with f.loop(0, lanes, plan.lanes) as lane, f.loop(0, taps, plan.lanes) as tap:
                        source = f.at(row, f.add(f.mul(tap, plan.rows * plan.block), lane), plan.sum)
                        to_here = f.at(to, f.add(start, f.mul(lane, lane_step), tap), n.storage)
                        f.call(turn, source, to_here, f.sub(taps, tap), f.min(f.sub(lanes, lane), plan.lanes))
                else:
                    with f.loop(0, taps) as tap:
                        offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
                        tap_row = f.at(row, f.mul(tap, plan.rows * plan.block), plan.sum)
                        _put_row(f, plan, n, tap_row, f.at(to, f.add(start, offset), n.storage), done, lanes)
    return f


def _ask_for_sums(
    f: Function, plan: Reduce, n: Elements, to: str, tap_weights: str, lanes: Value, *, turned: bool
) -> None:
    """Ask for the memory of a tile's sums: a run for each lane if they are turned, else one for each row if its lanes
    lie together.
    """
    _, row_step, lane_step = plan.w_strides
    if turned:
        each = plan.rows * len(plan.taps) * size_of(n.storage)
        with f.loop(0, lanes) as lane:
            prefetch_contiguous(f, f.at(to, f.mul(lane, lane_step), n.storage), each)
    elif lane_step == 1:
        with f.loop(0, len(plan.taps)) as tap:
            offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
            for r in range(plan.rows):
                prefetch_contiguous(f, f.at(to, f.add(offset, r * row_step), n.storage), plan.vectors * n.bytes)


def _turn_tile(m: Module, plan: Reduce, n: Elements) -> Function:
    """A function that writes one vector of lanes of a tile's sums, of which taps and then rows lie together in w.

    (sums, w). Squares of sums are rounded, and turned so that each lane's lie together.
    """
    f = m.function("turn_tile", ["p:sums", "p:to"])
    sums, to = f.args
    lanes, taps = plan.lanes, len(plan.taps)
    total = plan.rows * taps
    size = 2 * lanes if n.storage == "i16" else lanes
    order = [(tap * plan.rows + r) * plan.block for r in range(plan.rows) for tap in range(taps)]
    table = m.table("tile_order", [*order, *order[-1:] * (-total % size)])
    with f.loop(0, total, size) as first:
        rows = []
        for i in range(size):
            at = f.load(f.at(table, f.add(first, i), "i64"), "i64", 8)
            rows.append(f.load(f.at(sums, at, plan.sum), n.vector, size_of(plan.sum)))
        values, raw = transposed_sums(f, n, rows)
        mask = raw.mask(f, f.sub(total, first)) if total % size else None
        for i, value in enumerate(values):
            raw.store(f, value, f.at(to, f.add(f.mul(i, plan.w_strides[2]), first), n.storage), mask)
    return f


def _put_row(f: Function, plan: Reduce, n: Elements, row: str, to: str, done: Value, lanes: Value) -> None:
    """Write the sums of one row of lanes, but for those that are done."""
    lane_step, results = plan.w_strides[2], Results(n, plan.accumulate)
    if lane_step == 1:
        with f.loop(done, lanes, plan.lanes) as lane:
            value = f.load(f.at(row, lane, plan.sum), n.vector, size_of(plan.sum))
            place = f.at(to, lane, n.storage)
            left = f.sub(lanes, lane)
            if plan.stream:
                results.store_streamed(f, value, place, left)
            else:
                results.store(f, value, place, n.mask(f, left))
    else:
        with f.loop(done, lanes) as lane:
            value = f.load(f.at(row, lane, plan.sum), plan.sum, size_of(plan.sum))
            results.store_one(f, value, f.at(to, f.mul(lane, lane_step), n.storage))
