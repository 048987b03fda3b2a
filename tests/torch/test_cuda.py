"""What becomes of calls on CUDA, as far as it can be seen without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import convgrad
from convgrad import engine, precision
from convgrad.backend import Device
from convgrad.gpu import backend as gpu
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem
from convgrad.torch import memory, plans, policy

LINE = "x f32 n8 g1 cx256 cy256 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Nothing said about products of f32, to us and to PyTorch."""
    monkeypatch.delenv("CONVGRAD_F32", raising=False)
    monkeypatch.setattr(precision, "_chosen", "")
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    yield
    conv.fp32_precision = before


def allow(word):
    torch.backends.cudnn.conv.fp32_precision = word


def test_products_follow_pytorch_until_the_user_says_how(monkeypatch):
    allow("tf32")
    assert memory.float32_precision() == "tf32"
    for word in ("ieee", "none"):
        allow(word)
        assert memory.float32_precision() == "default"
    allow("tf32")
    for word in ("default", "ieee", "bf16x6"):
        convgrad.set_float32_precision(word)
        assert memory.float32_precision() == word
    monkeypatch.setattr(precision, "_chosen", "")
    monkeypatch.setenv("CONVGRAD_F32", "default")
    assert memory.float32_precision() == "default"


def test_versions_of_pytorch_without_a_word_for_convolutions(monkeypatch):
    monkeypatch.setattr(memory, "_conv_precision", None)
    for allowed, word in ((True, "tf32"), (False, "default")):
        monkeypatch.setattr(memory, "_allows_tf32", lambda allowed=allowed: allowed)
        assert memory.float32_precision() == word


def test_plans_are_made_as_pytorch_takes_products(monkeypatch):
    """And are kept apart by it; plain functions know nothing of PyTorch's setting."""
    monkeypatch.setenv("CONVGRAD_GPU_TARGET", "sm_90")
    monkeypatch.setattr(plans.engine, "choose", lambda problem, device: taken(gpu.plan(problem, device)))
    problem, first = Problem.parse(LINE), SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))
    result = plans.Result((8, 256, 28, 28), (1, 1, 1, 1), torch.float32)

    def taken(plan):
        return SimpleNamespace(execute=plan.launches, backend=SimpleNamespace(name="gpu"))

    def planned():
        return plans.load(problem, result, first).execute, memory.setting("cuda")

    allow("tf32")
    (by_tf32, setting) = planned()
    assert by_tf32 == taken(gpu._plan(problem, gpu_target(), "tf32")).execute
    assert (
        engine.choose(problem, Device("cuda", 0)).execute == taken(gpu._plan(problem, gpu_target(), "default")).execute
    )
    allow("ieee")
    (by_default, other) = planned()
    assert by_default == taken(gpu._plan(problem, gpu_target(), "default")).execute != by_tf32
    assert setting != other
    assert memory.setting("cpu") == memory.setting("cpu")
    allow("tf32")
    convgrad.set_float32_precision("default")
    assert planned()[0] == by_default


def gpu_target():
    return of_kind("sm_90")


CUDA = Device("cuda", 0)
DEPTHWISE = Problem.parse("w bf16 n8 g64 cx1 cy1 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1")
POINTS = Problem.parse("w bf16 n8 g1 cx512 cy512 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0 x@nxc y@nxc")
FEW = Problem.parse("x f32 n8 g1 cx64 cy256 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0 x@nxc y@nxc")
# Whether layers are left to PyTorch: pointwise ones by their channels, transposed ones by their axes.
FIRST_IN_TF32 = {
    "x f32 n8 g1 cx64 cy256 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0": False,
    "w f32 n8 g1 cx64 cy256 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0": False,
    "x f32 n8 g1 cx64 cy256 x7x7 w1x1 y7x7 s1x1 d1x1 p0x0": True,
    "w f32 n8 g1 cx64 cy256 x7x7 w1x1 y7x7 s1x1 d1x1 p0x0": True,
    "x f32 n8 g1 cx1024 cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0": False,
    "w f32 n8 g1 cx1024 cy512 x14x14 w1x1 y14x14 s1x1 d1x1 p0x0": False,
    "x f32 n8 g1 cx512 cy1024 x28x28 w1x1 y14x14 s2x2 d1x1 p0x0": False,
    "x f32 n8 g1 cx64 cy64 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1": False,
    "y f32 n8 g1 cx512 cy256 x2056 w16 y256 s8 d1 p4": True,
    "y f32 n8 g1 cx256 cy512 x32x32 w4x4 y16x16 s2x2 d1x1 p1x1": False,
    "w f32 n8 g1 cx64 cy128 x32x32 w2x2 y16x16 s2x2 d1x1 p0x0": False,
}
FLOAT32 = {"dtype": "f32", "out_dtype": "f32"}


def test_what_was_measured_on_a_gpu_is_taken_where_it_is_ahead(monkeypatch):
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind("sm_90"))
    allow("ieee")
    assert not policy.hindrance(DEPTHWISE, CUDA, "fast")
    assert not policy.hindrance(replace(DEPTHWISE, dtype="f16", out_dtype="f16"), CUDA, "fast")
    assert not policy.hindrance(replace(DEPTHWISE, **FLOAT32), CUDA, "fast")
    strided = Problem.parse("w f16 n8 g64 cx1 cy1 x28x28 w5x5 y14x14 s2x2 d1x1 p2x2 x@nxc y@nxc")
    assert "depthwise" in policy.hindrance(strided, CUDA, "fast")
    assert not policy.hindrance(replace(strided, dtype="bf16", out_dtype="bf16"), CUDA, "fast")
    assert "kernel of 1" in policy.hindrance(POINTS, CUDA, "fast")
    assert "kernel of 1" in policy.hindrance(replace(POINTS, dtype="f16", out_dtype="f16"), CUDA, "fast")
    assert not policy.hindrance(POINTS, CUDA, "all")


def test_rules_are_of_a_way_of_taking_products(monkeypatch):
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind("sm_90"))
    allow("ieee")
    assert not policy.hindrance(FEW, CUDA, "fast")
    allow("tf32")
    assert "kernel of 1" in policy.hindrance(FEW, CUDA, "fast")
    convgrad.set_float32_precision("tf32x3")
    assert "products in tf32x3 have not been measured" in policy.hindrance(FEW, CUDA, "fast")
    assert not policy.hindrance(DEPTHWISE, CUDA, "fast"), "there are none of f32"


def test_layers_in_tf32_with_channels_first_are_taken_but_for_few_kinds(monkeypatch):
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind("sm_90"))
    allow("tf32")
    for text, left in FIRST_IN_TF32.items():
        assert bool(policy.hindrance(Problem.parse(text), CUDA, "fast")) == left, text


@pytest.mark.parametrize("kind", ["sm_80", "sm_89", "sm_100"])
def test_what_was_not_measured_on_gpus_is_left_to_pytorch(monkeypatch, kind):
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind(kind))
    told = policy.hindrance(DEPTHWISE, CUDA, "fast")
    assert "capability" in told
    assert "have not been measured" in told
    assert not policy.hindrance(DEPTHWISE, CUDA, "all")
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind("sm_90"))
    assert "products in f64" in policy.hindrance(replace(DEPTHWISE, dtype="f64", out_dtype="f64"), CUDA, "fast")
    assert "forward passes" in policy.hindrance(replace(DEPTHWISE, wanted="y"), CUDA, "fast", forward=True)


SMALL = "x bf16 n{} g1 cx64 cy128 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1"


def test_a_small_layer_on_a_gpu_is_not_worth_a_call_of_its_own(monkeypatch):
    monkeypatch.setattr(policy.gpu, "machine", lambda device: of_kind("sm_90"))
    few, many = (Problem.parse(SMALL.format(images)) for images in (256, 4096))
    assert "takes the host longer" in policy.too_little(few, CUDA, "fast")
    assert not policy.too_little(many, CUDA, "fast")
    assert not policy.too_little(few, CUDA, "all")
    assert not policy.too_little(few, Device("cpu", 0), "fast")
