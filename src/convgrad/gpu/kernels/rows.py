"""Depthwise layers: programs walk along one spatial axis, and what they have read stays in registers as long as needed.

Rows are positions on the axis of the walk; columns are those on the other axis, of which a thread has a run of `WIDTH`
results. A tile is `ROWS` such runs, of any images and places, by `COLUMNS` channels or, `INSIDE` of whose threads are
the few channels of a group, so many groups. Tensors have the axes image, group, channel, depth, row and column. The
plan lists which columns of the input a run needs (`PIECES`), and which of them a tap meets (`USES`): see
`plan/rows.py`.
"""

import triton
import triton.language as tl

from .common import program, span, stride


@triton.jit
def runs_of(m, runs, chunks, CLASSES: tl.constexpr, depths):
    """The numbers of runs, taken apart: the run in its row, the chunk of rows, their class, the depth and the image."""
    run = m % runs
    m = m // runs
    chunk = m % chunks
    m = m // chunks
    rest = m % CLASSES
    m = m // CLASSES
    return run, chunk, rest, m % depths, m // depths


@triton.jit
def depth_of(z, tap, DEPTH: tl.constexpr, size):
    """Where a tap on the axis of depth reads, and whether there is something."""
    at = z * DEPTH[0] + (tap * DEPTH[1] + DEPTH[2])
    there = at >= 0
    if DEPTH[3] > 1:
        there = there & (at % DEPTH[3] == 0)
        at = at // DEPTH[3]
    return at, there & (at < size)


@triton.jit
def margins(column, size, PIECES: tl.constexpr):
    """Whether each piece of a run lies inside the tensor. A piece of several columns does so with all of them."""
    found = ()
    for p in tl.static_range(len(PIECES)):
        found = found + ((column + PIECES[p][0] >= 0) & (column + PIECES[p][0] < size),)
    return found


@triton.jit
def piece(pointers, step, there, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns, or channels, as they are in memory: [ROWS, COLUMNS] or, of several, a third axis of them."""
    there = tl.broadcast_to(there, (ROWS, COLUMNS))
    if SIZE == 1:
        return tl.load(pointers, mask=there, other=0.0)
    else:
        there = tl.broadcast_to(there[:, :, None], (ROWS, COLUMNS, SIZE))
        return tl.load(pointers[:, :, None] + tl.arange(0, SIZE)[None, None, :] * step, mask=there, other=0.0)


@triton.jit
def fetch(pointers, sides, there, step, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The pieces of one row."""
    found = ()
    for p in tl.static_range(len(PIECES)):
        found = found + (piece(pointers + PIECES[p][0] * step, 1, there & sides[p], PIECES[p][1], ROWS, COLUMNS),)
    return found


@triton.jit
def split(block, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a piece, which are all in one thread: nothing moves."""
    parts = (block,)
    for level in tl.static_range(4):
        if 2**level < SIZE:
            even = ()
            odd = ()
            for i in tl.static_range(2**level):
                part = parts[i]
                if 2 * 2**level < SIZE:
                    part = part.reshape(ROWS, COLUMNS, SIZE // 2**level // 2, 2)
                left, right = part.split()
                even = even + (left,)
                odd = odd + (right,)
            parts = even + odd
    return parts


@triton.jit
def apart(pieces, FIRST: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of some pieces, each [ROWS, COLUMNS], in f32."""
    found = ()
    for p in tl.static_range(len(PIECES)):
        found = found + split(pieces[FIRST + p].to(tl.float32), PIECES[p][1], ROWS, COLUMNS)
    return found


@triton.jit
def halved(columns, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks of SIZE columns that are joined with those of the other half."""
    found = ()
    for i in tl.static_range(len(columns) // 2):
        block = tl.join(columns[i], columns[i + len(columns) // 2])
        found = found + (block.reshape(ROWS, COLUMNS, 2 * SIZE),)
    return found


@triton.jit
def together(columns, FIRST: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns as one block."""
    parts = ()
    for i in tl.static_range(SIZE):
        parts = parts + (columns[FIRST + i],)
    for level in tl.static_range(8):
        if 2**level < SIZE:
            parts = halved(parts, 2**level, ROWS, COLUMNS)
    return parts[0]


@triton.jit
def shifted(values, FIRST: tl.constexpr):
    """A tuple without its first entries."""
    found = ()
    for i in tl.static_range(len(values) - FIRST):
        found = found + (values[FIRST + i],)
    return found


@triton.jit
def zeros(COUNT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """So many sums that begin."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([ROWS, COLUMNS], KIND),)
    return found


@triton.jit
def rows(
    a,
    w,
    out,
    bias,
    a_strides,  # image, group, channel of the group, depth, row, column
    w_strides,  # group, channel that is summed, channel that is made, depth, row, column
    out_strides,
    bias_stride,
    a_sizes,  # depth, rows, columns
    out_sizes,
    images,
    channels,  # that are made, of all groups; or groups
    runs,  # of a row
    chunks,  # of the rows of a class
    height,  # steps of the walk that finish results of a chunk
    KERNEL: tl.constexpr,
    DEPTH: tl.constexpr,  # how the depth of the input follows from that of the result: factor, by tap, start, divisor
    LIVE: tl.constexpr,  # rows of results that a row of the input has a part in
    DOWN: tl.constexpr,  # rows of the input that a step takes
    UP: tl.constexpr,  # rows of results that a step finishes
    CLASSES: tl.constexpr,  # rows whose distance is no multiple of the dilation have nothing in common
    ROW: tl.constexpr,  # the first row that a chunk reads: by its class, start; and the first that it finishes
    EXTRA: tl.constexpr,  # steps of a chunk beyond its height
    ROW_TAPS: tl.constexpr,  # by row of a step and live row: the tap, or -1
    ORIGIN: tl.constexpr,  # columns of the input from run to run
    PIECES: tl.constexpr,
    USES: tl.constexpr,  # by column of the run and tap: the column of the pieces, or -1
    SUMMED: tl.constexpr,  # channels
    MADE: tl.constexpr,
    INSIDE: tl.constexpr,
    FLAT: tl.constexpr,  # channels of all groups of the result are one axis
    A_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_VECTOR: tl.constexpr,  # columns that are stored at once
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,  # steps that loads are ahead
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,  # of which all but one are on their way through shared memory; 1 keeps to registers
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """y or x of one tile."""
    number = program(WIDE)
    tiles = tl.cdiv(channels, COLUMNS)
    q = span(number % tiles * COLUMNS, COLUMNS, WIDE)[None, :]
    m = span(number // tiles * ROWS, ROWS, WIDE)[:, None]
    run, chunk, rest, z, n = runs_of(m, runs, chunks, CLASSES, out_sizes[0])
    column = q < channels
    # Channels of the input that are read at once, and of the result that a lane has.
    READ: tl.constexpr = SUMMED if INSIDE else 1
    MAKE: tl.constexpr = MADE if INSIDE else 1
    g = q if MADE == MAKE else q // MADE
    c = 0 if MADE == MAKE else q % MADE
    there = (n < images) & column
    # The weights of all taps stay in registers.
    from_w = w + g * stride(w_strides, 0, W_UNIT)
    if MADE > MAKE:
        from_w = from_w + c * w_strides[2]
    K0: tl.constexpr = KERNEL[0]
    K1: tl.constexpr = KERNEL[1]
    K2: tl.constexpr = KERNEL[2]
    factors = ()
    for r in tl.static_range(SUMMED):
        for k0 in tl.static_range(K0):
            for k1 in tl.static_range(K1):
                for k2 in tl.static_range(K2):
                    for made in tl.static_range(MAKE):
                        at = r * w_strides[1] + k0 * w_strides[3] + k1 * w_strides[4] + k2 * w_strides[5]
                        at += made * w_strides[2]
                        factors = factors + (tl.load(from_w + at, mask=column, other=0.0).to(tl.float32),)
    shift = 0.0
    if BIAS:
        shift = piece(bias + q * MAKE * bias_stride, bias_stride, column, MAKE, 1, COLUMNS).to(tl.float32)
    first = chunk * height
    row = rest * ROW[0] + first * (DOWN * CLASSES) + ROW[1]
    origin = run * ORIGIN
    row_step = stride(a_strides, 4, A_UNIT)
    column_step = stride(a_strides, 5, A_UNIT)
    from_a = a + n * stride(a_strides, 0, A_UNIT) + g * stride(a_strides, 1, A_UNIT)
    from_a = from_a + row * row_step + origin * column_step
    starts = ()
    layers = ()
    for k0 in tl.static_range(K0):
        at, inside = depth_of(z, k0, DEPTH, a_sizes[0])
        starts = starts + (from_a + at * stride(a_strides, 3, A_UNIT),)
        layers = layers + (there & inside,)
    sides = margins(origin, a_sizes[2], PIECES)
    result = first * UP * CLASSES + rest
    to = out + n * stride(out_strides, 0, OUT_UNIT) + z * stride(out_strides, 3, OUT_UNIT)
    to = to + result * stride(out_strides, 4, OUT_UNIT) + run * WIDTH * stride(out_strides, 5, OUT_UNIT)
    if FLAT:
        to = to + q * stride(out_strides, 2, OUT_UNIT)
    else:
        to = to + g * stride(out_strides, 1, OUT_UNIT) + c * stride(out_strides, 2, OUT_UNIT)
    PER: tl.constexpr = DOWN * (SUMMED // READ) * K0 * len(PIECES)  # pieces of a step
    sums = zeros(LIVE * WIDTH * MAKE, tl.float32, ROWS, COLUMNS)
    queue = ()
    for early in tl.static_range(AHEAD):
        queue = queue + _step(
            starts, layers, sides, row, early, a_sizes[1], a_strides, row_step, column_step,
            KERNEL, DOWN, CLASSES, SUMMED // READ, PIECES, ROWS, COLUMNS,
        )  # fmt: skip
    for block in tl.range(0, height + EXTRA, UNROLL, num_stages=STAGES):
        for turn in tl.static_range(UNROLL):
            step = block + turn
            queue = queue + _step(
                starts, layers, sides, row, step + AHEAD, a_sizes[1], a_strides, row_step, column_step,
                KERNEL, DOWN, CLASSES, SUMMED // READ, PIECES, ROWS, COLUMNS,
            )  # fmt: skip
            for i in tl.static_range(DOWN):
                for r in tl.static_range(SUMMED // READ):
                    for k0 in tl.static_range(K0):
                        read = apart(queue, ((i * (SUMMED // READ) + r) * K0 + k0) * len(PIECES), PIECES, ROWS, COLUMNS)
                        sums = _add(
                            sums, read, factors, r * READ, k0, i, ROW_TAPS, KERNEL, USES, LIVE, WIDTH, READ, MAKE
                        )  # fmt: skip
            for e in tl.static_range(UP):
                which = step * UP + (e + ROW[2])
                ends = (which >= 0) & (which < height * UP)
                has = there & (ends & (result + which * CLASSES < out_sizes[1]))
                to_row = to + which * (CLASSES * stride(out_strides, 4, OUT_UNIT))
                for side in tl.static_range(0, WIDTH, OUT_VECTOR):
                    value = together(sums, (e * WIDTH + side) * MAKE, OUT_VECTOR * MAKE, ROWS, COLUMNS)
                    place = to_row + side * stride(out_strides, 5, OUT_UNIT)
                    meets = has & (run * WIDTH + side < out_sizes[2])
                    _store(value, place, meets, shift, OUT_VECTOR, MAKE, ROWS, COLUMNS, BIAS, ACCUMULATE)
            sums = shifted(sums, UP * WIDTH * MAKE) + zeros(UP * WIDTH * MAKE, tl.float32, ROWS, COLUMNS)
            queue = shifted(queue, PER)


@triton.jit
def _store(
    value,
    place,
    there,
    shift,
    VECTOR: tl.constexpr,
    MAKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Write some columns of a row, or some channels."""
    SIZE: tl.constexpr = VECTOR * MAKE
    there = tl.broadcast_to(there, (ROWS, COLUMNS))
    if SIZE > 1:
        place = place[:, :, None] + tl.arange(0, SIZE)[None, None, :]
        there = tl.broadcast_to(there[:, :, None], (ROWS, COLUMNS, SIZE))
    if BIAS:
        value += shift[:, :, None] if VECTOR > 1 else shift
    if ACCUMULATE:
        value += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, value.to(place.dtype.element_ty), mask=there)


@triton.jit
def _step(
    starts,
    layers,
    sides,
    row,
    step,
    size,
    a_strides,
    row_step,
    column_step,
    KERNEL: tl.constexpr,
    DOWN: tl.constexpr,
    CLASSES: tl.constexpr,
    SUMMED: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The pieces that a step reads."""
    K0: tl.constexpr = KERNEL[0]
    found = ()
    for i in tl.static_range(DOWN):
        down = (step * DOWN + i) * CLASSES
        inside = (row + down >= 0) & (row + down < size)
        for r in tl.static_range(SUMMED):
            for k0 in tl.static_range(K0):
                pointers = starts[k0] + (down * row_step + r * a_strides[2])
                found = found + fetch(pointers, sides, layers[k0] & inside, column_step, PIECES, ROWS, COLUMNS)
    return found


@triton.jit
def _add(
    sums,
    read,
    factors,
    FIRST: tl.constexpr,  # channel
    LAYER: tl.constexpr,
    ROW: tl.constexpr,
    ROW_TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    USES: tl.constexpr,
    LIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    READ: tl.constexpr,
    MAKE: tl.constexpr,
):
    """Sums with the products of one row of the input."""
    K0: tl.constexpr = KERNEL[0]
    K1: tl.constexpr = KERNEL[1]
    K2: tl.constexpr = KERNEL[2]
    found = ()
    for e in tl.static_range(LIVE):
        for i in tl.static_range(WIDTH):
            for made in tl.static_range(MAKE):
                value = sums[(e * WIDTH + i) * MAKE + made]
                if ROW_TAPS[ROW][e] >= 0:
                    for k2 in tl.static_range(K2):
                        if USES[i][k2] >= 0:
                            for r in tl.static_range(READ):
                                value += (
                                    read[USES[i][k2] * READ + r]
                                    * factors[
                                        ((((FIRST + r) * K0 + LAYER) * K1 + ROW_TAPS[ROW][e]) * K2 + k2) * MAKE + made
                                    ]
                                )
                found = found + (value,)
    return found
