"""How a problem is computed on a CPU. A pure function of problem, target and threads; every heuristic lives here.

Batch is treated as one more spatial axis with a kernel of 1, and axes that nothing tells apart are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import pairwise, product
from math import ceil, prod

from ..dtypes import DTYPES
from ..spec.problem import Ints, Problem
from .nests import (
    Ahead,
    Declined,
    Fold,
    Gather,
    Packed,
    Phase,
    Plan,
    Reduce,
    Slide,
    Stretch,
    Walk,
    entry_steps,
    pitch,
    reduce_pitch,
    up,
)
from .numbers import LINE
from .target import Target

AXES = 4
ALONE = 2_000_000  # fewer products and bytes than this are done before a second thread has begun
TEAM = 4  # work is cut for so many threads at least
ROOM = 4 << 20  # bytes that a thread may keep of one thing, whatever the number of channels
SLABS = 2 << 20  # bytes of the sums of all slices of a depthwise weight gradient, if four of them fit
SUMS = 5 << 18  # bytes of the sums of all slices of a weight gradient, if four of them fit
SHARED = 64 << 20  # bytes that packed weights may take beyond four times the largest tensor
LEAST = 3  # a tile of fewer rows takes as long: it waits for weights from the second-level cache
SECOND = 0.005  # a second tile is compiled if it saves more than this share of the time
FOLD = 1.3  # results are folded if that saves so much
PIECES = 1000  # borders of large kernels are not kept apart in more pieces than this
PHASES = 4096  # more phases than this are left to the reference: strides in the hundreds


@dataclass(frozen=True)
class Axis:
    """One axis of the geometry, batch included, with the strides of the three tensors along it."""

    x: int
    y: int
    k: int = 1
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    x_step: int = 0
    w_step: int = 0
    y_step: int = 0

    @property
    def plain(self) -> bool:
        """Whether x and y walk along this axis together, with no kernel."""
        return self.k == 1 and self.stride == 1 and self.pad == 0 and self.x == self.y


@dataclass(frozen=True)
class Shape:
    """A problem with its axes brought to a common form: always four, the last one innermost."""

    axes: tuple[Axis, ...]
    g: int
    cx: int
    cy: int
    x_channel: Ints  # strides of (g, cx)
    y_channel: Ints  # strides of (g, cy)
    w_channel: Ints  # strides of (g, cy, cx)


def simplify(p: Problem) -> Shape:
    """Merge what can be merged: a kernel of 1 with stride 1 makes neighbouring axes one, batch among them."""
    axes = [Axis(p.n, p.n, x_step=p.x_strides[0], y_step=p.y_strides[0])]
    for i in range(p.rank):
        kernel = (p.x[i], p.y[i], p.w[i], p.stride[i], p.dilation[i], p.pad[i])
        axes.append(Axis(*kernel, p.x_strides[3 + i], p.w_strides[3 + i], p.y_strides[3 + i]))
    merged: list[Axis] = []
    for axis in axes:
        if axis.plain and axis.x == 1:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.plain
            and axis.plain
            and last.x_step == axis.x * axis.x_step
            and last.y_step == axis.y * axis.y_step
        ):
            merged[-1] = replace(axis, x=last.x * axis.x, y=last.y * axis.y)
        else:
            merged.append(axis)
    filler = [Axis(1, 1)] * (AXES - len(merged))
    channels = (p.x_strides[1:3], p.y_strides[1:3], p.w_strides[:3])
    return Shape(tuple(filler + merged), p.g, p.cx, p.cy, *channels)


def make_plan(problem: Problem, target: Target, threads: int) -> Plan:
    """The plan for a problem.

    Work is cut for a rounded number of threads, so that one kernel serves neighbouring numbers of them.
    """
    if problem.flops < ALONE and problem.bytes < ALONE:
        threads = 1
    team = TEAM
    while team < threads:
        team *= 2
    if _slides(problem):
        plan: Plan = _slide(problem, target, team)
    elif problem.wanted == "w":
        plan = _reduce(problem, target, team)
    elif (turned := _turned(problem, target)) is not None:
        plan = _reduce(turned, target, team, turned=problem)
    else:
        plan = _gather(problem, target, team)
    if isinstance(plan, Declined):
        return plan
    largest = plan.item * max(problem.size(role) for role in ("x", "w", "y"))
    if plan.shared > 4 * largest + SHARED:
        return Declined(f"{plan.shared >> 20} MiB of packed weights, most of it lanes without a channel")
    return replace(plan, threads=min(threads, plan.tasks))


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


def _slides(p: Problem) -> bool:
    """Whether each channel is computed on its own, tensors read in place: depthwise, channels together, few taps."""
    phases = prod(p.stride) if p.wanted == "x" else 1
    steps = (p.x_strides[1], p.y_strides[1])
    return p.g > 1 and p.cx == p.cy == 1 and steps == (1, 1) and phases <= 8 and 1 < prod(p.w) <= 50


def _slide(p: Problem, target: Target, threads: int) -> Plan:
    """A plan for a depthwise layer."""
    shape = simplify(p)
    forward = p.wanted != "x"
    sum_dtype = DTYPES[p.dtype].accumulator
    lanes = target.lanes(sum_dtype.itemsize)
    one = [1] * AXES
    walks = _walks(shape.axes, forward, one, (False,) * AXES, True)
    taps = prod(a.k for a in shape.axes)
    rows, columns = (2, 4) if target.registers >= 32 else (1, 4)
    counts = [max(s.stop for s in w.stretches) for w in walks]
    outer = counts[0] * counts[1]
    band = max(1, min(counts[2], ceil(outer * counts[2] / (16 * threads))))
    stream = _streams(p, target) and all(w.out_step % lanes == 0 for w in walks)
    # Slices must not depend on the number of threads.
    slab = taps * up(p.g, lanes) * sum_dtype.itemsize
    slices = max(1, min(outer * ceil(counts[2] / rows) // 2, 32, max(4, SLABS // slab)))
    return Slide(
        wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if sum_dtype.itemsize == 4 else "double",
        lanes=lanes, rows=rows, columns=columns, channels=p.g, walks=walks,
        in_sizes=tuple(a.x if forward else a.y for a in shape.axes),
        in_steps=tuple(a.x_step if forward else a.y_step for a in shape.axes),
        taps=_tap_offsets(shape.axes), w_step=shape.w_channel[0], band=up(band, rows), slices=slices,
        bias=p.bias_stride, accumulate=p.accumulate, stream=stream, half=_half(target), threads=threads,
        why=("each channel on its own, the input read where it lies",),
    )  # fmt: skip


def tile(target: Target, lanes: int, channels: int) -> tuple[int, int]:
    """(rows, vectors) of the register tile for so many channels in the lanes.

    The accumulators, one vector of weights per column and one broadcast must fit in the registers. More vectors are
    better, since each value that is broadcast then serves more products; the last block may have fewer.
    """
    if target.tile:
        return target.tile
    needed = ceil(channels / lanes)
    most = _most_vectors(target)
    cost = {0: 0.0, 1: 1.25, 2: 2.1, 3: 3.03, 4: 4.0}  # of a step with so many
    vectors = min(range(1, min(most, needed) + 1), key=lambda v: (needed // v * cost[v] + cost[needed % v], -v))
    by_vectors = {4: 6, 3: 8, 2: 8, 1: 8} if target.registers >= 32 else {2: 6, 1: 8}
    return by_vectors[vectors], vectors


def _most_vectors(target: Target) -> int:
    """Vectors that a tile may have in a row."""
    return 4 if target.registers >= 32 else 2


def shorter(target: Target, rows: int, vectors: int, height: int) -> float:
    """What a tile of fewer rows than there might be costs: each vector of columns that is loaded serves fewer products.

    With 32 registers and three or four vectors, four rows are as good as more.
    """
    if target.registers < 32:
        return 1 + 0.03 * (rows - height)
    return 1.0 if vectors > 2 and height >= 4 else 1 + 0.005 * (rows - height)


def _dots(target: Target) -> bool:
    """Whether the machine multiplies and adds pairs of bf16."""
    return target.width == 64 and "+avx512bf16" in target.features.split(",")


def _half(target: Target) -> bool:
    """Whether the machine converts f16."""
    return target.name in ("avx512", "avx2", "neon")


def _gather(p: Problem, target: Target, threads: int) -> Plan:
    why: list[str] = []
    shape = simplify(p)
    sum_dtype = DTYPES[p.dtype].accumulator
    lanes = target.lanes(sum_dtype.itemsize)
    forward = p.wanted == "y"
    if prod(1 if forward else a.stride for a in shape.axes) > PHASES:
        return Declined(f"strides {p.stride} make more than {PHASES} phases")
    cin, cout = (p.cx, p.cy) if forward else (p.cy, p.cx)
    in_channel, out_channel = (shape.x_channel, shape.y_channel) if forward else (shape.y_channel, shape.x_channel)
    g, cy, cx = shape.w_channel
    w_strides = (g, cy, cx) if forward else (g, cx, cy)

    share: tuple[int, int] | None = None
    groups = p.g
    if p.g > 1 and cout < lanes and lanes % cout == 0 and cin <= cout:
        # Few channels in a group: lanes hold several groups, and each lane picks the inputs of its own.
        share, groups = (cin, cout), 1
        in_total, out_total = p.g * cin, p.g * cout
        why.append(f"{lanes // cout} groups side by side in a vector")
    else:
        in_total, out_total = cin, cout
    fold = None
    if p.g == 1 and 2 * cout <= lanes:
        vectors = target.tile[1] if target.tile else _most_vectors(target)
        folded = _folded(shape, forward, cout, w_strides[1], out_channel[1], lanes, vectors)
        if folded is not None:
            # From here on a gather like any other, of fewer pixels with more channels.
            shape, fold = folded
            forward, cout, out_total = True, prod(fold.factors) * cout, prod(fold.factors) * cout
            why.append(f"{prod(fold.factors)} neighbouring results side by side in a vector")
    rows, vectors = tile(target, lanes, out_total)
    if share and not target.tile:
        rows = min(rows, 4)  # the weights of all of a group's inputs are in registers too
    block = lanes * vectors

    taps = prod(a.k for a in shape.axes)
    most = 4096  # pixels in a box: the tables and the stage stay small
    if share:
        chunk = in_total
    else:
        budget = target.l2 // 3 // (sum_dtype.itemsize * block)  # steps whose weights stay in the second-level cache
        parts = max(1, ceil(taps * cin / budget))
        chunk = max(1, min(cin, up(ceil(cin / parts), lanes)))
        if chunk < cin:
            # Between chunks a thread keeps the sums of a box over all channels.
            most = min(most, ROOM // (up(cout, block) * sum_dtype.itemsize))
            if most < prod(1 if forward else a.stride for a in shape.axes):
                most, chunk = 4096, cin  # those of the smallest box are too many
    band_pitch = pitch(in_total if share else chunk, lanes)

    # The channel beside the last of an odd number must hold a number in the band, which it does if vectors are copied.
    last_axis = shape.axes[-1]
    last_step = last_axis.x_step if forward else last_axis.y_step
    vectors_copied = in_channel[1] == 1 or (last_step == 1 and last_axis.stride <= 4)
    evenly = cin % 2 == chunk % 2 == 0 or (2 < cin == chunk <= 256 and vectors_copied)
    pairs = p.dtype == "bf16" and _dots(target) and not share and evenly
    if pairs:
        why.append("products of bf16 two at a time (avx512_bf16)")
    odd = pairs and cin % 2 == 1  # then the last channel is paired with a weight of zero
    in_dense = (in_channel[1] == 1 or (in_total == 1 and not pairs)) and not odd
    exact = pairs or DTYPES[p.dtype].numpy == sum_dtype
    in_place = not share and in_dense and exact and all(map(_inside(forward), shape.axes))
    if in_place:
        why.append("the input is read in place: no padding, channels innermost, no conversion")
    staged = (out_channel[1] != 1 and out_total > 1) or chunk < cin or fold is not None
    if staged and fold is None:
        why.append("results go through a stage: " + ("channels are not innermost" if chunk == cin else "sums in parts"))
    if share:
        # Channels of one group after another make one run of channels.
        in_channel = (0, in_channel[1] if share[0] > 1 else in_channel[0])
        out_channel = (0, out_channel[1] if share[1] > 1 else out_channel[0])
        staged = out_channel[1] != 1

    # Tasks may share a box, each with a part of the channels, if packing it again costs little beside the products.
    blocks = ceil(out_total / block)
    parts = blocks if in_place or taps * vectors >= 16 else 1
    pixel_bytes = band_pitch * sum_dtype.itemsize
    budget = target.l2 // 3
    if staged:  # The sums of a block of channels lie beside the band.
        pixel_bytes, budget = pixel_bytes + block * sum_dtype.itemsize, target.l2 // 2
    # Several groups in a task: their pixels are listed once, and whole lines of memory are read and written.
    size, out_size = DTYPES[p.dtype].size, DTYPES[p.out_dtype].size
    run = min(groups, ceil(4 * LINE / min(cin * size, cout * out_size)))
    run = ceil(groups / ceil(groups / run))
    if run > 1:
        why.append(f"{run} groups in a task")
        pixel_bytes += run * (cin * size + cout * out_size)
    runs = ceil(groups / run)
    # Borders are cut as for the smallest team: products with padding decide the sign of a zero and what an infinity
    # spoils, so which of them are taken must not depend on the number of threads.
    few = _gather_box(shape.axes, forward, TEAM * 3, pixel_bytes, budget, most, rows, runs * parts)
    box = _gather_box(shape.axes, forward, threads * 3, pixel_bytes, budget, most, rows, runs * parts)
    sum_length = share[0] if share else cin
    rows, short, split = _best_split(
        shape.axes, forward, few, rows, vectors, sum_length, in_place, target, alone=share is not None
    )
    if any(split):
        why.append("pixels at the border leave out the taps that meet only padding")
    walks = _walks(shape.axes, forward, box, split, in_place)
    packs = tuple(_packed(a, w, forward, in_place) for a, w in zip(shape.axes, walks, strict=True))
    band = prod(q.extent for q in packs) * band_pitch * sum_dtype.itemsize
    if not in_place and band > max(64 << 20, 4 * p.bytes):
        return Declined(f"a band of {band >> 20} MiB for one box of pixels")
    step = [q.stride for q in packs] if in_place else [e * band_pitch for e in entry_steps(packs)]
    phases, meetings = _phases(shape.axes, walks, step)
    boxes = prod(w.boxes for w in walks)
    tasks = runs * boxes
    wanted = 8 * threads if parts > 1 else 2 * threads
    block_groups = 1 if tasks >= wanted else min(blocks, ceil(wanted / tasks))
    block_groups = ceil(blocks / ceil(blocks / block_groups))
    # With many weights and few pixels it pays that each thread packs its own: they do not leave its cache.
    weights = taps * cin * out_total * DTYPES[p.dtype].size
    sums = up(p.size(p.wanted) // p.g // cout, 16) * block * sum_dtype.itemsize
    again = prod(a.stride if forward else 1 for a in shape.axes) / (taps * vectors)  # what packing the input costs
    own = not (in_place or share or fold) and 16 * again <= 1 and weights > target.l2 and sums <= ROOM
    own = own and groups * blocks >= 2 * threads
    own = own and _lost([min(block, out_total - at) for at in range(0, out_total, block)] * groups, threads) < 0.05
    if own:
        why.append("each block of channels has its weights packed by the thread that takes it")
    stream = _streams(p, target) and fold is None
    if stream:
        why.append("results go past the caches, which they exceed")
    ahead = None
    if boxes > 1 and p.bytes > target.l2 and not share:
        part = 1 if own else ceil(blocks / block_groups)
        spans = [
            min((w.box - 1) * w.sigma + _reach(a, forward), q.size)
            for w, q, a in zip(walks, packs, shape.axes, strict=True)
        ]
        regions = [_lines(spans, [q.stride for q in packs], chunk, in_channel[1], size)]
        if not stream and fold is None:
            sizes, steps = [w.box * w.phi for w in walks], [w.out_step for w in walks]
            channels = min(out_total, part * block)
            regions.append(_lines(sizes, steps, channels, out_channel[1], DTYPES[p.out_dtype].size))
        ahead = Ahead(tuple(regions), part * max(1, prod(w.box * w.phi for w in walks) // rows), chunk)
        why.append("the next box is asked for while one is computed")
    return Gather(
        wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if sum_dtype.itemsize == 4 else "double",
        lanes=lanes, rows=rows, short=short, vectors=vectors, groups=groups, run=run,
        cin=share[0] if share else cin + odd,
        given=share[0] if share else cin, cout=out_total,
        share=share, pairs=pairs, chunk=share[0] if share else chunk + odd, walks=walks, packs=packs, in_place=in_place,
        staged=staged,
        pitch=band_pitch, in_channel=in_channel, out_channel=out_channel, w_strides=w_strides,
        taps=_tap_offsets(shape.axes), meetings=meetings, phases=phases, block_groups=block_groups, own=own,
        ahead=ahead, stream=stream, fold=fold, bias=p.bias_stride,
        accumulate=p.accumulate, half=_half(target), threads=threads, why=tuple(why),
    )  # fmt: skip


def _reached(a: Axis, forward: bool, place: int) -> dict[int, int]:
    """Where each tap of an axis reads, for the result at that place: {how far from the input's position: tap}."""
    if forward:
        return {place * a.stride + k * a.dilation - a.pad: k for k in range(a.k)}
    met = {k: place + a.pad - k * a.dilation for k in range(a.k)}
    return {at // a.stride: k for k, at in met.items() if at % a.stride == 0}


def _folded(
    shape: Shape, forward: bool, channels: int, w_step: int, channel_step: int, lanes: int, most: int
) -> tuple[Shape, Fold] | None:
    """The same sums with neighbouring results in the lanes, if that saves products in spite of those with zeros.

    Results at q*factor + place, for all places, read the union of their inputs, around q*factor*stride (forward) or
    q*factor/stride. A lane has no weight, that is zero, where its result does not meet the input.
    """
    units = [1 if forward else a.stride for a in shape.axes]
    if any(a.k == 1 and unit > 1 for a, unit in zip(shape.axes, units, strict=True)):
        return None
    room = most * lanes // channels
    choices = [range(u, room + 1, u) if a.k > 1 else (1,) for a, u in zip(shape.axes, units, strict=True)]

    def reads(a: Axis, factor: int) -> list[int]:
        return sorted({at for place in range(factor) for at in _reached(a, forward, place)})

    spans = [{c: reads(a, c) for c in choice} for a, choice in zip(shape.axes, choices, strict=True)]

    def steps(factors: Ints) -> float:
        vectors = ceil(prod(factors) * channels / lanes)
        return prod(len(span[c]) for span, c in zip(spans, factors, strict=True)) * vectors / prod(factors)

    fitting = [f for f in product(*choices) if prod(f) <= room]
    factors = min(fitting, key=steps, default=None)
    plain = prod(a.k / u for a, u in zip(shape.axes, units, strict=True))
    if factors is None or plain < FOLD * steps(factors):
        return None
    chosen = [span[c] for span, c in zip(spans, factors, strict=True)]
    axes = []
    for a, factor, at in zip(shape.axes, factors, chosen, strict=True):
        gaps = {high - low for low, high in pairwise(at)} or {1}
        if len(gaps) > 1:
            return None
        sizes = (a.x, ceil(a.y / factor)) if forward else (a.y, ceil(a.x / factor))
        stride = factor * a.stride if forward else factor // a.stride
        in_step, out_step = (a.x_step, a.y_step) if forward else (a.y_step, a.x_step)
        axes.append(Axis(*sizes, len(at), stride, gaps.pop(), -at[0], in_step, 0, out_step * factor))
    table = []
    for where in product(*chosen):
        for places in product(*map(range, factors)):
            taps = [_reached(a, forward, place).get(at) for a, place, at in zip(shape.axes, places, where, strict=True)]
            here = None if None in taps else sum(k * a.w_step for k, a in zip(taps, shape.axes, strict=True) if k)
            table += [0 if here is None else 2 * (here + c * w_step) + 1 for c in range(channels)]
    sizes_out = tuple(a.y if forward else a.x for a in shape.axes)
    steps_out = tuple(a.y_step if forward else a.x_step for a in shape.axes)
    fold = Fold(factors, sizes_out, steps_out, channels, channel_step, tuple(table))
    return replace(shape, axes=tuple(axes)), fold


def _streams(p: Problem, target: Target) -> bool:
    """Whether results are written past the caches: there are more of them than these can keep for who reads them."""
    able = target.triple.startswith(("x86_64", "amd64")) and target.width in (16, 32, 64)
    return able and not p.accumulate and 2 * DTYPES[p.out_dtype].size * prod(p.shape(p.wanted)) > target.l3


def _tap_offsets(axes: tuple[Axis, ...]) -> Ints:
    """Where each kernel element lies in w."""
    return tuple(
        sum(k * a.w_step for k, a in zip(ks, axes, strict=True)) for ks in product(*(range(a.k) for a in axes))
    )


def _best_split(
    axes: tuple[Axis, ...], forward: bool, box: Sequence[int], rows: int, vectors: int, channels: int, in_place: bool,
    target: Target, alone: bool,
) -> tuple[int, int, tuple[bool, ...]]:  # fmt: skip
    """How many rows a tile has, how many a second one for what is left, and on which axes border pixels are kept apart.

    What takes the fewest steps: a border pixel meets fewer taps, but pixels in tiles of their own fill them badly.
    `alone` says that there shall be no second tile.
    """
    none = (False,) * len(axes)
    if prod(a.stride for a in axes) > 64 and not forward:
        return rows, 0, none
    splits = [none]
    if not in_place:
        split_axes = [i for i, a in enumerate(axes) if 1 < a.k <= 16]
        splits += [tuple(i in chosen for i in range(len(axes))) for chosen in ({i} for i in split_axes)]
        if len(split_axes) > 1 and prod(2 * axes[i].k - 1 for i in split_axes) <= PIECES:
            splits.append(tuple(i in split_axes for i in range(len(axes))))

    def runs(split: tuple[bool, ...]) -> dict[tuple[int, int], int]:
        """How often so many pixels meet so many taps."""
        # Per axis, the kinds of boxes with how often they come; per kind, (positions, taps) of each stretch.
        kinds: list[dict[tuple[tuple[int, int], ...], int]] = []
        for w in _walks(axes, forward, box, split, in_place):
            seen: dict[tuple[tuple[int, int], ...], int] = {}
            for b in range(min(w.boxes, 64)):
                low, high = b * w.box, (b + 1) * w.box
                spans = ((min(t.stop, high) - max(t.start, low), len(t.taps)) for t in w.stretches)
                there = tuple((n, taps) for n, taps in spans if n > 0)
                seen[there] = seen.get(there, 0) + 1
            kinds.append(seen)
        total: dict[tuple[int, int], int] = {}
        for combo in product(*(k.items() for k in kinds)):
            times = prod(often for _, often in combo)
            for parts in product(*(there for there, _ in combo)):
                run = prod(n for n, _ in parts), prod(t for _, t in parts)
                total[run] = total.get(run, 0) + times
        return total

    def steps(total: dict[tuple[int, int], int], height: int, short: int) -> float:
        whole, less = (
            shorter(target, rows, vectors, height) * height,
            shorter(target, rows, vectors, short) * max(short, LEAST),
        )
        cost = 1 + SECOND if short else 1.0
        return cost * sum(
            often
            * ((n - short + height - 1) // height * whole + (0 < n % height <= short) * less)
            * (taps * channels + 16)
            for (n, taps), often in total.items()
        )

    heights = [rows] if target.tile else range(rows, max(rows - 3, 0), -1)
    tiles = [(height, short) for height in heights for short in range(1 if alone else height)]
    totals = [(split, runs(split)) for split in splits]
    _, best = min((steps(total, *tile), (*tile, split)) for split, total in totals for tile in tiles)
    return best


def _inside(forward: bool) -> Callable[[Axis], bool]:
    """A test whether every input that an axis meets lies inside the tensor, so that no padding is read."""

    def test(a: Axis) -> bool:
        if forward:
            return a.pad == 0 and (a.y - 1) * a.stride + (a.k - 1) * a.dilation < a.x
        for k in range(a.k):
            residue = (k * a.dilation - a.pad) % a.stride
            offset = (residue + a.pad - k * a.dilation) // a.stride
            count = ceil((a.x - residue) / a.stride)
            if count > 0 and (offset < 0 or count - 1 + offset >= a.y):
                return False
        return True

    return test


def _offsets(a: Axis, forward: bool) -> list[int]:
    """Input offset of each tap of an axis."""
    if forward:
        return [k * a.dilation - a.pad for k in range(a.k)]
    return [-((k * a.dilation - a.pad) // a.stride) for k in range(a.k)]


def _reach(a: Axis, forward: bool) -> int:
    """Inputs from the first that a result meets along an axis to the last."""
    offsets = _offsets(a, forward)
    return max(offsets) - min(offsets) + 1


def _gather_box(
    axes: tuple[Axis, ...], forward: bool, tasks: int, pixel_bytes: int, budget: int, most: int, rows: int, groups: int,
) -> list[int]:  # fmt: skip
    """Cut the output into boxes: long along the last axis, then as high as the cache allows."""
    phi = [1 if forward else a.stride for a in axes]
    sigma = [a.stride if forward else 1 for a in axes]
    count = [ceil((a.y if forward else a.x) / f) for a, f in zip(axes, phi, strict=True)]
    spread = [max(o) - min(o) for o in (_offsets(a, forward) for a in axes)]

    def entries(box: list[int]) -> int:
        return prod(min((b - 1) * s + d + 1, b * a.k) for b, s, d, a in zip(box, sigma, spread, axes, strict=True))

    most = max(1, most // prod(phi))  # positions of one phase
    box = [1] * len(axes)
    for i in reversed(range(len(axes))):

        def fits(b: int, i: int = i) -> bool:
            trial = [*box[:i], b, *box[i + 1 :]]
            return prod(trial) <= most and entries(trial) * pixel_bytes <= budget

        box[i] = _longest(count[i], fits)
        if box[i] < count[i]:
            break
    # Enough boxes that every thread has work to the end.
    for i in range(len(axes)):
        while (
            groups * prod(ceil(c / b) for c, b in zip(count, box, strict=True)) < tasks
            and box[i] > 1
            and prod(box) >= 8 * rows
        ):
            box[i] = ceil(box[i] / 2)
    return _evened(count, box, groups, tasks // 3)


def _evened(count: Sequence[int], box: list[int], groups: int, threads: int) -> list[int]:
    """Boxes with which threads come to an end together: the outermost axis that is cut, in some more pieces."""
    cut = next((i for i, (c, b) in enumerate(zip(count, box, strict=True)) if b < c), None)
    if cut is None or groups * prod(ceil(c / b) for c, b in zip(count, box, strict=True)) > 32 * threads:
        return box  # nothing to cut, or so many pieces that nothing is lost
    least = ceil(count[cut] / box[cut])

    def lost(size: int) -> float:
        lengths = [size if i == cut else b for i, b in enumerate(box)]
        pieces = [[min(b, c - at) for at in range(0, c, b)] for c, b in zip(count, lengths, strict=True)]
        return _lost(groups * [prod(each) for each in product(*pieces)], threads) + 0.02 * len(pieces[cut]) / least

    best = min((ceil(count[cut] / cuts) for cuts in range(least, least + 8)), key=lost)
    return [best if i == cut else b for i, b in enumerate(box)]


def _lost(sizes: Sequence[int], threads: int) -> float:
    """The share of time that threads wait for the last of them, each taking the next piece when it is done with one.

    The mean for that number of them and half of it.
    """
    lost = []
    for team in (threads // 2, threads):
        ends = [0] * team
        for size in sizes:
            heapreplace(ends, ends[0] + size)
        lost.append(1 - sum(sizes) / (team * max(ends)))
    return sum(lost) / len(lost)


def _walks(
    axes: tuple[Axis, ...], forward: bool, box: Sequence[int], split: Sequence[bool], in_place: bool
) -> tuple[Walk, ...]:
    """How the output walks over the input, for boxes of a size. In place, entries are coordinates."""
    walks = []
    for a, size, apart in zip(axes, box, split, strict=True):
        offsets = _offsets(a, forward)
        phi, sigma = (1, a.stride) if forward else (a.stride, 1)
        low = min(offsets)
        separate = not in_place and _separate(a, size, sigma, offsets)
        distinct = sorted(set(offsets))
        if in_place:
            entry = {o: o for o in offsets}
        else:
            entry = {o: distinct.index(o) * size if separate else o - low for o in offsets}
        out, inner = (a.y, a.x) if forward else (a.x, a.y)
        step = a.y_step if forward else a.x_step
        stretches: list[Stretch] = []
        for residue in range(phi):
            taps = [(k, o) for k, o in enumerate(offsets) if forward or (k * a.dilation - a.pad) % a.stride == residue]
            count = max(0, ceil((out - residue) / phi))
            # A tap is met where 0 <= q*sigma + o < inner.
            met = {k: (max(0, -(o // sigma)), min(count, -((o - inner) // sigma))) for k, o in taps}
            cuts = sorted({0, count, *(min(max(c, 0), count) for ends in met.values() for c in ends if apart)})
            for start, stop in pairwise(cuts):
                here = [(k, entry[o]) for k, o in taps if not apart or (met[k][0] <= start and stop <= met[k][1])]
                stretches.append(Stretch(residue, start, stop, tuple(here)))
        band = (0, sigma) if in_place else (0, 1) if separate else (low, sigma)
        walks.append(Walk(out, phi, sigma, step, size, a.k, *band, tuple(stretches)))
    return tuple(walks)


def _separate(a: Axis, box: int, sigma: int, offsets: list[int]) -> bool:
    """Whether a band holds one run per tap because the span that the taps cover is mostly not read."""
    return box * a.k < (box - 1) * sigma + max(offsets) - min(offsets) + 1


def _packed(a: Axis, w: Walk, forward: bool, in_place: bool) -> Packed:
    """How the input of an axis is copied for a box."""
    size, stride = (a.x, a.x_step) if forward else (a.y, a.y_step)
    offsets = _offsets(a, forward)
    if in_place:
        return Packed(size, stride, 1)
    if _separate(a, w.box, w.sigma, offsets):
        return Packed(size, stride, w.box, w.sigma, tuple(sorted(set(offsets))))
    return Packed(size, stride, (w.box - 1) * w.sigma + _reach(a, forward))


def _phases(
    axes: tuple[Axis, ...], walks: tuple[Walk, ...], step: Sequence[int]
) -> tuple[tuple[Phase, ...], tuple[tuple[int, int], ...]]:
    """The phases of the output and, in their order, the taps each meets: (which tap, elements into the band)."""
    phases: list[Phase] = []
    meetings: list[tuple[int, int]] = []
    for combo in product(*(w.stretches for w in walks)):
        mine = []
        for taps in product(*(s.taps for s in combo)):
            number = 0
            for (k, _), a in zip(taps, axes, strict=True):
                number = number * a.k + k
            mine.append((number, sum(e * s for (_, e), s in zip(taps, step, strict=True))))
        ends = zip(*((s.residue, s.start, s.stop) for s in combo), strict=True)
        phases.append(Phase(len(meetings), len(mine), *(tuple(e) for e in ends)))
        meetings += mine
    return tuple(phases), tuple(meetings)


def _reduce(p: Problem, target: Target, threads: int, turned: Problem | None = None) -> Plan:
    why: list[str] = []
    operands = ("x", "y", "w")
    if turned is not None:
        operands = ("w", "x", "y") if turned.wanted == "y" else ("w", "y", "x")
        why.append("pixels in the lanes: a 1x1 convolution, and they lie together")
    shape = simplify(p)
    sum_dtype = DTYPES[p.dtype].accumulator
    item = sum_dtype.itemsize
    lanes = target.lanes(item)
    groups = p.g
    taps = prod(a.k for a in shape.axes)
    share: tuple[int, int] | None = None
    g, wy, wx = shape.w_channel
    dots = p.dtype == "bf16" and _dots(target)
    if dots and shape.x_channel[1] == shape.y_channel[1] == 1:
        shape = _by_images(shape)
    pairs_lie = dots and "y" in _paired_in_place(shape.axes[-1])
    row_side = "x" if turned is not None else _row_side(p, lanes, taps, wx == 1, pairs_lie)
    x_channel, y_channel = shape.x_channel, shape.y_channel
    if p.g > 1 and p.cy < lanes and lanes % p.cy == 0 and p.cx <= p.cy:
        share, groups, row_side = (p.cx, p.cy), 1, "x"
        crow, clane = p.cx, p.g * p.cy
        x_channel = (0, x_channel[1] if p.cx > 1 else x_channel[0])
        y_channel = (0, y_channel[1] if p.cy > 1 else y_channel[0])
        vectors = target.tile[1] if target.tile else 1
        most = 14 if target.registers >= 32 else 9
        step = max(1, most // vectors // p.cx)
        step = ceil(taps / ceil(taps / step))
        rows = step * p.cx
        why.append(f"{lanes // p.cy} groups side by side in a vector, {step} taps in a tile")
    else:
        crow, clane = (p.cx, p.cy) if row_side == "x" else (p.cy, p.cx)
        rows, vectors = tile(target, lanes, clane)
        heights = range(rows, max(rows - 3, 0), -1)
        if not target.tile:
            rows = min(heights, key=lambda r: ceil(crow / r) * r * shorter(target, heights[0], vectors, r))
        rows = min(rows, crow)
    pairs = dots and not share and shape.axes[-1].y > 1
    w_strides = (g, wx, wy) if row_side == "x" else (g, wy, wx)
    block = lanes * vectors
    lane_blocks = ceil(clane / block)

    # Rows are broadcast an element at a time, and each tap meets only what lies inside: nothing need be packed if
    # elements that are read one after another lie together.
    last_axis = shape.axes[-1]
    channel, pixel = (x_channel[1], last_axis.x_step) if row_side == "x" else (y_channel[1], last_axis.y_step)
    in_place = not share and DTYPES[p.dtype].numpy == sum_dtype and (1 in (channel, pixel) or crow == 1)
    in_place = in_place or (pairs and row_side in _paired_in_place(last_axis))
    if in_place:
        why.append(f"{row_side} is read in place: channels or pixels lie together, no conversion")
    # With one tap the other side is read once for each tile of rows: packing it would not pay.
    lane_channel = y_channel[1] if row_side == "x" else x_channel[1]
    lanes_lie = taps == 1 and lane_channel == 1 and clane % lanes == 0
    lanes_in_place = in_place and not pairs and turned is None and lanes_lie
    if lanes_in_place:
        why.append("so is the other side, whose channels fill whole vectors")

    together = min(4, lane_blocks) if share else 1  # blocks of one task, so that whole cache lines are read at a time
    if share:
        box = _reduce_box(shape.axes, target, block * item * together // 2, 2 * block * item * together)
    else:
        lane_bytes = block * (2 if pairs else item)
        if lanes_in_place:
            lane_bytes = lane_bytes * 7 // 4  # what is broadcast lies in lines of its own beside them
        box = _reduce_box(shape.axes, target, lane_bytes, pitch(min(crow, 256), lanes) * item)
    if pairs:
        why.append("pixels of bf16 two at a time (avx512_bf16)")
        box[-1] = min(up(box[-1], 2), shape.axes[-1].y)
    boxes = prod(ceil(a.y / b) for a, b in zip(shape.axes, box, strict=True))

    # Parts of the result for tasks: sums that stay in the second-level cache, and work for every thread.
    row_part, lane_part = crow, lane_blocks
    units = groups * ceil(lane_blocks / together) if share else groups
    slices = 1
    if units < 16 and boxes >= 32 and lane_blocks * crow * taps * block * item <= target.l2 // 3:
        # All sums of a group stay in the cache: tasks take parts of the pixels, always the same, so that each pixel is
        # packed once.
        most = max(4, min(16, SUMS // (lane_blocks * crow * taps * block * item) // 4 * 4))
        slices = min(ceil(most / units), boxes // 4)
        why.append(f"sums over pixels in {slices} parts, added in order")
        cut = [i for i, (a, b) in enumerate(zip(shape.axes, box, strict=True)) if b < a.y]
        if len(cut) == 1:  # as many boxes in each part
            axis = shape.axes[cut[0]]
            even = ceil(axis.y / up(boxes, slices))
            box[cut[0]] = up(even, 2) if pairs and axis is shape.axes[-1] else even
    if share:
        lane_part = together
    else:
        sums = taps * block * item
        while lane_part > 1 and lane_part * row_part * sums > target.l2 // 3:
            lane_part = ceil(lane_part / 2)
        while row_part > 4 * rows and lane_part * row_part * sums > target.l2 // 3:
            row_part = ceil(row_part / 2)
        lane_band = (prod(box) if row_side == "x" else _entries(shape.axes, box)) * block * item
        room = ROOM if turned is None else target.l2 // 4
        while lane_part > 1 and lane_part * lane_band > room:
            lane_part = ceil(lane_part / 2)

        def tasks() -> int:
            return groups * slices * ceil(crow / row_part) * ceil(lane_blocks / lane_part)

        # Tasks of equal size are as many as the threads, or a multiple; of unequal size, a few more.
        uneven = ceil(clane / lanes) % vectors > 0
        while tasks() < 8 * threads and (tasks() % threads or (uneven and tasks() < 2 * threads)):
            if lane_part > 1:
                lane_part = ceil(lane_part / 2)
            elif row_part > (4 if tasks() > threads else 2) * rows:
                row_part = min(row_part - 1, ceil(crow / (ceil(crow / row_part) + 1)))
            else:
                break
        row_part = ceil(crow / ceil(crow / row_part))
        row_part = max(row_part, min(rows, crow))
        if not target.tile:
            rows = min(heights, key=lambda r: ceil(row_part / r) * r * shorter(target, heights[0], vectors, r))
            rows = min(rows, row_part)

    x_pitch = reduce_pitch(row_side == "x", row_part, lanes, block, share, "x")
    y_pitch = reduce_pitch(row_side == "y", row_part, lanes, block, share, "y")
    y_packs = tuple(Packed(a.y, a.y_step, b) for a, b in zip(shape.axes, box, strict=True))
    x_in_place, y_in_place = (in_place, lanes_in_place) if row_side == "x" else (lanes_in_place, in_place)
    walks = _walks(shape.axes, True, box, (False,) * AXES, x_in_place)
    x_packs = tuple(_packed(a, w, True, x_in_place) for a, w in zip(shape.axes, walks, strict=True))
    x_join, y_join = (0, 1), (0, 1)
    if pairs:
        # A last pixel of y without a partner gets a zero. Where taps lie beside each other along a row, every pixel of
        # x is the first of a pair; else every other one.
        next_ = walks[-1].stride_in_band
        x_join, y_join = (next_, 2 * next_ if shape.axes[-1].k == 1 else 1), (1, 2)
        y_packs = (*y_packs[:-1], replace(y_packs[-1], count=up(box[-1], 2)))
        x_packs = (*x_packs[:-1], replace(x_packs[-1], count=up(x_packs[-1].count, x_join[1])))
    x_steps = [a.x_step for a in shape.axes] if x_in_place else _joined_steps(x_packs, x_join[1], x_pitch)
    y_steps = [a.y_step for a in shape.axes] if y_in_place else _joined_steps(y_packs, y_join[1], y_pitch)
    x_walk = [w.stride_in_band * s for w, s in zip(walks, x_steps, strict=True)]
    y_walk = list(y_steps)
    if pairs:
        x_walk[-1] = 2 * next_ * x_steps[-1] // (1 if x_in_place else x_join[1])
        y_walk[-1] = 2 * y_steps[-1] // (1 if y_in_place else 2)
    band = prod(q.extent for q in x_packs) * x_pitch * item
    if band > max(64 << 20, 4 * p.bytes):
        return Declined(f"a band of {band >> 20} MiB for one box of pixels")
    _, meetings = _phases(shape.axes, walks, x_steps)
    reach = [
        tuple(
            (max(0, -(o // a.stride)), min(a.y, -((o - a.x) // a.stride)))
            for a, o in zip(shape.axes, each, strict=True)
        )
        for each in product(*(_offsets(a, True) for a in shape.axes))
    ]
    stream = _streams(p, target)
    if stream:
        why.append("results go past the caches, which they exceed")
    ahead = None
    if p.bytes > target.l2:
        lane_channels = min(clane, lane_part * block)
        calls = lane_part * (ceil(taps / (rows // p.cx)) if share else ceil(row_part / rows) * taps)
        x_channels, y_channels = (row_part, lane_channels) if row_side == "x" else (lane_channels, row_part)
        if share:
            x_channels, y_channels = lane_channels // p.cy * p.cx, lane_channels
        x_span = [
            min((b - 1) * a.stride + (a.k - 1) * a.dilation + 1, a.x) for a, b in zip(shape.axes, box, strict=True)
        ]
        x_lines = _lines(x_span, [a.x_step for a in shape.axes], x_channels, x_channel[1], DTYPES[p.dtype].size)
        y_lines = _lines(box, [a.y_step for a in shape.axes], y_channels, y_channel[1], DTYPES[p.dtype].size)
        ahead = Ahead((x_lines, y_lines) if turned is None else (y_lines,), calls, prod(box))
        why.append("the next box is asked for while one is summed")
    return Reduce(
        dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if item == 4 else "double", lanes=lanes, rows=rows,
        vectors=vectors, groups=groups, row_side=row_side, crow=crow, clane=clane, share=share, pairs=pairs,
        x_join=x_join, y_join=y_join, sizes_y=tuple(a.y for a in shape.axes), box=tuple(box),
        x_packs=x_packs, x_low=tuple(w.low for w in walks),
        x_sigma=tuple(w.sigma for w in walks),
        x_walk=tuple(x_walk), y_packs=y_packs, y_walk=tuple(y_walk), in_place=in_place,
        lanes_in_place=lanes_in_place, row_part=row_part, lane_part=lane_part, x_channel=x_channel,
        y_channel=y_channel, w_strides=w_strides,
        taps=_tap_offsets(shape.axes), entries=tuple(e for _, e in meetings), reach=tuple(reach),
        slices=slices, ahead=ahead, operands=operands, stream=stream,
        accumulate=p.accumulate, half=_half(target), threads=threads, why=tuple(why),
    )  # fmt: skip


def _by_images(shape: Shape) -> Shape:
    """The same problem with pairs of images innermost, if pairs along a row would often lack a partner."""
    unused, images, *_, row = shape.axes
    ends = [(max(0, -(o // row.stride)), min(row.y, -((o - row.x) // row.stride))) for o in _offsets(row, True)]
    met = [(low, high) for low, high in ends if low < high]
    places = sum(2 * (ceil(high / 2) - low // 2) for low, high in met)
    filled = sum(high - low for low, high in met) > 0.97 * places
    if filled or not (unused.plain and unused.x == 1 and images.plain and images.x % 2 == 0):
        return shape
    half = images.x // 2
    outer = replace(images, x=half, y=half, x_step=2 * images.x_step, y_step=2 * images.y_step)
    return replace(shape, axes=(outer, *shape.axes[2:], replace(images, x=2, y=2)))


def _paired_in_place(a: Axis) -> set[str]:
    """The sides whose pairs of neighbouring pixels are met whole, as they lie: no odd one, none with padding."""
    sides = {"y"} if a.y_step == 1 and a.y % 2 == 0 else set()
    return sides | ({"x"} if a.x_step == 1 and a.plain and a.x % 2 == 0 else set())


def _joined_steps(packs: tuple[Packed, ...], step: int, pitch: int) -> list[int]:
    """Elements between neighbours along each axis of a band that has an entry for every `step` pixels of a row."""
    *outer, last = entry_steps(packs)
    return [*(s // step * pitch for s in outer), last * pitch]


def _lines(
    counts: Sequence[int], steps: Sequence[int], channels: int, channel_step: int, size: int
) -> tuple[tuple[int, int], ...]:
    """The lines of a box of pixels with so many channels, as a region to be fetched: what lies together is one run."""
    dims = sorted(
        (abs(step) * size, count) for step, count in ((channel_step, channels), *zip(steps, counts, strict=True))
    )
    run, outer = size, list[tuple[int, int]]()
    for step, count in dims:
        if step <= max(run, LINE) and not outer:
            run += (count - 1) * step
        elif count > 1:
            outer.append((count, step))
    return (*reversed(outer), (ceil(run / LINE), LINE))


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


def _reduce_box(axes: tuple[Axis, ...], target: Target, lane_bytes: int, row_bytes: int) -> list[int]:
    """Pixels that are packed at a time: the lane side in the first-level cache, the row side in the second.

    It must not depend on the number of threads: pixels are summed in the order of the boxes.
    """
    most = max(16, target.l1 * 7 // 8 // lane_bytes)
    box = [1] * len(axes)
    for i in reversed(range(len(axes))):

        def fits(b: int, i: int = i) -> bool:
            trial = [*box[:i], b, *box[i + 1 :]]
            return prod(trial) <= most and _entries(axes, trial) * row_bytes <= target.l2 // 2

        box[i] = _longest(axes[i].y, fits)
        if box[i] < axes[i].y:
            break
    return box


def _entries(axes: tuple[Axis, ...], box: Sequence[int]) -> int:
    """Pixels of x that a box of y meets."""
    return prod(min((b - 1) * a.stride + (a.k - 1) * a.dilation + 1, b * a.k) for b, a in zip(box, axes, strict=True))


def _longest(size: int, fits: Callable[[int], bool]) -> int:
    """An axis cut into the fewest pieces that fit: how long they are, or 1 if none fits."""
    low, high = 1, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return ceil(size / ceil(size / low))
