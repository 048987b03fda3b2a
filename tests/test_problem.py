"""Problems: their text, their counts, and the reference engine against the definition."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

import cases
import convgrad
import problems
from convgrad import SpecError, reference
from convgrad.spec.problem import Problem, dense_strides

EXAMPLE = "x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1"


def test_the_text_of_a_problem_reads_back():
    assert str(Problem.parse(EXAMPLE)) == EXAMPLE
    for dtype in ("f32", "bf16", "f16", "f64"):
        for problem in cases.problems(dtype).values():
            assert Problem.parse(str(problem)) == problem


@pytest.mark.usefixtures("by_reference")
def test_the_text_of_every_bound_problem_reads_back(monkeypatch):
    seen = []
    compute = reference.compute
    monkeypatch.setattr(reference, "compute", lambda problem, *rest: (seen.append(problem), compute(problem, *rest)))
    rng = np.random.default_rng(8)
    for _ in range(300):
        problems.check(problems.draw(rng))
    assert len(seen) == 300
    assert any(p.bias_stride not in (None, 1) for p in seen)
    for problem in seen:
        assert Problem.parse(str(problem)) == problem
        assert pickle.loads(pickle.dumps(problem)) == problem


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("z f32", "'z f32'"),
        (EXAMPLE.replace("f32", "f8"), "f8"),
        (EXAMPLE.replace(" cy32", ""), "which has cy too"),
        (EXAMPLE.replace("s2x2", "s2"), "same number of axes"),
        (EXAMPLE + " wide", "'wide'"),
        (EXAMPLE + " x@1,2", "x@1,2 needs 5 strides"),
        (EXAMPLE + " out:s8", "'out:s8'"),
        (EXAMPLE + " algorithm:fast", "'algorithm:fast'"),
        (EXAMPLE.replace("n2", "n-2"), "'n-2'"),
        (EXAMPLE.replace("n2", "n" + "9" * 5000), "not of the form"),
        (EXAMPLE.replace("n2", "n٣"), "not of the form"),
        (EXAMPLE.replace("s2x2", "s0x2"), "stride must be at least 1"),
        (EXAMPLE.replace("y14x14", "y14x-1"), "y must be at least 0"),
        (EXAMPLE.replace("g1", "g0"), "g must be at least 1"),
        ("x f32 n1 g1 cx1 cy1 x1x1x1x1 w1x1x1x1 y1x1x1x1 s1x1x1x1 d1x1x1x1 p0x0x0x0", "1, 2 or 3 spatial axes"),
    ],
)
def test_a_wrong_text_is_refused(text, part):
    with pytest.raises(SpecError) as caught:
        Problem.parse(text)
    assert part in str(caught.value)


def test_counts():
    problem = Problem.parse("y f32 n2 g2 cx3 cy5 x4 w3 y4 s1 d1 p1")
    assert problem.taps == 3 + 4 + 3
    assert problem.flops == 2 * 2 * 2 * 3 * 5 * 10
    assert problem.bytes == 4 * (2 * 6 * 4 + 2 * 5 * 3 * 3 + 2 * 10 * 4)
    assert replace(problem, dtype="bf16").bytes == 2 * (2 * 6 * 4 + 2 * 5 * 3 * 3) + 4 * (2 * 10 * 4)
    assert Problem.parse("y f32 n1 g1 cx1 cy1 x2 w2 y3 s1 d1 p9").taps == 0


def test_taps_are_the_pairs_that_meet():
    for problem in cases.problems().values():
        ones = {role: np.ones(problem.shape(role)) for role in problem.given}
        pairs = cases.definition(problem, ones).sum()
        assert problem.n * problem.g * problem.cx * problem.cy * problem.taps == pairs


@pytest.mark.parametrize("name", cases.problems())
def test_the_reference_computes_the_definition(name):
    problem = cases.problems()[name]
    rng = np.random.default_rng(len(name))
    given = cases.tensors(problem, rng)
    expected = cases.definition(problem, given)
    assert np.array_equal(reference.compute(problem, given), expected)
    # Into an array that held NaN, all of which must go.
    out = np.full(problem.shape(problem.wanted), np.nan, np.float32)
    assert reference.compute(problem, given, out) is out
    assert np.array_equal(out, expected)
    # Added to what is there.
    prior = rng.integers(-9, 9, out.shape).astype(np.float32)
    added = reference.compute(replace(problem, accumulate=True), given, prior.copy())
    assert np.array_equal(added, prior + expected)


def test_the_oracle_is_float64():
    problem = Problem.parse("y bf16 n1 g1 cx2 cy1 x1 w1 y1 s1 d1 p0")
    big, small = 2.0**60, 1.0
    x = np.array([big, small]).reshape(problem.shape("x")).astype("bfloat16")
    w = np.array([small, small]).reshape(problem.shape("w")).astype("bfloat16")
    exact = reference.compute(problem, {"x": x, "w": w}, oracle=True)
    assert exact.dtype == np.float64
    # 2**60 + 1 needs 61 digits: float64 keeps 53, and the bf16 result 8.
    assert exact.item() == big
    x = np.array([2.0**30, small]).reshape(problem.shape("x")).astype("bfloat16")
    assert reference.compute(problem, {"x": x, "w": w}, oracle=True).item() == 2.0**30 + 1
    assert reference.compute(problem, {"x": x, "w": w}).item() == 2.0**30


def test_sums_of_narrow_types_are_kept_in_f32():
    # 1 + 2**-9 + 2**-9 rounds up to 1 + 2**-7 once, at the end; rounding every sum to bf16 would leave 1.
    x = np.array([1, 2**-8, 2**-8], "bfloat16").reshape(1, 3, 1)
    w = np.ones((1, 3, 1), "bfloat16")
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1, data_format="NCX", weights_format="OIX")
    assert float(convgrad.convolution(x, w, **call).item()) == 1 + 2**-7
    assert convgrad.convolution(x, w, out_dtype="f32", **call).item() == 1 + 2**-7
    # A bias is added before the rounding: 1 + 2**-8 would go down to 1, and 1 + 2**-8 again.
    bias = np.array([2**-8], "bfloat16")
    assert float(convgrad.convolution(x[:, :2], w[:, :2], bias, **call).item()) == 1 + 2**-7


def test_half_overflows_to_infinity_without_a_warning():
    x, w = np.full((1, 1, 4), 60000, np.float16), np.ones((1, 1, 2), np.float16)
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1, data_format="NCX", weights_format="OIX")
    assert np.isposinf(convgrad.convolution(x, w, **call)).all()
    assert (convgrad.convolution(x, w, out_dtype="f32", **call) == 120000).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spreads_to_its_windows_only(value):
    x, w = np.ones((1, 1, 9), np.float32), np.ones((1, 1, 3), np.float32)
    x[0, 0, 4] = value
    call = dict(strides=1, pads_begin=1, pads_end=1, dilations=1, data_format="NCX", weights_format="OIX")
    y = convgrad.convolution(x, w, **call)
    assert np.isfinite(y[0, 0, [0, 1, 2, 6, 7, 8]]).all()
    assert not np.isfinite(y[0, 0, 3:6]).any()


@pytest.mark.usefixtures("by_reference")
def test_padding_has_no_product():
    # Zero times infinity would be NaN: to the reference, what lies outside x does not count at all.
    x, w = np.ones((1, 1, 3), np.float32), np.full((1, 1, 3), np.inf, np.float32)
    call = dict(strides=1, pads_begin=1, pads_end=1, dilations=1, data_format="NCX", weights_format="OIX")
    assert np.isposinf(convgrad.convolution(x, w, **call)).all()
    assert np.isposinf(convgrad.convolution_backward_data(x, w, (1, 1, 3), **call)).all()


def test_dense_strides():
    assert dense_strides((2, 3, 4)) == (12, 4, 1)
    assert dense_strides((2, 3, 4), (0, 2, 1)) == (12, 1, 3)
    assert dense_strides((2, 0, 4)) == (4, 4, 1)  # a size of zero counts as one


def test_a_descriptor_is_sent_to_the_command():
    with pytest.raises(SpecError, match="descriptors are for the command `convgrad explain`"):
        Problem.parse("mb8ic64oc64ih56kh3ph1")
