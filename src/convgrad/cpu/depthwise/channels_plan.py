"""Plans for depthwise layers whose channels are contiguous: lanes are channels, tensors are read in place."""

from __future__ import annotations

from math import ceil

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..plan.axes import AXES, Axis, axis_maps, simplify, tap_ranges
from ..plan.bits import (
    DEPTHWISE_SLICE_BYTES,
    DEPTHWISE_SLICES,
    HALF_COST_DEPTHWISE,
    SLICE_TILE_ROWS,
    depthwise_tile,
    fitted,
)
from ..plan.records import AxisMap, up
from ..plan.tuning import half_width_text, streams, tuning
from ..target import Target
from .choose import channels_serve
from .records import ChannelsInLanes, Layer, Source, Tile, layer_of, positions


def plan(p: Problem, target: Target, threads: int) -> ChannelsInLanes | None:
    """A plan for y, x or w of a depthwise layer whose channels are contiguous, or None for others."""
    if not channels_serve(p):
        return None
    axes, item = simplify(p).axes, DTYPES[p.dtype].accumulator.itemsize
    target = _width(p, target, item)
    tile = Tile(target.lanes(item), *depthwise_tile(target))
    why = ["each channel on its own, the input read where it lies"]
    if target.half_width:
        why.append(half_width_text(tile.lanes, p.g))
    maps = axis_maps(axes, p.wanted != "x", [1] * AXES, (False,) * AXES, True)
    layer = layer_of(p, axes, target)
    return ChannelsInLanes(
        layer=layer,
        tile=tile,
        source=_source(axes, p.wanted != "x"),
        maps=maps,
        task_rows=_task_rows(tile, maps, tuning(target).depthwise.tasks * threads),
        slices=_slices(layer, tile, maps, item),
        tap_ranges=tap_ranges(axes) if p.wanted == "w" else None,
        stream=streams(p, target) and all(m.out_step % tile.lanes == 0 for m in maps),
        threads=threads,
        why=tuple(why),
    )


def _width(p: Problem, target: Target, item: int) -> Target:
    """The machine, with vectors of half the width if channels fill those better; not for w, whose sums depend on it."""
    if p.wanted == "w":
        return target
    return fitted(target, lambda t, step: step * ceil(p.g / t.lanes(item)), HALF_COST_DEPTHWISE)


def _source(axes: tuple[Axis, ...], forward: bool) -> Source:
    """The tensor that is read: x, or y for the gradient of x."""
    if forward:
        return Source(tuple(a.x for a in axes), tuple(a.x_step for a in axes))
    return Source(tuple(a.y for a in axes), tuple(a.y_step for a in axes))


def _task_rows(tile: Tile, maps: tuple[AxisMap, ...], tasks: int) -> int:
    """Positions along the third axis in a task, so that there are so many tasks: whole tiles."""
    counts = positions(maps)
    most = ceil(counts[0] * counts[1] * counts[2] / tasks)
    return up(max(1, min(counts[2], most)), tile.rows)


def _slices(layer: Layer, tile: Tile, maps: tuple[AxisMap, ...], item: int) -> int:
    """Parts of the sum of a weight gradient, each of two rows of tiles at least. The number of threads has no part in
    it, because slices decide bits.
    """
    counts = positions(maps)
    tile_rows = counts[0] * counts[1] * ceil(counts[2] / tile.rows)
    least, most = DEPTHWISE_SLICES
    slice_bytes = len(layer.tap_offsets) * up(layer.channels, tile.lanes) * item
    return max(1, min(tile_rows // SLICE_TILE_ROWS, most, max(least, DEPTHWISE_SLICE_BYTES // slice_bytes)))
