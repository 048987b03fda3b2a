"""The code of a `ChannelsInLanes` plan for w.

The sum over y is cut into slices. A task adds the products of one slice to sums of its own, tile by tile: a tile is a
few neighbouring pixels of some rows of y, and what it reads of x is in window.py. Then the sums of all slices are added
in order, and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from ..emit.frame import Frame
from ..emit.nan_repair import NanRepair
from ..emit.slices import add_slices
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import fma, size_of
from .records import ChannelsInLanes
from .window import Row, TilePair, Window

ARGUMENTS = ("p:x", "p:y", "p:sums", "i:i0", "i:i1", "i:i2", "i:i3", "i:rows", "i:columns", "i:first")
"""Of a tile: x at the position of the first pixel of y, that pixel, the sums [tap][channel]; the position along each
axis; rows and columns of y that are left; the first channel.
"""


def write(plan: ChannelsInLanes) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    window = Window(plan, tuple(axis.segments[0] for axis in plan.maps))
    tiles = TilePair(_tile(m, "tile", window, masked=False), _tile(m, "tile_masked", window, masked=True))
    tap_weights = m.table("tap_weights", plan.layer.tap_offsets)
    if plan.tap_ranges is None:
        raise ValueError("the plan does not say where taps lie inside x")
    repair = NanRepair(m, plan.tap_ranges, window.n, (1, 1), (1, 1), 0)

    frame = Frame(m, plan.buffers, plan.sum)
    with frame.items("first", plan.slices) as number:
        _sum_slice(frame, window, tiles, number)
    frame.barrier()
    with frame.items("second", len(plan.layer.tap_offsets)) as tap:
        offset = frame.f.load(frame.f.at(tap_weights, tap, "i64"), "i64", 8)
        sums = frame.f.at(frame.at["sums"], frame.f.mul(tap, plan.pitch), plan.sum)
        _add_slices(frame, plan, repair, tap, sums)
        _write_tap(frame, plan, sums, offset)
    return frame.end()


def _sum_slice(frame: Frame, window: Window, tiles: TilePair, number: Value) -> None:
    """The sums of one slice: as many rows of tiles as all others, in order."""
    f, plan, n = frame.f, window.plan, window.n
    counts, size = plan.counts, len(plan.layer.tap_offsets) * plan.pitch
    tile_rows = -(-counts[2] // plan.rows)
    total = counts[0] * counts[1] * tile_rows
    slice_rows = -(-total // plan.slices)
    sums = f.at(frame.at["sums"], f.mul(number, size), plan.sum)
    with f.loop(0, size, plan.lanes) as i:
        f.store("zeroinitializer", f.at(sums, i, plan.sum), n.vector, size_of(plan.sum))
    first = f.mul(number, slice_rows)
    with f.loop(first, f.min(f.add(first, slice_rows), total)) as index, f.loop(0, counts[3], plan.vectors) as q3:
        q0, q1, tile_row = f.split(index, [counts[0], counts[1], tile_rows])
        q = (q0, q1, f.mul(tile_row, plan.rows), q3)
        position = [f.mul(i, m.in_stride) for i, m in zip(q, plan.maps, strict=True)]
        steps = zip(position, plan.source.steps, strict=True)
        x = f.at(frame.tensors["x"], f.add(*(f.mul(i, step) for i, step in steps)), n.storage)
        along = zip(q, plan.maps, strict=True)
        y = f.at(frame.tensors["y"], f.add(*(f.mul(i, m.out_step) for i, m in along)), n.storage)
        rows, columns = f.sub(counts[2], q[2]), f.sub(counts[3], q[3])
        window.call(f, tiles, (x, y, sums, *position, rows, columns))


def _add_slices(frame: Frame, plan: ChannelsInLanes, repair: NanRepair, tap: Value, sums: str) -> None:
    """Add the sums of a tap over all slices, in order, to those of the first one; then repair what is NaN."""
    f, n = frame.f, repair.n
    with f.loop(0, plan.pitch, plan.lanes) as c:
        add_slices(f, n, sums, c, plan.slices, len(plan.layer.tap_offsets) * plan.pitch)
        x, y = (f.at(frame.tensors[name], c, n.storage) for name in "xy")
        repair.repair(f, x, y, tap, f.at(sums, c, plan.sum), f.sub(plan.layer.channels, c))


def _write_tap(frame: Frame, plan: ChannelsInLanes, sums: str, offset: Value) -> None:
    """Round and write the weights of a tap, which begin at an offset in w."""
    f, layer = frame.f, plan.layer
    results = Results(Elements(layer.out_dtype, plan.lanes, plan.sum, layer.converts_f16), layer.accumulate)
    with f.loop(0, layer.channels) as c:
        value = f.load(f.at(sums, c, plan.sum), plan.sum, size_of(plan.sum))
        place = f.at(frame.tensors["w"], f.add(offset, f.mul(c, layer.w_step)), results.elements.storage)
        results.store_one(f, value, place)


def _tile(m: Module, name: str, window: Window, *, masked: bool) -> Function:
    """A function that adds the products of one tile of y to the sums, for all channels from a given one on.

    The sums of a row of the kernel are in registers from the first row of x that it meets to the last.
    """
    f = m.function(name, list(ARGUMENTS))
    x, y, sums, *position, rows, columns, first = f.args
    plan, n = window.plan, window.n
    inside = window.rows_inside(f, position)
    there = window.columns_inside(f, position[3]) if masked else {}
    pixels = {}
    if masked:
        for r, c in product(range(plan.rows), range(plan.vectors)):
            pixels[r, c] = f.both(f.test("slt", r, rows), f.test("slt", c, columns))
    needed = _needed(window)
    with window.channels(f, first, masked=masked) as channel:
        lanes = window.lanes(f, channel) if masked else None
        ys = _load_y(f, window, y, channel, lanes, pixels)
        masks = None if lanes is None else {j: window.masked(f, ok, lanes) for j, ok in there.items()}
        totals = _Totals(f, window, sums, channel)
        for row, served in sorted(window.rows.items()):
            for kernel_row in (k for k, (begin, _) in needed.items() if begin == row):
                totals.load(kernel_row)
            with f.when(inside[row]):
                values = window.load(f, x, channel, row, masks)
                for (r, kernel_row), (k, o) in product(served, window.column_taps):
                    total = totals.variables[kernel_row][k]
                    for c in range(plan.vectors):
                        value = values[c * window.stride + o]
                        f.set(total, n.vector, fma(f, value, ys[r, c], f.get(total, n.vector), n.lanes, n.sum))
            for kernel_row in (k for k, (_, end) in needed.items() if end == row):
                totals.store(kernel_row)
    return f


def _needed(window: Window) -> dict[int, tuple[Row, Row]]:
    """The first and the last row of x that each row of the kernel meets."""
    needed: dict[int, tuple[Row, Row]] = {}
    for row, served in sorted(window.rows.items()):
        for _, kernel_row in served:
            first, _ = needed.get(kernel_row, (row, row))
            needed[kernel_row] = first, row
    return needed


def _load_y(
    f: Function, window: Window, y: str, channel: Value, lanes: str | None, pixels: Mapping[tuple[int, int], str]
) -> dict[tuple[int, int], str]:
    """A vector of channels of each pixel of y in a tile; the plain tile prefetches those of the tile below."""
    plan, n = window.plan, window.n
    _, _, rows, columns = plan.maps
    ys = {}
    for r, c in product(range(plan.rows), range(plan.vectors)):
        at = f.add(r * rows.out_step + c * columns.out_step, channel)
        place = f.at(y, at, n.storage)
        ys[r, c] = n.load(f, place, None if lanes is None else window.masked(f, pixels[r, c], lanes))
        if lanes is None:
            f.prefetch(f.at(y, f.add(at, plan.rows * rows.out_step), n.storage))
    return ys


class _Totals:
    """The sums of the kernel elements, row by row in registers."""

    def __init__(self, f: Function, window: Window, sums: str, channel: Value) -> None:
        self.f, self.window, self.sums, self.channel = f, window, sums, channel
        self.variables: dict[int, list[str]] = {}  # of each row of the kernel

    def load(self, kernel_row: int) -> None:
        """Load the sums of a row of the kernel."""
        f, kind, align = self.f, self.window.n.vector, self.window.align
        places = [self._place(kernel_row, k) for k in range(self.window.plan.maps[3].kernel)]
        self.variables[kernel_row] = [f.variable(kind, f.load(place, kind, align)) for place in places]

    def store(self, kernel_row: int) -> None:
        """Store them again."""
        f, kind, align = self.f, self.window.n.vector, self.window.align
        for k, total in enumerate(self.variables[kernel_row]):
            place = self._place(kernel_row, k)
            f.store(f.get(total, kind), place, kind, align)

    def _place(self, kernel_row: int, k: int) -> str:
        plan = self.window.plan
        tap = kernel_row * plan.maps[3].kernel + k
        return self.f.at(self.sums, self.f.add(tap * plan.pitch, self.channel), plan.sum)
