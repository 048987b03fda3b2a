"""Tensors as the copy engine sees them: by rows, planes, images, pixels and channels."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

from ....dtypes import DTYPES
from ....spec.problem import Ints, Problem, Role, dense_strides
from ..records import Descriptor
from .views import Space, View, arranged_strides

ALIGNED = 16  # bytes
WEIGHTS = "packed weights"
"""The area for weights that are packed."""
PARTS = "parts of the input"
"""The area for the input in three parts."""


class Operands(NamedTuple):
    """What the matrix units are given: elements of a type; of f32, one part or three."""

    dtype: str
    parts: int = 1

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].size

    @property
    def products(self) -> int:
        """Products of parts that are taken for one product."""
        return self.parts * (self.parts + 1) // 2


class Seen(NamedTuple):
    """A tensor by (row, plane, image, pixel, channel)."""

    role: Role
    dtype: str
    shape: Ints
    strides: Ints
    lines: bool = False  # whether pixels come last, behind channels

    def descriptor(self, box: Ints, phase: Ints = (0, 0, 0), stride: Ints = (1, 1, 1)) -> Descriptor:
        """A box of it by (row, plane, image, pixel, channel), at one phase of a stride on planes, rows and pixels."""
        planes, rows, pixels = phase
        by = self._ordered((stride[1], stride[0], 1, stride[2], 1))
        start = self._ordered((rows, planes, 0, pixels, 0))
        box = self._ordered(box)
        shape = tuple(ceil((size - at) / s) for size, at, s in zip(self.shape, start, by, strict=True))
        strides = tuple(size * s for size, s in zip(self.strides, by, strict=True))
        offset = sum(at * s for at, s in zip(start, self.strides, strict=True))
        swizzle = min(128, box[-1] * DTYPES[self.dtype].size)
        return Descriptor(self.role, self.dtype, shape, strides, box, swizzle, offset)

    def _ordered(self, values: Ints) -> Ints:
        """Of (row, plane, image, pixel, channel), what the copy engine is told."""
        return (*values[:3], values[4], values[3]) if self.lines else values


def seen(p: Problem, role: Role, sizes: Ints, order: Ints) -> Seen | str:
    """A tensor as the copy engine sees it, or why it cannot. `sizes`: of planes, rows and pixels."""
    n, g, c, planes, rows, pixels = arranged_strides(p, role, order)
    count, dtype = p.cx if role == "x" else p.cy, p.dtype_of(role)
    if (count > 1 and c != 1) or (p.g > 1 and g != count):
        return f"channels of {role} do not lie side by side"
    unit = ALIGNED // DTYPES[dtype].size
    shape = (sizes[1], sizes[0], p.n, sizes[2])
    # Axes of one element have no stride of their own.
    strides = tuple(s if size > 1 else unit for size, s in zip(shape, (rows, planes, n, pixels), strict=True))
    if any(s <= 0 or s % unit for s in strides):
        return f"strides of {role} are no multiples of {ALIGNED} bytes"
    return Seen(role, dtype, (*shape, p.g * count), (*strides, 1))


def seen_in_lines(p: Problem, role: Role, sizes: Ints, order: Ints) -> Seen | str:
    """The same of a tensor whose pixels lie side by side, and its channels apart."""
    n, g, c, planes, rows, pixels = arranged_strides(p, role, order)
    count, dtype = p.cx if role == "x" else p.cy, p.dtype_of(role)
    if pixels != 1 or (p.g > 1 and g != count * c):
        return f"pixels of {role} do not lie side by side"
    unit = ALIGNED // DTYPES[dtype].size
    channel = c if count > 1 else g
    shape = (sizes[1], sizes[0], p.n, p.g * count)
    strides = tuple(s if size > 1 else unit for size, s in zip(shape, (rows, planes, n, channel), strict=True))
    if any(s <= 0 or s % unit for s in strides):
        return f"strides of {role} are no multiples of {ALIGNED} bytes"
    return Seen(role, dtype, (*shape, sizes[2]), (*strides, 1), True)


class Weights(NamedTuple):
    """Weights by (channel, tap, channel), as they are or packed."""

    tensor: str
    shape: Ints
    strides: Ints
    tap_steps: Ints  # by how much the tap grows on planes, rows and pixels
    across: bool  # whether channels of the result come last

    def descriptor(self, dtype: str, columns: int, depth: int) -> Descriptor:
        """A block of a tap."""
        block = (depth, 1, columns) if self.across else (columns, 1, depth)
        swizzle = min(128, block[-1] * DTYPES[dtype].size)
        return Descriptor(self.tensor, dtype, self.shape, self.strides, block, swizzle)


def input_parts(p: Problem, s: Space) -> Seen:
    """The input in three parts, which lie in an area of their own as so many more images."""
    channels = ceil(p.g * (p.cx if p.wanted == "y" else p.cy) / 8) * 8
    axes = dict(zip(s.order, s.given, strict=True))
    steps = dict(zip(range(3), dense_strides((*(axes[at] for at in range(3)), channels)), strict=False))
    planes, rows, pixels = s.order
    shape = (axes[rows], axes[planes], 3 * p.n, axes[pixels], channels)
    return Seen(PARTS, "bf16", shape, (steps[rows], steps[planes], prod(s.given) * channels, steps[pixels], 1))


def natural(p: Problem, s: Space) -> Weights | None:
    """The weights where they lie, if the copy engine can bring them as they are needed.

    Not those in f32: matrix units take 32-bit operands by rows of the sum alone, and cut off what is not rounded.
    """
    _, cy_stride, cx_stride, *spatial = arranged_strides(p, "w", s.order)
    made, summed = (p.cy, cy_stride), (p.cx, cx_stride)
    if p.wanted == "x":
        made, summed = summed, made
    unit = ALIGNED // DTYPES[p.dtype].size
    known = [stride for size, stride in zip(s.kernel, spatial, strict=True) if size > 1]
    tap = min(known, default=unit)
    if p.g > 1 or p.dtype == "f32" or tap <= 0 or tap % unit or any(stride % tap for stride in known):
        return None
    steps = tuple(stride // tap if size > 1 else 0 for size, stride in zip(s.kernel, spatial, strict=True))
    taps = 1 + sum((size - 1) * step for size, step in zip(s.kernel, steps, strict=True))
    for across, outer, inner in ((False, made, summed), (True, summed, made)):
        apart = outer[1] if outer[0] > 1 else unit
        if (inner[1] == 1 or inner[0] == 1) and apart > 0 and apart % unit == 0:
            return Weights("w", (outer[0], taps, inner[0]), (apart, tap, 1), steps, across)
    return None


def packed(rows: int, taps: Ints, depth: int, parts: int) -> Weights:
    """Weights in an area of their own."""
    count = prod(taps) * parts
    steps = (taps[1] * taps[2], taps[2], 1)
    return Weights(WEIGHTS, (rows, count, depth), (count * depth, depth, 1), steps, False)


def views_of(input_: Seen, views: tuple[View, ...], stride: Ints, box: Ints) -> tuple[Descriptor, ...]:
    """A box of the input for each view, in the order of their sources."""
    return tuple(input_.descriptor(box, view.phase, stride) for view in views)


def rows_more(box: Descriptor, more: int) -> Descriptor:
    """The same box with another number of rows."""
    return replace(box, block=(more, *box.block[1:]))
