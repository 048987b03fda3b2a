"""Launches that copy: from any strides to any others, and zeros."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from ...spec.problem import Ints
from .axes import factors, unit
from .launches import finishers
from .records import Launch, Values

ELEMENTS = 4096  # of a tile
WIDE = 2**31 - 2**20


class View(NamedTuple):
    """A tensor or an area over six axes: n, g, c and three in space, or what is taken for them."""

    name: str
    dtype: str
    shape: Ints
    strides: Ints

    @property
    def reach(self) -> int:
        """The distance of the last element from the first one, at most."""
        return sum(abs(stride) * size for stride, size in zip(self.strides, self.shape, strict=True))


def copy(given: View, made: View, bias: tuple[int, str] | None = None, accumulates: bool = False) -> Launch:
    """A copy to a tensor that has the same sizes, but for groups and channels: what it has more of, is zeros.

    `bias` is the stride of one that is added, and its element type.
    """
    given, made = merged(given, made)
    channels, space = made.shape[2], made.shape[3:]
    tile = min(64, 1 << (channels - 1).bit_length())
    pixels = min(ELEMENTS // tile, max(16, 1 << (prod(space) - 1).bit_length()))
    values: Values = (
        ("given_strides", given.strides),
        ("out_strides", made.strides),
        ("sizes", space),
        ("size_factors", factors(space)),
        ("groups", made.shape[1]),
        ("made", channels),
        ("given_groups", given.shape[1]),
        ("given_channels", given.shape[2]),
        ("bias_stride", bias[0] if bias else 0),
    )
    constants = (
        ("GIVEN_UNIT", unit(given.strides)),
        ("OUT_UNIT", unit(made.strides)),
        ("MERGED", space[:2] == (1, 1)),
        ("CHANNELS", tile),
        ("PIXELS", pixels),
        ("DOUBLE", "f64" in (given.dtype, made.dtype)),
        ("WIDE", max(given.reach, made.reach) >= WIDE),
        ("BIAS", bias is not None),
        ("ACCUMULATE", accumulates),
        ("ORDER", "alone"),
    )
    out = (made.name, made.dtype)
    tensors = ((given.name, given.dtype), out, ("bias", bias[1]) if bias else out)
    programs = ceil(prod(space) / pixels) * ceil(channels / tile) * made.shape[1] * made.shape[0]
    return Launch("relay", programs, tensors, values, constants, 4, 1)


def merged(given: View, made: View) -> tuple[View, View]:
    """The same two tensors, whose axes in space are one where they can be, as are groups and channels."""
    sizes, steps = [list(view.shape) for view in (given, made)], [list(view.strides) for view in (given, made)]
    for outer, inner in ((4, 5), (3, 4), (4, 5), (1, 2)):
        if sizes[0][inner] != sizes[1][inner] or sizes[0][outer] != sizes[1][outer]:
            continue
        if all(size[inner] == 1 for size in sizes):  # the outer axis takes its place
            for size, step in zip(sizes, steps, strict=True):
                size[inner], size[outer], step[inner], step[outer] = size[outer], 1, step[outer], 0
        elif all(o[outer] == o[inner] * size[inner] or size[outer] == 1 for o, size in zip(steps, sizes, strict=True)):
            for size, step in zip(sizes, steps, strict=True):
                size[inner], size[outer], step[outer] = size[inner] * size[outer], 1, 0
    first, second = ((tuple(size), tuple(step)) for size, step in zip(sizes, steps, strict=True))
    return given._replace(shape=first[0], strides=first[1]), made._replace(shape=second[0], strides=second[1])


def zeros(name: str, dtype: str, elements: int) -> Launch:
    """An area of zeros: the end of a sum that has no parts."""
    count = finishers(elements)
    values: Values = (
        ("sizes", (1, 1, 1, 1, 1, elements)),
        ("out_strides", (0, 0, 0, 0, 0, 1)),
        ("bias_strides", (0, 0, 0, 0, 0, 0)),
        ("elements", elements),
        ("parts", 0),
    )
    constants = (
        ("COUNT", count),
        ("BESIDE", 1),
        ("TOGETHER", 1),
        ("DOUBLE", dtype == "f64"),
        ("WIDE", elements >= WIDE),
        ("BIAS", False),
        ("ACCUMULATE", False),
    )
    out = (name, dtype)
    return Launch("finish", ceil(elements / count), (out, out, out), values, constants, 4, 1)
