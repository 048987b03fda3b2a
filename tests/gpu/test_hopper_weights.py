"""Weight gradients on Hopper, where there is none: plans, what kernels do as NumPy does it, and their machine code."""

from __future__ import annotations

import random
from dataclasses import replace

import boxes
import numpy as np
import pytest

import convgrad
from convgrad.gpu.plan.hopper import lines
from convgrad.gpu.plan.hopper import weights as hopper
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem
from marks import slow_but

TARGET = of_kind("sm_90")
SMALL = replace(TARGET, multiprocessors=5)
NXC = "x@nxc y@nxc"

PROBLEMS = {
    "dense": f"w bf16 n2 g1 cx16 cy24 x7x6 w3x3 y7x6 s1x1 d1x1 p1x1 {NXC} w@xio",
    "strided": f"w bf16 n3 g1 cx72 cy40 x9x5 w3x2 y5x3 s2x2 d1x1 p1x1 {NXC}",
    "pairs of rows": f"w f16 n1 g1 cx16 cy8 x17x13 w4x4 y9x7 s2x2 d1x1 p1x2 {NXC}",
    "strides and dilations": f"w bf16 n1 g1 cx16 cy8 x17x13 w5x4 y3x5 s6x2 d2x3 p2x1 {NXC}",
    "3D": f"w bf16 n2 g1 cx32 cy16 x4x5x6 w3x3x3 y4x5x6 s1x1x1 d1x1x1 p1x1x1 {NXC} out:f32",
    "1D": f"w bf16 n2 g1 cx16 cy16 x40 w9 y40 s1 d1 p4 {NXC}",
    "grouped": f"w bf16 n2 g4 cx6 cy10 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 {NXC}",
    "large groups": f"w bf16 n2 g2 cx92 cy76 x6x6 w1x3 y6x6 s1x1 d1x1 p0x1 {NXC}",
    "depthwise": f"w bf16 n2 g24 cx1 cy1 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 {NXC}",
    "far taps": f"w bf16 n2 g1 cx8 cy8 x17x17 w3x3 y17x17 s1x1 d6x6 p6x6 {NXC}",
    "padding beyond the kernel": f"w bf16 n1 g1 cx8 cy8 x3x2 w2x2 y9x6 s1x1 d1x1 p5x3 {NXC}",
    "pointwise": f"w bf16 n1 g1 cx64 cy128 x10x10 w1x1 y5x5 s2x2 d1x1 p0x0 {NXC}",
    "stem": f"w bf16 n2 g1 cx3 cy16 x12x12 w7x7 y6x6 s2x2 d1x1 p3x3 {NXC}",
    "patches": f"w bf16 n2 g1 cx3 cy16 x32x32 w16x16 y2x2 s16x16 d1x1 p0x0 {NXC}",
    "windows that touch": f"w bf16 n2 g1 cx16 cy16 x21x6 w10x2 y2x3 s10x2 d1x1 p0x0 {NXC}",
    "stem, channels first": "w bf16 n1 g1 cx5 cy16 x12x9 w3x3 y8x7 s1x1 d2x2 p1x2 y@nxc",
    "y in lines": "w bf16 n2 g1 cx16 cy40 x6x16 w3x3 y6x16 s1x1 d1x1 p1x1 x@nxc",
    "y in lines, strided": "w bf16 n3 g2 cx24 cy24 x9x15 w3x2 y5x8 s2x2 d1x1 p1x1 x@nxc w@xio",
    "stem, y in lines": "w f16 n2 g1 cx3 cy16 x12x16 w7x7 y6x8 s2x2 d1x1 p3x3",
    "1D, y in lines": "w bf16 n2 g1 cx16 cy16 x40 w9 y40 s1 d1 p4 x@nxc",
    "f32": f"w f32 n2 g1 cx9 cy20 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {NXC}",
    "stem in f32": f"w f32 n2 g1 cx3 cy12 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1 {NXC}",
    "dense in f32": f"w f32 n2 g1 cx36 cy20 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {NXC}",
    "strided in f32": f"w f32 n3 g2 cx12 cy10 x9x8 w3x2 y4x4 s2x2 d1x1 p0x1 {NXC}",
    "far taps in f32": f"w f32 n2 g1 cx8 cy8 x17x17 w3x3 y17x17 s1x1 d6x6 p6x6 {NXC}",
    "grouped in f32": f"w f32 n2 g3 cx5 cy6 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 {NXC}",
    "pointwise in f32": f"w f32 n3 g1 cx40 cy20 x6x7 w1x1 y6x7 s1x1 d1x1 p0x0 {NXC}",
    "f32, channels first": "w f32 n2 g1 cx20 cy12 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1",
    "stem in f32, channels first": "w f32 n2 g1 cx3 cy12 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1",
    "grouped in f32, channels first": "w f32 n2 g2 cx10 cy6 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1",
}


def weights(p: Problem, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The definition."""
    w, every = np.zeros(p.shape("w")), (slice(None),) * 3
    for tap in np.ndindex(*p.w):
        ranges = [p.reach(axis, k) for axis, k in enumerate(tap)]
        if any(stop <= start for start, stop in ranges):
            continue
        shifts = [k * d - b for k, d, b in zip(tap, p.dilation, p.pad, strict=True)]
        of_y = tuple(slice(*found) for found in ranges)
        of_x = tuple(
            slice(start * s + shift, (stop - 1) * s + shift + 1, s)
            for (start, stop), s, shift in zip(ranges, p.stride, shifts, strict=True)
        )
        left, right = (t[every + at].reshape(*t.shape[:3], -1) for t, at in ((x, of_x), (y, of_y)))
        w[every + tap] = np.einsum("ngcs,ngds->gdc", left, right)
    return w


def view(memory: np.ndarray, p: Problem, role: str) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory, p.shape(role), [8 * stride for stride in p.strides(role)])


def room(p: Problem, role: str) -> int:
    return sum((size - 1) * stride for size, stride in zip(p.shape(role), p.strides(role), strict=True)) + 1


def plans(p: Problem, count: int, precision: str = "bf16x6") -> list:
    """The best plan, and some others."""
    found = [(lines.weights_view(lines.flat(p)), ())] if precision == "lines" else hopper.views(p, precision, SMALL)
    assert not isinstance(found, str), found
    every = [(cut, before) for seen, before in found for cut in hopper.cuts(seen, seen.item, SMALL)]
    ways = [way for way in every if hopper.seconds(p, way[0], SMALL)]
    ways.sort(key=lambda way: hopper.seconds(p, way[0], SMALL))
    kept = ways[:1] + random.Random(0).sample(ways, min(count, len(ways)))
    kept += [way for way in ways if way[0].item == 4][:2]
    return [hopper.settle(p, SMALL, *way, 1e-6) for way in kept]


LINES = {
    "lines": "w bf16 n2 g1 cx72 cy40 x6x16 w3x1 y6x16 s1x1 d1x1 p1x0",
    "pointwise lines": "w f16 n3 g1 cx64 cy136 x6x12 w1x1 y6x12 s1x1 d1x1 p0x0 w@xio",
    "lines of every second row": "w bf16 n1 g1 cx24 cy16 x11x24 w3x1 y6x24 s2x1 d1x1 p1x0",
    "lines of groups": "w bf16 n2 g2 cx40 cy24 x4x24 w2x1 y5x24 s1x1 d1x1 p1x0",
    "lines in 3D": "w bf16 n2 g1 cx24 cy16 x3x4x8 w2x3x1 y4x4x8 s1x1x1 d1x1x1 p1x1x0 out:f32",
    "lines in f32": "w f32 n2 g1 cx72 cy40 x6x16 w3x1 y6x16 s1x1 d1x1 p1x0",
    "pointwise lines in f32": "w f32 n3 g1 cx64 cy136 x6x6 w1x1 y6x6 s1x1 d1x1 p0x0 w@xio",
    "lines of groups in f32": "w f32 n2 g2 cx40 cy20 x4x20 w2x1 y5x20 s1x1 d1x1 p1x0",
}
"""Channels first, where taps begin at multiples of 16 bytes."""

WAYS = [(name, way) for name, line in PROBLEMS.items() for way in ("bf16x6", "tf32")[: 1 + (" f32 " in line)]]


EVERY_WAY = [*WAYS, *((name, "lines") for name in LINES)]


@pytest.mark.parametrize(("name", "precision"), slow_but(EVERY_WAY[::4], EVERY_WAY))
def test_boxes_and_slots_make_the_weights(name, precision):
    p = Problem.parse((PROBLEMS | LINES)[name])
    most = 2 if p.dtype != "f32" else 60000 if precision == "bf16x6" else 120  # what parts hold exactly
    rng = np.random.default_rng(0)
    given = {role: rng.integers(-most, most + 1, room(p, role)).astype(float) for role in "xy"}
    expected = weights(p, view(given["x"], p, "x"), view(given["y"], p, "y"))
    for plan in plans(p, 2, precision):
        *before, sums, finish = plan.launches
        memory = dict(given)
        for launch in before:
            memory = boxes.laid(launch, memory)
        slots = boxes.weights_boxes(sums, memory)
        out = np.full(room(p, "w"), np.nan)
        boxes.finish_weights(finish, slots, out)
        assert np.array_equal(view(out, p, "w"), expected), str(plan)


def test_what_is_left_to_others():
    for line, reason in [
        ("x bf16 n2 g1 cx16 cy16 x8x8 w3x3 y8x8 s1x1 d1x1 p1x1 x@nxc y@nxc", "it takes weight gradients"),
        ("w f64 n2 g1 cx16 cy16 x8x8 w3x3 y8x8 s1x1 d1x1 p1x1 x@nxc y@nxc", "it takes f32, bf16 and f16"),
        ("w bf16 n2 g1 cx16 cy16 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1", "do not lie side by side"),
        ("w bf16 n2 g1 cx33 cy16 x8x8 w3x3 y8x8 s1x1 d1x1 p1x1 x@nxc y@nxc", "no multiples of 16 bytes"),
        ("w bf16 n2 g2 cx64 cy64 x33x33 w2x2 y4x4 s10x10 d1x1 p0x0 x@nxc y@nxc", "a stride is above 8"),
        ("w bf16 n0 g1 cx64 cy64 x33x33 w2x2 y32x32 s1x1 d1x1 p0x0 x@nxc y@nxc", "there is no product"),
    ]:
        assert reason in hopper.plan(Problem.parse(line), TARGET, "default")
    dense = Problem.parse(PROBLEMS["f32"])
    assert "it takes f32 by" in hopper.plan(dense, TARGET, "ieee")
    assert "in three parts it takes" in hopper.plan(dense, TARGET, "default"), "sums of so little are taken at once"
    assert "taps of 9 channels of x are laid side by side" in " ".join(hopper.plan(dense, TARGET, "tf32").why)
    groups = Problem.parse(PROBLEMS["grouped in f32"])
    assert hopper.plan(groups, TARGET, "tf32").precision == "bf16x3", "5 channels are no multiple of 16 bytes"
    apart = replace(dense, cx=32, cy=32, x_strides=(1344, 0, 42, 7, 1), y_strides=(1344, 0, 42, 7, 1))
    assert "with copies, products are quicker" in hopper.plan(apart, TARGET, "tf32")
    wider = replace(dense, cx=16, x_strides=(672, 16, 1, 112, 16))
    assert hopper.plan(wider, TARGET, "tf32").precision == "tf32"


def test_layers_get_the_forms_that_are_made_for_them():
    def walk(line):
        plan = hopper.plan(Problem.parse(line), TARGET, "default")
        assert plan.kernel == "weights_boxes"
        assert plan.workspace <= hopper.MOST_WORKSPACE + (128 << 20)
        return boxes.numbers(plan.launches[-2]), plan

    dense, plan = walk(f"w bf16 n128 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 {NXC}")
    assert (dense.WALK[boxes.TAPS], dense.COLUMNS * dense.SPLIT, dense.HALO) == (3, 128, 2)
    assert "3 taps from one box" in " ".join(plan.why)
    last, _ = walk(f"w bf16 n128 g1 cx512 cy512 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 {NXC}")
    assert last.WALK[boxes.SKIP]
    assert last.WALK[boxes.BOX : boxes.BOX + 4] == (1, 1, 64, 1)
    _, plan = walk(f"w bf16 n64 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3 {NXC}")
    assert plan.launches[0].kernel == "fold_taps"
    assert "taps of 3 channels of x are laid side by side" in " ".join(plan.why)
    grouped, _ = walk(f"w bf16 n128 g32 cx4 cy4 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {NXC}")
    assert (grouped.x_group, grouped.blocks, grouped.COLUMNS) == (64, 1, 64)


def test_lines_begin_at_multiples_of_16_bytes():
    """The copy engine faults where they do not."""
    padded = "w bf16 n64 g1 cx64 cy64 x8x16 w3x3 y8x16 s1x1 d1x1 p2x4 x@nxc"
    for line in (padded, *(line for name, line in PROBLEMS.items() if "in lines" in name)):
        p = Problem.parse(line)
        for seen, _ in hopper.views(p, "default", TARGET):
            assert seen.lines == "y"
            for cut in hopper.cuts(seen, 2, SMALL):
                assert not cut.skip, "what is left out may be anything but a multiple"
                assert cut.box[3] % 16 == 0


@pytest.mark.slow
def test_a_list_is_cut_evenly():
    for name in PROBLEMS:
        p = Problem.parse(PROBLEMS[name])
        for plan in plans(p, 3):
            n = boxes.numbers(plan.launches[-2])
            most = min(SMALL.multiprocessors, n.total)
            tiles = n.total // n.whole * -(-n.units // n.WALK[boxes.UNITS]) * n.columns
            assert plan.launches[-2].programs in (most, most // tiles * tiles), "nobody is without work"
            count = sum(boxes.boxes(part, n)[0] for part in range(-(-n.units // n.WALK[boxes.UNITS])))
            assert n.whole == count * n.columns


def test_tiles_that_read_the_same_have_equally_many_programs():
    """Where the second cache does not hold what they read, in tf32."""
    found = []
    for channels in (1024, 64):
        line = f"w f32 n128 g1 cx{channels} cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0 {NXC}"
        sums = hopper.plan(Problem.parse(line), TARGET, "tf32").launches[0]
        n = boxes.numbers(sums)
        tiles = -(-n.units // n.WALK[boxes.UNITS]) * n.columns
        found.append((tiles, sums.programs))
    assert found[0][1] % found[0][0] == 0
    assert found == [(16, 128), (found[1][0], 132)]


FORMS = ["dense", "far taps", "3D", "grouped in f32", "stem", "strided", "dense in f32"]


@pytest.mark.parametrize("name", slow_but(["dense"], FORMS))
def test_machine_code_is_a_bare_loop(name):
    compiler = pytest.importorskip("convgrad.gpu.compile")
    pytest.importorskip("triton")
    from test_offline import spills

    precision = {"dense in f32": "tf32", "grouped in f32": "bf16x6"}.get(name, "default")
    for launch in plans(Problem.parse(PROBLEMS[name]), 0, precision)[0].launches:
        kernel = compiler.build(launch, TARGET, aligned=True)
        assert kernel.metadata.shared <= TARGET.shared
        assert spills(kernel) == 0
        if launch.kernel == "weights_boxes":
            assert "wgmma.mma_async" in kernel.asm["ptx"]
            assert "cp.async.bulk.tensor.5d" in kernel.asm["ptx"]


LARGE_F32 = {
    "dense": f"w f32 n128 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 {NXC}",
    "stem": "w f32 n64 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_F32)
def test_parts_leave_the_matrix_units_with_every_box(name):
    """Sums of so many registers do not spill, and plain units add what each box brings."""
    compiler = pytest.importorskip("convgrad.gpu.compile")
    pytest.importorskip("triton")
    from test_offline import machine_code, spills

    plan = hopper.plan(Problem.parse(LARGE_F32[name]), TARGET, "default")
    (launch,) = (launch for launch in plan.launches if launch.kernel == "weights_boxes")
    kernel = compiler.build(launch, TARGET, aligned=True)
    n = boxes.numbers(launch)
    assert spills(kernel) == 0
    sums = n.WALK[boxes.UNITS] * n.BLOCK // 64 * n.WALK[boxes.TAPS] * (2 if n.SPLIT == 2 else 1)
    code = machine_code(kernel)
    assert code.count("FADD") == sums * n.COLUMNS // 2
    assert code.count("HGMMA") == sums * 6 * boxes.prod(n.WALK[boxes.BOX : boxes.BOX + 4]) // 16


@pytest.mark.slow
def test_products_in_tf32_do_not_wait_for_each_other():
    """The compiler has every one wait where registers are too few, or where sums are copied between them."""
    compiler = pytest.importorskip("convgrad.gpu.compile")
    pytest.importorskip("triton")
    from test_offline import machine_code

    large = f"w f32 n8 g1 cx512 cy512 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1 {NXC}"
    sums = hopper.plan(Problem.parse(large), TARGET, "tf32").launches[0]
    code = machine_code(compiler.build(sums, TARGET, aligned=True))
    assert 0 < code.count("DEPBAR.LE gsb0, 0x0") < code.count("HGMMA") / 6


def test_explain_tells_what_runs(monkeypatch):
    monkeypatch.setenv("CONVGRAD_GPU_TARGET", "sm_90")
    monkeypatch.setattr("convgrad.precision._chosen", "bf16x6")
    stem = "w f32 n64 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3"
    text = " ".join(convgrad.explain(stem, device="cuda").split())
    assert "gpu, Triton kernel weights_boxes: matrix products over boxes of pixels by warps with roles" in text
    assert "products of f32 as 6 products of parts in bf16" in text
    assert "cut evenly into" in text


def test_programs_have_whole_shares_of_tiles():
    """Where few multiprocessors are idle then, every run is of one tile: programs of all tiles read the same pixels."""
    problem = Problem.parse(f"w bf16 n32 g1 cx80 cy512 x3000 w3 y3000 s1 d1 p1 {NXC}")
    found = set()
    for seen, _ in hopper.views(problem, "default", TARGET):
        for cut in hopper.cuts(seen, 2, TARGET):
            programs = hopper.programs_of(problem, cut, TARGET)
            assert programs == 132 or (programs % cut.tiles == 0 and programs >= 128)
            assert (programs % cut.tiles == 0) >= (cut.tiles in (8, 12) and not cut.skip)
            plan = hopper.settle(problem, TARGET, cut, (), 1e-6) if programs not in found else None
            assert plan is None or dict(plan.launches[-1].values)["runs"] == plan.launches[0].programs == programs
            found.add(programs)
    assert 128 in found
