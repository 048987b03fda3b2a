"""Depthwise layers on tensor cores: a row of taps is a band of a matrix that takes columns of the input to those of y.

Programs walk along rows as those of `rows` do, and plans say it in the same words. For each channel, some runs of the
input's columns are multiplied by the band matrix of each row of taps, [WINDOW, WIDTH]. Most of it is zeros, but tensor
cores take them faster than plain units take the products that count.
"""

import triton
import triton.language as tl

from .common import program, span, stride
from .rows import depth_of, runs_of, shifted


@triton.jit
def bands(
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
    channels,  # that are made, of all groups
    runs,  # of a row
    chunks,  # of the rows of a class
    height,  # steps of the walk that finish results of a chunk
    KERNEL: tl.constexpr,
    DEPTH: tl.constexpr,  # how positions of the input follow from those of the result, on each axis: see `depth_of`
    DOWNWARDS: tl.constexpr,
    ASIDE: tl.constexpr,
    LIVE: tl.constexpr,
    DOWN: tl.constexpr,
    UP: tl.constexpr,
    CLASSES: tl.constexpr,
    ROW: tl.constexpr,
    EXTRA: tl.constexpr,
    ROW_TAPS: tl.constexpr,
    ORIGIN: tl.constexpr,
    FIRST: tl.constexpr,  # the first column of a run's window
    WINDOW: tl.constexpr,
    NEEDED: tl.constexpr,  # columns of the window that are read
    BAND: tl.constexpr,  # which tap an entry of the band holds: by column of the window, of the run, start, divisor
    MADE: tl.constexpr,
    FLAT: tl.constexpr,
    A_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    PIXELS: tl.constexpr,  # are side by side, not channels
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """y or x of one tile."""
    number = program(WIDE)
    tiles = tl.cdiv(channels, COLUMNS)
    q = span(number % tiles * COLUMNS, COLUMNS, WIDE)
    m = span(number // tiles * ROWS, ROWS, WIDE)
    run, chunk, rest, z, n = runs_of(m, runs, chunks, CLASSES, out_sizes[0])
    column = q < channels
    g = q if MADE == 1 else q // MADE
    there = n < images
    K0: tl.constexpr = KERNEL[0]
    K1: tl.constexpr = KERNEL[1]
    # Bands are read as one axis, so that what is multiplied and added lies side by side, as tensor cores read it.
    entry = tl.arange(0, COLUMNS * WIDTH * WINDOW)
    tap = entry % WINDOW * BAND[0] + (entry // WINDOW % WIDTH * BAND[1] + BAND[2])
    own = number % tiles * COLUMNS + entry // (WINDOW * WIDTH)
    meets = (tap >= 0) & (tap % BAND[3] == 0) & (tap // BAND[3] < KERNEL[2]) & (own < channels)
    from_band = w + (own if MADE == 1 else own // MADE) * stride(w_strides, 0, W_UNIT) + tap // BAND[3] * w_strides[5]
    if MADE > 1:
        from_band = from_band + own % MADE * w_strides[2]
    factors = ()
    for k0 in tl.static_range(K0):
        for k1 in tl.static_range(K1):
            taps = tl.load(from_band + (k0 * w_strides[3] + k1 * w_strides[4]), mask=meets, other=0.0)
            factors = factors + (tl.permute(taps.reshape(COLUMNS, WIDTH, WINDOW), (0, 2, 1)),)
    side = tl.arange(0, WINDOW)
    made = tl.arange(0, WIDTH)
    first = chunk * height
    row = rest * ROW[0] + first * (DOWN * CLASSES) + ROW[1]
    read = run[:, None] * ORIGIN + (FIRST + side)[None, :]
    inside = (read >= 0) & (read < a_sizes[2]) & there[:, None]
    if NEEDED < WINDOW:
        inside = inside & (side < NEEDED)[None, :]
    row_step = stride(a_strides, 4, A_UNIT)
    lanes = a + g * stride(a_strides, 1, A_UNIT)
    from_a = (n * stride(a_strides, 0, A_UNIT) + row * row_step)[:, None] + read * stride(a_strides, 5, A_UNIT)
    result = first * UP * CLASSES + rest
    write = run[:, None] * WIDTH + made[None, :]
    to_lanes = out + q * stride(out_strides, 2, OUT_UNIT)
    if not FLAT:
        to_lanes = out + g * stride(out_strides, 1, OUT_UNIT) + q % MADE * stride(out_strides, 2, OUT_UNIT)
    to = n * stride(out_strides, 0, OUT_UNIT) + z * stride(out_strides, 3, OUT_UNIT)
    to = (to + result * stride(out_strides, 4, OUT_UNIT))[:, None] + write * stride(out_strides, 5, OUT_UNIT)
    written = (write < out_sizes[2]) & there[:, None]
    shift = 0.0
    if BIAS:
        shift = _lifted(tl.load(bias + q * bias_stride, mask=column, other=0.0).to(tl.float32), PIXELS)
    sums = ()
    for _ in tl.static_range(LIVE):
        sums = sums + (tl.zeros([COLUMNS, ROWS, WIDTH], tl.float32),)
    spoilt = tl.zeros([COLUMNS, ROWS, WIDTH], tl.float32)
    for step in tl.range(0, height + EXTRA):
        for i in tl.static_range(DOWN):
            down = (step * DOWN + i) * CLASSES
            for k0 in tl.static_range(K0):
                at, layer = depth_of(z, k0, DEPTH, a_sizes[0])
                seen = layer & (row + down >= 0) & (row + down < a_sizes[1])
                offset = from_a + (at * stride(a_strides, 3, A_UNIT) + down * row_step)[:, None]
                values = read_block(lanes, offset, column, inside & seen[:, None], PIXELS, ROWS, COLUMNS, WINDOW)
                sums = _multiply(sums, values, factors, k0, i, ROW_TAPS, K1, LIVE)
        for e in tl.static_range(UP):
            which = step * UP + (e + ROW[2])
            ends = (which >= 0) & (which < height * UP)
            has = written & (ends & (result + which * CLASSES < out_sizes[1]))[:, None]
            place = to + which * (CLASSES * stride(out_strides, 4, OUT_UNIT))
            _write(to_lanes, place, column, has, sums[e], shift, PIXELS, ROWS, COLUMNS, WIDTH, BIAS)
            spoilt += sums[e] * 0.0  # which is NaN from the first NaN on
        sums = shifted(sums, UP)
        for _ in tl.static_range(UP):
            sums = sums + (tl.zeros([COLUMNS, ROWS, WIDTH], tl.float32),)
    if tl.max((spoilt != spoilt).to(tl.int32)) > 0:
        # An infinity has no product with the zeros beside the band. Results that are NaN are taken again, one by one.
        tl.debug_barrier()
        from_w = w + g * w_strides[0] + q % MADE * w_strides[2]
        for late in tl.range(0, height * UP):
            total = tl.zeros([COLUMNS, ROWS, WIDTH], tl.float32)
            for tap_number in tl.range(0, K0 * K1 * KERNEL[2]):
                t2 = tap_number % KERNEL[2]
                t1 = tap_number // KERNEL[2] % K1
                t0 = tap_number // KERNEL[2] // K1
                at0, in0 = depth_of(z, t0, DEPTH, a_sizes[0])
                at1, in1 = depth_of(result + late * CLASSES, t1, DOWNWARDS, a_sizes[1])
                at2, in2 = depth_of(write, t2, ASIDE, a_sizes[2])
                places = (n * a_strides[0] + at0 * a_strides[3] + at1 * a_strides[4])[:, None] + at2 * a_strides[5]
                meeting = (in0 & in1 & there)[:, None] & in2
                meeting = tl.broadcast_to(meeting[None, :, :] & column[:, None, None], (COLUMNS, ROWS, WIDTH))
                left = tl.load((a + g * a_strides[1])[:, None, None] + places[None, :, :], mask=meeting, other=0.0)
                own_taps = from_w + (t0 * w_strides[3] + t1 * w_strides[4] + t2 * w_strides[5])
                right = tl.load(own_taps, mask=column, other=0.0)
                # A zero that was not read would have a product with an infinite weight.
                total += tl.where(meeting, left.to(tl.float32) * right.to(tl.float32)[:, None, None], 0.0)
            holds = written & (result + late * CLASSES < out_sizes[1])[:, None]
            holds = tl.broadcast_to(holds[None, :, :] & column[:, None, None], (COLUMNS, ROWS, WIDTH))
            again = to_lanes[:, None, None] + (to + late * (CLASSES * out_strides[4]))[None, :, :]
            held = tl.load(again, mask=holds, other=0.0).to(tl.float32)
            if BIAS:
                total += tl.load(bias + q * bias_stride, mask=column, other=0.0).to(tl.float32)[:, None, None]
            tl.store(again, total.to(out.dtype.element_ty), mask=holds & (held != held))


@triton.jit
def _lifted(values, PIXELS: tl.constexpr):
    """Values of channels, for a block whose last axis has pixels, or channels."""
    if PIXELS:
        return values[:, None, None]
    else:
        return values[None, None, :]


@triton.jit
def _both(column, inside, PIXELS: tl.constexpr):
    """The same of masks."""
    if PIXELS:
        return column[:, None, None] & inside[None, :, :]
    else:
        return inside[:, :, None] & column[None, None, :]


@triton.jit
def read_block(
    lanes,
    offset,
    column,
    inside,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A row of the windows: [COLUMNS, ROWS, WINDOW]."""
    if PIXELS:
        mask = tl.broadcast_to(_both(column, inside, PIXELS), (COLUMNS, ROWS, WINDOW))
        return tl.load(lanes[:, None, None] + offset[None, :, :], mask=mask, other=0.0)
    else:
        mask = tl.broadcast_to(_both(column, inside, PIXELS), (ROWS, WINDOW, COLUMNS))
        values = tl.load(lanes[None, None, :] + offset[:, :, None], mask=mask, other=0.0)
        return tl.permute(values, (2, 0, 1))


@triton.jit
def _multiply(
    sums,
    values,
    factors,
    LAYER: tl.constexpr,
    ROW: tl.constexpr,
    ROW_TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    LIVE: tl.constexpr,
):
    """Sums with the products of one row of the input."""
    found = ()
    for e in tl.static_range(LIVE):
        value = sums[e]
        if ROW_TAPS[ROW][e] >= 0:
            value = tl.dot(values, factors[LAYER * KERNEL + ROW_TAPS[ROW][e]], value)
        found = found + (value,)
    return found


@triton.jit
def _write(
    lanes,
    offset,
    column,
    has,
    value,
    shift,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Write a row of results."""
    if PIXELS:
        mask = tl.broadcast_to(_both(column, has, PIXELS), (COLUMNS, ROWS, WIDTH))
        place = lanes[:, None, None] + offset[None, :, :]
    else:
        mask = tl.broadcast_to(_both(column, has, PIXELS), (ROWS, WIDTH, COLUMNS))
        place = lanes[None, None, :] + offset[:, :, None]
        value = tl.permute(value, (1, 2, 0))
    if BIAS:
        value += shift
    tl.store(place, value.to(lanes.dtype.element_ty), mask=mask)
