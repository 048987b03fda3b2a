"""The same computation in fewer steps: along an axis whose windows touch and do not overlap, a window's elements are
channels, where they lie in memory as channels do; and what no window meets is left out. Addresses and results stay as
they are.
"""

from __future__ import annotations

from dataclasses import replace

from ...spec.problem import Ints, Problem, settle


def merged(p: Problem) -> Problem:
    """The problem with every such axis merged; itself, if there is none."""
    for axis in reversed(range(p.rank)):
        if _touch(p, axis) and _follow(p, axis):
            p = _merge(p, axis)
    return p


def met(p: Problem) -> Problem:
    """The problem by the elements of x that windows of one element meet; itself, if there are others or x is wanted."""
    single = max(p.w) == 1 and not any(p.pad) and max(p.stride) > 1
    inside = all((y - 1) * step < x for x, y, step in zip(p.x, p.y, p.stride, strict=True))
    if p.wanted == "x" or not single or not inside:
        return p
    far = tuple(stride * step for stride, step in zip(p.x_strides[3:], p.stride, strict=True))
    found = replace(p, x=p.y, stride=(1,) * p.rank)
    return replace(found, x_strides=settle(found.shape("x"), (*p.x_strides[:3], *far)))


def _touch(p: Problem, axis: int) -> bool:
    """Whether every element of x along an axis is in one window, and has one tap."""
    windows = p.w[axis] == p.stride[axis] > 1 and (p.dilation[axis], p.pad[axis]) == (1, 0)
    return windows and p.x[axis] == p.y[axis] * p.stride[axis]


def _follow(p: Problem, axis: int) -> bool:
    """Whether a window's elements, of x and of w, are at one distance from each other, as are their channels."""
    if p.g > 1 or not p.cx or (p.wanted == "x" and p.bias_stride is not None):
        return False
    pairs = ((p.x_strides[3 + axis], p.x_strides[2]), (p.w_strides[3 + axis], p.w_strides[2]))
    return p.cx == 1 or all(outer == p.cx * inner for outer, inner in pairs)


def _merge(p: Problem, axis: int) -> Problem:
    size = p.stride[axis]
    x, w = list(p.x_strides), list(p.w_strides)
    if p.cx == 1:
        x[2], w[2] = x[3 + axis], w[3 + axis]
    x[3 + axis] = x[3 + axis] * size if p.y[axis] > 1 else 0
    w[3 + axis] = 0

    def with_one(sizes: Ints, value: int = 1) -> Ints:
        return (*sizes[:axis], value, *sizes[axis + 1 :])

    return replace(
        p,
        cx=p.cx * size,
        x=with_one(p.x, p.y[axis]),
        w=with_one(p.w),
        stride=with_one(p.stride),
        x_strides=tuple(x),
        w_strides=tuple(w),
    )
