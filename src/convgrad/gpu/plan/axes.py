"""A problem on three spatial axes, which is all that kernels know: what they are told of each axis."""

from __future__ import annotations

from math import ceil, gcd, prod
from typing import NamedTuple

from ...spec.problem import Ints, Problem, Role
from .records import Constants, Values

LAST = 5  # the innermost of a tensor's six axes


class Axes(NamedTuple):
    """A problem's sizes on three spatial axes; the ones that it lacks come first and have one element."""

    x: Ints
    w: Ints
    y: Ints
    stride: Ints
    dilation: Ints
    pad: Ints

    def sizes(self, role: Role) -> Ints:
        """The spatial sizes of a tensor."""
        return {"x": self.x, "w": self.w, "y": self.y}[role]


def three(p: Problem) -> Axes:
    """The axes of a problem."""
    more = (1,) * (3 - p.rank)
    zeros = (0,) * (3 - p.rank)
    return Axes(more + p.x, more + p.w, more + p.y, more + p.stride, more + p.dilation, zeros + p.pad)


def strides(p: Problem, role: Role) -> Ints:
    """The strides of a tensor over its six axes, in elements."""
    found = p.strides(role)
    return (*found[:3], *(0,) * (3 - p.rank), *found[3:])


def unit(of: Ints) -> int:
    """The axis that a kernel may take to be contiguous: the last one that is, but -1 if none is."""
    return max((axis for axis, stride in enumerate(of) if stride == 1), default=-1)


def reach(p: Problem) -> int:
    """The largest distance between an address that a kernel computes and the first element, in elements."""
    axes = three(p)
    most = 0
    for role in ("x", "w", "y"):
        # A tap may begin in the padding, and a tile may go beyond the end.
        more = (0, 0, 0, *(max(b + (k - 1) * d, 64) for b, k, d in zip(axes.pad, axes.w, axes.dilation, strict=True)))
        shape = (*p.shape(role)[:3], *axes.sizes(role))
        spans = [(size + extra) * abs(s) for size, extra, s in zip(shape, more, strides(p, role), strict=True)]
        most = max(most, sum(spans), prod(shape))
    return most


def is_wide(p: Problem) -> bool:
    """Whether offsets need 64 bits. Running numbers go beyond the sizes of tensors by a tile at most."""
    pixels = p.n * max(prod(p.x), prod(p.y), prod(p.w) * p.g * max(p.cx, p.cy))
    return max(reach(p), pixels, p.n * prod(p.y) * max(p.stride)) >= 2**31 - 2**20


def factors(sizes: Ints) -> Ints:
    """For each size a factor and a shift: n // size = (2n * factor >> 32) >> shift for all n below 2^31.

    With 2^(s-1) < size <= 2^s, the factor is 2^(31+s)/size rounded up, which is at least 2^31 and less than 2^32, and
    exceeds the quotient by less than 2^s/size: too little to count. It is given as the i32 of the same bits.
    """
    found: list[int] = []
    for size in sizes:
        shift = max(size - 1, 0).bit_length()
        found += (-(-(1 << (31 + shift)) // max(size, 1)) - (1 << 32), shift)
    return tuple(found)


class Walk(NamedTuple):
    """How results of a gather go over its input: see `gpu/kernels/gather.py`."""

    constants: Constants
    values: Values
    phases: int
    pixels: int  # of a phase, at most, over all images


def walk(p: Problem) -> Walk:
    """How y goes over x, or x over y by the remainders of its positions by the stride."""
    axes = three(p)
    back = p.wanted == "x"
    step = axes.stride if back else (1, 1, 1)
    common = tuple(gcd(s, d) for s, d in zip(step, axes.dilation, strict=True))
    inverse = tuple(pow(d // c, -1, s // c) for s, d, c in zip(step, axes.dilation, common, strict=True))
    sizes = axes.sizes(p.wanted)
    steps = tuple(ceil(size / s) for size, s in zip(sizes, step, strict=True))
    lead = tuple(b // s for b, s in zip(axes.pad, step, strict=True)) if back else tuple(-b for b in axes.pad)
    rest = tuple(b % s for b, s in zip(axes.pad, step, strict=True)) if back else (0, 0, 0)
    constants = (
        ("KERNEL", axes.w),
        ("STEP", step),
        ("DILATION", axes.dilation),
        ("COMMON", common),
        ("INVERSE", inverse),
        ("MOVE", (1, 1, 1) if back else axes.stride),
        ("TAP_MOVE", tuple(-(d // c) for d, c in zip(axes.dilation, common, strict=True)) if back else axes.dilation),
        ("TAP_STEP", tuple(s // c for s, c in zip(step, common, strict=True))),
    )
    values: Values = (
        ("a_sizes", axes.sizes("y" if back else "x")),
        ("out_sizes", sizes),
        ("lead", lead),
        ("rest", rest),
        ("steps", steps),
        ("step_factors", factors(steps)),
    )
    return Walk(constants, values, prod(step), p.n * prod(steps))
