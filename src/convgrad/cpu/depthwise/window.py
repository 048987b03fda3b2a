"""What a tile reads if lanes are channels: a window of rows and columns of pixels, in place.

Both kernels of `ChannelsInLanes` step through positions of one tensor (the result, or y for w) and read the other one
around them. Each pixel of the window is loaded once and serves all taps. Pixels outside the tensor are left out: rows
by a branch, columns by a mask. There are two tiles for each window: a plain one, without masks, and a masked one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import NamedTuple

from ..ir.builder import Function, Value, vector
from ..ir.convert import Elements
from ..ir.vectors import align_of
from ..plan.records import Segment
from .records import ChannelsInLanes

Row = tuple[int, int, int]
"""A row of the source: its offset on the first three axes, from the position of the tile."""


class TilePair(NamedTuple):
    """The functions of a tile. They compute all channels from a given one on, which is their last argument."""

    plain: Function  # all pixels exist; whole vectors of channels only
    masked: Function


class Window:
    """The pixels that a tile reads, at positions that have one segment along each axis."""

    def __init__(self, plan: ChannelsInLanes, segments: tuple[Segment, ...]) -> None:
        self.plan, self.segments = plan, segments
        self.n = Elements(plan.layer.dtype, plan.lanes, plan.sum, plan.layer.converts_f16)
        self.align = align_of(plan.lanes, plan.sum)  # of a vector of sums or packed weights
        self.column_taps = segments[3].taps  # (column of the kernel, offset)
        self.stride = plan.maps[3].in_stride  # of columns
        self.rows = _rows(plan, segments)
        self.columns = sorted({c * self.stride + o for c in range(plan.vectors) for _, o in self.column_taps})

    def rows_inside(self, f: Function, position: Sequence[Value]) -> dict[Row, str]:
        """Of each row, whether it lies inside the tensor."""
        return {row: self._row_inside(f, position, row) for row in sorted(self.rows)}

    def _row_inside(self, f: Function, position: Sequence[Value], row: Row) -> str:
        ok = "true"
        for axis, offset in enumerate(row):
            size = self.plan.source.sizes[axis]
            last = (self.segments[axis].stop - 1) * self.plan.maps[axis].in_stride
            if offset >= 0 and last + offset < size:
                continue
            here = f.test("ult", f.add(position[axis], offset), size)
            ok = here if ok == "true" else f.both(ok, here)
        return ok

    def columns_inside(self, f: Function, column: Value) -> dict[int, str]:
        """Of each column, whether it lies inside the tensor."""
        return {j: f.test("ult", f.add(column, j), self.plan.source.sizes[3]) for j in self.columns}

    def channels(self, f: Function, first: Value, *, masked: bool) -> AbstractContextManager[str]:
        """A loop over vectors of channels, inside the tile, so that memory is read along cache lines."""
        stop = self.plan.layer.channels if masked else self.plan.whole_channels
        return f.loop(first, stop, self.plan.lanes)

    def lanes(self, f: Function, channel: Value) -> str:
        """The lanes that have a channel."""
        return self.n.mask(f, f.sub(self.plan.layer.channels, channel))

    def masked(self, f: Function, ok: str, lanes: str) -> str:
        """These lanes, or none where a pixel does not exist."""
        bits = vector(self.plan.lanes, "i1")
        return f.op(f"select i1 {ok}, {bits} {lanes}, {bits} zeroinitializer")

    def load(
        self, f: Function, source: str, channel: Value, row: Row, masks: Mapping[int, str] | None
    ) -> dict[int, str]:
        """A vector of channels of each pixel in a row, by its column.

        The plain tile prefetches what the tile below reads and this one does not: `masks` is then None.
        """
        plan, n = self.plan, self.n
        steps = plan.source.steps
        offset = sum(o * s for o, s in zip(row, steps, strict=False))
        source_row = f.at(source, f.add(offset, channel), n.storage)
        if masks is None and self._is_new_below(row):
            below = f.at(source_row, plan.rows * plan.maps[2].in_stride * steps[2], n.storage)
            # The tile beside that one prefetches the other columns.
            for j in self.columns[: plan.vectors * self.stride]:
                f.prefetch(f.at(below, j * steps[3], n.storage))
        masks = masks or {}
        return {j: n.load(f, f.at(source_row, j * steps[3], n.storage), masks.get(j)) for j in self.columns}

    def _is_new_below(self, row: Row) -> bool:
        """Whether the tile below reads, at this row of its window, one that this tile does not read."""
        o0, o1, o2 = row
        return (o0, o1, o2 + self.plan.rows * self.plan.maps[2].in_stride) not in self.rows

    def call(self, f: Function, tiles: TilePair, arguments: Sequence[Value]) -> None:
        """Call a tile: the masked one if a pixel does not exist, and for channels that do not fill a vector.

        The last arguments are the column of the source, and the rows and columns that are left.
        """
        plan, whole = self.plan, self.plan.whole_channels
        *_, column, rows, columns = arguments
        if not whole:
            f.call(tiles.masked, *arguments, 0)
            return
        offsets = [o for _, o in self.column_taps] or [0]
        low, high = min(offsets), max(offsets) + (plan.vectors - 1) * self.stride
        inside = f.both(f.test("sge", f.add(column, low), 0), f.test("slt", f.add(column, high), plan.source.sizes[3]))
        left = f.both(f.test("sge", rows, plan.rows), f.test("sge", columns, plan.vectors))
        branch = f.either(f.both(inside, left))
        f.call(tiles.plain, *arguments, 0)
        if whole < plan.layer.channels:
            f.call(tiles.masked, *arguments, whole)
        f.otherwise(branch)
        f.call(tiles.masked, *arguments, 0)
        f.join(branch)


def _rows(plan: ChannelsInLanes, segments: tuple[Segment, ...]) -> dict[Row, list[tuple[int, int]]]:
    """The rows of the source, each with the (row of the tile, row of the kernel) that it serves."""
    rows: dict[Row, list[tuple[int, int]]] = {}
    _, n1, n2, _ = (m.kernel for m in plan.maps)
    for (k0, o0), (k1, o1), (k2, o2) in product(*(s.taps for s in segments[:3])):
        for r in range(plan.rows):
            row = (o0, o1, r * plan.maps[2].in_stride + o2)
            rows.setdefault(row, []).append((r, (k0 * n1 + k1) * n2 + k2))
    return rows
