"""Plans for w, and for 1x1 convolutions as sums over channels: which side is where, how pixels and results are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, gcd, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
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
    HALF_COST,
    HALF_COST_PAIRS,
    NARROWEST,
    TEAM,
    THREAD_BYTES,
    dots,
    fit_lane_groups,
    fitted,
    lane_group_steps,
    row_steps,
)
from ..plan.cost import busy
from ..plan.prefetch import Prefetch, lines
from ..plan.records import Packed, Plan, Reduce, entry_steps, pitch, up
from ..plan.tuning import WAY, converts_f16, half_width_text, shorter, streams, sums_tile, tuning
from ..target import LINE, Target

FEW_ROWS = 112  # for no more than so many the other side is read where it lies
FEW_TURNED = 48  # the same where pixels are in the lanes: vectors of them lie far apart
FEW_SPREAD = 200  # and this, if blocks of four fall into all sets of the first-level cache
FEW_SHORT = 12  # and this, if vectors are shorter than lines of memory
KEPT = 46  # a box whose lines do has fewer pixels, if few products are made of each
SUMS = 5 << 18  # bytes of the sums of all slices of a weight gradient, if four of them fit
SUMMED = 6  # vectors of sums that a tile has at least, so that products need not wait for each other
COPY = 0.5  # steps of the tile in which an element is packed
OVERLAP, LESS = 2.5, 0.6  # where pixels of x are packed so often, boxes are taken in which it is so many times less
THIN = 8  # of so many pixels one may be taken by the shuffles that pack a row


def plan(p: Problem, target: Target, threads: int) -> Plan | None:
    """A plan for a weight gradient, or for a 1x1 convolution that can be had as one; None for others."""
    if p.wanted == "w":
        return Planner(p, target, threads, None).plan()
    sums = _turned(p, target)
    return None if sums is None else Planner(sums, target, threads, p).plan()


def _turned(p: Problem, target: Target) -> Problem | None:
    """A 1x1 convolution whose pixels lie together in x and y, as a sum over channels: pixels then go to the lanes.

    Each image is a group of its own, w is in the place of x, and pixels are in that of y's channels:
        out[n][c][pixel] = Σ_k w[k][c] · in[n][k][pixel]
    """
    lanes = target.lanes(DTYPES[p.dtype].accumulator.itemsize)
    axes = [a for a in simplify(p).axes if not (a.plain and a.x == 1)]
    if p.g > 1 or p.bias_stride is not None or not 1 <= len(axes) <= 2 or not all(a.plain for a in axes):
        return None
    last, images = axes[-1], axes[0] if len(axes) == 2 else Axis(1, 1)
    together = last.x_step == last.y_step == 1 and 1 not in (p.x_strides[2], p.y_strides[2])
    if not together or last.x < 4 * lanes or last.x < 0.95 * up(last.x, lanes):
        return None
    if p.wanted == "y":
        given, wanted, terms, rows = p.x_strides[2], p.y_strides[2], p.cx, p.cy
        image, out_image, w_row, w_term = images.x_step, images.y_step, p.w_strides[1], p.w_strides[2]
    else:
        given, wanted, terms, rows = p.y_strides[2], p.x_strides[2], p.cy, p.cx
        image, out_image, w_row, w_term = images.y_step, images.x_step, p.w_strides[2], p.w_strides[1]
    one = (1,)
    return replace(
        p, wanted="w", n=1, g=images.x, cx=rows, cy=last.x, x=(terms,), w=one, y=(terms,), stride=one, dilation=one,
        pad=(0,), x_strides=(0, 0, w_row, w_term), w_strides=(out_image, 1, wanted, 0),
        y_strides=(0, image, 1, given),
    )  # fmt: skip


class Planner:
    """Decisions about one problem, each building on those before it.

    `turned` is the 1x1 convolution that the problem stands for, if it does.
    """

    def __init__(self, p: Problem, target: Target, threads: int, turned: Problem | None) -> None:
        self.p, self.target, self.threads, self.turned = p, target, threads, turned
        self.why: list[str] = []
        self.operands = ("x", "y", "w")
        if turned is not None:
            self.operands = ("w", "x", "y") if turned.wanted == "y" else ("w", "y", "x")
            self.why.append("pixels in the lanes, because they lie together")
        self.shape = simplify(p)
        self.sum_dtype = DTYPES[p.dtype].accumulator
        self.item = self.sum_dtype.itemsize
        self.lanes = target.lanes(self.item)
        self.taps = prod(a.k for a in self.shape.axes)
        self.x_channel, self.y_channel = self.shape.x_channel, self.shape.y_channel
        self.room = target.l2 // 3  # for the sums of a task

    def plan(self) -> Plan:
        """The plan, or why there is none."""
        self._fill_lanes()
        self._take_inputs()
        self._cut_pixels()
        self._cut_results()
        self._spare_copies()
        self._lay_bands()
        self._use_caches()
        return self._made()

    def _fill_lanes(self) -> None:
        """Whose channels the rows and the lanes of the tile hold, and whether pixels are taken in pairs."""
        p = self.p
        g, wy, wx = self.shape.w_channel
        dotted = p.dtype == "bf16" and dots(self.target)
        self.share: tuple[int, int] | None = None
        self.groups, self.pairs, self.twins = p.g, False, False
        last, channels = self.shape.axes[-1], {self.x_channel[1], self.y_channel[1]}
        pixels_lie = last.x_step == last.y_step == 1 and 1 not in channels
        if fit_lane_groups(self.target, self.lanes, p.g, p.cx, p.cy, dotted and pixels_lie):
            self.share, self.groups, self.row_side = (p.cx, p.cy), 1, "x"
            self.crow, self.clane = p.cx, p.g * p.cy
            self._fit(lambda t, step: step * lane_group_steps(t.lanes(self.item), self.clane, p.cy), HALF_COST)
            self.x_channel = (0, self.x_channel[1] if p.cx > 1 else self.x_channel[0])
            self.y_channel = (0, self.y_channel[1] if p.cy > 1 else self.y_channel[0])
            self.vectors = self.target.tile[1] if self.target.tile else 1
            most = 14 if self.target.registers >= 32 else 9
            step = max(1, most // self.vectors // p.cx)
            step = ceil(self.taps / ceil(self.taps / step))
            self.rows = step * p.cx
            self.why.append(f"{self.lanes // p.cy} groups side by side in a vector, {step} taps in a tile")
        else:
            if dotted and (channels == {1} or pixels_lie):
                self.shape = _by_images(self.shape)
            self.twins = pixels_lie and last is not self.shape.axes[-1]
            self.pairs = dotted and self.shape.axes[-1].y > 1
            if self.turned is None:
                self._fit(self._cost, HALF_COST_PAIRS if dotted else HALF_COST)
            self.row_side = self._side(self.lanes)
            self.crow, self.clane = self._channels(self.row_side)
            self.highest, self.vectors = sums_tile(self.target, self.lanes, self.clane)
            self.rows = self._height(self.crow)
        if self.target.half_width:
            self.why.append(half_width_text(self.lanes, self.clane))
        self.w_strides = (g, wx, wy) if self.row_side == "x" else (g, wy, wx)
        self.block = self.lanes * self.vectors
        self.blocks = ceil(self.clane / self.block)

    def _fit(self, cost: Callable[[Target, float], float], price: float) -> None:
        """Take vectors of the width with which the work costs least."""
        self.target = fitted(self.target, cost, price)
        self.lanes = self.target.lanes(self.item)

    def _side(self, lanes: int) -> str:
        """Whose channels are the rows of the tile, with so many lanes in a vector."""
        if self.turned is not None:
            return "x"
        _, _, wx = self.shape.w_channel
        pairs_lie = self.pairs and "y" in _paired_in_place(self.shape.axes[-1]) and not self._strings("x")
        return _row_side(self.p, lanes, self.taps, wx == 1, pairs_lie)

    def _channels(self, row_side: str) -> tuple[int, int]:
        """Channels in the rows and in the lanes, if the rows are of that side."""
        return (self.p.cx, self.p.cy) if row_side == "x" else (self.p.cy, self.p.cx)

    def _cost(self, target: Target, step: float) -> float:
        """What a pixel of y costs with the vectors of a target, given what a step does: products, and packing."""
        lanes = target.lanes(self.item)
        side = self._side(lanes)
        crow, clane = self._channels(side)
        in_place, lanes_in_place = self._lie(side, lanes)
        more = prod(a.x / a.y for a in self.shape.axes)  # pixels of x for one of y
        rows, columns = (more, 1.0) if side == "x" else (1.0, more)
        found, _ = row_steps(target, lanes, clane)
        products = self.taps * crow * step * found / (2 if self.pairs else 1)
        return products + COPY * (rows * crow * (not in_place) + columns * clane * (not lanes_in_place))

    def _height(self, channels: int) -> int:
        """Rows of the tile that fill it best with so many channels."""
        lowest = min(self.highest - 3, tuning(self.target).wgrad.least_height)
        heights = range(self.highest, max(lowest, 0), -1)

        def cost(rows: int) -> float:
            return ceil(channels / rows) * rows * shorter(tuning(self.target).tiles, self.highest, self.vectors, rows)

        return min(self.highest if self.target.tile else min(heights, key=cost), channels)

    def _take_inputs(self) -> None:
        """Which side is read where it lies, and whether rows are packed as they lie."""
        self.in_place, self.lanes_in_place = (False, False) if self.share else self._lie(self.row_side, self.lanes)
        if self.in_place:
            self.why.append("what is in the rows is read where it lies: channels or pixels together, no conversion")
        if self.lanes_in_place:
            self.why.append("so is what is in the lanes: it fills whole vectors")
        self.strung = not self.share and not self.in_place and self._strings(self.row_side)
        if self.strung:
            self.why.append("what is in the rows is packed as it lies, pixels side by side")

    def _lie(self, row_side: str, lanes: int) -> tuple[bool, bool]:
        """Whether the rows and the lanes can be read where they lie, if the rows are of that side."""
        last, (crow, clane) = self.shape.axes[-1], self._channels(row_side)
        x, y = (self.x_channel[1], last.x_step), (self.y_channel[1], last.y_step)
        (channel, pixel), (lane_channel, _) = (x, y) if row_side == "x" else (y, x)
        # Rows are broadcast an element at a time, and each tap meets only what lies inside: nothing need be packed if
        # elements that are read one after another lie together.
        exact = DTYPES[self.p.dtype].numpy == self.sum_dtype
        rows = exact and (1 in (channel, pixel) or crow == 1)
        eight = lanes == crow == clane == LINE // (2 * self.item) and self.target.registers >= 32
        same_sets = self.turned is None and self._same_sets(row_side)
        grouped = self.groups > 1 and self.taps > 1
        if channel == 1 and grouped and (eight or (same_sets and crow * self.item <= LINE)):
            rows = False  # half of each line would be used, or lines so far apart drive each other out
        if channel == 1 and same_sets and self.target.two_per_cycle:
            rows = False  # so they do for many rows, and products are too quick to wait
        rows = rows or (self.pairs and row_side in _paired_in_place(last))
        # With one tap the other side is read once for each tile of rows: for a few of them packing it would not pay.
        lanes_lie = self.taps == 1 and lane_channel == 1 and clane % lanes == 0 and crow <= self._few(row_side, lanes)
        return rows, rows and lanes_lie and not self.pairs

    def _few(self, row_side: str, lanes: int) -> int:
        """For how many rows of a side the other one is read where it lies."""
        if self.turned is None:
            return FEW_ROWS
        if lanes * self.item < LINE:
            return FEW_SHORT
        apart = self._apart("y" if row_side == "x" else "x")
        return FEW_SPREAD if gcd(apart, WAY) <= 4 * LINE else FEW_TURNED

    def _same_sets(self, side: str) -> bool:
        """Whether pixels of a side that are read one after another drive each other out of the first-level cache."""
        apart = self._apart(side)
        return apart != 0 and apart % WAY == 0

    def _apart(self, side: str) -> int:
        """Bytes between what is read one after another of a side that need not be converted."""
        last = self.shape.axes[-1]
        return self.item * (last.x_step * last.stride if side == "x" else last.y_step)

    def _strings(self, side: str) -> bool:
        """Whether a side that is not read in place can be packed channel by channel: its pixels lie together."""
        last = self.shape.axes[-2 if self.twins else -1]
        if side == "y":
            return last.y_step == 1 != self.y_channel[1]
        most = THIN if self.target.registers >= 32 else 2  # elsewhere masks may be many branches
        return last.x_step == 1 != self.x_channel[1] and last.stride <= most

    def _cut_pixels(self) -> None:
        """Boxes of pixels, and the parts of the sum: neither may depend on the number of threads."""
        axes, block, item = self.shape.axes, self.block, self.item
        # Blocks of one task, so that whole cache lines are read at a time.
        self.together = min(4, self.blocks) if self.share else 1
        if self.share:
            lane_bytes, row_bytes = block * item * self.together // 2, 2 * block * item * self.together
        else:
            lane_bytes, row_bytes = block * (2 if self.pairs else item), pitch(min(self.crow, 256), self.lanes) * item
            if self.strung and self.pairs:
                row_bytes //= 2
            elif self.pairs and not self.in_place and self.crow >= 4 * self.lanes:
                # What is spread, a part of a line for two pixels. With one tap it is used once, and should not wait.
                lane_bytes += LINE if self.taps == 1 else LINE // 2
        channel = (self.x_channel if self.row_side == "x" else self.y_channel)[1]
        if self.lanes_in_place:
            lane_bytes = lane_bytes * 7 // 4  # what is broadcast lies in lines of its own beside them
        elif self.in_place and channel == 1 and self.turned is None:
            # So it does here; where few products are made of a line, it should not come a second time.
            if self.vectors == 1:
                lane_bytes += LINE
            elif self.vectors == 2 and self.taps <= 4 and self._same_sets(self.row_side):
                lane_bytes = max(lane_bytes, self.target.l1 // KEPT)
        line = LINE // DTYPES[self.p.dtype].size if axes[-1].y_step == 1 else 1
        self.box = _cut(axes, self.target, lane_bytes, row_bytes, line, self.pairs)
        if self.pairs:
            self.why.append("pixels of bf16 two at a time (avx512_bf16)")
            self.box[-1] = min(up(self.box[-1], 2), axes[-1].y)
        boxes = prod(ceil(a.y / b) for a, b in zip(axes, self.box, strict=True))
        units = self.groups * ceil(self.blocks / self.together) if self.share else self.groups
        sums = self.blocks * self.crow * self.taps * block * item
        self.slices = 1
        if units >= 16 or boxes < 16 or sums > self.room:
            return
        # All sums of a group stay in the cache: tasks take parts of the pixels, always the same, so that each pixel is
        # packed once.
        most = max(4, min(16, SUMS // sums // 4 * 4))
        self.slices = min(ceil(most / units), boxes // 16 * 4)  # four boxes in each at least; TEAM threads share them
        if self.slices == 1:
            return
        self.why.append(f"sums over pixels in {self.slices} parts, added in order")
        cut = [i for i, (a, b) in enumerate(zip(axes, self.box, strict=True)) if b < a.y]
        if len(cut) == 1:  # as many boxes in each part
            even = ceil(axes[cut[0]].y / up(boxes, self.slices))
            self.box[cut[0]] = up(even, 2) if self.pairs and cut[0] == len(axes) - 1 else even

    def _cut_results(self) -> None:
        """Parts of the result for tasks: sums that stay in the second-level cache, and work for every thread."""
        crow, blocks, threads = self.crow, self.blocks, self.threads
        self.row_part, self.lane_part = crow, self.together
        if self.share:
            return
        row_part, lane_part = crow, blocks
        sums = self._sum_bytes()
        while lane_part > 1 and lane_part * row_part * sums > self.room:
            lane_part = ceil(lane_part / 2)
        while row_part > 4 * self.rows and lane_part * row_part * sums > self.room:
            row_part = ceil(row_part / 2)
        while lane_part > 1 and not self._has_room(lane_part):
            lane_part = ceil(lane_part / 2)

        # Of tasks of unequal size there are a few more.
        uneven = ceil(self.clane / self.lanes) % self.vectors > 0
        while not self._even(tasks := self._tasks(lane_part, row_part)) or (uneven and tasks < 2 * threads):
            if lane_part > 1:
                lane_part = ceil(lane_part / 2)
            elif row_part > (4 if tasks > threads else 2) * self.rows:
                row_part = min(row_part - 1, ceil(crow / (ceil(crow / row_part) + 1)))
            else:
                break
        self.lane_part = lane_part
        self.row_part = max(ceil(crow / ceil(crow / row_part)), min(self.rows, crow))
        if not self.target.tile:
            self.rows = self._height(self.row_part)

    def _tasks(self, lane_part: int, row_part: int) -> int:
        """How many tasks parts of that size make."""
        return self.groups * self.slices * ceil(self.crow / row_part) * ceil(self.blocks / lane_part)

    def _even(self, tasks: int) -> bool:
        """Whether so many tasks of equal size keep all threads busy to the end, or nearly."""
        return tasks % self.threads == 0 or tasks >= 8 * self.threads

    def _sum_bytes(self) -> int:
        """The sums of one row in one block."""
        return self.taps * self.block * self.item

    def _pixels(self, side: str) -> int:
        """Pixels of a box of one side."""
        return _entries(self.shape.axes, self.box) if side == "x" else prod(self.box)

    def _has_room(self, lane_part: int) -> bool:
        """Whether the band of so many blocks is small enough."""
        pixels = self._pixels("y" if self.row_side == "x" else "x")
        room = THREAD_BYTES if self.turned is None else self.target.l2 // 4
        return lane_part * pixels * self.block * self.item <= room

    def _spare_copies(self) -> None:
        """Parts of another shape, if they take less time: each of the lanes packs all rows again, and conversely."""
        crow, blocks = self.crow, self.blocks
        if self.share or self.turned is not None or self.target.tile or self.lanes_in_place:
            return
        axes = self.shape.axes
        x, y = prod(min(a.x, a.y * a.k) for a in axes), prod(a.y for a in axes)  # a stride may leave pixels out
        rows, lanes = (x, y) if self.row_side == "x" else (y, x)
        row_copies = 0 if self.in_place else rows * crow
        lane_copies = lanes * self.clane
        products = y * self.taps * self.clane / (self.lanes * (2 if self.pairs else 1))
        most = max(self.room, self.lane_part * self.row_part * self._sum_bytes())
        teams = (2, TEAM) if self.threads == TEAM else (self.threads,)  # a plan for TEAM serves fewer threads too
        most_rows = max(self.row_part, THREAD_BYTES // (self._pixels(self.row_side) * self.item))

        def work(lane_part: int, row_part: int) -> float:
            height, parts = self._height(row_part), ceil(crow / row_part)
            copies = row_copies * ceil(blocks / lane_part) + lane_copies * parts
            return COPY * copies + products * parts * up(row_part, height)

        def cost(lane_part: int, row_part: int) -> float:
            size = up(self.clane, self.lanes)
            times = self.groups * ceil(crow / row_part)
            part = lane_part * self.block
            waste = sum(1 / _busy(times, size, part, self.slices, team) for team in teams) / len(teams)
            return work(lane_part, row_part) * waste

        even = self._even(self._tasks(self.lane_part, self.row_part))
        lane_parts = {ceil(blocks / n) for n in range(1, 17)}
        # Rather than wait for each other, threads take small parts, of tiles that are just high enough.
        least_rows = 2 * self.rows if even else ceil(SUMMED / self.vectors)
        row_parts = {ceil(crow / n) for n in range(1, min(16, max(1, crow // least_rows)) + 1)}
        found, least = None, cost(self.lane_part, self.row_part) / 1.02  # another shape must be worth it
        for parts in sorted(product(lane_parts, row_parts), key=lambda parts: work(*parts)):
            lane_part, row_part = parts
            if work(*parts) >= least:
                break
            small = lane_part * row_part * self._sum_bytes() <= most and row_part <= most_rows
            fair = self._even(self._tasks(*parts)) or not even
            if fair and small and self._has_room(lane_part) and cost(*parts) < least:
                found, least = parts, cost(*parts)
        if found is not None:
            self.lane_part, self.row_part = found
            self.rows = self._height(self.row_part)
            self.why.append("rows and lanes cut so that less is packed more than once")

    def _pitch(self, side: str, channel_step: int, packs: tuple[Packed, ...]) -> int:
        """Elements between pixels in the band of one side, or between channels of which they lie side by side."""
        if self.share:
            return up(self.block // self.share[1] * self.share[0], self.lanes) if side == "x" else self.block
        if side != self.row_side:
            return self.block
        if self.strung:
            return pitch(prod(q.extent for q in packs), self.lanes * (2 if self.pairs else 1))
        # A few channels that lie together are kept without a gap, so that pixels can be copied as one run.
        few = channel_step == 1 and self.row_part < 4 * self.lanes
        return self.row_part if few else pitch(self.row_part, self.lanes)

    def _lay_bands(self) -> None:
        """The bands of x and y: what is copied into them, and how the sums walk over them."""
        axes, box, row_side = self.shape.axes, self.box, self.row_side
        places = (self.in_place, self.lanes_in_place)
        x_in_place, y_in_place = places if row_side == "x" else places[::-1]
        x_strung, y_strung = self.strung and row_side == "x", self.strung and row_side == "y"
        self.y_packs = tuple(Packed(a.y, a.y_step, b) for a, b in zip(axes, box, strict=True))
        thin = self.pairs and x_strung and not self.twins
        met = [*box[:-1], up(box[-1], 2)] if thin else box
        self.maps = axis_maps(axes, True, met, (False,) * AXES, x_in_place, thin)
        self.x_packs = tuple(packed(a, w, True, x_in_place) for a, w in zip(axes, self.maps, strict=True))
        self.x_join, self.y_join = (0, 1), (0, 1)
        next_ = self.maps[-1].packed_stride
        if self.pairs:
            # A last pixel of y without a partner gets a zero. Where rows are packed as they lie, any two neighbours are
            # a pair; else every pixel of x is the first of one, or every other if all taps lie evenly apart.
            last = axes[-1]
            evenly = last.stride == 1 and last.dilation % 2 == 0 and len(self.x_packs[-1].offsets) == 1
            self.x_join = (0, 1) if x_strung else (next_, 2 * next_ if last.k == 1 or evenly else 1)
            self.y_join = (0, 1) if y_strung else (1, 2)
            *y_outer, y_last = self.y_packs
            *x_outer, x_last = self.x_packs
            self.y_packs = (*y_outer, replace(y_last, count=up(box[-1], 2)))
            self.x_packs = (*x_outer, replace(x_last, count=up(x_last.count, self.x_join[1])))
        self.x_pitch = self._pitch("x", self.x_channel[1], self.x_packs)
        self.y_pitch = self._pitch("y", self.y_channel[1], self.y_packs)
        x_apart, y_apart = (1 if x_strung else self.x_pitch), (1 if y_strung else self.y_pitch)
        x_steps = [a.x_step for a in axes] if x_in_place else _joined(self.x_packs, self.x_join[1], x_apart)
        y_steps = [a.y_step for a in axes] if y_in_place else _joined(self.y_packs, self.y_join[1], y_apart)
        self.x_walk = [w.packed_stride * s for w, s in zip(self.maps, x_steps, strict=True)]
        self.y_walk = list(y_steps)
        if self.pairs:
            self.x_walk[-1] = 2 * next_ * x_steps[-1] // (1 if x_in_place else self.x_join[1])
            self.y_walk[-1] = 2 * y_steps[-1] // (1 if y_in_place else self.y_join[1])
        # Along a row taps are pixels apart, and entries may be pairs of pixels.
        join = 1 if x_in_place else self.x_join[1]
        _, tap_table = phases_of(axes, self.maps, [*(join * s for s in x_steps[:-1]), x_steps[-1]])
        self.entries = tuple(entry // join for _, entry in tap_table)

    def _use_caches(self) -> None:
        """What is written past the caches, and what is prefetched."""
        p, axes = self.p, self.shape.axes
        # Tiles of pairs are done so soon that they would wait for what is written past the caches.
        self.stream = streams(p, self.target) and not self.pairs
        if self.stream:
            self.why.append("results go past the caches, which they exceed")
        self.prefetch: Prefetch | None = None
        if p.bytes <= self.target.l2:
            return
        lane_channels = min(self.clane, self.lane_part * self.block)
        calls = ceil(self.row_part / self.rows) * self.taps
        x_channels, y_channels = self.row_part, lane_channels
        if self.row_side == "y":
            x_channels, y_channels = y_channels, x_channels
        if self.share:
            calls = ceil(self.taps / (self.rows // p.cx))
            x_channels, y_channels = lane_channels // p.cy * p.cx, lane_channels
        counts, steps = zip(*(spans(a, b, forward=True) for a, b in zip(axes, self.box, strict=True)), strict=True)
        size = DTYPES[p.dtype].size
        x_lines = lines(counts, steps, x_channels, self.x_channel[1], size)
        y_lines = lines(self.box, [a.y_step for a in axes], y_channels, self.y_channel[1], size)
        regions = (x_lines, y_lines) if self.turned is None else (y_lines,)
        self.prefetch = Prefetch(regions, self.lane_part * calls, prod(self.box) // (2 if self.pairs else 1))
        self.why.append("the next box of pixels is fetched while one is summed")

    def _made(self) -> Reduce:
        p, axes = self.p, self.shape.axes
        return Reduce(
            dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if self.item == 4 else "double", lanes=self.lanes,
            rows=self.rows, vectors=self.vectors, groups=self.groups, row_side=self.row_side, crow=self.crow,
            clane=self.clane, share=self.share, pairs=self.pairs, twins=self.twins, x_join=self.x_join,
            y_join=self.y_join, sizes_y=tuple(a.y for a in axes), box=tuple(self.box), x_packs=self.x_packs,
            x_pitch=self.x_pitch,
            x_low=tuple(w.low for w in self.maps), x_in_stride=tuple(w.in_stride for w in self.maps),
            x_walk=tuple(self.x_walk), y_packs=self.y_packs, y_pitch=self.y_pitch, y_walk=tuple(self.y_walk),
            in_place=self.in_place, lanes_in_place=self.lanes_in_place, strung=self.strung, row_part=self.row_part,
            lane_part=self.lane_part, x_channel=self.x_channel, y_channel=self.y_channel, w_strides=self.w_strides,
            taps=tap_offsets(axes), entries=self.entries, tap_ranges=tap_ranges(axes), slices=self.slices,
            prefetch=self.prefetch, operands=self.operands, stream=self.stream, accumulate=p.accumulate,
            converts_f16=converts_f16(self.target), threads=self.threads, why=tuple(self.why),
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _busy(times: int, size: int, part: int, slices: int, threads: int) -> float:
    """How much of their time threads have work that take tasks in order.

    So many times a size is cut into parts, the last of which may be shorter; each comes in as many slices.
    """
    lengths = [1.0] * (size // part) + [size % part / part] * (size % part > 0)
    if times * len(lengths) * slices >= 8 * threads:
        return 1.0
    return busy([length for length in lengths * times for _ in range(slices)], threads)


def _by_images(shape: Shape) -> Shape:
    """The same problem with pairs of images innermost, if pairs along a row would often lack a partner.

    Any axis without a kernel serves as images.
    """
    *outer, row = shape.axes
    ends = [valid_range(row, o) for o in offsets(row, True)]
    met = [(low, high) for low, high in ends if low < high]
    places = sum(2 * (ceil(high / 2) - low // 2) for low, high in met)
    filled = sum(high - low for low, high in met) > 0.99 * places
    plain = [i for i, a in enumerate(outer) if a.plain and a.x % 2 == 0]
    unused = [i for i, a in enumerate(outer) if a.plain and a.x == 1]
    if filled or not plain or not unused:
        return shape
    images = outer[plain[-1]]
    half = images.x // 2
    outer[plain[-1]] = replace(images, x=half, y=half, x_step=2 * images.x_step, y_step=2 * images.y_step)
    del outer[unused[0]]
    return replace(shape, axes=(*outer, row, replace(images, x=2, y=2)))


def _paired_in_place(a: Axis) -> set[str]:
    """The sides whose pairs of neighbouring pixels are met whole, as they lie: no odd one, none with padding."""
    sides = {"y"} if a.y_step == 1 and a.y % 2 == 0 else set()
    return sides | ({"x"} if a.x_step == 1 and a.plain and a.x % 2 == 0 else set())


def _joined(packs: tuple[Packed, ...], step: int, pitch: int) -> list[int]:
    """Elements between neighbours along each axis of a band that has an entry for every `step` pixels of a row."""
    *outer, last = entry_steps(packs)
    return [*(s // step * pitch for s in outer), last * pitch]


def _row_side(p: Problem, lanes: int, taps: int, x_together: bool, pairs_lie: bool) -> str:
    """Whose channels are the rows of the tile: what wastes fewer lanes, then what is packed and written cheaply.

    `x_together` says that channels of x lie together in w, `pairs_lie` that pairs of pixels do in y.
    """
    x_rows, y_rows = up(p.cy, lanes) * p.cx, up(p.cx, lanes) * p.cy  # products with the rows on that side
    if x_rows != y_rows:
        return "x" if x_rows < y_rows else "y"
    if taps > 1:
        return "y" if pairs_lie else "x"
    if p.n * prod(p.y) < 4096:
        return "y" if x_together else "x"  # few pixels: results are written by vectors
    return "x" if p.cx >= p.cy else "y"  # the larger side need not be packed


def _cut(axes: tuple[Axis, ...], target: Target, lane_bytes: int, row_bytes: int, line: int, pairs: bool) -> list[int]:
    """Pixels that are packed at a time: the lane side in the first-level cache, the row side in most of the second.

    Of a row that is cut, whole lines, of so many pixels. Boxes overlap: where x would be packed too often for pairs,
    there are twice as many pixels in a box, and rows are cut in order to take more of them. It must not depend on the
    number of threads: pixels are summed in the order of the boxes.
    """
    most = max(16, target.l1 * 7 // 8 // lane_bytes)

    def filled(sizes: Sequence[int], most: int) -> list[int]:
        box = [1] * len(axes)
        for i in reversed(range(len(axes))):

            def fits(b: int, i: int = i) -> bool:
                trial = [*box[:i], b, *box[i + 1 :]]
                return prod(trial) <= most and _entries(axes, trial) * row_bytes <= target.l2 * 4 // 5

            box[i] = longest(sizes[i], fits)
            if box[i] < sizes[i]:
                whole = (up(box[i], line), box[i] // line * line) if i == len(axes) - 1 else ()
                box[i] = next((b for b in whole if 2 * line <= b and fits(b)), box[i])
                break
        return box

    def often(box: Sequence[int]) -> float:
        return _entries(axes, box) / prod(b * a.stride for b, a in zip(box, axes, strict=True))

    sizes = [a.y for a in axes]
    box = filled(sizes, most)
    if pairs and often(box) > OVERLAP:
        # Packing takes longer than reading what does not fit in the first-level cache.
        fewest = ceil(sizes[-1] / (2 * most))
        widths = (min(sizes[-1], up(ceil(sizes[-1] / cuts), line)) for cuts in range(fewest, fewest + 8))
        others = (filled([*sizes[:-1], width], 2 * most) for width in widths if width >= NARROWEST)
        box = next((other for other in others if often(other) < LESS * often(box)), box)
    return box


def _entries(axes: tuple[Axis, ...], box: Sequence[int]) -> int:
    """Pixels of x that a box of y meets."""
    return prod(min((b - 1) * a.stride + (a.k - 1) * a.dilation + 1, b * a.k) for b, a in zip(box, axes, strict=True))
