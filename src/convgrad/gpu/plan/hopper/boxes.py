"""The tiles of Hopper's gathers: shapes of products, boxes of positions, and what of them lies in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ....spec.problem import Ints

MOST_BOX = 256  # elements of a box on an axis: the copy engine's limit
MOST_STAGES = 6
ROW_STAGES = 8  # of weights that rows share

# Rows of one of the two groups of warps, and columns: sums take half*columns/128 registers of a thread.
_SHAPES = ((128, 128), (64, 256), (64, 128), (128, 64), (64, 64), (128, 32), (64, 32), (128, 16), (64, 16))

_LINES = (32, 64, 128)  # bytes of a line in shared memory


class Shape(NamedTuple):
    """A product of matrices: two halves of rows by columns, over blocks of the sum."""

    half: int
    columns: int
    depth: int

    @property
    def results(self) -> int:
        """Results of a tile."""
        return 2 * self.half * self.columns


class Box(NamedTuple):
    """The positions of a tile, and how what it reads lies in shared memory."""

    size: Ints  # rows, planes, images and pixels: powers of two
    rows: int  # taps that read one box of the input
    more: int  # rows that it has besides those of the tile
    a_stages: int = 0  # boxes in shared memory at once
    b_stages: int = 0  # blocks of weights
    resident: bool = False  # whether these are all that a program needs

    def has_lines(self, item: int) -> bool:
        """Whether pixels of so many bytes may lie innermost: they fill pieces of shared memory, of 32 to 128 bytes."""
        line = self.size[3] * item
        return line in _LINES or (line > _LINES[-1] and self.row == self.size[3] and self.size[0] == 1)

    @property
    def row(self) -> int:
        """Positions of a row."""
        return self.size[1] * self.size[2] * self.size[3]

    @property
    def reads(self) -> int:
        """Positions that are brought for a tile and a tap, or for all taps that share them."""
        return (self.size[0] + self.more) * self.row


def power(number: int) -> int:
    """The least power of two that is as large."""
    return 1 << max(number - 1, 0).bit_length()


def shapes(item: int, parts: int, columns: int, summed: int) -> Iterator[Shape]:
    """The shapes for so many channels, with rows of shared memory of 128 bytes or, for few channels, fewer.

    Sums of parts are held twice, so they take half as many results at a time.
    """
    whole = 128 // item
    depths = {min(whole, max(power(summed), 32 // item))}
    if summed > whole // 2:
        depths |= {d for d in (whole // 2,) if -(-summed // d) * d <= 0.85 * (-(-summed // whole) * whole)}
    widest = max(power(columns), 16)
    for half, width in _SHAPES:
        if width <= widest and (width < 256 or item == 2) and (parts == 1 or half * width <= 64 * 128):
            for depth in sorted(depths, reverse=True):
                yield Shape(half, width, depth)


def boxes(shape: Shape, steps: Ints, images: int, rows: tuple[int, int]) -> Iterator[Box]:
    """The boxes of a shape over planes, rows and pixels, as `steps` has them; `rows`: taps that may share, how far."""
    whole = 2 * shape.half
    planes, heights, pixels = (min(power(size), MOST_BOX) for size in steps)
    for height in _powers(min(heights, whole)):
        for plane in _powers(min(planes, whole // height)):
            for pixel in _powers(min(pixels, whole // height // plane)):
                image = whole // height // plane // pixel
                if image > max(power(images), _least(whole, planes, heights, pixels)) or image > MOST_BOX:
                    continue
                yield Box((height, plane, image, pixel), 1, 0)
                count, apart = rows
                more = power((count - 1) * abs(apart))
                if count > 1 and plane * image * pixel % 8 == 0 and more <= max(height, 8):
                    yield Box((height, plane, image, pixel), count, more)


def _powers(most: int) -> Iterator[int]:
    at = 1
    while at <= most:
        yield at
        at *= 2


def _least(whole: int, planes: int, heights: int, pixels: int) -> int:
    """Images that a box has if it is as large as it may be on all other axes."""
    return max(1, whole // min(whole, planes * heights * pixels))


def staged(box: Box, shape: Shape, item: int, room: int, uses: int) -> Iterator[Box]:
    """The box with as many stages as fit in so many bytes. `uses`: blocks of weights of a whole sum, 0 if they differ.

    Barriers of the copy engine are few: more than eight stages were never of use.
    """
    a, b = box.reads * shape.depth * item, shape.depth * shape.columns * item
    if uses and room - uses * b >= 2 * a and uses <= 64:
        yield box._replace(a_stages=min(MOST_STAGES, (room - uses * b) // a), b_stages=uses, resident=True)
    if box.rows == 1:
        count = min(MOST_STAGES, room // (a + b))
        if count >= 2:
            yield box._replace(a_stages=count, b_stages=count)
        return
    for count in (3, 2):
        weights = min(ROW_STAGES, (room - count * a) // b)
        if weights >= (5 if count == 3 else 2):
            yield box._replace(a_stages=count, b_stages=weights)
            return
