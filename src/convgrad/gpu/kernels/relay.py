"""A copy of a tensor, or of part of it, that lies otherwise in memory: neighbours become pixels, or channels."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import finished, program, span, stride, unfold


@triton.jit
def relay(
    given,
    out,
    bias,
    given_strides,  # n, g, c and three spatial axes
    out_strides,
    sizes,  # spatial; all but the last are 1 where they are one axis in memory
    size_factors,
    groups,
    made,  # channels of a group of the result
    given_groups,
    given_channels,  # what the result has more of, is zeros
    bias_stride,
    GIVEN_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    MERGED: tl.constexpr,  # whether space is one axis
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ORDER: tl.constexpr,  # among the launches of a plan that begin early: see plan/chains.py
):
    """A tile: some channels of some pixels of an image. Loads and stores each go along their own neighbours."""
    if ORDER != "alone":
        gdc_launch_dependents()
    if ORDER == "after":
        gdc_wait()
    number = program(WIDE)
    pixels = sizes[0] * sizes[1] * sizes[2]
    tiles = tl.cdiv(pixels, PIXELS)
    p = span(number % tiles * PIXELS, PIXELS, WIDE)
    number = number // tiles
    tiles = tl.cdiv(made, CHANNELS)
    c = span(number % tiles * CHANNELS, CHANNELS, WIDE)
    number = number // tiles
    g = number % groups
    n = number // groups
    from_given = g * given_strides[1] + n * given_strides[0]
    to_out = g * out_strides[1] + n * out_strides[0]
    there = (p < pixels)[None, :]
    if MERGED:
        at_given = p * stride(given_strides, 5, GIVEN_UNIT)
        at_out = p * stride(out_strides, 5, OUT_UNIT)
    else:
        _, p0, p1, p2 = unfold(p, sizes, size_factors, WIDE)
        at_given = p0 * given_strides[3] + p1 * given_strides[4] + p2 * given_strides[5]
        at_out = p0 * out_strides[3] + p1 * out_strides[4] + p2 * out_strides[5]
    read = given + from_given + (c * stride(given_strides, 2, GIVEN_UNIT))[:, None] + at_given[None, :]
    held = (c < given_channels) & (g < given_groups)
    values = tl.load(read, mask=held[:, None] & there, other=0.0)
    to = out + to_out + (c * stride(out_strides, 2, OUT_UNIT))[:, None] + at_out[None, :]
    has = (c < made)[:, None] & there
    if BIAS or ACCUMULATE:
        to_bias = tl.broadcast_to((bias + (g * made + c) * bias_stride)[:, None], (CHANNELS, PIXELS))
        values = finished(values.to(tl.float64 if DOUBLE else tl.float32), to, to_bias, ACCUMULATE, BIAS, has)
    tl.store(to, values.to(out.dtype.element_ty), mask=has)
    if ORDER == "beside":
        # What was launched before does not concern this copy, but it has to be complete when this is.
        gdc_wait()
