"""y and x of layers whose groups have few channels, such as depthwise ones: products one by one, without matrices.

Channels of all groups lie side by side in the lanes. The phases and taps are those of `gather`.
"""

import triton
import triton.language as tl

from .common import finished, next_tap, program, span, spatial, stride, tap_at, unfold, walk, within


@triton.jit
def lanes(
    a,
    w,
    out,
    bias,
    a_strides,
    w_strides,
    out_strides,
    bias_stride,
    a_sizes,
    out_sizes,
    lead,
    rest,
    steps,
    step_factors,
    images,
    groups,
    summed,
    summed_factor,
    summed_shift,
    made,
    parts,
    part_stride,
    RANK: tl.constexpr,  # axes in space that are in use: the last ones
    KERNEL: tl.constexpr,
    STEP: tl.constexpr,
    DILATION: tl.constexpr,
    COMMON: tl.constexpr,
    INVERSE: tl.constexpr,
    MOVE: tl.constexpr,
    TAP_MOVE: tl.constexpr,
    TAP_STEP: tl.constexpr,
    A_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One tile of results, by channels of all groups."""
    number = program(WIDE)
    tiles = tl.cdiv(groups * made, COLUMNS)
    q = span(number % tiles * COLUMNS, COLUMNS, WIDE)
    g = q // made
    c = q % made
    number = number // tiles
    tiles = tl.cdiv(images * steps[0] * steps[1] * steps[2], ROWS)
    n, t0, t1, t2 = unfold(span(number % tiles * ROWS, ROWS, WIDE), steps, step_factors, WIDE, RANK)
    number = number // tiles
    f2 = number % STEP[2]
    number = number // STEP[2]
    f1 = number % STEP[1]
    number = number // STEP[1]
    f0 = number % STEP[0]
    part = number // STEP[0]
    i0, b0, taps0, k0 = walk(f0, lead[0], rest[0], KERNEL[0], STEP[0], DILATION[0], COMMON[0], INVERSE[0])
    i1, b1, taps1, k1 = walk(f1, lead[1], rest[1], KERNEL[1], STEP[1], DILATION[1], COMMON[1], INVERSE[1])
    i2, b2, taps2, k2 = walk(f2, lead[2], rest[2], KERNEL[2], STEP[2], DILATION[2], COMMON[2], INVERSE[2])
    b0 = b0 + t0 * MOVE[0]
    b1 = b1 + t1 * MOVE[1]
    b2 = b2 + t2 * MOVE[2]
    i0 = i0 + t0 * STEP[0]
    i1 = i1 + t1 * STEP[1]
    i2 = i2 + t2 * STEP[2]
    row = (n < images) & within(i0, i1, i2, out_sizes, WIDE, RANK)
    column = g < groups
    from_a = n * stride(a_strides, 0, A_UNIT) + spatial(b0, b1, b2, a_strides, A_UNIT)
    from_a = a + from_a[:, None] + (g * stride(a_strides, 1, A_UNIT))[None, :]
    from_w = w + g * stride(w_strides, 0, W_UNIT) + c * stride(w_strides, 2, W_UNIT)
    from_w += spatial(k0, k1, k2, w_strides, W_UNIT)
    taps = taps0 * taps1 * taps2
    count = taps * summed
    acc = tl.zeros([ROWS, COLUMNS], tl.float64 if DOUBLE else tl.float32)
    first = part * tl.cdiv(count, parts)
    r, j0, j1, j2 = tap_at(first, taps0, taps1, taps2)
    for _ in tl.range(first, tl.minimum(first + tl.cdiv(count, parts), count)):
        a_offset = spatial(j0 * TAP_MOVE[0], j1 * TAP_MOVE[1], j2 * TAP_MOVE[2], a_strides, A_UNIT)
        w_offset = spatial(j0 * TAP_STEP[0], j1 * TAP_STEP[1], j2 * TAP_STEP[2], w_strides, W_UNIT)
        there = row & within(b0 + j0 * TAP_MOVE[0], b1 + j1 * TAP_MOVE[1], b2 + j2 * TAP_MOVE[2], a_sizes, WIDE, RANK)
        meets = there[:, None] & column[None, :]
        left = tl.load(from_a + (a_offset + r * stride(a_strides, 2, A_UNIT)), mask=meets, other=0.0)
        right = tl.load(from_w + (w_offset + r * stride(w_strides, 1, W_UNIT)), mask=column, other=0.0)
        acc += left.to(acc.dtype) * right.to(acc.dtype)[None, :]
        r, j0, j1, j2 = next_tap(r, j0, j1, j2, taps0, taps1, taps2)
    has = row[:, None] & column[None, :]
    rows = n * stride(out_strides, 0, OUT_UNIT) + spatial(i0, i1, i2, out_strides, OUT_UNIT)
    columns = g * stride(out_strides, 1, OUT_UNIT) + c * stride(out_strides, 2, OUT_UNIT)
    to = out + part * part_stride + rows[:, None] + columns[None, :]
    to_bias = tl.broadcast_to((bias + q * bias_stride)[None, :], (ROWS, COLUMNS))
    acc = finished(acc, to, to_bias, ACCUMULATE, BIAS, has)
    tl.store(to, acc.to(out.dtype.element_ty), mask=has)
