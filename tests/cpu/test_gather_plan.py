"""Plans for y and x: what each record says of layers that ask for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, prod

import pytest

from convgrad.cpu.gather.records import Gather, TaskOrder, WeightPacking
from convgrad.cpu.pack.weights import WeightPacker
from convgrad.cpu.plan.axes import simplify
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.target import LINE, Target
from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem

from .problems import check, however_small, numbered, targets

TARGETS = targets()
DRAWN = [numbered(seed) for seed in range(30000, 30200)]
NXC = " x@nxc y@nxc w@xio"
FULL = Target("avx512", "x86_64-unknown-linux-gnu", "", "+avx512bf16", 64, 32)
HALVED = replace(FULL, double_pumped=True)


@pytest.mark.parametrize("target", ["halves", "without halves"])
def test_folded_results_have_their_own_weights(target: str) -> None:
    """Each result that shares a vector with others has every tap once, and no other weight; all are in one block."""
    found = 0
    patches = [
        Problem.parse(f"x {dtype} n4 g1 cx{c} cy16 x{9 * s}x{9 * s} w{s}x{s} y9x9 s{s}x{s} d1x1 p0x0")
        for dtype, c, s in product(("f32", "bf16", "f64"), range(1, 9), range(2, 9))
    ]
    for p in [*(p for p in DRAWN if p.wanted != "w"), *patches]:
        plan = make_plan(p, TARGETS[target], 2)
        if isinstance(plan, Gather) and plan.tile.fold is not None:
            found += 1
            lanes = len(plan.tile.fold.table) // len(plan.weights.tap_offsets)
            assert lanes == plan.layer.cout == prod(plan.tile.fold.factors) * plan.tile.fold.channels <= plan.block
            weights: dict[int, list[int]] = {}
            for i, at in enumerate(plan.tile.fold.table):
                if at:
                    weights.setdefault(i % lanes, []).append(at >> 1)
            if all(p.w_strides[3:]):
                assert all(len(taps) == len(set(taps)) for taps in weights.values()), p
            # Lanes of one residue of the stride meet the same taps, and all residues together meet each tap equally.
            total = sum(len(taps) for taps in weights.values())
            unit = prod(1 if p.wanted == "y" else a.stride for a in simplify(p).axes)
            assert total == prod(p.w) * lanes // unit
    assert found > 40


@pytest.mark.parametrize(
    ("text", "full", "halved"),
    [
        # Weights of a block: 9 taps of 256 channels are 576 KiB, of which 3/5 of the cache are enough.
        ("x f32 n8 g1 cx256 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio", 256, 128),
        ("x f32 n8 g1 cx320 cy320 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio", 112, 112),
        ("x bf16 n8 g1 cx512 cy512 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio", 512, 128),
        # Phases of a stride meet 4 taps at most, all of them if the dilation is a multiple of it.
        ("x f32 n8 g1 cx512 cy512 x14x14 w3x3 y7x7 s2x2 d1x1 p1x1 x@nxc y@nxc w@xio", 512, 128),
        ("x f32 n8 g1 cx512 cy512 x14x14 w3x3 y6x6 s2x2 d2x2 p1x1 x@nxc y@nxc w@xio", 128, 128),
        ("x f32 n8 g1 cx256 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", 128, 128),
    ],
)
def test_sums_are_in_parts_if_weights_do_not_stay(text: str, full: int, halved: int) -> None:
    for target, chunk in ((FULL, full), (HALVED, halved)):
        plan = make_plan(Problem.parse(text), target, 2)
        assert isinstance(plan, Gather)
        assert plan.sums.chunk == chunk


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("x bf16 n32 g1 cx240 cy40 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio", False),
        ("y f32 n16 g1 cx24 cy144 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio", False),
        ("x f32 n8 g1 cx256 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", True),  # parts write far from each other
        ("x f32 n8 g1 cx256 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio", True),  # many weights
    ],
)
def test_threads_share_lines_of_weights_or_of_results_whichever_are_fewer(text: str, first: bool) -> None:
    plan = make_plan(Problem.parse(text), FULL, 2)
    assert isinstance(plan, Gather)
    assert plan.task.parts > 1
    assert (plan.task.order is TaskOrder.PART) == first
    assert (plan.task.weights is WeightPacking.THREAD_ALL) != first


def test_few_weights_are_packed_by_each_thread_if_it_has_pixels_enough() -> None:
    def copied(sizes: str, threads: int = 2) -> bool:
        plan = make_plan(Problem.parse(f"x f32 {sizes} w3x3 s1x1 d1x1 p1x1{NXC}"), FULL, threads)
        assert isinstance(plan, Gather)
        alone = plan.task.weights is WeightPacking.THREAD_ALL
        assert plan.buffers[0][::2] == ("weights", alone)
        return alone

    assert copied("n8 g1 cx64 cy64 x56x56 y56x56")
    assert not copied("n1 g1 cx64 cy64 x14x14 y14x14")  # few pixels
    assert not copied("n8 g1 cx64 cy64 x56x56 y56x56", 256)  # for each of so many threads too
    assert not copied("n8 g1 cx256 cy256 x28x28 y28x28")  # many weights
    assert not copied("n8 g64 cx64 cy64 x28x28 y28x28")
    assert not copied("n8 g300 cx1 cy9 x28x28 y28x28")  # few channels fill whole vectors with zeros


PARTS = {
    WeightPacker.COPY: "y f32 n1 g1 cx80 cy40 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio bias",
    WeightPacker.TRANSPOSE_CHANNELS: "x f32 n1 g1 cx40 cy333 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    WeightPacker.TRANSPOSE_TAPS: "y bf16 n1 g1 cx700 cy40 x5x5 w3x3 y5x5 s1x1 d1x1 p1x1",
    WeightPacker.ELEMENTS: "y f32 n1 g2 cx90 cy7 x9x9 w3x3 y9x9 s1x1 d2x1 p2x1 w@11403,181,2,3801,1267",
}


@pytest.mark.parametrize("packer", PARTS)
def test_weights_are_packed_in_parts_for_many_threads(packer: WeightPacker) -> None:
    p, target = Problem.parse(PARTS[packer]), TARGETS["without halves"]
    for threads in (16, 64):
        with however_small():
            plan = make_plan(p, target, threads)
        assert isinstance(plan, Gather)
        assert (plan.weights.packer, plan.task.weights) == (packer, WeightPacking.TEAM)
        assert plan.weights.parts > 1
    check(p, target, (1, 2, 16, 64), 5, gaps=True)


@pytest.mark.parametrize("threads", [4, 16, 64])
@pytest.mark.parametrize(
    "text",
    [
        "y f32 n1 g1 cx64 cy16 x32x32 w3x3 y32x32 s1x1 d1x1 p1x1",
        "y f32 n1 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
        "x bf16 n1 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1",
        "y f32 n1 g1 cx512 cy64 x127 w9 y127 s1 d1 p4",
        "y f32 n1 g1 cx512 cy64 x1000 w9 y1000 s1 d1 p4",
        "y f32 n16 g1 cx256 cy64 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio",
    ],
)
def test_every_thread_has_something_to_do(text: str, threads: int) -> None:
    """Unless boxes would hold but a tile or two; or of a large team a few have nothing, rather than most two tasks."""
    plan = make_plan(Problem.parse(text), TARGETS["without halves"], threads)
    assert isinstance(plan, Gather)
    wanted = threads if threads <= 16 else 0.9 * threads
    assert plan.tasks >= wanted or prod(plan.cut.region) <= 6 * plan.rows


@pytest.mark.parametrize("layout", ["", " x@nxc y@nxc w@xio"])
@pytest.mark.parametrize(
    "sizes",
    [
        "n1 g1 cx128 cy128 x16x16x16 w3x3x3 y16x16x16 s1x1x1 d1x1x1 p1x1x1",
        "n1 g1 cx64 cy64 x256x256 w3x3 y256x256 s1x1 d1x1 p1x1",
        "n1 g1 cx64 cy64 x512x1024 w3x3 y512x1024 s1x1 d1x1 p1x1",
    ],
)
def test_boxes_overlap_little(sizes: str, layout: str) -> None:
    """Each input is packed for all results around it: less often if boxes are deep, and not only wide."""
    plan = make_plan(Problem.parse(f"x f32 {sizes}{layout}"), TARGETS["without halves"], 2)
    assert isinstance(plan, Gather)
    often = plan.cut.boxes * prod(p.extent for p in plan.cut.packs) / prod(p.size for p in plan.cut.packs)
    assert often < 3


def test_pixels_of_a_tile_are_evenly_spaced_where_tiles_fill_rows() -> None:
    """One address then serves the tile. Pixels are listed here as the kernel lists them."""
    seen = set()
    named = [Problem.parse("x f32 n2 g3 cx8 cy8 x5x14 w3x3 y5x14 s1x1 d1x1 p1x1 x@nxc y@nxc")]
    for p in [*DRAWN, *named]:
        plan = make_plan(p, TARGETS["halves"], 2)
        if not isinstance(plan, Gather) or prod(w.out for w in plan.cut.maps) > 5000:
            continue
        even = True
        for corner in product(*(range(0, w.boxes * w.box, w.box) for w in plan.cut.maps)):
            for phase in plan.cut.phases:
                ends = zip(phase.starts, phase.stops, corner, plan.cut.maps, strict=True)
                places = list(product(*(range(max(a, at), min(b, at + w.box)) for a, b, at, w in ends)))
                tiles = [places[i : i + plan.rows] for i in range(0, len(places), plan.rows)]
                even = even and all(len({place[:3] for place in tile}) == 1 for tile in tiles)
                even = even and all(len(tile) == plan.rows for tile in tiles)
        assert plan.cut.evenly_spaced == even, p
        seen.add((even, plan.rows))
    assert {(True, 14), (False, 8)} <= seen


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "pad"),
    [("56x40", "1x1", "2x2", 0), ("28x60", "1x2", "1x3", 0), ("56x40", "3x3", "2x2", 1)],
)
def test_only_tiles_with_products_prefetch_the_next_box(x: str, kernel: str, stride: str, pad: int) -> None:
    text = f"x f32 n16 g1 cx64 cy64 x{x} w{kernel} y28x20 s{stride} d1x1 p{pad}x{pad} x@nxc w@xio y@nxc"
    plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
    assert isinstance(plan, Gather)
    assert plan.prefetch is not None
    pixels = sum(
        prod(max(0, min(b, w.box) - a) for a, b, w in zip(phase.starts, phase.stops, plan.cut.maps, strict=True))
        for phase in plan.cut.phases
        if phase.count
    )
    assert plan.prefetch.calls <= ceil(plan.tile.blocks / plan.task.parts) * ceil(pixels / plan.rows)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["", " w@xio"])
@pytest.mark.parametrize("images", [1, 8])
@pytest.mark.parametrize("wanted", ["x", "y"])
def test_boxes_prefetch_all_of_the_weights_that_are_packed_next(
    wanted: str, images: int, layout: str, dtype: str
) -> None:
    text = f"{wanted} {dtype} n{images} g1 cx512 cy512 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1{layout}"
    plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
    assert isinstance(plan, Gather)
    assert plan.prefetch is not None
    assert plan.task.order is TaskOrder.CHANNEL
    size = DTYPES[dtype].size
    *_, weights = plan.prefetch.regions
    fetched = {
        (16 + box * plan.weights_step + sum(at)) // LINE
        for box in range(plan.cut.boxes)
        for at in product(*(range(0, count * step, step) for count, step in weights))
    }
    sums = product(range(plan.block), range(plan.sums.chunk), plan.weights.tap_offsets)
    needed = {
        (16 + size * (c * plan.layer.w_strides[1] + k * plan.layer.w_strides[2] + tap)) // LINE for c, k, tap in sums
    }
    assert len(needed - fetched) <= len(needed) // 8  # the last of a long run need not be
    assert len(fetched) <= 1.25 * len(needed)


def test_weights_are_not_prefetched_if_there_are_too_many() -> None:
    """Those of a layer with few products for each: what is prefetched would not be all, and the rest waits anyhow."""
    plan = make_plan(Problem.parse("y f32 n8 g1 cx512 cy4096 x7x7 w7x7 y1x1 s1x1 d1x1 p0x0"), TARGETS["native"], 2)
    assert isinstance(plan, Gather)
    assert plan.task.order is TaskOrder.CHANNEL
    assert plan.prefetch is None


def test_phases_without_products_are_the_last() -> None:
    plan = make_plan(Problem.parse("x f32 n16 g1 cx64 cy64 x55x39 w1x1 y28x20 s2x2 d1x1 p1x1"), TARGETS["native"], 2)
    assert isinstance(plan, Gather)
    assert [phase.count for phase in plan.cut.phases] == [1, 0, 0, 0]


@pytest.mark.parametrize("wanted", ["x", "y"])
def test_the_estimate_grows_with_the_work_and_is_shared_by_threads(wanted: str) -> None:
    def plan(sizes: str, threads: int = 4) -> Gather:
        made = make_plan(Problem.parse(f"{wanted} f32 {sizes} w3x3 s1x1 d1x1 p1x1{NXC}"), FULL, threads)
        assert isinstance(made, Gather)
        return made

    one = plan("n4 g1 cx64 cy64 x56x56 y56x56")
    products = 4 * 56 * 56 * 9 * 64 * 64
    assert products <= one.cut.steps * one.lanes <= 2 * products  # packing and the like take less than the products
    assert one.thread_steps == one.cut.steps / 4
    assert plan("n4 g1 cx64 cy64 x56x56 y56x56", 1).thread_steps == one.cut.steps
    assert 1.9 < plan("n8 g1 cx64 cy64 x56x56 y56x56").thread_steps / one.thread_steps < 2.1
    assert 1.9 < plan("n4 g2 cx64 cy64 x56x56 y56x56").thread_steps / one.thread_steps < 2.1
