"""The tiles that may be chosen: shapes with their warps and stages, by element type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...dtypes import DTYPES
from ..target import Target


class Tile(NamedTuple):
    """A tile of a matrix product."""

    rows: int
    columns: int
    depth: int  # of a block of the sum
    warps: int
    stages: int


# rows, columns, warps. Sums of a tile take rows*columns/(32*warps) registers of a thread, of 255 that it has.
_LARGE = ((128, 256, 8), (256, 128, 8))
_MIDDLE = ((128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4))
_SMALL = ((128, 32, 4), (32, 128, 4), (64, 32, 4), (32, 64, 4), (32, 32, 4))
_LEAST = ((128, 16, 4), (64, 16, 4), (16, 64, 4), (32, 16, 2), (16, 32, 2), (16, 16, 2))


def tiles(
    target: Target, dtype: str, precision: str, depth: int, flat: bool = False, wide: bool = False
) -> Iterator[Tile]:
    """The tiles for an element type, for sums of `depth` products. With `wide`, offsets have 64 bits."""
    item = DTYPES[dtype].size
    plain = precision == "ieee" and item == 4
    # wgmma reads operands from shared memory. Elsewhere larger tiles were seen to spill within their loops. Operands of
    # plain products lie in registers, too; and with taps and channels as one axis, so do the addresses of all elements.
    roomy = target.capability == 90 and not (plain or item == 8 or flat)
    most = (128 * 256 if roomy else 128 * 128) if item == 2 else 128 * 64 if roomy else 64 * 64
    most = min(most, 64 * 64) if flat or (wide and not roomy) else most
    shapes = tuple(shape for shape in (*_LARGE, *_MIDDLE, *_SMALL, *_LEAST) if shape[0] * shape[1] <= most)
    deep = {2: 32 if flat else 64, 4: 16 if plain or flat else 32, 8: 16}[item]
    while deep > 16 and deep >= 2 * depth:
        deep //= 2
    for rows, columns, warps in shapes:
        stage = (rows + columns) * deep * item
        # What is left of shared memory goes to converting layouts; f32 in parts lies there a second time.
        fit = (target.shared - rows * columns * 4 // 2) // (stage * (2 if item == 4 and not plain else 1))
        # With three stages of the larger tiles, a multiprocessor has two programs at once.
        stages = min(4 if item == 2 and rows * columns < 64 * 64 else 3, fit)
        if stages >= 2:
            yield Tile(rows, columns, deep, warps, stages)


def lane_tiles(channels: int, pixels: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles without matrix products: some elements for each of 128 threads."""
    for elements in (1024, 512, 256):
        for columns in (128, 64, 32, 16, 8, 4, 2, 1):
            rows = elements // columns
            fits = columns < 2 * channels and (rows < 2 * pixels or elements == 256)
            if fits:
                yield rows, columns
