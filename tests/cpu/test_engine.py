"""The kernels against the reference, bit for bit: random problems, and sizes with a reason.

Every tensor and the workspace lie between unmapped pages, inputs cannot be written to, and the workspace is full of
NaNs. CONVGRAD_TEST_PROBLEMS=5000 checks so many problems; `python tests/cpu/campaign.py` replays one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from convgrad.backend import Refusal
from convgrad.cpu.depthwise.records import ChannelsInLanes, PixelsInLanes
from convgrad.cpu.gather.records import Gather, TaskOrder, WeightPacking
from convgrad.cpu.pack.box import Pairing
from convgrad.cpu.plan.records import Plan
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.target import Target
from convgrad.cpu.wgrad.records import Mode, WeightGradient
from convgrad.spec.problem import Problem
from marks import slow_but

from .campaign import INVENTED, run, seed_of, teams
from .named import DECLINED, FEW_CHANNELS, NAMED
from .problems import however_small, numbered, targets

TARGETS = targets()
NAMES = [*TARGETS, INVENTED]
EACH = -(-int(os.environ.get("CONVGRAD_TEST_PROBLEMS", "224")) // len(NAMES))


# Some machines share a process, which takes as long to start as a few problems.
TOGETHER = ["native", *(", ".join(NAMES[at : at + 3]) for at in range(1, len(NAMES), 3))]


@pytest.mark.parametrize("names", slow_but(["native"], TOGETHER))
def test_random_problems(names: str) -> None:
    """Each machine gets problems of its own."""
    firsts = {name: NAMES.index(name) * EACH for name in names.split(", ")}
    _, failures = run([(name, seed) for name, first in firsts.items() for seed in range(first, first + EACH)])
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["without halves", "vector of 3, native in small caches, halves"])
def test_sizes_with_a_reason(names: str) -> None:
    """All of them on one machine, and on the others those that go ways there that none goes on the ones before."""
    texts, targets = list(NAMED.values()), names.split(", ")
    items = [(names, text) for text in texts] if len(targets) == 1 else going_new_ways(texts, targets, PATHS)
    declined, failures = run(items)
    assert not failures, "\n".join(failures)
    assert not declined, "\n".join(declined)


def going_new_ways(
    texts: Sequence[str], targets: Sequence[str], every: dict[str, Callable[[Plan], bool]]
) -> list[tuple[str, str]]:
    """The machines and problems whose plans take a path that none before them takes, for the same wanted tensor.

    All problems are checked on one machine apart from these. What is left out here would have code compiled of paths
    that were checked there one by one, and together on that machine. Every kind of plan is made for each machine.
    """
    seen: set[tuple[str, ...]] = set()
    chosen = []
    for target, text in itertools.product(targets, texts):
        p = Problem.parse(text)
        with however_small():
            plans = [make_plan(p, TARGETS[target], team) for team in teams(seed_of(text))]
        kind = p.wanted, type(plans[0]).__name__
        ways = {(*kind, target), *((*kind, path) for path, test in every.items() if any(map(test, plans)))}
        if ways - seen:
            chosen.append((target, text))
        seen |= ways
    return chosen


@pytest.mark.slow
def test_few_channels_over_strides() -> None:
    """Each number of channels is packed by shuffles of its own, each stride by others.

    They meet each other with both kernels, and with each type with one. The shuffles of these vectors are what is asked
    about, on a machine that nobody has, whose code is translated quickly.
    """
    kernels = zip(FEW_CHANNELS[::2], FEW_CHANNELS[1::2], strict=True)
    _, failures = run([("native in small caches", both[(i // 24 + i // 4 + i) % 2]) for i, both in enumerate(kernels)])
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("text", "reason"), DECLINED.items())
def test_what_the_engine_leaves_to_the_reference(text: str, reason: str) -> None:
    plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
    assert isinstance(plan, Refusal)
    assert reason in plan.reason
    assert plan.instead


def _gather(test: Callable[[Gather], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, Gather) and test(plan)


def _wgrad(test: Callable[[WeightGradient], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, WeightGradient) and test(plan)


def _pixels(test: Callable[[PixelsInLanes], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, PixelsInLanes) and test(plan)


def _channels(test: Callable[[ChannelsInLanes], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, ChannelsInLanes) and test(plan)


def _half_width(plan: Plan) -> bool:
    """Whether vectors are of half the width."""
    return not isinstance(plan, Refusal) and any(why.startswith("vectors of ") for why in plan.why)


# What the problems of this file must axis_map, so that the tests above mean something.
PATHS: dict[str, Callable[[Plan], bool]] = {
    "gather in place": _gather(lambda g: g.source.in_place),
    "gather in place, in pairs": _gather(lambda g: g.source.in_place and g.sums.pairs),
    "gather packed, in pairs": _gather(lambda g: not g.source.in_place and g.sums.pairs),
    "gather through a stage": _gather(lambda g: g.output.staged),
    "gather in chunks": _gather(lambda g: g.sums.chunks > 1),
    "gather in chunks of pairs": _gather(lambda g: g.sums.chunks > 1 and g.sums.pairs),
    "a last chunk that is shorter": _gather(lambda g: g.sums.chunks > 1 and g.layer.cin % g.sums.chunk != 0),
    "gather in boxes, the last one smaller": _gather(
        lambda g: any(w.boxes > 1 and -(-w.out // w.out_stride) % w.box for w in g.cut.maps)
    ),
    "gather in blocks of channels": _gather(lambda g: g.tile.blocks > 1 and g.task.parts > 1),
    "tasks with unequal blocks": _gather(lambda g: g.task.parts > 1 and g.tile.blocks % g.task.parts != 0),
    "weights packed by each thread": _gather(lambda g: g.task.weights is WeightPacking.THREAD_ALL and g.cut.boxes > 1),
    "weights packed by each thread, in blocks": _gather(
        lambda g: g.task.weights is WeightPacking.THREAD_ALL and g.tile.blocks > 1
    ),
    "weights packed by each thread, in groups": _gather(
        lambda g: g.task.weights is WeightPacking.THREAD_ALL and g.layer.groups > 1 and g.sums.pairs
    ),
    "weights packed by each thread, and a bias": _gather(
        lambda g: g.task.weights is WeightPacking.THREAD_ALL and g.layer.bias is not None
    ),
    "parts first": _gather(lambda g: g.task.order is TaskOrder.PART and g.cut.boxes > 1),
    "parts of the same pixels": _gather(
        lambda g: g.task.parts > 1 and g.task.order is TaskOrder.BOX and g.cut.boxes > 1
    ),
    "high tiles of one whole vector": _gather(lambda g: g.lanes == 16 and g.vectors == 1 and g.rows > 8),
    "high tiles of sums of one whole vector": _wgrad(lambda r: r.lanes == 16 and r.vectors == 1 and r.rows > 8),
    "weights packed by who needs them": _gather(
        lambda g: g.task.order is TaskOrder.CHANNEL and g.tile.blocks > 1 and g.sums.chunks > 1
    ),
    "weights packed by who needs them, in groups": _gather(
        lambda g: g.task.order is TaskOrder.CHANNEL and g.layer.groups > 1
    ),
    "weights packed by who needs them, in pairs": _gather(lambda g: g.task.order is TaskOrder.CHANNEL and g.sums.pairs),
    "weights packed by who needs them, for many boxes": _gather(
        lambda g: g.task.order is TaskOrder.CHANNEL and g.cut.boxes > 1 and g.sums.chunks > 1
    ),
    "weights packed by who needs them, input in place": _gather(
        lambda g: g.task.order is TaskOrder.CHANNEL and g.source.in_place and g.sums.chunks > 1
    ),
    "weights packed by who needs them, with prefetch": _gather(
        lambda g: g.task.order is TaskOrder.CHANNEL and g.prefetch is not None
    ),
    "weights packed by who needs them, prefetching more": _gather(lambda g: g.weights_step > 0 and g.cut.boxes > 1),
    "weights packed by who needs them, for one box": _gather(lambda g: g.weights_step > 0 and g.cut.boxes == 1),
    "a shorter tile": _gather(lambda g: g.cut.short_rows > 0 and not g.tile.last_vectors),
    "a shorter tile of a narrower block": _gather(
        lambda g: g.cut.short_rows > 0 and g.tile.last_vectors > 0 and g.tile.blocks > 1
    ),
    "several groups in a task": _gather(lambda g: g.task.groups > 1 and g.group_parts > 1 and g.prefetch is not None),
    "several groups in a task, fewer in the last": _gather(lambda g: g.layer.groups % g.task.groups > 0),
    "gather with groups side by side": _gather(lambda g: g.tile.lane_groups is not None),
    "gather with groups of several side by side": _gather(
        lambda g: g.tile.lane_groups is not None and g.tile.lane_groups[0] > 1
    ),
    "phases of a stride": _gather(lambda g: any(w.out_stride > 1 for w in g.cut.maps)),
    "phases without a tap": _gather(lambda g: any(p.count == 0 for p in g.cut.phases)),
    "borders apart": _gather(lambda g: any(len(w.segments) > w.out_stride for w in g.cut.maps)),
    "rows packed in a run for each tap": _gather(lambda g: any(len(p.offsets) > 1 for p in g.cut.packs)),
    "past the caches": _gather(lambda g: g.output.stream and not g.output.staged),
    "past the caches from a stage": _gather(lambda g: g.output.stream and g.output.staged),
    "past the caches, pixels in the lanes": _wgrad(lambda r: r.output.stream and r.tensors.names[0] == "w"),
    "prefetching": _gather(lambda g: g.prefetch is not None),
    "prefetching spread over the products": _gather(lambda g: g.prefetch is not None and not g.prefetch.burst),
    "prefetching both sides": _wgrad(lambda r: r.prefetch is not None and len(r.prefetch.regions) == 2),
    "pixels in the lanes": _wgrad(lambda r: r.tensors.names == ("w", "x", "y") and not r.roles.pairs),
    "a last block with fewer vectors": _gather(lambda g: g.tile.last_vectors > 0 and g.tile.blocks > 1),
    "a last block with fewer vectors, weights": _wgrad(
        lambda r: r.last_vectors > 0 and r.roles.blocks > 1 and not r.output.direct
    ),
    "a last block with fewer vectors, direct": _wgrad(
        lambda r: r.last_vectors > 0 and r.roles.blocks > 1 and r.output.direct
    ),
    "pixels in the lanes, backwards": _wgrad(lambda r: r.tensors.names == ("w", "y", "x") and not r.roles.pairs),
    "pixels in the lanes, in pairs": _wgrad(lambda r: r.tensors.names[0] == "w" and r.roles.pairs),
    "pixels in the lanes, summed in boxes": _wgrad(lambda r: r.output.direct and max(r.boxes.counts) > 1),
    "pixels in the lanes, where they lie": _wgrad(
        lambda r: r.tensors.names[0] == "w" and r.sides[1].mode is Mode.IN_PLACE
    ),
    "pixels in the lanes, packed": _wgrad(lambda r: r.tensors.names[0] == "w" and r.sides[1].mode is not Mode.IN_PLACE),
    "pixels in the lanes, added": _wgrad(lambda r: r.tensors.names[0] == "w" and r.output.accumulate),
    "rows in place whose channels are strided": _wgrad(
        lambda r: r.sides[0].mode is Mode.IN_PLACE and r.sides[0].row_step > 1
    ),
    "few channels, y": _gather(lambda g: g.tile.fold is not None and g.layer.wanted == "y"),
    "few channels, x": _gather(lambda g: g.tile.fold is not None and g.layer.wanted == "x" and not g.sums.pairs),
    "few channels, x in pairs": _gather(lambda g: g.tile.fold is not None and g.layer.wanted == "x" and g.sums.pairs),
    "few channels in several vectors": _gather(lambda g: g.tile.fold is not None and g.vectors > 1),
    "few channels, sums in chunks": _gather(lambda g: g.tile.fold is not None and g.sums.chunks > 1),
    "few channels, a last one cut off": _gather(
        lambda g: (
            g.tile.fold is not None and any(s % f for s, f in zip(g.tile.fold.sizes, g.tile.fold.factors, strict=True))
        )
    ),
    "an odd number of channels in pairs": _gather(lambda g: g.sums.odd),
    "channels on their own, y": _channels(lambda s: s.layer.wanted == "y"),
    "channels on their own, x in phases": _channels(
        lambda s: s.layer.wanted == "x" and max(m.out_stride for m in s.maps) > 1
    ),
    "channels on their own, w": _channels(lambda s: s.layer.wanted == "w" and s.slices > 1),
    "channels on their own, past the caches": _channels(lambda s: s.stream),
    "rows of one channel, y": _pixels(lambda p: p.layer.wanted == "y" and p.layer.bias is not None),
    "rows of one channel, x": _pixels(lambda p: p.layer.wanted == "x" and p.tasks > 1),
    "rows of one channel, in three axes": _pixels(lambda p: p.packed.kernel[0] > 1),
    "rows of one channel, a last tile of fewer": _pixels(lambda p: p.result.sizes[1] % p.rows > 0),
    "rows of one channel, several tiles wide": _pixels(lambda p: p.result.sizes[2] > p.block),
    "weights in place on x": _wgrad(lambda r: r.sides[0].mode is Mode.IN_PLACE and r.roles.row_side == "x"),
    "weights in place on y": _wgrad(lambda r: r.sides[0].mode is Mode.IN_PLACE and r.roles.row_side == "y"),
    "weights in place on both sides": _wgrad(lambda r: r.sides[1].mode is Mode.IN_PLACE and r.roles.row_side == "x"),
    "weights in place on both sides, rows of y": _wgrad(
        lambda r: r.sides[1].mode is Mode.IN_PLACE and r.roles.row_side == "y"
    ),
    "weights packed, rows of x": _wgrad(lambda r: r.sides[0].mode is not Mode.IN_PLACE and r.roles.row_side == "x"),
    "weights packed, rows of y": _wgrad(lambda r: r.sides[0].mode is not Mode.IN_PLACE and r.roles.row_side == "y"),
    "weights in pairs": _wgrad(lambda r: r.roles.pairs),
    "pairs read in place on x": _wgrad(
        lambda r: r.roles.pairs and r.sides[0].mode is Mode.IN_PLACE and r.roles.row_side == "x"
    ),
    "pairs read in place on y": _wgrad(
        lambda r: r.roles.pairs and r.sides[0].mode is Mode.IN_PLACE and r.roles.row_side == "y"
    ),
    "pairs of contiguous channels": _wgrad(lambda r: Pairing.CHANNELS in (r.x.pack.pairing, r.y.pack.pairing)),
    "pairs of contiguous pixels": _wgrad(lambda r: Pairing.PIXELS in (r.x.pack.pairing, r.y.pack.pairing)),
    "pairs by way of a copy": _wgrad(lambda r: r.x.pairs_by_copy or r.y.pairs_by_copy),
    "pairs under taps that are evenly spaced": _wgrad(
        lambda r: (
            r.roles.pairs
            and r.x.pair == (1, 2)
            and r.sides[0].mode is not Mode.IN_PLACE
            and r.x.packs[3].count > r.boxes.box[3] + 1
        )
    ),
    "pairs of images": _wgrad(lambda r: r.roles.pairs and r.boxes.sizes[-1] == 2 and r.boxes.sizes[0] > 1),
    "pairs of images, channels first": _wgrad(
        lambda r: r.roles.image_pairs and r.x.mode is Mode.ROWS and r.y.pack.pairing is Pairing.IMAGES
    ),
    "pairs of images, rows of y": _wgrad(
        lambda r: r.roles.image_pairs and r.y.mode is Mode.ROWS and r.x.pack.pairing is Pairing.IMAGES
    ),
    "pairs of images, a run for each tap": _wgrad(lambda r: r.roles.image_pairs and len(r.x.packs[2].offsets) > 1),
    "rows as they lie": _wgrad(lambda r: r.x.mode is Mode.ROWS and r.roles.pairs and not r.roles.image_pairs),
    "rows as they lie, of y": _wgrad(lambda r: r.y.mode is Mode.ROWS and r.roles.pairs and not r.roles.image_pairs),
    "rows as they lie, converted": _wgrad(lambda r: r.sides[0].mode is Mode.ROWS and not r.roles.pairs),
    "rows as they lie, thinned": _wgrad(
        lambda r: (
            r.x.mode is Mode.ROWS and r.roles.pairs and r.x.packs[3].step > 2 and r.x.packs[3].offsets == (0, 1, 2)
        )
    ),
    "rows as they lie, many runs": _wgrad(
        lambda r: r.x.mode is Mode.ROWS and r.roles.pairs and len(r.x.packs[3].offsets) > 8
    ),
    "rows of y that follow each other": _wgrad(lambda r: len(r.y.starts[-1]) > 1 and r.y.mode is not Mode.IN_PLACE),
    "every other pixel the first of a pair": _wgrad(lambda r: r.roles.pairs and r.x.pair[1] > 1),
    "weights in pairs, an odd width": _wgrad(lambda r: r.roles.pairs and r.boxes.sizes[-1] % 2 == 1),
    "weights in boxes, the last one smaller": _wgrad(
        lambda r: any(n % b for n, b in zip(r.boxes.sizes, r.boxes.box, strict=True))
    ),
    "parts of the rows": _wgrad(lambda r: r.parts.row_parts > 1),
    "parts of the rows that overlap": _wgrad(
        lambda r: r.parts.row_parts > 1 and r.roles.row_channels % r.parts.row_part != 0
    ),
    "parts of the lanes": _wgrad(lambda r: r.parts.lane_parts > 1),
    "slices of the sum": _wgrad(lambda r: r.boxes.slices > 1),
    "slices of the sum, in pairs": _wgrad(lambda r: r.boxes.slices > 1 and r.roles.pairs),
    "weights with groups side by side": _wgrad(lambda r: r.roles.lane_groups is not None),
    "weights with groups side by side, slices": _wgrad(
        lambda r: r.roles.lane_groups is not None and r.boxes.slices > 1
    ),
    "rows of x packed in a run for each tap": _wgrad(lambda r: any(len(p.offsets) > 1 for p in r.x.packs)),
    "gather without a loop over channels": _gather(
        lambda g: g.cut.unrolled and not g.sums.pairs and g.layer.groups > 1
    ),
    "gather without a loop over channels, in pairs": _gather(lambda g: g.cut.unrolled and g.sums.pairs),
    "gather without a loop over channels, few channels": _gather(lambda g: g.cut.unrolled and g.tile.fold is not None),
    "gather by vectors of half the width": _gather(lambda g: _half_width(g) and g.tile.blocks > 1),
    "gather by vectors of half the width, in pairs": _gather(lambda g: _half_width(g) and g.sums.pairs),
    "gather by vectors of half the width, few channels": _gather(lambda g: _half_width(g) and g.tile.fold is not None),
    "gather by vectors of half the width, side by side": _gather(
        lambda g: _half_width(g) and g.tile.lane_groups is not None
    ),
    "weights by vectors of half the width": _wgrad(lambda r: _half_width(r) and not r.roles.pairs),
    "weights by vectors of half the width, in pairs": _wgrad(lambda r: _half_width(r) and r.roles.pairs),
    "weights by vectors of half the width, side by side": _wgrad(
        lambda r: _half_width(r) and r.roles.lane_groups is not None
    ),
    "channels on their own, vectors of half the width": _channels(_half_width),
    "rows of one channel, vectors of half the width": _pixels(_half_width),
    "a tile of taps that is not full": _wgrad(
        lambda r: r.roles.lane_groups is not None and len(r.taps.weights) % r.parts.tap_step != 0
    ),
}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """The plans of all problems above; with pairs and vectors of half the width, even where this machine has none."""
    features = TARGETS["native"].features + ",+avx512bf16"
    paired = replace(TARGETS["native"], width=64, registers=32, features=features, double_pumped=False)
    halves = replace(paired, double_pumped=True)
    small = TARGETS["native in small caches"]
    machines: list[Target] = [
        paired if name == "native" else halves if name == "halves" else t for name, t in TARGETS.items()
    ]
    drawn = [(numbered(i * EACH + j), t) for i, t in enumerate(machines) for j in range(min(EACH, 25))]
    all_of_them = (paired, halves, TARGETS["vector of 3"], small)
    named = [(Problem.parse(text), t) for text in NAMED.values() for t in all_of_them]
    return [make_plan(p, t, threads) for p, t in [*drawn, *named] for threads in (1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_problems_walk_every_path(path: str, plans: list[Plan]) -> None:
    assert any(map(PATHS[path], plans))
