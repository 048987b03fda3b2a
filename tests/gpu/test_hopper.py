"""Gathers for Hopper: what they read, which boxes they are given, and that they compile to what was meant."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product
from math import prod

import gathers
import numpy as np
import pytest
from test_offline import machine_code, spills

from convgrad.gpu import compile as compiler
from convgrad.gpu.plan import patches, registry
from convgrad.gpu.plan.hopper import fold, gather, launches, lines, views, ways
from convgrad.gpu.plan.records import Plan
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem
from marks import slow_but

TARGET = of_kind("sm_90")

LAYERS = {
    "dense": "{} {} n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "narrow": "{} {} n16 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "pointwise": "{} {} n16 g1 cx256 cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio",
    "strided": "{} {} n16 g1 cx128 cy128 x29x31 w3x3 y15x16 s2x2 d1x1 p1x1 x@nxc y@nxc w@xio",
    "patches": "{} {} n16 g1 cx8 cy96 x32x32 w4x4 y8x8 s4x2 d1x1 p0x0 x@nxc y@nxc",
    "stem": "{} {} n16 g1 cx3 cy64 x64x64 w7x7 y32x32 s2x2 d1x1 p3x3 x@nxc y@nxc w@xio",
    "grouped": "{} {} n16 g32 cx4 cy4 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio bias",
    "3d": "{} {} n2 g1 cx32 cy32 x16x18x20 w3x3x3 y16x18x20 s1x1x1 d1x1x1 p1x1x1 x@nxc y@nxc w@xio",
    "1d": "{} {} n16 g1 cx64 cy64 x500 w9 y500 s1 d1 p4 x@nxc y@nxc w@xio bias accumulate",
}

STORES = {
    "copy": "x bf16 n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "turned": "x bf16 n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 y@nxc",
    "turned in pieces": "x f32 n16 g1 cx128 cy128 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1 y@nxc",
    "lines": "x bf16 n64 g1 cx128 cy128 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 y@nxc",
    "rows": "x bf16 n16 g1 cx3 cy96 x32x32 w4x4 y8x8 s4x4 d1x1 p0x0 x@nxc y@nxc",
    "plain": "x bf16 n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc accumulate",
    "turned, f32": "x f32 n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 accumulate",
}
"""A problem for each way to store results, and what machine code shows of it."""
STORED = {
    "copy": r"UTMASTG",
    "lines": r"UTMASTG",
    "turned": r"STG\.E\.64",
    "turned in pieces": r"STG\.E\.128",
    "turned, f32": r"STG\.E\.128",
    "rows": r"STG\.E\.(64|128)",
    "plain": r"STG\.E ",
}


def planned(name, wanted="x", dtype="bf16", precision="default"):
    found = gather.plan(Problem.parse(LAYERS[name].format(wanted, dtype)), TARGET, precision)
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize("wanted", "xy")
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 4)])
def test_views_meet_what_the_definition_says(wanted, strides, dilations):
    """Every result reads, by all of its taps, the positions that belong to it; no more, and none twice."""
    sizes = "n1 g1 cx8 cy8 x9x11 w4x3"
    line = "{} bf16 {} y7x5 s{}x{} d{}x{} p2x-1 x@nxc y@nxc".format(wanted, sizes, *strides, *dilations)
    problem = Problem.parse(line)
    space = views.space(problem)
    tap_step, step = views.steps_of(space)
    back = wanted == "x"
    found = set()
    for view in views.views(space, back):
        for taps in product(*map(range, view.taps)):
            tap = tuple(view.tap[a] + taps[a] * tap_step[a] for a in range(3))
            moved = tuple(view.first[a] + taps[a] * (-step[a] if back else step[a]) for a in range(3))
            for q in product(*map(range, space.made)):
                to = tuple(q[a] * space.stride[a] + view.phase[a] for a in range(3)) if back else q
                read = tuple(q[a] + moved[a] for a in range(3))
                if not back:
                    read = tuple(read[a] * space.stride[a] + view.phase[a] for a in range(3))
                if all(0 <= read[a] < space.given[a] and to[a] < space.made[a] for a in range(3)):
                    assert (to, tap, read) not in found
                    found.add((to, tap, read))
    for to, tap in product(product(*map(range, space.made)), product(*map(range, space.kernel))):
        for read in product(*map(range, space.given)):
            x, y = (to, read) if back else (read, to)
            meet = all(y[a] * space.stride[a] + tap[a] * space.dilation[a] - space.pad[a] == x[a] for a in range(3))
            assert ((to, tap, read) in found) == meet


def test_positions_within_a_stride_meet_all_that_reaches_them():
    problem = Problem.parse("x bf16 n1 g1 cx3 cy8 x20x20 w7x5 y10x7 s2x3 d1x2 p3x4 x@nxc y@nxc")
    space = views.space(problem)
    first, count = ways.meeting(space)
    for axis in range(3):
        met = set()
        for i, k in product(range(space.stride[axis]), range(space.kernel[axis])):
            far = i + space.pad[axis] - k * space.dilation[axis]
            met |= {far // space.stride[axis]} if far % space.stride[axis] == 0 else set()
        assert min(met) == first[axis]
        assert max(met) < first[axis] + count[axis]


def test_phases_beyond_the_result_are_left_out():
    line = "x bf16 n2 g1 cx64 cy64 x18x2x17 w2x4x1 y23x1x24 s1x3x1 d1x1x1 p3x2x3 x@nxc y@nxc w@xio"
    plan = gather.plan(Problem.parse(line), TARGET)
    assert isinstance(plan, Plan), plan
    assert all(min(descriptor.shape) > 0 for descriptor in plan.launches[-1].descriptors)


def addresses(problem):
    """For every element of y, the pairs of elements of x and w whose products it sums, all by their addresses."""
    found = {}
    at = lambda strides, index: sum(i * s for i, s in zip(index, strides, strict=True))  # noqa: E731
    for y in product(*map(range, problem.shape("y"))):
        n, g, cy, *o = y
        pairs = []
        for cx, *k in product(range(problem.cx), *map(range, problem.w)):
            x = [
                i * s + j * d - b
                for i, j, s, d, b in zip(o, k, problem.stride, problem.dilation, problem.pad, strict=True)
            ]
            if all(0 <= i < size for i, size in zip(x, problem.x, strict=True)):
                pairs.append((at(problem.x_strides, (n, g, cx, *x)), at(problem.w_strides, (g, cy, cx, *k))))
        found[at(problem.y_strides, y)] = sorted(pairs)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "y bf16 n2 g1 cx3 cy2 x8x8 w4x4 y2x2 s4x4 d1x1 p0x0 x@nxc y@nxc w@xio",
        "y bf16 n2 g1 cx3 cy2 x9x8 w2x3 y3x3 s3x2 d2x1 p0x0 x@nxc w@xio",
        "y bf16 n1 g1 cx1 cy2 x9x8 w3x2 y7x7 s1x1 d1x1 p0x0",
        "y bf16 n2 g1 cx4 cy3 x9 w3 y3 s3 d1 p0 x@nxc w@xio",
        "y bf16 n2 g1 cx2 cy3 x9x3 w3x1 y3x2 s3x2 d1x2 p0x0 x@nxc w@xio",
    ],
)
def test_windows_are_read_as_channels(line):
    problem = Problem.parse(line)
    other = fold.folded(problem)
    assert other is not None
    assert addresses(other) == addresses(problem)


def test_pixels_that_are_neighbours_are_stored_together():
    """In f32 with channels first, rows of 14 leave two pixels at a time, one after the other.

    With a pixel of each image in a box, a pointwise layer took twice as long, which is copied then.
    """
    plan = gather.plan(Problem.parse("x f32 n128 g1 cx256 cy256 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1"), TARGET)
    assert isinstance(plan, Plan), plan
    assert (plan.launches[-1].constant("STORE"), plan.launches[-1].constant("PIECE")) == ("turned", 2)
    assert plan.launches[-1].constant("BOX")[3] >= 8
    pointwise = Problem.parse("x f32 n128 g1 cx1024 cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0")
    found = registry.make_plan(pointwise, TARGET)
    assert (found.level, found.within) == ("copies", "Hopper's gathers")
    assert [launch.kernel for launch in found.launches] == ["split", "pack", "gather", "relay"]


def test_what_no_window_meets_is_left_out():
    """Of x in f32, which is taken apart: three quarters of it are not there for a pointwise layer with a stride."""
    line = "{} f32 n2 g2 cx3 cy2 x9x8 w1x1 y5x3 s2x3 d1x1 p0x0"
    problem = Problem.parse(line.format("y"))
    other = patches.met(problem)
    assert (other.x, other.stride) == ((5, 3), (1, 1))
    assert addresses(other) == addresses(problem)
    for change in (("y5x3", "y6x3"), ("p0x0", "p1x0"), ("w1x1", "w2x1"), ("{}", "x")):
        kept = Problem.parse(line.replace(*change).format("y"))
        assert patches.met(kept) is kept, "windows meet padding, have several elements, or all of x is wanted"
    large = "w f32 n64 g1 cx256 cy256 x28x28 w1x1 y14x14 s2x2 d1x1 p0x0 x@nxc y@nxc"
    found = registry.make_plan(Problem.parse(large), TARGET)
    assert found.level == "weights on Hopper"
    assert dict(found.areas)["x, laid anew"] == 3 * 2 * 64 * 256 * 14 * 14


def test_windows_with_padding_are_not_read_as_channels():
    for line in ("p1x0", "d1x2", "y3x2", "x@ncx"):
        words = "y bf16 n2 g1 cx3 cy2 x9x9 w4x4 y2x2 s4x4 d1x1 p0x0 x@nxc y@nxc w@xio"
        for key in ("p", "d", "y", "x@"):
            if line.startswith(key):
                words = re.sub(rf" {key}[0-9n]\S*", f" {line}", words, count=1)
        assert fold.folded(Problem.parse(words)) is None, words


@pytest.mark.parametrize("name", LAYERS)
def test_plans_fit_the_machine(name):
    for wanted, dtype in (("x", "bf16"), ("y", "f16"), ("x", "f32")):
        problem = Problem.parse(LAYERS[name].format(wanted, dtype))
        found = gather.plan(problem, TARGET, "tf32")
        if isinstance(found, str):
            assert wanted == "y", found
            continue
        launch = found.launches[-1]
        box, rows, more = (launch.constant(word) for word in ("BOX", "ROWS", "MORE"))
        box = box[: gathers.LINES]
        assert prod(box) == found.tile[0]
        assert max(*box, more) <= 256
        assert rows == 1 or (prod(box[1:]) % 8 == 0 and more >= (rows - 1) * abs(launch.constant("OSTEP")[1]))
        assert 1 <= launch.programs <= TARGET.multiprocessors
        assert not launch.constant("RESIDENT") or launch.programs % dict(launch.values)["tiles"][0] == 0
        for descriptor in launch.descriptors:
            assert descriptor.strides[-1] == 1
            item = 4 if dtype == "f32" else 2
            assert not any(stride * item % 16 for stride in (*descriptor.strides[:-1], descriptor.offset))
            assert descriptor.block[-1] * item >= 16


def test_the_level_says_what_it_does_not_serve():
    dense = Problem.parse(LAYERS["dense"].format("x", "bf16"))
    for changed, reason in [
        (replace(dense, wanted="w"), "it makes y and x"),
        (replace(dense, dtype="f64", out_dtype="f64"), "f64 has other matrix units"),
        (
            Problem.parse(LAYERS["dense"].format("x", "bf16").replace("y@nxc", "")),
            "channels of y do not lie side by side",
        ),
        (Problem.parse(LAYERS["stem"].format("y", "bf16")), "strides of x are no multiples of 16 bytes"),
    ]:
        assert gather.plan(changed, TARGET) == reason
    assert gather.plan(replace(dense, dtype="f32", out_dtype="f32"), TARGET, "ieee") == "it does not take f32 in ieee"
    assert registry.make_plan(dense, TARGET).level == "Hopper's gathers"
    assert registry.make_plan(dense, of_kind("sm_100")).level != "Hopper's gathers"
    assert registry.make_plan(dense, TARGET, aligned=False).level != "Hopper's gathers"


@pytest.mark.parametrize(
    "line",
    [
        "x bf16 n64 g1 cx128 cy128 x56x56 w3x3 y28x28 s2x2 d1x1 p1x1",
        "x bf16 n64 g1 cx192 cy384 x28x28 w2x2 y14x14 s2x2 d1x1 p0x0",
        "x bf16 n16 g1 cx512 cy512 x2044 w9 y2044 s1 d1 p4",
    ],
)
def test_results_that_lie_apart_are_copied(line):
    """Phases and rows whose elements have no neighbours in memory took ten times as long when they were stored so."""
    problem = Problem.parse(f"{line} y@nxc w@xio")
    assert gather.plan(problem, TARGET) == "results would be written one by one"
    found = registry.make_plan(Problem.parse(line), TARGET)
    assert found.level == "copies"
    assert found.launches[-2].constant("STORE") == "copy"
    assert found.launches[-1].kernel == "relay"


F32 = "f32 n64 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1"


@pytest.mark.parametrize("wanted", "xyw")
def test_f32_is_taken_apart_as_it_lies(wanted):
    """By default, in every layout, without copies; where all is quicker at once, it stays with the portable level."""
    levels = {"w": "weights on Hopper"}
    for layout in ("", "x@nxc y@nxc", "x@nxc", "y@nxc"):
        found = registry.make_plan(Problem.parse(f"{wanted} {F32} {layout}"), TARGET)
        assert (found.level, found.precision) == (levels.get(wanted, "Hopper's gathers"), "bf16x6")
        kernels = [launch.kernel for launch in found.launches]
        assert kernels[0] == "split"
        assert "relay" not in kernels
    if wanted != "y":  # which reads few channels
        pointwise = "f32 n128 g1 cx64 cy256 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio"
        found = registry.make_plan(Problem.parse(f"{wanted} {pointwise}"), TARGET)
        assert (found.level, found.precision) == ("portable", "bf16x6")
        assert any("in three parts it takes" in reason for reason in found.why)
    assert registry.make_plan(Problem.parse(f"{wanted} {F32} x@nxc y@nxc"), TARGET, "ieee").precision == "ieee"


def test_a_plan_follows_the_machine_and_tells_why():
    found = planned("dense")
    assert any("taps read one box" in reason for reason in found.why)
    small = replace(TARGET, multiprocessors=5, shared=100_000)
    tight = gather.plan(Problem.parse(LAYERS["dense"].format("x", "bf16")), small)
    assert isinstance(tight, Plan)
    assert tight.launches[-1].programs <= 5
    assert tight.seconds > found.seconds
    assert any("positions within a stride" in reason for reason in planned("stem").why)
    assert any("groups share a product" in reason for reason in planned("grouped").why)


def test_three_boxes_are_on_their_way_where_memory_is_waited_for():
    """Tiles of 128 rows leave room for them: 116 microseconds on an H200, where larger ones took 122."""
    patches = "y f32 n16 g1 cx64 cy128 x256x256 w2x2 y128x128 s2x2 d1x1 p0x0 x@nxc w@0,256,1,128,64 y@nxc"
    found = registry.make_plan(Problem.parse(patches), TARGET, "tf32")
    assert found.tile == (128, 128, 32)
    assert any("3 at once" in reason for reason in found.why)


SMALL = replace(TARGET, multiprocessors=3)
SUMS = {
    "dense": "bf16 n5 g1 cx16 cy24 x7x6 w3x3 y7x6 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio bias",
    "dilated": "bf16 n2 g1 cx24 cy16 x12x9 w3x2 y9x10 s1x1 d3x2 p2x3 x@nxc y@nxc",
    "strided": "bf16 n3 g1 cx16 cy16 x9x8 w3x4 y5x4 s2x2 d1x1 p1x1 x@nxc y@nxc w@xio",
    "strides and dilations": "bf16 n2 g1 cx16 cy8 x13x9 w3x2 y3x4 s3x2 d2x1 p1x0 x@nxc y@nxc",
    "few channels": "bf16 n2 g1 cx3 cy16 x9x8 w5x4 y5x4 s2x2 d1x1 p2x1 x@nxc y@nxc w@xio bias",
    "patches": "bf16 n2 g1 cx4 cy16 x12x8 w4x4 y3x2 s4x4 d1x1 p0x0 x@nxc y@nxc w@xio",
    "groups": "bf16 n2 g12 cx6 cy10 x3x4 w3x2 y3x5 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "groups of one": "bf16 n2 g8 cx1 cy8 x3x4 w2x2 y3x5 s1x1 d1x1 p0x1 x@nxc y@nxc bias",
    "1d": "bf16 n9 g1 cx16 cy16 x20 w9 y20 s1 d1 p4 x@nxc y@nxc w@xio",
    "3d": "bf16 n1 g1 cx16 cy16 x3x4x5 w2x3x2 y4x4x4 s1x1x1 d1x1x1 p1x1x0 x@nxc y@nxc",
    "padding beyond the kernel": "bf16 n1 g1 cx8 cy8 x3x2 w2x2 y9x6 s1x1 d1x1 p5x3 x@nxc y@nxc",
    "channels first": "f32 n2 g1 cx5 cy7 x6x5 w3x3 y3x3 s2x2 d1x1 p1x1 accumulate",
    "results in lines": "bf16 n2 g1 cx16 cy16 x5x24 w3x3 y5x24 s1x1 d1x1 p1x1 {}@nxc bias",
    "f32": "f32 n2 g3 cx5 cy6 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "f32, channels first": "f32 n3 g1 cx18 cy20 x6x8 w3x3 y6x8 s1x1 d1x1 p1x1 accumulate",
}


LINES = {
    "lines": "bf16 n3 g1 cx16 cy24 x6x16 w3x1 y6x16 s1x1 d1x1 p1x0 bias",
    "lines, far taps": "bf16 n2 g1 cx24 cy16 x9x24 w3x1 y7x24 s1x1 d2x1 p1x0",
    "lines, rows by phases": "bf16 n2 g1 cx16 cy16 x9x16 w3x1 y5x16 s2x1 d1x1 p1x0 w@xio",
    "lines, pointwise": "f16 n3 g1 cx24 cy40 x6x12 w1x1 y6x12 s1x1 d1x1 p0x0 w@xio",
    "lines, one row": "bf16 n1 g1 cx16 cy16 x600 w1 y600 s1 d1 p0 accumulate",
    "lines of groups": "bf16 n2 g3 cx24 cy8 x3x24 w2x1 y4x24 s1x1 d1x1 p1x0",
    "lines, then channels": "bf16 n2 g1 cx16 cy16 x5x24 w3x1 y5x24 s1x1 d1x1 p1x0 {}@nxc",
    "lines, 3D": "bf16 n2 g1 cx16 cy8 x3x4x16 w2x3x1 y4x4x16 s1x1x1 d1x1x1 p1x1x0",
    "lines in f32": "f32 n3 g1 cx20 cy36 x6x8 w3x1 y6x8 s1x1 d1x1 p1x0 bias",
    "lines in f32, pointwise": "f32 n3 g1 cx24 cy40 x6x6 w1x1 y6x6 s1x1 d1x1 p0x0 w@xio accumulate",
    "lines in f32, rows by phases": "f32 n2 g1 cx16 cy12 x9x8 w3x1 y5x8 s2x1 d1x1 p1x0",
    "lines of groups in f32": "f32 n2 g3 cx24 cy8 x3x12 w2x1 y4x12 s1x1 d1x1 p1x0",
}
"""Channels first, where taps begin at multiples of 16 bytes; so are results, unless channels last are named."""


def definition(problem, given):
    """The sums as the problem states them."""
    made = np.zeros(problem.shape(problem.wanted))
    for tap in np.ndindex(*problem.w):
        for o in product(*(range(*problem.reach(axis, k)) for axis, k in enumerate(tap))):
            axes = zip(o, tap, problem.stride, problem.dilation, problem.pad, strict=True)
            of_x, of_y = (..., *(i * s + k * d - b for i, k, s, d, b in axes)), (..., *o)
            w = given["w"][(..., *tap)]
            if problem.wanted == "y":
                made[of_y] += np.einsum("ngc,gdc->ngd", given["x"][of_x], w)
            else:
                made[of_x] += np.einsum("ngd,gdc->ngc", given["y"][of_y], w)
    return made


def few(problem, precision, count, in_lines):
    """The plan of a problem, and some others, none of them large."""
    problem = lines.flat(problem) if in_lines else fold.folded(problem) or problem
    space = views.space(problem, in_lines)
    operands = gather.operands_of(problem, precision)
    found = [
        candidate
        for way in ways.ways(problem, space, operands)
        for candidate in gather.candidates(problem, space, way, SMALL)
        if candidate.shape.columns <= 64
    ]
    kept = random.Random(str(problem)).sample(found, min(count, len(found)))
    return [launches.settle(problem, space, candidate, SMALL) for candidate in (min(found), *kept)]


QUICK_SUMS = [("strided", "x"), ("f32", "y"), ("few channels", "x")]
ALL_LINES = [(name, wanted) for name in LINES for wanted in "xy"]
ALL_SUMS = [(name, wanted) for name in SUMS for wanted in "xy" if (name, wanted) != ("few channels", "y")]


@pytest.mark.parametrize(("name", "wanted"), slow_but([*QUICK_SUMS, *ALL_LINES[::3]], [*ALL_SUMS, *ALL_LINES]))
def test_boxes_and_taps_make_the_sums(name, wanted):
    """What launches say is what the definition says, by NumPy, which follows them."""
    given = "y" if wanted == "x" else "x"
    problem = Problem.parse(f"{wanted} {(SUMS | LINES)[name].format(wanted if name in LINES else given)}")
    rng = np.random.default_rng(0)
    most = 2 if problem.dtype != "f32" else 60000
    memory = {}
    for role in "xwy":
        reach_of = zip(problem.shape(role), problem.strides(role), strict=True)
        memory[role] = rng.integers(-most, most + 1, 1 + sum((n - 1) * s for n, s in reach_of)).astype(float)

    def seen_as(role):
        steps = [8 * stride for stride in problem.strides(role)]
        return np.lib.stride_tricks.as_strided(memory[role], problem.shape(role), steps)

    channels = prod(problem.shape(wanted)[1:3])
    bias = rng.integers(-2, 3, channels).astype(float) if problem.bias_stride else None
    expected = definition(problem, {role: seen_as(role) for role in "xwy"})
    if bias is not None:
        expected += bias.reshape(1, *problem.shape(wanted)[1:3], *[1] * problem.rank)
    before = memory[wanted]
    if problem.accumulate:
        expected += seen_as(wanted)
    for plan in few(problem, "tf32" if name in LINES else "bf16x6", 3, name in LINES):
        memory[wanted] = before.copy() if problem.accumulate else np.full(before.shape, np.nan)
        gathers.compute(plan, memory, bias)
        assert np.array_equal(seen_as(wanted), expected), (str(plan), plan.why)


QUICK = [("dense", "x", "bf16")]
ALL = [
    *((name, "xy"[at % 2], "bf16") for at, name in enumerate(LAYERS)),
    ("stem", "x", "bf16"),
    *(("dense", "x", dtype) for dtype in ("tf32", "bf16x6")),
]


@pytest.mark.parametrize(("name", "wanted", "dtype"), slow_but(QUICK, ALL))
def test_gathers_compile(name, wanted, dtype):
    """Loops are of matrix instructions, and nothing spills."""
    problem = Problem.parse(LAYERS[name].format(wanted, "f32" if dtype in ("tf32", "bf16x6") else dtype))
    plan = gather.plan(problem, TARGET, dtype)
    if isinstance(plan, str):
        assert (name, wanted) == ("stem", "y"), plan
        return
    for launch in plan.launches:
        kernel = compiler.build(launch, TARGET, aligned=True)
        assert kernel.metadata.shared <= TARGET.shared
        assert spills(kernel) == 0, plan
        if launch.kernel == "gather":
            assert "wgmma.mma_async" in kernel.asm["ptx"]
            assert re.search(r"cp\.async\.bulk\.tensor\.5d", kernel.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_results_are_stored_together(store):
    plan = gather.plan(Problem.parse(STORES[store]), TARGET, "tf32" if "pieces" in store else "default")
    assert isinstance(plan, Plan), plan
    assert plan.launches[-1].constant("STORE") == store.replace(",", " ").split()[0]
    assert re.search(STORED[store], machine_code(compiler.build(plan.launches[-1], TARGET, aligned=True)))


@pytest.mark.parametrize("kind", slow_but(["resident"], ["resident", "ring", "halo", "rows", "plain"]))
def test_other_candidates_compile(kind):
    """Ways that the model does not choose for these layers would be computed as well."""
    name = {"rows": "strided", "plain": "stem"}.get(kind, "narrow")
    problem = Problem.parse(LAYERS[name].format("x", "bf16"))
    space = views.space(problem)
    operands = gather.operands_of(problem, "default")
    for candidate in (
        c for way in ways.ways(problem, space, operands) for c in gather.candidates(problem, space, way, TARGET)
    ):
        plan = launches.settle(problem, space, candidate, TARGET)
        constants = dict(plan.launches[-1].constants)
        is_it = {
            "resident": constants["RESIDENT"],
            "ring": not constants["RESIDENT"] and constants["ROWS"] == 1,
            "halo": not constants["RESIDENT"] and constants["ROWS"] > 1,
        }.get(kind, constants["STORE"] == kind)
        if is_it and constants["BOX"][1:3] == (1, 1):
            compiler.build(plan.launches[-1], TARGET, aligned=True)
            return
    pytest.fail(f"no candidate is {kind}")


AS_THEY_LIE = {
    "pointwise": "{} bf16 n128 g1 cx64 cy256 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0",
    "halo": "{} f16 n64 g1 cx64 cy64 x56x56 w3x1 y56x56 s1x1 d1x1 p1x0",
    "few channels": "{} bf16 n4 g1 cx32 cy32 x64x64x64 w3x3x1 y64x64x64 s1x1x1 d1x1x1 p1x1x0",
}
ONLY_Y = {
    "stem": "w bf16 n64 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3",
    "dense": "w bf16 n8 g1 cx128 cy128 x256x256 w3x3 y256x256 s1x1 d1x1 p1x1",
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    slow_but(
        [("pointwise", "x")],
        [*product(["pointwise"], "xw"), *product(["halo"], "xy"), *product(["few channels"], "yw")],
    ),
)
def test_channels_first_are_read_as_they_lie(name, wanted):
    """No copies; the matrix units take pixels by columns, and results leave by the copy engine."""
    plan = registry.make_plan(Problem.parse(AS_THEY_LIE[name].format(wanted)), TARGET)
    assert plan.level == "channels first on Hopper"
    assert not any(launch.kernel == "relay" for launch in plan.launches)
    sums = next(launch for launch in plan.launches if launch.kernel in ("gather", "weights_boxes"))
    kernel = compiler.build(sums, TARGET, aligned=True)
    assert spills(kernel) == 0
    assert kernel.metadata.shared <= TARGET.shared
    flags = set(re.findall(r"wgmma\.mma_async[^;]*, ([01]), ([01]);", kernel.asm["ptx"]))
    assert {a for a, _ in flags} == {"0" if wanted == "w" else "1"}, "whether pixels of the left operand lie by columns"
    assert wanted == "w" or sums.constant("STORE") == "lines"


IN_TF32 = {
    "pointwise": "{} f32 n128 g1 cx64 cy256 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0",
    "images of 196 pixels": "{} f32 n128 g1 cx1024 cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0",
    "halo": "{} f32 n64 g1 cx64 cy48 x56x56 w3x1 y56x56 s1x1 d1x1 p1x0",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wanted"), [*product(["pointwise", "halo"], "xw"), ("images of 196 pixels", "y")])
def test_channels_first_in_tf32_come_through_registers(name, wanted):
    """No copies: the matrix units take lines of y and x of weight gradients, and of all others the left side."""
    plan = registry.make_plan(Problem.parse(IN_TF32[name].format(wanted)), TARGET, "tf32")
    assert plan.level == "channels first on Hopper"
    assert not any(launch.kernel == "relay" for launch in plan.launches)
    sums = next(launch for launch in plan.launches if launch.kernel in ("gather", "weights_boxes"))
    kernel = compiler.build(sums, TARGET, aligned=True)
    assert spills(kernel) == 0
    assert kernel.metadata.shared <= TARGET.shared
    products = re.findall(r"wgmma\.mma_async[^;]*k8\.f32\.tf32\.tf32 [^;]*?\}, ?([{%])", kernel.asm["ptx"])
    assert set(products) == {"{"}, "the left side is in registers"
    assert ("ldmatrix" in kernel.asm["ptx"]) == (wanted == "w"), "pixels by channels are read one by one"
    # Either group of warps waits for the products of a box and a tap, and once more at the end; not for each of them.
    code, taps = machine_code(kernel), dict(sums.constants).get("ROWS", 1)
    assert 2 <= code.count("DEPBAR.LE gsb0, 0x0") <= 2 * (taps + 1) < code.count("HGMMA")


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_Y)
def test_y_is_read_as_it_lies_where_taps_shift_x(name):
    """Weight gradients shift x alone, which is laid anew; y is not copied."""
    plan = registry.make_plan(Problem.parse(ONLY_Y[name]), TARGET)
    assert [launch.kernel for launch in plan.launches if ("y", "bf16") in launch.tensors] == []
    sums = plan.launches[-2]
    kernel = compiler.build(sums, TARGET, aligned=True)
    assert spills(kernel) == 0
    flags = set(re.findall(r"wgmma\.mma_async[^;]*, ([01]), ([01]);", kernel.asm["ptx"]))
    assert flags == {("1", "0")}


def test_taps_that_begin_between_pieces_of_16_bytes_are_copied():
    """The copy engine faults on an H200 where a line begins between them, as three taps side by side do."""
    for line, served in (
        ("w3x1 y56x56 s1x1 d1x1 p1x0", True),
        ("w3x3 y56x56 s1x1 d1x1 p1x1", False),
        ("w1x1 y56x58 s1x1 d1x1 p0x1", False),
    ):
        plan = registry.make_plan(Problem.parse(f"x bf16 n128 g1 cx128 cy128 x56x56 {line}"), TARGET)
        assert (plan.level == "channels first on Hopper") == served
    pointwise = "w bf16 n128 g1 cx128 cy128 x{0}x{0} w1x1 y{0}x{0} s1x1 d1x1 p0x0"
    for size, served in ((28, True), (14, False)):
        found = registry.make_plan(Problem.parse(pointwise.format(size)), TARGET)
        assert (found.level == "channels first on Hopper") == served, "all pixels are one row, of 784 or 196"


def test_lines_of_f32_are_long_where_memory_is_what_takes_the_time():
    """On an H200 as it says of itself, where boxes of many short ones took 9% longer."""
    problem = Problem.parse("x f32 n128 g1 cx256 cy64 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0")
    plan = registry.make_plan(problem, replace(TARGET, clock=1.98, bandwidth=4814.0), "tf32")
    assert plan.level == "channels first on Hopper"
    assert plan.launches[-1].constant("BOX")[3] * 4 >= 512
