"""Plans for depthwise layers whose pixels are contiguous along rows: lanes are pixels, images are packed one by one."""

from __future__ import annotations

from math import ceil

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..plan.axes import Axis, offsets, reach, spatial
from ..plan.bits import PIXELS_MOST_VECTORS
from ..plan.records import up
from ..plan.tuning import tuning
from ..target import Target
from .choose import pixels_fit, pixels_serve
from .records import Images, PackedImage, PixelsInLanes, Tile, layer_of

AXES = 3


def plan(p: Problem, target: Target, threads: int) -> PixelsInLanes | None:
    """A plan for y or x of a depthwise layer whose pixels are contiguous, or None if other kernels serve it better."""
    if not pixels_serve(p):
        return None
    axes = (*[Axis(1, 1)] * (AXES - p.rank), *spatial(p))
    forward = p.wanted == "y"
    source, result = _images(p, axes)
    if not forward:
        source, result = result, source
    width = result.sizes[2]
    lanes = _lanes(p, target, width)
    why = ["one image of one channel after another, pixels of a row in the lanes"]
    if lanes < target.lanes(DTYPES[p.dtype].accumulator.itemsize):
        why.append(f"vectors of {lanes}: in rows of {width} they cross fewer lines of memory than longer ones")
    tile = _tile(target, lanes, result)
    made = PixelsInLanes(
        layer=layer_of(p, axes, target),
        tile=tile,
        images=p.n,
        source=source,
        result=result,
        packed=_packed(axes, forward, tile, result),
        task_images=max(1, p.n * p.g // (tuning(target).depthwise.tasks * threads)),
        threads=threads,
        why=tuple(why),
    )
    return made if pixels_fit(made, target) else None


def _images(p: Problem, axes: tuple[Axis, ...]) -> tuple[Images, Images]:
    """x and y as images of one channel."""
    x = Images(tuple(a.x for a in axes), tuple(a.x_step for a in axes), p.x_strides[:2])
    y = Images(tuple(a.y for a in axes), tuple(a.y_step for a in axes), p.y_strides[:2])
    return x, y


def _lanes(p: Problem, target: Target, width: int) -> int:
    """Lanes of a vector, for rows of that width.

    Measured on Zen 4, run not kept: vectors of half the width, which cross fewer lines of memory, are quicker unless a
    row is two or more whole vectors. Rows of less than one of them are quicker by another kernel if they must be
    converted.
    """
    item = DTYPES[p.dtype].accumulator.itemsize
    lanes = target.lanes(item)
    shorter = target.may_halve_width and (width % lanes > 0 or width == lanes)
    if shorter and (width >= lanes // 2 or DTYPES[p.dtype].size == item):
        return target.at_half_width().lanes(item)
    return lanes


def _tile(target: Target, lanes: int, result: Images) -> Tile:
    """The tile: as wide as leaves the fewest vectors without pixels, and as high as registers allow."""
    if target.tile:
        rows, vectors = target.tile
    else:
        needed = ceil(result.sizes[2] / lanes)
        computed = {v: up(needed, v) for v in range(1, PIXELS_MOST_VECTORS + 1)}
        vectors = max(v for v in computed if computed[v] == min(computed.values()))
        rows = tuning(target).depthwise.tile_vectors // vectors
    return Tile(lanes, min(rows, result.sizes[1], tuning(target).depthwise.most_rows), vectors)


def _packed(axes: tuple[Axis, ...], forward: bool, tile: Tile, result: Images) -> PackedImage:
    """How an image is packed, with its padding: each axis is longer than the result by what the kernel spans."""
    found = [offsets(a, forward) for a in axes]
    *outer, columns = (reach(a, forward) - 1 for a in axes)
    whole = up(result.sizes[2], tile.lanes * tile.vectors)
    return PackedImage(
        extents=tuple(n + s for n, s in zip(result.sizes[:2], outer, strict=True)),
        pitch=up(whole + columns, tile.lanes),
        low=tuple(min(o) for o in found),
        kernel=tuple(a.k for a in axes),
        taps=tuple((o[0] - min(o), o[1] - o[0] if len(o) > 1 else 0) for o in found),
    )
