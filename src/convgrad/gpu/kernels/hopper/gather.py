"""y and x as matrix products by warps with roles: one asks the copy engine for blocks, two groups of four multiply.

A tile of results is a box of positions of some images, by columns, which are channels. Its sum goes over taps and
channels. For each tap and block of channels, the box of the input that the tap reads is brought to shared memory;
where it leaves the tensor, zeros arrive. So padding is never looked at, and no address is computed.

Rows lie outermost in a box. With a halo, the box of the input has more rows than the tile, and ROWS taps read it, each
from its own row on. Taps that bring padding alone to a tile are left out.

Matrix units take pixels that lie innermost by columns, but not those of f32, which come through registers. There,
channels with even numbers come before odd ones, in every eight: four neighbours would meet in two banks of shared
memory. Weights are packed in the same order.

f32 comes in three parts, each bf16, which lie one after another in images and in taps. Six of their nine products are
taken: the others are less than what sums round off.

A view is what one remainder of positions by the stride sees: of the input for y, whose sum goes over all of them, and
of the results for x, whose tiles have one each. Results q read input q + FIRST + OSTEP*j by the tap TAP + KSTEP*j, for
all j below TAPS: see `plan.hopper.views`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Where a view has its entries; from PHASE on, there is one for each axis.
SOURCE = gl.constexpr(0)  # which descriptor
CHANNEL = gl.constexpr(1)  # where its channels begin
PHASE = gl.constexpr(2)  # the first result, of x
TAP = gl.constexpr(5)
TAPS = gl.constexpr(8)
FIRST = gl.constexpr(11)

# In `BOX`, after rows, planes, images and pixels: whether pixels lie innermost in boxes of the input, behind channels.
LINES = gl.constexpr(4)


@gluon.constexpr_function
def line_bytes(box, bits):
    """Bytes of pixels side by side in shared memory: longer lines are copied in pieces, one after another."""
    return min(box[3] * bits // 8, 128)


@gluon.constexpr_function
def is_steady(views, rows):
    """Whether as many taps read each box of these views, which one box of a chain of them may."""
    return rows == 1 or len(views) == 1 or all(view[TAPS.value + 1] == rows for view in views)


@gluon.constexpr_function
def sharing(views, rows, loops):
    """How many taps along rows read a box of a view; of several views, the most."""
    return rows if loops == 1 else min(rows, views[0][TAPS.value + 1])


@gluon.constexpr_function
def part_of(views, at, loops):
    """The views that a tile chooses from: all, or only the one whose turn it is."""
    return views if loops == 1 else (views[at],)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, complete when so many have arrived."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def says(VIEWS: gl.constexpr, PLACE: gl.constexpr, view):
    """What a view says; its number may be known at run time only."""
    found = gl.to_tensor(VIEWS[0][PLACE])
    for i in gl.static_range(1, len(VIEWS)):
        found = gl.where(view == i, VIEWS[i][PLACE], found)
    return found


@gluon.jit
def tile_of(number, tiles, BOX: gl.constexpr):
    """The column tile, the first position on each axis (planes, rows, columns of pixels), the first image, the view."""
    column = number % tiles[0]
    t = number // tiles[0]
    p2 = (t % tiles[1]) * BOX[3]
    t = t // tiles[1]
    p1 = (t % tiles[2]) * BOX[0]
    t = t // tiles[2]
    p0 = (t % tiles[3]) * BOX[1]
    t = t // tiles[3]
    n = (t % tiles[4]) * BOX[2]
    return column, p0, p1, p2, n, t // tiles[4]


@gluon.jit
def alive(at, taps, size, count, STEP: gl.constexpr):
    """The taps of an axis by which any of `count` positions from `at` on, moved by STEP for each tap, lies inside.

    Divisions are of numbers that are not negative.
    """
    if STEP > 0:
        low = (gl.maximum(1 - at - count, 0) + (STEP - 1)) // STEP
        high = (gl.maximum(size - at, 0) + (STEP - 1)) // STEP
    else:
        low = gl.maximum(at - size - STEP, 0) // -STEP
        high = gl.maximum(at + count - 1 - STEP, 0) // -STEP
    high = gl.minimum(high, taps)
    return gl.minimum(low, high), high


@gluon.jit
def reach(at, VIEWS: gl.constexpr, view, sizes, steps, AXIS: gl.constexpr, EXTENT: gl.constexpr, OSTEP: gl.constexpr):
    """The taps of an axis that a box from `at` on needs."""
    count = gl.minimum(steps[AXIS] - at, EXTENT)
    first = says(VIEWS, FIRST + AXIS, view)
    return alive(at + first, says(VIEWS, TAPS + AXIS, view), sizes[AXIS], count, OSTEP[AXIS])


@gluon.jit
def ranges(
    place,
    VIEWS: gl.constexpr,
    sizes,
    steps,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """The taps that a tile needs, on each axis; along rows, those that read one box count as one."""
    view = place[5]
    if RESIDENT:
        # Weights lie in the order of use, which is one for all tiles.
        low0, low1, low2 = 0, 0, 0
        high0 = says(VIEWS, TAPS, view)
        high1 = says(VIEWS, TAPS + 1, view)
        high2 = says(VIEWS, TAPS + 2, view)
    else:
        low0, high0 = reach(place[1], VIEWS, view, sizes, steps, 0, BOX[1], OSTEP)
        low1, high1 = reach(place[2], VIEWS, view, sizes, steps, 1, BOX[0], OSTEP)
        low2, high2 = reach(place[3], VIEWS, view, sizes, steps, 2, BOX[3], OSTEP)
    if ROWS > 1:
        low1, high1 = 0, (says(VIEWS, TAPS + 1, view) + (ROWS - 1)) // ROWS
    return low0, high0, low1, high1, low2, high2


@gluon.jit
def count_of(
    place,
    VIEWS: gl.constexpr,
    sizes,
    steps,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """How many boxes of the input a tile reads of each block of channels."""
    low0, high0, low1, high1, low2, high2 = ranges(place, VIEWS, sizes, steps, OSTEP, BOX, ROWS, RESIDENT)
    return (high0 - low0) * (high1 - low1) * (high2 - low2)


@gluon.jit
def load_weights(
    slot,
    tap,
    depth,
    column,
    wanted,
    weights,
    b_room,
    b_full,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Ask for a block of weights."""
    full = b_full.index(slot)
    mbarrier.expect(full, DEPTH * COLUMNS * (weights.dtype.primitive_bitwidth // 8), pred=wanted)
    to = b_room.index(slot)._reinterpret(weights.dtype, weights.block_shape, weights.layout)
    if ACROSS:
        tma.async_copy_global_to_shared(weights, [depth, tap, column], full, to, pred=wanted)
    else:
        tma.async_copy_global_to_shared(weights, [column, tap, depth], full, to, pred=wanted)


@gluon.jit
def load_view(
    ia,
    ib,
    number,
    place,
    inputs,
    weights,
    shared,
    sizes,
    steps,
    numbers,
    VIEWS: gl.constexpr,
    TAP_STEPS: gl.constexpr,
    KSTEP: gl.constexpr,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    STEADY: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Ask for what a tile reads of one view. `ia` and `ib` count boxes and blocks of weights."""
    a_room, b_room, a_free, a_full, b_free, b_full = shared
    blocks, subtiles, window, images, taps = numbers
    a = inputs[VIEWS[0][SOURCE]]
    dtype: gl.constexpr = a.dtype
    ITEM: gl.constexpr = dtype.primitive_bitwidth // 8
    A_STAGES: gl.constexpr = a_free.shape[0]
    B_STAGES: gl.constexpr = b_full.shape[0]
    ROW: gl.constexpr = BOX[1] * BOX[2] * BOX[3]
    UNITS: gl.constexpr = (BOX[0] + MORE) * ROW // 8
    view = place[5]
    low0, high0, low1, high1, low2, high2 = ranges(place, VIEWS, sizes, steps, OSTEP, BOX, ROWS, RESIDENT)
    rows = ROWS if STEADY else says(VIEWS, TAPS + 1, view)
    q0 = place[1] + says(VIEWS, FIRST, view)
    q1 = place[2] + says(VIEWS, FIRST + 1, view) + ((rows - 1) * OSTEP[1] if OSTEP[1] < 0 else 0)
    q2 = place[3] + says(VIEWS, FIRST + 2, view)
    tap0 = says(VIEWS, TAP, view)
    tap1 = says(VIEWS, TAP + 1, view)
    tap2 = says(VIEWS, TAP + 2, view)
    column = place[0] * COLUMNS
    c = VIEWS[0][CHANNEL] + (place[0] // subtiles) * window // 8 * 8
    wanted = number < PROGRAMS if RESIDENT else True
    for k0 in range(low0, high0):
        r0 = q0 + k0 * OSTEP[0]
        for k1 in range(low1, high1):
            r1 = q1 + k1 * (ROWS * OSTEP[1])
            for block in range(0, blocks):
                depth = block * DEPTH
                for k2 in range(low2, high2):
                    r2 = q2 + k2 * OSTEP[2]
                    tap = (tap0 + k0 * KSTEP[0]) * TAP_STEPS[0] + (tap1 + k1 * (ROWS * KSTEP[1])) * TAP_STEPS[1]
                    tap += (tap2 + k2 * KSTEP[2]) * TAP_STEPS[2]
                    for part in gl.static_range(PARTS):
                        stage = ia % A_STAGES
                        mbarrier.wait(a_free.index(stage), ((ia // A_STAGES) & 1) ^ 1)
                        full = a_full.index(stage)
                        mbarrier.expect(full, (BOX[0] + MORE) * ROW * DEPTH * ITEM)
                        to = a_room.index(stage * UNITS)._reinterpret(dtype, a.block_shape, a.layout)
                        n = place[4] + part * images
                        if BOX[LINES]:
                            tma.async_copy_global_to_shared(a, [r1, r0, n, c + depth, r2], full, to)
                        else:
                            tma.async_copy_global_to_shared(a, [r1, r0, n, r2, c + depth], full, to)
                        if MORE > 0:
                            halo = inputs[VIEWS[0][SOURCE] + 4]
                            to_more = a_room.index(stage * UNITS + BOX[0] * ROW // 8)
                            to_more = to_more._reinterpret(dtype, halo.block_shape, halo.layout)
                            if BOX[LINES]:
                                place_more = [r1 + BOX[0], r0, n, c + depth, r2]
                                tma.async_copy_global_to_shared(halo, place_more, full, to_more)
                            else:
                                place_more = [r1 + BOX[0], r0, n, r2, c + depth]
                                tma.async_copy_global_to_shared(halo, place_more, full, to_more)
                        ia += 1
                        if STEADY:
                            for use in gl.static_range(ROWS * (PARTS - part)):
                                slot = ib % B_STAGES
                                if not RESIDENT:
                                    mbarrier.wait(b_free.index(slot), ((ib // B_STAGES) & 1) ^ 1)
                                t = tap + use % ROWS * (KSTEP[1] * TAP_STEPS[1]) + use // ROWS * taps
                                load_weights(
                                    slot, t, depth, column, wanted, weights, b_room, b_full, DEPTH, COLUMNS, ACROSS
                                )
                                ib += 1
                        else:
                            for use in range(0, rows):
                                slot = ib % B_STAGES
                                mbarrier.wait(b_free.index(slot), ((ib // B_STAGES) & 1) ^ 1)
                                t = tap + use * (KSTEP[1] * TAP_STEPS[1])
                                load_weights(
                                    slot, t, depth, column, wanted, weights, b_room, b_full, DEPTH, COLUMNS, ACROSS
                                )
                                ib += 1
    return ia, ib


@gluon.jit
def load(
    inputs,
    weights,
    shared,
    tiles,
    sizes,
    steps,
    total,
    numbers,
    VIEWS: gl.constexpr,
    LOOPS: gl.constexpr,
    TAP_STEPS: gl.constexpr,
    KSTEP: gl.constexpr,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Ask the copy engine for all boxes and weights, as early as there is room for them."""
    ia = 0
    ib = 0
    for number in range(gl.program_id(0), total, PROGRAMS):
        place = tile_of(number, tiles, BOX)
        if RESIDENT:
            ib = 0
        for at in gl.static_range(LOOPS):
            ia, ib = load_view(
                ia, ib, number, place, inputs, weights, shared, sizes, steps, numbers, part_of(VIEWS, at, LOOPS),
                TAP_STEPS, KSTEP, OSTEP, BOX, sharing(part_of(VIEWS, at, LOOPS), ROWS, LOOPS),
                is_steady(part_of(VIEWS, at, LOOPS), ROWS), PARTS, MORE, DEPTH, COLUMNS, RESIDENT, ACROSS, PROGRAMS,
            )  # fmt: skip


@gluon.jit
def in_registers(lines, COLUMNS: gl.constexpr):
    """Pixels by channels of f32, of which those with even numbers come first in every eight."""
    DEPTH: gl.constexpr = lines.shape[0]
    HALF: gl.constexpr = lines.shape[1]
    # As OPERAND has them, but for the order of channels.
    ROWS: gl.constexpr = [[64, 0]] if HALF == 128 else []
    DEEP: gl.constexpr = [[0, 8], [0, 16]] if DEPTH == 32 else [[0, 8]] if DEPTH == 16 else []
    READ: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1]] + DEEP + ROWS, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [HALF, DEPTH]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 8]), 1)
    values = lines.permute((1, 0)).load(READ)
    values = values.reshape([HALF, DEPTH // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([HALF, DEPTH])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def product(
    acc,
    stage,
    ib,
    back,
    shared,
    GROUP: gl.constexpr,
    BOX: gl.constexpr,
    UNITS: gl.constexpr,
    DEPTH: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Multiply a half of a box, from a row on, by a block of weights; then the product before this one is complete."""
    a_room, b_room, _, _, _, b_full = shared
    dtype: gl.constexpr = a_room.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    B_STAGES: gl.constexpr = b_full.shape[0]
    ROW: gl.constexpr = BOX[1] * BOX[2] * BOX[3]
    HALF: gl.constexpr = BOX[0] * ROW // 2
    slot = ib % B_STAGES
    mbarrier.wait(b_full.index(slot), 0 if RESIDENT else (ib // B_STAGES) & 1)
    left = a_room.index(stage * UNITS + (back * ROW + GROUP * HALF) // 8)
    right = b_room.index(slot) if ACROSS else b_room.index(slot).permute((1, 0))
    if BOX[LINES]:
        lines = left._reinterpret(dtype, [DEPTH, HALF], gl.NVMMASharedLayout(line_bytes(BOX, BITS), BITS, 2))
        if BITS == 32:
            held = in_registers(lines, acc.shape[1])
            acc = warpgroup_mma(held, right, acc, is_async=True)
            acc, _ = warpgroup_mma_wait(0, [acc, held])
            return acc
        left = lines.permute((1, 0))
    else:
        left = left._reinterpret(dtype, [HALF, DEPTH], gl.NVMMASharedLayout(DEPTH * BITS // 8, BITS, 2))
    acc = warpgroup_mma(left, right, acc, is_async=True)
    return warpgroup_mma_wait(1, [acc])


@gluon.jit
def multiply_view(
    acc,
    ia,
    ib,
    place,
    befores,
    shared,
    sizes,
    steps,
    blocks,
    GROUP: gl.constexpr,
    VIEWS: gl.constexpr,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    STEADY: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Add the products of what a tile reads of one view. What the product before read may then be overwritten.

    Assumes: one tap reads each box if there are several parts.
    """
    _, _, a_free, a_full, b_free, b_full = shared
    a_before, b_before = befores
    A_STAGES: gl.constexpr = a_free.shape[0]
    B_STAGES: gl.constexpr = b_full.shape[0]
    UNITS: gl.constexpr = (BOX[0] + MORE) * BOX[1] * BOX[2] * BOX[3] // 8
    AWAY: gl.constexpr = OSTEP[1] if OSTEP[1] > 0 else -OSTEP[1]
    rows = ROWS if STEADY else says(VIEWS, TAPS + 1, place[5])
    count = count_of(place, VIEWS, sizes, steps, OSTEP, BOX, ROWS, RESIDENT) * blocks
    for _ in range(0, count):
        # Sums within the matrix units are cut off, not rounded. So the largest products of f32, of first parts, are
        # summed there over one block alone; the smaller ones together.
        some = gl.zeros_like(acc) if PARTS > 1 else acc
        for part in gl.static_range(PARTS):
            stage = ia % A_STAGES
            mbarrier.wait(a_full.index(stage), (ia // A_STAGES) & 1)
            if STEADY:
                for use in gl.static_range(ROWS * (PARTS - part)):
                    row = use % ROWS if OSTEP[1] > 0 else ROWS - 1 - use % ROWS
                    some = product(
                        some, stage, ib, row * AWAY, shared, GROUP, BOX, UNITS, DEPTH, RESIDENT, ACROSS
                    )  # fmt: skip
                    if not RESIDENT:
                        mbarrier.arrive(b_free.index((ib + B_STAGES - 1) % B_STAGES), count=1, pred=ib > b_before)
                    if use == 0:
                        mbarrier.arrive(a_free.index((ia + A_STAGES - 1) % A_STAGES), count=1, pred=ia > a_before)
                    if PARTS > 1 and part == 0 and use < ROWS:
                        acc = acc + warpgroup_mma_wait(0, [some])
                        some = gl.zeros_like(acc)
                    ib += 1
            else:
                for use in range(0, rows):
                    row = use if OSTEP[1] > 0 else rows - 1 - use
                    some = product(
                        some, stage, ib, row * AWAY, shared, GROUP, BOX, UNITS, DEPTH, RESIDENT, ACROSS
                    )  # fmt: skip
                    mbarrier.arrive(b_free.index((ib + B_STAGES - 1) % B_STAGES), count=1, pred=ib > b_before)
                    first = (use == 0) & (ia > a_before)
                    mbarrier.arrive(a_free.index((ia + A_STAGES - 1) % A_STAGES), count=1, pred=first)
                    ib += 1
            ia += 1
        if PARTS > 1:
            # An infinity has no further parts, whose products with it would be NaN.
            some = warpgroup_mma_wait(0, [some])
            acc = acc + gl.where(gl.abs(some) < float("inf"), some, 0.0)
        else:
            acc = some
    return acc, ia, ib


@gluon.constexpr_function
def halvings(columns, most):
    """How often columns are cut in two until they are no more than that."""
    count = 0
    while columns > most:
        columns //= 2
        count += 1
    return count


@gluon.jit
def pieces(acc, MOST: gl.constexpr):
    """Sums in pieces of so many columns, which are registers of the same threads."""
    found = (acc,)
    for _ in gl.static_range(halvings(acc.shape[1], MOST)):
        more = ()
        for at in gl.static_range(len(found)):
            both = found[at].reshape([acc.shape[0], 2, found[at].shape[1] // 2]).permute((0, 2, 1))
            more = more + gl.split(both)
        found = more
    return found


@gluon.jit
def multiply(
    GROUP: gl.constexpr,
    results,
    out,
    bias,
    shared,
    staging,
    tiles,
    sizes,
    steps,
    numbers,
    out_strides,
    out_sizes,
    VIEWS: gl.constexpr,
    LOOPS: gl.constexpr,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
    STORE: gl.constexpr,
    STRIDE: gl.constexpr,
    INNER: gl.constexpr,
    MERGED: gl.constexpr,
    OUT_UNIT: gl.constexpr,
    PIECE: gl.constexpr,
    BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Take the sums of one half of the rows of every tile, and store them."""
    a_room, _, a_free, _, b_free, b_full = shared
    total, blocks, subtiles, share_made, made, images, bias_stride = numbers
    dtype: gl.constexpr = a_room.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    A_STAGES: gl.constexpr = a_free.shape[0]
    B_STAGES: gl.constexpr = b_full.shape[0]
    HALF: gl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    ia = 0
    ib = 0
    for number in range(gl.program_id(0), total, PROGRAMS):
        place = tile_of(number, tiles, BOX)
        acc = gl.zeros([HALF, COLUMNS], gl.float32, LAYOUT)
        if RESIDENT:
            ib = 0
        befores = (ia, ib)
        for at in gl.static_range(LOOPS):
            acc, ia, ib = multiply_view(
                acc, ia, ib, place, befores, shared, sizes, steps, blocks, GROUP, part_of(VIEWS, at, LOOPS), OSTEP, BOX,
                sharing(part_of(VIEWS, at, LOOPS), ROWS, LOOPS), is_steady(part_of(VIEWS, at, LOOPS), ROWS), PARTS,
                MORE, DEPTH, RESIDENT, ACROSS,
            )  # fmt: skip
        acc = warpgroup_mma_wait(0, [acc])
        if not RESIDENT:
            mbarrier.arrive(b_free.index((ib + B_STAGES - 1) % B_STAGES), count=1, pred=ib > befores[1])
        mbarrier.arrive(a_free.index((ia + A_STAGES - 1) % A_STAGES), count=1, pred=ia > befores[0])
        # The channels of this tile: of all groups that it has, if there are several.
        base = (place[0] // subtiles) * share_made
        within = (place[0] % subtiles) * COLUMNS
        if BIAS:
            j = within + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            has = (j < share_made) & (base + j < made)
            channel = j % INNER if INNER > 0 else base + j
            given = gl.load(bias + channel * bias_stride, mask=has, other=0.0)
            acc += given.to(gl.float32)[None, :]
        if STORE == "copy":
            # What this group stored before has left shared memory.
            tma.store_wait(0)
            room = staging.index(GROUP)
            room.store(acc.to(out.dtype.element_ty))
            fence_async_shared()
            BLOCK: gl.constexpr = results[0].block_shape
            row = place[2] + GROUP * (BOX[0] - BLOCK[0])
            plane = place[1] + GROUP * (BOX[1] - BLOCK[1])
            image = place[4] + GROUP * (BOX[2] - BLOCK[2])
            pixel = place[3] + GROUP * (BOX[3] - BLOCK[3])
            room = room._reinterpret(results[0].dtype, BLOCK, results[0].layout)
            to = [row, plane, image, pixel, base + within]
            if len(VIEWS) == LOOPS:
                tma.async_copy_shared_to_global(results[0], to, room)
            else:
                for at in gl.static_range(len(VIEWS)):
                    if place[5] == at:
                        tma.async_copy_shared_to_global(results[at], to, room)
        elif STORE == "lines":
            # Boxes whose pixels lie innermost leave as they are.
            tma.store_wait(0)
            room = staging.index(GROUP)
            room.permute((1, 0)).store(acc.to(out.dtype.element_ty))
            fence_async_shared()
            LINE: gl.constexpr = results[0].block_shape
            row = place[2] + GROUP * (BOX[0] - LINE[0])
            plane = place[1] + GROUP * (BOX[1] - LINE[1])
            image = place[4] + GROUP * (BOX[2] - LINE[2])
            pixel = place[3] + GROUP * (BOX[3] - LINE[4])
            room = room._reinterpret(results[0].dtype, LINE, results[0].layout)
            tma.async_copy_shared_to_global(results[0], [row, plane, image, base + within, pixel], room)
        elif STORE == "turned":
            # Neighbouring pixels are neighbours in memory.
            LANES: gl.constexpr = min(32, HALF // PIECE)
            HIGH: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 // LANES, LANES], [4, 1], [1, 0])
            room = staging.index(GROUP)
            some = pieces(acc, room.shape[0])
            for at in gl.static_range(len(some)):
                room.permute((1, 0)).store(some[at].to(out.dtype.element_ty))
                first = within + at * room.shape[0]
                write(
                    room.load(HIGH), out, place, base, first, share_made, made, images, steps, out_strides, out_sizes,
                    GROUP, VIEWS, BOX, STRIDE, INNER, MERGED, OUT_UNIT, True, ACCUMULATE, HIGH,
                )  # fmt: skip
        elif STORE == "rows":
            WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
            room = staging.index(GROUP)
            room.store(acc.to(out.dtype.element_ty))
            write(
                room.load(WIDE), out, place, base, within, share_made, made, images, steps, out_strides, out_sizes,
                GROUP, VIEWS, BOX, STRIDE, INNER, MERGED, OUT_UNIT, False, False, WIDE,
            )  # fmt: skip
        else:
            write(
                acc, out, place, base, within, share_made, made, images, steps, out_strides, out_sizes,
                GROUP, VIEWS, BOX, STRIDE, INNER, MERGED, OUT_UNIT, False, ACCUMULATE, LAYOUT,
            )  # fmt: skip
    if STORE == "copy" or STORE == "lines":
        tma.store_wait(0)


@gluon.jit
def write(
    values,
    out,
    place,
    base,
    within,
    share_made,
    made,
    images,
    steps,
    out_strides,
    out_sizes,
    GROUP: gl.constexpr,
    VIEWS: gl.constexpr,
    BOX: gl.constexpr,
    STRIDE: gl.constexpr,
    INNER: gl.constexpr,
    MERGED: gl.constexpr,
    OUT_UNIT: gl.constexpr,
    TURNED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store results element by element, wherever they lie. With TURNED, `values` have their columns as rows.

    INNER is 0, or how many channels there are of every position within a stride: then columns go over these positions.
    With MERGED, pixels within a stride and their channels lie side by side, and all of them are inside.
    """
    HALF: gl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3] // 2
    COLUMNS: gl.constexpr = values.shape[0] if TURNED else values.shape[1]
    m = GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(0 if TURNED else 1, LAYOUT))
    j = within + gl.arange(0, COLUMNS, gl.SliceLayout(1 if TURNED else 0, LAYOUT))
    view = place[5]
    t2 = place[3] + m % BOX[3]
    n = place[4] + m // BOX[3] % BOX[2]
    t0 = place[1] + m // (BOX[3] * BOX[2]) % BOX[1]
    t1 = place[2] + m // (BOX[3] * BOX[2] * BOX[1])
    p0 = t0 * STRIDE[0] + says(VIEWS, PHASE, view)
    p1 = t1 * STRIDE[1] + says(VIEWS, PHASE + 1, view)
    p2 = t2 * STRIDE[2] + says(VIEWS, PHASE + 2, view)
    has = (n < images) & (t0 < steps[0]) & (t1 < steps[1]) & (t2 < steps[2])
    if STRIDE[0] * STRIDE[1] * STRIDE[2] > 1:
        has = has & (p0 < out_sizes[0]) & (p1 < out_sizes[1]) & (p2 < out_sizes[2])
    rows = n * out_strides[0] + p0 * out_strides[2] + p1 * out_strides[3]
    rows = rows + (p2 if OUT_UNIT == 5 else p2 * out_strides[4])
    if INNER > 0:
        i1 = j // (INNER * STRIDE[2]) % STRIDE[1]
        i0 = j // (INNER * STRIDE[2] * STRIDE[1])
        columns = i0 * out_strides[2] + i1 * out_strides[3]
        mask = has[:, None] & (j < made)[None, :]
        mask = mask & (p0[:, None] + i0[None, :] < out_sizes[0])
        mask = mask & (p1[:, None] + i1[None, :] < out_sizes[1])
        if MERGED:
            columns = columns + j % (INNER * STRIDE[2])
        else:
            i2 = j // INNER % STRIDE[2]
            columns = columns + (j % INNER if OUT_UNIT == 2 else j % INNER * out_strides[1])
            columns = columns + (i2 if OUT_UNIT == 5 else i2 * out_strides[4])
            mask = mask & (p2[:, None] + i2[None, :] < out_sizes[2])
        to = out + rows[:, None] + columns[None, :]
    else:
        columns = base + j if OUT_UNIT == 2 else (base + j) * out_strides[1]
        wanted = (j < share_made) & (base + j < made)
        if TURNED:
            mask = wanted[:, None] & has[None, :]
            to = out + columns[:, None] + rows[None, :]
        else:
            mask = has[:, None] & wanted[None, :]
            to = out + rows[:, None] + columns[None, :]
    if ACCUMULATE:
        values += gl.load(to, mask=mask, other=0.0).to(gl.float32)
    gl.store(to, values.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def gather(
    a0,  # the input, by (row, plane, image, pixel, channel), as each phase of the stride sees it
    a1,
    a2,
    a3,
    a4,  # or, where boxes have more rows than tiles, the same with only these
    a5,
    a6,
    a7,
    weights,  # (channel, tap, channel)
    result0,  # (row, plane, image, pixel, channel), of each phase
    result1,
    result2,
    result3,
    out,
    bias,
    tiles,  # of channels, pixels, rows, planes and images
    sizes,  # of the input: planes, rows, pixels
    steps,  # of the results
    out_sizes,  # of the results: their positions, where there are several phases
    out_strides,  # image, channel, plane, row, pixel
    total,
    blocks,  # of channels, of a sum
    subtiles,  # of columns, that share their groups
    window,  # channels of the input that they read
    share_made,  # channels that they make
    made,
    images,
    taps,  # of weights, before those of the next part
    bias_stride,
    VIEWS: gl.constexpr,
    LOOPS: gl.constexpr,
    TAP_STEPS: gl.constexpr,
    KSTEP: gl.constexpr,
    OSTEP: gl.constexpr,
    BOX: gl.constexpr,  # rows, planes, images, pixels, and whether these lie innermost
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    A_STAGES: gl.constexpr,
    B_STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    ACROSS: gl.constexpr,
    STORE: gl.constexpr,
    STRIDE: gl.constexpr,
    INNER: gl.constexpr,
    MERGED: gl.constexpr,
    OUT_UNIT: gl.constexpr,
    PIECE: gl.constexpr,
    BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Every program takes every PROGRAMS-th tile.

    Assumes: a row of the box is a multiple of eight pixels if ROWS > 1, and the box has 128 pixels or more; with
    RESIDENT, all weights of a column tile fit in B_STAGES, and PROGRAMS is a multiple of the column tiles.
    """
    dtype: gl.constexpr = a0.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    PIXELS: gl.constexpr = BOX[0] * BOX[1] * BOX[2] * BOX[3]
    UNITS: gl.constexpr = (BOX[0] + MORE) * BOX[1] * BOX[2] * BOX[3] // 8
    # Lines of 128 bytes ask that blocks begin where such lines may, whatever the depth.
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128 if BOX[LINES] else DEPTH * BITS // 8, BITS, 2)
    B_SHAPE: gl.constexpr = [B_STAGES, DEPTH, COLUMNS] if ACROSS else [B_STAGES, COLUMNS, DEPTH]
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(weights.layout.swizzle_byte_width, BITS, 2)
    a_room = gl.allocate_shared_memory(dtype, [A_STAGES * UNITS, 8, DEPTH], A_LAYOUT)
    b_room = gl.allocate_shared_memory(dtype, B_SHAPE, B_LAYOUT)
    if STORE == "plain":
        staging = a_room
    else:
        C_TYPE: gl.constexpr = out.dtype.element_ty
        C_BITS: gl.constexpr = C_TYPE.primitive_bitwidth
        TURNED: gl.constexpr = STORE == "turned" or STORE == "lines"
        C_WIDTH: gl.constexpr = line_bytes(BOX, C_BITS) if STORE == "lines" else 128
        C_SWIZZLE: gl.constexpr = C_WIDTH if TURNED else min(COLUMNS * C_BITS // 8, 128)
        # All columns of 32 bits at once would take the room of the boxes.
        HIGH: gl.constexpr = min(COLUMNS, 32) if C_BITS == 32 else COLUMNS
        C_SHAPE: gl.constexpr = [2, HIGH, PIXELS // 2] if TURNED else [2, PIXELS // 2, COLUMNS]
        C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(C_SWIZZLE, C_BITS, 2)
        staging = gl.allocate_shared_memory(C_TYPE, C_SHAPE, C_LAYOUT)
    a_free = barriers(A_STAGES, 2)
    a_full = barriers(A_STAGES, 1)
    b_free = barriers(B_STAGES, 2)
    b_full = barriers(B_STAGES, 1)
    fence_async_shared()
    # What is launched next may begin as soon as there is room; what this reads, the launch before may still write.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; // dummy $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    shared = (a_room, b_room, a_free, a_full, b_free, b_full)
    results = (result0, result1, result2, result3)
    numbers = (total, blocks, subtiles, share_made, made, images, bias_stride)
    gl.warp_specialize(
        [
            (multiply, (
                0, results, out, bias, shared, staging, tiles, sizes, steps, numbers, out_strides, out_sizes,
                VIEWS, LOOPS, OSTEP, BOX, ROWS, PARTS, MORE, DEPTH, COLUMNS, RESIDENT, ACROSS, STORE, STRIDE,
                INNER, MERGED, OUT_UNIT, PIECE, BIAS, ACCUMULATE, PROGRAMS,
            )),
            (multiply, (
                1, results, out, bias, shared, staging, tiles, sizes, steps, numbers, out_strides, out_sizes,
                VIEWS, LOOPS, OSTEP, BOX, ROWS, PARTS, MORE, DEPTH, COLUMNS, RESIDENT, ACROSS, STORE, STRIDE,
                INNER, MERGED, OUT_UNIT, PIECE, BIAS, ACCUMULATE, PROGRAMS,
            )),
            (load, (
                (a0, a1, a2, a3, a4, a5, a6, a7), weights, shared, tiles, sizes, steps, total,
                (blocks, subtiles, window, images, taps),
                VIEWS, LOOPS, TAP_STEPS, KSTEP, OSTEP, BOX, ROWS, PARTS, MORE, DEPTH, COLUMNS, RESIDENT, ACROSS,
                PROGRAMS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
