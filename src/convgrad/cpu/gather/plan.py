"""Plans for y and x: a list of steps, each a function from what was decided before to one record.

First what the lanes of a tile hold, then how sums over channels are cut, how the input is read and results are written,
how pixels are cut into boxes, what tasks are (both in cut.py), how weights are packed, and what is prefetched.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, gcd, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..ir.convert import Elements
from ..ir.vectors import size_of, sum_type
from ..pack.box import PackBox, packer, transposable
from ..pack.unpack import Staging, unpacker
from ..pack.weights import PackWeights, WeightPacker
from ..plan.axes import inside, simplify, spans, tap_offsets
from ..plan.bits import (
    BOX_RESULTS,
    CHUNK_PART,
    FOLDED_LANES,
    FOLDED_WEIGHTS,
    HALF_COST,
    HALF_COST_PAIRS,
    MOST_PHASES,
    MOST_STEP,
    ODD_CHANNELS,
    THREAD_BYTES,
    WHOLE_PART,
    dots,
    fit_lane_groups,
    fitted,
    lane_group_steps,
    most_vectors,
    row_steps,
    vector_widths,
)
from ..plan.prefetch import Lines, Prefetch, lines
from ..plan.records import LaneGroups, Plan, busy_tiles, pitch, refuse, up
from ..plan.tuning import converts_f16, half_width_text, streams, tile, tuning
from ..target import Target
from .cut import cut_pixels, cut_tasks
from .fold import fold
from .records import (
    Cut,
    Fold,
    Gather,
    Layer,
    Output,
    Source,
    Sums,
    Task,
    TaskOrder,
    Tile,
    WeightPacking,
    pixel_channels,
)


def plan(p: Problem, target: Target, threads: int) -> Plan:
    """A plan for the results or the data gradient of a problem."""
    layer = as_gather(p, target)
    if prod(layer.out_strides) > MOST_PHASES:
        reason = f"strides {p.stride} divide the results into more than {MOST_PHASES} phases"
        return refuse(reason, f"strides whose product is at most {MOST_PHASES}")
    layer, tile = fill_lanes(layer, target)
    sums = cut_sums(layer, tile)
    source = read_input(layer, tile, sums)
    output = write_results(layer, tile, sums, streams(p, tile.target))
    cut = cut_pixels(layer, tile, sums, source, output, threads)
    task = cut_tasks(layer, tile, sums, source, cut, threads)
    weights = choose_weight_packer(layer, tile, sums)
    if task.weights is WeightPacking.TEAM:
        weights = share_packing(weights, layer.groups * tile.blocks * sums.chunks, threads, tile.target)
    prefetch: Prefetch | None = None
    weights_step = 0
    if p.bytes > target.l2:
        prefetch, weights_step = prefetch_next(layer, tile, sums, output, cut, task)
    made = Gather(
        layer, tile, sums, source, output, cut, task, pack_input(layer, tile, sums, source, cut),
        stage_results(layer, tile, output, cut), weights, prefetch, weights_step, threads=threads,
    )  # fmt: skip
    return replace(made, why=reasons(made))


def as_gather(p: Problem, target: Target) -> Layer:
    """The problem as a gather, before anything is decided."""
    shape = simplify(p)
    forward = p.wanted == "y"
    x, y = (p.cx, shape.x_channel), (p.cy, shape.y_channel)
    (cin, in_channel), (cout, out_channel) = (x, y) if forward else (y, x)
    group, cy, cx = shape.w_channel
    return Layer(
        wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype,
        sum=sum_type(p.dtype), converts_f16=converts_f16(target),
        axes=shape.axes, forward=forward, groups=p.g, cin=cin, cout=cout, in_channel=in_channel,
        out_channel=out_channel, w_strides=(group, cy, cx) if forward else (group, cx, cy), bias=p.bias_stride,
        accumulate=p.accumulate,
    )  # fmt: skip


# What the lanes hold.


def fill_lanes(layer: Layer, target: Target) -> tuple[Layer, Tile]:
    """What the lanes hold: channels out of a group, of several groups, or of neighbouring results.

    The only step that changes the layer, and that may choose vectors of half the width.
    """
    lanes = target.lanes(layer.item)
    takes_pairs = layer.dtype == "bf16" and dots(target)
    groups: LaneGroups | None = None
    folded = None
    if fit_lane_groups(target, lanes, layer.groups, layer.cin, layer.cout, takes_pairs):
        groups = LaneGroups(layer.cin, layer.cout)
        layer = _side_by_side(layer)
    price = HALF_COST_PAIRS if takes_pairs and not groups else HALF_COST
    if layer.groups == 1 and not groups and FOLDED_LANES * layer.cout <= lanes:
        found = _fold(layer, target, price)
        if found is not None:
            layer, folded = found

    def cost(target: Target, step: float) -> float:
        lanes = target.lanes(layer.item)
        if groups:
            return step * lane_group_steps(lanes, layer.cout, groups.outputs)
        return step * row_steps(target, lanes, layer.cout, one_block=folded is not None)[0]

    target = fitted(target, cost, price)
    lanes = target.lanes(layer.item)
    rows, vectors = tile(target, lanes, layer.cout, one_block=folded is not None)
    if groups and not target.tile:
        rows = min(rows, tuning(target).tiles.group_rows)
    last_vectors = 0 if groups else ceil(layer.cout / lanes) % vectors
    blocks = ceil(layer.cout / (lanes * vectors))
    if folded is not None and blocks > 1:
        raise ValueError(f"folded results must be in one block of channels, got {blocks}")
    return layer, Tile(target, lanes, vectors, last_vectors, rows, blocks, groups, folded)


def _side_by_side(layer: Layer) -> Layer:
    """All groups as one, whose channels follow each other: those of one group after another."""
    in_step = layer.in_channel[1 if layer.cin > 1 else 0]
    out_step = layer.out_channel[1 if layer.cout > 1 else 0]
    return replace(layer, groups=1, cout=layer.groups * layer.cout, in_channel=(0, in_step), out_channel=(0, out_step))


def _fold(layer: Layer, target: Target, price: float) -> tuple[Layer, Fold] | None:
    """Neighbouring results in the lanes, if that pays with vectors of either width."""

    def cost(channels: int) -> float:
        choices = vector_widths(target, price)
        return min(step * row_steps(t, t.lanes(layer.item), channels, one_block=True)[0] for t, step in choices)

    room = most_vectors(target) * target.lanes(layer.item)
    return fold(layer, room // layer.cout, FOLDED_WEIGHTS // (room * layer.cin * layer.item), cost)


# How sums over the channels in are taken.


def cut_sums(layer: Layer, tile: Tile) -> Sums:
    """Channels that are summed in one go, so that their weights stay in the second-level cache; pairs of them."""
    cin, chunk, pixels = layer.cin, layer.cin, BOX_RESULTS
    if tile.lane_groups is None:
        chunk = max(1, min(cin, up(ceil(cin / _parts(layer, tile)), tile.lanes)))
        if chunk < cin:
            # Between chunks a thread keeps the sums of a box over all channels.
            pixels = min(BOX_RESULTS, THREAD_BYTES // (up(layer.cout, tile.block) * layer.item))
            if pixels < prod(layer.out_strides):
                chunk, pixels = cin, BOX_RESULTS  # those of the smallest box are too many
    pairs = _in_pairs(layer, tile, chunk)
    odd = pairs and cin % 2 == 1
    return Sums(cin + odd, chunk + odd, pairs, odd, pixels)


def _parts(layer: Layer, tile: Tile) -> int:
    """Parts of the sum over channels, so that weights of a block stay in a third of the second-level cache.

    Where products are quick and results need no staging but for parts, that costs more than weights do which take most
    of the cache, as far as one phase uses them.
    """
    l2 = tile.target.l2
    if tile.target.two_per_cycle and tile.fold is None and (layer.out_channel[1] == 1 or layer.cout == 1):
        taps = prod(a.k if layer.forward else ceil(a.k * gcd(a.stride, a.dilation) / a.stride) for a in layer.axes)
        paired = layer.dtype == "bf16" and dots(tile.target) and layer.cin % 2 == 0
        if (
            taps * layer.cin * tile.block * (layer.size if paired else layer.item)
            <= l2 * WHOLE_PART[0] // WHOLE_PART[1]
        ):
            return 1
    return max(1, ceil(layer.taps * layer.cin / (l2 // CHUNK_PART // (layer.item * tile.block))))


def _in_pairs(layer: Layer, tile: Tile, chunk: int) -> bool:
    """Whether products of bf16 are taken two at a time.

    The channel beside the last of an odd number must be zero in the packed box, which it is if vectors are copied.
    """
    if layer.dtype != "bf16" or not dots(tile.target) or tile.lane_groups is not None:
        return False
    last = layer.axes[-1]
    last_step = last.x_step if layer.forward else last.y_step
    vectors_copied = layer.in_channel[1] == 1 or (last_step == 1 and last.stride <= MOST_STEP)
    return layer.cin % 2 == chunk % 2 == 0 or (2 < layer.cin == chunk <= ODD_CHANNELS and vectors_copied)


# How the input is read, and how results are written.


def read_input(layer: Layer, tile: Tile, sums: Sums) -> Source:
    """Whether the input is read where it lies, and how it is packed if not."""
    groups, chunk = tile.lane_groups, sums.real_chunk
    channels = chunk if groups is None else pixel_channels(layer, tile)
    step, interleaved = pitch(channels, tile.lanes), False
    if groups is None and chunk == layer.cin < tile.lanes:
        step = sums.channels  # few channels are kept without a gap, so that rows are copied as one run
        interleaved = layer.in_channel[1] != 1 and step <= tuning(tile.target).gather.interleaved
    contiguous = (layer.in_channel[1] == 1 or (layer.cin == 1 and not sums.pairs)) and not sums.odd
    exact = sums.pairs or DTYPES[layer.dtype].numpy == DTYPES[layer.dtype].accumulator
    in_place = groups is None and contiguous and exact and all(inside(a, layer.forward) for a in layer.axes)
    known = groups is not None or layer.cin % chunk == 0
    return Source(in_place, channels if known else None, step, "i16" if sums.pairs else layer.sum, interleaved)


def write_results(layer: Layer, tile: Tile, sums: Sums, many: bool) -> Output:
    """Whether results go through the staging, and whether they are written past the caches if there are so many."""
    strided = layer.out_channel[1] != 1
    staged = (strided and layer.cout > 1) or sums.chunks > 1 or tile.fold is not None
    if tile.lane_groups is not None:
        staged = strided
    # Squares of results of two bytes are slower to write past the caches: f16 by 4 to 18%, bf16 by 0 to 5% (12ff090).
    two_bytes = staged and strided and layer.out_size < layer.item
    stream = many and tile.fold is None and not two_bytes
    return Output(staged, stream, prefetch=not stream and tile.fold is None)


def pack_input(layer: Layer, tile: Tile, sums: Sums, source: Source, cut: Cut) -> PackBox | None:
    """How the input of a box is packed, if it is."""
    if source.in_place:
        return None
    # The last channel of an odd number is paired with a weight of zero: zero times an infinity would be NaN.
    step = layer.in_channel[1]
    box = PackBox("pack", cut.packs, step, source.pitch, channels=source.channels, zero_rest=sums.odd)
    return replace(box, packer=packer(box, tile.lanes, interleave=source.interleaved))


def stage_results(layer: Layer, tile: Tile, output: Output, cut: Cut) -> Staging | None:
    """How sums that wait are written to the tensor, but for those of neighbours side by side: fold.py does that."""
    if not output.staged or tile.fold is not None:
        return None
    steps, channel_step = tuple(m.out_step for m in cut.maps), layer.out_channel[1]
    return Staging(
        unpacker(channel_step, steps[-1], tile.lanes), cut.region, steps, channel_step, tile.block, cut.row_contiguous,
        _rounds_first(layer, tile, output, cut), whole=layer.cout % tile.lanes == 0,
    )  # fmt: skip


def _rounds_first(layer: Layer, tile: Tile, output: Output, cut: Cut) -> bool:
    """Whether sums are rounded before they are transposed: results have two bytes, and rows are longer than a vector.

    A vector then holds two pixels of each channel.
    """
    longest = prod(cut.region[2:]) if cut.row_contiguous else cut.region[3]
    two_bytes = layer.out_dtype in ("bf16", "f16")
    return two_bytes and longest > tile.lanes and not (layer.accumulate or output.stream)


# How weights are packed.


def choose_weight_packer(layer: Layer, tile: Tile, sums: Sums) -> PackWeights:
    """How weights are packed: by vectors where the tensor has contiguous channels or taps."""
    lanes, taps = tile.lanes, tap_offsets(layer.axes)
    _, out_step, in_step = layer.w_strides
    vectors = transposable(lanes) and tile.lane_groups is None and tile.fold is None
    packer = WeightPacker.ELEMENTS
    if vectors and not sums.odd:
        if in_step == 1 and layer.cin > 1:
            packer = WeightPacker.TRANSPOSE_CHANNELS
        elif out_step == 1 and layer.cout > 1:
            packer = WeightPacker.COPY
        elif len(taps) > 1 and taps == tuple(range(len(taps))):
            packer = WeightPacker.TRANSPOSE_TAPS
    return PackWeights(
        packer, Elements(layer.dtype, lanes, layer.sum, layer.converts_f16), layer.w_strides, taps,
        outputs=layer.cout, channels=sums.channels, chunk=sums.chunk, pairs=sums.pairs, odd=sums.odd, block=tile.block,
        last_block=tile.last_block, lane_groups=tile.lane_groups, fold=tile.fold.table if tile.fold else None,
    )  # fmt: skip


def share_packing(weights: PackWeights, panels: int, threads: int, target: Target) -> PackWeights:
    """So many panels in the parts with which the last thread ends first, if they are few for so many threads."""
    steps, taps = ceil(min(weights.chunk, weights.channels) / weights.per_step), len(weights.tap_offsets)
    row = weights.block * size_of(weights.elements.sum)
    by_squares, by_taps = (
        weights.packer is WeightPacker.TRANSPOSE_CHANNELS,
        weights.packer is WeightPacker.TRANSPOSE_TAPS,
    )
    square = weights.lanes if by_squares else 1
    tuned = tuning(target).gather.weights

    def time(part: int, tap_part: int) -> float:
        tasks = panels * ceil(steps / part) * ceil(taps / tap_part)
        rounds = tasks / threads if tasks >= tuned.many * threads else ceil(tasks / threads)
        return rounds * (part * tap_part * row + tuned.task)

    parts = {min(steps, up(ceil(steps / n), square)) for n in range(1, tuned.most_parts + 1)}
    tap_parts = {taps} if by_taps else {ceil(taps / n) for n in range(1, taps + 1)}
    # Of those that are equal, the largest parts.
    part, tap_part = min(product(parts, tap_parts), key=lambda sizes: (time(*sizes), -sizes[0], -sizes[1]))
    return replace(weights, part=part if part < steps else None, tap_part=tap_part if tap_part < taps else None)


# What is prefetched.


def prefetch_next(
    layer: Layer, tile: Tile, sums: Sums, output: Output, cut: Cut, task: Task
) -> tuple[Prefetch | None, int]:
    """What is prefetched while a box is computed, and the bytes between the weights that one box and the next prefetch:
    the input of the next box, where this one's results go, a part of the weights that are packed next.
    """
    if tile.lane_groups is not None:
        return None, 0
    by_channel = task.order is TaskOrder.CHANNEL
    calls, steps = task.blocks * busy_tiles(cut.maps, cut.rows), sums.real_chunk // sums.per_step
    weights = _next_weights(layer, tile, sums, cut.boxes, calls * steps * layer.taps) if by_channel else None
    if cut.boxes == 1 and weights is None:
        return None, 0
    axes = zip(layer.axes, cut.maps, strict=True)
    counts, steps_in = zip(*(spans(a, m.box, layer.forward) for a, m in axes), strict=True)
    regions = [lines(counts, steps_in, sums.real_chunk, layer.in_channel[1], layer.size)]
    if output.prefetch:
        channels = min(layer.cout, task.blocks * tile.block)
        steps_out = [m.out_step for m in cut.maps]
        regions.append(lines(cut.region, steps_out, channels, layer.out_channel[1], layer.out_size))
    weights_step = 0
    if weights is not None:
        region, weights_step = weights
        regions.append(region)
    return Prefetch(tuple(regions), calls, steps), weights_step


def _next_weights(layer: Layer, tile: Tile, sums: Sums, boxes: int, steps: int) -> tuple[Lines, int] | None:
    """The part of the next weights that a box prefetches, and the bytes to that of the next box.

    None, if the steps of a box do not suffice for it.
    """
    _, out_step, in_step = layer.w_strides
    counts, steps_w = [*(a.k for a in layer.axes), tile.block], [*(a.w_step for a in layer.axes), out_step]
    region = list(lines(counts, steps_w, sums.real_chunk, in_step, layer.size))
    longest = max(range(len(region)), key=lambda i: region[i][0])
    count, step = region[longest]
    region[longest] = (ceil(count / boxes), step)
    if prod(count for count, _ in region) > steps:
        return None
    return tuple(region), region[longest][0] * step


# Why.


def reasons(plan: Gather) -> tuple[str, ...]:
    """Why the plan is as it is, for a person."""
    sums, folded = plan.sums, plan.tile.fold is not None
    parts = sums.chunks > 1
    cause = "channels are summed in parts, whose weights fit in a cache" if parts else "their channels are strided"
    told = [
        *_reasons_of_lanes(plan.layer, plan.tile),
        (sums.pairs, "products of bf16 two at a time (avx512_bf16)"),
        (plan.source.in_place, "the input is read where it lies: no padding, channels contiguous, no conversion"),
        (plan.output.staged and not folded, f"results wait in a buffer: {cause}"),
        *_reasons_of_tasks(plan.cut, plan.task),
        (plan.output.stream, "results go past the caches, which they exceed"),
        (plan.prefetch, "the input of the next box is fetched while one is computed"),
        (plan.weights_step, "so are the next weights"),
    ]
    return tuple(text for holds, text in told if holds)


def _reasons_of_lanes(layer: Layer, tile: Tile) -> list[tuple[object, str]]:
    """What the lanes hold."""
    results = prod(tile.fold.factors) if tile.fold else 0
    groups = tile.lanes // tile.lane_groups.outputs if tile.lane_groups else 0
    return [
        (results, f"{results} neighbouring results side by side in a vector"),
        (tile.target.half_width, half_width_text(tile.lanes, layer.cout)),
        (groups, f"{groups} groups side by side in a vector"),
    ]


def _reasons_of_tasks(cut: Cut, task: Task) -> list[tuple[object, str]]:
    """What tasks are."""
    by_channel = task.order is TaskOrder.CHANNEL
    return [
        (any(cut.borders), "pixels at the border leave out the taps that meet only padding"),
        (task.weights is WeightPacking.THREAD_ALL, "each thread packs all weights for itself"),
        (by_channel, "each block of channels has its weights packed by the thread that takes it"),
        (task.groups > 1 and not by_channel, f"{task.groups} groups in a task"),
    ]
