"""The functions give what PyTorch's give: values, gradients of any order, where results lie, and errors."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import convgrad.torch
from convgrad.torch.operators import Call
from marks import slow_but
from torch_layers import EXACT, draw, laid, whole

NAMES = [f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)]
WIDE = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)
OF_MAKE_DUAL = "ignore:.*torch.jit.script:DeprecationWarning"  # PyTorch's own make_dual gives it


# ---- PyTorch's own samples


@cache
def op_infos():
    """What PyTorch tests its own convolutions with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.name.rpartition(".")[2]: op for op in op_db if op.name.startswith("nn.functional.conv")}


def tolerance(op, dtype):
    """The widest that PyTorch allows for an operation, in any of its tests; else what it takes for close."""
    from torch.testing._internal.common_device_type import toleranceOverride

    default = torch.testing._comparison.default_tolerances(dtype)
    found = [d for info in op.decorators for d in getattr(info, "decorators", [info])]
    asked = [d.d[dtype] for d in found if isinstance(d, toleranceOverride) and dtype in d.d]
    return {
        "rtol": max(default[0], *(t.rtol for t in asked), 0),
        "atol": max(default[1], *(t.atol for t in asked), 0),
    }


def results(function, sample, dtype):
    """The result and all gradients for a sample, computed in an element type."""
    tensors = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    given = iter(leaves)
    args = [next(given) if isinstance(t, torch.Tensor) else t for t in (sample.input, *sample.args)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same'")
        y = function(*args, **sample.kwargs)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


SERIES = slow_but([], NAMES)


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", SERIES)
def test_samples_of_pytorch(name):
    assert as_stock(name, WIDE) >= 20


@pytest.mark.parametrize("name", SERIES)
def test_samples_of_pytorch_by_the_engine_that_users_get(name):
    """Every other one; for the transposed functions, those that are left out for the others."""
    assert as_stock(name, WIDE[:1], slice("transpose" in name, None, 2)) >= 5


def as_stock(name, dtypes, some=slice(None)):
    """Compare all samples, or some; returns how many there are."""
    op, ours, count = op_infos()[name], getattr(convgrad.torch, name), 0
    for dtype in dtypes:
        for sample in [*op.sample_inputs("cpu", dtype)][some]:
            found, expected = results(ours, sample, dtype), results(op.op, sample, dtype)
            for a, b in zip(found, expected, strict=True):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, **tolerance(op, dtype))
            count += 1
    return count


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", SERIES)
def test_samples_of_pytorch_where_gradients_are_routed(name):
    op = op_infos()[name]
    convgrad.torch.report(clear=True)
    for dtype in WIDE:
        samples = list(op.sample_inputs("cpu", dtype))
        expected = [results(op.op, sample, dtype) for sample in samples]
        with convgrad.torch.installed("all", forward=True):
            found = [results(op.op, sample, dtype) for sample in samples]
        for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, **tolerance(op, dtype))
    report = convgrad.torch.report(clear=True)
    assert report.taken >= 60
    assert all("empty" in row.reason for row in report.rows if not row.backend), report


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", SERIES)
def test_samples_of_pytorch_in_narrow_types(name):
    """Judged in float64, because PyTorch itself rounds here more than once.

    Results are sums in f32, rounded once: half an ulp, plus what f32 loses over at most 1000 products, each of numbers
    below 9 in magnitude, as the samples are.
    """
    op, ours = op_infos()[name], getattr(convgrad.torch, name)
    for dtype in NARROW:
        eps = torch.finfo(dtype).eps
        for sample in op.sample_inputs("cpu", dtype):
            for a, b in zip(results(ours, sample, dtype), results(op.op, sample, torch.float64), strict=True):
                assert a.dtype is dtype
                torch.testing.assert_close(a.double(), b, rtol=eps / 2, atol=1000 * 81 * 2**-24)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_errors_that_pytorch_expects(name):
    errors = list(op_infos()[name].error_inputs("cpu"))
    assert len(errors) == 10
    for error in errors:
        sample = error.sample_input
        with pytest.raises((RuntimeError, ValueError)) as caught:
            getattr(convgrad.torch, name)(sample.input, *sample.args, **sample.kwargs)
        assert str(caught.value).startswith(f"{name}: ")


# ---- Layers of all kinds, to the bit


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("chunk", slow_but(range(2), range(6)))
def test_random_layers(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        equal(draw(seed), seed)


@pytest.mark.parametrize("chunk", slow_but([0], range(3)))
def test_random_layers_by_the_engine_that_users_get(chunk):
    for seed in range(1000 + 8 * chunk, 1008 + 8 * chunk):
        equal(draw(seed), seed)


def equal(layer, seed):
    """Values as in float64; gradients in memory as their inputs, as far as those are in a memory format."""
    exact = layer.run(False, torch.float64)
    for found, expected, like in zip(layer.run(True), exact, (None, layer.x, layer.w, layer.b), strict=False):
        assert found.dtype is layer.x.dtype
        assert found.is_contiguous() or laid(found, "last").stride() == found.stride(), seed
        if not expected.numel() or expected.abs().max() <= EXACT[found.dtype]:
            assert torch.equal(found.double(), expected), seed
        if like is not None and like.is_contiguous():
            assert found.is_contiguous(), seed
        if like is not None and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            assert found.is_contiguous(memory_format=torch.channels_last), seed


# ---- Where results lie


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_results_lie_as_those_of_pytorch(rank, transposed):
    """Of PyTorch's fast code, which knows of formats: in 3D it takes no small ones. Sizes of 1 have strides, too."""
    sizes = [(1, 4, *(1,) * rank), (2, 4, *(5,) * rank), (2, 1, *(6,) * rank), (1, 1, *(3,) * rank)]
    for shape in sizes if rank < 3 else sizes[1:3]:
        for kernel in (1, 3) if rank < 3 else (3,):
            for layout in ("first", "last") if rank > 1 else ("first",):
                w = laid(whole(*((shape[1], 2) if transposed else (2, shape[1])), *(kernel,) * rank), layout)
                x = laid(whole(*shape), layout)
                name = f"conv{'_transpose' if transposed else ''}{rank}d"
                ours, theirs = (getattr(m, name)(x, w, padding=kernel // 2) for m in (convgrad.torch, F))
                assert ours.stride() == theirs.stride(), (shape, kernel, layout)


@pytest.mark.usefixtures("by_reference")
def test_gradients_lie_as_their_tensors():
    """Each as its own; PyTorch has both in one format, and DistributedDataParallel warns of that."""
    for of_x in ("first", "last"):
        for of_w in ("first", "last"):
            x = laid(whole(2, 4, 5, 5), of_x).requires_grad_()
            for shape in ((6, 4, 3, 3), (6, 4, 1, 1), (4, 1, 3, 3)):
                w = laid(whole(*shape), of_w).requires_grad_()
                convgrad.torch.conv2d(x, w, groups=4 // shape[1]).sum().backward()
                assert x.grad.stride() == x.stride()
                assert w.grad.stride() == w.stride()
                x.grad = None


def test_one_axis_has_channels_first():
    """PyTorch has no other memory format in 1D, and programs make views of what comes out."""
    x = laid(whole(2, 4, 9), "last").requires_grad_()
    y = convgrad.torch.conv1d(x, whole(6, 4, 3))
    assert y.is_contiguous()
    y.view(2, -1).sum().backward()
    assert x.grad.stride() == x.stride()


# ---- Differentiation


GEOMETRIES = [
    ("conv2d", (2, 4, 5, 4), (6, 2, 3, 2), dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)),
    ("conv2d", (1, 2, 4, 5), (2, 2, 2, 3), dict(padding="same", dilation=(1, 2))),
    ("conv_transpose2d", (2, 4, 3, 2), (4, 1, 3, 2), dict(stride=2, padding=1, output_padding=(1, 0), groups=2)),
    ("conv1d", (3, 2, 7), (2, 2, 3), dict(stride=3, padding="valid")),
    ("conv_transpose3d", (1, 2, 2, 2, 1), (2, 2, 2, 1, 2), dict(dilation=2)),
    ("conv3d", (1, 1, 3, 3, 3), (2, 1, 2, 2, 2), dict(stride=2, padding=1)),
]


def functions(name, x, w, more):
    """A function of float64 inputs, and the inputs."""
    torch.manual_seed(0)
    channels = w[1] * more.get("groups", 1) if "transpose" in name else w[0]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (x, w, (channels,))]
    return lambda *args: getattr(convgrad.torch, name)(*args, **more), inputs


@pytest.mark.usefixtures("by_reference")
@pytest.mark.filterwarnings(OF_MAKE_DUAL)
@pytest.mark.parametrize(("name", "x", "w", "more"), GEOMETRIES)
def test_derivatives(name, x, w, more):
    function, inputs = functions(name, x, w, more)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, check_fwd_over_rev=True)


def test_gradients_of_gradients_of_gradients():
    x = torch.tensor([[[2.0]]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[[3.0]]], dtype=torch.float64, requires_grad=True)
    y = convgrad.torch.conv1d(x, w).pow(4).sum()  # (x w)^4
    for expected in (4 * 2**3 * 3**4, 12 * 2**2 * 3**4, 24 * 2 * 3**4):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert y.item() == expected


@pytest.mark.filterwarnings(OF_MAKE_DUAL)
def test_transforms_of_functions():
    x, w, b = whole(2, 4, 5, 5, dtype=torch.float64), whole(6, 4, 3, 3, dtype=torch.float64), whole(6).double()

    def loss(of):
        return lambda x, w, b: of(x, w, b, stride=2, padding=1).pow(2).sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1, 2))(x, w, b),
        lambda f: torch.func.jacrev(f, 1)(x, w, b),
        lambda f: torch.func.jvp(f, (x, w, b), (w.new_ones(x.shape), w, b)),
        lambda f: torch.func.vjp(f, x, w, b)[1](x.new_ones(())),
        lambda f: torch.func.hessian(f, 2)(x, w, b),
        lambda f: torch.func.hessian(lambda k: f(x[:1, :, :3, :3], w[:, :, :1, :1] * k, b))(w[0, :, :1, :1]),
        lambda f: torch.func.jacfwd(torch.func.grad(f))(x[:1, :, :2, :2], w, b),
    ):
        ours, theirs = transform(loss(convgrad.torch.conv2d)), transform(loss(F.conv2d))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 1, None), (3, 2, 0), (None, None, 0)])
def test_vmap(dims):
    """Batches of data, of weights, of both, at any axis; one within another."""
    count, inputs = 3, []
    for dim, shape in zip(dims, ((2, 4, 6), (4, 2, 3), (4,)), strict=True):
        inputs.append(whole(*shape) if dim is None else whole(*shape[:dim], count, *shape[dim:]))
    ours, theirs = (
        torch.vmap(lambda x, w, b, f=f: f(x, w, b, padding=1, groups=2), in_dims=dims)(*inputs)
        for f in (convgrad.torch.conv1d, F.conv1d)
    )
    assert torch.equal(ours, theirs)
    nested = torch.vmap(torch.vmap(lambda x, w: convgrad.torch.conv_transpose1d(x, w), (0, None)), (None, 0))
    x, w = whole(2, 3, 4, 5), whole(5, 4, 2, 3)
    assert torch.equal(nested(x, w)[4, 1], F.conv_transpose1d(x[1], w[4]))


def test_gradients_for_each_sample():
    x, w = whole(4, 2, 6, 6), whole(3, 2, 3, 3)

    def loss(w, x, f):
        return f(x[None], w, stride=2).square().sum()

    ours, theirs = (torch.vmap(torch.func.grad(loss), (None, 0, None))(w, x, m.conv2d) for m in (convgrad.torch, F))
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings(OF_MAKE_DUAL)
def test_forward_mode():
    x, w = whole(2, 4, 5, dtype=torch.float64), whole(3, 4, 3, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        moved = torch.autograd.forward_ad.unpack_dual(convgrad.torch.conv1d(x, dual)).tangent
    assert torch.equal(moved, F.conv1d(x, torch.ones_like(w)))


# ---- What is around


def test_autocast():
    x, w, b = whole(2, 4, 5, 5).requires_grad_(), whole(6, 4, 3, 3).requires_grad_(), whole(6).requires_grad_()
    found = []
    for module in (convgrad.torch, F):
        with torch.autocast("cpu", torch.bfloat16):
            y = module.conv2d(x, w, b)
        assert y.dtype is torch.bfloat16
        found.append([y, *torch.autograd.grad(y.float().sum(), (x, w, b))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert convgrad.torch.conv2d(x.double(), w.double()).dtype is torch.float64


def test_inference():
    x, w = whole(2, 4, 6), whole(3, 4, 3)
    with torch.inference_mode():
        y = convgrad.torch.conv1d(x, w.requires_grad_())
        assert y.is_inference()
        again = convgrad.torch.conv1d(torch.ones(2, 4, 6), w)
    with torch.no_grad():
        assert not convgrad.torch.conv1d(x, w).requires_grad
    assert torch.equal(y, F.conv1d(x, w))
    assert again.shape == (2, 3, 4)


def test_bits_do_not_depend_on_threads():
    torch.manual_seed(0)
    before, found = torch.get_num_threads(), []
    x, w = torch.randn(4, 16, 14, 14, requires_grad=True), torch.randn(16, 16, 3, 3, requires_grad=True)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = convgrad.torch.conv2d(x, w, padding=1)
            found.append([y, *torch.autograd.grad(y.square().sum(), (x, w))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_wide_weights(narrow, name):
    """Gradients are sums that the narrow type could not hold."""
    total = 3.0 * 31 * 31
    assert torch.tensor(total, dtype=narrow).item() != total
    x, w = torch.ones(3, 2, 31, 31, dtype=narrow), torch.ones(2, 2, 1, 1, requires_grad=True)
    b = torch.zeros(2, requires_grad=True)
    y = getattr(convgrad.torch, name)(x, w, b, wide_weights=True)
    assert y.dtype is narrow
    y.sum().backward()
    assert torch.equal(w.grad, torch.full((2, 2, 1, 1), total))
    assert torch.equal(b.grad, torch.full((2,), total))
    with torch.autocast("cpu", narrow):
        y = getattr(convgrad.torch, name)(x.float(), w, b, wide_weights=True)
    assert y.dtype is narrow
    (found,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(found, w.grad)


def test_wide_weights_are_rounded_as_they_are_used():
    w = torch.full((1, 1, 1), 257.0, requires_grad=True)  # 256 in bfloat16
    y = convgrad.torch.conv1d(torch.ones(1, 1, 1, dtype=torch.bfloat16), w, wide_weights=True)
    assert y.item() == 256
    for data, weight in ((torch.float64, torch.float32), (torch.float32, torch.float64), (torch.bfloat16, torch.half)):
        x, w = torch.ones(1, 1, 1, dtype=data), torch.ones(1, 1, 1, dtype=weight)
        with pytest.raises(ValueError, match="weight must have the dtype of input"):
            convgrad.torch.conv1d(x, w, wide_weights=True)


# ---- Mistakes

X, W = torch.zeros(2, 4, 8, 8), torch.zeros(6, 4, 3, 3)


@pytest.mark.parametrize(
    ("args", "more", "part"),
    [
        (
            (X[:, :3], W),
            {},
            "weight must be (*, 3, 3, 3) in OIX with groups=1, so that it fits input (2, 3, 8, 8)",
        ),
        ((X[0, 0], W), {}, "input must have 4 (or, of one image, 3) dimensions, as weight"),
        ((X, W[0]), {}, "weight must have 4 dimensions, as a 2D weight has, got (4, 3, 3)"),
        ((X, W.double()), {}, "weight must have the dtype of input, torch.float32, got torch.float64"),
        ((X.to(torch.complex64), W.to(torch.complex64)), {}, "input must be one of torch.float32"),
        ((X, W), {"groups": 3}, "groups must divide"),
        ((X, W), {"groups": 0}, "groups must be at least 1, got 0"),
        ((X, W), {"stride": 0}, "stride must be at least 1, got 0"),
        ((X, W), {"stride": (1, 2, 3)}, "stride needs 2 values"),
        ((X, W), {"padding": -1}, "padding must be at least 0"),
        ((X, W), {"padding": 1.5}, "padding must be a whole number"),
        ((X, W), {"padding": "full"}, "padding must be one of"),
        ((X, W), {"padding": "same", "stride": 2}, "stride must be 1, because padding is 'same', got (2, 2)"),
        ((X[..., :2], W), {}, "input must not be smaller than the kernel"),
        ((X, W), {"algorithm": "fft"}, "algorithm must be one of direct, bf16x6, bf16x3"),
        ((X, W, torch.zeros(4)), {}, "bias must be a vector of 6 values"),
        ((X, torch.nn.Conv2d(4, 6, 3)), {}, "weight must be a tensor, got a Conv2d; pass its .weight"),
        ((X.numpy(), W), {}, "input must be a tensor, got a ndarray"),
    ],
)
def test_mistakes(args, more, part):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        convgrad.torch.conv2d(*args, **more)
    assert str(caught.value).startswith(f"conv2d: {part}")


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"output_padding": 2, "stride": 2}, "output_padding must be smaller than strides (2, 2) or dilations (1, 1)"),
        ({"padding": 9}, "padding must be smaller than the result: (8 - 1) * 1 - 2 * 9 + 3 + 0 = -8"),
        ({"groups": 4, "bias": torch.zeros(4)}, "bias must be a vector of 12 values"),
    ],
)
def test_mistakes_in_transposed_ones(more, part):
    with pytest.raises(ValueError, match=r"^conv_transpose2d: ") as caught:
        convgrad.torch.conv_transpose2d(X, W.transpose(0, 1).contiguous()[:, : 3 if "groups" in more else 6], **more)
    assert part in str(caught.value)


def test_tensors_in_two_places():
    with pytest.raises(ValueError, match="all tensors must be on meta, as the first one is, got one on cpu"):
        convgrad.torch.conv2d(X.to("meta"), W)


def test_calls_are_remembered():
    """A repeated call plans nothing."""
    from convgrad.torch import plans

    x, w = whole(1, 3, 9, 9), whole(2, 3, 3, 3)
    convgrad.torch.conv2d(x, w)
    before = len(plans._steps.plans)
    convgrad.torch.conv2d(x, w)
    assert len(plans._steps.plans) == before
    assert Call(x, w, None, (7, 7), (1, 1), (0, 0), (1, 1), 1).shape("y") == (1, 2, 7, 7)


def test_operators_refuse_tangents():
    x, w, b = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    geometry = ([3, 3], [1, 1], [0, 0], [1, 1], 1)
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own make_dual uses torch.jit.script
        plain = torch.ops.convgrad.convolution(x, w, b, *geometry)
        for i, name in enumerate(("x", "w", "bias")):
            moved = [torch.autograd.forward_ad.make_dual(t, t) if i == j else t for j, t in enumerate((x, w, b))]
            with pytest.raises(convgrad.SpecError, match=rf"{name}.*a tensor with a tangent.*convgrad\.torch\.conv2d"):
                torch.ops.convgrad.convolution(*moved, *geometry)
            assert torch.equal(convgrad.torch.conv2d(*moved), plain)


def test_reverse_mode_keeps_what_it_needs():
    w = torch.randn(4, 3, 3, 3)
    x = torch.randn(2, 3, 9, 9)
    alive = []

    def layer(data):
        data = data + 1
        alive.append(weakref.ref(torch._C._functorch.get_unwrapped(data)))
        return convgrad.torch.conv2d(data, w)

    _, pull = torch.func.vjp(layer, x)
    gc.collect()
    assert alive[0]() is None, "the gradient of the data does not need the data"
    (found,) = pull(torch.ones(2, 4, 7, 7))
    assert found.shape == (2, 3, 9, 9)


def test_tangents_have_the_type_of_the_result():
    x, w, b = whole(1, 4, 5, 5), whole(4, 4, 3, 3), whole(4)
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own make_dual uses torch.jit.script
        dual = torch.autograd.forward_ad.make_dual
        y = convgrad.torch.conv2d(dual(x.bfloat16(), x.bfloat16()), w, dual(b, b), wide_weights=True)
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert tangent.dtype is y.dtype is torch.bfloat16
    assert torch.equal(tangent.float(), F.conv2d(x, w, b).bfloat16().float())
