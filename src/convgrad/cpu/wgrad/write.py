"""How the sums of a task are written to w: a function for each strategy, of which the plan names one."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..emit.nan_repair import NanRepair
from ..emit.prefetch import prefetch_contiguous
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import size_of
from ..pack.unpack import Square, transposed_sums, unpack_square
from ..plan.records import LaneGroups
from .records import WeightGradient, Writing
from .sides import inputs, results


class _Writer(NamedTuple):
    """The function that is written, its plan, how w is written and where it is, and a table of its taps."""

    f: Function
    plan: WeightGradient
    results: Results
    to: str
    taps: str
    range: tuple[Value, Value]  # of the taps
    transpose_tile: Function | None  # with TRANSPOSED_TILES
    transpose_taps: Function | None  # with TRANSPOSED_TAPS

    @property
    def n(self) -> Elements:
        """The elements of w."""
        return self.results.elements


def write_sums(m: Module, plan: WeightGradient, taps: str) -> Function:
    """A function that writes a task's sums to w.

    It takes the sums, w, the group, the first row that the task writes, its first row, its blocks of lanes, its tiles,
    and x and y, to repair sums, or its taps, if they are parts.
    """
    names = ["p:sums", "p:to", "i:group", "i:first_own_row", "i:first_row"]
    names += ["i:first_block", "i:last_block", "i:first_tile", "i:last_tile"]  # the last of each is not included
    groups = plan.roles.lane_groups
    repair = _repair_sums(m, plan, groups) if groups is not None and plan.repairs else None
    names += ["p:x", "p:y"] if repair else ["i:first_tap", "i:last_tap"] if plan.parts.tap_parts > 1 else []
    f = m.function("write_sums", names)
    sums, to, group, first_own_row, first, first_block, last_block, first_tile, last_tile, *data = f.args
    of = (data[0], data[1]) if plan.parts.tap_parts > 1 else (0, plan.tile_taps)
    w = _Writer(f, plan, results(plan), to, taps, of, _transpose_tile(m, plan), _transpose_taps(m, plan))
    group_step, row_step, lane_step = plan.output.strides
    with f.loop(first_block, last_block) as block, f.loop(first_tile, last_tile) as t:
        index = f.add(f.mul(f.sub(block, first_block), plan.parts.tiles), t)
        tile = f.at(sums, f.mul(index, plan.tile_sums), plan.sum)
        lanes = f.min(f.sub(plan.roles.lane_channels, f.mul(block, plan.block)), plan.block)
        if groups is not None:
            if repair is not None:
                f.call(repair, tile, block, t, lanes, *data)
            _write_groups(w, groups, (tile, block, t), lanes)
        else:
            local = f.min(f.mul(t, plan.rows), plan.parts.row_part - plan.rows)
            least = f.max(first_own_row, f.add(first, f.mul(t, plan.rows)))
            row = f.add(f.mul(group, group_step), f.mul(f.add(first, local), row_step))
            corner = f.add(row, f.mul(f.mul(block, plan.block), lane_step))
            _prefetch(w, corner, lanes)
            done = _write_tile(w, tile, corner, lanes)
            with f.loop(0, plan.rows) as r, f.when(f.test("sge", f.add(first, local, r), least)):
                start = f.add(corner, f.mul(r, row_step))
                _write_row(w, f.at(tile, f.mul(r, plan.block), plan.sum), start, done, lanes)
    return f


def _transpose_taps(m: Module, plan: WeightGradient) -> Function | None:
    """A function that transposes a square of lanes by taps into w, if the plan asks for it. See `unpack_square`."""
    if plan.output.writing is not Writing.TRANSPOSED_TAPS:
        return None
    square = Square(plan.output.strides[2], plan.rows * plan.block)
    return unpack_square(m, "transpose_taps", replace(results(plan), stream=False), square)


def _prefetch(w: _Writer, corner: Value, lanes: Value) -> None:
    """Prefetch the memory of the next tile's sums, if it is contiguous for each lane or for each row."""
    f, plan, n = w.f, w.plan, w.n
    if not plan.output.prefetch:
        return
    _, row_step, lane_step = plan.output.strides
    to = f.at(w.to, f.add(corner, plan.rows * row_step), n.storage)
    if plan.output.writing is Writing.TRANSPOSED_TILES:
        size = plan.rows * plan.tile_taps * size_of(n.storage)
        with f.loop(0, lanes) as lane:
            prefetch_contiguous(f, f.at(to, f.mul(lane, lane_step), n.storage), size)
    elif plan.output.writing is Writing.VECTORS:
        with f.loop(*w.range) as tap:
            offset = f.load(f.at(w.taps, tap, "i64"), "i64", 8)
            for r in range(plan.rows):
                prefetch_contiguous(f, f.at(to, f.add(offset, r * row_step), n.storage), plan.vectors * n.bytes)


def _write_tile(w: _Writer, tile: str, corner: Value, lanes: Value) -> Value:
    """Where tiles are transposed, write all rows of whole vectors of lanes at once; gives how many lanes that are."""
    f, plan = w.f, w.plan
    if w.transpose_tile is None:
        return 0
    # Rows of two tiles, or of two tasks, are written by both: they are the same, bit by bit.
    done = f.mul(f.div(lanes, plan.lanes), plan.lanes)
    with f.loop(0, done, plan.lanes) as lane:
        at = f.add(corner, f.mul(lane, plan.output.strides[2]))
        f.call(w.transpose_tile, f.at(tile, lane, plan.sum), f.at(w.to, at, w.n.storage))
    return done


def _write_row(w: _Writer, row: str, start: Value, done: Value, lanes: Value) -> None:
    """Write the sums of one row, of all taps, but for the lanes that are done."""
    f, plan = w.f, w.plan
    if w.transpose_taps is not None:
        _write_transposed(w, w.transpose_taps, (row, start), lanes)
        return
    write = _write_vectors if plan.output.writing is Writing.VECTORS else _write_elements
    with f.loop(*w.range) as tap:
        offset = f.load(f.at(w.taps, tap, "i64"), "i64", 8)
        sums = f.at(row, f.mul(tap, plan.rows * plan.block), plan.sum)
        write(w, sums, f.at(w.to, f.add(start, offset), w.n.storage), done, lanes)


def _write_transposed(w: _Writer, transpose: Function, places: tuple[str, Value], lanes: Value) -> None:
    """Taps are contiguous in w: squares of lanes by taps are transposed. Places are the row's, of its sums and in w."""
    f, plan, taps = w.f, w.plan, w.plan.tile_taps
    row, start = places
    with f.loop(0, lanes, plan.lanes) as lane, f.loop(0, taps, plan.lanes) as tap:
        source = f.at(row, f.add(f.mul(tap, plan.rows * plan.block), lane), plan.sum)
        to = f.at(w.to, f.add(start, f.mul(lane, plan.output.strides[2]), tap), w.n.storage)
        f.call(transpose, source, to, f.sub(taps, tap), f.min(f.sub(lanes, lane), plan.lanes))


def _write_vectors(w: _Writer, sums: str, to: str, done: Value, lanes: Value) -> None:
    """Lanes are contiguous in w."""
    f, plan, n = w.f, w.plan, w.n
    with f.loop(done, lanes, plan.lanes) as lane:
        value = f.load(f.at(sums, lane, plan.sum), n.vector, size_of(plan.sum))
        place = f.at(to, lane, n.storage)
        left = f.sub(lanes, lane)
        if plan.output.stream:
            w.results.store_streamed(f, value, place, left)
        else:
            w.results.store(f, value, place, n.mask(f, left))


def _write_elements(w: _Writer, sums: str, to: str, done: Value, lanes: Value) -> None:
    """Nothing is contiguous in w: one sum after another."""
    f, plan = w.f, w.plan
    with f.loop(done, lanes) as lane:
        value = f.load(f.at(sums, lane, plan.sum), plan.sum, size_of(plan.sum))
        w.results.store_one(f, value, f.at(to, f.mul(lane, plan.output.strides[2]), w.n.storage))


def _write_groups(w: _Writer, groups: LaneGroups, where: tuple[str, Value, Value], lanes: Value) -> None:
    """Rows are (tap, channel of x) and lanes are (group, channel of y): one sum after another.

    `where` is the sums of a tile, its block and its number.
    """
    f, plan = w.f, w.plan
    tile, block, t = where
    group_step, row_step, lane_step = plan.output.strides
    with f.loop(0, plan.rows) as r:
        step, channel = f.split(r, [plan.parts.tap_step, groups.inputs])
        tap = f.add(f.mul(t, plan.parts.tap_step), step)
        with f.when(f.test("slt", tap, len(plan.taps.weights))):
            offset = f.load(f.at(w.taps, tap, "i64"), "i64", 8)
            with f.loop(0, lanes) as lane:
                g, c = f.split(f.add(f.mul(block, plan.block), lane), [0, groups.outputs])
                at = f.add(offset, f.mul(channel, row_step), f.mul(g, group_step), f.mul(c, lane_step))
                sum_ = f.at(tile, f.add(f.mul(r, plan.block), lane), plan.sum)
                value = f.load(sum_, plan.sum, size_of(plan.sum))
                w.results.store_one(f, value, f.at(w.to, at, w.n.storage))


def _transpose_tile(m: Module, plan: WeightGradient) -> Function | None:
    """A function that writes one vector of lanes of a tile's sums: (sums, w). For w in which taps, then rows, are
    contiguous: squares of sums are rounded, and transposed so that each lane's are contiguous.
    """
    if plan.output.writing is not Writing.TRANSPOSED_TILES:
        return None
    n, lanes, total = results(plan).elements, plan.lanes, plan.rows * plan.tile_taps
    f = m.function("transpose_tile", ["p:sums", "p:to"])
    sums, to = f.args
    size = 2 * lanes if n.storage == "i16" else lanes
    order = [(tap * plan.rows + r) * plan.block for r in range(plan.rows) for tap in range(plan.tile_taps)]
    table = m.table("tile_order", [*order, *order[-1:] * (-total % size)])
    with f.loop(0, total, size) as first:
        rows = []
        for i in range(size):
            at = f.load(f.at(table, f.add(first, i), "i64"), "i64", 8)
            rows.append(f.load(f.at(sums, at, plan.sum), n.vector, size_of(plan.sum)))
        values, raw = transposed_sums(f, n, rows)
        mask = raw.mask(f, f.sub(total, first)) if total % size else None
        for i, value in enumerate(values):
            raw.store(f, value, f.at(to, f.add(f.mul(i, plan.output.strides[2]), first), n.storage), mask)
    return f


def _repair_sums(m: Module, plan: WeightGradient, groups: LaneGroups) -> Function:
    """A function that repairs the sums of a tile with groups in the lanes: (sums, block, which tile, lanes, x, y)."""
    n = inputs(plan)
    x_step, y_step = plan.x.channel[1], plan.y.channel[1]
    nan_repair = NanRepair(m, plan.taps.ranges, n, groups, (x_step, y_step), plan.block)
    f = m.function("repair_sums", ["p:sums", "i:block", "i:tile", "i:lanes", "p:x", "p:y"])
    sums, block, tile, lanes, x, y = f.args
    taps, tap_step = len(plan.taps.weights), plan.parts.tap_step
    first = f.mul(tile, tap_step)
    with f.loop(0, f.min(f.sub(taps, first), tap_step)) as step, f.loop(0, lanes, plan.lanes) as lane:
        at = f.at(sums, f.add(f.mul(step, groups.inputs * plan.block), lane), plan.sum)
        channel = f.add(f.mul(block, plan.block), lane)
        x_at = f.at(x, f.mul(f.mul(f.div(channel, groups.outputs), groups.inputs), x_step), n.storage)
        y_at = f.at(y, f.mul(channel, y_step), n.storage)
        nan_repair.repair(f, x_at, y_at, f.add(first, step), at, f.min(f.sub(lanes, lane), plan.lanes))
    return f
