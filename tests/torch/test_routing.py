"""`install()`: PyTorch's convolutions computed here give what PyTorch gives, and all that is around them goes on."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import convgrad.torch
import problems
from convgrad.backend import HOST
from convgrad.cpu.target import Tiles
from convgrad.spec.problem import Problem
from convgrad.torch import plans, policy, routing
from convgrad.torch.report import Report
from marks import slow_but

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {
    1: (torch.contiguous_format,),
    2: (torch.contiguous_format, torch.channels_last),
    3: (torch.contiguous_format, torch.channels_last_3d),
}
# stride, padding, dilation, output padding, groups; the last is depthwise with two results for each channel.
LAYERS = ((1, 1, 1, 0, 1), (2, 0, 1, 1, 1), (1, 2, 2, 0, 2), (3, 1, 1, 2, 4))


@pytest.fixture(autouse=True)
def nothing_is_left_installed():
    convgrad.torch.report(clear=True)
    yield
    assert routing._router.setting is None
    convgrad.torch.report(clear=True)


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, most of them 0, whose sums are exact in every type."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, shape, generator=made)
    return (values * (torch.rand(shape, generator=made) < 0.3)).to(dtype)


def tensors(rank, transposed, dtype, order, layer, size=7):
    """The result's gradient, input and weight of a layer, and its attributes."""
    stride, padding, dilation, extra, groups = layer
    extra = extra if transposed else 0
    x = whole((2, 4, *range(size, size + rank)), dtype, 1).contiguous(memory_format=order)
    w = whole((4, 8 // groups if transposed else 4 // groups, *(3,) * rank), dtype, 2)
    if transposed is False:
        w = whole((8, 4 // groups, *(3,) * rank), dtype, 2)
    w = w.contiguous(memory_format=order)
    how = ([stride] * rank, [padding] * rank, [dilation] * rank, transposed, [extra] * rank, groups)
    y = torch.ops.aten.convolution(x, w, None, *how)
    return whole(tuple(y.shape), dtype, 3).contiguous(memory_format=order), x, w, how


def backward(grad, x, w, how, mask=(True, True, True)):
    """What PyTorch's operator gives."""
    channels = w.shape[1] * how[5] if how[3] else w.shape[0]
    return torch.ops.aten.convolution_backward(grad, x, w, [channels], *how, list(mask))


def agree(ours, theirs, mask=(True, True, True)):
    """Values, and where they lie in memory. Strides of axes of size 1, which say nothing, are another test's."""
    for a, b, asked in zip(ours, theirs, mask, strict=False):
        if asked:  # PyTorch's kernels may give what was not asked for
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            steps = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1] for t in (a, b)]
            assert steps[0] == steps[1]
            assert torch.equal(a, b)


def cases(rank):
    """Types, formats and layers: every two of them together, in two axes; in one and three axes, formats and layers."""
    formats = FORMATS[rank]
    for i, dtype in enumerate((*DTYPES, torch.float64)):
        for j, layer in enumerate(LAYERS):
            if rank == 2:
                yield dtype, formats[(i + j) % 2], layer
            elif i < len(formats):
                yield (*DTYPES, torch.float64)[(2 * i + j) % 4], formats[i], layer


RANKS = slow_but([2], [1, 2, 3])
PARTS = {f"{rank}D": (rank, list(cases(rank))) for rank in (1, 3)}
# Each third has all types, formats and layers.
PARTS |= {f"2D, {third + 1} of 3": (2, list(cases(2))[third::3]) for third in range(3)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("part", slow_but(["2D, 1 of 3"], PARTS))
def test_gradients_are_those_of_pytorch(part, transposed):
    rank, chosen = PARTS[part]
    for dtype, order, layer in chosen:
        grad, x, w, how = tensors(rank, transposed, dtype, order, layer)
        theirs = backward(grad, x, w, how)
        with convgrad.torch.installed("all"):
            agree(backward(grad, x, w, how), theirs)
    report = convgrad.torch.report()
    assert report.passed == 0
    assert report.taken == 2 * len(chosen)


@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=3)))
def test_every_mask(mask):
    for transposed, dtype in itertools.product([False, True], [torch.float32, torch.bfloat16]):
        grad, x, w, how = tensors(2, transposed, dtype, torch.channels_last, LAYERS[2])
        theirs = backward(grad, x, w, how, mask)
        with convgrad.torch.installed("all"):
            agree(backward(grad, x, w, how, mask), theirs, mask)


def promised(grad, x, w, how):
    """What PyTorch's fake kernel says of strides: what compiled code relies on.

    Its real kernels keep to it but for axes of size 1.
    """
    with FakeTensorMode() as mode:
        return [t.stride() for t in backward(*map(mode.from_tensor, (grad, x, w)), how)]


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("rank", RANKS)
def test_strides_are_those_that_pytorch_promises(rank):
    """Which do not depend on who computes."""
    channels = [(4, 8, 1), (4, 8, 4), (1, 4, 1), (4, 1, 1), (1, 1, 1)]
    formats = list(itertools.product(FORMATS[rank], repeat=2))
    every = itertools.product([False, True], enumerate(channels), [1, 6], enumerate(formats))
    for transposed, (i, (c, k, groups)), size, (j, (of_x, of_w)) in every:
        kernel = 1 if (i + j + size) % 2 else 3  # whose size matters least
        x = whole((2, c, *(size,) * rank), torch.float32, 1).contiguous(memory_format=of_x)
        first, second = (c, k) if transposed else (k, c)
        w = whole((first, second // groups, *(kernel,) * rank), torch.float32, 2).contiguous(memory_format=of_w)
        how = ([1] * rank, [kernel // 2] * rank, [1] * rank, transposed, [0] * rank, groups)
        grad = whole(tuple(torch.ops.aten.convolution(x, w, None, *how).shape), torch.float32, 3)
        with convgrad.torch.installed("all"):
            found = backward(grad, x, w, how)
        assert [t.stride() for t in found] == promised(grad, x, w, how)


@pytest.mark.usefixtures("by_reference")
def test_strides_of_sizes_of_one_and_of_neither_format():
    shapes = [(1, 1, 5, 5), (2, 1, 1, 1), (1, 4, 1, 6), (3, 4, 5, 1), (1, 1, 1, 1), (2, 4, 6, 6)]
    for shape, flip in itertools.product(shapes, [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 2, 0), (0, 1, 3, 2)]):
        x = whole(tuple(shape[a] for a in flip), torch.float32, 1)
        x = x.permute([flip.index(a) for a in range(4)])
        w = whole((4, shape[1], 3, 3), torch.float32, 2)
        for weight in (w, w.contiguous(memory_format=torch.channels_last)):
            how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            grad = whole((shape[0], 4, *shape[2:]), torch.float32, 3)
            theirs = backward(grad, x, weight, how)
            with convgrad.torch.installed("all"):
                found = backward(grad, x, weight, how)
            agree(found, theirs)
            assert [t.stride() for t in found] == promised(grad, x, weight, how)


def test_any_strides():
    """Gradients that are expanded, sliced, transposed or negative views."""
    grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
    expanded = torch.ones(()).expand(grad.shape)
    sliced = whole((*grad.shape[:3], 2 * grad.shape[3]), torch.float32, 4)[..., ::2]
    turned = grad.transpose(2, 3).contiguous().transpose(2, 3)
    for g in (expanded, sliced, turned, grad.flip(0)):
        theirs = backward(g, x, w, how)
        with convgrad.torch.installed("all"):
            agree(backward(g, x, w, how), theirs)
    complex_view = torch.complex(torch.zeros_like(grad), grad).conj().imag
    assert complex_view.is_neg()
    theirs = backward(complex_view, x, w, how)
    with convgrad.torch.installed("all"):
        agree(backward(complex_view, x, w, how), theirs)


def test_what_is_left_to_pytorch_says_why():
    grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
    given = grad[:0], x[:0], w
    theirs = backward(*given, how)
    with convgrad.torch.installed("all"):
        agree(backward(*given, how), theirs)
    report = convgrad.torch.report(clear=True)
    assert report.taken == 0
    assert report.passed == 1
    assert "an empty tensor" in report.rows[0].reason
    assert "an empty tensor" in str(report)


def stem():
    """A layer whose weight gradient is left to PyTorch where speed counts, and not its data gradient."""
    return tensors(2, False, torch.float32, torch.channels_last, LAYERS[0])


def test_what_pytorch_computes_faster_is_left_to_it(monkeypatch):
    grad, x, w, how = stem()
    theirs = backward(grad, x, w, how)
    made, choose = [], plans.engine.choose
    monkeypatch.setattr(plans.engine, "choose", lambda p, *more: made.append(p.wanted) or choose(p, *more))
    with convgrad.torch.installed():
        agree(backward(grad, x, w, how), theirs)
    assert made == ["x"], "no kernel is compiled for nothing"
    report = convgrad.torch.report(clear=True)
    assert (report.taken, report.passed) == (1, 1)
    ours, rest = sorted(report.rows, key=lambda row: row.backend, reverse=True)
    assert ours.layer.endswith("data")
    assert rest.layer.endswith("weights")
    assert "weights of up to 4 channels by 32: PyTorch is expected to be quicker" in rest.reason
    with convgrad.torch.installed("all"):
        agree(backward(grad, x, w, how), theirs)
    assert (convgrad.torch.report().taken, convgrad.torch.report().passed) == (2, 0)


def test_the_bias_is_summed_once_whoever_computes_the_rest(monkeypatch):
    for expected in ([], ["x"], ["w"], ["x", "w"]):
        grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
        theirs = backward(grad, x, w, how)
        monkeypatch.setattr(routing, "hindrance", lambda p, *_, e=expected: p.wanted in e and "a test")
        with convgrad.torch.installed():
            agree(backward(grad, x, w, how), theirs)
        report = convgrad.torch.report(clear=True)
        assert (report.taken, report.passed) == (2 - len(expected), min(1, len(expected)))


def test_what_is_not_worth_a_call_of_its_own_is_left_with_the_rest(monkeypatch):
    grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
    theirs = backward(grad, x, w, how)
    monkeypatch.setattr(routing, "too_little", lambda p, device, policy: f"{p.wanted} is too little under {policy}")
    monkeypatch.setattr(routing, "hindrance", lambda p, *_: "a test" if p.wanted == "w" else "")
    with convgrad.torch.installed():
        agree(backward(grad, x, w, how), theirs)
    report = convgrad.torch.report(clear=True)
    assert (report.taken, report.passed) == (0, 1)
    assert report.rows[0].reason == "weights: a test; data: x is too little under fast"
    monkeypatch.setattr(routing, "hindrance", lambda *_: "")
    with convgrad.torch.installed():
        agree(backward(grad, x, w, how), theirs)
    assert convgrad.torch.report(clear=True).taken == 2, "both are ours: nothing is left"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("x bf16 n4 g32 cx8 cy8 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc", True),
        ("x bf16 n4 g32 cx8 cy8 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1", False),
        ("x bf16 n4 g1 cx8 cy8 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc", False),
        ("w bf16 n4 g32 cx8 cy8 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc", False),
        ("x f32 n1 g1 cx320 cy256 x33x33 w3x3 y33x33 s1x1 d12x12 p12x12 x@nxc y@nxc", True),
        ("x f32 n1 g1 cx320 cy256 x33x33 w3x3 y33x33 s1x1 d12x12 p12x12", False),
        ("x f32 n1 g1 cx320 cy256 x33x33 w3x3 y33x33 s1x1 d1x1 p1x1 x@nxc y@nxc", False),
    ],
)
def test_rules_mean_what_they_say(text, left):
    assert any(rule.fits(Problem.parse(text)) for rule in policy.RULES) == left


def test_machines_on_which_pytorch_is_expected_to_be_ahead(monkeypatch):
    """A CPU whose tiles PyTorch uses, unless we do as well."""
    p = Problem.parse("x bf16 n2 g1 cx64 cy64 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc")
    assert not policy.hindrance(p, HOST, "fast")
    monkeypatch.setattr(policy, "_has_tiles", lambda: True)
    assert "AMX" in policy.hindrance(p, HOST, "fast")
    assert not policy.hindrance(replace(p, dtype="f32", out_dtype="f32"), HOST, "fast")
    assert not policy.hindrance(p, HOST, "all")
    target = replace(policy.cpu.machine(), tiles=Tiles(("bf16",)))
    monkeypatch.setattr(policy.cpu, "machine", lambda: target)
    assert not policy.hindrance(p, HOST, "fast")
    assert "AMX" in policy.hindrance(replace(p, cy=34), HOST, "fast")  # which steps of 16 pairs do not divide well
    assert not policy.hindrance(replace(p, cx=34), HOST, "fast")
    volume = Problem.parse("x bf16 n1 g1 cx64 cy64 x9x9x9 w3x3x3 y9x9x9 s1x1x1 d1x1x1 p1x1x1 x@nxc y@nxc")
    assert "many taps" in policy.hindrance(volume, HOST, "fast")
    assert not policy.hindrance(replace(volume, wanted="w"), HOST, "fast")
    monkeypatch.setattr(policy, "_has_tiles", lambda: False)
    assert not policy.hindrance(volume, HOST, "fast")


def test_mistakes_are_told_by_pytorch():
    grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
    for given in ((grad, x[:, :3], w), (grad[:1], x, w), (grad, x, w.double()), (grad, x[0], w)):
        with pytest.raises(RuntimeError) as stock:
            backward(*given, how)
        with convgrad.torch.installed("all"), pytest.raises(RuntimeError) as ours:
            backward(*given, how)
        assert str(ours.value) == str(stock.value)


def registered() -> str:
    """Which kernels PyTorch's dispatcher has for the operators, without the places in which they were made."""
    found = [torch._C._dispatch_dump(f"aten::{name}") for name in ("convolution", "convolution_backward")]
    return "\n".join(line.partition(" :: ")[0] for line in "\n".join(found).splitlines() if "debug" not in line)


def test_uninstall_restores_exactly():
    before = registered()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for forward in (False, True):
            convgrad.torch.install(forward=forward)
            assert registered() != before
            convgrad.torch.install(forward=forward)  # nothing changes
            assert len(routing._router.libraries) == 1 + forward
            convgrad.torch.uninstall()
            convgrad.torch.uninstall()
            assert registered() == before
    assert not seen


OVERRIDES = """
import torch
from convgrad.torch import routing

def make(stock, device, asked):
    return lambda keyset, x: stock.call_boxed(keyset, x) + 1

routing._override("relu", make, "cpu", routing.Setting())
assert torch.relu(torch.tensor([-1.0])) == 1
"""


@pytest.mark.slow
def test_a_kernel_of_the_very_key_is_replaced_without_a_warning():
    """As that of convolution_backward is on CUDA: PyTorch warns of it, once in a process."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", OVERRIDES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_blocks_within_blocks():
    grad, x, w, how = stem()

    def taken():
        convgrad.torch.report(clear=True)
        backward(grad, x, w, how)
        return convgrad.torch.report().taken

    with convgrad.torch.installed():
        assert taken() == 1
        with convgrad.torch.installed("all"):
            assert taken() == 2
        with pytest.raises(ZeroDivisionError), convgrad.torch.installed("all"):
            1 / 0  # noqa: B018
        assert taken() == 1
        assert routing._router.setting.policy == "fast"
        with convgrad.torch.installed("all"):
            convgrad.torch.uninstall()
            convgrad.torch.report(clear=True)
        assert routing._router.setting.policy == "fast"


def test_blocks_beside_each_other():
    first, second = convgrad.torch.installed("fast"), convgrad.torch.installed("all")
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(first)
        other.enter_context(second)
        assert routing._router.setting.policy == "all"
        one.close()
        assert routing._router.setting.policy == "all", "the other block goes on"
        convgrad.torch.install("fast", forward=True)
        assert routing._router.setting.policy == "all", "it counts more than what lasts"
        other.close()
        assert routing._router.setting.forward
    convgrad.torch.uninstall()
    assert routing._router.setting is None
    assert not routing._router.libraries


@pytest.mark.parametrize("wrong", [{"policy": "quick"}, {"algorithm": "fft"}])
def test_settings_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))) as error:
        convgrad.torch.install(**wrong)
    assert "install" in str(error.value)
    assert routing._router.setting is None


def model() -> torch.nn.Module:
    """Every kind of convolution, one after another."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),
        torch.nn.Conv2d(8, 16, 3, stride=2, padding="valid"),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(16, 8, 3, stride=2, output_padding=1),
        torch.nn.Conv2d(8, 4, 1),
    )


def gradients(net, x, around=None):
    """Gradients of all parameters and of the input."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    (around or net)(x).square().mean().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def close(ours, theirs, factor=1.0):
    """f32 sums of some hundred terms in another order: each term is rounded by 2^-24, and there are several layers."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride()
        bound = factor * 1000 * 2**-24 * b.double().abs().max().item()
        assert (a.double() - b.double()).abs().max().item() <= bound


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_model(order):
    net = model().to(memory_format=order)
    x = torch.randn(2, 3, 13, 13).contiguous(memory_format=order)
    theirs = gradients(net, x)
    for forward in (False, True):
        with convgrad.torch.installed("all", forward=forward):
            close(gradients(net, x), theirs)
        report = convgrad.torch.report(clear=True)
        assert report.passed == 0
        assert report.taken == (5 + 5 if not forward else 15)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("part", slow_but(["2D, 1 of 3"], PARTS))
def test_forward_is_that_of_pytorch(part, transposed):
    """By our kernels in a third of two axes; how tensors are read and made does not depend on who computes."""
    rank, chosen = PARTS[part]
    with contextlib.nullcontext() if part == "2D, 1 of 3" else problems.reference_engine():
        check_forward(rank, transposed, chosen)
    assert convgrad.torch.report().passed == 0


def check_forward(rank, transposed, chosen):
    for dtype, order, layer in chosen:
        _, x, w, how = tensors(rank, transposed, dtype, order, layer)
        bias = whole((w.shape[1] * how[5] if transposed else w.shape[0],), dtype, 5)
        for given in (None, bias) if dtype is torch.float32 else (bias,):
            theirs = torch.ops.aten.convolution(x, w, given, *how)
            with convgrad.torch.installed("all", forward=True):
                agree([torch.ops.aten.convolution(x, w, given, *how)], [theirs])


def test_bits_do_not_depend_on_threads():
    net = model()
    x = torch.randn(4, 3, 31, 31)
    before = torch.get_num_threads()
    found = []
    try:
        with convgrad.torch.installed("all", forward=True):
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(gradients(net, x))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        # The bias gradient is a sum of PyTorch's over few numbers, in one order.
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_attributes_of_one_value_and_of_several_are_told_apart():
    x, w = whole((1, 1, 9, 9), torch.float32, 1), whole((1, 1, 3, 3), torch.float32, 2)
    with convgrad.torch.installed("all", forward=True):
        for stride, padding, size in (([2], [1, 1], (5, 5)), ([2, 1], [1], (5, 9))):
            assert torch.convolution(x, w, None, stride, padding, [1, 1], False, [0, 0], 1).shape[2:] == size


def test_counts_go_on_after_they_were_cleared():
    grad, x, w, how = tensors(2, False, torch.float32, torch.contiguous_format, LAYERS[0])
    with convgrad.torch.installed("all"):
        for _ in range(2):
            backward(grad, x, w, how)
            assert convgrad.torch.report(clear=True).taken == 2


def test_from_several_threads_while_it_comes_and_goes():
    net, x = model(), torch.randn(2, 3, 13, 13)
    theirs = gradients(net, x)
    failed, stop = [], threading.Event()

    def work(mine):
        try:
            while not stop.is_set():
                close(gradients(mine, x), theirs)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(model(),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for i in range(40):
        with convgrad.torch.installed("all" if i % 2 else "fast"):
            close(gradients(net, x), theirs)
            convgrad.torch.report()
    stop.set()
    for worker in workers:
        worker.join()
    assert not failed


def test_around_it():
    """What wraps a model: checkpoints, autocast, traces, torch.func, compilation."""
    net, x = model(), torch.randn(2, 3, 13, 13)
    theirs = gradients(net, x)

    def checkpointed(v):
        return torch.utils.checkpoint.checkpoint(net, v, use_reentrant=False)

    def loss(params, v):
        return torch.func.functional_call(net, params, (v[None],)).square().mean()

    params = dict(net.named_parameters())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    per_sample = each(params, x)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(net, x)
    with convgrad.torch.installed("all"):
        close(gradients(net, x, checkpointed), theirs)
        close(list(each(params, x).values()), list(per_sample.values()))
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(net, x)
        for a, b in zip(found, narrow, strict=True):
            assert a.dtype is b.dtype
            # Results are rounded to 8 bits in each of some ten steps.
            assert (a - b).abs().max() <= 10 * 2**-8 * b.abs().max()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        close(gradients(net, x, compiled), theirs)
        assert convgrad.torch.report().passed == 0


def test_double_backward():
    net, x = model().double(), torch.randn(1, 3, 7, 7, dtype=torch.float64).requires_grad_()
    with convgrad.torch.installed("all"):
        assert torch.autograd.gradgradcheck(net[3], (torch.randn(1, 8, 5, 5).double().requires_grad_(),))
        assert torch.autograd.gradcheck(net, (x,))


def test_the_report_is_a_table():
    net, x = model(), torch.randn(2, 3, 13, 13)
    assert "no convolution" in str(convgrad.torch.report())
    with convgrad.torch.installed("all"):
        gradients(net, x)
        gradients(net, x)
        gradients(net.double(), x.double())
    report = convgrad.torch.report()
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "calls", "ms", "computed", "by"]
    assert len(lines) == 2 + len(report.rows)
    first = next(row for row in report.rows if row.layer == "conv2d f32 2x8x13x13, 8x1x5x5 p2 g8 weights")
    assert (first.backend, first.calls, first.reason) == ("cpu", 2, "")
    assert 0 < first.seconds < 10
    assert report.taken == 30
    assert lines[-1].startswith("taken 30")
    assert convgrad.torch.report(clear=True).taken == 30
    assert convgrad.torch.report().rows == []
    assert Report().taken == 0


FORK = """
import torch, convgrad.torch
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 6
    def __getitem__(self, i):
        x = torch.full((1, 32, 40, 40), float(i), requires_grad=True)
        torch.nn.functional.conv2d(x, weight, padding=1).sum().backward()
        return x.grad[0]

# Large enough for several threads, which a process that is forked does not have.
torch.set_num_threads(2)
weight = torch.ones(32, 32, 3, 3)
convgrad.torch.install("all")
expected = Data()[0]
for _ in range(2):
    for batch in DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
        assert torch.equal(batch[0], expected)
assert torch.equal(Data()[1], expected)
report = convgrad.torch.report()
assert report.taken == 2 and not report.passed, report
print("well")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_workers_that_were_forked():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "well", done.stderr
