"""Plans of weight gradients, and of 1x1 convolutions as sums over channels: how sides are read, how sums are cut."""

from __future__ import annotations

import signal
from math import ceil, prod

import pytest

from convgrad.cpu.depthwise.records import ChannelsInLanes
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.target import Target
from convgrad.cpu.wgrad.cut import busy_share
from convgrad.cpu.wgrad.records import Mode, WeightGradient, Writing
from convgrad.spec.problem import Problem

from .machines import AVX512_PAIRS, HALVES, MACHINES
from .problems import check, however_small, numbered, targets

DRAWN = [numbered(seed) for seed in range(30000, 30200)]
NXC = " x@nxc y@nxc w@xio"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("w f32 n8 g1 cx1024 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", False),
        ("w f32 n8 g1 cx512 cy512 x14x14 w3x3 y7x7 s2x2 d1x1 p1x1", False),
        ("w f32 n8 g1 cx512 cy512 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", True),
        ("w f32 n8 g1 cx1040 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", True),
    ],
)
def test_pixels_that_share_a_set_of_the_cache_are_packed(text: str, full: bool) -> None:
    """If they lie a multiple of 4096 bytes apart, and products are quick."""
    for target, in_place in ((AVX512_PAIRS, full), (HALVES, True)):
        plan = make_plan(Problem.parse(text + NXC), target, 2)
        assert isinstance(plan, WeightGradient)
        assert (plan.sides[0].mode is Mode.IN_PLACE) == in_place


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_channels_that_are_contiguous_in_w_are_in_the_lanes(dtype: str) -> None:
    """Else sums are written one by one. So they are in PyTorch's channels_last; in XIO those of y are."""
    for layout, rows in (("w@0,288,1,96,32", "y"), ("w@xio", "x")):
        text = f"w {dtype} n2 g1 cx32 cy32 x9x7 w3x3 y9x7 s1x1 d1x1 p1x1 x@nxc y@nxc {layout}"
        plan = make_plan(Problem.parse(text), AVX512_PAIRS, 2)
        assert isinstance(plan, WeightGradient)
        assert plan.roles.row_side == rows
        assert plan.output.writing is Writing.VECTORS


def test_every_product_once() -> None:
    for p in (p for p in DRAWN if p.wanted == "w"):
        plan = make_plan(p, AVX512_PAIRS, 2)
        if isinstance(plan, ChannelsInLanes):
            continue
        assert isinstance(plan, WeightGradient)
        assert sum(prod(max(0, high - low) for low, high in ends) for ends in plan.taps.ranges.valid) == p.n * p.taps


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no alarms")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8, 17, 32, 33, 48, 64, 100, 128, 1024])
def test_planning_ends(threads: int) -> None:
    """Cutting rows into one more part does not always make the parts smaller."""
    for channels in (7, 33, 100, 256, 500, 512, 1000):
        for machine in ("avx512", "vector of 3 in small caches"):
            text = f"w f32 n8 g1 cx{channels} cy64 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio"
            plan = make_plan(Problem.parse(text), MACHINES[machine], threads)
            assert isinstance(plan, WeightGradient)
            assert 1 <= plan.parts.row_part <= plan.roles.row_channels


@pytest.mark.parametrize("layout", ["", " x@nxc y@nxc w@xio"])
def test_boxes_of_pairs_overlap_little(layout: str) -> None:
    """Pixels of x that are made pairs are packed less than twice."""
    sizes = "n1 g1 cx64 cy64 x256x256 w3x3 y256x256 s1x1 d1x1 p1x1"
    plan = make_plan(Problem.parse(f"w bf16 {sizes}{layout}"), AVX512_PAIRS, 2)
    assert isinstance(plan, WeightGradient)
    assert plan.roles.pairs
    often = plan.boxes.number * plan.x.pixels / prod(p.size for p in plan.x.packs)
    assert often < 2


@pytest.mark.parametrize(
    ("width", "pixels", "channels", "in_place"),
    [
        *((64, "56x56", 100, True), (64, "64x64", 100, False), (64, "64x64", 40, True), (64, "56x56", 256, False)),
        *((32, "56x56", 100, False), (32, "56x56", 40, False), (32, "56x56", 8, True)),
    ],
)
def test_few_rows_have_the_other_side_read_in_place(width: int, pixels: str, channels: int, in_place: bool) -> None:
    """Fewer where vectors are shorter than lines of memory, or lines share a set of the first-level cache."""
    machine = Target("made up", "x86_64-unknown-linux-gnu", "x86-64", "", width, 32)
    text = f"x f32 n4 g1 cx{channels} cy64 x{pixels} w1x1 y{pixels} s1x1 d1x1 p0x0"
    plan = make_plan(Problem.parse(text), machine, 2)
    assert isinstance(plan, WeightGradient)
    assert (plan.sides[1].mode is Mode.IN_PLACE) == in_place


def test_tasks_are_balanced() -> None:
    machine = Target("avx512", "x86_64-unknown-linux-gnu", "x86-64", "+avx512f", 64, 32)
    # Four blocks of lanes, the last one half: two parts of them are unequal, and four such tasks leave threads idle.
    problem = Problem.parse("w f32 n8 g1 cx96 cy224 x28x28 w2x2 y29x29 s1x1 d1x1 p1x1 x@nxc y@nxc")
    made = make_plan(problem, machine, 4)
    assert isinstance(made, WeightGradient)
    parts = made.parts
    assert all(
        busy_share(ceil(96 / parts.row_part), 224, 64 * parts.lane_part, made.boxes.slices, team, 8) > 0.95
        for team in (2, 4)
    )
    assert busy_share(2, 224, 128, 1, 4, 8) == 0.875
    assert busy_share(3, 64, 64, 1, 2, 8) == 0.75  # 3 tasks on 2 threads
    assert busy_share(2, 128, 64, 1, 4, 8) == 1.0
    assert busy_share(3, 192, 128, 1, 4, 8) == 0.75  # 1, ½, 1, ½, 1, ½, taken from both ends, end after 1½
    assert busy_share(4, 224, 64, 1, 4, 8) == 0.875  # in order 1, in which threads do not take them


@pytest.mark.parametrize(
    "text",
    [
        "w f32 n1 g1 cx20 cy72 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
        "w f32 n2 g1 cx24 cy24 x40x40 w3x3 y40x40 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio accumulate",  # in slices
        "w f16 n1 g2 cx9 cy10 x9x9x9 w3x3x3 y9x9x9 s1x1x1 d1x1x1 p1x1x1 w@xio",
    ],
)
def test_many_threads_share_taps(text: str) -> None:
    """Where each can be written alone; the result is the same, and nothing is written beyond it."""
    p, target = Problem.parse(text), targets()["without halves"]
    other = Problem.parse(text.replace(" w@xio", ""))  # taps are contiguous, and are transposed together
    with however_small():
        plan, transposed = make_plan(p, target, 64), make_plan(other, target, 64)
    assert isinstance(plan, WeightGradient)
    assert isinstance(transposed, WeightGradient)
    assert plan.parts.tap_parts > 1
    assert plan.tasks <= 64
    assert plan.tasks > 50
    check(p, target, (1, 16, 64), 3, gaps=True)
    assert transposed.parts.tap_parts == 1


@pytest.mark.parametrize("channels", [32, 144])
def test_many_threads_read_lanes_in_place(channels: int) -> None:
    """Where they are contiguous, or a task has few products of each; boxes, and so bits, are as if they were packed."""
    p = Problem.parse(f"w f32 n2 g1 cx24 cy{channels} x17x17 w3x3 y17x17 s1x1 d1x1 p1x1{NXC}")
    with however_small():
        few, many = (make_plan(p, AVX512_PAIRS, threads) for threads in (4, 192))
    assert isinstance(few, WeightGradient)
    assert isinstance(many, WeightGradient)
    assert few.boxes == many.boxes
    assert (few.y.mode, many.y.mode) == (Mode.VECTORS, Mode.IN_PLACE)
    check(p, targets()["native"], (1, 192), 3, gaps=True)
