"""The operators keep what PyTorch asks of a library's: checks, fake kernels, compilation, export, meta tensors."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F

import convgrad.torch
from convgrad.errors import SpecError
from marks import slow_but
from torch_layers import laid, whole

OPS = torch.ops.convgrad
GEOMETRIES = {
    1: ([2], [1], [1], 2),
    2: ([2, 1], [1, 0], [1, 2], 2),
    3: ([1, 2, 1], [1, 1, 0], [1, 1, 1], 2),
}


def arguments(name, rank, dtype=torch.float32, layout="first", grad=True):
    """The arguments of an operator."""
    geometry = stride, padding, dilation, _ = GEOMETRIES[rank]
    size, kernel = [7, 6, 5][:rank], [3, 2, 1][:rank]
    out = [
        (n + 2 * p - (k - 1) * d - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]
    x, w, y = (whole(*shape, dtype=dtype) for shape in ((2, 4, *size), (6, 2, *kernel), (2, 6, *out)))
    x, w, y = (laid(t, layout).requires_grad_(grad) for t in (x, w, y))
    if name == "convolution":
        return x, w, whole(6, dtype=dtype).requires_grad_(grad), out, *geometry
    if name == "convolution_data":
        return y, w, None, size, *geometry
    if name == "convolution_weights":
        return x, y, kernel, *geometry
    return x.detach(), y.detach(), torch.zeros_like(w, requires_grad=False), kernel, *geometry


NAMES = ("convolution", "convolution_data", "convolution_weights", "convolution_weights_into")


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", slow_but(["convolution_weights_into"], NAMES))
def test_what_pytorch_checks(name):
    op = getattr(OPS, name).default
    for rank in (1, 2, 3):
        torch.library.opcheck(op, arguments(name, rank))
    for dtype, layout in ((torch.bfloat16, "last"), (torch.float64, "first"), (torch.float16, "last")):
        torch.library.opcheck(op, arguments(name, 2, dtype, layout))


@pytest.mark.slow
@pytest.mark.usefixtures("by_reference")
def test_what_pytorch_checks_of_options():
    x, w, b, *rest = arguments("convolution", 2, torch.bfloat16)
    op = OPS.convolution.default
    torch.library.opcheck(op, (x, w, b, *rest), {"channels_last": True, "dtype": torch.float32})
    wide = (x, w.detach().float().requires_grad_(), b.detach().float().requires_grad_(), *rest)
    torch.library.opcheck(op, wide, {"wide_weights": True})


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", NAMES[:3])
def test_fake_results_are_like_real_ones(name):
    """Of every layout and odd sizes: shape, strides, element type."""
    op = getattr(OPS, name)
    for rank in (1, 2, 3):
        for layout in ("first", "last", "expanded", "sliced", "turned"):
            for last in (None, True, False):
                args = arguments(name, rank, layout=layout, grad=False)
                real = op(*args, channels_last=last)
                with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                    fake = op(*faked, channels_last=last)
                assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)).device.type == "meta"


def test_mistakes_are_told_without_values_too():
    x, w, b, *rest = arguments("convolution", 2)
    for device in ("cpu", "meta"):
        with pytest.raises(SpecError, match="w must be"):
            OPS.convolution(x[:, :2].to(device), w.to(device), None, *rest)
        with pytest.raises(SpecError, match="bias must be a vector of 6 values"):
            OPS.convolution(x.to(device), w.to(device), b[:4].to(device), *rest)
        with pytest.raises(SpecError, match="must have 3, 4 or 5 dimensions"):
            OPS.convolution(x[0, 0].to(device), w.to(device), None, *rest)


# ---- The sum that goes into a tensor


def test_weights_into():
    x, y, into, *rest = arguments("convolution_weights_into", 2)
    expected = OPS.convolution_weights(x, y, *rest)
    for start in (into, laid(into, "last"), torch.empty(2, *into.shape)[0].zero_()):
        version = start._version
        OPS.convolution_weights_into(x, y, start, *rest)
        OPS.convolution_weights_into(x, y, start, *rest)
        assert torch.equal(start, 2 * expected)
        assert start._version > version
    wide = torch.full(into.shape, 2.0**-20)
    OPS.convolution_weights_into(x.bfloat16(), y.bfloat16(), wide, *rest)
    assert torch.equal(wide, expected + 2.0**-20)


def test_what_cannot_take_sums_is_refused():
    x, y, into, *rest = arguments("convolution_weights_into", 2)
    for wrong, part in (
        (into[:, :1], "into must have the shape"),
        (into.double(), "must be torch.float32"),
        (torch.zeros(6, 2, 1, 2).expand(into.shape), "two elements at one address"),
        (torch.zeros(80).as_strided(into.shape, (4, 2, 2, 1)), "two elements at one address"),
    ):
        with pytest.raises(SpecError, match=part):
            OPS.convolution_weights_into(x, y, wrong, *rest)
    for i in range(3):
        given = [x.clone(), y.clone(), into.clone()]
        given[i].requires_grad_()
        with pytest.raises(SpecError, match=r"give its \.detach"):
            OPS.convolution_weights_into(*given, *rest)
        with torch.no_grad():
            OPS.convolution_weights_into(*given, *rest)


def test_autograd_notices_what_was_added_to():
    x, y, into, *rest = arguments("convolution_weights_into", 2)
    a = torch.ones_like(into, requires_grad=True)
    loss = (a * into).sum()
    OPS.convolution_weights_into(x, y, into, *rest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Compilation


def network(x, w, v):
    """A step of training in functions: convolutions of two kinds, and what is around them."""
    y = convgrad.torch.conv2d(x, w, stride=2, padding=1).relu()
    return convgrad.torch.conv_transpose2d(y, v, stride=2, output_padding=1).square().mean()


def stock(x, w, v):
    """The same by PyTorch."""
    y = F.conv2d(x, w, stride=2, padding=1).relu()
    return F.conv_transpose2d(y, v, stride=2, output_padding=1).square().mean()


def inputs(n=2, size=8, layout="first"):
    x, w, v = whole(n, 3, size, size), whole(8, 3, 3, 3), whole(8, 2, 2, 2)
    return [laid(t, layout).requires_grad_() for t in (x, w, v)]


def same(function, given):
    """Loss and gradients are those of PyTorch: sums of whole numbers, and a mean of few."""
    found, expected = function(*given), stock(*given)
    assert torch.equal(found, expected)
    for a, b, like in zip(*(torch.autograd.grad(v, given) for v in (found, expected)), given, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert a.stride() == like.stride()


@pytest.fixture
def compiled():
    """Compilers that start anew."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("layout", ["first", "last"])
def test_compiled_without_a_break(layout):
    same(torch.compile(network, backend="aot_eager", fullgraph=True), inputs(layout=layout))


@pytest.mark.usefixtures("compiled")
@pytest.mark.slow
def test_compiled_for_sizes_that_change():
    counts = []

    def backend(graph, example):
        counts.append(1)
        return graph.forward

    function = torch.compile(network, backend=backend, fullgraph=True)
    for n, size in ((2, 8), (3, 9), (5, 12)):
        given = inputs(n, size)
        for axis in (2, 3):
            torch._dynamo.mark_dynamic(given[0], axis)
        torch._dynamo.mark_dynamic(given[0], 0, min=2, max=64)
        same(function, given)
    assert len(counts) == 1
    same(torch.compile(network, backend="aot_eager", fullgraph=True, dynamic=True), inputs(4, 10))


@pytest.mark.usefixtures("compiled")
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler")
def test_compiled_by_inductor(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._inductor import config

    # What this machine's compiler can do is not tried out first, in a process that takes longer than the compiler.
    with config.patch({"cpp.vec_isa_ok": True}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Inductor's own
        same(torch.compile(network, fullgraph=True), inputs(layout="last"))


@pytest.mark.usefixtures("compiled")
def test_compiled_modules():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding="same"), torch.nn.ConvTranspose2d(4, 2, 3))
    x = torch.randn(2, 3, 7, 7)
    expected = model(x)
    convgrad.torch.convert(model, accumulate=True)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.usefixtures("compiled")
def test_autocast_when_compiled():
    def narrow(x, w, v):
        with torch.autocast("cpu", torch.bfloat16):
            return network(x, w, v)

    given = inputs()
    found = torch.compile(narrow, backend="aot_eager", fullgraph=True)(*given)
    assert torch.equal(found, narrow(*given))


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = convgrad.torch.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)

        def forward(self, x):
            return self.conv(x).relu()

    model, x = Model(), whole(2, 3, 8, 8, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert any("convgrad.convolution" in str(node.target) for node in program.graph.nodes)
    for n in (1, 5):
        more = whole(n, 3, 8, 8, dtype=torch.float64)
        assert torch.equal(program.module()(more), model(more))


def test_functional_graphs():
    """`make_fx` sees one operator for each convolution, and its gradients as such."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x, w):
        y = convgrad.torch.conv1d(x, w, padding=1)
        return torch.autograd.grad(y.sum(), (x, w))

    graph = make_fx(step)(whole(2, 3, 5).requires_grad_(), whole(4, 3, 3).requires_grad_())
    called = [str(node.target) for node in graph.graph.nodes if "convgrad" in str(node.target)]
    assert sorted(called) == [f"convgrad.convolution{part}.default" for part in ("", "_data", "_weights")]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced():
    """What is recorded fits all sizes, because it is PyTorch's."""
    model = torch.nn.Sequential(convgrad.torch.Conv1d(3, 4, 3, padding="same"), convgrad.torch.ConvTranspose1d(4, 2, 3))
    traced = torch.jit.trace(model, whole(2, 3, 9))
    for n, size in ((2, 9), (3, 14)):
        x = whole(n, 3, size, seed=5)
        torch.testing.assert_close(traced(x), model(x))
