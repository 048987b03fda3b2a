"""Plans: pure values that print themselves, of bounded workspace, with every product once on any number of threads."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, product
from math import ceil, prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from convgrad.backend import Refusal
from convgrad.cpu.depthwise.records import ChannelsInLanes, PixelsInLanes
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.plan.axes import Axis, simplify, spans
from convgrad.cpu.plan.records import Made, Plan
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.plan.tuning import tuning
from convgrad.cpu.target import Target
from convgrad.cpu.wgrad.records import WeightGradient
from convgrad.spec.descriptors import Descriptor, read
from convgrad.spec.problem import Problem
from marks import slow_but

from .machines import AVX512
from .named import NAMED
from .problems import DTYPE_NAMES, numbered, targets

TARGETS = targets()
REAL = {name: TARGETS[name] for name in ("halves", "without halves", "avx2", "baseline") if name in TARGETS}
CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*conv/shapes_*"))
DRAWN = [numbered(seed) for seed in range(30000, 30200)]
MIB = 1 << 20
T = TypeVar("T")


def from_descriptor(d: Descriptor, wanted: str, dtype: str, nxc: bool) -> Problem:
    """The problem of a line of the corpus."""
    (x, y), (cx, cy) = ((d.o, d.i), (d.oc, d.ic)) if d.transposed else ((d.i, d.o), (d.ic, d.oc))
    sizes = zip("xwysdp", (x, d.k, y, d.s, d.dilations, d.p), strict=True)
    words = [wanted, dtype, f"n{d.mb}", f"g{d.groups}", f"cx{cx // d.groups}", f"cy{cy // d.groups}"]
    words += [f"{key}{'x'.join(map(str, values))}" for key, values in sizes]
    return Problem.parse(" ".join(words + ["x@nxc", "y@nxc", "w@xio"] * nxc))


def large(rng: np.random.Generator) -> Problem:
    """A problem of any size, far larger than anyone would compute in a test."""

    def whole(low: int, high: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high + 0.49)))))

    rank = int(rng.integers(1, 4))
    sizes = []
    for _ in range(rank):
        k, s, d = whole(1, (100, 15, 7)[rank - 1]), whole(1, (60, 16, 8)[rank - 1]), whole(1, 8)
        x, pad = whole(1, (100000, 512, 64)[rank - 1]), int(rng.integers(0, k * d + 1))
        sizes.append((x, k, max(1, (x + 2 * pad - (k - 1) * d - 1) // s + 1), s, d, pad))
    g = 1 if rng.random() < 0.6 else whole(2, 512)
    words = [str(rng.choice(list("xwy"))), str(rng.choice(DTYPE_NAMES)), f"n{whole(1, 64)}", f"g{g}"]
    words += [f"{key}{whole(1, 4096 // g + 1)}" for key in ("cx", "cy")]
    words += [
        f"{key}{'x'.join(map(str, values))}" for key, values in zip("xwysdp", zip(*sizes, strict=True), strict=True)
    ]
    return Problem.parse(" ".join(words + ["x@nxc", "y@nxc", "w@xio"] * int(rng.integers(0, 2))))


def dealt(values: Sequence[T], target: str, targets: Iterable[str]) -> Sequence[T]:
    """The values that a machine gets, of those that are dealt out to all of them."""
    names = list(targets)
    return values[names.index(target) :: len(names)]


@pytest.mark.parametrize("target", TARGETS)
def test_plans_are_values(target: str) -> None:
    for p in dealt(DRAWN, target, TARGETS):
        first, second = (make_plan(p, replace(TARGETS[target]), 2) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)


def check_workspace(p: Problem, target: Target, threads: int) -> None:
    """No more than four times the largest tensor, in accumulators, and a fixed amount, in all and for each thread."""
    plan = make_plan(p, target, threads)
    if not isinstance(plan, Refusal):
        largest = plan.item * max(p.size(role) for role in ("x", "w", "y"))
        bound = 4 * largest + 64 * MIB + 6 * MIB * plan.threads
        assert plan.workspace <= bound, f"{p} on {threads} threads: {plan.buffers}"
        assert plan.threads <= min(threads, plan.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("target", REAL)
def test_workspace_is_bounded(target: str) -> None:
    rng = np.random.default_rng(1)
    some = dealt([*DRAWN, *(large(rng) for _ in range(600))], target, REAL)
    tiny_boxes = [  # each of them rounded up to vectors
        Problem.parse("y bf16 n2 g8 cx17 cy1024 x28x224 w9x17 y38x208 s1x1 d1x1 p9x0 x@nxc y@nxc"),
        Problem.parse("y f32 n1 g1 cx17 cy512 x128x128 w41x41 y128x128 s1x1 d1x1 p20x20"),
    ]
    for p in [*some, *tiny_boxes]:
        for threads in (1, 2, 64):
            check_workspace(p, REAL[target], threads)


@pytest.mark.parametrize("target", REAL)
def test_threads_that_would_need_too_much_memory_are_left_out(target: str) -> None:
    p = Problem.parse("y f32 n2 g54158 cx1 cy1 x1x8 w4x20 y1x1 s1x5 d1x1 p0x3")  # 20 MiB to pack for each
    for threads in (1, 2, 16, 64):
        plan = make_plan(p, REAL[target], threads)
        check_workspace(p, REAL[target], threads)
        assert not isinstance(plan, Refusal)
        fewer = f"{plan.threads} of {threads} threads"
        assert (plan.threads < threads) == (threads >= 16) == any(fewer in reason for reason in plan.why)


def test_lanes_without_a_channel_are_not_packed_by_the_hundred_megabytes() -> None:
    for channels, declined in ((1, True), (5, False)):
        p = Problem.parse(f"x f32 n1 g1 cx{channels} cy4096 x30x30 w30x30 y18x18 s1x1 d1x1 p0x0")
        plan = make_plan(p, TARGETS["without halves"], 2)
        assert isinstance(plan, Refusal) == (declined and TARGETS["without halves"].width == 64)
        check_workspace(p, TARGETS["without halves"], 2)
        check_workspace(p, TARGETS["halves"], 2)


@pytest.mark.skipif(not FILES, reason="the corpus is not here")
@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_workspace_of_real_layers(path: Path) -> None:
    """Here all channels fill vectors, or the weights are small: no more than twice the largest tensor, as f32.

    Each machine gets every type, layout and wanted tensor of some of the layers.
    """
    targets = list(REAL.values())
    descriptors = read(path, transposed=path.parent.name == "deconv").descriptors
    for i, d in enumerate(islice(descriptors, 0, None, max(1, len(descriptors) // 60))):
        for wanted in "xwy":
            p = from_descriptor(d, wanted, DTYPE_NAMES[i % 3], bool(i % 2))
            plan = make_plan(p, targets[i // 2 % len(targets)], 2)
            assert not isinstance(plan, Refusal), f"{p}: {plan}"
            largest = 4 * max(p.size(role) for role in ("x", "w", "y"))
            assert plan.workspace <= 2 * largest + 2 * 3 * MIB, f"{p}: {plan.buffers}"


def order(plan: Gather | WeightGradient | ChannelsInLanes | PixelsInLanes) -> tuple[Any, ...]:
    """Everything that decides in which order products are added, and which products with zeros are among them."""
    if isinstance(plan, PixelsInLanes):
        return plan.lanes, plan.packed.kernel, plan.packed.taps
    if isinstance(plan, ChannelsInLanes):
        assert plan.task_rows % plan.rows == 0
        return plan.tile, plan.maps, plan.slices
    if isinstance(plan, Gather):
        taps = [(s.residue, s.start, s.stop, tuple(k for k, _ in s.taps)) for m in plan.cut.maps for s in m.segments]
        return plan.sums, plan.tile.lane_groups, plan.lanes, tuple(taps)
    return plan.roles.row_side, plan.boxes, plan.roles.pairs, plan.roles.lane_groups, plan.lanes, plan.taps.ranges


def slices(plan: Plan) -> int:
    """Parts that a sum over pixels is cut into."""
    assert isinstance(plan, ChannelsInLanes | WeightGradient)
    return plan.slices if isinstance(plan, ChannelsInLanes) else plan.boxes.slices


# Sums over pixels that are taken in parts: many pixels, few weights.
SLICED = [
    "w f32 n8 g1 cx3 cy16 x128x128 w3x3 y128x128 s1x1 d1x1 p1x1",
    "w bf16 n8 g1 cx8 cy64 x99x99 w1x1 y99x99 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "w f32 n8 g32 cx1 cy1 x112x112 w3x3 y112x112 s1x1 d1x1 p1x1 x@nxc y@nxc",
]
# A few threads each pack weights of their own here, more of them share: boxes are cut otherwise, borders must not be.
OWNED = Problem.parse("x f32 n1 g1 cx1024 cy1024 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio")


SUMMED = ["halves", "without halves", "native in small caches", "baseline"]


@pytest.mark.parametrize("target", slow_but(["native in small caches"], SUMMED))
def test_sums_have_the_same_shape_on_any_number_of_threads(target: str) -> None:
    rng = np.random.default_rng(2)
    sliced = [Problem.parse(text) for text in SLICED]
    assert all(slices(make_plan(p, TARGETS["native"], 2)) > 1 for p in sliced)
    some = dealt([*DRAWN, *(large(rng) for _ in range(120))], target, SUMMED)
    for p in [*some, *sliced, OWNED]:
        plans = [make_plan(p, TARGETS[target], threads) for threads in (1, 5, 16, 100)]
        if isinstance(plans[0], Refusal):
            assert plans == [plans[0]] * len(plans)
        else:
            assert len({order(plan) for plan in plans if not isinstance(plan, Refusal)}) == 1, p


def met(a: Axis, forward: bool, position: int, k: int) -> int | None:
    """The coordinate of the input that an output position meets by a kernel element, or None between two of them."""
    if forward:
        return position * a.stride + k * a.dilation - a.pad
    place = position + a.pad - k * a.dilation
    return place // a.stride if place % a.stride == 0 else None


@pytest.mark.parametrize("target", ["native", "vector of 3 in small caches"])
def test_every_product_once_and_none_with_a_zero_of_the_stride(target: str) -> None:
    """Products of the plan that meet the input are those of the definition; all others meet its padding."""
    for p in (p for p in DRAWN if p.wanted != "w"):
        plan = make_plan(p, TARGETS[target], 2)
        if isinstance(plan, Refusal):
            continue
        if isinstance(plan, Gather) and plan.tile.fold is not None:
            continue  # see test_gather_plan.py
        if isinstance(plan, WeightGradient):  # pixels in the lanes: one tap, no padding
            assert plan.taps.ranges.valid == (tuple((0, n) for n in plan.boxes.sizes),)
            continue
        forward = p.wanted == "y"
        inside = outputs = 1
        maps = plan.cut.maps if isinstance(plan, Gather) else plan.maps
        for axis, axis_map in zip(simplify(p).axes, maps, strict=True):
            size = axis.x if forward else axis.y
            places = [
                (q * axis_map.out_stride + s.residue, met(axis, forward, q * axis_map.out_stride + s.residue, k))
                for s in axis_map.segments
                for q in range(s.start, s.stop)
                for k, _ in s.taps
            ]
            assert all(place is not None for _, place in places), f"{p}: a product with a zero that the stride made"
            assert len(places) == len(set(places))
            inside *= sum(0 <= place < size for _, place in places if place is not None)
            outputs *= sum(s.stop - s.start for s in axis_map.segments)
        assert inside == p.n * p.taps, p
        assert outputs == p.n * prod(p.y if forward else p.x), p
        # Phases are all combinations of segments, so what holds for each axis holds for them.
        if isinstance(plan, ChannelsInLanes):
            continue
        assert len(plan.cut.phases) == prod(len(axis_map.segments) for axis_map in maps)
        assert sum(phase.count for phase in plan.cut.phases) == len(plan.cut.tap_table)


def lane_groups(plan: Made | Refusal) -> tuple[int, int] | None:
    """The channels of a group, if groups are side by side in the lanes."""
    if isinstance(plan, Gather):
        return plan.tile.lane_groups
    return plan.roles.lane_groups if isinstance(plan, WeightGradient) else None


@pytest.mark.slow
def test_groups_side_by_side_are_whole_in_each_vector() -> None:
    found = 0
    for width, groups, channels in product(range(8, 68, 4), range(2, 8), range(1, 9)):
        wanted = "yw"[(width // 4 + groups + channels) % 2]
        p = Problem.parse(f"{wanted} f32 n1 g{groups} cx{channels} cy{channels} x9x9 w3x3 y5x5 s2x2 d1x1 p1x1")
        plan = make_plan(p, replace(TARGETS["halves"], width=width), 2)
        groups_in_lanes = lane_groups(plan)
        if groups_in_lanes is not None:
            found += 1
            assert plan.lanes % groups_in_lanes[1] == 0, (width, p)
    assert found > 40


NXC = " x@nxc y@nxc w@xio"
FULL = Target("avx512", "x86_64-unknown-linux-gnu", "", "+avx512bf16", 64, 32)
HALVED = replace(FULL, double_pumped=True)


@pytest.mark.parametrize(
    ("text", "full", "halved"),
    [
        # Two vectors are multiplied at a time, each in four cycles: eight sums are just enough, more are better.
        ("x f32 n8 g16 cx16 cy16 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1", 14, 8),
        ("y f32 n8 g1 cx64 cy16 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1", 14, 8),
        ("w f32 n8 g16 cx16 cy16 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1", 16, 8),
        ("w bf16 n8 g1 cx16 cy16 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1", 16, 8),
        # Results that a stride spreads over 4096 bytes would drive each other out of the first-level cache.
        ("x f32 n4 g24 cx16 cy16 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1", 14, 8),
        ("x f32 n4 g32 cx16 cy16 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1", 8, 8),
    ],
)
def test_single_vectors_have_higher_tiles_where_two_are_multiplied_at_a_time(text: str, full: int, halved: int) -> None:
    for target, most in ((FULL, full), (HALVED, halved)):
        plan = make_plan(Problem.parse(text + NXC), target, 2)
        assert isinstance(plan, Gather | WeightGradient)
        assert plan.vectors == 1
        assert plan.lanes == 16
        assert plan.rows == most if most > 8 else plan.rows <= most


def test_what_a_stride_without_a_kernel_leaves_out_is_not_asked_for() -> None:
    assert spans(Axis(56, 28, 1, 2, x_step=64), 14, True) == (14, 128)
    assert spans(Axis(28, 28, 1, 1, x_step=64), 14, True) == (14, 64)
    assert spans(Axis(56, 28, 3, 2, pad=1, x_step=64), 14, True) == (29, 64)
    assert spans(Axis(56, 28, 1, 2, y_step=32), 14, False) == (14, 32)
    assert spans(Axis(10, 9, 3, 1, pad=1, y_step=32), 9, False) == (9, 32)  # no more than there are


@pytest.mark.parametrize(
    ("wanted", "layout", "alone"), [("x", NXC, True), ("y", "", True), ("w", "", True), ("w", NXC, False)]
)
def test_groups_of_half_a_vector_are_alone_where_that_makes_pairs(wanted: str, layout: str, alone: bool) -> None:
    sizes = "n4 g32 cx8 cy8 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1"
    plan = make_plan(Problem.parse(f"{wanted} bf16 {sizes}{layout}"), FULL, 2)
    assert isinstance(plan, Gather | WeightGradient)
    pairs = plan.sums.pairs if isinstance(plan, Gather) else plan.roles.pairs
    assert (lane_groups(plan) is None) == pairs == alone
    plan = make_plan(Problem.parse(f"{wanted} f32 {sizes}{layout}"), FULL, 2)
    assert isinstance(plan, Gather | WeightGradient)
    assert lane_groups(plan) == (8, 8)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no alarms")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("w bf16 n1 g1 cx64 cy64 x1000000000 w3 y1000000000 s1 d10000 p10000", 2),
        ("w bf16 n1 g1 cx64 cy64 x9x100000000 w3x3 y9x100000000 s1x1 d9x1 p9x1", 2),
        ("y f32 n1 g1 cx1 cy16 x20x20000 w3x5000 y20x20001 s1x1 d1x1 p1x2500", 2),
        ("x f32 n1 g1 cx20 cy40 x100000000 w4000 y1000000 s4096 d1 p1", 2),
        ("y f32 n1000000000 g1 cx8 cy8 x4x4 w3x3 y4x4 s1x1 d1x1 p1x1", 1024),
        ("x f32 n700 g1 cx16 cy16 x512x512x64 w3x3x3 y512x512x64 s1x1x1 d1x1x1 p1x1x1", 1024),
        ("x f32 n1 g100000 cx40 cy40 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1", 64),
    ],
)
def test_planning_ends_for_any_sizes(text: str, threads: int) -> None:
    for target in ("native", "without halves", "native in small caches"):
        assert make_plan(Problem.parse(text), TARGETS[target], threads) is not None


@pytest.mark.parametrize("pixels", [1, 500, 512 * 112, 512 * 112 + 1, 10**6, 10**9])
def test_long_rows_are_cut_into_boxes(pixels: int) -> None:
    """All pixels of all images are one axis here, of any length; pieces are equal up to rounding."""
    for wanted in "xwy":
        text = f"{wanted} f32 n1 g1 cx256 cy256 x{pixels} w1 y{pixels} s1 d1 p0 x@nxc y@nxc w@xio"
        plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
        assert not isinstance(plan, Refusal)
        box = plan.cut.maps[-1].box if isinstance(plan, Gather) else plan.boxes.box[-1]
        assert min(pixels, 50) <= box <= 4096
        assert box == ceil(pixels / ceil(pixels / box))


@pytest.mark.parametrize("target", REAL)
def test_the_same_engine_serves_any_number_of_threads(target: str) -> None:
    """Weights that each thread packs for itself, and that would be too many for all: the bits are the engine's."""
    p = Problem.parse("y f32 n1 g12 cx60000 cy1 x6x6 w5x5 y2x2 s1x1 d1x1 p0x0")
    plans = [make_plan(p, REAL[target], threads) for threads in (1, 2, 4, 5, 8, 16, 64)]
    assert len({isinstance(plan, Refusal) for plan in plans}) == 1


@pytest.mark.parametrize(("dtype", "line"), [("f32", 16), ("bf16", 32), ("f16", 32)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("wanted", ["x", "y", "w"])
def test_pieces_of_a_row_begin_with_lines_of_memory(wanted: str, stride: int, dtype: str, line: int) -> None:
    """But for sums in parts, which are cut into pieces of equal size."""
    text = f"{wanted} {dtype} n3 g1 cx256 cy256 x{3002 * stride} w3 y3002 s{stride} d1 p1"
    plan = make_plan(Problem.parse(text), TARGETS["without halves"], 2)
    if isinstance(plan, Gather):
        assert plan.cut.maps[-1].boxes > 1
        assert plan.cut.region[-1] % line == 0
    else:
        assert isinstance(plan, WeightGradient)
        assert plan.boxes.counts[-1] > plan.boxes.slices == 1
        assert plan.boxes.box[-1] % line == 0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("wanted", ["x", "y", "w"])
def test_tiles_last_long_enough_to_ask_for_all_of_the_next_box(wanted: str, dtype: str) -> None:
    text = f"{wanted} {dtype} n16 g1 cx64 cy256 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0 x@nxc w@xio y@nxc"
    plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
    assert isinstance(plan, Gather | WeightGradient)
    steps = (
        plan.sums.chunk // plan.sums.per_step
        if isinstance(plan, Gather)
        else prod(plan.boxes.box) // plan.roles.per_step
    )
    assert plan.prefetch is not None
    assert plan.prefetch.lines_per_call * plan.prefetch.steps_per_line <= steps


def test_small_problems_are_planned_for_one_thread() -> None:
    small = make_plan(Problem.parse("y f32 n1 g1 cx4 cy4 x9 w3 y9 s1 d1 p1"), TARGETS["native"], 8)
    assert not isinstance(small, Refusal)
    assert small.threads == 1


def test_small_caches_try_everything() -> None:
    """What only large problems do on a real machine is done by many of the small ones on a made-up one."""
    plans = [make_plan(p, TARGETS["native in small caches"], 2) for p in DRAWN]
    assert (
        sum(isinstance(plan, Gather | WeightGradient) and plan.prefetch is not None for plan in plans) > len(plans) // 4
    )
    if TARGETS["native"].triple.startswith("x86_64"):
        gathers = [plan for plan in plans if isinstance(plan, Gather)]
        assert sum(plan.output.stream for plan in gathers) > len(gathers) // 4


@pytest.mark.parametrize("name", slow_but(["halves"], REAL))
def test_the_steps_of_a_plan_have_lanes_for_all_products(name: str) -> None:
    found = set()
    for p in [*DRAWN, *map(Problem.parse, NAMED.values())]:
        plan = make_plan(p, REAL[name], 3)
        if isinstance(plan, Refusal):
            continue
        found.add(plan.nest)
        pair = plan.sums.per_step if plan.nest == "gather" else plan.roles.per_step if plan.nest == "wgrad" else 1
        assert 2 * plan.steps * plan.lanes * pair >= p.flops, p
        assert plan.thread_steps == plan.steps / plan.threads
        assert plan.estimate.seconds > plan.thread_steps / tuning(REAL[name]).speed.steps
        assert plan.estimate.bytes == plan.workspace
    assert found == {"gather", "wgrad", "depthwise channels", "depthwise pixels"}


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("w f32 n4 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc", 4 * 56 * 56 * 9 * 64 * 4),
        ("y f32 n2 g32 cx1 cy1 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc", 2 * 28 * 28 * 9 * 2),
        ("x f32 n2 g32 cx1 cy1 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1", 2 * 32 * 28 * 9 * 2),
    ],
)
def test_steps_of_layers_that_fill_vectors(text: str, steps: int) -> None:
    assert make_plan(Problem.parse(text), AVX512, 2).steps == steps
