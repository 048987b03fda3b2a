"""w as a matrix product: channels of y by channels of x, over the pixels of y; each tap is a product of its own."""

import triton
import triton.language as tl

from .common import finished, program, span, spatial, stride, unfold, within


@triton.jit
def weights(
    x,
    y,
    out,
    x_strides,  # n, g, c and three spatial axes
    y_strides,
    out_strides,  # g, channels of y, channels of x, three spatial axes
    x_sizes,
    y_sizes,
    y_factors,
    pad,
    images,
    groups,
    x_channels,  # of a group
    y_channels,
    parts,
    part_stride,
    RANK: tl.constexpr,  # axes in space that are in use: the last ones
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FLAT: tl.constexpr,
    X_EVEN: tl.constexpr,  # a pixel of x is as far from the next one as any other
    Y_EVEN: tl.constexpr,
    INSIDE: tl.constexpr,  # no tap meets padding
    PRECISION: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One tile of w. With `FLAT`, taps and channels of x are one axis of it, for layers of few channels."""
    number = program(WIDE)
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    width = TAPS * x_channels if FLAT else x_channels
    tiles = tl.cdiv(width, COLUMNS)
    c = span(number % tiles * COLUMNS, COLUMNS, WIDE)
    column = c < width
    number = number // tiles
    tiles = tl.cdiv(y_channels, ROWS)
    r = span(number % tiles * ROWS, ROWS, WIDE)
    row = r < y_channels
    number = number // tiles
    if FLAT:
        tap = c // x_channels
        c = c % x_channels
    else:
        tap = number % TAPS
        number = number // TAPS
    g = number % groups
    part = number // groups
    k2 = tap % KERNEL[2]
    k1 = tap // KERNEL[2] % KERNEL[1]
    k0 = tap // KERNEL[2] // KERNEL[1]
    # The input of a tap, for the pixel 0 of y.
    b0 = k0 * DILATION[0] - pad[0]
    b1 = k1 * DILATION[1] - pad[1]
    b2 = k2 * DILATION[2] - pad[2]
    from_x = x + g * x_strides[1] + spatial(b0, b1, b2, x_strides, X_UNIT) + c * stride(x_strides, 2, X_UNIT)
    from_y = y + g * y_strides[1] + r * stride(y_strides, 2, Y_UNIT)
    pixels = images * y_sizes[0] * y_sizes[1] * y_sizes[2]
    blocks = tl.cdiv(pixels, DEPTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float64 if DOUBLE else tl.float32)
    first = part * tl.cdiv(blocks, parts)
    last = tl.minimum(first + tl.cdiv(blocks, parts), blocks)
    tl.assume(first < last)  # around a loop that may not run, products on tensor cores wait for each other
    for block in tl.range(first, last):
        p = span(block * DEPTH, DEPTH, WIDE)
        n, o0, o1, o2 = unfold(p, y_sizes, y_factors, WIDE, RANK)
        there = p < pixels if INSIDE else n < images
        i0 = o0 * STRIDE[0]
        i1 = o1 * STRIDE[1]
        i2 = o2 * STRIDE[2]
        if FLAT:
            p0 = i0[:, None] + b0[None, :]
            p1 = i1[:, None] + b1[None, :]
            p2 = i2[:, None] + b2[None, :]
            meets = there[:, None] & within(p0, p1, p2, x_sizes, WIDE, RANK) & column[None, :]
        else:
            if not INSIDE:
                # What meets padding is not read from y either: its infinities have no product.
                there = there & within(i0 + b0, i1 + b1, i2 + b2, x_sizes, WIDE, RANK)
            meets = there[:, None] & column[None, :]
        if X_EVEN:
            x_offset = p * stride(x_strides, 5, X_UNIT)
        else:
            x_offset = n * stride(x_strides, 0, X_UNIT) + spatial(i0, i1, i2, x_strides, X_UNIT)
        if Y_EVEN:
            y_offset = p * stride(y_strides, 5, Y_UNIT)
        else:
            y_offset = n * stride(y_strides, 0, Y_UNIT) + spatial(o0, o1, o2, y_strides, Y_UNIT)
        left = tl.load(from_y[:, None] + y_offset[None, :], mask=row[:, None] & there[None, :], other=0.0)
        right = tl.load(from_x[None, :] + x_offset[:, None], mask=meets, other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    has = row[:, None] & column[None, :]
    columns = spatial(k0, k1, k2, out_strides, OUT_UNIT) + c * stride(out_strides, 2, OUT_UNIT)
    out += part * part_stride + g * out_strides[0]
    to = out + (r * stride(out_strides, 1, OUT_UNIT))[:, None] + columns[None, :]
    acc = finished(acc, to, to, ACCUMULATE, False, has)
    tl.store(to, acc.to(out.dtype.element_ty), mask=has)


@triton.jit
def lanes_weights(
    x,
    y,
    out,
    x_strides,
    y_strides,
    out_strides,
    x_sizes,
    y_sizes,
    y_factors,
    pad,
    images,
    groups,
    x_channels,
    y_channels,
    parts,
    part_stride,
    RANK: tl.constexpr,  # axes in space that are in use: the last ones
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One tap of w for pairs of channels in the lanes: products one by one, for groups of few channels."""
    number = program(WIDE)
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    tiles = tl.cdiv(groups * y_channels * x_channels, COLUMNS)
    q = span(number % tiles * COLUMNS, COLUMNS, WIDE)
    number = number // tiles
    tap = number % TAPS
    part = number // TAPS
    cx = q % x_channels
    cy = q // x_channels % y_channels
    g = q // x_channels // y_channels
    column = g < groups
    k2 = tap % KERNEL[2]
    k1 = tap // KERNEL[2] % KERNEL[1]
    k0 = tap // KERNEL[2] // KERNEL[1]
    b0 = k0 * DILATION[0] - pad[0]
    b1 = k1 * DILATION[1] - pad[1]
    b2 = k2 * DILATION[2] - pad[2]
    from_x = x + spatial(b0, b1, b2, x_strides, X_UNIT)
    from_x = from_x + g * stride(x_strides, 1, X_UNIT) + cx * stride(x_strides, 2, X_UNIT)
    from_y = y + g * stride(y_strides, 1, Y_UNIT) + cy * stride(y_strides, 2, Y_UNIT)
    blocks = tl.cdiv(images * y_sizes[0] * y_sizes[1] * y_sizes[2], ROWS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float64 if DOUBLE else tl.float32)
    first = part * tl.cdiv(blocks, parts)
    for block in tl.range(first, tl.minimum(first + tl.cdiv(blocks, parts), blocks)):
        n, o0, o1, o2 = unfold(span(block * ROWS, ROWS, WIDE), y_sizes, y_factors, WIDE, RANK)
        i0 = o0 * STRIDE[0]
        i1 = o1 * STRIDE[1]
        i2 = o2 * STRIDE[2]
        there = (n < images) & within(i0 + b0, i1 + b1, i2 + b2, x_sizes, WIDE, RANK)
        meets = there[:, None] & column[None, :]
        x_offset = n * stride(x_strides, 0, X_UNIT) + spatial(i0, i1, i2, x_strides, X_UNIT)
        y_offset = n * stride(y_strides, 0, Y_UNIT) + spatial(o0, o1, o2, y_strides, Y_UNIT)
        left = tl.load(from_y[None, :] + y_offset[:, None], mask=meets, other=0.0)
        right = tl.load(from_x[None, :] + x_offset[:, None], mask=meets, other=0.0)
        acc += left.to(acc.dtype) * right.to(acc.dtype)
    sums = tl.sum(acc, 0)
    to = out + part * part_stride + spatial(k0, k1, k2, out_strides, OUT_UNIT) + g * stride(out_strides, 0, OUT_UNIT)
    to = to + cy * stride(out_strides, 1, OUT_UNIT) + cx * stride(out_strides, 2, OUT_UNIT)
    sums = finished(sums, to, to, ACCUMULATE, False, column)
    tl.store(to, sums.to(out.dtype.element_ty), mask=column)
