"""Plans for GPUs: values, made by a model of the machine, within bounds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import convgrad
from convgrad import UnsupportedError
from convgrad.gpu.plan import axes, choose, cost, registry, relaid, rows
from convgrad.gpu.target import KNOWN, of_kind
from convgrad.spec import Problem

DENSE = "{} {} n8 g1 cx64 cy128 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio"
DEPTHWISE = "{} {} n8 g192 cx1 cy1 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc"


def plan(line, kind="sm_90", asked="default"):
    return choose.plan(Problem.parse(line), of_kind(kind), asked)


@pytest.mark.parametrize("wanted", "xyw")
def test_layers_get_the_kernels_that_are_made_for_them(wanted):
    assert plan(DENSE.format(wanted, "bf16")).kernel == ("weights" if wanted == "w" else "gather")
    assert plan(DEPTHWISE.format(wanted, "bf16")).kernel == ("lanes_weights" if wanted == "w" else "lanes")


@pytest.mark.parametrize("wanted", "xyw")
@pytest.mark.parametrize("kind", ["sm_80", "sm_90"])
def test_depthwise_layers_are_walked(wanted, kind):
    """Channels are in the lanes where they lie side by side, else pixels; what cannot be walked is left to others."""
    target = of_kind(kind)
    for line, pixels in ((DEPTHWISE, False), (DEPTHWISE.replace("x@nxc y@nxc", ""), True)):
        problem = Problem.parse(line.format(wanted, "bf16"))
        found = registry.make_plan(problem, target)
        assert (found.level, rows.choose(problem, target).pixels) == ("rows", pixels)
        # Sums in parts are few beside the tensors.
        assert found.workspace <= problem.bytes / 8
    for line in (DEPTHWISE.replace("g192 cx1 cy1", "g1 cx192 cy192"), DEPTHWISE.replace("w3x3", "w3x31")):
        assert rows.hindrance(Problem.parse(line.format(wanted, "bf16")))
    assert rows.hindrance(Problem.parse(DEPTHWISE.format(wanted, "f64")))
    mixed = DEPTHWISE.replace("y@nxc", "")
    assert registry.make_plan(Problem.parse(mixed.format(wanted, "bf16")), target).level in ("copies", "blocks")


def test_few_channels_make_one_axis_with_the_taps():
    stem = "w bf16 n64 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3 x@nxc y@nxc"
    assert plan(stem).launches[0].constant("FLAT")
    assert not plan(DENSE.format("w", "bf16")).launches[0].constant("FLAT")


def test_a_plan_is_a_value():
    line = DENSE.format("w", "f32")
    assert plan(line) == plan(line)
    assert hash(plan(line)) == hash(plan(line))
    assert len({plan(line), plan(line), plan(line, "sm_80")}) == 2


@pytest.mark.parametrize("kind", KNOWN)
def test_workspace_is_bounded(kind):
    for dtype in ("f32", "bf16", "f64"):
        for wanted in "xyw":
            small = Problem.parse(f"{wanted} {dtype} n64 g1 cx16 cy16 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1")
            found = choose.plan(small, of_kind(kind))
            item = 8 if dtype == "f64" else 4
            assert found.workspace == (found.parts * small.size(wanted) * item if found.parts > 1 else 0)
            assert found.workspace <= min(choose.MOST_WORKSPACE, max(small.bytes, 16 << 20))
    assert plan("w bf16 n64 g1 cx16 cy16 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1", kind).parts > 1, "a long sum, few results"


def test_sums_in_parts_are_added_once():
    found = plan(DENSE.format("w", "bf16") + " out:f32 accumulate")
    assert [launch.kernel for launch in found.launches] == ["weights", "finish"]
    assert [launch.constant("ACCUMULATE") for launch in found.launches] == [False, True]


@pytest.mark.parametrize(
    ("kind", "precision"), [("sm_80", "bf16x6"), ("sm_90", "bf16x6"), ("sm_100", "bf16x6"), ("sm_89", "ieee")]
)
def test_f32_is_taken_the_fastest_way_that_is_accurate(kind, precision):
    found = plan(DENSE.format("x", "f32"), kind)
    assert found.precision == precision
    assert found.launches[0].constant("PRECISION") == precision
    assert any("f32" in reason or "split" in reason for reason in found.why)
    assert plan(DENSE.format("x", "f32"), kind, "tf32").precision == "tf32"
    assert plan(DENSE.format("x", "bf16"), kind, "tf32").precision == "", "other types have one way"


def test_offsets_beyond_31_bits():
    for line, wide in [
        ("y bf16 n64 g1 cx64 cy64 x1024x1024 w3x3 y1024x1024 s1x1 d1x1 p1x1", True),
        ("w f32 n1 g1 cx2 cy2 x40 w3 y40 s1 d1 p1 x@0,0,4000000000,3", True),
        ("y bf16 n60 g1 cx16 cy16 x1024x1024 w3x3 y1024x1024 s1x1 d1x1 p1x1", False),
    ]:
        problem = Problem.parse(line)
        assert axes.is_wide(problem) == wide
        assert choose.plan(problem, of_kind("sm_90")).launches[0].constant("WIDE") == wide


def test_nothing_to_compute():
    assert plan("x bf16 n0 g1 cx2 cy2 x3 w3 y3 s1 d1 p1").launches == ()
    (launch,) = plan("w bf16 n0 g1 cx2 cy2 x3 w3 y3 s1 d1 p1").launches
    assert launch.kernel == "finish"


def test_levels_are_asked_in_their_order(monkeypatch):
    """One that does not serve says why, and a plan tells it; those for other kinds of GPU are not asked."""
    asked = []

    def level(name, answer):
        def plan(p, target, precision):
            asked.append(name)
            return answer if isinstance(answer, str) else answer(p, target, precision)

        return SimpleNamespace(plan=plan)

    modules = {"a": level("a", "no matrices"), "b": level("b", choose.plan), "c": level("c", choose.plan)}
    levels = (
        registry.Level("later", "c", least=100),
        registry.Level("first", "a"),
        registry.Level("second", "b", 90, 90, aligned=True),
        registry.Level("last", "c", stage=1),
    )
    monkeypatch.setattr(registry, "LEVELS", levels)
    monkeypatch.setattr(registry, "_module", modules.get)
    problem = Problem.parse(DENSE.format("x", "bf16"))
    found = registry.make_plan(problem, of_kind("sm_90"))
    assert (found.level, asked) == ("second", ["a", "b"])
    assert found.why[-1] == "not first: no matrices"
    found = registry.make_plan(problem, of_kind("sm_90"), aligned=False)
    assert found.level == "last"
    assert "not second: a tensor does not begin at a multiple of 16 bytes" in found.why
    assert registry.make_plan(problem, of_kind("sm_80")).level == "last"
    monkeypatch.setattr(registry, "LEVELS", levels[1:2])
    assert registry.make_plan(problem, of_kind("sm_90")) == "no matrices"


def test_copies_stand_around_what_another_level_makes():
    """Channels first: what is read is copied, so is the result; each copy is an area, and no tensor is taken twice."""
    line = "x bf16 n16 g1 cx128 cy256 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1"
    problem, target = Problem.parse(line), of_kind("sm_80")
    assert registry.make_plan(problem, target).level == "copies"
    found = relaid.around(problem, relaid.ways(problem)[0], target, "default")
    kernels = [launch.kernel for launch in found.launches]
    assert kernels[:2] == ["relay", "relay"]
    assert kernels[-1] == "relay"
    assert "relay" not in kernels[2:-1]
    assert dict(found.areas) == {
        "x, channels last": 2 * problem.size("x"),
        "w, channels last": 2 * problem.size("w"),
        "y, channels last": 2 * problem.size("y"),
    }
    inner = {role for launch in found.launches[2:-1] for role, _ in launch.tensors}
    assert inner == set(dict(found.areas))
    assert [launch.tensors[0][0] for launch in found.launches[:2]] == ["w", "y"]
    assert found.launches[-1].tensors[1] == ("x", "bf16")
    assert found.seconds < choose.plan(problem, target).seconds
    assert any("channels are side by side" in reason for reason in found.why)
    stays = relaid.around(problem, relaid.ways(problem)[1], target, "default")
    assert "x, channels last" not in dict(stays.areas), "results may be written where they belong"
    last = registry.make_plan(Problem.parse(f"{line} x@nxc y@nxc w@xio"), target)
    assert last.level == "portable"
    assert "not copies: channels are side by side" in last.why
    weights = registry.make_plan(Problem.parse(f"{line} x@nxc y@nxc"), target)
    assert [name for name, _ in weights.areas] == ["w, channels last"], "weights whose taps are side by side"
    aligned = registry.make_plan(problem, target, aligned=False)
    assert aligned.level == "portable", "copies are for tensors that begin at multiples of 16 bytes"


@pytest.mark.parametrize(
    ("more", "out", "last"), [("", "bf16", (False, False)), ("bias accumulate", "f32", (True, True))]
)
def test_channels_that_do_not_fill_pieces_may_be_padded(more, out, last):
    """What a result held, and a bias of fewer channels, are added to sums that were not rounded."""
    line = f"x bf16 n32 g1 cx46 cy46 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio {more}"
    (way,) = relaid.ways(Problem.parse(line))
    assert (way.inner.cx, way.inner.cy, way.inner.out_dtype) == (48, 48, out)
    assert (way.inner.bias_stride, way.inner.accumulate) == (None, False)
    plan = relaid.around(Problem.parse(line), way, of_kind("sm_80"), "default")
    assert (plan.launches[-1].constant("BIAS"), plan.launches[-1].constant("ACCUMULATE")) == last


def test_pixels_that_no_window_meets_are_not_copied():
    """Pointwise layers with a stride read one pixel of each step."""
    line = "{} bf16 n128 g1 cx512 cy1024 x28x28 w1x1 y14x14 s2x2 d1x1 p0x0"
    for wanted, share in (("x", 1), ("y", 4), ("w", 4)):
        problem = Problem.parse(line.format(wanted))
        found = relaid.around(problem, relaid.ways(problem)[0], of_kind("sm_80"), "default")
        assert dict(found.areas)["x, channels last"] == 2 * problem.size("x") // share


def test_too_many_programs():
    line = f"x bf16 n1 g1 cx1 cy1 x{2**42} w1 y1 s{2**20} d1 p0"
    assert "more programs than a launch may have" in plan(line)


def test_more_of_a_machine_is_never_slower():
    problem, target = Problem.parse(DENSE.format("w", "bf16")), of_kind("sm_90")
    faster = choose.plan(problem, replace(target, multiprocessors=264, bandwidth=9000.0))
    assert faster.seconds <= choose.plan(problem, target).seconds
    assert cost.rate(target, "bf16", "ieee") > cost.rate(target, "f32", "tf32") > cost.rate(target, "f32", "ieee")


def test_explain_tells_of_a_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setenv("CONVGRAD_GPU_TARGET", "sm_100")
    text = " ".join(convgrad.explain(DENSE.format("w", "f32"), device="cuda").split())
    assert "gpu, Triton kernel weights: matrix products over pixels" in text
    assert "products in bf16x6" in text
    assert "microseconds by the model for sm_100" in text
    monkeypatch.setenv("CONVGRAD_GPU_TARGET", "sm_1")
    with pytest.raises(UnsupportedError, match="no GPU is known by the name 'sm_1'; known are sm_80"):
        convgrad.explain(DENSE.format("w", "f32"), device="cuda:1")
