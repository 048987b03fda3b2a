"""The modules are PyTorch's in everything but who computes; and gradients of weights that go straight into `.grad`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import convgrad.torch
from torch_layers import laid, whole

NAMES = [f"Conv{kind}{rank}d" for kind in ("", "Transpose") for rank in (1, 2, 3)]
pytestmark = pytest.mark.usefixtures("by_reference")


def rank_of(name):
    return int(name[-2])


def pair(name, *args, **kwargs):
    """Our module and PyTorch's, with the same whole numbers for parameters."""
    ours, theirs = (getattr(m, name)(*args, **kwargs) for m in (convgrad.torch, nn))
    with torch.no_grad():
        for i, p in enumerate(theirs.parameters()):
            p.copy_(whole(*p.shape, seed=i))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def same(ours, theirs, x, *args, **kwargs):
    """Results, and gradients of everything."""
    found = []
    for module in (ours, theirs):
        given = x.clone().requires_grad_()
        module.zero_grad()
        y = module(given, *args, **kwargs)
        y.sum().backward()
        found.append([y, given.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_pytorch(name):
    rank = rank_of(name)
    for kwargs in ({}, dict(stride=2, padding=1, dilation=2, groups=2, bias=False), dict(dtype=torch.float64)):
        ours, theirs = pair(name, 4, 6, 3, **kwargs)
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        x = whole(2, 4, *(8,) * rank, dtype=kwargs.get("dtype", torch.float32))
        same(ours, theirs, x)
        same(ours, theirs, x[0])


@pytest.mark.parametrize("name", NAMES)
def test_initial_values_are_those_of_pytorch(name):
    found = []
    for module in (convgrad.torch, nn):
        torch.manual_seed(3)
        found.append(getattr(module, name)(3, 5, 2))
    assert torch.equal(found[0].weight, found[1].weight)
    assert torch.equal(found[0].bias, found[1].bias)


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_other_paddings(mode, rank):
    for padding in ((2, 1, 2)[:rank], "same"):
        ours, theirs = pair(f"Conv{rank}d", 2, 3, 3, padding=padding, padding_mode=mode)
        same(ours, theirs, whole(2, 2, *(5,) * rank))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch makes a copy, we do not
def test_padding_in_words():
    same(*pair("Conv2d", 2, 3, (3, 2), padding="same", dilation=(1, 3)), whole(2, 2, 6, 7))
    same(*pair("Conv2d", 2, 3, (3, 2), padding="valid", stride=2), whole(2, 2, 6, 7))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_sizes_of_transposed_ones(rank):
    ours, theirs = pair(f"ConvTranspose{rank}d", 2, 3, 3, stride=2, padding=1, output_padding=1)
    x = whole(2, 2, *(4,) * rank)
    same(ours, theirs, x)
    for size in (7, 8):
        same(ours, theirs, x, output_size=(size,) * rank)
    same(ours, theirs, x, (2, 3, *(8,) * rank))
    for module in (ours, theirs):
        with pytest.raises(ValueError, match="requested an output size of"):
            module(x, output_size=(9,) * rank)


@pytest.mark.parametrize("name", NAMES)
def test_lazy_ones(name):
    lazy = getattr(convgrad.torch, f"Lazy{name}")(3, 2, accumulate=True)
    x = whole(2, 4, *(5,) * rank_of(name))
    y = lazy(x)
    assert type(lazy) is getattr(convgrad.torch, name)
    assert lazy.accumulate
    stock = getattr(nn, name)(4, 3, 2)
    stock.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(y, stock(x))


def test_copies():
    made = convgrad.torch.Conv2d(2, 3, 3, wide_weights=True)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.double()):
        assert type(other) is convgrad.torch.Conv2d
        assert other.wide_weights
        assert "wide_weights=True" in repr(other)
    assert made.to("meta")(torch.zeros(1, 2, 5, 5, device="meta", dtype=torch.float64)).shape == (1, 3, 3, 3)
    assert convgrad.torch.Conv1d(2, 3, 3, device="meta").weight.is_meta


def test_a_graph_of_modules():
    model = nn.Sequential(convgrad.torch.Conv1d(2, 3, 3), nn.ReLU(), convgrad.torch.ConvTranspose1d(3, 2, 3))
    x = whole(2, 2, 7)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"groups": 3}, "in_channels must be divisible by groups"),
        ({"padding": "full"}, "Invalid padding string"),
        ({"padding_mode": "ones"}, "padding_mode must be one of"),
        ({"algorithm": "fft"}, "Conv2d: algorithm must be one of 'direct', 'bf16x6', 'bf16x3', got 'fft'"),
        ({"wide_weights": 1}, "Conv2d: wide_weights must be True or False, got 1"),
        ({"accumulate": "yes"}, "Conv2d: accumulate must be True or False, got 'yes'"),
    ],
)
def test_mistakes(kwargs, part):
    with pytest.raises(ValueError, match=part.replace("(", r"\(")):
        convgrad.torch.Conv2d(4, 6, 3, **kwargs)


def test_mistakes_in_a_call():
    for name, groups, shape, told in (
        ("Conv2d", 2, (2, 6, 8, 8), "4 channels on axis 1, got 6 in the shape"),
        ("ConvTranspose2d", 2, (6, 8, 8), "4 channels on axis 0, got 6 in the shape"),
        ("Conv2d", 2, (3, 8, 8), "4 channels on axis 0, got 3 in the shape"),
        ("Conv1d", 1, (4, 2, 9), "4 channels on axis 1, got 2 in the shape"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: input must have {told}") as caught:
            getattr(convgrad.torch, name)(4, 6, 3, groups=groups)(torch.zeros(shape))
        assert caught.value.argument == "input"
    with pytest.raises(ValueError, match=r"float32; pass wide_weights=True, or use torch.autocast$"):
        convgrad.torch.Conv2d(4, 6, 3)(torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="'strides'; did you mean 'stride'"):
        convgrad.torch.Conv2d(4, 6, 3, strides=2)
    with pytest.raises(TypeError, match="'wide'; did you mean 'wide_weights'"):
        convgrad.torch.convert(torch.nn.Conv2d(4, 6, 3), wide=True)


def test_wide_weights_under_autocast():
    """Sums of gradients that bfloat16 could not hold."""
    ours, theirs = pair("Conv2d", 1, 1, 1, bias=False)
    convgrad.torch.convert(ours, wide_weights=True)
    x = torch.ones(1, 1, 17, 31)
    for module, expected in ((ours, 527), (theirs, 528)):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype is torch.bfloat16
        y.sum().backward()
        assert module.weight.grad.dtype is torch.float32
        assert module.weight.grad.item() == expected


# ---- Straight into .grad


@pytest.fixture
def sums(monkeypatch):
    """Counts the sums that a kernel adds to a gradient."""
    from convgrad.torch import operators

    counts = []
    stock = operators.step_for

    def counting(wanted, tensors, bias, result, *rest):
        counts.extend([1] if result.accumulate else [])
        return stock(wanted, tensors, bias, result, *rest)

    monkeypatch.setattr(operators, "step_for", counting)
    return counts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_gradients_of_small_batches_add_up(name, layout, sums):
    ours, theirs = pair(name, 4, 6, 3, padding=1, groups=2)
    ours.accumulate = True
    for n in range(3):
        for module in (ours, theirs):
            x = laid(whole(2, 4, *(5,) * rank_of(name), seed=n), layout).requires_grad_()
            module(x).sum().backward()
        assert len(sums) == n
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            assert a.grad.stride() == a.stride()


def step(module, *args, **kwargs):
    """A backward pass of a module whose weight has a gradient of ones; the gradient afterwards."""
    module.weight.grad = torch.ones_like(module.weight)
    module(whole(2, 4, 6, seed=1).to(module.weight.dtype)).sum().backward(*args, **kwargs)
    return module.weight.grad


def layers():
    ours, theirs = pair("Conv1d", 4, 3, 3)
    ours.accumulate = True
    return ours, theirs


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_others_look_at_go_pytorchs_way(sums):
    ours, theirs = layers()
    seen = []
    for module in (ours, theirs):
        module.weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    assert torch.equal(step(ours), step(theirs))
    assert torch.equal(*seen)
    assert not sums
    ours, theirs = layers()
    assert torch.equal(step(ours, create_graph=True), step(theirs, create_graph=True))
    assert not sums


def test_hooks_after_the_sum_see_all_of_it(sums):
    ours, _ = layers()
    expected = step(copy.deepcopy(ours))
    seen = []
    ours.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(ours)
    assert torch.equal(seen[0], expected)
    assert len(sums) == 2


def test_gradients_that_are_asked_for_are_not_added(sums):
    ours, theirs = layers()
    x = whole(2, 4, 6).requires_grad_()
    for module in (ours, theirs):
        module.weight.grad = torch.ones_like(module.weight)
    for wanted in ("x", "w", "xw"):
        found = [torch.autograd.grad(m(x).sum(), [{"x": x, "w": m.weight}[c] for c in wanted]) for m in (ours, theirs)]
        assert all(map(torch.equal, *found))
    for module in (ours, theirs):
        module(x).sum().backward(inputs=[x])
    assert torch.equal(ours.weight.grad, torch.ones_like(ours.weight))
    assert not sums
    ours(x).sum().backward(inputs=[ours.weight])
    theirs(x).sum().backward(inputs=[theirs.weight])
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert len(sums) == 1


def test_weights_that_are_used_twice(sums):
    ours, theirs = layers()
    x = whole(2, 4, 9)
    for module in (ours, theirs):
        for _ in range(3):
            (module(x).sum() + 2 * module(-x + 1).square().sum()).backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert len(sums) == 4


def test_weights_that_are_computed(sums):
    ours, theirs = layers()
    for module in (ours, theirs):
        nn.utils.parametrizations.weight_norm(module)
        for _ in range(2):
            module(whole(2, 4, 6)).sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert not sums


def test_gradients_of_other_kinds_are_left_to_pytorch(sums):
    ours, theirs = layers()
    for grad in (torch.ones(3, 4, 3, dtype=torch.float32).to_sparse(), torch.ones(()).expand(3, 4, 3)):
        for module in (ours, theirs):
            module.weight.grad = grad.clone() if grad.is_sparse else grad
        found = []
        for module in (ours, theirs):
            try:
                module(whole(2, 4, 6)).sum().backward()
                found.append(module.weight.grad.clone())
            except RuntimeError as error:
                found.append(str(error))
        assert found[0] == found[1] if isinstance(found[0], str) else torch.equal(*found)
    assert not sums


def test_sums_are_taken_in_float32_where_weights_are(sums):
    ours = convgrad.torch.Conv1d(1, 1, 1, bias=False, wide_weights=True, accumulate=True)
    x = torch.ones(1, 1, 257, dtype=torch.bfloat16)  # bfloat16 has 256 and 258
    for _ in range(3):
        ours(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        ours(x.float()).sum().backward()
    assert ours.weight.grad.item() == 4 * 257
    assert len(sums) == 3


def test_around_sums(sums):
    """Checkpoints and torch.func; under autocast a rounded copy takes the place of the weight."""
    ours, theirs = layers()
    x = whole(2, 4, 6)
    for module in (ours, theirs):
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(module, x.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert len(sums) == 1

    def loss(w, module):
        return torch.func.functional_call(module, {"weight": w}, (x,)).square().sum()

    found = [torch.func.grad(loss)(m.weight, m) for m in (ours, theirs)]
    assert torch.equal(*found)
    with torch.autocast("cpu", torch.bfloat16):
        for module in (ours, theirs):
            module(x).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert len(sums) == 1


def test_gradients_of_several_processes(sums, tmp_path):
    """DistributedDataParallel, here with one process: its hooks run after the sum, and send all of it."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for as_view in (False, True):
            sums.clear()
            ours, theirs = layers()
            sent = []
            wrapped = [nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=as_view) for m in (ours, theirs)]

            def hook(to, bucket):
                to.append(bucket.buffer().clone())
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            for module in wrapped:
                sent.append([])
                module.register_comm_hook(sent[-1], hook)
                for n in range(3):
                    with module.no_sync() if n < 2 else torch.enable_grad():
                        module(whole(2, 4, 6, seed=n)).sum().backward()
            assert torch.equal(ours.weight.grad, theirs.weight.grad)
            assert len(sent[0]) == 1
            assert all(map(torch.equal, *sent))
            assert len(sums) == 2
    finally:
        dist.destroy_process_group()
