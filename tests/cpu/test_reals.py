"""Real numbers: errors within a bound that is derived, and the same bits whenever and wherever they are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from convgrad import reference
from convgrad.cpu.kernel import Kernel
from convgrad.cpu.plan import registry
from convgrad.cpu.target import Target
from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem
from marks import in_turn, slow_but

from .problems import built, numbered, targets

TARGETS = targets()
TEAMS = (1, 2, 3, 5, 8, 16, 64)
NAMED = {
    "dense": "x f32 n2 g1 cx33 cy48 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "dense, channels first": "y f32 n2 g1 cx33 cy48 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 bias",
    "dense weights": "w f32 n2 g1 cx33 cy48 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
    "dense weights, channels last": "w f32 n2 g1 cx33 cy48 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "strided": "x f32 n2 g1 cx20 cy24 x15x15 w3x3 y8x8 s2x2 d1x1 p1x1",
    "chunks": "y f32 n1 g1 cx520 cy40 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "slices": "w f32 n4 g1 cx3 cy16 x48x48 w3x3 y48x48 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "depthwise": "y f32 n2 g40 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "depthwise weights": "w f32 n2 g40 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
    "bf16": "x bf16 n2 g1 cx32 cy34 x13x13 w3x3 y13x13 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "bf16 weights of one tap": "w bf16 n4 g1 cx64 cy64 x56x56 w1x1 y56x56 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "bf16 weights": "w bf16 n3 g1 cx32 cy34 x13x13 w3x3 y13x13 s1x1 d1x1 p1x1 out:f32",
    "f16": "y f16 n2 g1 cx32 cy34 x13x13 w3x3 y13x13 s1x1 d1x1 p1x1 accumulate",
    "f16 weights": "w f16 n2 g1 cx32 cy34 x13x13 w3x3 y13x13 s1x1 d1x1 p1x1",
    "f64": "x f64 n2 g1 cx20 cy24 x13x13 w3x3 y13x13 s1x1 d1x1 p1x1",
    "borders": "y f32 n3 g1 cx256 cy3 x8x6x7 w3x3x5 y8x4x10 s1x2x1 d1x2x1 p2x3x3 y@nxc",
    "volume": "w f32 n1 g2 cx9 cy10 x6x9x9 w3x3x3 y6x9x9 s1x1x1 d1x1x1 p1x1x1",
}

# Where numbers come in pairs and where they do not: there bf16 are widened as they are packed, and then are f32.
PAIRED = [("native", "bf16"), ("native", "f32")]
ALSO_PAIRED = [
    ("native in small caches", "bf16"),
    ("without pairs", "bf16"),
    ("native in small caches", "f32"),
    ("avx2", "bf16"),
    ("vector of 3", "f32"),
]


class Tensors:
    """The tensors of a problem with real values, so many bytes after the beginning of a cache line."""

    def __init__(self, p: Problem, seed: int = 0, scale: float = 1.0, shift: int = 0) -> None:
        self.p = p
        self.scale = scale
        self.shift = shift
        rng = np.random.default_rng(seed)
        shapes = {role: (p.shape(role), p.strides(role)) for role in ("x", "w", "y")}
        if p.bias_stride is not None:
            shapes["bias"] = ((p.g * (p.cy if p.wanted == "y" else p.cx),), (p.bias_stride,))
        self.view: dict[str, np.ndarray] = {}
        self.address = {"bias": 0}
        for name, (shape, strides) in shapes.items():
            dtype = DTYPES[p.out_dtype if name == p.wanted else p.dtype].numpy
            low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
            high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
            size = (high - low + 1) * dtype.itemsize
            memory = np.empty(size + 128, np.uint8)
            begin = -memory.ctypes.data % 64 + shift
            flat = memory[begin : begin + size].view(dtype)
            flat[...] = (rng.standard_normal(flat.size) * scale).astype(dtype)
            steps = [s * dtype.itemsize for s in strides]
            self.view[name] = np.lib.stride_tricks.as_strided(flat[-low:], shape, steps)
            self.address[name] = flat.ctypes.data - low * dtype.itemsize
        self.before = self.view[p.wanted].copy()

    def compute(self, found: Kernel) -> np.ndarray:
        """The result of a kernel."""
        place = self.view[self.p.wanted]
        place[...] = self.before if self.p.accumulate else np.nan
        found(*(self.address[name] for name in ("x", "w", "y", "bias")))
        return place.copy()

    def oracle(self, change: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """The result in float64; of other values if a function is given that makes them."""
        alter = change or (lambda a: a)
        names = [name for name in (*self.p.given, "bias") if name in self.view]
        given = {name: alter(self.view[name].astype(np.float64)) for name in names}
        if "bias" in given:
            given["bias"] = given["bias"].reshape(self.p.g, -1)
        before = alter(self.before.astype(np.float64)) if self.p.accumulate else None
        return reference.compute(self.p, given, before, oracle=True)


def find(p: Problem, target: Target, threads: int) -> Kernel:
    """A kernel for so many threads, however small the problem."""
    with mock.patch.object(registry, "ALONE", 0):
        found = built(p, target, threads)
    assert isinstance(found, Kernel), found
    return found


def bound(tensors: Tensors) -> np.ndarray:
    """How far a result may be from the float64 oracle.

    A sum of n terms, products among them, meets at most n roundings on the way of each term (n - 1 additions, and one
    of the product where there is no fma), in whatever order it is taken; zeros of the padding round nothing. With unit
    roundoff u of the accumulator the error is at most n*u/(1 - n*u) * Σ|a*b|; the oracle has such an error too, with
    its own u. Then one rounding to the result's type adds half a unit in the last place, or half of the smallest
    number where that is subnormal.
    """
    p = tensors.p
    terms = tensors.oracle(np.ones_like)
    absolute = tensors.oracle(np.abs)
    roundoffs = [float(np.finfo(kind).eps) / 2 for kind in (DTYPES[p.dtype].accumulator, np.float64)]
    error = sum(terms * u / (1 - terms * u) for u in roundoffs) * absolute
    out = DTYPES[p.out_dtype]
    if out.numpy != DTYPES[p.dtype].accumulator:
        error += 2.0**-out.digits * (np.abs(tensors.oracle()) + error)
        error += 2.0**-25 if p.out_dtype == "f16" else 0.0
    return error


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("name", "target"), in_turn(NAMED, [("native",)], [("avx2",), ("baseline",), ("vector of 3 in small caches",)])
)
def test_error(name: str, target: str) -> None:
    if target not in TARGETS:
        pytest.skip("this machine has no such level")
    tensors = Tensors(Problem.parse(NAMED[name]))
    result = tensors.compute(find(tensors.p, TARGETS[target], 2)).astype(np.float64)
    wrong = np.abs(result - tensors.oracle()) > bound(tensors)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} beyond the bound"


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("name", "scale"),
    slow_but([*((n, 1.0) for n in [*NAMED][::2]), ("bf16", 1e-23)], [(n, s) for n in NAMED for s in (1.0, 1e-23)]),
)
def test_same_bits(name: str, scale: float) -> None:
    """On any number of threads, again, and elsewhere in memory; products that underflow have their sign, too."""
    p = Problem.parse(NAMED[name])
    size = DTYPES[p.dtype].size
    tensors = [Tensors(p, scale=scale, shift=shift) for shift in (0, size, 7 * size)]
    first = tensors[0].compute(find(p, TARGETS["native"], 1)).tobytes()
    for threads in TEAMS:
        found = find(p, TARGETS["native"], threads)
        for each in tensors:
            assert each.compute(found).tobytes() == first, f"{threads} threads, {each.shift} bytes into a line"
        assert tensors[0].compute(found).tobytes() == first, f"{threads} threads, again"


@pytest.mark.parametrize("seed", slow_but(range(20000, 20004), range(20000, 20024)))
def test_random_problems(seed: int) -> None:
    p = replace(numbered(seed), accumulate=seed % 4 == 0)
    tensors = Tensors(p, seed)
    found = [find(p, TARGETS["native"], threads) for threads in TEAMS]
    results = [tensors.compute(each) for each in found]
    assert len({r.tobytes() for r in results}) == 1, f"{p}: other bits on other numbers of threads"
    wrong = np.abs(results[0].astype(np.float64) - tensors.oracle()) > bound(tensors)
    assert not wrong.any(), f"{p}: {wrong.sum()} of {wrong.size} beyond the bound"


def test_same_bits_in_a_crowd() -> None:
    """While other Python threads compute other problems: who finds the team busy works alone, with the same result."""
    problems = [Problem.parse(text) for text in NAMED.values()]
    found = [find(p, TARGETS["native"], 2) for p in problems]
    expected = [Tensors(p).compute(f).tobytes() for p, f in zip(problems, found, strict=True)]
    wrong: list[str] = []

    def work(first: int) -> None:
        tensors = [Tensors(p) for p in problems]
        for step in range(4 * len(problems)):
            i = (first + step) % len(problems)
            if tensors[i].compute(found[i]).tobytes() != expected[i]:
                wrong.append(str(problems[i]))

    crowd = [threading.Thread(target=work, args=(3 * i,)) for i in range(5)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("layout", "target", "dtype"),
    in_turn(
        ["", "x@nxc y@nxc"],
        [("native", "bf16"), ("native", "f16")],
        [(target, dtype) for dtype in ("bf16", "f16") for target in ("avx2", "vector of 3")],
    )
    + [pytest.param("", "baseline", dtype, marks=pytest.mark.slow) for dtype in ("bf16", "f16")],
)
def test_every_number_of_16_bits(layout: str, target: str, dtype: str) -> None:
    """All of them, widened and multiplied by others, then rounded: ties, subnormals, overflow, infinities, NaN."""
    if target not in TARGETS:
        pytest.skip("this machine has no such level")
    for out in (dtype, "f32"):
        p = Problem.parse(f"y {dtype} n1 g1 cx1 cy17 x65536 w1 y65536 s1 d1 p0 {layout} out:{out}")
        tensors = Tensors(p, seed=5)
        x, w = tensors.view["x"], tensors.view["w"]
        x[0, 0, 0] = np.arange(65536, dtype=np.uint16).view(x.dtype)
        first = [1.0, -1.0, 1.0009765625, 0.5, 1.5, 2.0**-9, 2.0**-14, 3 * 2.0**-14, 2.0**14, 1.9, -0.7, 0.0]
        w[0, : len(first), 0, 0] = np.array(first).astype(w.dtype)
        with np.errstate(all="ignore"):
            wide = x.astype(np.float32) * w[:, :, 0].astype(np.float32)[None]
            expected = wide.astype(DTYPES[out].numpy)
        result = tensors.compute(find(p, TARGETS[target], 2))
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(result), nan)
        assert np.array_equal(result[~nan], expected[~nan])


WINDOWS = [
    "n4 g1 cx32 cy32 x7x7 w3x3 y5x5 s1x1 d1x1 p0x0",
    "n3 g1 cx32 cy32 x7x7 w3x3 y5x5 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "n3 g1 cx20 cy33 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1",
    "n3 g1 cx20 cy33 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "n1 g1 cx17 cy16 x13x13 w3x3 y7x7 s2x2 d1x1 p1x1",
    "n1 g2 cx16 cy24 x6x12 w2x5 y9x14 s1x1 d1x2 p2x5",
    "n2 g1 cx16 cy16 x40 w4 y19 s2 d1 p0 x@nxc y@nxc",
    "n1 g1 cx32 cy48 x49 w1 y49 s1 d1 p0",
    "n1 g1 cx16 cy16 x3x4x5 w3x3x3 y3x4x5 s1x1x1 d1x1x1 p1x1x1",
    # Channels on their own, and groups that share the lanes.
    "n2 g20 cx1 cy1 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "n2 g20 cx1 cy1 x9x11 w5x3 y5x6 s2x2 d1x1 p2x1 x@nxc y@nxc",
    "n3 g20 cx1 cy1 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1",
    "n3 g6 cx4 cy4 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "n3 g5 cx2 cy4 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1",
    "n40 g9 cx2 cy1 x13x12 w2x5 y14x12 s1x1 d1x1 p1x2",
    "n1 g19 cx1 cy1 x5x4x5 w3x2x3 y5x5x5 s1x1x1 d1x1x1 p1x1x1 x@nxc y@nxc",
]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("text", "target", "dtype"), in_turn(WINDOWS, PAIRED, ALSO_PAIRED))
def test_infinities_spoil_the_weights_that_they_meet(text: str, target: str, dtype: str) -> None:
    """A weight is infinite or NaN where its own products are, and nowhere else: pixels that it does not meet are no
    zeros to be multiplied.
    """
    if target not in TARGETS:
        pytest.skip("this machine has no such level")
    _check_infinities(Problem.parse(f"w {dtype} {text}"), TARGETS[target], ("x", "y"))


SUMS = [
    "y {} n2 g1 cx3 cy40 x9x9 w3x3 y7x7 s1x1 d1x1 p0x0",
    "y {} n2 g1 cx19 cy17 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1",
    "x {} n1 g3 cx5 cy7 x9x9 w3x3 y7x7 s1x1 d1x1 p0x0",
    "x {} n2 g1 cx17 cy19 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "x {} n2 g1 cx18 cy3 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "x {} n2 g1 cx3 cy40 x9x9 w3x3 y7x7 s1x1 d1x1 p0x0",
    "x {} n1 g1 cx2 cy16 x15x15 w7x7 y8x8 s2x2 d1x1 p3x3",
]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("text", "target", "dtype"),
    in_turn([f"{text} {layout}" for layout in ("", "x@nxc y@nxc w@xio") for text in SUMS], PAIRED, ALSO_PAIRED),
)
def test_infinite_data_spoil_the_results_that_they_meet(text: str, target: str, dtype: str) -> None:
    """The same of data, with finite weights: odd numbers of channels are not made even with what becomes NaN."""
    if target not in TARGETS:
        pytest.skip("this machine has no such level")
    p = Problem.parse(text.format(dtype))
    _check_infinities(p, TARGETS[target], tuple(name for name in p.given if name != "w"))


def _check_infinities(p: Problem, target: Target, where: tuple[str, ...]) -> None:
    tensors = Tensors(p, seed=11)
    rng = np.random.default_rng(12)
    for name in p.given:
        view = tensors.view[name]
        view[...] = rng.integers(-4, 5, view.shape).astype(view.dtype)
        for value in (np.inf, -np.inf, np.nan) if name in where else ():
            n, group, _, *pixel = (int(rng.integers(size)) for size in view.shape)
            view[(n, group, -1, *pixel)] = value  # the last channel, which may lack a partner
    with np.errstate(invalid="ignore"):
        expected = np.asarray(reference.compute(p, {name: tensors.view[name] for name in p.given}))
    nan = np.isnan(expected)
    for threads in (1, 2):
        result = tensors.compute(find(p, target, threads))
        assert np.array_equal(np.isnan(result), nan)
        assert np.array_equal(result[~nan], expected[~nan])
