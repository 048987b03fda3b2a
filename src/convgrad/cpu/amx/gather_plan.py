"""Plans for y and x on tile registers: a list of steps, each a function from what was decided before to a record.

Sums take taps in order, and for each tap the channels, as many at a time as a tile has: neither the boxes nor the
threads change the order, so that they may be chosen for speed alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

from ...backend import Refusal
from ...spec.problem import Problem
from ..gather.plan import as_gather, choose_weight_packer
from ..gather.records import Layer, Sums, Tile
from ..pack.box import PackBox, Packer, packer
from ..pack.unpack import Staging, Unpacker, unpacker
from ..pack.weights import PackWeights
from ..plan.axes import longest, offsets, spans
from ..plan.bits import MOST_PHASES, TILE_CHANNELS, TILE_STEPS
from ..plan.prefetch import Prefetch, lines
from ..plan.records import pitch, unserved, up
from ..plan.tuning import RegisterTuning, tuning
from ..target import Target
from .axes import axis, long_row, phases_of, tiles_of
from .records import Code, Parts, Positions, TileGather
from .split import Split, hindrance, multiplied, split
from .tiles import COLUMNS, PAIRS, ROWS, STEP, Block, loads

SHAPES = ((2, 2), (1, 4), (1, 3), (2, 1), (1, 2), (1, 1))
"""Tiles of sums below each other and side by side, with room for factors in the other registers. Taller ones read more
lines of memory that are far from each other: 4x1 took 0.9 to 2.8 times as long as 2x2 on Emerald Rapids.
"""

SPLIT_CHUNK = 32  # channels of weights that a thread splits at a time


def plan(p: Problem, target: Target, threads: int) -> TileGather | Refusal | None:
    """A plan for the results or the data gradient of a problem, if tile registers can compute it well."""
    if p.wanted == "w":
        return None
    how = split(p, target)
    if how is None:
        return unserved(p, hindrance(p, target))
    layer = as_gather(p, target)
    pairs = pairs_of_step(layer.cin)
    if not pairs or layer.cout < TILE_CHANNELS:
        return unserved(p, f"tiles need {TILE_CHANNELS} channels of a group, and numbers that steps divide well")
    if prod(layer.out_strides) > MOST_PHASES:
        return unserved(p, f"strides {p.stride} divide the results into more than {MOST_PHASES} phases")
    tuned = tuning(target).registers
    odd = layer.cin % 2
    sums = Sums(layer.cin + odd, layer.cin + odd, True, bool(odd), 0)
    positions = lay_out(layer, sums, how, target, threads)
    pack = pack_box(layer, sums, positions, how)
    if odd and pack is not None and pack.packer is Packer.ELEMENTS:
        # These leave what is beside the last channel as it is.
        return unserved(p, "an odd number of channels, which are not contiguous in memory, nor are pixels")
    block = shape(layer, positions, pairs, how, tuned)
    blocks, last = ceil(layer.cout / block.width), ceil(layer.cout / COLUMNS) % block.across
    tile = Tile(target, COLUMNS, block.across, last, block.height, blocks, None, None)
    parts = cut_channels(layer, tile, positions, how, threads, tuned)
    many = p.bytes > (target.own_l2 or target.l2)
    ahead = tuned.fetches_input and p.size("x" if layer.wanted == "y" else "y") * layer.size > target.l2
    made = TileGather(
        layer, tile, sums, block, positions, pack, pack_weights(layer, tile, sums, how, threads), parts,
        code(target, p.out_dtype), stage_results(layer, tile, positions),
        prefetch_next(layer, positions, parts, block) if ahead else None,
        many and tuned.fetches_results and writes_tiles(layer),
        work(layer, positions, block, how, tuned), how,
        threads=threads,
    )  # fmt: skip
    return replace(made, why=reasons(made))


def pairs_of_step(channels: int) -> int:
    """Pairs of channels that a step multiplies, so that steps divide them evenly; 0 if that takes too many steps."""
    if channels < TILE_CHANNELS:
        return 0
    pairs = ceil(channels / 2)
    least = ceil(pairs / PAIRS)
    most = least * TILE_STEPS[0] // TILE_STEPS[1]
    return next((pairs // steps for steps in range(least, most + 1) if pairs % steps == 0), 0)


def code(target: Target, out_dtype: str) -> Code:
    """How instructions are written."""
    has = "+avx512bf16" in target.features.split(",")
    return Code(target.tiles.emulated, out_dtype == "bf16" and has, has)


# Positions.


def lay_out(layer: Layer, sums: Sums, how: Split, target: Target, threads: int) -> Positions:
    """Boxes of positions, and how their inputs lie."""
    step = how.pieces * (pitch(sums.channels, STEP) if sums.channels > COLUMNS else COLUMNS)
    tuned = tuning(target).registers
    box = _box(layer, step, _room(layer, how, target, tuned))
    if sums.odd or not how.whole or not _lies_in_place(layer, box[-1]):
        box = _for_threads(layer, box, threads, tuned)
        axes = tuple(axis(a, layer.forward, b) for a, b in zip(layer.axes, box, strict=True))
        counts = tuple(a.pack.count for a in axes)
        steps = tuple(prod(counts[i + 1 :]) * step for i in range(len(counts)))
        found = Positions(axes, 0, False, step, steps, *phases_of(layer.axes, axes, step))
        return replace(found, flat=_long_axis(layer, found, how, tuned))
    fewer = _for_threads(layer, box, threads, tuned)
    box = fewer if _lies_in_place(layer, fewer[-1]) else box
    axes = tuple(axis(a, layer.forward, b) for a, b in zip(layer.axes, box, strict=True))
    steps = tuple(a.in_stride * a.pack.stride for a in axes)
    return Positions(axes, len(axes) - 1, True, steps[-1], steps, *phases_of(layer.axes, axes, 0))


def _room(layer: Layer, how: Split, target: Target, tuned: RegisterTuning) -> int:
    """Bytes that a box may take. Weights without room beside it are read again for each box: these should be few."""
    cache = target.own_l2 or target.l2
    weights = 2 * how.pieces * layer.taps * layer.cin * layer.cout
    return int(cache * (tuned.box if how.whole or weights > cache else tuned.split_box))


def _long_axis(layer: Layer, positions: Positions, how: Split, tuned: RegisterTuning) -> int:
    """The axis from which on positions are one long row, so that tiles take the least time: to load weights again may
    take longer than to compute some positions in vain.
    """

    def cost(flat: int) -> float:
        trial = replace(positions, flat=flat)
        return work(layer, trial, shape(layer, trial, pairs_of_step(layer.cin), how, tuned), how, tuned)

    return min(range(len(positions.axes)), key=lambda flat: (cost(flat), -flat))


def _box(layer: Layer, step: int, room: int) -> list[int]:
    """The largest box whose inputs and sums have room in a cache."""
    sizes = [ceil((a.y if layer.forward else a.x) / s) for a, s in zip(layer.axes, layer.out_strides, strict=True)]
    box = [1] * len(sizes)

    def fits(trial: list[int]) -> bool:
        axes = [axis(a, layer.forward, b) for a, b in zip(layer.axes, trial, strict=True)]
        entries = prod(len(a.runs) * a.pack.count for a in axes)
        results = layer.cout * layer.out_size if writes_tiles(layer) else 2 * STEP * layer.item
        return entries * step * 2 + prod(trial) * results <= room

    for i in reversed(range(len(sizes))):
        box[i] = longest(sizes[i], lambda b, i=i: fits([*box[:i], b, *box[i + 1 :]]))  # type: ignore[misc]
        if box[i] < sizes[i]:
            break
    return box


def _for_threads(layer: Layer, box: list[int], threads: int, tuned: RegisterTuning) -> list[int]:
    """Smaller boxes, if there are too few for all threads."""
    sizes = [ceil((a.y if layer.forward else a.x) / s) for a, s in zip(layer.axes, layer.out_strides, strict=True)]
    box = list(box)
    while layer.groups * prod(ceil(n / b) for n, b in zip(sizes, box, strict=True)) < tuned.tasks * threads:
        i = next((i for i, b in enumerate(box) if b > 1), 0)
        if threads == 1 or prod(box) < 2 * tuned.least_pixels:
            break
        box[i] = ceil(box[i] / 2)
    return box


def _lies_in_place(layer: Layer, box: int) -> bool:
    """Whether tiles can read inputs where they lie: no kernel, no padding, contiguous channels, and rows as long as
    tiles are high, also in the last box.
    """
    if layer.in_channel[1] != 1 or any(a.k > 1 or a.pad for a in layer.axes):
        return False
    if max(layer.out_strides) > 1:
        return False
    for a in layer.axes:
        in_stride, inputs, results = (a.stride, a.x, a.y) if layer.forward else (1, a.y, a.x)
        if offsets(a, layer.forward) != [0] or (results - 1) * in_stride >= inputs:
            return False
    results = layer.axes[-1].y if layer.forward else layer.axes[-1].x
    return min(box, results % box or box) >= 2 * ROWS


def pack_box(layer: Layer, sums: Sums, positions: Positions, how: Split) -> PackBox | None:
    """How a run of inputs is packed."""
    if positions.in_place:
        return None
    # The last channel of an odd number is paired with a weight of zero: zero times an infinity would be NaN.
    packs = tuple(a.pack for a in positions.axes)
    box = PackBox(
        "pack", packs, layer.in_channel[1], positions.pitch // how.pieces, channels=layer.cin, zero_rest=sums.odd,
        pieces=how.pieces,
    )  # fmt: skip
    return replace(box, packer=packer(box, COLUMNS))


def pack_weights(layer: Layer, tile: Tile, sums: Sums, how: Split, threads: int) -> PackWeights:
    """How weights are packed: column by column of tiles, or parts of these for many threads, or to be split."""
    columns = ceil(layer.cout / COLUMNS)
    tile = replace(tile, vectors=1, last_vectors=0, blocks=columns)
    if not how.whole:
        return choose_weight_packer(layer, tile, Sums(layer.cin, SPLIT_CHUNK, False, False, 0))
    found = choose_weight_packer(layer, tile, sums)
    wanted, steps = ceil(2 * threads / (layer.groups * columns)), sums.channels // 2
    part = up(ceil(steps / wanted), COLUMNS)
    return replace(found, part=part) if part < steps else found


# Registers.


def shape(layer: Layer, positions: Positions, pairs: int, how: Split, tuned: RegisterTuning) -> Block:
    """The tiles in registers that take the least time."""
    row = long_row(positions.sizes, positions.extents, positions.flat)
    rows = min(ROWS, row)
    shapes = [Block(rows, pairs, down, across) for down, across in SHAPES]
    return min(shapes, key=lambda block: work(layer, positions, block, how, tuned))


def work(layer: Layer, positions: Positions, block: Block, how: Split, tuned: RegisterTuning) -> float:
    """Cycles in which tiles are multiplied or loaded."""
    tiles = tiles_of(positions.sizes, positions.extents, positions.flat, block.height) * positions.number
    steps = layer.groups * ceil(layer.cout / block.width) * tiles * ceil(layer.cin / (2 * block.pairs))
    multiplied = len(how.products) * max(tuned.multiply * block.down * block.across, tuned.latency)
    rows, columns = loads(block, how.products)
    loaded = tuned.load * rows + (tuned.load if _stays(layer, positions, block, how, tuned) else tuned.far) * columns
    return steps * len(positions.taps) * (max(multiplied, loaded) + loaded / 4)


def _stays(layer: Layer, positions: Positions, block: Block, how: Split, tuned: RegisterTuning) -> bool:
    """Whether the weights of a block of tiles stay in the first-level cache from one tile of positions to the next."""
    taps = max(phase.count for phase in positions.phases)
    return 2 * how.pieces * taps * layer.cin * block.width <= tuned.near


def cut_channels(
    layer: Layer, tile: Tile, positions: Positions, how: Split, threads: int, tuned: RegisterTuning
) -> Parts:
    """Parts of the channels of a box, if boxes are too few for all threads."""
    tasks = layer.groups * positions.number
    wanted = 1 if threads == 1 else min(tile.blocks, ceil(tuned.tasks * threads / tasks))
    blocks = ceil(tile.blocks / wanted)
    return Parts(ceil(tile.blocks / blocks), blocks, side_by_side(layer, tile, how, blocks, tuned))


def side_by_side(layer: Layer, tile: Tile, how: Split, blocks: int, tuned: RegisterTuning) -> int:
    """Blocks of channels that are computed for some positions before the next: their weights have room in a cache.

    Sums that wait until a block of channels is complete are of that block alone.
    """
    if not writes_tiles(layer):
        return 1
    panel = layer.taps * up(layer.cin, 2) * tile.block * 2 * how.pieces
    room = int((tile.target.own_l2 or tile.target.l2) * tuned.panels)
    parts = ceil(blocks / max(1, min(blocks, room // panel)))
    return ceil(blocks / parts)


def writes_tiles(layer: Layer) -> bool:
    """Whether sums are written tile by tile: channels are contiguous in the tensor."""
    return unpacker(layer.out_channel[1], 0, COLUMNS) is Unpacker.CHANNELS


def stage_results(layer: Layer, tile: Tile, positions: Positions) -> Staging | None:
    """How sums of one phase wait and are written to the tensor; None if they are written tile by tile."""
    if writes_tiles(layer):
        return None
    steps, channel_step = tuple(a.out_step * a.out_stride for a in positions.axes), layer.out_channel[1]
    return Staging(
        unpacker(channel_step, steps[-1], COLUMNS), positions.extents, steps, channel_step, tile.block,
        row_contiguous(positions), rounds_first(layer, positions), layer.cout % COLUMNS == 0,
    )  # fmt: skip


def rounds_first(layer: Layer, positions: Positions) -> bool:
    """Whether sums are rounded before they are transposed: results of two bytes, in rows longer than a vector."""
    longest_row = prod(positions.extents[2:]) if row_contiguous(positions) else positions.extents[3]
    return layer.out_dtype in ("bf16", "f16") and longest_row > COLUMNS and not layer.accumulate


def row_contiguous(positions: Positions) -> bool:
    """Whether rows of results follow each other, in the tensor as in the staging."""
    rows, columns = positions.axes[2:]
    plain = rows.out_stride == columns.out_stride == columns.out_step == 1
    return plain and columns.out == positions.extents[3] == rows.out_step


def prefetch_next(layer: Layer, positions: Positions, parts: Parts, block: Block) -> Prefetch | None:
    """What is prefetched while a box is computed: the input of the next one, if it is packed."""
    if positions.in_place or positions.number * layer.groups == 1:
        return None
    sizes, phases = positions.sizes, sum(phase.count > 0 for phase in positions.phases)
    calls = parts.blocks * phases * tiles_of(sizes, positions.extents, positions.flat, block.height)
    axes = zip(layer.axes, sizes, strict=True)
    counts, steps = zip(*(spans(a, box, layer.forward) for a, box in axes), strict=True)
    region = lines(counts, steps, layer.cin, layer.in_channel[1], layer.size)
    return Prefetch((region,), calls, ceil(layer.cin / (2 * block.pairs)))


def reasons(plan: TileGather) -> tuple[str, ...]:
    """Why the plan is as it is."""
    told = [
        (True, multiplied(plan.layer.dtype, plan.split)),
        (plan.code.emulated, "their instructions are emulated"),
        (plan.positions.in_place, "the input is read where it lies: no padding, no kernel, channels contiguous"),
        (plan.parts.parts > 1, "channels are cut into parts, so that all threads have work"),
    ]
    return tuple(text for holds, text in told if holds)
