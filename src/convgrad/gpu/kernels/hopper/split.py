"""f32 as a sum of three bf16, for the matrix units: three tensors whose channels lie side by side."""

import triton
import triton.language as tl

from ..common import stride, unfold


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
    sizes,
    size_factors,
    group_channels,
    all_channels,  # of all groups
    made,  # channels of the parts: the last ones are zeros
    part_stride,
    UNIT: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile: some channels of some pixels of an image."""
    number = tl.program_id(0)
    pixels = sizes[0] * sizes[1] * sizes[2]
    tiles = tl.cdiv(pixels, PIXELS)
    p = number % tiles * PIXELS + tl.arange(0, PIXELS)
    number = number // tiles
    tiles = tl.cdiv(made, CHANNELS)
    c = number % tiles * CHANNELS + tl.arange(0, CHANNELS)
    n = number // tiles
    _, p0, p1, p2 = unfold(p, sizes, size_factors, False)
    at = p0 * stride(given_strides, 3, UNIT) + p1 * stride(given_strides, 4, UNIT) + p2 * stride(given_strides, 5, UNIT)
    apart = c // group_channels * given_strides[1] + c % group_channels * given_strides[2]
    channel = c if UNIT == 2 else apart
    there = (p < pixels)[:, None]
    read = given + n * given_strides[0] + at[:, None] + channel[None, :]
    values = tl.load(read, mask=there & (c < all_channels)[None, :], other=0.0)
    to = parts + (n * pixels + p)[:, None] * made + c[None, :]
    has = there & (c < made)[None, :]
    first, second, third = three(values)
    step = tl.zeros([1], tl.int64) + part_stride
    tl.store(to, first, mask=has)
    tl.store(to + step, second, mask=has)
    tl.store(to + 2 * step, third, mask=has)
