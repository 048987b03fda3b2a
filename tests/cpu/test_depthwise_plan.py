"""Plans for layers whose channels are each on their own: which kernel serves a layer, and what its plan says."""

from __future__ import annotations

import pytest

from convgrad.cpu.depthwise import choose
from convgrad.cpu.depthwise.records import ChannelsInLanes, PixelsInLanes
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.plan.axes import spatial
from convgrad.cpu.plan.records import Made, up
from convgrad.cpu.plan.registry import make_plan
from convgrad.spec.problem import Problem

from .machines import MACHINES
from .test_plan import met

LAST = " x@nxc y@nxc"


def plan_for(text: str, machine: str = "avx512", threads: int = 2) -> Made:
    made = make_plan(Problem.parse(text), MACHINES[machine], threads)
    assert isinstance(made, Made)
    return made


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("y f32 n2 g64 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1" + LAST, ChannelsInLanes),
        ("x f32 n2 g64 cx1 cy1 x14x14 w3x3 y7x7 s2x2 d1x1 p1x1" + LAST, ChannelsInLanes),
        ("w f32 n2 g64 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1" + LAST, ChannelsInLanes),
        ("y f32 n2 g64 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", PixelsInLanes),
        ("x f32 n2 g64 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", PixelsInLanes),
        # Each limit of choose.py, just within and just beyond.
        ("y f32 n1 g64 cx1 cy1 x16x16 w5x10 y12x7 s1x1 d1x1 p0x0" + LAST, ChannelsInLanes),
        ("y f32 n1 g64 cx1 cy1 x16x16 w3x17 y14x4 s1x1 d1x1 p0x2" + LAST, Gather),
        ("x f32 n1 g64 cx1 cy1 x16x16 w4x4 y8x4 s2x4 d1x1 p1x0" + LAST, ChannelsInLanes),
        ("x f32 n1 g64 cx1 cy1 x18x16 w4x4 y6x4 s3x4 d1x1 p0x0" + LAST, Gather),
        ("y f32 n1 g64 cx1 cy1 x40x40 w8x16 y33x25 s1x1 d1x1 p0x0", PixelsInLanes),
        ("y f32 n1 g64 cx1 cy1 x40x60 w3x43 y38x18 s1x1 d1x1 p0x0", Gather),
        ("y f32 n1 g64 cx1 cy1 x40x40 w9x3 y32x38 s1x1 d1x1 p0x0", PixelsInLanes),
        ("y f32 n1 g64 cx1 cy1 x40x40 w10x3 y31x38 s1x1 d1x1 p0x0", Gather),
        ("y f32 n1 g64 cx1 cy1 x14x8 w3x3 y14x8 s1x1 d1x1 p1x1", PixelsInLanes),
        ("y f32 n1 g64 cx1 cy1 x14x7 w3x3 y14x7 s1x1 d1x1 p1x1", Gather),
        ("y f32 n1 g4 cx1 cy1 x350x350 w3x3 y350x350 s1x1 d1x1 p1x1", PixelsInLanes),
        ("y f32 n1 g4 cx1 cy1 x380x380 w3x3 y380x380 s1x1 d1x1 p1x1", Gather),
        ("y f32 n1 g64 cx1 cy1 x14x14 w3x3 y7x7 s2x2 d1x1 p1x1", Gather),  # a stride
        ("y f32 n1 g64 cx1 cy1 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0", Gather),  # a single tap
        ("y f32 n1 g64 cx1 cy2 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1" + LAST, Gather),  # not depthwise
    ],
)
def test_what_is_contiguous_says_which_kernel_serves_a_layer(text: str, kind: type) -> None:
    assert type(plan_for(text)) is kind


def test_neither_kernel_takes_what_is_not_depthwise() -> None:
    p = Problem.parse("y f32 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
    assert not any((choose.is_depthwise(p), choose.channels_serve(p), choose.pixels_serve(p)))


def test_pixels_meet_each_tap_where_the_packed_image_has_it() -> None:
    for text in (
        "y f32 n2 g3 cx1 cy1 x20x33 w3x5 y20x31 s1x1 d1x2 p1x3",
        "x f32 n2 g3 cx1 cy1 x20x33 w3x5 y20x31 s1x1 d1x2 p1x3",
        "x f32 n2 g3 cx1 cy1 x4x5x33 w2x3x2 y4x5x33 s1x1x1 d1x2x1 p1x2x0",
    ):
        p, plan = Problem.parse(text), plan_for(text)
        assert isinstance(plan, PixelsInLanes)
        packed = plan.packed
        values = (packed.low, packed.taps, plan.source.sizes, plan.result.sizes)
        for axis, low, (first, step), size, n in zip(spatial(p), *(v[-p.rank :] for v in values), strict=True):
            assert size == (axis.x if p.wanted == "y" else axis.y)
            for k in range(axis.k):
                for q in range(n):
                    assert q + low + first + k * step == met(axis, p.wanted == "y", q, k)


@pytest.mark.parametrize(
    ("width", "machine", "lanes"),
    [(16, "halves", 8), (24, "halves", 8), (32, "halves", 16), (16, "avx512", 16), (24, "avx512", 16), (16, "avx2", 8)],
)
def test_short_rows_of_pixels_take_vectors_of_half_the_width(width: int, machine: str, lanes: int) -> None:
    plan = plan_for(f"y f32 n1 g64 cx1 cy1 x14x{width} w3x3 y14x{width} s1x1 d1x1 p1x1", machine)
    assert isinstance(plan, PixelsInLanes)
    assert plan.lanes == lanes
    assert plan.tile.rows * plan.tile.vectors <= (8 if machine == "avx2" else 16)
    assert plan.packed.pitch >= up(width, plan.block) + 2


@pytest.mark.parametrize("size", [7, 14, 28, 112])
def test_slices_do_not_depend_on_threads_but_tasks_do(size: int) -> None:
    text = f"w f32 n8 g96 cx1 cy1 x{size}x{size} w3x3 y{size}x{size} s1x1 d1x1 p1x1" + LAST
    plans = [plan_for(text, threads=threads) for threads in (1, 4, 16, 64)]
    assert len({p.slices for p in plans if isinstance(p, ChannelsInLanes)}) == 1
    plans = [plan_for("y" + text[1:], threads=threads) for threads in (4, 16, 64)]
    rows = [p.task_rows for p in plans if isinstance(p, ChannelsInLanes)]
    assert len(rows) == 3
    assert rows == sorted(rows, reverse=True)
    assert all(r % plans[0].rows == 0 for r in rows)
