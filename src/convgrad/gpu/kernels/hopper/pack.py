"""Weights as Hopper's gathers read them where they do not lie so already: (channel of the result, tap, channel).

Columns of a tile may be channels of several groups, whose weights then lie in blocks, with zeros between them; or, for
x of few channels, they are channels of all positions within a stride, each with the taps that it has.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .split import three


@triton.jit
def pack(
    w,
    packed,
    strides,  # group, channel of the result, channel that is summed over, planes, rows, pixels
    kernel,  # taps of w on each axis
    taps,  # taps of the packed weights on each axis
    shift,  # where x has several positions in a column tile: what the first tap of the position 0 is
    depth,  # channels of the packed weights
    columns,  # of a tile
    subtiles,  # tiles that share their groups
    window,  # channels of the input that they read
    share_made,  # channels of the result that they make
    group_made,  # channels of a group of the result
    group_summed,
    made,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    INNER: tl.constexpr,
    ROUND: tl.constexpr,
    EVEN_FIRST: tl.constexpr,  # whether of every eight channels those with even numbers come before odd ones
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some rows of one tap."""
    gdc_launch_dependents()
    gdc_wait()
    number = tl.program_id(0)
    blocks = depth // DEPTH
    k = number % blocks * DEPTH + tl.arange(0, DEPTH)
    number = number // blocks
    count = taps[0] * taps[1] * taps[2]
    tap = number % count
    row = number // count * ROWS + tl.arange(0, ROWS)
    t2 = tap % taps[2]
    t1 = tap // taps[2] % taps[1]
    t0 = tap // (taps[2] * taps[1])
    tile = row // columns
    share = tile // subtiles
    j = tile % subtiles * columns + row % columns
    if INNER > 0:
        # A position i within a stride and input -u, counted from the first one, meet by the tap shift + i - stride*u.
        m0 = shift[0] + j // (INNER * STRIDE[2] * STRIDE[1]) - t0 * STRIDE[0]
        m1 = shift[1] + j // (INNER * STRIDE[2]) % STRIDE[1] - t1 * STRIDE[1]
        m2 = shift[2] + j // INNER % STRIDE[2] - t2 * STRIDE[2]
        has = (j < made) & (m0 >= 0) & (m1 >= 0) & (m2 >= 0)
        has = has & (m0 % DILATION[0] == 0) & (m1 % DILATION[1] == 0) & (m2 % DILATION[2] == 0)
        k0 = m0 // DILATION[0]
        k1 = m1 // DILATION[1]
        k2 = m2 // DILATION[2]
        has = has & (k0 < kernel[0]) & (k1 < kernel[1]) & (k2 < kernel[2])
        c = j % INNER
        group = c * 0
    else:
        channel = share * share_made + j
        has = (j < share_made) & (channel < made)
        group = channel // group_made
        c = channel % group_made
        k0 = t0
        k1 = t1
        k2 = t2
    channel_of = k // 8 * 8 + k % 4 * 2 + k // 4 % 2 if EVEN_FIRST else k
    summed = (share * window // 8 * 8)[:, None] + channel_of[None, :]
    reads = has[:, None] & (summed // group_summed == group[:, None])
    at = group * strides[0] + c * strides[1] + k0 * strides[3] + k1 * strides[4] + k2 * strides[5]
    values = tl.load(w + at[:, None] + (summed % group_summed) * strides[2], mask=reads, other=0.0)
    if ROUND:
        # The matrix units look at the upper 19 bits of f32 alone. An infinity or NaN stays one.
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(values) < 1e38, nearest, values)
    to = packed + (row * (PARTS * count) + tap)[:, None] * depth + k[None, :]
    if PARTS == 3:
        first, second, third = three(values)
        tl.store(to, first)
        tl.store(to + count * depth, second)
        tl.store(to + 2 * count * depth, third)
    else:
        tl.store(to, values)
