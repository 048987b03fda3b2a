"""w of depthwise layers: programs walk along rows of x and y together, with the sums of all taps in registers.

See `rows`, whose tiles these are: here they are runs of y.
"""

import triton
import triton.language as tl

from .common import program, span, stride
from .rows import apart, depth_of, fetch, margins, runs_of, shifted, together, zeros


@triton.jit
def rows_weights(
    x,
    y,
    out,
    x_strides,  # image, group, channel of the group, depth, row, column
    y_strides,
    out_strides,  # group, channel of y, channel of x, depth, row, column
    x_sizes,  # depth, rows, columns
    y_sizes,
    images,
    channels,  # pairs of them, of all groups; or groups
    runs,  # of a row of y
    chunks,  # of the rows of a class
    height,  # rows of y in a chunk
    parts,
    part_stride,
    KERNEL: tl.constexpr,
    DEPTH: tl.constexpr,
    TAPS: tl.constexpr,  # rows of taps of a program
    LIVE: tl.constexpr,  # rows of y that a row of x meets
    DOWN: tl.constexpr,  # rows of x that a step takes
    CLASSES: tl.constexpr,
    ROW: tl.constexpr,  # the first row of x that a chunk reads: by its class, start
    ORIGIN: tl.constexpr,
    PIECES: tl.constexpr,  # of a row of x
    USES: tl.constexpr,
    Y_PIECES: tl.constexpr,  # of a row of y
    X_CHANNELS: tl.constexpr,  # of a group
    Y_CHANNELS: tl.constexpr,
    INSIDE: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,  # of which all but one are on their way through shared memory; 1 keeps to registers
    JOINED: tl.constexpr,  # sums of a row of taps, and some more, to a power of two
    COLUMN: tl.constexpr,  # stride, dilation and padding
    WIDE: tl.constexpr,
):
    """A part of the sums of some rows of taps, over every so-many-th tile."""
    number = program(WIDE)
    K2: tl.constexpr = KERNEL[2]
    across = tl.cdiv(channels, COLUMNS)
    q = span(number % across * COLUMNS, COLUMNS, WIDE)[None, :]
    number = number // across
    groups: tl.constexpr = (KERNEL[1] + TAPS - 1) // TAPS
    tap1 = number % groups * TAPS
    number = number // groups
    tap0 = number % KERNEL[0]
    part = number // KERNEL[0]
    column = q < channels
    # Channels that a lane has of each.
    NX: tl.constexpr = X_CHANNELS if INSIDE else 1
    NY: tl.constexpr = Y_CHANNELS if INSIDE else 1
    both = q if X_CHANNELS == NX else q // X_CHANNELS
    g = both if Y_CHANNELS == NY else both // Y_CHANNELS
    cx = 0 if X_CHANNELS == NX else q % X_CHANNELS
    cy = 0 if Y_CHANNELS == NY else both % Y_CHANNELS
    x_lanes = x + g * stride(x_strides, 1, X_UNIT)
    if X_CHANNELS > NX:
        x_lanes = x_lanes + cx * x_strides[2]
    y_lanes = y + g * stride(y_strides, 1, Y_UNIT)
    if Y_CHANNELS > NY:
        y_lanes = y_lanes + cy * y_strides[2]
    x_row = stride(x_strides, 4, X_UNIT)
    y_row = stride(y_strides, 4, Y_UNIT)
    x_column = stride(x_strides, 5, X_UNIT)
    y_column = stride(y_strides, 5, Y_UNIT)
    tiles = tl.cdiv(images * y_sizes[0] * CLASSES * chunks * runs, ROWS)
    X_PER: tl.constexpr = DOWN * len(PIECES)  # pieces of a step
    Y_PER: tl.constexpr = len(Y_PIECES)
    sums = zeros(TAPS * K2 * NY * NX, tl.float32, ROWS, COLUMNS)
    for tile in tl.range(part, tiles, parts):
        m = span(tile * ROWS, ROWS, WIDE)[:, None]
        run, chunk, rest, z, n = runs_of(m, runs, chunks, CLASSES, y_sizes[0])
        at, inside = depth_of(z, tap0, DEPTH, x_sizes[0])
        there = (n < images) & inside & column
        first = chunk * height
        row = rest * ROW[0] + first * (DOWN * CLASSES) + ROW[1] + tap1 * CLASSES
        result = first * CLASSES + rest
        from_x = x_lanes + n * stride(x_strides, 0, X_UNIT) + at * stride(x_strides, 3, X_UNIT)
        from_x = from_x + row * x_row + run * ORIGIN * x_column
        from_y = y_lanes + n * stride(y_strides, 0, Y_UNIT) + z * stride(y_strides, 3, Y_UNIT)
        from_y = from_y + result * y_row + run * WIDTH * y_column
        x_sides = margins(run * ORIGIN, x_sizes[2], PIECES)
        y_sides = margins(run * WIDTH, y_sizes[2], Y_PIECES)
        window = zeros(LIVE * WIDTH * NY, tl.float32, ROWS, COLUMNS)
        queue = ()
        for early in tl.static_range(AHEAD):
            queue = queue + _step(
                from_x, from_y, x_sides, y_sides, there, row, result, early, x_sizes[1], y_sizes[1], height,
                x_row, y_row, x_column, y_column, DOWN, CLASSES, PIECES, Y_PIECES, ROWS, COLUMNS,
            )  # fmt: skip
        for block in tl.range(0, height + LIVE - 1, UNROLL, num_stages=STAGES):
            for turn in tl.static_range(UNROLL):
                queue = queue + _step(
                    from_x, from_y, x_sides, y_sides, there, row, result, block + turn + AHEAD, x_sizes[1], y_sizes[1],
                    height, x_row, y_row, x_column, y_column, DOWN, CLASSES, PIECES, Y_PIECES, ROWS, COLUMNS,
                )  # fmt: skip
                window = _before(apart(queue, X_PER, Y_PIECES, ROWS, COLUMNS), window, (LIVE - 1) * WIDTH * NY)
                for i in tl.static_range(DOWN):
                    read = apart(queue, i * len(PIECES), PIECES, ROWS, COLUMNS)
                    sums = _add(sums, read, window, i, TAPS, K2, DOWN, USES, WIDTH, NX, NY)
                queue = shifted(queue, X_PER + Y_PER)
    to = out + part * part_stride + g * stride(out_strides, 0, OUT_UNIT)
    to = to + cy * out_strides[1] + cx * out_strides[2] + tap0 * out_strides[3]
    # Sums of a row of taps are joined: one reduction takes them all.
    EACH: tl.constexpr = K2 * NY * NX
    entry = tl.arange(0, JOINED)[None, :]
    side = entry // (NY * NX)
    aside = side * out_strides[5] + entry % (NY * NX) // NX * out_strides[1] + entry % NX * out_strides[2]
    spoilt = tl.zeros([COLUMNS, JOINED], tl.int1)
    for down in tl.static_range(TAPS):
        joined = ()
        for i in tl.static_range(JOINED):
            joined = joined + (sums[down * EACH + i % EACH],)
        value = tl.sum(together(joined, 0, JOINED, ROWS, COLUMNS).reshape(ROWS, COLUMNS, JOINED), 0)
        has = tl.trans(column & (tap1 + down < KERNEL[1])) & (entry < EACH)
        place = tl.trans(to) + (tap1 + down) * out_strides[4] + aside
        tl.store(place, value.to(out.dtype.element_ty), mask=has)
        spoilt = spoilt | (has & (value != value))
    if tl.max(spoilt.to(tl.int32)) > 0:
        tl.debug_barrier()
        retake(
            x_lanes, y_lanes, to, column, part, parts, tiles, tap0, tap1, x_strides, y_strides, out_strides,
            x_sizes, y_sizes, images, runs, chunks, height,
            KERNEL, DEPTH, TAPS, DOWN, CLASSES, ROW, COLUMN, NX, NY, WIDTH, ROWS, COLUMNS, WIDE,
        )  # fmt: skip


@triton.jit
def retake(
    x_lanes,
    y_lanes,
    to,
    column,
    part,
    parts,
    tiles,
    tap0,
    tap1,
    x_strides,
    y_strides,
    out_strides,
    x_sizes,
    y_sizes,
    images,
    runs,
    chunks,
    height,
    KERNEL: tl.constexpr,
    DEPTH: tl.constexpr,
    TAPS: tl.constexpr,
    DOWN: tl.constexpr,
    CLASSES: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    NX: tl.constexpr,
    NY: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sums that are NaN, once more: what is not read is zero, which has no product with an infinity here."""
    for which in tl.range(0, TAPS * KERNEL[2] * NY * NX):
        tap = which // (NY * NX)
        k1 = tap // KERNEL[2]
        k2 = tap % KERNEL[2]
        own_x = which % NX
        own_y = which // NX % NY
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in tl.range(part, tiles, parts):
            m = span(tile * ROWS, ROWS, WIDE)[:, None]
            run, chunk, rest, z, n = runs_of(m, runs, chunks, CLASSES, y_sizes[0])
            at, inside = depth_of(z, tap0, DEPTH, x_sizes[0])
            there = (n < images) & inside & column
            first = chunk * height
            row = rest * ROW[0] + first * (DOWN * CLASSES) + ROW[1] + (tap1 + k1) * CLASSES
            result = first * CLASSES + rest
            from_x = x_lanes + (n * x_strides[0] + at * x_strides[3] + own_x * x_strides[2])
            from_y = y_lanes + (n * y_strides[0] + z * y_strides[3] + own_y * y_strides[2])
            for pixel in tl.range(0, height * WIDTH):
                x1 = row + pixel // WIDTH * (DOWN * CLASSES)
                y1 = result + pixel // WIDTH * CLASSES
                y2 = run * WIDTH + pixel % WIDTH
                x2 = y2 * COLUMN[0] + k2 * COLUMN[1] - COLUMN[2]
                meets = (x1 >= 0) & (x1 < x_sizes[1]) & (x2 >= 0) & (x2 < x_sizes[2])
                meets = there & meets & (y1 < y_sizes[1]) & (y2 < y_sizes[2])
                left = tl.load(from_x + (x1 * x_strides[4] + x2 * x_strides[5]), mask=meets, other=0.0)
                right = tl.load(from_y + (y1 * y_strides[4] + y2 * y_strides[5]), mask=meets, other=0.0)
                total += left.to(tl.float32) * right.to(tl.float32)
        place = to + (tap1 + k1) * out_strides[4] + k2 * out_strides[5]
        place += own_y * out_strides[1] + own_x * out_strides[2]
        held = tl.load(place, mask=column & (tap1 + k1 < KERNEL[1]), other=0.0).to(tl.float32)
        tl.store(place, tl.sum(total, 0)[None, :].to(to.dtype.element_ty), mask=held != held)


@triton.jit
def _step(
    from_x,
    from_y,
    x_sides,
    y_sides,
    there,
    row,
    result,
    step,
    x_size,
    y_size,
    height,
    x_row,
    y_row,
    x_column,
    y_column,
    DOWN: tl.constexpr,
    CLASSES: tl.constexpr,
    PIECES: tl.constexpr,
    Y_PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The pieces that a step reads: of x, then of y. Beyond its chunk, y is not read: another one has its products."""
    found = ()
    for i in tl.static_range(DOWN):
        down = (step * DOWN + i) * CLASSES
        inside = there & (row + down >= 0) & (row + down < x_size)
        found = found + fetch(from_x + down * x_row, x_sides, inside, x_column, PIECES, ROWS, COLUMNS)
    inside = there & ((step < height) & (result + step * CLASSES < y_size))
    return found + fetch(from_y + step * (CLASSES * y_row), y_sides, inside, y_column, Y_PIECES, ROWS, COLUMNS)


@triton.jit
def _before(row, window, KEPT: tl.constexpr):
    """A window with another row before the first, and without its last one."""
    found = row
    for i in tl.static_range(KEPT):
        found = found + (window[i],)
    return found


@triton.jit
def _add(
    sums,
    read,
    window,
    ROW: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    DOWN: tl.constexpr,
    USES: tl.constexpr,
    WIDTH: tl.constexpr,
    NX: tl.constexpr,
    NY: tl.constexpr,
):
    """Sums with the products of one row of x; its tap k meets row (k - ROW)/DOWN of the window."""
    found = ()
    for k1 in tl.static_range(TAPS):
        for k2 in tl.static_range(KERNEL):
            for cy in tl.static_range(NY):
                for cx in tl.static_range(NX):
                    value = sums[((k1 * KERNEL + k2) * NY + cy) * NX + cx]
                    if k1 % DOWN == ROW:
                        for i in tl.static_range(WIDTH):
                            value += read[USES[i][k2] * NX + cx] * window[(k1 // DOWN * WIDTH + i) * NY + cy]
                    found = found + (value,)
    return found
