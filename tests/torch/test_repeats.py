"""Calls of PyTorch's tensors that come again are recognized, and none that differs passes for one that came before."""

from __future__ import annotations

import pytest
import torch

import convgrad
from convgrad import calls, engine, libraries, repeats

SAME = {"strides": 1, "pads_begin": 1, "pads_end": 1, "dilations": 1}


def integers(seed, *shape, dtype=torch.float32):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(x, w, stride=1, **how):
    y = torch.nn.functional.conv2d(x.movedim(3, 1).double(), w.permute(3, 2, 0, 1).double(), None, stride, 1, **how)
    return y.movedim(1, 3).to(x.dtype)


@pytest.fixture(autouse=True)
def looked(monkeypatch):
    """The operations of calls that were looked up by their keys: those that were not recognized."""
    monkeypatch.setattr(calls, "KNOWN", {})
    repeats.REPEATS.clear()
    libraries.find(X)  # the library of the first tensor of a process is found first
    found, look = [], calls.look
    monkeypatch.setattr(calls, "look", lambda name, *rest: found.append(name) or look(name, *rest))
    yield found
    repeats.REPEATS.clear()


X, W = integers(1, 2, 7, 9, 5), integers(2, 3, 3, 5, 20)


def settle(*given, **how):
    """Make a call three times: the first binds it, the second finds its key, and from then on it is recognized."""
    for _ in range(3):
        result = convgrad.convolution(*given, **how)
    return result


def test_a_call_that_comes_again_is_not_looked_up(looked):
    for seed in range(5):
        x = integers(seed, *X.shape)
        assert torch.equal(convgrad.convolution(x, W, **SAME), judged(x, W))
    assert len(looked) == 2
    out = torch.full((2, 7, 9, 20), torch.nan)
    settle(X, W, **SAME, out=out)
    del looked[:]
    for seed in range(3):
        x, version = integers(seed, *X.shape), out._version
        assert convgrad.convolution(x, W, **SAME, out=out) is out
        assert torch.equal(out, judged(x, W))
        assert out._version == version + 1
    assert not looked


def test_third_inputs(looked):
    bias = integers(3, 20)
    assert torch.equal(settle(X, W, bias, **SAME), judged(X, W) + bias)
    dst, w = integers(4, 2, 4, 4, 8), integers(3, 3, 3, 5, 8)
    for size in (7, 8, 7, 7, 7, 8, 8):
        shape = torch.Size([2, size, size, 5])
        found = convgrad.convolution_backward_data(dst, w, shape, **{**SAME, "strides": 2})
        assert found.shape == shape
    y = integers(5, 2, 7, 9, 20)
    for shape in (W.shape, tuple(W.shape)):
        for _ in range(3):
            gradient = convgrad.convolution_backward_weights(X, y, shape, **SAME)
        del looked[:]
        assert torch.equal(convgrad.convolution_backward_weights(X, y, shape, **SAME), gradient)
        assert not looked
        for wrong in ((3.0, 3, 5, 20), (3, 3, True, 20), 5):
            with pytest.raises(convgrad.SpecError):
                convgrad.convolution_backward_weights(X, y, wrong, **SAME)


def test_other_tensors_are_other_calls():
    """Of the same shapes and attributes, but of other strides or types."""
    kinds = [
        X,
        X.transpose(1, 2).contiguous().transpose(1, 2),
        X.repeat(1, 1, 2, 1)[:, :, ::2],
        X.double(),
        X.bfloat16(),
        torch._neg_view(-X),
    ]
    for x in (*kinds, *kinds, *kinds, *kinds):
        assert torch.equal(convgrad.convolution(x, W.to(x.dtype), **SAME), judged(x, W))


@pytest.mark.parametrize("wrong", [{"groups": True}, {"strides": (1, True)}, {"strides": 1.0}, {"dilations": "1"}])
def test_a_recognized_call_excuses_no_mistake(wrong):
    right = {**SAME, "groups": 1, "strides": (1, 1)}
    settle(X, W, **right)
    for _ in range(2):
        with pytest.raises(convgrad.SpecError):
            convgrad.convolution(X, W, **{**right, **wrong})
    with pytest.raises(convgrad.SpecError, match="dilations is required"):
        convgrad.convolution(X, W, strides=1, pads_begin=1, pads_end=1, groups=1)
    assert torch.equal(convgrad.convolution(X, W, **right), judged(X, W))


def test_attributes_count_by_their_names():
    """The same numbers in the same order, under other names."""
    settle(X, W, strides=1, pads_begin=1, pads_end=1, dilations=2)
    found = convgrad.convolution(X, W, dilations=1, pads_begin=1, pads_end=1, strides=2)
    assert torch.equal(found, judged(X, W, stride=2))


def test_lists_are_looked_at_anew(looked):
    strides = [1, 1]
    how = {**SAME, "strides": strides}
    settle(X, W, **how)
    strides[:] = [2, 2]
    assert torch.equal(convgrad.convolution(X, W, **how), judged(X, W, stride=2))


def test_gradients_are_not_lost():
    w = W.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(settle(X, w, **SAME), judged(X, W))
    y = convgrad.convolution(X, w, **SAME)
    y.sum().backward()
    assert w.grad is not None
    with torch.no_grad():
        assert not convgrad.convolution(X, w, **SAME).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own make_dual gives it
def test_tangents_are_not_lost():
    settle(X, W, **SAME)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, X)
        y = torch.autograd.forward_ad.unpack_dual(convgrad.convolution(x, W, **SAME))
        assert torch.equal(y.tangent, judged(X, W))


def test_vmap_sees_the_call():
    settle(X, W, **SAME)
    many = torch.stack([X, 2 * X])
    found = torch.func.vmap(lambda x: convgrad.convolution(x, W, **SAME))(many)
    assert torch.equal(found[1], 2 * judged(X, W))


def test_memory_that_is_not_there_or_may_not_be_written(looked):
    out = torch.empty(2, 7, 9, 20)
    settle(X, W, **SAME, out=out)
    with torch.inference_mode():
        other = torch.empty_like(out)
        settle(X, W, **SAME, out=other)
        settle(X, W, **SAME, out=out)
    with pytest.raises(convgrad.SpecError, match="inference"):
        convgrad.convolution(X, W, **SAME, out=other)
    gone = X.clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(convgrad.SpecError, match="given back"):
        convgrad.convolution(gone, W, **SAME, out=out)


def test_out_that_is_an_input():
    """Recognized or not, no value is overwritten that is still to be read."""
    image, w = integers(3, 1, 40, 40, 16), integers(4, 3, 3, 16, 16)
    expected = judged(image, w)
    settle(image, w, **SAME, out=torch.empty_like(image))
    memory = torch.empty(2 * image.numel())
    for begin in (0, 16, image.numel() - 1, image.numel()):
        x, out = memory[: image.numel()].view_as(image), memory[begin:][: image.numel()].view_as(image)
        for first, second in ((x, out), (out, x)):
            first.copy_(image)
            assert torch.equal(convgrad.convolution(first, w, **SAME, out=second), expected)


def test_other_settings_and_back_ends(looked, monkeypatch):
    settle(X, W, **SAME)
    threads = convgrad.get_num_threads()
    try:
        convgrad.set_num_threads(threads + 1)
        del looked[:]
        assert torch.equal(convgrad.convolution(X, W, **SAME), judged(X, W))
        assert looked
    finally:
        convgrad.set_num_threads(threads)
    settle(X, W, **SAME)
    monkeypatch.setattr(engine, "BACKENDS", [*engine.BACKENDS])
    engine.register(engine.BACKENDS[0])
    del looked[:]
    convgrad.convolution(X, W, **SAME)
    assert looked


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(repeats, "MOST", 4)
    for size in range(7, 14):
        settle(integers(1, 2, size, 9, 5), W, **SAME)
    assert [len(found) for found in repeats.REPEATS.values()] == [repeats.ALIKE]
    for size in range(7, 14):
        settle(X, integers(2, 3, 3, 5, size), **SAME)
        assert len(repeats.REPEATS) <= 4


def test_without_pytorchs_guards_calls_are_looked_up(looked, monkeypatch):
    from convgrad.libraries import torch as library

    monkeypatch.setattr(library, "GUARDED", frozenset())
    settle(X, W, **SAME)
    assert len(looked) == 3
