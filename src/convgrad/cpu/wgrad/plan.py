"""Plans for weight gradients, and for 1x1 convolutions as sums over channels.

`plan` shows the steps in order. Each is a function from what was decided before it to a record of records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem
from ..pack.box import PackBox, Pairing, transposable
from ..plan.axes import (
    AXES,
    Axis,
    Shape,
    axis_maps,
    longest,
    offsets,
    packed,
    phases_of,
    simplify,
    spans,
    tap_offsets,
    tap_ranges,
    valid_range,
)
from ..plan.bits import (
    COPY,
    HALF_COST,
    HALF_COST_PAIRS,
    IN_PLACE_POINTWISE,
    IN_PLACE_ROWS,
    IN_PLACE_SHORT,
    IN_PLACE_SPREAD,
    KEPT_LINES,
    LESS_OVERLAP,
    NARROWEST,
    OVERLAP,
    SLICE_BYTES,
    TEAM,
    THREAD_BYTES,
    dots,
    fit_lane_groups,
    fitted,
    lane_group_steps,
    most_packed_stride,
    row_steps,
)
from ..plan.cost import busy
from ..plan.prefetch import Prefetch, lines
from ..plan.records import AxisMap, LaneGroups, Packed, entry_steps, pitch, up
from ..plan.tuning import WAY, converts_f16, half_width_text, shorter, streams, sums_tile, tuning
from ..target import LINE, Target
from . import pointwise
from .records import (
    Boxes,
    Mode,
    Modes,
    Output,
    Parts,
    Roles,
    Side,
    Taps,
    Tensors,
    Terms,
    WeightGradient,
    Writing,
)


def plan(p: Problem, target: Target, threads: int) -> WeightGradient | None:
    """A plan for a weight gradient, or for a 1x1 convolution that can be computed as one; None for others."""
    is_sum = p.wanted == "w"
    sums = p if is_sum else pointwise.as_sum(p, target)
    if sums is None:
        return None
    work, roles = assign_roles(Work(sums, simplify(sums), target, not is_sum))
    modes = choose_modes(work, roles)
    boxes = cut_pixels(work, roles, modes)
    parts = cut_sums(work, roles, modes, boxes, threads)
    x, y, entries = lay_out(work, roles, modes, boxes, parts)
    prefetch = plan_prefetch(work, roles, boxes, parts)
    output = plan_output(work, roles, boxes, parts, prefetch)
    taps = Taps(tap_offsets(work.axes), entries, tap_ranges(work.axes))
    names = ("x", "y", "w") if is_sum else pointwise.tensors(p)
    tensors = Tensors(names, p.dtype, p.out_dtype, "float" if work.item == 4 else "double", converts_f16(work.target))
    made = WeightGradient(tensors, roles, boxes, parts, x, y, taps, output, prefetch, threads=threads)
    return replace(made, why=tuple(reasons(made, work)))


class Work(NamedTuple):
    """What is planned: a sum over pixels, its axes, and the machine. Only `assign_roles` changes the last two.

    `pointwise` says that it stands for a 1x1 convolution, `pairs` that pixels of bf16 are taken two at a time, and
    `image_pairs` that they are of two images.
    """

    problem: Problem
    shape: Shape
    target: Target
    pointwise: bool
    pairs: bool = False
    image_pairs: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the pixels."""
        return self.shape.axes

    @property
    def taps(self) -> int:
        """Kernel elements."""
        return prod(a.k for a in self.shape.axes)

    @property
    def item(self) -> int:
        """Bytes of a sum."""
        return DTYPES[self.problem.dtype].accumulator.itemsize

    @property
    def lanes(self) -> int:
        """Sums in a vector."""
        return self.target.lanes(self.item)

    def channels(self, row_side: str) -> tuple[int, int]:
        """Channels in the rows and in the lanes, if the rows are of that side."""
        p = self.problem
        return (p.cx, p.cy) if row_side == "x" else (p.cy, p.cx)

    def channel_step(self, side: str) -> int:
        """Elements between channels of a side."""
        return (self.shape.x_channel if side == "x" else self.shape.y_channel)[1]


# Which side is in the rows of a tile, and which in its lanes.


def assign_roles(work: Work) -> tuple[Work, Roles]:
    """What the rows and the lanes of a tile hold, for vectors of the width with which that costs least."""
    p, shape, last = work.problem, work.shape, work.axes[-1]
    steps = {shape.x_channel[1], shape.y_channel[1]}
    contiguous = last.x_step == last.y_step == 1 and 1 not in steps  # pixels, and not channels
    dotted = p.dtype == "bf16" and dots(work.target)
    if fit_lane_groups(work.target, work.lanes, p.g, p.cx, p.cy, dotted and contiguous):
        return _groups_in_lanes(work)
    if dotted and (steps == {1} or contiguous):
        work = work._replace(shape=_by_images(shape))
    image_pairs = contiguous and last is not work.axes[-1]
    work = work._replace(pairs=dotted and work.axes[-1].y > 1, image_pairs=image_pairs)
    if not work.pointwise:
        cost = _fitted_cost(work)
        work = work._replace(target=fitted(work.target, cost, HALF_COST_PAIRS if dotted else HALF_COST))
    row_side = _row_side(work)
    row_channels, lane_channels = work.channels(row_side)
    most_rows, vectors = sums_tile(work.target, work.lanes, lane_channels)
    return work, Roles(
        row_side, row_channels, lane_channels, p.g, None, work.lanes, vectors, most_rows, work.pairs, work.image_pairs
    )


def _groups_in_lanes(work: Work) -> tuple[Work, Roles]:
    """Groups have so few channels that several share a vector; the rows are taps, times the channels of x."""
    p, shape = work.problem, work.shape
    lane_channels = p.g * p.cy

    def cost(target: Target, step: float) -> float:
        return step * lane_group_steps(target.lanes(work.item), lane_channels, p.cy)

    # All channels are of one group then, as the tensors lie.
    x_step, y_step = (
        channel if count > 1 else group
        for (group, channel), count in ((shape.x_channel, p.cx), (shape.y_channel, p.cy))
    )
    work = work._replace(
        target=fitted(work.target, cost, HALF_COST), shape=replace(shape, x_channel=(0, x_step), y_channel=(0, y_step))
    )
    vectors = work.target.tile[1] if work.target.tile else 1
    taps = max(1, tuning(work.target).tiles.group_sums // vectors // p.cx)
    taps = ceil(work.taps / ceil(work.taps / taps))
    return work, Roles(
        "x", p.cx, lane_channels, 1, LaneGroups(p.cx, p.cy), work.lanes, vectors, taps * p.cx, False, False
    )


def _by_images(shape: Shape) -> Shape:
    """The same problem with pairs of images innermost, if pairs along a row would often lack a partner.

    Any axis without a kernel serves as images.
    """
    *outer, row = shape.axes
    ends = [valid_range(o, row.stride, row.x, row.y) for o in offsets(row, True)]
    ranges = [(low, high) for low, high in ends if low < high]
    places = sum(2 * (ceil(high / 2) - low // 2) for low, high in ranges)
    filled = sum(high - low for low, high in ranges) > 0.99 * places
    plain = [i for i, a in enumerate(outer) if a.plain and a.x % 2 == 0]
    unused = [i for i, a in enumerate(outer) if a.plain and a.x == 1]
    if filled or not plain or not unused:
        return shape
    images = outer[plain[-1]]
    half = images.x // 2
    outer[plain[-1]] = replace(images, x=half, y=half, x_step=2 * images.x_step, y_step=2 * images.y_step)
    del outer[unused[0]]
    return replace(shape, axes=(*outer, row, replace(images, x=2, y=2)))


def _fitted_cost(work: Work) -> Callable[[Target, float], float]:
    """What a pixel of y costs with the vectors of a target, given what a step does: products, and packing."""
    more = prod(a.x / a.y for a in work.axes)  # pixels of x for one of y

    def cost(target: Target, step: float) -> float:
        here = work._replace(target=target)
        side = _row_side(here)
        row_channels, lane_channels = work.channels(side)
        in_place, lanes_in_place = _in_place(here, side)
        rows, columns = (more, 1.0) if side == "x" else (1.0, more)
        found, _ = row_steps(target, here.lanes, lane_channels)
        products = work.taps * row_channels * step * found / (2 if work.pairs else 1)
        return products + COPY * (rows * row_channels * (not in_place) + columns * lane_channels * (not lanes_in_place))

    return cost


def _row_side(work: Work) -> str:
    """Whose channels are the rows of the tile: what wastes fewer lanes, then what is packed and written cheaply."""
    p = work.problem
    if work.pointwise:
        return "x"
    x_rows, y_rows = up(p.cy, work.lanes) * p.cx, up(p.cx, work.lanes) * p.cy  # products with the rows on that side
    if x_rows != y_rows:
        return "x" if x_rows < y_rows else "y"
    if work.taps > 1:
        pairs_in_place = work.pairs and "y" in _paired_in_place(work.axes[-1]) and not _row_packable(work, "x")
        return "y" if pairs_in_place else "x"
    if p.n * prod(p.y) < 4096:
        return "y" if work.shape.w_channel[2] == 1 else "x"  # few pixels: results are written by vectors
    return "x" if p.cx >= p.cy else "y"  # the larger side need not be packed


# How tiles read the two sides.


def choose_modes(work: Work, roles: Roles) -> Modes:
    """Which sides are read in place, and whether rows are packed channel by channel."""
    if roles.lane_groups:
        return Modes(Mode.VECTORS, Mode.VECTORS)
    rows, lanes = _in_place(work, roles.row_side)
    packed_as = Mode.ROWS if _row_packable(work, roles.row_side) else Mode.VECTORS
    return Modes(Mode.IN_PLACE if rows else packed_as, Mode.IN_PLACE if lanes else Mode.VECTORS)


def _in_place(work: Work, row_side: str) -> tuple[bool, bool]:
    """Whether the rows and the lanes can be read in place, if the rows are of that side."""
    p, target, last = work.problem, work.target, work.axes[-1]
    (row_channels, lane_channels), lane_side = work.channels(row_side), "y" if row_side == "x" else "x"
    channel, pixel = work.channel_step(row_side), last.x_step if row_side == "x" else last.y_step
    # Rows are broadcast an element at a time, and each tap reads only what is inside x: nothing need be packed if
    # elements that are read one after another are contiguous.
    exact = DTYPES[p.dtype].numpy == DTYPES[p.dtype].accumulator
    rows = exact and (1 in (channel, pixel) or row_channels == 1)
    eight = work.lanes == row_channels == lane_channels == LINE // (2 * work.item) and target.registers >= 32
    same_sets = not work.pointwise and _same_sets(work, row_side)
    grouped = p.g > 1 and work.taps > 1
    if channel == 1 and grouped and (eight or (same_sets and row_channels * work.item <= LINE)):
        rows = False  # half of each line would be used, or lines so far apart evict each other
    if channel == 1 and same_sets and target.two_per_cycle:
        rows = False  # so they do for many rows, and products are too quick to wait
    rows = rows or (work.pairs and row_side in _paired_in_place(last))
    # With one tap the other side is read once for each tile of rows: for a few of them packing it would not pay.
    whole = work.taps == 1 == work.channel_step(lane_side) and lane_channels % work.lanes == 0
    return rows, rows and whole and not work.pairs and row_channels <= _few_rows(work, lane_side)


def _few_rows(work: Work, lane_side: str) -> int:
    """For how many rows the side in the lanes is read in place."""
    if not work.pointwise:
        return IN_PLACE_ROWS
    if work.lanes * work.item < LINE:
        return IN_PLACE_SHORT
    return IN_PLACE_SPREAD if gcd(_pixel_bytes(work, lane_side), WAY) <= 4 * LINE else IN_PLACE_POINTWISE


def _same_sets(work: Work, side: str) -> bool:
    """Whether pixels of a side that are read one after another evict each other from the first-level cache."""
    step = _pixel_bytes(work, side)
    return step != 0 and step % WAY == 0


def _pixel_bytes(work: Work, side: str) -> int:
    """Bytes between pixels that are read one after another, of a side that need not be converted."""
    last = work.axes[-1]
    return work.item * (last.x_step * last.stride if side == "x" else last.y_step)


def _paired_in_place(a: Axis) -> set[str]:
    """The sides whose pairs of neighbouring pixels are whole as they lie in memory: none is odd or has padding."""
    sides = {"y"} if a.y_step == 1 and a.y % 2 == 0 else set()
    return sides | ({"x"} if a.x_step == 1 and a.plain and a.x % 2 == 0 else set())


def _row_packable(work: Work, side: str) -> bool:
    """Whether a side can be packed channel by channel: the pixels of its rows are contiguous."""
    row = work.axes[-2 if work.image_pairs else -1]
    if side == "y":
        return row.y_step == 1 != work.channel_step("y")
    return row.x_step == 1 != work.channel_step("x") and row.stride <= most_packed_stride(work.target)


# Boxes of pixels, and slices of the sum. The order of a sum follows from them, and so do its bits: neither may depend
# on the number of threads.


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
        even = ceil(axes[i].y / up(ceil(axes[i].y / box[i]), slices))
        box[i] = up(even, 2) if work.pairs and i == len(axes) - 1 else even
    return Boxes(tuple(a.y for a in axes), tuple(box), slices)


def _bytes_of_pixel(work: Work, roles: Roles, modes: Modes) -> tuple[int, int]:
    """Bytes that a pixel takes in the caches, of the side in the lanes and of the side in the rows."""
    block, item = roles.block, work.item
    if roles.lane_groups:
        lines_at_once = _task_blocks(roles)
        return block * item * lines_at_once // 2, 2 * block * item * lines_at_once
    lane_bytes = block * (2 if work.pairs else item)
    row_bytes = pitch(min(roles.row_channels, 256), roles.lanes) * item
    rows_in_place = modes.rows is Mode.IN_PLACE
    if work.pairs and modes.rows is Mode.ROWS:
        row_bytes //= 2
    elif work.pairs and not rows_in_place and roles.row_channels >= 4 * roles.lanes:
        # What is spread, a part of a line for two pixels. With one tap it is used once, and should not wait.
        lane_bytes += LINE if work.taps == 1 else LINE // 2
    if modes.lanes is Mode.IN_PLACE:
        lane_bytes = lane_bytes * 7 // 4  # what is broadcast lies in lines of its own beside them
    elif rows_in_place and work.channel_step(roles.row_side) == 1 and not work.pointwise:
        # So it does here; where few products are made of a line, it should not come a second time.
        if roles.vectors == 1:
            lane_bytes += LINE
        elif roles.vectors == 2 and work.taps <= 4 and _same_sets(work, roles.row_side):
            lane_bytes = max(lane_bytes, work.target.l1 // KEPT_LINES)
    return lane_bytes, row_bytes


def _task_blocks(roles: Roles) -> int:
    """Blocks of groups in the lanes that a task takes, so that whole cache lines are read at a time."""
    return min(4, roles.blocks)


def _cut(work: Work, lane_bytes: int, row_bytes: int, line: int) -> list[int]:
    """Pixels that are packed at a time: the lane side in the first-level cache, the row side in most of the second.

    Of a row that is cut, whole lines, of so many pixels. Boxes overlap: where x would be packed too often for pairs,
    there are twice as many pixels in a box, and rows are cut in order to take more of them.
    """
    axes, target = work.axes, work.target
    most = max(16, target.l1 * 7 // 8 // lane_bytes)

    def filled(sizes: Sequence[int], most: int) -> list[int]:
        box = [1] * len(axes)
        for i in reversed(range(len(axes))):

            def fits(b: int, i: int = i) -> bool:
                trial = [*box[:i], b, *box[i + 1 :]]
                return prod(trial) <= most and x_pixels(axes, trial) * row_bytes <= target.l2 * 4 // 5

            box[i] = longest(sizes[i], fits)
            if box[i] < sizes[i]:
                whole = (up(box[i], line), box[i] // line * line) if i == len(axes) - 1 else ()
                box[i] = next((b for b in whole if 2 * line <= b and fits(b)), box[i])
                break
        return box

    def often(box: Sequence[int]) -> float:
        return x_pixels(axes, box) / prod(b * a.stride for b, a in zip(box, axes, strict=True))

    sizes = [a.y for a in axes]
    box = filled(sizes, most)
    if work.pairs and often(box) > OVERLAP:
        # Packing takes longer than reading what does not fit in the first-level cache.
        fewest = ceil(sizes[-1] / (2 * most))
        widths = (min(sizes[-1], up(ceil(sizes[-1] / cuts), line)) for cuts in range(fewest, fewest + 8))
        others = (filled([*sizes[:-1], width], 2 * most) for width in widths if width >= NARROWEST)
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
    if units >= 16 or boxes < 16 or sums > _sums_room(work):
        return 1
    most = max(4, min(16, SLICE_BYTES // sums // 4 * 4))
    return min(ceil(most / units), boxes // 16 * 4)  # four boxes in each at least; TEAM threads share them


def _sums_room(work: Work) -> int:
    """Bytes for the sums of a task."""
    return work.target.l2 // 3


# Parts of the result, which are tasks, and their tiles.


def cut_sums(work: Work, roles: Roles, modes: Modes, boxes: Boxes, threads: int) -> Parts:
    """Parts of the sums for tasks, and the tiles of one."""
    channels, groups = roles.row_channels, roles.lane_groups
    if groups:
        lane_part, tap_step = _task_blocks(roles), roles.most_rows // groups.inputs
        parts = ceil(roles.blocks / lane_part)
        return Parts(roles.most_rows, channels, lane_part, 1, parts, ceil(work.taps / tap_step), tap_step, False)
    cutting = Cutting(work, roles, boxes, threads)
    lane_part, row_part = first = _fitting_parts(cutting)
    copied = not (work.pointwise or work.target.tile or modes.lanes is Mode.IN_PLACE)
    if copied:
        lane_part, row_part = _cheaper_parts(cutting, _part_cost(cutting, modes), first)
    rows = _height(work, roles, row_part)
    row_parts, lane_parts = ceil(channels / row_part), ceil(roles.blocks / lane_part)
    saved = (lane_part, row_part) != first
    return Parts(rows, row_part, lane_part, row_parts, lane_parts, ceil(row_part / rows), 1, saved)


def _height(work: Work, roles: Roles, channels: int) -> int:
    """Rows of the tile that fill it best with so many channels in the rows."""
    target, highest = work.target, roles.most_rows
    if target.tile:
        return min(highest, channels)
    tune = tuning(target)
    lowest = min(highest - 3, tune.wgrad.least_height)

    def cost(rows: int) -> float:
        return ceil(channels / rows) * rows * shorter(tune.tiles, highest, roles.vectors, rows)

    return min(min(range(highest, max(lowest, 0), -1), key=cost), channels)


class Cutting(NamedTuple):
    """What is cut into parts: so many row channels by so many blocks of lanes."""

    work: Work
    roles: Roles
    boxes: Boxes
    threads: int

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
        room = self.work.target.l2 // 4 if self.work.pointwise else THREAD_BYTES
        return lane_part * pixels * self.roles.block * self.work.item <= room


def _fitting_parts(cutting: Cutting) -> tuple[int, int]:
    """Parts (of lanes, of rows) whose sums stay in the second-level cache, and with work for every thread."""
    roles, threads, room = cutting.roles, cutting.threads, _sums_room(cutting.work)
    channels, rows = roles.row_channels, _height(cutting.work, roles, roles.row_channels)
    row_part, lane_part = channels, roles.blocks
    while lane_part > 1 and lane_part * row_part * cutting.sum_bytes > room:
        lane_part = ceil(lane_part / 2)
    while row_part > 4 * rows and lane_part * row_part * cutting.sum_bytes > room:
        row_part = ceil(row_part / 2)
    while lane_part > 1 and not cutting.has_room(lane_part):
        lane_part = ceil(lane_part / 2)

    # Of tasks of unequal size there are a few more.
    uneven = ceil(roles.lane_channels / roles.lanes) % roles.vectors > 0
    while not cutting.balanced(tasks := cutting.tasks(lane_part, row_part)) or (uneven and tasks < 2 * threads):
        if lane_part > 1:
            lane_part = ceil(lane_part / 2)
        elif row_part > (4 if tasks > threads else 2) * rows:
            row_part = min(row_part - 1, ceil(channels / (ceil(channels / row_part) + 1)))
        else:
            break
    return lane_part, max(ceil(channels / ceil(channels / row_part)), min(rows, channels))


class PartCost(NamedTuple):
    """What parts cost: each of the lanes packs all rows again, and conversely."""

    cutting: Cutting
    row_copies: int  # elements packed for all rows
    lane_copies: int  # and for all lanes
    products: float  # steps of the tile for one row

    def work(self, lane_part: int, row_part: int) -> float:
        """Steps of all threads together."""
        work, roles = self.cutting.work, self.cutting.roles
        parts = ceil(roles.row_channels / row_part)
        copies = self.row_copies * ceil(roles.blocks / lane_part) + self.lane_copies * parts
        return tuning(work.target).wgrad.copy * copies + self.products * parts * up(
            row_part, _height(work, roles, row_part)
        )

    def time(self, lane_part: int, row_part: int) -> float:
        """The same, with the time that threads wait for the last of them."""
        roles, threads = self.cutting.roles, self.cutting.threads
        teams = (2, TEAM) if threads == TEAM else (threads,)  # a plan for TEAM serves fewer threads too
        size, part = up(roles.lane_channels, roles.lanes), lane_part * roles.block
        times = roles.groups * ceil(roles.row_channels / row_part)
        slices, many = self.cutting.boxes.slices, tuning(self.cutting.work.target).wgrad.many_tasks
        waste = sum(1 / busy_share(times, size, part, slices, team, many) for team in teams) / len(teams)
        return self.work(lane_part, row_part) * waste


def _part_cost(cutting: Cutting, modes: Modes) -> PartCost:
    """What parts cost."""
    work, roles = cutting.work, cutting.roles
    # A stride may leave pixels of x out.
    x, y = prod(min(a.x, a.y * a.k) for a in work.axes), prod(a.y for a in work.axes)
    rows, lanes = (x, y) if roles.row_side == "x" else (y, x)
    row_copies = 0 if modes.rows is Mode.IN_PLACE else rows * roles.row_channels
    products = y * work.taps * roles.lane_channels / (roles.lanes * roles.width)
    return PartCost(cutting, row_copies, lanes * roles.lane_channels, products)


def _cheaper_parts(cutting: Cutting, cost: PartCost, first: tuple[int, int]) -> tuple[int, int]:
    """Parts of another shape, if they take less time than the first ones, or else those."""
    work, roles = cutting.work, cutting.roles
    tune = tuning(work.target).wgrad
    most = max(_sums_room(work), prod(first) * cutting.sum_bytes)
    most_rows = max(first[1], THREAD_BYTES // (cutting.pixels(roles.row_side) * work.item))
    balanced = cutting.balanced(cutting.tasks(*first))
    lane_parts = {ceil(roles.blocks / n) for n in range(1, 17)}
    # Rather than wait for each other, threads take small parts, of tiles that are just high enough.
    least_rows = 2 * _height(work, roles, first[1]) if balanced else ceil(tune.least_sums / roles.vectors)
    row_parts = {ceil(roles.row_channels / n) for n in range(1, min(16, max(1, roles.row_channels // least_rows)) + 1)}
    found, least = first, cost.time(*first) / tune.better  # another shape must be worth it
    for parts in sorted(product(lane_parts, row_parts), key=lambda parts: cost.work(*parts)):
        if cost.work(*parts) >= least:
            break
        lane_part, row_part = parts
        small = prod(parts) * cutting.sum_bytes <= most and row_part <= most_rows
        fair = cutting.balanced(cutting.tasks(*parts)) or not balanced
        if fair and small and cutting.has_room(lane_part) and (time := cost.time(*parts)) < least:
            found, least = parts, time
    return found


@lru_cache(maxsize=1024)
def busy_share(times: int, size: int, part: int, slices: int, threads: int, many: int) -> float:
    """How much of their time threads have work that take tasks in order.

    So many times a size is cut into parts, the last of which may be shorter; each comes in as many slices.
    If there are `many` for each thread, all are busy.
    """
    lengths = [1.0] * (size // part) + [size % part / part] * (size % part > 0)
    if times * len(lengths) * slices >= many * threads:
        return 1.0
    return busy([length for length in lengths * times for _ in range(slices)], threads)


# The two sides as they are packed and read.


class Source(NamedTuple):
    """The pixels of one side that a box needs, whatever their channels."""

    name: str
    mode: Mode
    channel: Ints  # strides of (group, channel)
    packs: tuple[Packed, ...]
    join: tuple[int, int]
    low: Ints
    in_stride: Ints
    packed_stride: Ints  # packed pixels between those of neighbouring pixels of y


def lay_out(work: Work, roles: Roles, modes: Modes, boxes: Boxes, parts: Parts) -> tuple[Side, Side, Ints]:
    """The sides x and y: what is packed of them, and how tiles walk over it. And the entry of each tap in x."""
    x_mode, y_mode = modes if roles.row_side == "x" else modes[::-1]
    in_place = x_mode is Mode.IN_PLACE
    # Where channels are packed one by one, x is thinned out as its stride asks: pixels of a pair become neighbours.
    thinned = work.pairs and x_mode is Mode.ROWS and not work.image_pairs
    box = [*boxes.box[:-1], up(boxes.box[-1], 2)] if thinned else boxes.box
    maps = axis_maps(work.axes, True, box, (False,) * AXES, in_place, thinned)
    whole = [n == 1 for n in boxes.counts]
    x = _side(work, roles, parts, _x_source(work, maps, x_mode), whole)
    y = _side(work, roles, parts, _y_source(work, boxes, y_mode), whole)
    # Along a row taps are pixels apart, and entries may be pairs of pixels.
    *outer, last = _entry_steps(x)
    join = 1 if in_place else x.join[1]
    _, tap_table = phases_of(work.axes, maps, [*(join * s for s in outer), last])
    return x, y, tuple(entry // join for _, entry in tap_table)


def _x_source(work: Work, maps: tuple[AxisMap, ...], mode: Mode) -> Source:
    last = work.axes[-1]
    packs = tuple(packed(a, m, True, mode is Mode.IN_PLACE) for a, m in zip(work.axes, maps, strict=True))
    join, next_ = (0, 1), maps[-1].packed_stride
    if work.pairs:
        # Where channels are packed one by one, any two neighbours are a pair; else every pixel is the first of one, or
        # every other if all taps are an even number of pixels apart.
        evenly = last.stride == 1 and last.dilation % 2 == 0 and len(packs[-1].offsets) == 1
        join = (0, 1) if mode is Mode.ROWS else (next_, 2 * next_ if last.k == 1 or evenly else 1)
        packs = (*packs[:-1], replace(packs[-1], count=up(packs[-1].count, join[1])))
    low, in_stride, stride = zip(*((m.low, m.in_stride, m.packed_stride) for m in maps), strict=True)
    return Source("x", mode, work.shape.x_channel, packs, join, low, in_stride, stride)


def _y_source(work: Work, boxes: Boxes, mode: Mode) -> Source:
    packs = tuple(Packed(a.y, a.y_step, b) for a, b in zip(work.axes, boxes.box, strict=True))
    join = (0, 1)
    if work.pairs:
        join = (0, 1) if mode is Mode.ROWS else (1, 2)
        packs = (*packs[:-1], replace(packs[-1], count=up(boxes.box[-1], 2)))  # a last pixel is paired with a zero
    zeros, ones = (0,) * AXES, (1,) * AXES
    return Source("y", mode, work.shape.y_channel, packs, join, zeros, ones, ones)


def _side(work: Work, roles: Roles, parts: Parts, source: Source, whole: Sequence[bool]) -> Side:
    """One side, with as many channels as a task or a block of lanes has. `whole` axes are in one box."""
    name, mode, groups = source.name, source.mode, roles.lane_groups
    by_block = groups is not None or name != roles.row_side
    channels, at_once = (roles.lane_channels, roles.block) if by_block else (roles.row_channels, parts.row_part)
    if groups and name == "x":
        channels, at_once = (n // groups.outputs * groups.inputs for n in (channels, at_once))
    if by_block:
        step = up(at_once, roles.lanes)
    elif mode is Mode.ROWS:
        step = pitch(prod(q.extent for q in source.packs), roles.lanes * roles.width)
    else:
        # A few contiguous channels are kept without a gap, so that pixels can be copied as one run.
        few = source.channel[1] == 1 and at_once < 4 * roles.lanes
        step = at_once if few else pitch(at_once, roles.lanes)
    axes, starts = _packed_axes(source, work.image_pairs)
    always = at_once if not by_block or channels % at_once == 0 else None
    pack = PackBox(
        f"pack_{name}", axes, source.channel[1], step, always, pairing=_pairing(work, source), pair=source.join,
        image_step=source.packs[3].stride if work.image_pairs else None,
    )  # fmt: skip
    if mode is Mode.ROWS:
        row, _ = starts[-1][-1]
        first = source.low[row] if name == "x" and whole[row] else None
        pack = replace(pack, row_packed=True, first=first)
    side = Side(
        name, mode, source.channel, channels, at_once, by_block, source.packs, pack, starts, step, source.join, (),
        source.low, source.in_stride,
    )  # fmt: skip
    *outer, last = (a * b for a, b in zip(_entry_steps(side), source.packed_stride, strict=True))
    if work.pairs:
        last = 2 * last // (1 if mode is Mode.IN_PLACE else side.join[1])
    return replace(side, steps=(*outer, last))


def _entry_steps(side: Side) -> list[int]:
    """Elements between entries of a side along each axis, as tiles read it: pixels, or along a row pairs of them."""
    if side.mode is Mode.IN_PLACE:
        return [p.stride for p in side.packs]
    *outer, last = entry_steps(side.packs)
    pixel = 1 if side.mode is Mode.ROWS else side.pitch
    return [*(s // side.join[1] * pixel for s in outer), last * pixel]


def _pairing(work: Work, source: Source) -> Pairing:
    """How the pixels of a side become pairs as they are packed."""
    if work.image_pairs:
        return Pairing.IMAGES
    if not work.pairs or source.mode is not Mode.VECTORS:
        return Pairing.NONE
    last = source.packs[-1]
    if len(last.offsets) > 1:
        return Pairing.COPY
    if source.channel[1] == 1:
        return Pairing.CHANNELS
    neighbours = source.join == (1, 2) and last.stride == last.step == 1
    return Pairing.PIXELS if neighbours and source.low[-1] == last.offsets[0] == 0 else Pairing.COPY


def _packed_axes(source: Source, image_pairs: bool) -> tuple[tuple[Packed, ...], tuple[Terms, ...]]:
    """The axes along which a side is packed, and where they start. The last one is a row of pixels: of pairs of images
    it is the last but one of the side.
    """
    columns = 2 if image_pairs else 3
    before, row = source.packs[:columns], source.packs[columns]
    starts: list[Terms] = [((i, 1),) for i in range(columns)]
    along: Terms = ((columns, 1),)
    # Rows of y that follow each other, and are packed whole, are one; between those of x there is padding.
    rows = before[-1]
    if source.name == "y" and rows.count > 1 and row.count == row.size and rows.stride == row.size * row.stride:
        along = ((columns - 1, row.size), *along)
        row = Packed(rows.size * row.size, row.stride, rows.count * row.count)
        before, starts = before[:-1], starts[:-1]
    missing = 3 - len(before)
    return (*before, *[Packed(1, 0, 1)] * missing, row), (*starts, *[()] * missing, along)


# Results, and prefetch.


def plan_prefetch(work: Work, roles: Roles, boxes: Boxes, parts: Parts) -> Prefetch | None:
    """The lines of the next box, prefetched while one is summed; none if all tensors fit in the second-level cache."""
    p, shape = work.problem, work.shape
    if p.bytes <= work.target.l2:
        return None
    lane_channels = min(roles.lane_channels, parts.lane_part * roles.block)
    if roles.lane_groups:
        x_channels, y_channels = lane_channels // p.cy * p.cx, lane_channels
    else:
        x_channels, y_channels = parts.row_part, lane_channels
        if roles.row_side == "y":
            x_channels, y_channels = y_channels, x_channels
    calls = parts.lane_part * parts.tiles * (1 if roles.lane_groups else work.taps)
    counts, steps = zip(*(spans(a, b, forward=True) for a, b in zip(work.axes, boxes.box, strict=True)), strict=True)
    size = DTYPES[p.dtype].size
    x_lines = lines(counts, steps, x_channels, shape.x_channel[1], size)
    y_lines = lines(boxes.box, [a.y_step for a in work.axes], y_channels, shape.y_channel[1], size)
    regions = (y_lines,) if work.pointwise else (x_lines, y_lines)
    return Prefetch(regions, calls, prod(boxes.box) // roles.width)


def plan_output(work: Work, roles: Roles, boxes: Boxes, parts: Parts, prefetch: Prefetch | None) -> Output:
    """How sums are written to w, and whether past the caches."""
    p = work.problem
    group, y_step, x_step = work.shape.w_channel
    strides = (group, x_step, y_step) if roles.row_side == "x" else (group, y_step, x_step)
    whole = boxes.slices == work.taps == strides[2] == 1
    # Tiles of pairs are done so soon that they would wait for what is written past the caches.
    stream = streams(p, work.target) and not work.pairs
    size = parts.rows * roles.block * work.taps * DTYPES[p.out_dtype].size
    return Output(
        strides=strides,
        writing=_writing(work, roles, strides),
        direct=whole and not (roles.lane_groups or p.accumulate),
        accumulate=p.accumulate,
        stream=stream,
        # Not so much that it would evict what is needed before.
        prefetch=prefetch is not None and not stream and size <= tuning(work.target).wgrad.prefetched_results,
    )


def _writing(work: Work, roles: Roles, strides: Ints) -> Writing:
    """How sums are written to w, given its strides of (group, row, lane)."""
    if roles.lane_groups:
        return Writing.GROUPS
    _, row_step, lane_step = strides
    if lane_step == 1:
        return Writing.VECTORS
    if not transposable(roles.lanes) or work.taps == 1 or tap_offsets(work.axes) != tuple(range(work.taps)):
        return Writing.ELEMENTS
    tiles = row_step == work.taps and not work.problem.accumulate
    return Writing.TRANSPOSED_TILES if tiles else Writing.TRANSPOSED_TAPS


# For a person.


def reasons(plan: WeightGradient, work: Work) -> Iterator[str]:
    """Why the plan is as it is."""
    roles, parts, (rows, lanes) = plan.roles, plan.parts, plan.sides
    if work.pointwise:
        yield "pixels in the lanes: a 1x1 convolution, and they are contiguous"
    if roles.lane_groups:
        side_by_side = roles.lanes // roles.lane_groups.outputs
        yield f"{side_by_side} groups side by side in a vector, {parts.tap_step} taps in a tile"
    if work.target.half_width:
        yield half_width_text(roles.lanes, roles.lane_channels)
    if rows.mode is Mode.IN_PLACE:
        yield f"{rows.name} is read in place: channels or pixels are contiguous, no conversion"
    if lanes.mode is Mode.IN_PLACE:
        yield "so is the other side, which fills whole vectors"
    if rows.mode is Mode.ROWS:
        yield f"{rows.name} is packed channel by channel, pixels side by side"
    if roles.pairs:
        yield "pixels of bf16 two at a time (avx512_bf16)"
    if plan.boxes.slices > 1:
        yield f"sums over pixels in {plan.boxes.slices} parts, added in order"
    if parts.saves_copies:
        yield "rows and lanes cut so that less is packed more than once"
    if plan.output.stream:
        yield "results go past the caches, which they exceed"
    if plan.prefetch is not None:
        yield "the next box is prefetched while one is summed"
