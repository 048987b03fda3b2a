"""How a sum is cut: pixels into boxes and slices, the weights into parts for tasks, and those into tiles.

Boxes and slices decide the order of a sum, and so its bits: neither may depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ..plan.axes import Axis, longest
from ..plan.bits import (
    BROADCAST_PART,
    FEW_TAPS,
    GROUP_BLOCKS,
    GROUP_LANES,
    GROUP_ROWS,
    KEPT_LINES,
    LEAST_BOX,
    LESS_OVERLAP,
    MOST_SLICES,
    OVERLAP,
    OVERLAP_BOX,
    OVERLAP_CUTS,
    ROW_CHANNELS,
    SHORTEST_ROW,
    SLICE_BYTES,
    SLICED_BOXES,
    SPREAD_CHANNELS,
    TEAM,
    THREAD_BYTES,
    WHOLE_LINES,
    box_bytes,
    spread_bytes,
    sum_bytes,
)
from ..plan.cost import busy
from ..plan.records import pitch, up
from ..plan.tuning import shorter, tuning
from ..target import LINE
from .records import Boxes, Mode, Modes, Parts, Roles
from .roles import lanes_readable, same_sets
from .work import Work

# Boxes of pixels, and slices of the sum.


def cut_pixels(work: Work, roles: Roles, modes: Modes) -> Boxes:
    """Boxes of pixels, and the parts of the sum over them."""
    axes, last = work.axes, work.axes[-1]
    line = LINE // DTYPES[work.problem.dtype].size if last.y_step == 1 else 1
    box = _cut(work, *_bytes_of_pixel(work, roles, modes), line)
    if work.pairs:
        box[-1] = min(up(box[-1], 2), last.y)
    slices = _slices(work, roles, prod(ceil(a.y / b) for a, b in zip(axes, box, strict=True)))
    cut = [i for i, (a, b) in enumerate(zip(axes, box, strict=True)) if b < a.y]
    if slices > 1 and len(cut) == 1:  # as many boxes in each part
        (i,) = cut
        evenly = ceil(axes[i].y / up(ceil(axes[i].y / box[i]), slices))
        box[i] = up(evenly, 2) if work.pairs and i == len(axes) - 1 else evenly
    return Boxes(tuple(a.y for a in axes), tuple(box), slices)


def _bytes_of_pixel(work: Work, roles: Roles, modes: Modes) -> tuple[int, int]:
    """Bytes that a pixel takes in the caches, of the side in the lanes and of the side in the rows."""
    block, item = roles.block, work.item
    if roles.lane_groups:
        task_blocks = _task_blocks(roles)
        both = block * item * task_blocks
        return both * GROUP_LANES[0] // GROUP_LANES[1], both * GROUP_ROWS[0] // GROUP_ROWS[1]
    lane_bytes = block * (2 if work.pairs else item)
    row_bytes = pitch(min(roles.row_channels, ROW_CHANNELS), roles.lanes) * item
    rows_in_place = modes.rows is Mode.IN_PLACE
    if work.pairs and modes.rows is Mode.ROWS:
        row_bytes //= 2
    elif work.pairs and not rows_in_place and roles.row_channels >= SPREAD_CHANNELS * roles.lanes:
        lane_bytes += spread_bytes(work.taps)
    if modes.lanes is Mode.IN_PLACE:
        # What is broadcast lies in lines of its own beside them.
        lane_bytes = lane_bytes * BROADCAST_PART[0] // BROADCAST_PART[1]
    elif rows_in_place and work.channel_step(roles.row_side) == 1 and not work.pointwise:
        # So it does here; where few products are made of a line, it should not come a second time.
        if roles.vectors == 1:
            lane_bytes += LINE
        elif roles.vectors == 2 and work.taps <= FEW_TAPS and same_sets(work, roles.row_side):
            lane_bytes = max(lane_bytes, work.target.l1 // KEPT_LINES)
    return lane_bytes, row_bytes


def _task_blocks(roles: Roles) -> int:
    """Blocks of groups in the lanes that a task takes, so that whole cache lines are read at a time."""
    return min(GROUP_BLOCKS, roles.blocks)


def _cut(work: Work, lane_bytes: int, row_bytes: int, line: int) -> list[int]:
    """Pixels that are packed at a time: the lane side in the first-level cache, the row side in most of the second.

    A row is cut, if at all, into whole cache lines, of `line` pixels each. Boxes overlap in x: where, for pairs, its
    pixels would be packed too often, a box may have more pixels, and rows are cut so that it has more rows.
    """
    axes = work.axes
    lane_room, row_room = box_bytes(work.target)
    most = max(LEAST_BOX, lane_room // lane_bytes)

    def filled(sizes: Sequence[int], most: int) -> list[int]:
        box = [1] * len(axes)
        for i in reversed(range(len(axes))):

            def fits(b: int, i: int = i) -> bool:
                trial = [*box[:i], b, *box[i + 1 :]]
                return prod(trial) <= most and x_pixels(axes, trial) * row_bytes <= row_room

            box[i] = longest(sizes[i], fits)
            if box[i] < sizes[i]:
                whole = (up(box[i], line), box[i] // line * line) if i == len(axes) - 1 else ()
                box[i] = next((b for b in whole if WHOLE_LINES * line <= b and fits(b)), box[i])
                break
        return box

    def often(box: Sequence[int]) -> float:
        return x_pixels(axes, box) / prod(b * a.stride for b, a in zip(box, axes, strict=True))

    sizes = [a.y for a in axes]
    box = filled(sizes, most)
    if work.pairs and often(box) > OVERLAP:
        # Packing takes longer than reading what does not fit in the first-level cache.
        most *= OVERLAP_BOX
        fewest = ceil(sizes[-1] / most)
        widths = (min(sizes[-1], up(ceil(sizes[-1] / cuts), line)) for cuts in range(fewest, fewest + OVERLAP_CUTS))
        others = (filled([*sizes[:-1], width], most) for width in widths if width >= SHORTEST_ROW)
        box = next((other for other in others if often(other) < LESS_OVERLAP * often(box)), box)
    return box


def x_pixels(axes: tuple[Axis, ...], box: Sequence[int]) -> int:
    """Pixels of x that a box of y needs."""
    return prod(min((b - 1) * a.stride + (a.k - 1) * a.dilation + 1, b * a.k) for b, a in zip(box, axes, strict=True))


def _slices(work: Work, roles: Roles, boxes: int) -> int:
    """Parts of the sum over so many boxes. If all sums of a group stay in the cache, tasks take parts of the pixels,
    always the same, so that each pixel is packed once.
    """
    units = roles.groups * (ceil(roles.blocks / _task_blocks(roles)) if roles.lane_groups else 1)
    sums = roles.blocks * roles.row_channels * work.taps * roles.block * work.item
    if units >= MOST_SLICES or boxes < SLICED_BOXES or sums > sum_bytes(work.target):
        return 1
    # A multiple of TEAM, so that as many threads share them evenly.
    most = max(TEAM, min(MOST_SLICES, SLICE_BYTES // sums // TEAM * TEAM))
    return min(ceil(most / units), boxes // SLICED_BOXES * TEAM)


# Parts of the result, which are tasks, and their tiles.


def cut_sums(
    work: Work, roles: Roles, modes: Modes, boxes: Boxes, threads: int, *, divides_taps: bool = False
) -> Parts:
    """Parts of the sums for tasks, and the tiles of one. `divides_taps` says that each tap can be written alone."""
    channels, groups = roles.row_channels, roles.lane_groups
    if groups:
        lane_part, tap_step = _task_blocks(roles), roles.most_rows // groups.inputs
        parts = ceil(roles.blocks / lane_part)
        return Parts(
            roles.most_rows, channels, lane_part, 1, parts, ceil(work.taps / tap_step), tap_step, 1, False, False
        )
    height = cache(partial(_height, work, roles))
    cutting = Cutting(work, roles, boxes, threads, height)
    lane_part, row_part = first = _fitting_parts(cutting)
    tap_part, in_place = work.taps, False
    if not (work.pointwise or work.target.tile):
        cost = _part_cost(cutting, modes)
        if threads >= tuning(work.target).wgrad.large.threads:
            team = LargeTeam(cutting, cost, lanes_readable(work, roles, modes), divides_taps)
            lane_part, row_part, tap_part = team.parts(first)
            in_place = team.reads_lanes(row_part, tap_part)
        elif modes.lanes is not Mode.IN_PLACE:
            lane_part, row_part = _cheaper_parts(cutting, cost, first)
    rows = height(row_part)
    row_parts, lane_parts, tap_parts = (
        ceil(n / part) for n, part in ((channels, row_part), (roles.blocks, lane_part), (work.taps, tap_part))
    )
    saved = (lane_part, row_part) != first
    return Parts(
        rows, row_part, lane_part, row_parts, lane_parts, ceil(row_part / rows), 1, tap_parts, in_place, saved
    )  # fmt: skip


def _height(work: Work, roles: Roles, channels: int) -> int:
    """Rows of the tile that fill it best with so many channels in the rows."""
    target, highest = work.target, roles.most_rows
    if target.tile:
        return min(highest, channels)
    tune = tuning(target)
    lowest = min(highest - tune.wgrad.shorter_by, tune.wgrad.least_height)

    def cost(rows: int) -> float:
        return ceil(channels / rows) * rows * shorter(tune.tiles, highest, roles.vectors, rows)

    return min(min(range(highest, max(lowest, 0), -1), key=cost), channels)


class Cutting(NamedTuple):
    """What is cut into parts: so many row channels by so many blocks of lanes."""

    work: Work
    roles: Roles
    boxes: Boxes
    threads: int
    height: Callable[[int], int]  # rows of the tile for so many channels in the rows

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums of one row in one block."""
        return self.work.taps * self.roles.block * self.work.item

    def pixels(self, side: str) -> int:
        """Pixels of one side that a box needs."""
        return x_pixels(self.work.axes, self.boxes.box) if side == "x" else prod(self.boxes.box)

    def tasks(self, lane_part: int, row_part: int) -> int:
        """How many tasks parts of that size make."""
        roles = self.roles
        units = roles.groups * ceil(roles.row_channels / row_part) * ceil(roles.blocks / lane_part)
        return units * self.boxes.slices

    def balanced(self, tasks: int) -> bool:
        """Whether so many tasks of equal size keep all threads busy to the end, or nearly."""
        return tasks % self.threads == 0 or tasks >= tuning(self.work.target).wgrad.many_tasks * self.threads

    def has_room(self, lane_part: int) -> bool:
        """Whether so many blocks of lanes, packed, are small enough."""
        pixels = self.pixels("y" if self.roles.row_side == "x" else "x")
        part = tuning(self.work.target).wgrad.pointwise_part
        room = self.work.target.l2 // part if self.work.pointwise else THREAD_BYTES
        return lane_part * pixels * self.roles.block * self.work.item <= room


def _fitting_parts(cutting: Cutting) -> tuple[int, int]:
    """Parts (of lanes, of rows) whose sums stay in the second-level cache, and with work for every thread."""
    roles, threads, room = cutting.roles, cutting.threads, sum_bytes(cutting.work.target)
    channels, rows = roles.row_channels, cutting.height(roles.row_channels)
    tune = tuning(cutting.work.target).wgrad
    row_part, lane_part = channels, roles.blocks
    while lane_part > 1 and lane_part * row_part * cutting.sum_bytes > room:
        lane_part = ceil(lane_part / 2)
    while row_part > tune.part_tiles * rows and lane_part * row_part * cutting.sum_bytes > room:
        row_part = ceil(row_part / 2)
    while lane_part > 1 and not cutting.has_room(lane_part):
        lane_part = ceil(lane_part / 2)

    # Of tasks of unequal size there are a few more.
    uneven = ceil(roles.lane_channels / roles.lanes) % roles.vectors > 0
    while not cutting.balanced(tasks := cutting.tasks(lane_part, row_part)) or (
        uneven and tasks < tune.uneven_tasks * threads
    ):
        if lane_part > 1:
            lane_part = ceil(lane_part / 2)
        elif row_part > (tune.part_tiles if tasks > threads else tune.least_part_tiles) * rows:
            row_part = min(row_part - 1, ceil(channels / (ceil(channels / row_part) + 1)))
        else:
            break
    return lane_part, max(ceil(channels / ceil(channels / row_part)), min(rows, channels))


class PartCost(NamedTuple):
    """What parts cost: each part of the lanes packs all rows again, and each part of the rows all lanes."""

    cutting: Cutting
    row_copies: int  # elements packed for all rows
    lane_copies: int  # and for all lanes
    products: float  # steps of the tile for one row
    copy: float  # steps in which an element is packed

    def work(self, lane_part: int, row_part: int) -> float:
        """Steps of all threads together."""
        roles, height = self.cutting.roles, self.cutting.height(row_part)
        parts = ceil(roles.row_channels / row_part)
        copies = self.row_copies * ceil(roles.blocks / lane_part) + self.lane_copies * parts
        return self.copy * copies + self.products * parts * up(row_part, height)

    def time(self, lane_part: int, row_part: int) -> float:
        """The same, with the time that threads wait for the last of them."""
        roles, threads = self.cutting.roles, self.cutting.threads
        teams = (2, TEAM) if threads == TEAM else (threads,)  # a plan for TEAM serves fewer threads too
        size, part = up(roles.lane_channels, roles.lanes), lane_part * roles.block
        times = roles.groups * ceil(roles.row_channels / row_part)
        slices, many = self.cutting.boxes.slices, tuning(self.cutting.work.target).wgrad.many_tasks
        waste = sum(1 / busy_share(times, size, part, slices, team, many) for team in teams) / len(teams)
        return self.work(lane_part, row_part) * waste


def _pixels(work: Work, side: str) -> int:
    """Pixels of one side; a stride may leave some of x out."""
    return prod(min(a.x, a.y * a.k) if side == "x" else a.y for a in work.axes)


def _part_cost(cutting: Cutting, modes: Modes) -> PartCost:
    """What parts cost."""
    work, roles = cutting.work, cutting.roles
    y = prod(a.y for a in work.axes)
    rows, lanes = (_pixels(work, side) for side in (("x", "y") if roles.row_side == "x" else ("y", "x")))
    row_copies = 0 if modes.rows is Mode.IN_PLACE else rows * roles.row_channels
    products = y * work.taps * roles.lane_channels / (roles.lanes * roles.per_step)
    return PartCost(cutting, row_copies, lanes * roles.lane_channels, products, tuning(work.target).wgrad.copy)


def _cheaper_parts(cutting: Cutting, cost: PartCost, first: tuple[int, int]) -> tuple[int, int]:
    """Parts of another shape, if they take less time than the first ones, or else those."""
    roles, target = cutting.roles, cutting.work.target
    tune = tuning(target).wgrad
    each, most = cutting.sum_bytes, max(sum_bytes(target), prod(first) * cutting.sum_bytes)
    most_rows = max(first[1], THREAD_BYTES // (cutting.pixels(roles.row_side) * cutting.work.item))
    balanced = cutting.balanced(cutting.tasks(*first))
    lane_parts = {ceil(roles.blocks / n) for n in range(1, tune.most_cuts + 1)}
    # Rather than wait for each other, threads take small parts, of tiles that are just high enough.
    few = ceil(tune.least_sums / roles.vectors)
    least_rows = tune.least_part_tiles * cutting.height(first[1]) if balanced else few
    cuts = min(tune.most_cuts, max(1, roles.row_channels // least_rows))
    row_parts = {ceil(roles.row_channels / n) for n in range(1, cuts + 1)}
    found, least = first, cost.time(*first) / tune.better  # another shape must be worth it
    work = {parts: cost.work(*parts) for parts in product(lane_parts, row_parts)}
    for parts in sorted(work, key=work.__getitem__):
        if work[parts] >= least:
            break
        lane_part, row_part = parts
        small = lane_part * row_part * each <= most and row_part <= most_rows
        fair = cutting.balanced(cutting.tasks(*parts)) or not balanced
        if fair and small and cutting.has_room(lane_part) and (time := cost.time(*parts)) < least:
            found, least = parts, time
    return found


class LargeTeam(NamedTuple):
    """How many threads share the sums: such that the last task ends first.

    All tasks are taken to be as long as the longest, so that nothing need be simulated.
    """

    cutting: Cutting
    cost: PartCost
    readable: bool  # the lanes can be read in place
    divides_taps: bool

    def parts(self, first: tuple[int, int]) -> tuple[int, int, int]:
        """Parts of lanes, of rows and of taps, if they are better than the first ones of lanes and rows."""
        cutting, roles, taps = self.cutting, self.cutting.roles, self.cutting.work.taps
        tune = tuning(cutting.work.target).wgrad
        threads, each = cutting.threads, cutting.sum_bytes
        most = max(sum_bytes(cutting.work.target), prod(first) * each)
        lane_parts = sorted({ceil(roles.blocks / n) for n in range(1, roles.blocks + 1)})
        cuts = range(1, roles.row_channels // tune.large.least_rows + 1)
        row_parts = sorted({ceil(roles.row_channels / n) for n in cuts})
        tap_parts = sorted({ceil(taps / n) for n in range(1, taps + 1)}) if self.divides_taps else [taps]
        found = (*first, taps)
        least = self.time(*found) / tune.better
        for lane_part, row_part in product(lane_parts, row_parts):
            number = cutting.tasks(lane_part, row_part)
            small = lane_part * row_part * each <= most and cutting.has_room(lane_part)
            if not small or number >= 2 * tune.many_tasks * threads:
                continue
            for tap_part in tap_parts if number < 2 * threads else [taps]:
                if (time := self.time(lane_part, row_part, tap_part)) < least:
                    found, least = (lane_part, row_part, tap_part), time
        return found

    def reads_lanes(self, row_part: int, tap_part: int) -> bool:
        """Whether tasks of that size read the lanes in place.

        Where all lanes are in one block, pixels are contiguous, and lose nothing by it. Else they take more of the
        caches than if they were packed, which pays for a few products.
        """
        large = tuning(self.cutting.work.target).wgrad.large
        return self.readable and (self.cutting.roles.blocks == 1 or row_part * tap_part <= large.few_products)

    def time(self, lane_part: int, row_part: int, tap_part: int) -> float:
        """Steps until the last task has ended."""
        cutting, cost, work, roles = self.cutting, self.cost, self.cutting.work, self.cutting.roles
        tune = tuning(work.target)
        large, many, height = tune.wgrad.large, tune.wgrad.many_tasks, cutting.height(row_part)
        share = lane_part / roles.blocks
        products = cost.products * up(row_part, height) * share * tap_part / work.taps
        copies = cost.row_copies * row_part / roles.row_channels
        copies += cost.lane_copies * share * (large.read if self.reads_lanes(row_part, tap_part) else 1)
        in_line = LINE // DTYPES[work.problem.dtype].size if work.channel_step(roles.row_side) == 1 else 1
        lines = _pixels(work, roles.row_side) * ceil(row_part / in_line)
        task = products * shorter(tune.tiles, roles.most_rows, roles.vectors, height)
        task += cost.copy * copies + large.line * lines
        number = cutting.tasks(lane_part, row_part) * ceil(work.taps / tap_part)
        rounds = number / cutting.threads if number >= many * cutting.threads else ceil(number / cutting.threads)
        return rounds * (task / cutting.boxes.slices + large.task)


@lru_cache(maxsize=1024)
def busy_share(times: int, size: int, part: int, slices: int, threads: int, many: int) -> float:
    """The share of their time for which threads have work.

    `times` sizes are cut into parts, the last of which may be shorter; each part is one task for each slice of the sum.
    With `many` tasks or more for each thread, the share is 1.
    """
    lengths = [1.0] * (size // part) + [size % part / part] * (size % part > 0)
    if times * len(lengths) * slices >= many * threads:
        return 1.0
    return busy([length for length in lengths * times for _ in range(slices)], threads)
