"""Plans for y and x: what the lanes hold, how sums, pixels and tasks are cut, what is packed and prefetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import ceil, gcd, prod

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem
from ..plan.axes import Axis, Shape, axis_maps, inside, packed, phases_of, simplify, spans, tap_offsets
from ..plan.bits import (
    HALF_COST,
    HALF_COST_PAIRS,
    TEAM,
    THREAD_BYTES,
    dots,
    fit_lane_groups,
    fitted,
    lane_group_steps,
    most_vectors,
    row_steps,
    vector_widths,
)
from ..plan.cost import Boxes, Filling, Room, Tasks, lost
from ..plan.prefetch import Lines, Prefetch, lines
from ..plan.records import Declined, Fold, Gather, Plan, busy_tiles, entry_steps, pitch, up
from ..plan.tuning import converts_f16, even_steps, half_width_text, streams, tile, tuning
from ..target import LINE, Target

SECOND = 0.005  # a second tile takes time to compile: it must save this share of the time
WOVEN = 4  # channels that lie apart are interleaved, if there are no more; squares of more are turned
FOLD = 1.2  # results are folded if that saves so much
FOLDED = 16 << 20  # bytes that the weights of folded results may take
UNROLLED = 64  # channels (or pairs) times rows: so few products of one vector are done before a loop over them is
COPIED_WEIGHTS, COPIED_PIXELS = 640 << 10, 200  # so few bytes of weights are packed by each thread, if it has so many
SHARED = 1.25  # of the second-level cache: more weights than this are not shared by all threads
PHASES = 4096  # more phases than this are left to the reference: strides in the hundreds


def plan(p: Problem, target: Target, threads: int) -> Plan:
    """A plan for the results or the data gradient of a problem."""
    return Planner(p, target, threads).plan()


class Planner:
    """Decisions about one problem, each building on those before it."""

    def __init__(self, p: Problem, target: Target, threads: int) -> None:
        self.p, self.target, self.threads = p, target, threads
        self.why: list[str] = []
        self.shape = simplify(p)
        self.forward = p.wanted == "y"
        self.sum_dtype = DTYPES[p.dtype].accumulator
        self.item = self.sum_dtype.itemsize
        self.lanes = target.lanes(self.item)
        self.size, self.out_size = DTYPES[p.dtype].size, DTYPES[p.out_dtype].size
        x, y = (p.cx, self.shape.x_channel), (p.cy, self.shape.y_channel)
        given, wanted = (x, y) if self.forward else (y, x)
        self.cin, self.in_channel = given
        self.cout, self.out_channel = wanted
        g, cy, cx = self.shape.w_channel
        self.w_strides = (g, cy, cx) if self.forward else (g, cx, cy)

    def plan(self) -> Plan:
        """The plan, or why there is none."""
        if prod(self._out_strides()) > PHASES:
            reason = f"strides {self.p.stride} divide the results into more than {PHASES} phases"
            return Declined(reason, f"strides whose product is at most {PHASES}")
        self._fill_lanes()
        self._cut_sums()
        self._take_input()
        self._cut_pixels()
        self._share_out()
        self._use_caches()
        return self._made()

    def _out_strides(self) -> list[int]:
        """Phases of the results along each axis."""
        return [1 if self.forward else a.stride for a in self.shape.axes]

    def _fill_lanes(self) -> None:
        """What the lanes hold: wanted channels of a group, of several groups, or of neighbouring results."""
        p, lanes, cin, cout = self.p, self.lanes, self.cin, self.cout
        self.share: tuple[int, int] | None = None
        self.fold: Fold | None = None
        self.groups, self.in_total, self.out_total = p.g, cin, cout
        dotted = p.dtype == "bf16" and dots(self.target)
        if fit_lane_groups(self.target, lanes, p.g, cin, cout, dotted):
            self.share, self.groups = (cin, cout), 1
            self.in_total, self.out_total = p.g * cin, p.g * cout
        price = HALF_COST_PAIRS if dotted and not self.share else HALF_COST
        if p.g == 1 and 2 * cout <= lanes:

            def cost(channels: int) -> float:
                choices = vector_widths(self.target, price)
                return min(step * row_steps(t, t.lanes(self.item), channels, one_block=True)[0] for t, step in choices)

            room = most_vectors(self.target) * lanes
            limits = (room // cout, FOLDED // (room * cin * self.item))
            steps = (self.w_strides[1], self.out_channel[1])
            folded = _folded(self.shape, self.forward, cout, *steps, *limits, cost)
            if folded is not None:
                # From here on a gather like any other, of fewer pixels with more channels.
                self.shape, self.fold = folded
                self.forward = True
                self.cout = self.out_total = prod(self.fold.factors) * cout
                self.why.append(f"{prod(self.fold.factors)} neighbouring results side by side in a vector")
        self.target = fitted(self.target, self._cost, price)
        self.lanes = self.target.lanes(self.item)
        if self.target.half_width:
            self.why.append(half_width_text(self.lanes, self.out_total))
        if self.share:
            self.why.append(f"{self.lanes // cout} groups side by side in a vector")
        self.rows, self.vectors = tile(self.target, self.lanes, self.out_total, one_block=self.fold is not None)
        if self.share and not self.target.tile:
            self.rows = min(self.rows, 4)  # the weights of all of a group's inputs are in registers too
        self.block = self.lanes * self.vectors
        self.blocks = ceil(self.out_total / self.block)
        self.taps = prod(a.k for a in self.shape.axes)

    def _cost(self, target: Target, step: float) -> float:
        """What a pixel costs with the vectors of a target, given what a step does."""
        lanes = target.lanes(self.item)
        if self.share:
            return step * lane_group_steps(lanes, self.out_total, self.cout)
        return step * row_steps(target, lanes, self.out_total, one_block=self.fold is not None)[0]

    def _cut_sums(self) -> None:
        """Channels that are summed in one go, so that their weights stay in the second-level cache."""
        cin, item = self.cin, self.item
        self.most = 4096  # pixels in a box: the tables and the stage stay small
        if self.share:
            self.chunk = self.in_total
        else:
            self.chunk = max(1, min(cin, up(ceil(cin / self._parts()), self.lanes)))
            if self.chunk < cin:
                # Between chunks a thread keeps the sums of a box over all channels.
                self.most = min(self.most, THREAD_BYTES // (up(self.cout, self.block) * item))
                if self.most < prod(self._out_strides()):
                    self.most, self.chunk = 4096, cin  # those of the smallest box are too many

    def _parts(self) -> int:
        """Parts of the sum over channels, so that weights of a block stay in a third of the second-level cache.

        Where products are quick and results need no stage but for parts, that costs more than weights do which take
        most of the cache, as far as one phase meets them.
        """
        axes, l2 = self.shape.axes, self.target.l2
        if self.target.two_per_cycle and self.fold is None and (self.out_channel[1] == 1 or self.out_total == 1):
            taps = prod(a.k if self.forward else ceil(a.k * gcd(a.stride, a.dilation) / a.stride) for a in axes)
            paired = self.p.dtype == "bf16" and dots(self.target) and self.cin % 2 == 0
            if taps * self.cin * self.block * (self.size if paired else self.item) <= l2 * 3 // 5:
                return 1
        return max(1, ceil(self.taps * self.cin / (l2 // 3 // (self.item * self.block))))

    def _take_input(self) -> None:
        """How the input is read and the results are written: in pairs, in place, through a stage."""
        p, cin, chunk = self.p, self.cin, self.chunk
        # The channel beside the last of an odd number must be zero in the band, which it is if vectors are copied.
        last = self.shape.axes[-1]
        last_step = last.x_step if self.forward else last.y_step
        vectors_copied = self.in_channel[1] == 1 or (last_step == 1 and last.stride <= 4)
        evenly = cin % 2 == chunk % 2 == 0 or (2 < cin == chunk <= 256 and vectors_copied)
        self.pairs = p.dtype == "bf16" and dots(self.target) and not self.share and evenly
        if self.pairs:
            self.why.append("products of bf16 two at a time (avx512_bf16)")
        self.odd = self.pairs and cin % 2 == 1  # then the last channel is paired with a weight of zero
        self.pitch = pitch(self.in_total if self.share else chunk, self.lanes)
        self.woven = False
        if not self.share and chunk == cin < self.lanes:
            self.pitch = cin + self.odd  # few channels are kept without a gap, so that rows are copied as one run
            self.woven = self.in_channel[1] != 1 and self.pitch <= WOVEN
        dense = (self.in_channel[1] == 1 or (self.in_total == 1 and not self.pairs)) and not self.odd
        exact = self.pairs or DTYPES[p.dtype].numpy == self.sum_dtype
        self.in_place = not self.share and dense and exact and all(inside(a, self.forward) for a in self.shape.axes)
        if self.in_place:
            self.why.append("the input is read where it lies: no padding, channels together, no conversion")
        apart = self.out_channel[1] != 1 and self.out_total > 1
        self.staged = apart or chunk < cin or self.fold is not None
        if self.share:
            # Channels of one group after another make one run of channels.
            self.in_channel = (0, self.in_channel[1] if self.share[0] > 1 else self.in_channel[0])
            self.out_channel = (0, self.out_channel[1] if self.share[1] > 1 else self.out_channel[0])
            self.staged = self.out_channel[1] != 1
        if self.staged and self.fold is None:
            whole = self.share or chunk == cin
            reason = (
                "their channels lie apart" if whole else "channels are summed in parts, whose weights fit in a cache"
            )
            self.why.append(f"results wait in a buffer: {reason}")

    def _cut_pixels(self) -> None:
        """Boxes of pixels, tiles in them, and borders that are kept apart."""
        axes, forward = self.shape.axes, self.forward
        pixel_bytes, budget = self.pitch * self.item, self.target.l2 // 3
        if self.staged:  # The sums of a block of channels lie beside the band.
            pixel_bytes, budget = pixel_bytes + self.block * self.item, self.target.l2 // 2
        # Several groups in a task: their pixels are listed once, and whole lines of memory are read and written.
        group_bytes = (self.cin * self.size, self.cout * self.out_size)
        run = min(self.groups, ceil(4 * LINE / max(group_bytes)))
        self.run = ceil(self.groups / ceil(self.groups / run))
        self.runs = ceil(self.groups / self.run)
        if self.run > 1:
            pixel_bytes += self.run * sum(group_bytes)
        along = (axes[-1].y_step if forward else axes[-1].x_step) == 1  # results lie together along rows
        line = LINE // min(self.size, self.out_size) if along else 1
        columns = ceil(self.out_total / self.lanes)
        narrower = columns % self.vectors > 0  # then a second tile is two more functions
        price = 1e9 if self.share else 4 * SECOND if narrower else SECOND
        length = self.share[0] if self.share else self.cin
        apart = abs(axes[-1].x_step) * axes[-1].stride * self.out_size if max(self._out_strides()) > 1 else 0
        evenly = {} if self.share else even_steps(self.target, self.vectors, 0 if self.staged else apart)
        filling = Filling(axes, forward, self.rows, self.vectors, length, self.in_place, self.target, price, evenly)
        tuned = tuning(self.target)
        vector = tuned.boxes.pack if self.in_channel[1] == 1 else tuned.boxes.pack_transposed
        summed = self.share[0] if self.share else self.chunk
        weights = self.taps * summed * self.block * (self.size if self.pairs else self.item)
        room = Room(
            pixel_bytes, budget, self.most, weights, 0 if self.staged else self.block * self.out_size, self.target.l2,
            0 if self.in_place else vector * ceil(self.in_total / self.lanes),
            0 if self.out_channel[1] == 1 else self.out_total * (2 if self.pairs else 1),
        )  # fmt: skip
        boxes = Boxes(axes, forward, room, line, tuned)

        def box_for(threads: int, steps: Callable[[list[int]], float]) -> list[int]:
            able = self._many_weights(threads)

            def tasks(box: list[int]) -> Tasks:
                number = boxes.number(box)
                if able and self._sums_fit(number, prod(box) * prod(self._out_strides())):
                    return Tasks(self.blocks, 0)
                shared = self._shared_by(self.runs * number, threads)
                return Tasks(shared, self.runs * shared)

            return boxes.best(threads, tuned.search.least_tiles * self.rows, lambda box: columns * steps(box), tasks)

        # Borders are cut as for the smallest team: products with padding decide the sign of a zero and what an infinity
        # spoils, so which of them are taken must not depend on the number of threads.
        box = box_for(TEAM, lambda box: filling.best(box)[0])
        _, tiling = filling.best(box)
        if self.threads > TEAM:
            box = box_for(self.threads, lambda box: filling.steps(box, tiling))
        self.rows, self.short, split = tiling
        if any(split):
            self.why.append("pixels at the border leave out the taps that meet only padding")
        self.maps = axis_maps(axes, forward, box, split, self.in_place)
        self.packs = tuple(packed(a, w, forward, self.in_place) for a, w in zip(axes, self.maps, strict=True))
        self.boxes = prod(w.boxes for w in self.maps)
        self.region = [w.box * w.out_stride for w in self.maps]

    def _share_out(self) -> None:
        """What a task is: a box with all or a part of the channels, or a block of channels with all boxes."""
        self.block_groups = self._shared_by(self.runs * self.boxes, self.threads)
        self.own = self._many_weights(self.threads) and self._sums_fit(self.boxes, prod(self.region))
        # A few weights are packed again sooner than they come from another thread's cache, and nobody is waited for.
        pixels = prod(w.out for w in self.maps)
        few = self.groups * self._weight_bytes() <= COPIED_WEIGHTS and pixels >= COPIED_PIXELS * self.threads
        self.copies = few and not self.own
        # With one part of the channels before another, a thread has most weights from itself; but if channels lie
        # together, threads write to the same lines of each pixel, where parts meet.
        lines_met = pixels if self.out_channel[1] == 1 else 0
        first = self.block_groups > 1 and self._weight_bytes() > LINE * lines_met
        self.parts_first = first and not self.copies
        if self.copies:
            self.why.append("each thread packs all weights for itself")
        if self.own:
            self.why.append("each block of channels has its weights packed by the thread that takes it")
        elif self.run > 1:
            self.why.append(f"{self.run} groups in a task")

    def _weight_bytes(self) -> int:
        """Bytes of all weights of a group, packed."""
        return self.taps * self.cin * up(self.out_total, self.lanes) * (self.size if self.pairs else self.item)

    def _many_weights(self, threads: int) -> bool:
        """Whether it pays that threads pack the weights that they need, for all boxes: these do not leave their caches.

        Of many weights and few pixels it does.
        """
        strides = prod(a.stride if self.forward else 1 for a in self.shape.axes)
        pixels = prod(a.x if self.forward else a.y for a in self.shape.axes)
        # The input is packed again for each block; where it lies it is read again, and should be less than weights.
        cheap = self.taps * self.out_total >= pixels if self.in_place else self.taps * self.vectors >= 16 * strides
        blocks_wide = [min(self.block, self.out_total - at) for at in range(0, self.out_total, self.block)]
        return (
            not (self.share or self.fold)
            and cheap
            and self.taps * self.cin * self.out_total * self.size > self.target.l2
            and self.groups * self.blocks >= 2 * threads
            and lost(blocks_wide, self.groups, threads, tuning(self.target).search.many_tasks) < 0.05
        )

    def _sums_fit(self, boxes: int, results: int) -> bool:
        """Whether a thread can keep the sums of a block of channels for so many boxes, if it must."""
        return self.chunk == self.cin or boxes * (results + self.lanes) * self.block * self.item <= THREAD_BYTES

    def _shared_by(self, tasks: int, threads: int) -> int:
        """Tasks that share a box, each with a part of the channels, if there would be so many without.

        More of them, if packing it again costs little beside the products; at least two where weights are so many that
        threads had better not share them.
        """
        cheap = self.in_place or self.taps * self.vectors >= 16
        wanted = 8 * threads if cheap and self.blocks > 1 else 2 * threads
        parts = 1 if tasks >= wanted else min(self.blocks, ceil(wanted / tasks))
        if self._weight_bytes() > SHARED * self.target.l2:
            parts = max(parts, min(2, self.blocks))
        return ceil(self.blocks / ceil(self.blocks / parts))

    def _use_caches(self) -> None:
        """What is written past the caches, and what is prefetched."""
        p = self.p
        # Squares of narrow results are slower to write past the caches: measured, f16 by 4 to 18%, bf16 by 0 to 5%.
        narrow = self.staged and self.out_channel[1] != 1 and self.out_size < self.item
        self.stream = streams(p, self.target) and self.fold is None and not narrow
        if self.stream:
            self.why.append("results go past the caches, which they exceed")
        self.prefetch: Prefetch | None = None
        self.weights_apart = 0
        if p.bytes <= self.target.l2 or self.share:
            return
        part = 1 if self.own else ceil(self.blocks / self.block_groups)
        calls, steps = part * busy_tiles(self.maps, self.rows), self.chunk // (2 if self.pairs else 1)
        weights = self._next_weights(calls * steps * self.taps) if self.own else None
        if self.boxes == 1 and weights is None:
            return
        axes = zip(self.shape.axes, self.maps, strict=True)
        counts, steps_in = zip(*(spans(a, w.box, self.forward) for a, w in axes), strict=True)
        regions = [lines(counts, steps_in, self.chunk, self.in_channel[1], self.size)]
        if not self.stream and self.fold is None:
            apart = [w.out_step for w in self.maps]
            channels = min(self.out_total, part * self.block)
            regions.append(lines(self.region, apart, channels, self.out_channel[1], self.out_size))
        self.why.append("the input of the next box is fetched while one is computed")
        if weights is not None:
            region, self.weights_apart = weights
            regions.append(region)
            self.why.append("so are the next weights")
        self.prefetch = Prefetch(tuple(regions), calls, steps)

    def _next_weights(self, steps: int) -> tuple[Lines, int] | None:
        """The part of the next weights that a box asks for, and the bytes to that of the next box.

        None, if the steps of a box do not suffice for it.
        """
        axes, (_, out_step, in_step) = self.shape.axes, self.w_strides
        counts, apart = [*(a.k for a in axes), self.block], [*(a.w_step for a in axes), out_step]
        region = list(lines(counts, apart, self.chunk, in_step, self.size))
        longest = max(range(len(region)), key=lambda i: region[i][0])
        count, step = region[longest]
        region[longest] = (ceil(count / self.boxes), step)
        if prod(count for count, _ in region) > steps:
            return None
        return tuple(region), region[longest][0] * step

    def _made(self) -> Gather:
        p, share = self.p, self.share
        steps = [q.stride for q in self.packs]
        if not self.in_place:
            steps = [e * self.pitch for e in entry_steps(self.packs)]
        phases, tap_table = phases_of(self.shape.axes, self.maps, steps)
        few = self.cin * self.rows <= (2 if self.pairs else 1) * UNROLLED
        unrolled = few and self.vectors == 1 and self.chunk == self.cin and not share
        return Gather(
            wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if self.item == 4 else "double",
            lanes=self.lanes, rows=self.rows, short=self.short, vectors=self.vectors, groups=self.groups, run=self.run,
            cin=share[0] if share else self.cin + self.odd, given=share[0] if share else self.cin, cout=self.out_total,
            share=share, pairs=self.pairs, chunk=share[0] if share else self.chunk + self.odd, unrolled=unrolled,
            maps=self.maps, packs=self.packs, in_place=self.in_place, staged=self.staged, pitch=self.pitch,
            woven=self.woven, in_channel=self.in_channel, out_channel=self.out_channel, w_strides=self.w_strides,
            taps=tap_offsets(self.shape.axes), tap_table=tap_table, phases=phases, block_groups=self.block_groups,
            parts_first=self.parts_first, copies=self.copies,
            own=self.own, prefetch=self.prefetch, weights_apart=self.weights_apart, stream=self.stream, fold=self.fold,
            bias=p.bias_stride, accumulate=p.accumulate, converts_f16=converts_f16(self.target), threads=self.threads,
            why=tuple(self.why),
        )  # fmt: skip


def _reached(a: Axis, forward: bool, place: int) -> dict[int, int]:
    """Where each tap of an axis reads, for the result at that place: {how far from the input's position: tap}."""
    if forward:
        return {place * a.stride + k * a.dilation - a.pad: k for k in range(a.k)}
    met = {k: place + a.pad - k * a.dilation for k in range(a.k)}
    return {at // a.stride: k for k, at in met.items() if at % a.stride == 0}


def _folded(
    shape: Shape, forward: bool, channels: int, w_step: int, channel_step: int, room: int, taps: int,
    cost: Callable[[int], float],
) -> tuple[Shape, Fold] | None:  # fmt: skip
    """The same sums with neighbouring results in the lanes, if that saves products in spite of those with zeros.

    Results at q*factor + place, for all places, read the union of their inputs, around q*factor*stride (forward) or
    q*factor/stride. A lane has no weight, that is zero, where its result does not meet the input. There is room for so
    many results, and for the weights of so many taps. `cost` says what a row of the tile costs with so many channels.
    """
    units = [1 if forward else a.stride for a in shape.axes]
    if any(a.k == 1 and unit > 1 for a, unit in zip(shape.axes, units, strict=True)):
        return None
    wanted = [a.y if forward else a.x for a in shape.axes]

    def even_steps(span: list[int]) -> bool:
        return len({high - low for low, high in pairwise(span)}) <= 1

    reached: list[list[dict[int, int]]] = []  # for each axis and place
    spans: list[dict[int, list[int]]] = []
    for a, unit in zip(shape.axes, units, strict=True):
        reached.append([_reached(a, forward, place) for place in range(room // unit * unit if a.k > 1 else 1)])
        reads: set[int] = set()
        spans.append({})
        for factor, here in enumerate(reached[-1], start=1):
            reads.update(here)
            if len(reads) > taps:
                break
            if factor % unit == 0 and even_steps(span := sorted(reads)):
                spans[-1][factor] = span

    def met(factors: Ints) -> int:
        return prod(len(span[f]) for span, f in zip(spans, factors, strict=True))

    def steps(factors: Ints) -> float:
        rounds = prod(ceil(n / f) for n, f in zip(wanted, factors, strict=True))  # some lanes may have no result there
        return met(factors) * cost(prod(factors) * channels) * rounds / prod(wanted)

    fitting = [f for f in product(*spans) if prod(f) <= room and met(f) <= taps]
    factors = min(fitting, key=steps, default=None)
    plain = prod(a.k / u for a, u in zip(shape.axes, units, strict=True)) * cost(channels)
    if factors is None or plain < FOLD * steps(factors):
        return None
    chosen = [span[c] for span, c in zip(spans, factors, strict=True)]
    axes = []
    for a, factor, at in zip(shape.axes, factors, chosen, strict=True):
        gap = at[1] - at[0] if len(at) > 1 else 1
        sizes = (a.x, ceil(a.y / factor)) if forward else (a.y, ceil(a.x / factor))
        stride = factor * a.stride if forward else factor // a.stride
        in_step, out_step = (a.x_step, a.y_step) if forward else (a.y_step, a.x_step)
        axes.append(Axis(*sizes, len(at), stride, gap, -at[0], in_step, 0, out_step * factor))
    table = []
    for where in product(*chosen):
        for places in product(*map(range, factors)):
            mine = [there[place].get(at) for there, place, at in zip(reached, places, where, strict=True)]
            tap = None if None in mine else sum(k * a.w_step for k, a in zip(mine, shape.axes, strict=True) if k)
            table += [0 if tap is None else 2 * (tap + c * w_step) + 1 for c in range(channels)]
    steps_out = tuple(a.y_step if forward else a.x_step for a in shape.axes)
    fold = Fold(factors, tuple(wanted), steps_out, channels, channel_step, tuple(table))
    return replace(shape, axes=tuple(axes)), fold
