"""Plans for w on tile registers: a list of steps, each a function from what was decided before to a record.

Boxes and slices decide the order of sums, so nothing that they follow from depends on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

from ...backend import Refusal
from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..pack.box import PackBox, Pairing, packer
from ..pack.unpack import Staging, unpacker
from ..plan.axes import Axis as Geometry
from ..plan.axes import Shape, longest, simplify, tap_offsets, tap_ranges
from ..plan.bits import (
    MOST_SLICES,
    TILE_BOX,
    TILE_CHANNELS,
    TILE_PART,
    TILE_PIXELS,
    TILE_SLICE_BYTES,
    TILE_UNIT,
    most_packed_stride,
)
from ..plan.records import Packed, pitch, unserved, up
from ..plan.tuning import RegisterTuning, SideCosts, converts_f16, tuning
from ..target import Target
from .axes import axis, long_row, phases_of, tiles_of
from .gather_plan import SHAPES, code
from .records import Axis, Box, Sides, SumParts, TileSums
from .split import Split, hindrance, multiplied, split
from .sums_cost import blocks, cost, steps
from .tiles import COLUMNS, PAIRS, ROWS, STEP, Block, loads


def plan(p: Problem, target: Target, threads: int) -> TileSums | Refusal | None:
    """A plan for a weight gradient, if tile registers can compute it well."""
    if p.wanted != "w":
        return None
    how = split(p, target)
    if how is None:
        return unserved(p, hindrance(p, target))
    if min(p.cx, p.cy) < TILE_CHANNELS:
        return unserved(p, f"tiles need {TILE_CHANNELS} channels of a group")
    shape, tuned = simplify(p), tuning(target).registers
    plain = all(a.k == 1 and a.pad == 0 and (a.y - 1) * a.stride < a.x for a in shape.axes)
    swapped = plain and packing(shape, swapped=True) < packing(shape, swapped=False)
    if swapped:
        shape = swap(shape)
    axes = cut_positions(p, shape, how, target)
    weights = tap_offsets(shape.axes)

    def arrange(x_paired: bool) -> TileSums:
        sides = choose_sides(p, shape, target, swapped, x_paired)
        parts = cut_parts(sides, axes, weights, threads, int((target.own_l2 or target.l2) * tuned.sums))
        block = choose_tiles(parts, how, tuned)
        together = block.width if tuned.sides.by_blocks else up(parts.columns, COLUMNS)
        box = lay_out(sides, shape, axes, parts, target, together if x_paired else 0)
        return TileSums(
            sides, box, parts, block, stage_results(sides, parts, len(weights), up(parts.rows, block.height)), weights,
            tap_ranges(shape.axes), meets_zeros(plain, box) or not how.whole, code(target, p.out_dtype),
            len(how.products) * work(sides, box, parts, block, tuned), how,
            how.whole and tuned.fetches_step, threads=threads,
        )  # fmt: skip

    made = choose([arrange(x_paired) for x_paired in ways(weights, how)], tuned.sides)
    return replace(made, why=reasons(made))


# Which of x and y is which.


def ways(weights: tuple[int, ...], how: Split) -> tuple[bool, ...]:
    """Whether pairs may be of x: where there is one tap, rows of x mostly begin with lines; split numbers are paired
    once, because that takes longest.
    """
    return (False, True) if len(weights) > 1 and how.whole else (False,)


def choose(plans: Sequence[TileSums], tuned: SideCosts) -> TileSums:
    """The plan that costs least; of equal ones the first."""
    return min(plans, key=lambda plan: cost(plan, tuned))


def choose_sides(p: Problem, shape: Shape, target: Target, swapped: bool, x_paired: bool) -> Sides:
    """The tensors as rows and columns. A `swapped` shape has changed x and y already."""
    group, y_step, x_step = shape.w_channel
    x, y = (shape.cx, shape.x_channel, x_step), (shape.cy, shape.y_channel, y_step)
    rows, columns = (y, x) if x_paired else (x, y)
    return Sides(
        p.dtype, p.out_dtype, "float", converts_f16(target), p.g, (rows[0], columns[0]), rows[1], columns[1],
        (group, rows[2], columns[2]), p.accumulate, swapped or x_paired,
    )  # fmt: skip


def packing(shape: Shape, *, swapped: bool) -> int:
    """What it takes to pack a position, about: rows of x are transposed unless its pixels are contiguous, and pairs of
    y are, if they are.
    """
    x, y = (shape.cx, shape.x_channel[1] == 1), (shape.cy, shape.y_channel[1] == 1)
    (rows, rows_transposed), (pairs, pairs_contiguous) = (y, x) if swapped else (x, y)
    return rows * (5 if rows_transposed else 1) + pairs * (1 if pairs_contiguous else 6)


def swap(shape: Shape) -> Shape:
    """A problem without a kernel in which x and y have changed places: each y is multiplied with one x."""
    axes = tuple(Geometry(a.y, a.y, x_step=a.y_step, y_step=a.x_step * a.stride, w_step=a.w_step) for a in shape.axes)
    group, y_step, x_step = shape.w_channel
    return Shape(axes, shape.g, shape.cy, shape.cx, shape.y_channel, shape.x_channel, (group, x_step, y_step))


# Boxes of positions.


def cut_positions(p: Problem, shape: Shape, how: Split, target: Target) -> tuple[Axis, ...]:
    """Boxes whose x and y have room in a cache, and enough of them for the slices of the sum."""
    sizes = [a.y for a in shape.axes]
    x, y = (min(channels, TILE_PART) for channels in (p.cx, p.cy))
    room = target.l2 * TILE_BOX[0] // TILE_BOX[1]
    size = DTYPES[p.dtype].size + 2 * how.pieces  # before and after it is packed
    box = [1] * len(sizes)

    def fits(trial: list[int]) -> bool:
        axes = [axis(a, True, b) for a, b in zip(shape.axes, trial, strict=True)]
        entries = prod(len(a.runs) * a.pack.count for a in axes)
        return prod(trial) <= TILE_PIXELS and size * (entries * x + prod(trial) * y) <= room

    for i in reversed(range(len(sizes))):
        box[i] = longest(sizes[i], lambda b, i=i: fits([*box[:i], b, *box[i + 1 :]]))  # type: ignore[misc]
        if box[i] < sizes[i]:
            break
    wanted = ceil(MOST_SLICES / _units(p.g, (p.cx, p.cy)))
    while prod(ceil(n / b) for n, b in zip(sizes, box, strict=True)) < wanted and 2 * prod(box) >= TILE_PIXELS:
        i = next(i for i, b in enumerate(box) if b > 1)
        box[i] = ceil(box[i] / 2)
    return tuple(axis(a, True, b) for a, b in zip(shape.axes, box, strict=True))


def _units(groups: int, channels: tuple[int, int]) -> int:
    """Parts of w for which slices are counted."""
    return groups * prod(ceil(n / TILE_UNIT) for n in channels)


# Parts of w.


def cut_parts(
    sides: Sides, axes: tuple[Axis, ...], weights: tuple[int, ...], threads: int, room: int
) -> SumParts:  # fmt: skip
    """Slices of the sum, and parts of w so that all threads have work, and the sums of a part have room in a cache."""
    units, boxes = _units(sides.groups, sides.channels), prod(a.boxes for a in axes)
    sums = 4 * len(weights) * sides.groups * prod(up(n, STEP) for n in sides.channels)
    slices = max(1, min(ceil(MOST_SLICES / units), boxes, TILE_SLICE_BYTES // sums))
    part = [min(TILE_PART, n) for n in sides.channels]

    def parts() -> list[int]:
        return [ceil(n / size) for n, size in zip(sides.channels, part, strict=True)]

    def too_large() -> bool:
        return sides.groups * prod(parts()) * slices < threads or 4 * len(weights) * prod(part) > room

    while too_large() and max(part) > 2 * STEP:
        i = 0 if part[0] >= part[1] else 1
        part[i] = up(ceil(part[i] / 2), STEP)
    rows, columns = (
        up(ceil(n / count), COLUMNS) if count > 1 else n for n, count in zip(sides.channels, parts(), strict=True)
    )
    row_parts, column_parts = ceil(sides.channels[0] / rows), ceil(sides.channels[1] / columns)
    taps_inside = len(weights) > 1 and sides.w_channel[2] != 1 and weights == tuple(range(len(weights)))
    return SumParts(rows, columns, row_parts, column_parts, slices, taps_inside)


def stage_results(sides: Sides, parts: SumParts, taps: int, rows: int) -> Staging:
    """How sums are written to w: those of a part, or if taps are outside, those of a tap. There is room for `rows`."""
    _, row_step, column_step = sides.w_channel
    one_row = parts.taps_inside and row_step == taps
    extents = (1, 1, rows, taps) if parts.taps_inside else (1, 1, 1, rows)
    steps = (0, 0, row_step, 1) if parts.taps_inside else (0, 0, 0, row_step)
    longest_row = rows * taps if one_row else extents[3]
    rounds_first = sides.out_dtype in ("bf16", "f16") and longest_row > COLUMNS and not sides.accumulate
    whole = sides.channels[1] % COLUMNS == 0
    return Staging(
        unpacker(column_step, steps[-1], COLUMNS), extents, steps, column_step, up(parts.columns, COLUMNS), one_row,
        rounds_first, whole,
    )  # fmt: skip


def lay_out(
    sides: Sides, shape: Shape, axes: tuple[Axis, ...], parts: SumParts, target: Target, pair_block: int
) -> Box:  # fmt: skip
    """How x and y of a box lie in memory. Pairs are of x, of so many channels at a time, or of y if there are none."""
    sizes = tuple(a.box for a in axes)
    counts = tuple(a.pack.count for a in axes)
    flat = min(range(len(axes)), key=lambda flat: (tiles_of(sizes, _even(counts), flat, STEP), -flat))
    if flat < len(axes) - 1 or pair_block:  # so that no pair of positions is of two rows, and all rows begin with pairs
        last = axes[-1]
        axes = (*axes[:-1], replace(last, pack=replace(last.pack, count=_even(counts)[-1])))
    (_, table) = phases_of(shape.axes, axes, 1)
    entries = tuple(at for _, at in table)
    if pair_block:
        return pairs_of_x(sides, shape, axes, parts, (flat, entries), pair_block)
    total = prod(len(a.runs) * a.pack.count for a in axes)
    x, y = sides.channels
    # Tiles read x up to a step beyond the last entry, where there are zeros.
    x_pitch, row = pitch(total + STEP, STEP), axes[-1].pack
    by_rows = row.stride == 1 != sides.row_channel[1] and row.step <= most_packed_stride(target)
    x_pack = PackBox(
        "pack_x", tuple(a.pack for a in axes), sides.row_channel[1], x_pitch if by_rows else pitch(parts.rows, STEP),
        channels=parts.rows if x % parts.rows == 0 else None,
    )  # fmt: skip
    x_pack = replace(x_pack, packer=packer(x_pack, COLUMNS, row_packed=by_rows))
    y_pack, y_steps = None, tuple(a.y_step for a in shape.axes)
    if sides.column_channel[1] != 1:
        y_packs = tuple(Packed(a.y, a.y_step, b) for a, b in zip(shape.axes, sizes, strict=True))
        known = parts.columns if y % parts.columns == 0 else None
        y_pack = PackBox("pack_y", y_packs, sides.column_channel[1], pitch(parts.columns, STEP), channels=known)
        y_pack = replace(y_pack, packer=packer(y_pack, COLUMNS))
        y_steps = tuple(prod(sizes[i + 1 :]) * y_pack.pitch for i in range(len(sizes)))
    room = (parts.rows, parts.columns)
    return Box(axes, flat, entries, room, x_pack, y_pack, y_steps, x_pitch, up(parts.columns, COLUMNS), 0, 0)


def pairs_of_x(
    sides: Sides, shape: Shape, axes: tuple[Axis, ...], parts: SumParts, reads: tuple[int, tuple[int, ...]],
    pair_block: int,
) -> Box:  # fmt: skip
    """The same if pairs are of x, and rows of y, given the first axis of long rows and where taps begin."""
    flat, entries = reads
    step = 1 if any(entry % 2 for entry in entries) else 2
    x_pack = pack_pairs(sides, axes, parts, step, pair_block)
    y_pack, row_pitch = pack_long_row(sides, shape, axes, parts, flat)
    return Box(
        axes, flat, entries, (parts.rows, parts.columns), x_pack, y_pack, tuple(a.y_step for a in shape.axes),
        row_pitch, x_pack.pitch, step, pair_block,
    )  # fmt: skip


def pack_pairs(sides: Sides, axes: tuple[Axis, ...], parts: SumParts, step: int, pair_block: int) -> PackBox:
    """How pairs of x are packed, which begin at every `step`th entry: a block of channels at a time."""
    channel, pairing = sides.column_channel[1], Pairing.CHANNELS if sides.column_channel[1] == 1 else Pairing.COPY
    known = parts.columns % pair_block == sides.channels[1] % parts.columns == 0
    between = pair_block if pair_block < parts.columns else pitch(parts.columns, COLUMNS)
    pack = PackBox(
        "pack_x", tuple(a.pack for a in axes), channel, between, channels=pair_block if known else None,
        pairing=pairing, pair=(1, step),
    )  # fmt: skip
    return replace(pack, packer=packer(pack, COLUMNS))


def pack_long_row(
    sides: Sides, shape: Shape, axes: tuple[Axis, ...], parts: SumParts, flat: int
) -> tuple[PackBox, int]:  # fmt: skip
    """How a long row of y is packed, and elements from the rows of a channel to those of the next.

    What is packed behind the last position of a long row is overwritten by the next one, and there is room for it
    behind the last.
    """
    sizes = tuple(a.box for a in axes)
    extents = (1,) * flat + (sizes[flat], *(a.pack.count for a in axes[flat + 1 :]))
    packs = tuple(Packed(a.y, a.y_step, n) for a, n in zip(shape.axes, extents, strict=True))
    row = up(long_row(sizes, extents, flat), STEP)
    row_pitch = pitch(prod(sizes[:flat]) * row + max(0, prod(extents) + STEP - row), STEP)
    by_rows = shape.axes[-1].y_step == 1 != sides.row_channel[1]
    pack = PackBox(
        "pack_y", packs, sides.row_channel[1], row_pitch if by_rows else pitch(parts.rows, STEP),
        channels=parts.rows if sides.channels[0] % parts.rows == 0 else None,
    )  # fmt: skip
    return replace(pack, packer=packer(pack, COLUMNS, row_packed=by_rows)), row_pitch


def meets_zeros(plain: bool, box: Box) -> bool:
    """Whether x may be multiplied by a zero that is no result; those of a `plain` problem have one tap, and no padding.
    Then there may be numbers of x between the rows of a box, if rows of x are longer than those of y.
    """
    between = any(a.pack.count > a.box and a.box * a.in_stride < a.pack.size for a in box.axes[box.flat + 1 :])
    return not plain or between or len(box.runs) > 1 or prod(box.sizes[: box.flat]) > 1


def _even(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The same with an even number of places in a row."""
    return (*counts[:-1], up(counts[-1], 2))


# Registers.


def choose_tiles(parts: SumParts, how: Split, tuned: RegisterTuning) -> Block:
    """The tiles in registers that take the least time."""

    def cost(block: Block) -> float:
        blocks = ceil(parts.rows / block.height) * ceil(parts.columns / block.width)
        multiplied = len(how.products) * max(tuned.multiply * block.down * block.across, tuned.latency)
        rows, columns = loads(block, how.products)
        return blocks * max(multiplied, tuned.load * (2 * rows + columns))

    return min((Block(ROWS, PAIRS, *shape) for shape in SHAPES), key=cost)


def work(sides: Sides, box: Box, parts: SumParts, block: Block, tuned: RegisterTuning) -> float:
    """Cycles in which tiles are multiplied."""
    products = sides.groups * steps(box) * len(box.entries) * blocks(parts, block)
    return products * max(tuned.multiply * block.down * block.across, tuned.latency)


def reasons(plan: TileSums) -> tuple[str, ...]:
    """Why the plan is as it is."""
    told = [
        (True, multiplied(plan.sides.dtype, plan.split)),
        (plan.box.x_paired, "pairs are of x, so that every tile begins with a line of memory, whatever the tap"),
        (plan.code.emulated, "their instructions are emulated"),
        (plan.parts.slices > 1, f"sums over pixels in {plan.parts.slices} parts, added in order"),
    ]
    return tuple(text for holds, text in told if holds)
