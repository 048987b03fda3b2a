"""w of depthwise layers on tensor cores: columns of x by columns of y, of which a band holds the sums of a row of taps.

See `bands` and `rows_weights`. Runs are what is multiplied and added; each row of taps has its own sums, which stay in
registers until the end.
"""

import triton
import triton.language as tl

from .bands import read_block
from .common import program, span, stride
from .rows import depth_of, runs_of
from .rows_weights import retake


@triton.jit
def bands_weights(
    x,
    y,
    out,
    x_strides,  # image, group, channel of the group, depth, row, column
    y_strides,
    out_strides,  # group, channel of y, channel of x, depth, row, column
    x_sizes,  # depth, rows, columns
    y_sizes,
    images,
    channels,
    runs,  # of a row of y
    chunks,  # of the rows of a class
    height,  # rows of y in a chunk
    parts,
    part_stride,
    KERNEL: tl.constexpr,
    DEPTH: tl.constexpr,
    TAPS: tl.constexpr,  # rows of taps of a program
    LIVE: tl.constexpr,
    DOWN: tl.constexpr,
    CLASSES: tl.constexpr,
    ROW: tl.constexpr,
    ORIGIN: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    NEEDED: tl.constexpr,
    BAND: tl.constexpr,
    COLUMN: tl.constexpr,  # stride, dilation and padding
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A part of the sums of some rows of taps, over every so-many-th tile."""
    number = program(WIDE)
    across = tl.cdiv(channels, COLUMNS)
    g = span(number % across * COLUMNS, COLUMNS, WIDE)
    number = number // across
    groups: tl.constexpr = (KERNEL[1] + TAPS - 1) // TAPS
    tap1 = number % groups * TAPS
    number = number // groups
    tap0 = number % KERNEL[0]
    part = number // KERNEL[0]
    column = g < channels
    x_lanes = x + g * stride(x_strides, 1, X_UNIT)
    y_lanes = y + g * stride(y_strides, 1, Y_UNIT)
    x_row = stride(x_strides, 4, X_UNIT)
    y_row = stride(y_strides, 4, Y_UNIT)
    side = tl.arange(0, WINDOW)
    made = tl.arange(0, WIDTH)
    tiles = tl.cdiv(images * y_sizes[0] * CLASSES * chunks * runs, ROWS)
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros([COLUMNS, WINDOW, WIDTH], tl.float32),)
    for tile in tl.range(part, tiles, parts):
        m = span(tile * ROWS, ROWS, WIDE)
        run, chunk, rest, z, n = runs_of(m, runs, chunks, CLASSES, y_sizes[0])
        at, inside = depth_of(z, tap0, DEPTH, x_sizes[0])
        there = (n < images) & inside
        first = chunk * height
        row = rest * ROW[0] + first * (DOWN * CLASSES) + ROW[1] + tap1 * CLASSES
        result = first * CLASSES + rest
        x_columns = run[:, None] * ORIGIN + (FIRST + side)[None, :]
        y_columns = run[:, None] * WIDTH + made[None, :]
        x_there = (x_columns >= 0) & (x_columns < x_sizes[2]) & there[:, None] & (side < NEEDED)[None, :]
        y_there = (y_columns < y_sizes[2]) & there[:, None]
        from_x = n * stride(x_strides, 0, X_UNIT) + at * stride(x_strides, 3, X_UNIT) + row * x_row
        from_x = from_x[:, None] + x_columns * stride(x_strides, 5, X_UNIT)
        from_y = n * stride(y_strides, 0, Y_UNIT) + z * stride(y_strides, 3, Y_UNIT) + result * y_row
        from_y = from_y[:, None] + y_columns * stride(y_strides, 5, Y_UNIT)
        window = ()
        for _ in tl.static_range(LIVE - 1):
            window = window + (tl.zeros([COLUMNS, ROWS, WIDTH], y.dtype.element_ty),)
        for step in tl.range(0, height + LIVE - 1):
            seen = (step < height) & (result + step * CLASSES < y_sizes[1])
            offset = from_y + step * (CLASSES * y_row)
            now = read_block(y_lanes, offset, column, y_there & seen[:, None], PIXELS, ROWS, COLUMNS, WIDTH)
            window = (now,) + window
            for i in tl.static_range(DOWN):
                down = (step * DOWN + i) * CLASSES
                seen = (row + down >= 0) & (row + down < x_sizes[1])
                offset = from_x + down * x_row
                values = read_block(x_lanes, offset, column, x_there & seen[:, None], PIXELS, ROWS, COLUMNS, WINDOW)
                sums = _multiply(sums, tl.permute(values, (0, 2, 1)), window, i, DOWN)
            kept = ()
            for i in tl.static_range(LIVE - 1):
                kept = kept + (window[i],)
            window = kept
    to = out + part * part_stride + g * out_strides[0] + tap0 * out_strides[3]
    tap = side[:, None] * BAND[0] + (made[None, :] * BAND[1] + BAND[2])
    spoilt = tl.zeros([COLUMNS], tl.int1)
    for aside in tl.range(0, KERNEL[2]):
        band = (tap == aside * BAND[3])[None, :, :]
        for down in tl.static_range(TAPS):
            has = column & (tap1 + down < KERNEL[1])
            value = tl.sum(tl.sum(tl.where(band, sums[down], 0.0), 2), 1)
            place = to + (tap1 + down) * out_strides[4] + aside * out_strides[5]
            tl.store(place, value.to(out.dtype.element_ty), mask=has)
            spoilt = spoilt | (has & (value != value))
    if tl.max(spoilt.to(tl.int32)) > 0:
        tl.debug_barrier()
        retake(
            x_lanes[None, :], y_lanes[None, :], to[None, :], column[None, :], part, parts, tiles, tap0, tap1,
            x_strides, y_strides, out_strides, x_sizes, y_sizes, images, runs, chunks, height,
            KERNEL, DEPTH, TAPS, DOWN, CLASSES, ROW, COLUMN, 1, 1, WIDTH, ROWS, COLUMNS, WIDE,
        )  # fmt: skip


@triton.jit
def _multiply(sums, values, window, ROW: tl.constexpr, DOWN: tl.constexpr):
    """Sums with the products of one row of x; its tap k meets row (k - ROW)/DOWN of the window."""
    found = ()
    for k1 in tl.static_range(len(sums)):
        value = sums[k1]
        if k1 % DOWN == ROW:
            value = tl.dot(values, window[k1 // DOWN], value)
        found = found + (value,)
    return found
