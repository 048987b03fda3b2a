"""The end of a sum that was taken in parts: they are added in their order, then the bias and what the result held."""

import triton
import triton.language as tl

from .common import finished, program, span


@triton.jit
def finish(
    workspace,
    out,
    bias,
    sizes,  # of six axes, in the order in which the workspace has them
    out_strides,  # of the same axes
    bias_strides,  # 0 for axes that are no channels
    elements,
    parts,
    COUNT: tl.constexpr,
    TOGETHER: tl.constexpr,  # parts that are read at once, where there are many of few results
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """A run of results. Without any parts, they are the bias, and what was there."""
    e = span(program(WIDE) * COUNT, COUNT, WIDE)
    has = e < elements
    sums = tl.zeros([TOGETHER, COUNT], tl.float64 if DOUBLE else tl.float32)
    for first in tl.range(0, parts, TOGETHER):
        part = span(first, TOGETHER, WIDE)[:, None]
        sums += tl.load(workspace + part * elements + e[None, :], mask=(part < parts) & has[None, :], other=0.0)
    acc = tl.sum(sums, 0)
    to = out
    to_bias = bias
    q = e
    for step in tl.static_range(6):
        at = q % sizes[5 - step]
        q = q // sizes[5 - step]
        to = to + at * out_strides[5 - step]
        to_bias = to_bias + at * bias_strides[5 - step]
    acc = finished(acc, to, to_bias, ACCUMULATE, BIAS, has)
    tl.store(to, acc.to(out.dtype.element_ty), mask=has)
