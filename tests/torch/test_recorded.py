"""The plain functions where PyTorch looks on: differentiable, and part of what it traces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import convgrad
import problems
from convgrad.errors import LayoutWarning, SpecError
from convgrad.spec.bind import Layout
from convgrad.spec.table import OPS
from torch_layers import whole

CALL = dict(strides=1, pads_begin=1, pads_end=1, dilations=1, data_format="NCX", weights_format="OIX")


def as_tensor(value):
    """An array of the generator as a tensor; shapes stay what they are."""
    if not hasattr(value, "dtype") or isinstance(value, torch.Tensor) or value.dtype.kind in "iu":
        return value
    if value.dtype == problems.DTYPES["bf16"]:
        return torch.from_numpy(np.array(value, np.float32)).bfloat16()
    return torch.from_numpy(np.array(value))


def is_data(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cases(first, count):
    """Random calls of all operations, in all layouts."""
    rng, made = np.random.default_rng([7, first]), 0
    while made < count:
        case = problems.draw(rng)
        if case.out is None:
            made += 1
            yield case, [as_tensor(value) for value in case.inputs]


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("chunk", range(3))
def test_random_calls(chunk):
    """Results are those of plain calls; gradients are adjoints, exact in float64: Σ grad(x)·x is Σ g·y for every input
    of an operation that is linear in each, but for a bias.
    """
    for case, inputs in cases(chunk, 60):
        kind, attributes = case.kind, case.attributes
        plain = convgrad.apply(kind, *inputs, **attributes)
        needs = [v.detach().requires_grad_() if is_data(v) else v for v in inputs]
        found = convgrad.apply(kind, *needs, **attributes)
        assert found.requires_grad, case
        assert found.dtype is plain.dtype, case
        assert torch.equal(found.detach(), plain), case
        attributes = {k: v for k, v in attributes.items() if k != "out_dtype"}
        leaves = [v.detach().double().sign().requires_grad_() if is_data(v) else v for v in inputs]
        y = convgrad.apply(kind, *leaves, **attributes)
        g = whole(*y.shape, dtype=torch.float64)
        first, second, *bias = [v for v in leaves if is_data(v)]
        grads = torch.autograd.grad(y, [first, second, *bias], g)
        total = (g * y).sum()
        if bias:
            axis = 1 if attributes.get("data_format") == "NCX" else g.dim() - 1
            assert torch.equal(grads[2], g.sum([a for a in range(g.dim()) if a != axis])), case
            total = total - (grads[2] * bias[0]).sum()
        assert (grads[0] * first).sum() == total, case
        assert (grads[1] * second).sum() == total, case


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("kind", OPS)
def test_memory_of_results(kind):
    """As of a plain call, in every layout."""
    op = OPS[kind]
    sizes = {"x": (2, 3, 6, 5), "w": (4, 3, 3, 2), "y": (2, 4, 6, 4)}
    attributes = dict(strides=1, pads_begin=(1, 0), pads_end=(1, 0), dilations=1)
    for data in op.attr("data_format").choices:
        for weights in op.attr("weights_format").choices:
            axes = Layout(data, weights)
            for flip in (False, True):
                inputs = []
                for arg in op.inputs[:2]:
                    letters = axes.axes(op, arg.role)
                    first, second, *space = sizes[arg.role]
                    size = dict(zip("yx" if arg.role == "w" else ("n", "c"), ((first,), (second,)), strict=True))
                    size["k"] = tuple(space)
                    shape = [n for letter in letters for n in size[letter]]
                    tensor = whole(*shape)
                    inputs.append(tensor.transpose(1, -1).contiguous().transpose(1, -1) if flip else tensor)
                if op.wanted == "w" or (op.wanted == "x" and not op.transposed):
                    role = op.wanted
                    first, second, *space = sizes[role]
                    size = dict(zip("yx" if role == "w" else ("n", "c"), ((first,), (second,)), strict=True))
                    size["k"] = tuple(space)
                    inputs.append(tuple(n for letter in axes.axes(op, role) for n in size[letter]))
                call = attributes | dict(data_format=data, weights_format=weights)
                plain = convgrad.apply(kind, *inputs, **call)
                inputs[0] = inputs[0].detach().requires_grad_()
                found = convgrad.apply(kind, *inputs, **call)
                assert found.stride() == plain.stride()
                assert torch.equal(found, plain)


def test_every_function_is_differentiable():
    x, w, b = (whole(*s).double().requires_grad_() for s in ((2, 4, 5, 6), (6, 2, 3, 3), (6,)))
    more = CALL | dict(groups=2)

    def chain(x, w, b):
        y = convgrad.convolution(x, w, b, **more)
        back = convgrad.convolution_backward_data(y, w, tuple(x.shape), **more)
        grad = convgrad.convolution_backward_weights(back, y, tuple(w.shape), **more)
        up = convgrad.conv_transpose(y, w, **(more | dict(weights_format="IOX")))
        total = convgrad.conv_transpose_backward_data(up, grad, **(more | dict(weights_format="IOX")))
        return total.mean() + convgrad.bias_backward(total, data_format="NCX").mean()

    torch.manual_seed(0)
    inputs = [torch.randn_like(t).requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradcheck(chain, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bias(dtype):
    data, bias = whole(2, 3, 4, dtype=dtype).requires_grad_(), whole(3, dtype=dtype).requires_grad_()
    for function in (
        lambda d, b: convgrad.apply("BiasAdd", d, b, data_format="NCX"),
        lambda d, b: convgrad.bias_backward(d, data_format="NCX") * b,
        lambda d, b: convgrad.bias_backward(d, out_dtype=dtype).sum() * b,
    ):
        found, plain = function(data, bias), function(data.detach(), bias.detach())
        assert torch.equal(found.detach(), plain)
        assert found.dtype is plain.dtype
        found.sum().backward()
    assert data.grad.shape == data.shape
    assert bias.grad.shape == bias.shape


def test_element_types_are_those_that_were_asked_for():
    """Autocast does not change what a plain call means."""
    x, w = whole(2, 3, 5).requires_grad_(), whole(4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert convgrad.convolution(x, w, **CALL).dtype is torch.float32
    wide = convgrad.convolution(x.bfloat16(), w.bfloat16(), **CALL, out_dtype="f32")
    assert wide.dtype is torch.float32
    wide.sum().backward()
    assert x.grad.dtype is torch.float32


def test_transforms_and_traces():
    x, w = whole(3, 2, 4, 6), whole(4, 4, 3)
    plain = [convgrad.convolution(a, w, **CALL) for a in x]
    assert torch.equal(torch.vmap(lambda a: convgrad.convolution(a, w, **CALL))(x), torch.stack(plain))
    expected = convgrad.convolution_backward_data(torch.ones_like(plain[0]), w, tuple(x[0].shape), **CALL)
    assert torch.equal(torch.func.grad(lambda a: convgrad.convolution(a, w, **CALL).sum())(x[0]), expected)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = convgrad.convolution(torch.zeros(2, 4, 6), torch.zeros(4, 4, 3), **CALL)
    assert fake.shape == plain[0].shape
    meta = convgrad.convolution(x[0].to("meta"), w.to("meta"), **CALL)
    assert (meta.shape, meta.stride(), meta.device.type) == (plain[0].shape, plain[0].stride(), "meta")


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    x, w = whole(2, 4, 6).requires_grad_(), whole(4, 4, 3).requires_grad_()

    def loss(x, w):
        return convgrad.convolution(x, w, **CALL).square().sum()

    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w)
    assert torch.equal(found, loss(x, w))
    assert all(map(torch.equal, *(torch.autograd.grad(v, (x, w)) for v in (found, loss(x, w)))))
    with torch.no_grad():
        plain = torch.compile(loss, backend="aot_eager", fullgraph=True)(x.detach(), w.detach())
    assert torch.equal(plain, found)


def test_mistakes_are_told_as_of_plain_calls():
    x, w = whole(2, 4, 6), whole(4, 4, 3)
    calls = [
        ((x, w[:, :2]), CALL),
        ((x, w), CALL | dict(groups=3)),
        ((x,), CALL),
        ((x, w), CALL | dict(padding=1)),
        ((x.int(), w), CALL),
        ((x, w.double()), CALL),
        ((x, w), CALL | dict(accumulate=True)),
    ]
    for args, more in calls:
        told = []
        for needs in (False, True):
            given = [a.clone().requires_grad_(needs and a.is_floating_point()) for a in args]
            with pytest.raises(SpecError) as caught:
                convgrad.convolution(*given, **more)
            told.append(str(caught.value))
        assert told[0] == told[1]
    with pytest.raises(SpecError, match="without `out`, have gradients"):
        convgrad.convolution(x.requires_grad_(), w, out=torch.zeros(2, 4, 6), **CALL)
    with pytest.warns(LayoutWarning):
        convgrad.convolution(whole(2, 3, 7, 7).requires_grad_(), whole(3, 3, 3, 3), **CALL | dict(weights_format=None))
