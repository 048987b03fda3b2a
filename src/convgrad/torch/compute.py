"""Convolutions and their gradients on PyTorch's CPU tensors, in PyTorch's terms and without autograd.

A call is known by its key: the shapes, strides and element types of its tensors, its attributes, and all that PyTorch
and we choose by. Behind a key is a plan: the result's shapes and strides, and an executable for each result. A repeated
call looks its plan up, makes the results and hands addresses over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import engine
from ..backend import HOST, Device, Executable
from ..cpu.threads.count import asked_num_threads
from ..errors import SpecError
from ..spec.bind import Binding, Description, bind
from ..spec.dialects import find
from ..spec.problem import Problem, dense_strides

Ints = Sequence[int]
Mask = Sequence[bool]
Into = tuple[Tensor | None, Tensor | None, Tensor | None]

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
"""The element types that are computed, by oneDNN's names."""

MOST_PLANS = 4096  # are kept

_NONE: Into = (None, None, None)


class Attributes(NamedTuple):
    """How PyTorch describes a convolution, but for its tensors. A list of one value serves all spatial axes."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    def wide(self, rank: int) -> Attributes:
        """The same with a value for every spatial axis."""
        stride, padding, dilation, transposed, output_padding, groups = self
        lists = [tuple(v) * rank if len(v) == 1 else tuple(v) for v in (stride, padding, dilation, output_padding)]
        return Attributes(lists[0], lists[1], lists[2], transposed, lists[3], groups)

    def exact(self, algorithm: str, accumulate: bool = False) -> dict[str, Any]:
        """The same in oneDNN's words."""
        found: dict[str, Any] = {
            "strides": self.stride,
            "pads_begin": self.padding,
            "pads_end": self.padding,
            "dilations": self.dilation,
            "groups": self.groups,
            "data_format": "NCX",
            "weights_format": "IOX" if self.transposed else "OIX",
            "algorithm": algorithm,
            "accumulate": accumulate,
        }
        if self.transposed:
            found["output_padding"] = self.output_padding
        return found


class Step(NamedTuple):
    """One result: what it is like in memory, and what computes it."""

    execute: Executable
    backend: str
    problem: str  # in one line, for reports
    shape: Ints
    strides: Ints  # in elements
    dtype: torch.dtype
    context: int  # what `execute` is told of threads

    def new(self) -> Tensor:
        """Memory for the result, its values not set."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class Backward(NamedTuple):
    """The plan of a backward pass: a step for every gradient that is wanted."""

    data: Step | None
    weights: Step | None
    bias: torch.dtype | None  # None if it is not wanted
    transposed: bool
    others: tuple[int, ...]  # the axes that the bias gradient sums over

    def __call__(
        self, grad: Tensor, x: Tensor, w: Tensor, into: Into = _NONE
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of data, weights and bias; None for those that are not wanted."""
        dx, dw, db = into
        y = grad.data_ptr()
        step = self.data
        if step is not None:
            if dx is None:
                dx = step.new()
            if self.transposed:
                step.execute(y, w.data_ptr(), dx.data_ptr(), 0, step.context)
            else:
                step.execute(dx.data_ptr(), w.data_ptr(), y, 0, step.context)
        step = self.weights
        if step is not None:
            if dw is None:
                dw = step.new()
            if self.transposed:
                step.execute(y, dw.data_ptr(), x.data_ptr(), 0, step.context)
            else:
                step.execute(x.data_ptr(), dw.data_ptr(), y, 0, step.context)
        if self.bias is not None:
            total = grad.sum(self.others, dtype=self.bias)
            db = total if db is None else db.add_(total)
        return dx, dw, db


class Forward(NamedTuple):
    """The plan of a forward pass."""

    step: Step
    transposed: bool

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of x with w."""
        step = self.step
        y = step.new()
        at = 0 if bias is None else bias.data_ptr()
        if self.transposed:
            step.execute(y.data_ptr(), w.data_ptr(), x.data_ptr(), at, step.context)
        else:
            step.execute(x.data_ptr(), w.data_ptr(), y.data_ptr(), at, step.context)
        return y


_forwards: dict[Hashable, Forward] = {}
_backwards: dict[Hashable, Backward] = {}


def forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    *,
    algorithm: str = "direct",
) -> Tensor:
    """What `torch.ops.aten.convolution` computes, with the same strides."""
    key = (
        *(x.dtype, x.shape, x.stride(), w.dtype, w.shape, w.stride()),
        None if bias is None else (bias.dtype, bias.shape, bias.stride()),
        *(*stride, *padding, *dilation, *output_padding, transposed, groups, algorithm),
        *setting(),
    )
    plan = _forwards.get(key)
    if plan is None:
        attributes = Attributes(stride, padding, dilation, transposed, output_padding, groups)
        plan = _keep(_forwards, key, plan_forward(x, w, bias, attributes, algorithm))
    return plan(x, w, bias)


def backward(
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
    *,
    algorithm: str = "direct",
    weight_dtype: torch.dtype | None = None,
    into: Into = _NONE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What `torch.ops.aten.convolution_backward` computes, with the same strides.

    `weight_dtype` is the element type of the gradients of weights and bias: `torch.float32` keeps the sums of narrower
    types as they are. A gradient is added to its tensor in `into`, if there is one, and that tensor is returned.
    """
    key = (
        backward_key(grad, x, w, stride, padding, dilation, transposed, output_padding, groups, mask),
        *(None if t is None else (t.dtype, t.shape, t.stride()) for t in into),
        *(algorithm, weight_dtype),
    )
    plan = _backwards.get(key)
    if plan is None:
        attributes = Attributes(stride, padding, dilation, transposed, output_padding, groups)
        made = plan_backward(grad, x, w, bias_sizes, attributes, mask, algorithm, weight_dtype, into)
        plan = _keep(_backwards, key, made)
    return plan(grad, x, w, into)


def backward_key(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    mask: Mask,
) -> Hashable:
    """All that the plan of a backward pass depends on."""
    return (
        *(grad.dtype, grad.shape, grad.stride(), x.dtype, x.shape, x.stride(), w.dtype, w.shape, w.stride()),
        *(*stride, *padding, *dilation, *output_padding, transposed, groups, *mask),
        *setting(),
    )


def setting() -> tuple[Hashable, ...]:
    """What a plan depends on besides its tensors and attributes: PyTorch chooses strides by the first two."""
    return torch.get_num_threads(), torch._C._get_mkldnn_enabled(), asked_num_threads()


def plan_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, attributes: Attributes, algorithm: str = "direct"
) -> Forward:
    """How a forward pass is computed. A mistake of the caller is a SpecError."""
    attributes = attributes.wide(x.dim() - 2)
    op = find("ConvTranspose" if attributes.transposed else "Convolution").op
    inputs = [x, w] if bias is None else [x, w, bias]
    described = [_describe(t) for t in inputs]
    exact = attributes.exact(algorithm)
    plain = bind(op, described, exact)
    strides = strides_in(plain.shape, memory_format(x, w, bias, attributes))
    bound = bind(op, described, exact, out=Description(plain.problem.out_dtype, plain.shape, strides))
    return Forward(_step(bound, x.dtype, _device(inputs)), attributes.transposed)


def plan_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Ints | None,
    attributes: Attributes,
    mask: Mask,
    algorithm: str = "direct",
    weight_dtype: torch.dtype | None = None,
    into: Into = _NONE,
) -> Backward:
    """How a backward pass is computed. A mistake of the caller is a SpecError."""
    attributes = attributes.wide(x.dim() - 2)
    order = memory_format(x, w, None, attributes, bias_sizes)
    narrow = weight_dtype or w.dtype
    data = weights = None
    if mask[0]:
        inputs, shape = [grad, w], None if attributes.transposed else x.shape
        data = _gradient("Data", inputs, shape, _Out.like(x, order, x.dtype, into[0]), attributes, algorithm)
    if mask[1]:
        out = _Out.like(w, order, narrow, into[1])
        weights = _gradient("Weights", [x, grad], w.shape, out, attributes, algorithm)
    bias = (narrow if into[2] is None else into[2].dtype) if mask[2] else None
    return Backward(data, weights, bias, attributes.transposed, (0, *range(2, grad.dim())))


class _Out(NamedTuple):
    """A gradient, and whether it is added to what is there."""

    shape: Ints
    strides: Ints
    dtype: torch.dtype
    accumulate: bool

    @classmethod
    def like(cls, tensor: Tensor, order: torch.memory_format, dtype: torch.dtype, into: Tensor | None) -> _Out:
        """The gradient of a tensor: as PyTorch makes it, or in memory that is there."""
        if into is None:
            return cls(tuple(tensor.shape), strides_in(tensor.shape, order), dtype, False)
        return cls(tuple(into.shape), into.stride(), into.dtype, True)


def _gradient(
    of: str, inputs: list[Tensor], shape: Ints | None, out: _Out, attributes: Attributes, algorithm: str
) -> Step:
    """The step for one gradient."""
    kind = f"{'ConvTranspose' if attributes.transposed else 'Convolution'}Backward{of}"
    described = [_describe(t) for t in inputs]
    exact = attributes.exact(algorithm, out.accumulate)
    asked = None if shape is None else tuple(shape)
    result = Description(_name(out.dtype), tuple(out.shape), tuple(out.strides))
    try:
        bound = bind(find(kind).op, described, exact, shape=asked, out=result)
    except SpecError as error:
        raise find(kind).retell(error) from None
    return _step(bound, out.dtype, _device(inputs))


def _step(bound: Binding, dtype: torch.dtype, device: Device) -> Step:
    """The step for a problem: its executable is planned for as many threads as calls will use."""
    threads = asked_num_threads() or torch.get_num_threads()
    choice = _choose(bound.problem, device, threads)
    text, name = str(bound.problem), choice.backend.name
    return Step(choice.execute, name, text, bound.shape, bound.strides, dtype, context(threads))


def context(threads: int) -> int:
    """What an executable is told of the threads that it may use."""
    return threads


def _choose(problem: Problem, device: Device, threads: int) -> engine.Choice:
    """The back end for a problem on a number of threads."""
    from ..cpu import backend, kernel, target

    if device == HOST and all(problem.size(role) for role in ("x", "w", "y")) and backend.has_compiler():
        found = kernel.find(problem, target.current(), threads)
        if not isinstance(found, str):
            return engine.Choice(backend, found, ())
    return engine.choose(problem, device)


def _device(tensors: Sequence[Tensor]) -> Device:
    """Where tensors are."""
    first, *others = tensors
    for other in others:
        if other.device != first.device:
            raise SpecError(f"all tensors must be on {first.device}, as the first one is, got one on {other.device}")
    return Device(first.device.type, first.device.index or 0)


def _describe(tensor: Tensor) -> Description:
    """What `bind` needs to know of a tensor."""
    return Description(_name(tensor.dtype), tuple(tensor.shape), tensor.stride())


def _name(dtype: torch.dtype) -> str:
    """The name of an element type; one that we do not compute has PyTorch's."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _keep(plans: dict[Hashable, Any], key: Hashable, plan: Any) -> Any:
    """Remember a plan. All are dropped when they are too many, which shapes that never come again have filled."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def memory_format(
    x: Tensor, w: Tensor, bias: Tensor | None, attributes: Attributes, bias_sizes: Ints | None = None
) -> torch.memory_format:
    """The order in memory of the results of PyTorch's own kernels; their fake kernels ask the same.

    The tensors may be fake. One spatial axis is computed as two, the first of size 1, from data that is contiguous.
    """
    how: tuple[Any, ...] = (*attributes,) if bias_sizes is None else (*attributes, bias_sizes)
    kernel = torch._C._select_conv_backend(x, w, bias, *how)
    if x.dim() == 3:
        x, w = x.new_empty(x.shape).unsqueeze(2), w.unsqueeze(2)
    return torch._C._conv_determine_backend_memory_format(x, w, kernel)


def strides_in(shape: Ints, order: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor in a memory format, in elements. With one spatial axis it is one with two, as above."""
    axes = range(len(shape))
    last = order in (torch.channels_last, torch.channels_last_3d)
    return dense_strides(tuple(shape), (0, *axes[2:], 1) if last else tuple(axes))
