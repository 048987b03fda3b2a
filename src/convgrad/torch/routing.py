"""`install()`: the backward pass of every convolution of PyTorch is computed here, as far as it pays, in every model.

PyTorch's own kernel of `aten::convolution_backward` stays within reach: what is not taken goes to it, each gradient by
itself. How a call is computed is decided when its key is new, and kept; results lie in memory as PyTorch's would.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import engine
from ..backend import Device
from ..errors import ConvgradError, SpecError
from ..spec.check import broken
from ..spec.problem import Problem, Role
from ..spec.table import ALGORITHMS
from .memory import Memory, setting
from .plans import NAMES, Geometry, Result, Step, describe, load, strides_in
from .policy import POLICIES, hindrance, too_little
from .report import Entry, Report

Ints = Sequence[int]
Mask = Sequence[bool]

KEYS = {"cpu": "CPU", "cuda": "CUDA"}
"""PyTorch's dispatch key for each kind of device that a back end may compute on."""


_may_use_onednn = torch._C._get_mkldnn_enabled


class Attributes(NamedTuple):
    """How PyTorch describes a convolution, but for its tensors. A list of one value serves all spatial axes."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    def geometry(self, rank: int) -> Geometry:
        """The geometry, with a value for every spatial axis."""
        stride, padding, dilation = (
            tuple(v) * rank if len(v) == 1 else tuple(v) for v in (self.stride, self.padding, self.dilation)
        )
        return Geometry(stride, padding, dilation, self.groups)


class Route(NamedTuple):
    """How a backward pass is computed: the gradients of data and weights that are ours, and what is left to PyTorch."""

    data: Step | None
    weights: Step | None
    bias: bool
    rest: list[bool] | None  # the mask of what PyTorch computes, if that is anything
    others: tuple[int, ...]  # the axes that the bias gradient sums over
    entries: tuple[Entry, ...]  # of the report: of what is ours, then of what is not


class ForwardRoute(NamedTuple):
    """How a forward pass is computed."""

    step: Step | None
    entry: Entry


class Setting(NamedTuple):
    """What the caller of `install` has asked for."""

    policy: str = "fast"
    algorithm: str = "direct"
    forward: bool = False


class _Router:
    """What is installed, and what it has learnt."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.setting: Setting | None = None  # that is in force
        self.lasting: Setting | None = None  # outside of all blocks
        self.blocks: dict[object, Setting] = {}  # that threads are in, in the order in which they were entered
        self.libraries: list[Any] = []
        self.kernels: list[Any] = []
        self.report = Report()


_router = _Router()


def install(policy: str = "fast", *, algorithm: str = "direct", forward: bool = False) -> None:
    """Have convgrad compute the gradients of all convolutions, in every model of this process.

    `policy` says what is taken: "fast" takes what is expected to be no slower than PyTorch's own kernel; "all" takes
    everything that can be computed here, for the same bits on any number of threads. `algorithm` says how sums are
    taken. With `forward`, the forward pass is taken as well.

    What is not taken goes to PyTorch's kernel; `report()` tells what and why. To install again changes the setting.
    """
    asked = _asked(policy, algorithm, forward)
    with _router.lock:
        _router.lasting = asked
        _enforce()


def uninstall() -> None:
    """Give all convolutions back to PyTorch, or to the block of `installed()` that this is in. What `report()` has
    counted stays.
    """
    with _router.lock:
        _router.lasting = None
        _enforce()


@contextmanager
def installed(policy: str = "fast", *, algorithm: str = "direct", forward: bool = False) -> Iterator[None]:
    """`install()` for a block; afterwards all is as it would be without it.

    It holds for all threads. Of blocks that several threads are in, the one that was entered last counts.
    """
    asked, block = _asked(policy, algorithm, forward), object()
    with _router.lock:
        _router.blocks[block] = asked
        _enforce()
    try:
        yield
    finally:
        with _router.lock:
            del _router.blocks[block]
            _enforce()


def report(*, clear: bool = False) -> Report:
    """What was taken and what was passed on since the start, or since it was last cleared: counts, times, reasons.

    Print it for a table.
    """
    with _router.lock:
        found = _router.report.copy()
        if clear:
            _router.report.clear()
        return found


def _asked(policy: str, algorithm: str, forward: bool) -> Setting:
    """What a caller asks for, if all of it exists."""
    return Setting(_choice("policy", policy, POLICIES), _choice("algorithm", algorithm, ALGORITHMS), forward)


def _choice(name: str, value: Any, choices: Any) -> str:
    if value not in choices:
        error = broken("attribute_choice", name, repr(value), expected=", ".join(map(repr, choices)))
        error.operation = "install"
        raise error
    return str(value)


def _enforce() -> None:
    """Put our kernels in place, or take them away, as it is asked for now."""
    asked = [_router.lasting, *_router.blocks.values()][-1]
    if asked == _router.setting:
        return
    for library in reversed(_router.libraries):
        library._destroy()  # puts PyTorch's kernel back in place
    _router.libraries.clear()
    _router.setting = asked
    if asked is None:
        return
    cuda: Any = torch.backends.cuda  # has no types
    for device in dict.fromkeys(backend.device for backend in engine.BACKENDS):
        if device == "cpu" or (device == "cuda" and cuda.is_built()):
            _override("convolution_backward", _backward, device, asked)
            if asked.forward:
                _override("convolution", _forward, device, asked)


def _override(name: str, make: Callable[[Any, str, Setting], Any], device: str, asked: Setting) -> None:
    """Put a kernel of ours in the place of PyTorch's, which it may call."""
    key = KEYS[device]
    stock = torch.library.get_kernel(f"aten::{name}", key)
    registry: Any = torch.library  # has no types
    library = registry.Library("aten", "IMPL", key)
    with _silence(f"aten::{name}", key):
        library.impl(name, make(stock, device, asked), key, with_keyset=True)
    _router.libraries.append(library)
    # Another thread may be about to call it when it is taken away, so it lives on: a few hundred bytes.
    _router.kernels.append(torch.library.get_kernel(f"aten::{name}", key))


@contextmanager
def _silence(operator: str, key: str) -> Iterator[None]:
    """No warning of PyTorch's that a kernel takes the place of another one, which is what was asked for.

    On CUDA the operators have kernels of that very key; on the CPU one for all devices, which nothing takes away.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        yield


def _backward(stock: Any, device: str, asked: Setting) -> Any:
    """What takes the place of PyTorch's kernel of the backward pass on a kind of device."""
    routes: Memory[Route] = Memory()  # of this setting: a thread may end to plan when it has changed

    def backward(
        keyset: Any,
        grad: Tensor,
        x: Tensor,
        w: Tensor,
        bias_sizes: Ints | None,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        transposed: bool,
        output_padding: Ints,
        groups: int,
        mask: Mask,
    ) -> Any:
        how = (stride, padding, dilation, transposed, output_padding, groups)
        plan = partial(_plan_backward, grad, x, w, bias_sizes, how, mask, asked)
        route = routes.find((w, grad, x), (*how, mask), _setting(device), plan)
        data, weights, bias, rest, others, entries = route
        dx = dw = db = None
        begin = perf_counter()
        if data is not None:
            dx = data.new(x)
            data.run(*((grad, w, dx) if transposed else (dx, w, grad)))
            begin = entries[0].count(begin)
        if weights is not None:
            dw = weights.new(x)
            weights.run(*((grad, dw, x) if transposed else (x, dw, grad)))
            begin = entries[1].count(begin)
        if bias:
            db = grad.sum(others)
        if rest is not None:
            theirs = stock.call_boxed(keyset, grad, x, w, bias_sizes, *how, rest)
            entries[2].count(begin)
            dx, dw, db = (ours if ours is not None else other for ours, other in zip((dx, dw, db), theirs, strict=True))
        return dx, dw, db

    return backward


def _forward(stock: Any, device: str, asked: Setting) -> Any:
    """What takes the place of PyTorch's kernel of the forward pass on a kind of device."""
    routes: Memory[ForwardRoute] = Memory()

    def forward(
        keyset: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        transposed: bool,
        output_padding: Ints,
        groups: int,
    ) -> Any:
        how = (stride, padding, dilation, transposed, output_padding, groups)
        tensors = (x, w) if bias is None else (x, w, bias)
        plan = partial(_plan_forward, x, w, bias, how, asked)
        step, entry = routes.find(tensors, how, _setting(device), plan)
        begin = perf_counter()
        if step is None:
            out = stock.call_boxed(keyset, x, w, bias, *how)
        else:
            out = step.new(x)
            step.run(*((out, w, x) if transposed else (x, w, out)), bias)
        entry.count(begin)
        return out

    return forward


def _setting(device: str) -> Hashable:
    """What a route depends on besides tensors and attributes. PyTorch chooses memory formats by whether it may use
    oneDNN.
    """
    return _may_use_onednn(), setting(device)


def _plan_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: Ints | None, how: Any, mask: Mask, asked: Setting
) -> Route:
    """How a backward pass is computed."""
    attributes = Attributes(*how)
    transposed = attributes.transposed
    others = (0, *range(2, grad.dim()))
    steps: dict[str, Step] = {}
    reasons: dict[str, str] = {}
    reason = _refusal(grad, x, w)
    if not reason:
        last = _lies_last(x, w, None, attributes, bias_sizes)
        roles: dict[Role, Tensor] = {"x": grad, "y": x, "w": w} if transposed else {"x": x, "y": grad, "w": w}
        ours: dict[str, tuple[Problem, Result]] = {}
        for name, wanted, like in (("data", "y" if transposed else "x", x), ("weights", "w", w)):
            if not mask[0 if name == "data" else 1]:
                continue
            result = Result(tuple(like.shape), strides_in(like.shape, last), like.dtype)
            given = {role: tensor for role, tensor in roles.items() if role != wanted}
            problem = _problem(wanted, given, None, result, attributes, asked)
            if isinstance(problem, Problem):
                ours[name] = problem, result
            else:
                reasons[name] = problem
        if reasons:  # PyTorch is called for the other gradient in any case
            left = {name: too_little(problem, _device(x), asked.policy) for name, (problem, _) in ours.items()}
            reasons |= {name: why for name, why in left.items() if why}
        for name, (problem, result) in ours.items():
            if name in reasons:
                continue
            found = _step(problem, result, x, asked)
            if isinstance(found, Step):
                steps[name] = found
            else:
                reasons[name] = found
    data, weights = steps.get("data"), steps.get("weights")
    rest = [mask[0] and data is None, mask[1] and weights is None, mask[2] and not steps]
    layer = _layer(x, w, attributes)
    why = reason or "; ".join(f"{name}: {told}" for name, told in reasons.items())
    entries = (
        _router.report.entry(f"{layer} data", _told(data)),
        _router.report.entry(f"{layer} weights", _told(weights)),
        _router.report.entry(f"{layer} {_names(rest)}", "", why),
    )
    return Route(data, weights, mask[2] and not rest[2], rest if any(rest) else None, others, entries)


def _plan_forward(x: Tensor, w: Tensor, bias: Tensor | None, how: Any, asked: Setting) -> ForwardRoute:
    """How a forward pass is computed."""
    attributes = Attributes(*how)
    transposed = attributes.transposed
    reason = _refusal(x, w, *(() if bias is None else (bias,)))
    found: Step | str = reason
    if not reason:
        shape = torch._C._conv_output_shape(x, w, *how) if hasattr(torch._C, "_conv_output_shape") else None
        if shape is None:
            shape = tuple(torch.ops.aten.convolution(x.to("meta"), w.to("meta"), None, *how).shape)
        result = Result(shape, strides_in(shape, _lies_last(x, w, bias, attributes)), x.dtype)
        given: dict[Role, Tensor] = {"y" if transposed else "x": x, "w": w}
        problem = _problem("x" if transposed else "y", given, bias, result, attributes, asked, forward=True)
        found = _step(problem, result, x, asked) if isinstance(problem, Problem) else problem
    layer = f"{_layer(x, w, attributes)} forward"
    if isinstance(found, Step):
        return ForwardRoute(found, _router.report.entry(layer, _told(found)))
    return ForwardRoute(None, _router.report.entry(layer, "", found))


def _refusal(*tensors: Tensor) -> str:
    """Why a call is left to PyTorch whatever the policy."""
    first = tensors[0].dtype
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_mkldnn or tensor.is_quantized:
            return f"a tensor of layout {tensor.layout}"
        if tensor.dtype not in NAMES:
            return f"a tensor of {tensor.dtype}"
        if tensor.dtype is not first:
            return "tensors of several element types"
        if not tensor.numel():
            return "an empty tensor"
        if tensor.is_conj() or tensor.is_neg():
            return "a tensor with a pending sign"
        if not 3 <= tensor.dim() <= 5 and tensor.dim() != 1:
            return f"a tensor of {tensor.dim()} dimensions"
    return ""


def _device(tensor: Tensor) -> Device:
    return Device(tensor.device.type, tensor.device.index or 0)


def _problem(
    wanted: Role,
    given: dict[Role, Tensor],
    bias: Tensor | None,
    result: Result,
    attributes: Attributes,
    asked: Setting,
    forward: bool = False,
) -> Problem | str:
    """The problem of a result that is taken, or why it is left to PyTorch."""
    try:
        geometry = attributes.geometry(len(result.shape) - 2)
        problem = describe(wanted, given, bias, result, geometry, asked.algorithm)
        return hindrance(problem, _device(next(iter(given.values()))), asked.policy, forward) or problem
    except SpecError as error:
        return str(error)  # PyTorch will say it in its own words, or compute it
    except ConvgradError as error:
        return f"{type(error).__name__}: {error}"


def _step(problem: Problem, result: Result, like: Tensor, asked: Setting) -> Step | str:
    """The step for a result, or why it is left to PyTorch."""
    try:
        step = load(problem, result, like)
    except SpecError as error:
        return str(error)
    except ConvgradError as error:
        return f"{type(error).__name__}: {error}"
    if asked.policy == "fast" and step.backend == "reference":
        return "no kernel of ours computes it"
    return step


def _lies_last(
    x: Tensor, w: Tensor, bias: Tensor | None, attributes: Attributes, bias_sizes: Ints | None = None
) -> bool:
    """Whether results of PyTorch's own kernels have their channels last in memory; its fake kernels ask the same.

    One spatial axis is computed as two, the first of size 1, from data that is contiguous.
    """
    how: tuple[Any, ...] = (*attributes,) if bias_sizes is None else (*attributes, bias_sizes)
    kernel = torch._C._select_conv_backend(x, w, bias, *how)
    if x.dim() == 3:
        x, w = x.new_empty(x.shape).unsqueeze(2), w.unsqueeze(2)
    order = torch._C._conv_determine_backend_memory_format(x, w, kernel)
    return order in (torch.channels_last, torch.channels_last_3d)


def _layer(x: Tensor, w: Tensor, attributes: Attributes) -> str:
    """A layer in the report: `conv2d f32 8x64x56x56, 64x64x3x3 s1 p1`."""
    rank = x.dim() - 2
    name = f"conv{'_transpose' if attributes.transposed else ''}{rank}d"
    words = [name, NAMES.get(x.dtype, str(x.dtype)), f"{_by(x.shape)},", _by(w.shape)]
    for letter, value in (("s", attributes.stride), ("p", attributes.padding), ("d", attributes.dilation)):
        plain = 0 if letter == "p" else 1
        if any(v != plain for v in value):
            words.append(letter + _by(tuple(value[:1]) if len(set(value)) == 1 else tuple(value)))
    if attributes.groups != 1:
        words.append(f"g{attributes.groups}")
    return " ".join(words)


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _names(mask: Sequence[bool]) -> str:
    return ", ".join(name for name, asked in zip(("data", "weights", "bias"), mask, strict=True) if asked)


def _told(step: Step | None) -> str:
    return "" if step is None else step.backend
