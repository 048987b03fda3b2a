"""w as matrix products over pixels by warps with roles: one asks for copies of blocks, two groups of four multiply.

A unit is 64 channels of x, seen through a group of taps along the first axis; units of fewer channels lie beside each
other in one block of 64. A tile of w is some units by a run of channels of y. Its sum goes over boxes of pixels: the
box of y, and for each unit the box of x that its taps read, are brought to shared memory. Rows of boxes lie outermost:
taps of a group read the same box of x, each from another row on. Where a box leaves its tensor, zeros arrive, so that
padding costs nothing; channels beyond those of a group are multiplied, and left out when sums are finished.

Numbers of f32 come as sums of two or three parts in bf16, which lie one after another as so many more images. Boxes of
all parts are brought together, and each pair of parts that counts is multiplied.

The tiles with their boxes make one long list, of which every program takes an equal run. It writes the sums of each
tile that it meets to a slot of its own, and `finish_weights` adds the slots of a tile in their order.

Axes are in an order that the plan chose: taps are grouped along the first. Tensors are (axis 0, axis 1, n, axis 2, c).
"""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common import stride

# Places of what `WALK` says, the constants of how a list goes over taps and pixels.
KERNEL = tl.constexpr(0)  # of three axes
STRIDE = tl.constexpr(3)
DILATION = tl.constexpr(6)
PAD = tl.constexpr(9)
BOX = tl.constexpr(12)  # pixels of a box: axis 0, axis 1, n, axis 2
STEP = tl.constexpr(16)  # between taps of a group: a step of them is a whole number of rows
TAPS = tl.constexpr(17)  # of a group
UNITS = tl.constexpr(18)  # of a tile
SKIP = tl.constexpr(19)  # whether pixels that all taps of a tile take to the padding are left out
LINES = tl.constexpr(20)  # 1 if pixels of axis 2 lie innermost in y, behind channels; 2 if they do in x as well

# The parts of x and y that are multiplied, smaller products first: what matrix units cut off follows the largest sum so
# far. Of two parts, there are the last three pairs.
X_PARTS = tl.constexpr((1, 0, 2, 0, 1, 0))
Y_PARTS = tl.constexpr((1, 2, 0, 1, 0, 0))
MANY = tl.constexpr(320)  # columns of all sums of a thread in tf32, beyond which pixels of x are loaded 8 at a time
FEW = tl.constexpr(128)  # up to which they are loaded 32 at a time, between them 16


@triton.jit
def taps_of(unit, blocks, WALK):
    """The block of channels of a unit, and its first tap on each axis."""
    group = unit // blocks
    k2 = group % WALK[KERNEL + 2]
    outer = group // WALK[KERNEL + 2]
    k1 = outer % WALK[KERNEL + 1]
    first = outer // WALK[KERNEL + 1]
    k0 = first % WALK[STEP] + first // WALK[STEP] * (WALK[STEP] * WALK[TAPS])
    return unit % blocks, k0, k1, k2


@triton.jit
def reach(first, last, x_size, y_size, AXIS: tl.constexpr, WALK):
    """From where to where results of an axis meet x by any of the taps first to last."""
    past = WALK[PAD + AXIS] - last * WALK[DILATION + AXIS]
    left = x_size + WALK[PAD + AXIS] - first * WALK[DILATION + AXIS]
    start = (tl.maximum(past, 0) + WALK[STRIDE + AXIS] - 1) // WALK[STRIDE + AXIS]
    stop = (tl.maximum(left, 0) + WALK[STRIDE + AXIS] - 1) // WALK[STRIDE + AXIS]
    return start, tl.minimum(stop, y_size)


@triton.jit
def boxes(part, x_sizes, y_sizes, images, blocks, units, WALK):
    """The boxes of pixels that the units of a part meet: how many, where they begin, and how many on each axis."""
    begin0 = images * 0
    begin1 = begin0
    begin2 = begin0
    end0 = y_sizes[0]
    end1 = y_sizes[1]
    end2 = y_sizes[2]
    if WALK[SKIP]:
        begin0 = y_sizes[0]
        begin1 = y_sizes[1]
        begin2 = y_sizes[2]
        end0 = images * 0
        end1 = end0
        end2 = end0
        for unit in range(part * WALK[UNITS], tl.minimum(part * WALK[UNITS] + WALK[UNITS], units)):
            _block, k0, k1, k2 = taps_of(unit, blocks, WALK)
            last = tl.minimum(k0 + WALK[STEP] * (WALK[TAPS] - 1), WALK[KERNEL] - 1)
            start, stop = reach(k0, last, x_sizes[0], y_sizes[0], 0, WALK)
            begin0 = tl.minimum(begin0, start)
            end0 = tl.maximum(end0, stop)
            start, stop = reach(k1, k1, x_sizes[1], y_sizes[1], 1, WALK)
            begin1 = tl.minimum(begin1, start)
            end1 = tl.maximum(end1, stop)
            start, stop = reach(k2, k2, x_sizes[2], y_sizes[2], 2, WALK)
            begin2 = tl.minimum(begin2, start)
            end2 = tl.maximum(end2, stop)
    count0 = (tl.maximum(end0 - begin0, 0) + WALK[BOX] - 1) // WALK[BOX]
    count1 = (tl.maximum(end1 - begin1, 0) + WALK[BOX + 1] - 1) // WALK[BOX + 1]
    count2 = (tl.maximum(end2 - begin2, 0) + WALK[BOX + 3] - 1) // WALK[BOX + 3]
    total = count0 * count1 * count2 * ((images + WALK[BOX + 2] - 1) // WALK[BOX + 2])
    return total, begin0, begin1, begin2, count0, count1, count2


@triton.jit
def begin_of(part, starts):
    """Where the boxes of a part begin in the list of a run of columns."""
    found = starts[0]
    for at in tl.static_range(1, len(starts)):
        found = tl.where(part == at, starts[at], found)
    return found


@triton.jit
def find(at, sizes, starts, WALK):
    """What has a number in the list: block of groups, part of the units, columns of y, and which box of how many."""
    x_sizes, y_sizes, images, blocks, units, columns, whole, _total = sizes
    group = at // whole
    rest = at % whole
    part = images * 0
    if WALK[SKIP]:
        for other in tl.static_range(1, len(starts)):
            part += tl.where(rest >= starts[other] * columns, 1, 0)
        rest -= begin_of(part, starts) * columns
    count, b0, b1, b2, n0, n1, n2 = boxes(part, x_sizes, y_sizes, images, blocks, units, WALK)
    if not WALK[SKIP]:
        part = rest // (count * columns)
        rest = rest % (count * columns)
    return group, part, rest // count, rest % count, count, b0, b1, b2, n0, n1, n2


@gluon.jit
def run_of(total):
    """The run of the list that is this program's."""
    programs = gl.num_programs(0)
    begin = gl.program_id(0).to(gl.int64) * total // programs
    end = (gl.program_id(0) + 1).to(gl.int64) * total // programs
    return begin.to(gl.int32), end.to(gl.int32)


@gluon.jit
def copy_boxes(
    y,
    x,
    x_halo,
    y_blocks,
    x_blocks,
    empty,
    full,
    sizes,
    starts,
    channels,
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    HALO_BOX: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """The warp that asks for copies."""
    _x_sizes, _y_sizes, images, blocks, _units, _columns, _whole, total = sizes
    x_group, y_group = channels
    SIDE: gl.constexpr = WALK[BOX + 1] * WALK[BOX + 2] * WALK[BOX + 3]
    ROWS: gl.constexpr = (WALK[BOX] + HALO) * SIDE
    UNIT: gl.constexpr = ROOM // 8
    COUNT: gl.constexpr = WALK[UNITS]
    HALVES: gl.constexpr = HALO // HALO_BOX if HALO else 0
    ALIGN: gl.constexpr = 128 // y.dtype.primitive_bitwidth
    BYTES: gl.constexpr = y.dtype.primitive_bitwidth // 8
    at, end = run_of(total)
    stage = 0
    phase = 1
    while at < end:
        group, part, column, box, count, b0, b1, b2, n0, n1, n2 = find(at, sizes, starts, WALK)
        many = gl.minimum(count - box, end - at)
        at += many
        x_channel = group * x_group // ALIGN * ALIGN
        y_channel = group * y_group // ALIGN * ALIGN + column * (COLUMNS * SPLIT)
        first, f0, f1, f2 = taps_of(part * WALK[UNITS], blocks, WALK)
        f0 = f0 % WALK[STEP] + f0 // (WALK[STEP] * WALK[TAPS]) * WALK[STEP]
        q2 = box % n2
        outer = box // n2
        q1 = outer % n1
        outer = outer // n1
        q0 = outer % n0
        n = outer // n0 * WALK[BOX + 2]
        # Divisions take long, and this warp has to keep ahead of all others: what follows counts.
        for _ in range(many):
            o0 = b0 + q0 * WALK[BOX]
            o1 = b1 + q1 * WALK[BOX + 1]
            o2 = b2 + q2 * WALK[BOX + 3]
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (WALK[BOX] * SIDE * COLUMNS * SPLIT + ROWS * BLOCK * WALK[UNITS]) * PARTS * BYTES)
            for half in gl.static_range(SPLIT * PARTS):
                at_y = (stage * (SPLIT * PARTS) + half) * BLOCKS
                of_y = y_blocks.index(at_y)._reinterpret(y.dtype, y.block_shape, y.layout)
                c = y_channel + half % SPLIT * COLUMNS
                if WALK[LINES]:
                    tma.async_copy_global_to_shared(y, [o0, o1, n + half // SPLIT * images, c, o2], bar, of_y)
                else:
                    tma.async_copy_global_to_shared(y, [o0, o1, n + half // SPLIT * images, o2, c], bar, of_y)
            block = first
            g0 = f0
            g1 = f1
            g2 = f2
            for u in range(COUNT):
                k0 = g0 % WALK[STEP] + g0 // WALK[STEP] * (WALK[STEP] * WALK[TAPS])
                c = x_channel + block * BLOCK
                i0 = o0 * WALK[STRIDE] + k0 * WALK[DILATION] - WALK[PAD]
                i1 = o1 * WALK[STRIDE + 1] + g1 * WALK[DILATION + 1] - WALK[PAD + 1]
                i2 = o2 * WALK[STRIDE + 2] + g2 * WALK[DILATION + 2] - WALK[PAD + 2]
                for piece in gl.static_range(PARTS):
                    image = n + piece * images
                    row = ((stage * PARTS + piece) * WALK[UNITS] + u) * UNIT
                    of_x = x_blocks.index(row)._reinterpret(x.dtype, x.block_shape, x.layout)
                    if WALK[LINES] == 2:
                        tma.async_copy_global_to_shared(x, [i0, i1, image, c, i2], bar, of_x)
                    else:
                        tma.async_copy_global_to_shared(x, [i0, i1, image, i2, c], bar, of_x)
                    for h in gl.static_range(HALVES):
                        more = x_blocks.index(row + (WALK[BOX] + h * HALO_BOX) * SIDE // 8)
                        of_halo = more._reinterpret(x.dtype, x_halo.block_shape, x_halo.layout)
                        i_halo = i0 + (WALK[BOX] + h * HALO_BOX) * WALK[STRIDE]
                        if WALK[LINES] == 2:
                            tma.async_copy_global_to_shared(x_halo, [i_halo, i1, image, c, i2], bar, of_halo)
                        else:
                            tma.async_copy_global_to_shared(x_halo, [i_halo, i1, image, i2, c], bar, of_halo)
                block += 1
                last = block == blocks
                block = gl.where(last, 0, block)
                g2 += gl.where(last, 1, 0)
                last = g2 == WALK[KERNEL + 2]
                g2 = gl.where(last, 0, g2)
                g1 += gl.where(last, 1, 0)
                last = g1 == WALK[KERNEL + 1]
                g1 = gl.where(last, 0, g1)
                g0 += gl.where(last, 1, 0)
            stage += 1
            turn = stage == STAGES
            stage = gl.where(turn, 0, stage)
            phase ^= gl.where(turn, 1, 0)
            box += 1
            q2 += 1
            turn = q2 == n2
            q2 = gl.where(turn, 0, q2)
            q1 += gl.where(turn, 1, 0)
            turn = q1 == n1
            q1 = gl.where(turn, 0, q1)
            q0 += gl.where(turn, 1, 0)
            turn = q0 == n0
            q0 = gl.where(turn, 0, q0)
            n += gl.where(turn, WALK[BOX + 2], 0)


@gluon.jit
def zeros(COUNT: gl.constexpr, COLUMNS: gl.constexpr, SUMS: gl.constexpr):
    """The sums of so many taps."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.zeros([64, COLUMNS], gl.float32, SUMS),)
    return found


@gluon.jit
def operand(
    x_blocks,
    stage,
    WHICH: gl.constexpr,
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """What the taps of a sum read: each tap the box of its unit from its own row on."""
    SIDE: gl.constexpr = WALK[BOX + 1] * WALK[BOX + 2] * WALK[BOX + 3]
    PIXELS: gl.constexpr = WALK[BOX] * SIDE
    UNIT: gl.constexpr = ROOM // 8
    SHIFT: gl.constexpr = HALO // (WALK[TAPS] - 1) if HALO else 0  # rows from tap to tap
    unit = stage * WALK[UNITS] + WHICH // WALK[TAPS] * (64 // BLOCK)
    at = x_blocks.index(unit * UNIT + WHICH % WALK[TAPS] * SHIFT * SIDE // 8)
    BITS: gl.constexpr = x_blocks.dtype.primitive_bitwidth
    if WALK[LINES] == 2:
        return at._reinterpret(x_blocks.dtype, [64, PIXELS], gl.NVMMASharedLayout(WALK[BOX + 3] * BITS // 8, BITS, 2))
    elif BLOCK == 64:
        return at._reinterpret(x_blocks.dtype, [PIXELS, 64], LAYOUT).permute((1, 0))
    else:
        # The next unit, whose channels lie beside these, begins so many rows on.
        return at._reinterpret(x_blocks.dtype, [ROOM, 64], LAYOUT).slice(0, PIXELS, 0).permute((1, 0))


@gluon.jit
def products(
    sums,
    x_blocks,
    y_block,
    stage,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin the products of a box."""
    found = ()
    for s in gl.static_range(COUNT):
        x = operand(x_blocks, stage, FIRST + s, WALK, BLOCK, HALO, ROOM, LAYOUT)
        found = found + (warpgroup_mma(x, y_block, sums[s], is_async=True),)
    return found


@gluon.jit
def products_of_parts(
    sums,
    x_blocks,
    y_blocks,
    stage,
    HALF: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLIT: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    LAYOUT: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The products of a box by all pairs of parts, finished.

    Matrix units cut off what a sum cannot hold, which adds up: of three parts, other units add what a box brings.
    """
    found = ()
    for s in gl.static_range(COUNT):
        few = gl.zeros_like(sums[s]) if PARTS == 3 else sums[s]
        for pair in gl.static_range(0 if PARTS == 3 else 3, 6):
            x_stage = stage * PARTS + X_PARTS[pair]
            x = operand(x_blocks, x_stage, FIRST + s, WALK, BLOCK, HALO, ROOM, LAYOUT)
            y = y_blocks.index((stage * PARTS + Y_PARTS[pair]) * SPLIT + (HALF if SPLIT == 2 else 0))
            few = warpgroup_mma(x, y, few, is_async=True)
        few = warpgroup_mma_wait(0, [few])
        found = found + ((sums[s] + few) if PARTS == 3 else few,)
    return found


@gluon.jit
def rounded(values):
    """Numbers of f32 as tf32 has them: matrix units would cut off the last bits."""
    code: gl.constexpr = "cvt.rna.tf32.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=r,r", [values], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def some_of_x(
    x_blocks,
    stage,
    FIRST: gl.constexpr,
    NUMBER: gl.constexpr,
    SOME: gl.constexpr,
    WALK: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Some pixels of the box of a sum, transposed: they have such a number.

    Of eight pixels, those with even numbers come first, as `turn_boxes` laid y: four that are neighbours lie in banks
    of shared memory that two of them share.
    """
    SIDE: gl.constexpr = WALK[BOX + 1] * WALK[BOX + 2] * WALK[BOX + 3]
    SHIFT: gl.constexpr = HALO // (WALK[TAPS] - 1) if HALO else 0
    STEPS: gl.constexpr = WALK[BOX] * SIDE // SOME
    SUM: gl.constexpr = FIRST + NUMBER // STEPS
    if WALK[LINES] == 2:
        # They lie as they are needed.
        x = operand(x_blocks, stage, SUM, WALK, 64, HALO, ROOM, LAYOUT)
        return x.slice(NUMBER % STEPS * SOME, SOME, 1).load(OPERAND)
    # Channels by pixels: OPERAND, with pixels in that order.
    READ: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 8], [0, 16]][: 2 if SOME == 8 else 3 if SOME == 16 else 4],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, SOME],
    )
    unit = stage * WALK[UNITS] + SUM // WALK[TAPS] * 2
    at = x_blocks.index(unit * (ROOM // 8) + SUM % WALK[TAPS] * SHIFT * SIDE // 8)
    x = at._reinterpret(gl.float32, [ROOM, 64], LAYOUT).slice(NUMBER % STEPS * SOME, SOME, 0).permute((1, 0)).load(READ)
    x = x.reshape([64, SOME // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([64, SOME])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def products_in_tf32(
    sums,
    x_blocks,
    y_block,
    stage,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    WALK: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """The products of a box, finished. x goes through registers, where it is rounded.

    What comes next is loaded while a product and the one before it are under way. So many pixels at a time leave room
    for the sums.
    """
    PIXELS: gl.constexpr = y_block.shape[0]
    ALL: gl.constexpr = COUNT * y_block.shape[1]
    SOME: gl.constexpr = 8 if ALL > MANY else 16 if ALL > FEW else 32
    STEPS: gl.constexpr = PIXELS // SOME
    found = ()
    acc = sums[0]
    before = sums[0]
    held = y_block
    x = some_of_x(x_blocks, stage, FIRST, 0, SOME, WALK, HALO, ROOM, LAYOUT, OPERAND)
    for i in gl.static_range(COUNT * STEPS):
        if i % STEPS == 0:
            acc = sums[i // STEPS]
        now = rounded(x)
        acc = warpgroup_mma(now, y_block.slice(i % STEPS * SOME, SOME, 0), acc, is_async=True)
        if i + 1 < COUNT * STEPS:
            x = some_of_x(x_blocks, stage, FIRST, i + 1, SOME, WALK, HALO, ROOM, LAYOUT, OPERAND)
        if i > 0:
            if i % STEPS > 0:
                acc, _ = warpgroup_mma_wait(1, [acc, held])
            else:
                before, acc, _ = warpgroup_mma_wait(1, [before, acc, held])
                found = found + (before,)
        held = now
        if i % STEPS == STEPS - 1:
            before = acc
    before, _ = warpgroup_mma_wait(0, [before, held])
    return found + (before,)


@gluon.jit
def turn_boxes(
    y_blocks,
    full,
    turned,
    total,
    COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warps that turn boxes of y in f32, where they lie, so that pixels are innermost; and round them.

    Matrix units take numbers of 32 bits from shared memory in no other way.
    """
    LANES: gl.constexpr = min(32, COLUMNS)
    BLOCKS: gl.constexpr = COLUMNS * SPLIT // LANES
    GIVEN: gl.constexpr = gl.NVMMASharedLayout(LANES * 4, 32, 2)
    # Pixels by channels: a thread has a channel, of which it writes four pixels at a time.
    NEXT: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8]]
    READ: gl.constexpr = gl.DistributedLinearLayout(
        [[2, 0], [4, 0], [1, 0]] + ([[8, 0]] if LANES == 32 else []),
        NEXT + ([[0, 16]] if LANES == 32 else [[8, 0]]),
        [[16, 0]],
        [],
        [32, LANES],
    )
    begin, end = run_of(total)
    stage = 0
    phase = 0
    for _ in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        for block in gl.static_range(BLOCKS):
            to = y_blocks.index(stage * BLOCKS + block)
            y = rounded(to._reinterpret(gl.float32, [32, LANES], GIVEN).load(READ))
            y = y.reshape([4, 4, 2, LANES]).permute((0, 2, 1, 3)).reshape([32, LANES])
            # All have read before any writes.
            gl.thread_barrier()
            to.permute((1, 0)).store(y)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(turned.index(stage), count=1)
        stage += 1
        turn = stage == STAGES
        stage = gl.where(turn, 0, stage)
        phase ^= gl.where(turn, 1, 0)


@gluon.jit
def waited(sums, MOST: gl.constexpr):
    """Sums of which so many products may still be under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(MOST, sums),)
    else:
        return warpgroup_mma_wait(MOST, sums)


@gluon.jit
def multiply(
    HALF: gl.constexpr,
    parts,
    y_blocks,
    x_blocks,
    empty,
    full,
    turned,
    sizes,
    starts,
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    HALO: gl.constexpr,
    ROOM: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
    PARTS: gl.constexpr,
    TF32: gl.constexpr,
):
    """A group of warps that multiplies: the taps that are its half of a tile's, or its half of the columns."""
    _x_sizes, _y_sizes, _images, _blocks, units, columns, _whole, total = sizes
    ALL: gl.constexpr = WALK[UNITS] * BLOCK // 64 * WALK[TAPS]
    FIRST: gl.constexpr = HALF * ((ALL + 1) // 2) if SPLIT == 1 else 0
    COUNT: gl.constexpr = ALL if SPLIT == 2 else (ALL // 2 if HALF else (ALL + 1) // 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 8 if TF32 else 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 1)
    TURNED: gl.constexpr = TF32 and WALK[LINES] == 0
    BLOCKS: gl.constexpr = COLUMNS // y_blocks.shape[1] if TURNED else 1
    rows = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    lanes = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS)) + (HALF * COLUMNS if SPLIT == 2 else 0)
    at, end = run_of(total)
    stage = 0
    phase = 0
    while at < end:
        group, part, column, box, count, _b0, _b1, _b2, _n0, _n1, _n2 = find(at, sizes, starts, WALK)
        many = gl.minimum(count - box, end - at)
        at += many
        sums = zeros(COUNT, COLUMNS, SUMS)
        if PARTS > 1:
            for _ in range(many):
                mbarrier.wait(full.index(stage), phase)
                sums = products_of_parts(
                    sums, x_blocks, y_blocks, stage, HALF, FIRST, COUNT, WALK, BLOCK, SPLIT, HALO, ROOM, LAYOUT, PARTS
                )  # fmt: skip
                mbarrier.arrive(empty.index(stage), count=1)
                stage += 1
                turn = stage == STAGES
                stage = gl.where(turn, 0, stage)
                phase ^= gl.where(turn, 1, 0)
        else:
            for step in range(many):
                mbarrier.wait(full.index(stage), phase)
                y = y_blocks.index((stage * SPLIT + (HALF if SPLIT == 2 else 0)) * BLOCKS)
                if TF32:
                    if TURNED:
                        mbarrier.wait(turned.index(stage), phase)
                        y = y._reinterpret(gl.float32, [COLUMNS, y_blocks.shape[2]], y_blocks.layout)
                    y = y.permute((1, 0))
                    sums = products_in_tf32(sums, x_blocks, y, stage, FIRST, COUNT, WALK, HALO, ROOM, LAYOUT, OPERAND)
                    mbarrier.arrive(empty.index(stage), count=1)
                else:
                    if WALK[LINES]:
                        y = y.permute((1, 0))
                    sums = products(sums, x_blocks, y, stage, FIRST, COUNT, WALK, BLOCK, HALO, ROOM, LAYOUT)
                    sums = waited(sums, COUNT)
                    # Products of the box before are done: its stage is free.
                    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=step > 0)
                stage += 1
                turn = stage == STAGES
                stage = gl.where(turn, 0, stage)
                phase ^= gl.where(turn, 1, 0)
            if not TF32:
                sums = waited(sums, 0)
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1)
        parts_of_units = (units + WALK[UNITS] - 1) // WALK[UNITS]
        slot = gl.program_id(0) + (group * parts_of_units + part) * columns + column
        for s in gl.static_range(COUNT):
            to = parts + (slot * ALL + FIRST + s) * (64 * COLUMNS * SPLIT)
            gl.store(to + rows[:, None] * (COLUMNS * SPLIT) + lanes[None, :], sums[s])


@gluon.jit
def weights_boxes(
    y,
    x,
    x_halo,
    parts,
    x_sizes,
    y_sizes,
    images,
    blocks,  # of channels of x in a group
    units,
    columns,  # how many runs of channels of y a group has
    whole,  # length of the list for one block of groups
    total,
    x_group,  # channels from one block of groups to the next
    y_group,
    starts,  # of parts of the units, in the list of a run of columns
    WALK: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLIT: gl.constexpr,
    HALO: gl.constexpr,  # rows of a box of x beyond those of y
    ROOM: gl.constexpr,  # pixels of shared memory for a box of x
    HALO_BOX: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,  # of numbers of f32
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    TF32: gl.constexpr,  # whether numbers are f32, of which warps turn y where channels lie side by side
):
    """The sums of a run of the list, in slots."""
    PIXELS: gl.constexpr = WALK[BOX] * WALK[BOX + 1] * WALK[BOX + 2] * WALK[BOX + 3]
    UNIT: gl.constexpr = ROOM // 8
    BITS: gl.constexpr = y.dtype.primitive_bitwidth
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(BLOCK * BITS // 8, 128), BITS, 2)
    # In f32, blocks of channels lie one after another, each first as it came, and then by channels.
    TURNED: gl.constexpr = TF32 and WALK[LINES] == 0
    BLOCKS: gl.constexpr = (COLUMNS + 31) // 32 if TURNED else 1
    Y_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128 if TURNED else y.layout.swizzle_byte_width, BITS, 2)
    INNERMOST: gl.constexpr = TF32 or WALK[LINES]  # pixels
    IN_BLOCK: gl.constexpr = [COLUMNS // BLOCKS, PIXELS] if INNERMOST else [PIXELS, COLUMNS]
    SHAPE: gl.constexpr = [STAGES * PARTS * SPLIT * BLOCKS] + IN_BLOCK
    y_blocks = gl.allocate_shared_memory(y.dtype, SHAPE, Y_LAYOUT)
    x_blocks = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS * WALK[UNITS] * UNIT, 8, BLOCK], X_LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turned = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()) if TURNED else full
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
        if TURNED:
            mbarrier.init(turned.index(i), count=1)
    fence_async_shared()
    # The programs that add slots may take the place of those that are done; what these read, others may write now.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; // dummy $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    sizes = (x_sizes, y_sizes, images, blocks, units, columns, whole, total)
    channels = (x_group, y_group)
    # fmt: off
    SPARE: gl.constexpr = 504 - 2 * REGISTERS
    if TURNED:
        gl.warp_specialize([
            (multiply, (0, parts, y_blocks, x_blocks, empty, full, turned, sizes, starts,
                        WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, STAGES, X_LAYOUT, PARTS, TF32)),
            (multiply, (1, parts, y_blocks, x_blocks, empty, full, turned, sizes, starts,
                        WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, STAGES, X_LAYOUT, PARTS, TF32)),
            (turn_boxes, (y_blocks, full, turned, total, COLUMNS, SPLIT, STAGES)),
            (copy_boxes, (y, x, x_halo, y_blocks, x_blocks, empty, full, sizes, starts, channels,
                          WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, HALO_BOX, STAGES, PARTS, BLOCKS)),
        ], [4, 2, 1], [REGISTERS, SPARE, SPARE])
    else:
        gl.warp_specialize([
            (multiply, (0, parts, y_blocks, x_blocks, empty, full, turned, sizes, starts,
                        WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, STAGES, X_LAYOUT, PARTS, TF32)),
            (multiply, (1, parts, y_blocks, x_blocks, empty, full, turned, sizes, starts,
                        WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, STAGES, X_LAYOUT, PARTS, TF32)),
            (copy_boxes, (y, x, x_halo, y_blocks, x_blocks, empty, full, sizes, starts, channels,
                          WALK, BLOCK, COLUMNS, SPLIT, HALO, ROOM, HALO_BOX, STAGES, PARTS, BLOCKS)),
        ], [4, 1], [REGISTERS, SPARE])
    # fmt: on


@triton.jit
def finish_weights(
    parts,
    out,
    x_sizes,
    y_sizes,
    images,
    blocks,
    units,
    columns,
    whole,
    total,
    x_group,
    y_group,
    starts,
    runs,  # into which the list was cut
    groups,
    x_channels,  # of a group, without taps that are folded into them
    y_channels,
    kernel,  # the taps that there are, with folded ones
    out_strides,  # g, channels of y, channels of x, and the axes
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a slot
    FOLD: tl.constexpr,  # taps of each axis that lie side by side as channels of x
    GROUPED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,  # that are read side by side
    MORE: tl.constexpr,  # times that many are on their way at once
    UNIT: tl.constexpr,  # the axis of w whose stride is 1
    LONG: tl.constexpr,  # whether numbers of the list by programs need 64 bits
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Some rows and lanes of the sums of a tap of a tile: slots are added in their order."""
    ALL: tl.constexpr = WALK[UNITS] * BLOCK // 64 * WALK[TAPS]
    number = tl.program_id(0)
    lane = number % (COLUMNS // LANES) * LANES + tl.arange(0, LANES)
    number = number // (COLUMNS // LANES)
    first_row = number % (64 // ROWS) * ROWS
    row = tl.arange(0, ROWS)
    number = number // (64 // ROWS)
    which = number % ALL
    tile = number // ALL
    run = tile // columns
    column = tile - run * columns
    many = (units + WALK[UNITS] - 1) // WALK[UNITS]
    group = run // many
    part = run - group * many
    count = boxes(part, x_sizes, y_sizes, images, blocks, units, WALK)[0]
    at = group * whole + columns * (begin_of(part, starts) if WALK[SKIP] else count * part) + column * count
    if LONG:
        at = at.to(tl.int64)
    first = ((at + 1) * runs - 1) // total
    last = tl.where(count > 0, ((at + count) * runs - 1) // total, first - 1)
    slot = tl.arange(0, SLOTS)
    from_parts = parts + ((first + tile) * ALL + which) * (64 * COLUMNS) + first_row * COLUMNS
    from_parts += slot[:, None, None] * (ALL * 64 * COLUMNS) + row[None, :, None] * COLUMNS + lane[None, None, :]
    # Programs begin while the last sums are written, and wait here for the end of that.
    gdc_wait()
    sums = tl.zeros([SLOTS, ROWS, LANES], tl.float32)
    for begin in tl.range(0, (last - first + 1).to(tl.int32), SLOTS * MORE):
        # All are asked for before any is added.
        found = ()
        for more in tl.static_range(MORE):
            at_slot = begin + more * SLOTS
            there = (at_slot + slot <= last - first)[:, None, None]
            found = found + (tl.load(from_parts + at_slot * (ALL * 64 * COLUMNS), mask=there, other=0.0),)
        for more in tl.static_range(MORE):
            sums += found[more]
    acc = tl.sum(sums, 0)
    unit = part * WALK[UNITS] + which // WALK[TAPS] * (64 // BLOCK)
    if BLOCK == 64:
        c = first_row + row
    else:
        unit = unit + (first_row + row) // BLOCK
        c = (first_row + row) % BLOCK
    block, k0, k1, k2 = taps_of(unit, blocks, WALK)
    k0 += which % WALK[TAPS] * WALK[STEP]
    has = (unit < units) & (k0 < WALK[KERNEL])
    c += block * BLOCK
    q = column * COLUMNS + lane
    if GROUPED:
        c += group * x_group // ALIGN * ALIGN
        q += group * y_group // ALIGN * ALIGN
        has = has & (c >= group * x_group) & (c < tl.minimum((group + 1) * x_group, groups * x_channels))
        real = (q >= group * y_group) & (q < tl.minimum((group + 1) * y_group, groups * y_channels))
        g = c // x_channels
        to_group = q // y_channels
        same = has[:, None] & real[None, :] & (g[:, None] == to_group[None, :])
        c -= g * x_channels
        q -= to_group * y_channels
    else:
        g = 0
        if FOLD[0] * FOLD[1] * FOLD[2] > 1:
            folded = c // x_channels
            c -= folded * x_channels
            k2 = k2 * FOLD[2] + folded % FOLD[2]
            k1 = k1 * FOLD[1] + folded // FOLD[2] % FOLD[1]
            k0 = k0 * FOLD[0] + folded // (FOLD[2] * FOLD[1])
            has = has & (folded < FOLD[0] * FOLD[1] * FOLD[2])
            has = has & (k0 < kernel[0]) & (k1 < kernel[1]) & (k2 < kernel[2])
        else:
            has = has & (c < x_channels)
        same = has[:, None] & (q < y_channels)[None, :]
    if WIDE:
        c = c.to(tl.int64)
        q = q.to(tl.int64)
        k0 = k0.to(tl.int64)
        k1 = k1.to(tl.int64)
        k2 = k2.to(tl.int64)
    base = k0 * out_strides[3] + k1 * out_strides[4] + k2 * out_strides[5]
    if GROUPED:
        base += g * out_strides[0]
    to = out + (base + c * stride(out_strides, 2, UNIT))[:, None] + (q * stride(out_strides, 1, UNIT))[None, :]
    if ACCUMULATE:
        acc += tl.load(to, mask=same, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=same)


@triton.jit
def fold_taps(
    x,
    out,  # (n, axes, width)
    x_strides,  # n, channels, axes
    images,
    X_SIZES: tl.constexpr,
    OUT_SIZES: tl.constexpr,
    STEPS: tl.constexpr,  # of x from one pixel of the result to the next
    SPREAD: tl.constexpr,  # of taps
    PADS: tl.constexpr,
    FOLD: tl.constexpr,
    SPLIT: tl.constexpr,  # parts in bf16 of numbers of f32; 1 leaves them as they are
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    FLAT: tl.constexpr,  # whether taps along the last axis lie side by side with channels
    PIXELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tensor as copies and products ask for it: with taps as channels where there are few, and f32 in parts."""
    gdc_launch_dependents()
    gdc_wait()
    number = tl.program_id(0)
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    column = number % TILES * COLUMNS + tl.arange(0, COLUMNS)
    pixel = number // TILES * PIXELS + tl.arange(0, PIXELS)
    outer = pixel // OUT_SIZES[2]
    i2 = pixel - outer * OUT_SIZES[2]
    image = outer // OUT_SIZES[1]
    i1 = outer - image * OUT_SIZES[1]
    n = image // OUT_SIZES[0]
    i0 = image - n * OUT_SIZES[0]
    has = (n < images)[:, None] & (column < FOLD[0] * FOLD[1] * FOLD[2] * CHANNELS)[None, :]
    i0 = i0 * STEPS[0] - PADS[0]
    i1 = i1 * STEPS[1] - PADS[1]
    i2 = i2 * STEPS[2] - PADS[2]
    c = column % CHANNELS
    f = column // CHANNELS
    j2 = f % FOLD[2]
    j1 = f // FOLD[2] % FOLD[1] * SPREAD[1]
    j0 = f // (FOLD[2] * FOLD[1]) * SPREAD[0]
    if FLAT:
        # Pixels and channels along the last axis are one run of numbers.
        c = column % (FOLD[2] * CHANNELS)
        inside = (i2 * CHANNELS)[:, None] + c[None, :]
        has = has & (inside.to(tl.uint32, bitcast=True) < X_SIZES[2] * CHANNELS)
        j2 = j2 * 0
    else:
        j2 = j2 * SPREAD[2]
        has = has & ((i2[:, None] + j2[None, :]).to(tl.uint32, bitcast=True) < X_SIZES[2])
    if FOLD[1] > 1:
        has = has & ((i1[:, None] + j1[None, :]).to(tl.uint32, bitcast=True) < X_SIZES[1])
    else:
        has = has & ((i1 >= 0) & (i1 < X_SIZES[1]))[:, None]
    if FOLD[0] > 1:
        has = has & ((i0[:, None] + j0[None, :]).to(tl.uint32, bitcast=True) < X_SIZES[0])
    else:
        has = has & ((i0 >= 0) & (i0 < X_SIZES[0]))[:, None]
    if WIDE:
        n = n.to(tl.int64)
        i0 = i0.to(tl.int64)
        i1 = i1.to(tl.int64)
        i2 = i2.to(tl.int64)
        c = c.to(tl.int64)
        j0 = j0.to(tl.int64)
        j1 = j1.to(tl.int64)
        j2 = j2.to(tl.int64)
    rows = n * x_strides[0] + i0 * x_strides[2] + i1 * x_strides[3] + i2 * x_strides[4]
    columns = j0 * x_strides[2] + j1 * x_strides[3] + j2 * x_strides[4]
    columns += c if FLAT else c * x_strides[1]
    found = tl.load(x + rows[:, None] + columns[None, :], mask=has, other=0.0)
    to = out + pixel.to(tl.int64)[:, None] * WIDTH + column[None, :]
    there = (n < images)[:, None] & (column < WIDTH)[None, :]
    for part in tl.static_range(SPLIT):
        rounded = found.to(out.dtype.element_ty)
        tl.store(to, rounded, mask=there)
        if part + 1 < SPLIT:
            found -= rounded.to(tl.float32)
            to += images.to(tl.int64) * (OUT_SIZES[0] * OUT_SIZES[1] * OUT_SIZES[2] * WIDTH)
