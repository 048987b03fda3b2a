"""y and x as matrix products: results by channels, over the taps that each result has and the channels they read.

A result at first + STEP*t, of a phase, reads input begin + MOVE*t + TAP_MOVE*j by its tap first_tap + TAP_STEP*j. For
y there is one phase, with STEP 1 and MOVE the stride; for x there is a phase for every remainder by the stride, and
MOVE is 1.
"""

import triton
import triton.language as tl

from .common import divided, finished, next_tap, program, span, spatial, stride, tap_at, unfold, walk, within


@triton.jit
def gather(
    a,
    w,
    out,
    bias,
    a_strides,  # n, g, c and three spatial axes
    w_strides,  # g, channels that are summed over, channels of the result, three spatial axes
    out_strides,
    bias_stride,
    a_sizes,
    out_sizes,
    lead,
    rest,
    steps,  # t of a phase, at most
    step_factors,
    images,
    groups,
    summed,  # channels of a group that are summed over
    summed_factor,
    summed_shift,
    made,  # channels of a group of the result
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
    DEPTH: tl.constexpr,
    FLAT: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One tile of results. With `FLAT`, taps and channels are one axis of the sum, for layers of few channels."""
    number = program(WIDE)
    tiles = tl.cdiv(made, COLUMNS)
    c = span(number % tiles * COLUMNS, COLUMNS, WIDE)
    number = number // tiles
    g = number % groups
    number = number // groups
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
    column = c < made
    from_a = a + g * a_strides[1] + n * stride(a_strides, 0, A_UNIT) + spatial(b0, b1, b2, a_strides, A_UNIT)
    from_w = w + g * w_strides[0] + spatial(k0, k1, k2, w_strides, W_UNIT) + c * stride(w_strides, 2, W_UNIT)
    taps = taps0 * taps1 * taps2
    blocks = tl.cdiv(taps * summed, DEPTH) if FLAT else taps * tl.cdiv(summed, DEPTH)
    SINGLE: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2] == 1
    acc = tl.zeros([ROWS, COLUMNS], tl.float64 if DOUBLE else tl.float32)
    first = part * tl.cdiv(blocks, parts)
    run, j0, j1, j2 = tap_at(first, taps0, taps1, taps2)
    last = tl.minimum(first + tl.cdiv(blocks, parts), blocks)
    if STEP[0] * STEP[1] * STEP[2] == 1:  # a phase may have no taps
        tl.assume(first < last)
    for block in tl.range(first, last):
        if FLAT:
            r = span(block * DEPTH, DEPTH, WIDE)
            depth = r < taps * summed
            tap = divided(r, summed, summed_factor, summed_shift, WIDE)
            r = r - tap * summed
            _, q0, q1, q2 = tap_at(tap, taps0, taps1, taps2)
        elif SINGLE:
            q0, q1, q2 = 0, 0, 0
            r = span(block * DEPTH, DEPTH, WIDE)
            depth = r < summed
        else:
            q0, q1, q2 = j0, j1, j2
            r = span(run * DEPTH, DEPTH, WIDE)
            depth = r < summed
        a_offset = spatial(q0 * TAP_MOVE[0], q1 * TAP_MOVE[1], q2 * TAP_MOVE[2], a_strides, A_UNIT)
        w_offset = spatial(q0 * TAP_STEP[0], q1 * TAP_STEP[1], q2 * TAP_STEP[2], w_strides, W_UNIT)
        a_offset = a_offset + r * stride(a_strides, 2, A_UNIT)
        w_offset = w_offset + r * stride(w_strides, 1, W_UNIT)
        if FLAT:
            p0 = b0[:, None] + (q0 * TAP_MOVE[0])[None, :]
            p1 = b1[:, None] + (q1 * TAP_MOVE[1])[None, :]
            p2 = b2[:, None] + (q2 * TAP_MOVE[2])[None, :]
            meets = row[:, None] & within(p0, p1, p2, a_sizes, WIDE, RANK) & depth[None, :]
        else:
            there = row & within(
                b0 + q0 * TAP_MOVE[0], b1 + q1 * TAP_MOVE[1], b2 + q2 * TAP_MOVE[2], a_sizes, WIDE, RANK
            )
            meets = there[:, None] if EVEN else there[:, None] & depth[None, :]
        reads = column[None, :] if EVEN else column[None, :] & depth[:, None]
        left = tl.load(from_a[:, None] + a_offset[None, :], mask=meets, other=0.0)
        right = tl.load(from_w[None, :] + w_offset[:, None], mask=reads, other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        if not (FLAT or SINGLE):
            run, j0, j1, j2 = next_tap(run, j0, j1, j2, taps0, taps1, taps2)
    has = row[:, None] & column[None, :]
    rows = n * stride(out_strides, 0, OUT_UNIT) + spatial(i0, i1, i2, out_strides, OUT_UNIT)
    out += part * part_stride + g * out_strides[1]
    to = out + rows[:, None] + (c * stride(out_strides, 2, OUT_UNIT))[None, :]
    to_bias = tl.broadcast_to((bias + (g * made + c) * bias_stride)[None, :], (ROWS, COLUMNS))
    acc = finished(acc, to, to_bias, ACCUMULATE, BIAS, has)
    tl.store(to, acc.to(out.dtype.element_ty), mask=has)
