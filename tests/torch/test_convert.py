"""`convert` changes who computes, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import convgrad.torch
from convgrad.errors import SpecError
from torch_layers import whole

pytestmark = pytest.mark.usefixtures("by_reference")


class Own(nn.Conv2d):
    """A convolution of somebody's own."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


def model():
    torch.manual_seed(0)
    shared = nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        shared,
        nn.ModuleList([nn.ReLU()])[0],
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.utils.parametrizations.spectral_norm(nn.ConvTranspose2d(4, 4, 2, stride=2)),
        shared,
        Own(4, 2, 1),
        nn.Sequential(nn.LazyConv2d(3, 1), nn.BatchNorm2d(3)),
    )


def kinds(net):
    return [f"{type(m).__module__.partition('.')[0]}.{type(m).__name__}" for m in net.modules()]


def test_there_and_back():
    net = model().eval()
    x = torch.randn(2, 3, 7, 7)
    before, expected = kinds(net), net(x)
    stock = kinds(net)
    assert "torch.LazyConv2d" in before
    assert "torch.LazyConv2d" not in stock
    modules, parameters = list(net.modules()), list(net.parameters())
    assert convgrad.torch.convert(net) is net
    torch.testing.assert_close(net(x), expected)
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    ours = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) and not isinstance(m, Own)]
    assert len(ours) == 5  # the shared one counts once
    assert all(isinstance(m, (convgrad.torch.Conv2d, convgrad.torch.ConvTranspose2d)) for m in ours)
    assert type(net[6]) is Own
    assert repr(net) == repr(convgrad.torch.convert(copy.deepcopy(net), back=True))
    convgrad.torch.convert(net, back=True)
    assert kinds(net) == stock
    torch.testing.assert_close(net(x), expected)
    convgrad.torch.convert(net, back=True)
    assert kinds(net) == stock


def test_a_module_by_itself():
    for rank in (1, 2, 3):
        for name in (f"Conv{rank}d", f"ConvTranspose{rank}d", f"LazyConv{rank}d", f"LazyConvTranspose{rank}d"):
            args = (3, 2) if name.startswith("Lazy") else (2, 3, 2)
            made = getattr(nn, name)(*args)
            assert type(convgrad.torch.convert(made)) is getattr(convgrad.torch, name)
            assert type(convgrad.torch.convert(made, back=True)) is getattr(nn, name)


def test_lazy_ones_become_ours():
    net = convgrad.torch.convert(nn.Sequential(nn.LazyConv2d(3, 1)), accumulate=True)
    net(torch.ones(1, 2, 4, 4))
    assert type(net[0]) is convgrad.torch.Conv2d
    assert net[0].accumulate


def test_options():
    net = convgrad.torch.convert(model(), wide_weights=True, accumulate=True)
    assert (net[1].wide_weights, net[1].accumulate, net[1].algorithm) == (True, True, "direct")
    assert repr(net[1]).endswith("wide_weights=True, accumulate=True)")
    convgrad.torch.convert(net, wide_weights=True)
    assert (net[1].wide_weights, net[1].accumulate, net[3].accumulate) == (True, False, False)
    convgrad.torch.convert(net, back=True)
    assert not {"wide_weights", "accumulate", "algorithm"} & vars(net[1]).keys()


def test_what_is_kept():
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Dropout(0.5), nn.Conv1d(3, 2, 1)).train()
    net[2].eval()
    net[0].weight.requires_grad_(False)
    net[0].note = "mine"
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append("forward"))
    net[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    net[2].register_forward_pre_hook(lambda *_: calls.append("before"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = copy.deepcopy(net.state_dict())
    convgrad.torch.convert(net)
    assert [m.training for m in net] == [True, True, False]
    assert not net[0].weight.requires_grad
    assert net[0].note == "mine"
    assert all(torch.equal(a, state[k]) for k, a in net.state_dict().items())
    net(whole(2, 2, 6).requires_grad_()).sum().backward()
    assert calls == ["forward", "before", "backward"]
    optimizer.step()
    assert not torch.equal(net[2].weight, state["2.weight"])
    assert torch.equal(net[0].weight, state["0.weight"])


def test_parametrizations():
    """They work on, can be copied, removed, and added later."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 3)))
    x, made = whole(2, 2, 6), net[0]
    expected = net(x)
    convgrad.torch.convert(net)
    assert type(made).__name__ == "ParametrizedConv1d"
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(copy.deepcopy(net)(x), expected)
    net(x).sum().backward()
    assert made.parametrizations.weight.original0.grad is not None
    nn.utils.parametrize.remove_parametrizations(made, "weight")
    assert type(made) is convgrad.torch.Conv1d
    torch.testing.assert_close(net(x), expected)
    nn.utils.parametrizations.weight_norm(made)
    convgrad.torch.convert(net, back=True)
    assert type(made).__bases__ == (nn.Conv1d,)
    torch.testing.assert_close(net(x), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_older_weight_norm():
    net = nn.utils.weight_norm(nn.Conv1d(2, 3, 3))
    expected = net(whole(2, 2, 6))
    torch.testing.assert_close(convgrad.torch.convert(net)(whole(2, 2, 6)), expected)


def test_training_goes_on_as_before():
    """Some steps by PyTorch, some here, with the optimizer's state: as if nothing had happened."""
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3)).double()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        x = torch.randn(4, 1, 6, 6, dtype=torch.float64)
        for n in range(6):
            if changes and n in (2, 4):
                convgrad.torch.convert(net, back=n == 4)
            optimizer.zero_grad()
            loss = (net(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        found.append(loss)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("args", "kwargs", "part"),
    [
        (([1],), {}, "convert: model must be a torch.nn.Module, got a list"),
        (
            (nn.ReLU(),),
            {"algorithm": "fft"},
            "convert: algorithm must be one of 'direct', 'bf16x6', 'bf16x3', got 'fft'",
        ),
        ((nn.ReLU(),), {"accumulate": 1}, "convert: accumulate must be True or False, got 1"),
        ((nn.ReLU(),), {"back": True, "accumulate": True}, "convert: back must be one of False"),
    ],
)
def test_mistakes(args, kwargs, part):
    with pytest.raises(SpecError) as caught:
        convgrad.torch.convert(*args, **kwargs)
    assert str(caught.value).startswith(part)
