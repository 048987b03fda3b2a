"""Depthwise layers that are walked along rows: exact in every way to walk, by Triton's interpreter."""

from __future__ import annotations

import zlib
from dataclasses import replace

import interpreter
import numpy as np
import pytest
from gpu_problems import WALKED
from test_interpreted import check

from convgrad import reference
from convgrad.dtypes import DTYPES
from convgrad.gpu.plan import bands, rows
from convgrad.gpu.target import KNOWN, of_kind
from convgrad.spec import Problem
from marks import slow_but

LAST = "x@nxc y@nxc"
KINDS = ["f32", "bf16 bias@3 accumulate", "f16 out:f32 accumulate", "bf16 bias"]


def every_walk(line, name):
    """A problem in the way that is chosen, and in some others: chunks, parts and tiles that do not fit it."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for turn, multiprocessors in enumerate((1, 132)):
        dtype, *more = KINDS[rng.integers(len(KINDS))].split()
        more = [word for word in more if line[0] != "w" or "bias" not in word]
        problem = Problem.parse(" ".join([line.format(dtype), *more]))
        machine = interpreter.small("sm_90", multiprocessors)
        walked = rows.stacked(problem) if turn else problem
        way = rows.choose(walked, machine)
        if turn:
            way = other(walked, way, rng)
        plan = rows.settle(walked, machine, way)
        check(problem, interpreter.widened(plan) if turn else plan)


def other(problem, way, rng):
    """A way that nobody would choose."""
    results = rows.walk(problem, way.taps).results
    way = way._replace(height=int(rng.integers(1, results + 2)), ahead=int(rng.choice([0, 3])))
    way = way._replace(rows=max(1, way.rows // 2), columns=2 * way.columns, stages=int(rng.choice([1, 3])))
    way = way._replace(unroll=int(rng.integers(1, 5)))
    if problem.wanted == "w":
        kernel = rows.spatial(problem)[1].w
        way = way._replace(parts=int(rng.integers(1, 5)), taps=int(rng.integers(1, kernel + 1)))
    if problem.wanted != "x" or rows.spatial(problem)[2].stride == 1:
        way = way._replace(width=max(1, way.width // 2))
    return way


QUICK = [("pixels", "y"), ("channels", "w"), ("channels, strided", "x"), ("pixels, strided", "w"), ("3d, pixels", "x")]


@pytest.mark.parametrize(("name", "wanted"), slow_but(QUICK, [(name, w) for name in WALKED for w in "xyw"]))
def test_every_walk_is_exact(interpreted, name, wanted):
    interpreted(every_walk, WALKED[name].replace("{}", wanted, 1), name + wanted)


def every_band(line, name):
    """A problem by bands, in chunks that do not fit it, too."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for turn, kind in enumerate(("bf16 bias@3", "f16 out:f32")):
        dtype, word = kind.split()
        problem = Problem.parse(f"{line.format(dtype)} {word}")
        machine = interpreter.small("sm_90", 8)
        way = bands.choose(problem, machine)
        if turn:
            way = way._replace(height=int(rng.integers(1, 6)), columns=2 * way.columns, rows=16)
        plan = bands.settle(problem, machine, way)
        check(problem, interpreter.widened(plan) if turn else plan)


BANDS = {
    "pixels": "{} {} n1 g5 cx1 cy1 x17x32 w5x7 y17x32 s1x1 d1x1 p2x3",
    "odd rows": "{} {} n2 g6 cx1 cy1 x9x21 w7x7 y9x21 s1x1 d1x1 p3x3",
    "strided": "{} {} n2 g6 cx1 cy1 x9x24 w3x5 y5x12 s2x2 d1x1 p1x2",
    "odd rows, strided": "{} {} n2 g6 cx1 cy1 x9x23 w3x5 y5x12 s2x2 d1x1 p1x2",
    "two results, dilated": "{} {} n2 g5 cx1 cy2 x9x21 w5x5 y9x21 s1x1 d2x2 p4x4",
    "two channels of a result": "{} {} n2 g5 cx2 cy1 x9x21 w5x5 y9x21 s1x1 d1x1 p2x2",
    "uneven": "{} {} n1 g5 cx1 cy1 x9x10 w3x5 y5x3 s2x3 d1x1 p1x0",
    "1d": "{} {} n2 g9 cx1 cy1 x40 w7 y37 s1 d1 p2",
    "3d": "{} {} n1 g4 cx1 cy1 x4x5x9 w2x2x5 y3x5x9 s1x1x1 d1x1x1 p0x0x2",
}
REFUSED = {("two results, dilated", "x"), ("two channels of a result", "y"), ("uneven", "x")}
SERVED = [(n, w) for n in BANDS for w in "yx" if (n, w) not in REFUSED]


@pytest.mark.parametrize(("name", "wanted"), slow_but([("pixels", "y"), ("strided", "x")], SERVED))
def test_every_band_is_exact(interpreted, name, wanted):
    interpreted(every_band, BANDS[name].replace("{}", wanted, 1), name)


def infinite(line, role):
    """An infinity has a product with what it meets in its windows, and with nothing else."""
    problem, rng = Problem.parse(line), np.random.default_rng(0)
    machine = interpreter.small("sm_90", 8)
    planner = rows if bands.hindrance(problem) else bands
    way = planner.choose(problem, machine)._replace(height=4)
    for at in [(0, 0), (5, 5), (2, 3)]:
        arrays = {}
        for name in "xwy":
            kind = DTYPES[problem.dtype].numpy
            block = np.zeros(problem.size(name), kind)
            steps = [kind.itemsize * stride for stride in problem.strides(name)]
            arrays[name] = np.lib.stride_tricks.as_strided(block, problem.shape(name), steps)
            arrays[name][...] = rng.integers(1, 3, problem.shape(name))
        arrays[problem.wanted][...] = np.nan
        arrays[role][0, 1, 0][at] = np.inf
        expected = reference.compute(problem, {name: arrays[name] for name in problem.given})
        assert np.isfinite(expected).any()
        assert not np.isfinite(expected).all()
        places = {name: array.ctypes.data for name, array in arrays.items()} | {"bias": 0}
        interpreter.run(planner.settle(problem, machine, way), places)
        assert np.array_equal(arrays[problem.wanted].astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("wanted", "dtype", "layout"),
    slow_but(
        [("w", "f32", ""), ("y", "bf16", "")],
        [(w, t, layout) for w in "wxy" for t in ("f32", "bf16") for layout in ("", LAST)],
    ),
)
def test_infinities_keep_to_their_windows(interpreted, wanted, dtype, layout):
    line = f"{wanted} {dtype} n2 g4 cx1 cy1 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 {layout}"
    for role in ("x", "y"):
        if role != wanted:
            interpreted(infinite, line, role)


FIRST = ""
H200 = replace(of_kind("sm_90"), clock=1.98, bandwidth=4814.0)
SMALL = "{} {} n128 g192 cx1 cy1 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {}"  # of MobileNet
STRIDED = "{} {} n128 g240 cx1 cy1 x28x28 w5x5 y14x14 s2x2 d1x1 p2x2 {}"  # of EfficientNet
LARGE = "{} {} n128 g96 cx1 cy1 x56x56 w7x7 y56x56 s1x1 d1x1 p3x3 {}"  # of ConvNeXt
LINE = "{} {} n8 g4096 cx1 cy1 x4096 w4 y4099 s1 d1 p3 {}"  # of Mamba
REGISTERS, AHEAD, DATA, WEIGHTS = (1, 1, 1), (3, 3, 1), (0, 1, 4), (0, 2, 2)

TAKEN = [
    # Channels side by side go through shared memory, where memory is what they wait for.
    (SMALL, "x", "bf16", LAST, DATA, 96),
    (SMALL, "x", "f32", LAST, DATA, 165),
    (SMALL, "w", "bf16", LAST, WEIGHTS, 119),
    (SMALL, "w", "f32", LAST, WEIGHTS, 164),
    (STRIDED, "x", "bf16", LAST, DATA, 30),
    (LARGE, "x", "f32", LAST, DATA, 160),
    # In one dimension four steps wait together.
    (LINE, "x", "bf16", LAST, (0, 4, 4), 144),
    (LINE, "x", "f32", LAST, (0, 4, 4), 279),
    (LINE, "w", "bf16", LAST, (0, 4, 2), 141),
    (LINE, "w", "f32", LAST, (0, 4, 2), 258),
    # Instructions are what these wait for.
    (LARGE, "x", "bf16", LAST, REGISTERS, 159),
    (STRIDED, "w", "bf16", LAST, REGISTERS, 56),
    # Runs of pixels stay in registers. Those of w are loaded for two tensors, and were not quicker.
    (SMALL, "x", "bf16", FIRST, AHEAD, 95),
    (SMALL, "x", "f32", FIRST, AHEAD, 158),
    (SMALL, "w", "bf16", FIRST, REGISTERS, 116),
    (SMALL, "w", "f32", FIRST, REGISTERS, 188),
    # Images are rows, of which none waits for another.
    (LINE, "x", "bf16", FIRST, REGISTERS, 173),
    (LINE, "x", "f32", FIRST, REGISTERS, 284),
    (LINE, "w", "bf16", FIRST, (0, 1, 1), 153),
    (LINE, "w", "f32", FIRST, (0, 1, 1), 263),
]
"""Layers, by AHEAD, UNROLL and STAGES of what was quickest on an H200 or within 3% of it, and its microseconds."""


@pytest.mark.parametrize(("line", "wanted", "dtype", "layout", "how", "measured"), TAKEN)
def test_the_way_that_was_quickest_is_taken(line, wanted, dtype, layout, how, measured):
    found = rows.plan(Problem.parse(line.format(wanted, dtype, layout)), H200)
    launch = found.launches[0]
    assert tuple(launch.constant(name) for name in ("AHEAD", "UNROLL", "STAGES")) == how
    assert dict(launch.values)["images"] == (1 if line == LINE and layout == FIRST else 128 if line != LINE else 8)
    assert found.seconds * 1e6 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("line", "how"),
    [
        # Not all pieces have four bytes where the number of channels is odd, but of f32.
        (SMALL.replace("g192", "g189").format("x", "bf16", LAST), REGISTERS),
        (SMALL.replace("g192", "g189").format("x", "f32", LAST), DATA),
        # A step that takes two rows has loads enough on their way.
        ("y f32 n128 g144 cx1 cy1 x112x112 w3x3 y56x56 s2x2 d1x1 p1x1 x@nxc y@nxc", REGISTERS),
        # The loop of w hands rows on for longer than a turn, and Triton begins no loads early.
        ("w f32 n32 g128 cx1 cy1 x56x56 w5x1 y56x56 s1x1 d1x1 p2x0 x@nxc y@nxc", REGISTERS),
        # There are few steps: an image has more programs instead.
        ("y f32 n1 g32 cx1 cy1 x112x112 w3x3 y112x112 s1x1 d1x1 p1x1", REGISTERS),
        # Four channels of a group fill the registers.
        ("x f32 n64 g32 cx4 cy4 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc", REGISTERS),
        # A walk of one step has no next one.
        ("x bf16 n1 g1536 cx1 cy1 x2048 w4 y2051 s1 d1 p3", (0, 1, 1)),
    ],
)
def test_ways_of_layers_that_were_not_timed(line, how):
    way = rows.choose(Problem.parse(line), H200)
    assert (way.ahead, way.unroll, way.stages) == how


@pytest.mark.parametrize("kind", KNOWN)
def test_three_programs_share_what_there_is(kind):
    """Their shared memory fits on every kind of GPU; where two stages do not, registers are taken."""
    target, stages = of_kind(kind), set()
    for line, wanted, dtype, layout, *_ in TAKEN:
        problem = Problem.parse(line.format(wanted, dtype, layout))
        way = rows.choose(problem, target)
        assert 3 * rows.shared(problem, way) <= target.shared
        stages.add(way.stages)
    assert stages > {1, 4}
