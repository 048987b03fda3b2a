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
    BESIDE: tl.constexpr,  # parts side by side in the lanes, where there are many of few results
    TOGETHER: tl.constexpr,  # such rows of parts whose loads do not wait for each other
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """A run of results. Without any parts, they are the bias, and what was there."""
    e = span(program(WIDE) * COUNT, COUNT, WIDE)
    has = e < elements
    sums = tl.zeros([BESIDE, COUNT], tl.float64 if DOUBLE else tl.float32)
    for first in tl.range(0, parts, BESIDE * TOGETHER):
        for more in tl.static_range(TOGETHER):
            part = span(first + more * BESIDE, BESIDE, WIDE)[:, None]
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
