"""How pixels are cut into boxes and tiles, and boxes into tasks.

What a box costs depends on the tasks that it makes, so both are decided here: see `Options` and `cut_task`, which are
asked for every box that is looked at, and once more for the one that is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from ..plan.axes import axis_maps, packed, phases_of
from ..plan.bits import TEAM, THREAD_BYTES
from ..plan.cost import BoxNeeds, BoxSearcher, BoxTasks, TileCosts, TileWork, waited
from ..plan.records import entry_steps, up
from ..plan.tuning import even_steps, tuning
from ..target import LINE
from .records import Cut, Layer, Output, Source, Sums, Task, TaskOrder, Tile, WeightPacking, pixel_channels

# Boxes and tiles.


def cut_pixels(layer: Layer, tile: Tile, sums: Sums, source: Source, output: Output, threads: int) -> Cut:
    """Boxes of pixels, tiles in them, and borders that are kept apart."""
    costs = _tile_costs(layer, tile, source, output)
    boxes = _boxes(layer, tile, sums, source, output)
    least = tuning(tile.target).search.least_tiles * tile.most_rows
    columns, results = ceil(layer.cout / tile.lanes), prod(layer.out_strides)

    def box_for(threads: int, steps: Callable[[list[int]], float]) -> tuple[float, list[int]]:
        options = task_options(layer, tile, sums, source, threads)

        def tasks(box: list[int]) -> BoxTasks:
            order, parts = cut_task(options, boxes.number(box), prod(box) * results)
            by_channel = order is TaskOrder.CHANNEL
            return BoxTasks(tile.blocks, 0) if by_channel else BoxTasks(parts, options.group_parts * parts)

        return boxes.best(threads, least, lambda box: columns * steps(box), tasks)

    # Borders are cut as for the smallest team: products with padding decide the sign of a zero and what an infinity
    # spoils, so which of them are taken must not depend on the number of threads.
    total, box = box_for(TEAM, lambda box: costs.best(box)[0])
    _, tiling = costs.best(box)
    if threads > TEAM:
        total, box = box_for(threads, lambda box: costs.steps(box, tiling))
    maps = axis_maps(layer.axes, layer.forward, box, tiling.split, source.in_place)
    packs = tuple(packed(a, m, layer.forward, source.in_place) for a, m in zip(layer.axes, maps, strict=True))
    steps = [p.stride for p in packs] if source.in_place else [e * source.pitch for e in entry_steps(packs)]
    phases, tap_table = phases_of(layer.axes, maps, steps)
    few = layer.cin * tiling.rows <= sums.per_step * tuning(tile.target).gather.unrolled
    unrolled = few and tile.vectors == 1 and sums.chunks == 1 and tile.lane_groups is None
    if sums.pairs:  # Boxes are chosen as without them; but a pair is one step.
        total -= columns * costs.steps(box, tiling) / 2
    total *= layer.groups
    return Cut(tiling.rows, tiling.short, unrolled, tiling.split, maps, packs, phases, tap_table, total)


def _tile_costs(layer: Layer, tile: Tile, source: Source, output: Output) -> TileCosts:
    """What tiles in boxes cost."""
    tuned = tuning(tile.target)
    price = tuned.gather.second_tile * (tuned.gather.narrow_last if tile.last_vectors else 1)
    if tile.lane_groups:
        price = 1e9  # a share that nothing saves: there is none
    last = layer.axes[-1]
    spread = abs(last.x_step) * last.stride * layer.out_size if max(layer.out_strides) > 1 else 0
    evenly_spaced = {} if tile.lane_groups else even_steps(tile.target, tile.vectors, 0 if output.staged else spread)
    work = TileWork(tile.most_rows, tile.vectors, layer.cin, price, evenly_spaced, tuned)
    return TileCosts(layer.axes, layer.forward, source.in_place, work)


def _boxes(layer: Layer, tile: Tile, sums: Sums, source: Source, output: Output) -> BoxSearcher:
    """What boxes may take, and what they cost beside their products."""
    tuned = tuning(tile.target)
    pixel_bytes, budget = source.pitch * layer.item, tile.target.l2 // tuned.gather.packed_part
    if output.staged:  # The sums of a block of channels lie beside the packed input.
        pixel_bytes, budget = pixel_bytes + tile.block * layer.item, tile.target.l2 // tuned.gather.staged_part
    groups = groups_per_task(layer, tile)
    if groups > 1:
        pixel_bytes += groups * (layer.cin * layer.size + layer.cout * layer.out_size)
    vector = tuned.boxes.pack if layer.in_channel[1] == 1 else tuned.boxes.pack_transposed
    needs = BoxNeeds(
        pixel_bytes, budget, sums.most_pixels,
        layer.taps * sums.real_chunk * tile.block * (layer.size if sums.pairs else layer.item),
        0 if output.staged else tile.block * layer.out_size, tile.target.l2,
        0 if source.in_place else vector * ceil(pixel_channels(layer, tile) / tile.lanes),
        0 if layer.out_channel[1] == 1 else layer.cout * sums.per_step,
    )  # fmt: skip
    last = layer.axes[-1]
    contiguous = (last.y_step if layer.forward else last.x_step) == 1  # results are, along rows
    line = LINE // min(layer.size, layer.out_size) if contiguous else 1
    return BoxSearcher(layer.axes, layer.forward, needs, line, tuned)


# Tasks.


@dataclass(frozen=True)
class Options:
    """What tasks may be on so many threads, whatever the boxes."""

    groups: int  # of a task
    group_parts: int
    blocks: int
    by_channel: bool  # it pays that a task is a block of channels with all boxes, if its sums fit
    wanted: int  # so many tasks are enough
    least_parts: int  # of the channels of a box
    kept: int  # bytes of the sums of a result that are kept between chunks; 0 if nothing is
    beyond: int  # results that a box has room for beyond its own


def task_options(layer: Layer, tile: Tile, sums: Sums, source: Source, threads: int) -> Options:
    """What tasks may be."""
    # More parts of a box, if packing it again costs little beside the products; at least two where weights are so many
    # that threads had better not share them.
    tuned = tuning(tile.target).gather
    cheap = source.in_place or layer.taps * tile.vectors >= tuned.cheap_steps
    wanted = (tuned.cheap_tasks if cheap and tile.blocks > 1 else tuned.tasks) * threads
    many_weights = _weight_bytes(layer, tile, sums) > tuned.weights.shared * tile.target.l2
    groups = groups_per_task(layer, tile)
    return Options(
        groups=groups,
        group_parts=ceil(layer.groups / groups),
        blocks=tile.blocks,
        by_channel=_many_weights(layer, tile, source, threads),
        wanted=wanted,
        least_parts=min(2, tile.blocks) if many_weights else 1,
        kept=tile.block * layer.item if sums.chunks > 1 else 0,
        beyond=tile.lanes,
    )


def cut_task(options: Options, boxes: int, results: int) -> tuple[TaskOrder, int]:
    """The order of tasks for so many boxes with so many results each, and into how many parts a box is cut."""
    if options.by_channel and boxes * (results + options.beyond) * options.kept <= THREAD_BYTES:
        return TaskOrder.CHANNEL, 1
    tasks = options.group_parts * boxes
    parts = 1 if tasks >= options.wanted else min(options.blocks, ceil(options.wanted / tasks))
    parts = max(parts, options.least_parts)
    return TaskOrder.BOX, ceil(options.blocks / ceil(options.blocks / parts))


def cut_tasks(layer: Layer, tile: Tile, sums: Sums, source: Source, cut: Cut, threads: int) -> Task:
    """What a task is, and who packs the weights."""
    options = task_options(layer, tile, sums, source, threads)
    order, parts = cut_task(options, cut.boxes, prod(cut.region))
    if order is TaskOrder.CHANNEL:
        return Task(order, options.groups, parts, 1, WeightPacking.THREAD_BLOCK)
    blocks = ceil(tile.blocks / parts)
    tuned = tuning(tile.target).gather.weights
    # A few weights are packed again sooner than they come from another thread's cache, and nobody is waited for.
    pixels, weights = prod(m.out for m in cut.maps), _weight_bytes(layer, tile, sums)
    enough = (tuned.pixels if threads <= TEAM else tuned.pixels_of_many) * threads
    if layer.groups * weights <= tuned.copied and pixels >= enough:
        return Task(order, options.groups, parts, blocks, WeightPacking.THREAD_ALL)
    # With one part of the channels before another, a thread has most weights from itself; but if channels are
    # contiguous, threads write to the same lines of each pixel, where parts meet.
    common_lines = pixels if layer.out_channel[1] == 1 else 0
    if parts > 1 and weights > LINE * common_lines:
        order = TaskOrder.PART
    return Task(order, options.groups, parts, blocks, WeightPacking.TEAM)


def groups_per_task(layer: Layer, tile: Tile) -> int:
    """Groups of a task: of several, pixels are listed once, and whole lines of memory are read and written."""
    most = min(
        layer.groups,
        ceil(tuning(tile.target).gather.task_bytes / max(layer.cin * layer.size, layer.cout * layer.out_size)),
    )
    return ceil(layer.groups / ceil(layer.groups / most))


def _weight_bytes(layer: Layer, tile: Tile, sums: Sums) -> int:
    """Bytes of all weights of a group, packed."""
    return layer.taps * layer.cin * up(layer.cout, tile.lanes) * (layer.size if sums.pairs else layer.item)


def _many_weights(layer: Layer, tile: Tile, source: Source, threads: int) -> bool:
    """Whether it pays that threads pack the weights that they need, for all boxes: these do not leave their caches.

    Of many weights and few pixels it does.
    """
    if tile.lane_groups or tile.fold or layer.groups * tile.blocks < 2 * threads:
        return False
    if layer.taps * layer.cin * layer.cout * layer.size <= tile.target.l2:
        return False
    tuned = tuning(tile.target)
    strides = prod(a.stride if layer.forward else 1 for a in layer.axes)
    pixels = prod(a.x if layer.forward else a.y for a in layer.axes)
    # The input is packed again for each block; where it lies it is read again, and should be less than weights.
    cheap = (
        layer.taps * layer.cout >= pixels
        if source.in_place
        else layer.taps * tile.vectors >= tuned.gather.cheap_steps * strides
    )
    blocks = [min(tile.block, layer.cout - at) for at in range(0, layer.cout, tile.block)]
    return cheap and waited(blocks, layer.groups, threads, tuned.search.many_tasks) < tuned.gather.block_waiting
