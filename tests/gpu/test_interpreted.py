"""The kernels as they compute, by Triton's interpreter: every way to take a sum equals the definition to the bit."""

from __future__ import annotations

import zlib
from math import prod

import interpreter
import ml_dtypes
import numpy as np
import pytest
from gpu_problems import PROBLEMS

from convgrad import reference
from convgrad.dtypes import DTYPES
from convgrad.gpu.plan import axes, blocks, choose, patches, registry, relaid
from convgrad.gpu.plan.hopper.parts import splitting
from convgrad.spec import Problem
from marks import slow_but


def memory(problem, role, rng):
    """A tensor of small whole numbers in guarded memory: the memory, and a view over the axes of the problem."""
    kind, shape, strides = DTYPES[problem.dtype_of(role)].numpy, problem.shape(role), problem.strides(role)
    spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    before, after = -sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
    block = np.full(before + after + 65, np.nan, kind)
    start = block[32 + before :]
    view = np.lib.stride_tricks.as_strided(start, shape, tuple(s * kind.itemsize for s in strides))
    if rng is not None:
        view[...] = rng.integers(-2, 3, shape)
    return block, view


def check(problem, plan):
    """Run a plan on whole numbers and compare with the definition; nothing but the result is written."""
    rng = np.random.default_rng(zlib.crc32(str(problem).encode()))
    blocks, views = {}, {}
    for role in "xwy":
        filled = role != problem.wanted or problem.accumulate
        blocks[role], views[role] = memory(problem, role, rng if filled else None)
    places = {role: view.ctypes.data for role, view in views.items()} | {"bias": 0}
    given = {role: views[role] for role in problem.given}
    if problem.bias_stride is not None:
        channels = problem.g * (problem.cx if problem.wanted == "x" else problem.cy)
        bias = rng.integers(-9, 10, channels * problem.bias_stride).astype(DTYPES[problem.dtype].numpy)
        places["bias"] = bias.ctypes.data
        given["bias"] = bias[:: problem.bias_stride].reshape(problem.g, -1)
    out = views[problem.wanted]
    expected = reference.compute(problem, given, out.copy())
    inside = np.zeros(blocks[problem.wanted].shape, bool)
    start = (out.ctypes.data - blocks[problem.wanted].ctypes.data) // out.itemsize
    steps = [
        np.arange(n) * s for n, s in zip(problem.shape(problem.wanted), problem.strides(problem.wanted), strict=True)
    ]
    inside[start + sum(np.ix_(*steps)).ravel()] = True
    interpreter.run(plan, places)
    assert np.array_equal(out, expected), f"{problem}: {plan}"
    assert np.isnan(blocks[problem.wanted][~inside].astype(np.float32)).all(), f"{problem}: wrote outside of the result"


def ways(problem, machine):
    """All ways to take the sums that differ in more than their tiles, each with its least programs."""
    kinds = {}
    for way in choose.candidates(problem, machine):
        key = (way.kernel, way.flat, way.parts > 1)
        kinds[key] = min(kinds.get(key, way), way, key=lambda way: (way.programs, way.seconds))
    return list(kinds.values())


def every_way(line):
    """A problem in every way, every other one with offsets of 64 bits."""
    problem, machine = Problem.parse(line), interpreter.small("sm_90", 8)
    found = ways(problem, machine)
    for at, way in enumerate(found):
        plan = choose.settle(problem, machine, way)
        check(problem, interpreter.widened(plan) if at % 2 else plan)
    return len(found)


QUICK = [("plain", "x"), ("plain", "w"), ("strides of nobody", "y")]  # every kernel comes in these


# y goes the ways of x.
@pytest.mark.parametrize(
    ("name", "wanted"), slow_but(QUICK, [(name, w) for at, name in enumerate(PROBLEMS) for w in "xwy"[: 2 + at % 2]])
)
def test_every_way_is_exact(interpreted, name, wanted):
    assert interpreted(every_way, PROBLEMS[name].format(wanted, "f32")) >= 3


KINDS = [
    (dtype, more)
    for dtype in ("bf16", "f16", "f64")
    for more in ("plain", "bias", "accumulate", "bias@3 accumulate", "out:f32 accumulate")
]


@pytest.mark.parametrize(
    ("dtype", "more"), slow_but([("bf16", "bias@3 accumulate"), ("f16", "out:f32 accumulate"), ("f64", "plain")], KINDS)
)
def test_types_bias_and_accumulation(interpreted, dtype, more):
    more = more.removeprefix("plain")
    if dtype == "f64" and "out" in more:
        more = "bias accumulate"
    for wanted in "xyw":
        words = more if wanted != "w" else " ".join(word for word in more.split() if "bias" not in word)
        interpreted(two_ways, f"{wanted} {dtype} n2 g1 cx4 cy5 x6x5 w3x2 y3x5 s2x1 d1x1 p1x1 {words}")


def two_ways(line):
    """A problem whose sums are taken at once, and in parts."""
    problem, machine = Problem.parse(line), interpreter.small("sm_80", 40)
    found = ways(problem, machine)
    for way in (found[0], next(way for way in found if way.parts > 1)):
        check(problem, choose.settle(problem, machine, way))


def copied(line):
    """A problem between copies, with as many channels and with more."""
    problem, machine = Problem.parse(line), interpreter.small("sm_80", 8)
    found = relaid.ways(problem)
    for at, way in enumerate(found):
        plan = relaid.around(problem, way, machine, "default")
        check(problem, interpreter.widened(plan) if at % 2 else plan)
    return len(found)


MORE = ("", "bias accumulate", "bias@3")
COPIES = [
    *((name, wanted, "bf16", MORE[(i + j) % 3]) for i, name in enumerate(PROBLEMS) for j, wanted in enumerate("xyw")),
    *(
        (name, wanted, dtype, "bias accumulate")
        for name in ("plain", "3d")
        for wanted in "xyw"
        for dtype in ("f32", "f64")
    ),
]
QUICK_COPIES = [
    ("pointwise, strided", "x", "bf16", ""),
    ("plain", "x", "bf16", "bias accumulate"),
    ("grouped", "w", "bf16", ""),
    ("strides of nobody", "y", "bf16", "bias@3"),
]


@pytest.mark.parametrize(("name", "wanted", "dtype", "more"), slow_but(QUICK_COPIES, COPIES))
def test_copies_between_other_strides(interpreted, name, wanted, dtype, more):
    words = more if wanted != "w" else " ".join(word for word in more.split() if "bias" not in word)
    found = interpreted(copied, f"{PROBLEMS[name].format(wanted, dtype)} {words}")
    assert found or name == "depthwise"


def in_blocks(line, kind):
    """A problem whose groups are taken together, in every number."""
    problem, machine = Problem.parse(line), interpreter.small(kind, 8)
    found = blocks.counts(problem)
    for k in found:
        check(problem, blocks.joined(problem, k, machine, "default"))
    return len(found)


GROUPS = {
    "depthwise, last": "{} bf16 n2 g40 cx1 cy1 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "depthwise, first": "{} f32 n1 g6 cx1 cy2 x6x7 w3x2 y3x4 s2x2 d1x1 p1x1 {}",
    "grouped, last": "{} bf16 n1 g12 cx4 cy3 x5x4 w3x3 y5x4 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio {}",
    "1D": "{} f16 n2 g8 cx3 cy5 x9 w2 y4 s2 d1 p0 {}",
}


ADDED = ("", "accumulate", "bias accumulate")


@pytest.mark.parametrize(
    ("name", "wanted", "more"),
    slow_but(
        [("depthwise, last", "x", ""), ("grouped, last", "w", "accumulate"), ("1D", "y", "bias accumulate")],
        [(name, w, ADDED[(i + j) % 3]) for i, name in enumerate(GROUPS) for j, w in enumerate("xyw")],
    ),
)
def test_groups_taken_together(interpreted, name, wanted, more):
    words = more if wanted != "w" else " ".join(word for word in more.split() if "bias" not in word)
    assert interpreted(in_blocks, GROUPS[name].format(wanted, words), "sm_80") >= 1


PATCHES = {
    "last": "{} f32 n2 g1 cx3 cy5 x8x9 w4x3 y2x3 s4x3 d1x1 p0x0 x@nxc y@nxc w@xio",
    "one channel, first": "{} f32 n2 g1 cx1 cy5 x8x9 w4x3 y2x3 s4x3 d1x1 p0x0",
    "one window": "{} f32 n2 g1 cx3 cy4 x5x4 w3x4 y3x1 s1x4 d1x1 p0x0 x@nxc y@nxc w@xio accumulate",
}


def taken_for_fewer(line):
    """A problem whose windows touch, as it is and as it is taken; how many taps it is then."""
    problem = Problem.parse(line)
    plan = registry.make_plan(problem, interpreter.small("sm_80", 8))
    check(problem, plan)
    return prod(patches.merged(problem).w)


@pytest.mark.parametrize(
    ("name", "wanted"), slow_but([("one window", "w")], [(name, wanted) for name in PATCHES for wanted in "xyw"])
)
def test_windows_that_touch(interpreted, name, wanted):
    taps = interpreted(taken_for_fewer, PATCHES[name].format(wanted))
    assert taps == {"last": 4, "one channel, first": 4, "one window": 3}[name]


@pytest.mark.parametrize(
    "line",
    [
        "y f32 n1 g1 cx2 cy2 x8 w2 y4 s2 d1 p0",  # channels first: a window's channels lie apart
        "y f32 n1 g1 cx2 cy2 x9 w2 y4 s2 d1 p0 x@nxc w@xio",  # something is left
        "y f32 n1 g1 cx2 cy2 x6 w2 y4 s2 d1 p1 x@nxc w@xio",
        "y f32 n1 g1 cx2 cy2 x8 w3 y3 s2 d1 p0 x@nxc w@xio",
        "y f32 n1 g2 cx2 cy2 x8 w2 y4 s2 d1 p0 x@nxc w@xio",
        "x f32 n1 g1 cx2 cy2 x8 w2 y4 s2 d1 p0 x@nxc w@xio bias",
    ],
)
def test_windows_that_do_not(line):
    assert patches.merged(problem := Problem.parse(line)) is problem


def taken_apart(line, parts):
    """The parts of x, by (part, image, three axes, channel): their sum is x, and each is rounded to nearest."""
    problem = Problem.parse(line)
    splits = splitting(problem, "x", "parts", parts)
    x = np.random.default_rng(0).standard_normal(1 + sum((n - 1) * s for n, s in _spans(problem))).astype(np.float32)
    x[3], x[4] = np.inf, np.nan
    found = np.full(splits.size // 2 + 64, 0x7FC1, np.uint16)  # NaN
    interpreter.launched(splits.launch, {"x": x.ctypes.data, "parts": found.ctypes.data + 64})
    assert (found[:32] == 0x7FC1).all()
    assert (found[-32:] == 0x7FC1).all()
    got = found[32:-32].view(ml_dtypes.bfloat16).astype(np.float32).reshape(splits.shape)
    steps = [4 * stride for stride in problem.x_strides]
    given = np.lib.stride_tricks.as_strided(x, problem.shape("x"), steps)
    given = given.reshape(problem.n, -1, *axes.three(problem).x).transpose(0, 2, 3, 4, 1)
    expected = np.zeros(splits.shape[1:], np.float32)
    expected[..., : given.shape[-1]] = given
    for part in got:
        rounded = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(part, rounded, equal_nan=True)
        with np.errstate(invalid="ignore"):
            expected = np.where(np.isfinite(expected), expected - rounded, 0)
    assert parts < 3 or not expected.any()


def _spans(problem):
    return zip(problem.shape("x"), problem.x_strides, strict=True)


APART = {
    "last": "w f32 n3 g1 cx20 cy2 x5x7 w1x1 y5x7 s1x1 d1x1 p0x0 x@nxc",
    "first": "w f32 n2 g1 cx70 cy2 x9x8 w1x1 y9x8 s1x1 d1x1 p0x0",
    "grouped, last": "w f32 n2 g3 cx5 cy2 x4x5 w1x1 y4x5 s1x1 d1x1 p0x0 x@nxc",
    "grouped, groups apart": "w f32 n2 g3 cx4 cy2 x4x5 w1x1 y4x5 s1x1 d1x1 p0x0 x@300,100,1,20,4",
    "one channel": "w f32 n2 g1 cx1 cy2 x40 w1 y40 s1 d1 p0",
    "strides of nobody": "w f32 n2 g1 cx3 cy2 x4x5x6 w1x1x1 y4x5x6 s1x1x1 d1x1x1 p0x0x0 x@1000,7,2,190,31,6",
}


@pytest.mark.parametrize("name", slow_but(["last", "first"], APART))
def test_f32_is_taken_apart(interpreted, name):
    interpreted(taken_apart, APART[name], 2 + (name != "one channel"))


def without_sums(line):
    """A problem that has no products."""
    problem = Problem.parse(line)
    plan = choose.plan(problem, interpreter.small("sm_80", 8))
    assert plan.kernel in ("finish", "")
    check(problem, plan)


@pytest.mark.parametrize(
    "line",
    [
        "y f32 n0 g1 cx2 cy2 x3 w3 y3 s1 d1 p1",
        "y f32 n2 g1 cx0 cy2 x3 w3 y3 s1 d1 p1 bias",
        "x bf16 n2 g1 cx3 cy0 x4 w2 y3 s1 d1 p0 accumulate",
        "w f32 n0 g2 cx3 cy2 x4 w2 y3 s1 d1 p0",
        "w f32 n0 g2 cx3 cy2 x4 w2 y3 s1 d1 p0 accumulate",
        "x f32 n1 g1 cx2 cy2 x3 w1 y2 s1 d1 p9 bias",
    ],
)
def test_without_any_product(interpreted, line):
    interpreted(without_sums, line)


def random_calls(seed, count):
    """Random calls, each by a way that is drawn, judged by PyTorch in float64."""
    import problems

    rng = np.random.default_rng(seed)
    for _ in range(count):
        target = interpreter.small(str(rng.choice(["sm_80", "sm_90"])), int(rng.choice([2, 8, 200])))
        with interpreter.alone(interpreter.Backend(target, rng=rng)):
            problems.check(problems.draw(rng, wide=bool(rng.random() < 0.3)))


@pytest.mark.parametrize("seed", slow_but([1], [1, 2, 3]))
def test_random_calls(interpreted, seed):
    interpreted(random_calls, seed, 8)


def infinite(wanted, kernel):
    """Infinities that meet padding have no product: the results whose windows hold none stay finite."""
    problem = Problem.parse(f"{wanted} f32 n1 g4 cx1 cy1 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1")
    machine = interpreter.small("sm_90", 8)
    ways = [w for w in choose.candidates(problem, machine) if w.kernel == kernel and not w.flat]
    plan = choose.settle(problem, machine, min(ways, key=lambda way: way.programs))
    rng = np.random.default_rng(0)
    arrays = {role: rng.integers(1, 3, problem.shape(role)).astype(np.float32) for role in "xwy"}
    arrays[problem.wanted][...] = np.nan
    arrays["y" if wanted != "y" else "x"][:, :, :, 0, 0] = np.inf
    given = {role: arrays[role] for role in problem.given}
    expected = reference.compute(problem, given)
    assert np.isfinite(expected).any()
    assert not np.isfinite(expected).all()
    interpreter.run(plan, {role: array.ctypes.data for role, array in arrays.items()} | {"bias": 0})
    assert np.array_equal(arrays[wanted], expected)


WINDOWS = [("w", "weights"), ("w", "lanes_weights"), ("x", "gather"), ("y", "gather"), ("x", "lanes")]


@pytest.mark.parametrize(("wanted", "kernel"), slow_but([("w", "weights"), ("x", "gather")], WINDOWS))
def test_infinities_keep_to_their_windows(interpreted, wanted, kernel):
    interpreted(infinite, wanted, kernel)
