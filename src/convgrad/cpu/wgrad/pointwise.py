"""A 1x1 convolution as a sum over channels, which the code for weight gradients computes with pixels in the lanes."""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..plan.axes import Axis, simplify
from ..plan.bits import POINTWISE_FILLED, POINTWISE_VECTORS
from ..plan.records import up
from ..target import Target


def as_sum(p: Problem, target: Target) -> Problem | None:
    """The 1x1 convolution as a weight gradient, if its pixels are contiguous in x and y and fill vectors; else None.

    Each image becomes a group of its own, w takes the place of x, and pixels that of y's channels:
        out[n][c][pixel] = Σ_k w[k][c] · in[n][k][pixel]
    """
    lanes = target.lanes(DTYPES[p.dtype].accumulator.itemsize)
    axes = [a for a in simplify(p).axes if not (a.plain and a.x == 1)]
    if p.g > 1 or p.bias_stride is not None or not 1 <= len(axes) <= 2 or not all(a.plain for a in axes):
        return None
    last, images = axes[-1], axes[0] if len(axes) == 2 else Axis(1, 1)
    contiguous = last.x_step == last.y_step == 1 and 1 not in (p.x_strides[2], p.y_strides[2])
    if not contiguous or last.x < POINTWISE_VECTORS * lanes or last.x < POINTWISE_FILLED * up(last.x, lanes):
        return None
    if p.wanted == "y":
        in_step, out_step, terms, rows = p.x_strides[2], p.y_strides[2], p.cx, p.cy
        image, out_image, w_row, w_term = images.x_step, images.y_step, p.w_strides[1], p.w_strides[2]
    else:
        in_step, out_step, terms, rows = p.y_strides[2], p.x_strides[2], p.cy, p.cx
        image, out_image, w_row, w_term = images.y_step, images.x_step, p.w_strides[2], p.w_strides[1]
    one = (1,)
    return replace(
        p, wanted="w", n=1, g=images.x, cx=rows, cy=last.x, x=(terms,), w=one, y=(terms,), stride=one, dilation=one,
        pad=(0,), x_strides=(0, 0, w_row, w_term), w_strides=(out_image, 1, out_step, 0),
        y_strides=(0, image, 1, in_step),
    )  # fmt: skip


def tensors(p: Problem) -> tuple[str, str, str]:
    """The tensors that are x, y and w of that sum."""
    return ("w", "x", "y") if p.wanted == "y" else ("w", "y", "x")
