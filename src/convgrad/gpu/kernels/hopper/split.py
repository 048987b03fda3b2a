"""f32 as a sum of two or three bf16, for the matrix units: so many tensors whose channels lie side by side."""

import triton
import triton.language as tl

from ..common import program, span, stride, unfold


@triton.jit
def three(values):
    """The parts of f32, each rounded to nearest; of an infinity or NaN, the first is all."""
    first = values.to(tl.bfloat16)
    rest = tl.where(tl.abs(values) < float("inf"), values - first.to(tl.float32), 0.0)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split(
    given,
    parts,
    given_strides,  # image, group, channel, three spatial axes
    sizes,  # spatial; all but the last are 1 where they are one axis in memory
    size_factors,
    group_channels,
    all_channels,  # of all groups
    made,  # channels of the parts: the last ones are zeros
    part_stride,
    GIVEN_UNIT: tl.constexpr,
    GROUPED: tl.constexpr,
    MERGED: tl.constexpr,  # whether space is one axis
    PARTS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile: some channels of some pixels of an image. Loads and stores each go along their own neighbours."""
    number = program(WIDE)
    pixels = sizes[0] * sizes[1] * sizes[2]
    tiles = tl.cdiv(pixels, PIXELS)
    p = span(number % tiles * PIXELS, PIXELS, WIDE)
    number = number // tiles
    tiles = tl.cdiv(made, CHANNELS)
    c = span(number % tiles * CHANNELS, CHANNELS, WIDE)
    n = number // tiles
    if MERGED:
        at = p * stride(given_strides, 5, GIVEN_UNIT)
    else:
        _, p0, p1, p2 = unfold(p, sizes, size_factors, WIDE)
        at = p0 * given_strides[3] + p1 * given_strides[4] + p2 * stride(given_strides, 5, GIVEN_UNIT)
    if GROUPED:
        group = c // group_channels
        channel = group * given_strides[1] + (c - group * group_channels) * stride(given_strides, 2, GIVEN_UNIT)
    else:
        channel = c * stride(given_strides, 2, GIVEN_UNIT)
    there = (p < pixels)[:, None]
    read = given + n * given_strides[0] + at[:, None] + channel[None, :]
    values = tl.load(read, mask=there & (c < all_channels)[None, :], other=0.0)
    to = parts + (n * pixels + p)[:, None] * made + c[None, :]
    has = there & (c < made)[None, :]
    first, second, third = three(values)
    step = tl.zeros([1], tl.int64) + part_stride
    tl.store(to, first, mask=has)
    tl.store(to + step, second, mask=has)
    if PARTS == 3:
        tl.store(to + 2 * step, third, mask=has)
