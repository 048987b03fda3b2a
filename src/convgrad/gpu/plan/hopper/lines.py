"""The level of tensors with channels first: gathers and weight gradients that read pixels as they lie, without copies.

Matrix units take numbers of 16 bits from shared memory by rows or by columns. So boxes may have their pixels innermost,
if rows of the tensor begin at multiples of 16 bytes, and taps lie above each other. Most such layers are pointwise,
whose pixels are one long row, whatever their sizes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ....dtypes import DTYPES
from ....spec.problem import Problem, settle
from ...target import Target
from ..axes import three
from ..records import Plan
from . import gather, weights
from .views import space
from .weights import View

TOLD = "pixels lie innermost in boxes, as they do in memory"


def plan(p: Problem, target: Target, precision: str) -> Plan | str:
    """The plan for a problem, or why this level does not serve it."""
    if DTYPES[p.dtype].size != 2 and (p.dtype, precision) != ("f32", "tf32"):
        return "matrix units take 16 bits alone by columns, and f32 in tf32 through registers"
    p = flat(p)
    if p.w[-1] > 1 or p.pad[-1]:
        return "the copy engine begins lines at multiples of 16 bytes, where taps do not"
    if p.wanted == "w":
        view = weights_view(p)
        found = view if isinstance(view, str) else weights.best_of(p, [(view, ())], target, precision)
    else:
        found = gather.plan_as_it_is(p, target, precision, space(p, lines=True))
    return found if isinstance(found, str) else replace(found, notes=(TOLD, *found.notes))


def flat(p: Problem) -> Problem:
    """A pointwise problem with all pixels of an image as one row, if they lie so in memory."""
    ones = (1,) * p.rank
    if (p.w, p.stride, p.pad) != (ones, ones, (0,) * p.rank) or p.x != p.y:
        return p
    for role in ("x", "y"):
        count = 1
        for size, stride in zip(reversed(p.x), reversed(p.strides(role)[3:]), strict=True):
            if size > 1 and stride != count:
                return p
            count *= size
    pixels = (prod(p.x),)
    changed = replace(p, x=pixels, y=pixels, w=(1,), stride=(1,), dilation=(1,), pad=(0,))
    of_x, of_w, of_y = ((*p.strides(role)[:3], 1) for role in ("x", "w", "y"))
    return replace(
        changed,
        x_strides=settle(changed.shape("x"), of_x),
        w_strides=settle(changed.shape("w"), of_w),
        y_strides=settle(changed.shape("y"), of_y),
    )


def weights_view(p: Problem) -> View | str:
    """A weight gradient as the kernel sees it, or why it cannot."""
    if p.bias_stride is not None:
        return "it adds no bias"
    if not p.flops:
        return "there is no product"
    axes = three(p)
    most = max(p.n * prod(axes.x), p.n * prod(axes.y), *(d * k for d, k in zip(axes.dilation, axes.w, strict=True)))
    if most >= 2**28:
        return "sizes go beyond 31 bits"
    x, y = weights.in_lines(p, "x", p.cx), weights.in_lines(p, "y", p.cy)
    if isinstance(x, str) or isinstance(y, str):
        return x if isinstance(x, str) else str(y)
    view = weights.look(p, x, y, 1, DTYPES[p.dtype].size)
    if isinstance(view, str):
        return view
    if not view.taps.stride[2] == view.x.strides[2] == view.y.strides[2] == 1:
        return "it takes every pixel of a row"
    return view._replace(lines="xy")
