"""What is planned, before anything is decided about its sums."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..plan.axes import Axis, Shape, simplify
from ..target import Target


class Work(NamedTuple):
    """What is planned: a sum over pixels, its axes, and the machine.

    Only `assign_roles` changes it: the target, if vectors of half the width cost less; the shape, if groups are side by
    side or images are paired; and the last two.

    `pointwise` says that it stands for a 1x1 convolution, `pairs` that pixels of bf16 are taken two at a time, and
    `image_pairs` that they are of two images.
    """

    problem: Problem
    shape: Shape
    target: Target
    pointwise: bool
    taps: int  # kernel elements
    pairs: bool = False
    image_pairs: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the pixels."""
        return self.shape.axes

    @property
    def item(self) -> int:
        """Bytes of a sum."""
        return DTYPES[self.problem.dtype].accumulator.itemsize

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.target.lanes(self.item)

    def channels(self, row_side: str) -> tuple[int, int]:
        """Channels in the rows and in the lanes, if the rows are of that side."""
        p = self.problem
        return (p.cx, p.cy) if row_side == "x" else (p.cy, p.cx)

    def channel_step(self, side: str) -> int:
        """Elements between channels of a side."""
        return (self.shape.x_channel if side == "x" else self.shape.y_channel)[1]


def work_of(p: Problem, target: Target, *, pointwise: bool) -> Work:
    """A problem as it comes."""
    shape = simplify(p)
    return Work(p, shape, target, pointwise, prod(a.k for a in shape.axes))
