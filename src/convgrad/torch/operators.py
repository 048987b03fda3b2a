"""The operators `torch.ops.convgrad.*`: one for each tensor of y = conv(x, w), and what PyTorch asks of each.

`convolution` computes y, `convolution_data` x and `convolution_weights` w. A transposed convolution is
`convolution_data` of its input. The gradients of each of the three are the two others, so that one formula serves all,
to any order. `convolution_weights_into` adds the third to a tensor that is there.

Every operator takes the spatial sizes of its result. Results have no gaps, with channels first or last: as
`channels_last` says, else as the inputs lie. Their fake kernels say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..libraries.torch import has_tangent
from ..spec.check import broken
from ..spec.problem import Role
from ..tensors import overlaps
from .adding import added, are_functions_transformed, has_level, is_transformed, may_add, moves
from .plans import Geometry, Result, compute, describe, lies_channels_last, other_device, step_for, strides_in
from .sharding import whole

OPERATORS: dict[Role, str] = {"y": "convolution", "x": "convolution_data", "w": "convolution_weights"}
"""The operator that computes each tensor."""

GIVEN: dict[Role, tuple[Role, Role]] = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}
"""What each tensor is computed from."""


_registry: Any = torch.library  # has no types for most of what it offers
LIBRARY = _registry.Library("convgrad", "DEF")

_GEOMETRY = "SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_HOW = "bool? channels_last=None, str algorithm='direct', ScalarType? dtype=None"


class Options(NamedTuple):
    """What the functions and modules take besides PyTorch's own arguments."""

    algorithm: str = "direct"
    wide_weights: bool = False
    accumulate: bool = False


class Call(NamedTuple):
    """The arguments of an operator, in order; the dispatcher leaves out those that have their default value."""

    first: Tensor
    second: Tensor
    bias: Tensor | None
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    channels_last: bool | None = None
    algorithm: str = "direct"
    dtype: torch.dtype | None = None
    wide_weights: bool = False

    @classmethod
    def read(cls, wanted: Role, args: Sequence[Any]) -> Call:
        """The arguments of the operator that computes a tensor; a gradient of weights has no bias."""
        first, second, *rest = args
        return cls(first, second, *(rest if wanted != "w" else [None, *rest]))

    def again(self, wanted: Role) -> Tensor:
        """The operator with these arguments; as a Function where torch.func transforms it, or it carries tangents."""
        if torch.compiler.is_compiling() or not is_transformed():
            return self.plainly(wanted)
        result: Tensor = FUNCTIONS[wanted].apply(*self.arguments(wanted))
        return result

    def adding(self, wanted: Role) -> Tensor:
        """The operator with these arguments; the gradient of weights is added to what they have, where it can be."""
        call = under_wide_autocast(self)
        if not may_add(call.first, call.second, call.wide_weights):
            return self.again(wanted)
        result: Tensor = ADDING[wanted].apply(*call.arguments(wanted))
        return result

    def plainly(self, wanted: Role) -> Tensor:
        """The operator with these arguments, of which PyTorch knows how it is differentiated in reverse."""
        result: Tensor = getattr(torch.ops.convgrad, OPERATORS[wanted])(*self.arguments(wanted))
        return result

    def arguments(self, wanted: Role) -> tuple[Any, ...]:
        """The arguments in the order of the operator."""
        first, second, bias, *rest = self
        return (first, second, *rest[:-1]) if wanted == "w" else (first, second, bias, *rest)

    @property
    def geometry(self) -> Geometry:
        """The geometry as a plan knows it."""
        return Geometry(tuple(self.stride), tuple(self.padding), tuple(self.dilation), self.groups)

    def shape(self, wanted: Role) -> tuple[int, ...]:
        """The shape of the result."""
        a, b = GIVEN[wanted]
        first, second = self.first.shape, self.second.shape
        for name, shape in ((a, first), (b, second)):
            if not 3 <= len(shape) <= 5:
                raise broken("data_rank", name, tuple(shape))
        if isinstance(self.groups, int) and self.groups < 1:
            raise broken("attribute_minimum", "groups", self.groups, minimum=1)
        if wanted == "y":
            return first[0], second[0], *self.size
        if wanted == "x":
            return first[0], second[1] * self.groups, *self.size
        return second[1], first[1] // self.groups, *self.size

    def result(self, wanted: Role) -> Result:
        """What the result is like in memory."""
        last = self.channels_last
        if last is None:
            last = lies_channels_last(self.first) or lies_channels_last(self.second)
        shape = self.shape(wanted)
        return Result(shape, strides_in(shape, last), self.dtype or self.first.dtype)

    def tensors(self, wanted: Role) -> dict[Role, Tensor]:
        """The inputs by their roles. Weights that are wider than the data are rounded here."""
        first, second = GIVEN[wanted]
        return {first: self.first, second: self._narrow(second, self.second) if self.wide_weights else self.second}

    def narrow_bias(self) -> Tensor | None:
        """The bias in the element type of the data, if it may be wider."""
        return self._narrow("bias", self.bias) if self.wide_weights and self.bias is not None else self.bias

    def _narrow(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the element type of the data, than which it may be wider."""
        dtype = self.first.dtype
        if tensor.dtype not in (dtype, torch.float32) or (dtype is torch.float64 and tensor.dtype is not dtype):
            wider = "" if dtype in (torch.float32, torch.float64) else ", or torch.float32"
            raise broken("same_dtype", name, str(tensor.dtype), first="input", expected=f"{dtype}{wider}")
        return tensor.to(dtype)


def kernel(wanted: Role) -> Callable[..., Tensor]:
    """What computes a tensor, from memory."""

    def computed(*args: Any) -> Tensor:
        call = Call.read(wanted, args)
        if moves():
            _refuse_tangents(wanted, call)
        tensors = call.tensors(wanted)
        return compute(wanted, tensors, call.narrow_bias(), call.result(wanted), call.geometry, call.algorithm)

    return computed


def _refuse_tangents(wanted: Role, call: Call) -> None:
    """An operator itself does not know how its result moves with its inputs: the functions do."""
    for name, tensor in zip((*GIVEN[wanted], "bias"), (call.first, call.second, call.bias), strict=True):
        if tensor is not None and has_tangent(tensor):
            hint = "call convgrad.torch.conv2d or its like, which are differentiated forwards, too"
            raise broken("input_grad", name, "a tensor with a tangent", hint=hint)


def fake(wanted: Role) -> Callable[..., Tensor]:
    """What a result is like, for tensors without values. Mistakes are told here too, where sizes are known."""

    def imagined(*args: Any) -> Tensor:
        call = Call.read(wanted, args)
        result = call.result(wanted)
        for other in (call.second, call.bias):
            if other is not None and other.device != call.first.device:
                raise other_device(call.first, other)
        sizes = (*result.shape, *call.first.shape, *call.second.shape, *call.stride, *call.padding, *call.dilation)
        if all(isinstance(size, int) for size in (*sizes, call.groups)):
            describe(wanted, call.tensors(wanted), call.narrow_bias(), result, call.geometry, call.algorithm)
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=call.first.device)

    return imagined


def under_wide_autocast(call: Call) -> Call:
    """A call whose weights may be wider than the data, with the data as autocast has it; others as they are."""
    device = call.first.device.type
    if not call.wide_weights or not torch.is_autocast_enabled(device) or call.first.dtype is torch.float64:
        return call
    return call._replace(first=call.first.to(torch.get_autocast_dtype(device)))


def under_autocast(wanted: Role, key: torch._C.DispatchKey) -> Callable[..., Tensor]:
    """The operator where PyTorch chooses the element type: as for its own convolutions, float64 stays.

    Weights that may be wider than the data stay as they are, and so does the width of their gradient.
    """
    device = "cpu" if key == torch._C.DispatchKey.AutocastCPU else "cuda"
    keys = torch._C.DispatchKeySet(key)

    def cast(*args: Any) -> Tensor:
        call = Call.read(wanted, args)
        narrow = torch.get_autocast_dtype(device)

        def narrowed(tensor: Tensor) -> Tensor:
            return tensor if tensor.dtype is torch.float64 else tensor.to(narrow)

        with torch._C._ExcludeDispatchKeyGuard(keys):
            if not call.wide_weights:
                bias = None if call.bias is None else narrowed(call.bias)
                call = call._replace(second=narrowed(call.second), bias=bias)
            return call._replace(first=narrowed(call.first)).again(wanted)

    return cast


def remember(wanted: Role) -> Callable[[Any, tuple[Any, ...], Tensor], None]:
    """What the gradients of a call need of it: each of its two inputs only if the other one's gradient is wanted."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        call = Call.read(wanted, inputs)
        first, second, *_ = ctx.needs_input_grad
        ctx.save_for_backward(call.first if second else None, call.second if first else None)
        ctx.like = [(t.shape[2:], lies_channels_last(t), t.dtype) for t in (call.first, call.second)]
        ctx.bias = None if call.bias is None else call.bias.dtype
        ctx.parameter = None
        gone: Any = None
        ctx.call = call._replace(first=gone, second=gone, bias=None, channels_last=None, dtype=None)

    return setup_context


def gradients(wanted: Role) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of a call: of each input by the operator that computes its tensor, from the other and the result's.

    They lie in memory as the inputs do.
    """
    roles = GIVEN[wanted]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = whole(grad)
        found: list[Tensor | None] = [None, None]
        saved = ctx.saved_tensors  # once: a checkpoint computes them anew each time
        for i, role in enumerate(roles):
            if ctx.needs_input_grad[i]:
                tensors = {roles[1 - i]: saved[1 - i], wanted: grad}
                if role == "w" and ctx.parameter is not None and added(ctx.parameter, tensors, ctx.like[i], ctx.call):
                    continue
                found[i] = _gradient(role, tensors, ctx.like[i], ctx.call)
        rest: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if wanted != "w" and ctx.needs_input_grad[2]:
            rest[0] = grad.sum((0, *range(2, grad.dim())), dtype=ctx.bias)
        return *found, *rest

    return backward


def _gradient(role: Role, tensors: Mapping[Role, Tensor], like: tuple[Any, ...], call: Call) -> Tensor:
    """The gradient of an input. Where the other one and the result's differ in width, the wider one counts."""
    size, last, dtype = like
    first, second = (tensors[given] for given in GIVEN[role])
    wide = call.wide_weights and role != "w"
    if first.dtype != second.dtype and not wide:
        both = torch.promote_types(first.dtype, second.dtype)
        first, second = first.to(both), second.to(both)
    out = dtype if dtype is torch.float32 else first.dtype
    asked = call._replace(
        first=first, second=second, size=size, channels_last=last, dtype=out, wide_weights=wide and role != "w"
    )
    return asked.again(role).to(dtype)


def batched(wanted: Role) -> Callable[..., tuple[Tensor, int]]:
    """The operator on a batch of calls, for vmap: as more images where only data has the batch, else as more groups."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        call = Call.read(wanted, args)
        first, second, *more = in_dims
        third = more[0] if wanted != "w" else None
        count = info.batch_size
        if wanted != "w" and first is not None and second is None and third is None:
            result = call._replace(first=call.first.movedim(first, 0).flatten(0, 1)).again(wanted)
            return result.reshape(count, result.shape[0] // count, *result.shape[1:]), 0
        a, b = (
            _as_groups(role, tensor, at, count)
            for role, tensor, at in zip(GIVEN[wanted], (call.first, call.second), (first, second), strict=True)
        )
        bias = None if call.bias is None else _stacked(call.bias, third, count).flatten()
        call = call._replace(first=a, second=b, bias=bias, groups=call.groups * count)
        result = call.again(wanted)
        if wanted == "w":
            return result.reshape(count, result.shape[0] // count, *result.shape[1:]), 0
        return result.reshape(result.shape[0], count, result.shape[1] // count, *result.shape[2:]), 1

    return rule


def _stacked(tensor: Tensor, at: int | None, count: int) -> Tensor:
    """A tensor with the batch in front."""
    return tensor.expand(count, *tensor.shape) if at is None else tensor.movedim(at, 0)


def _as_groups(role: Role, tensor: Tensor, at: int | None, count: int) -> Tensor:
    """A tensor with the batch as more groups."""
    stacked = _stacked(tensor, at, count)
    return stacked.flatten(0, 1) if role == "w" else stacked.movedim(0, 1).flatten(1, 2)


def weights_into(
    x: Tensor,
    y: Tensor,
    into: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    algorithm: str = "direct",
) -> None:
    """Add the gradient of weights to a tensor."""
    call = Call(x, y, None, size, stride, padding, dilation, groups, algorithm=algorithm)
    if call.shape("w") != into.shape:
        raise broken("shapes_agree", "into", tuple(into.shape), expected=call.shape("w"), source="the weights")
    if overlaps(into.shape, into.stride()):
        raise broken("out_overlap", "into", into.stride())
    result = Result(tuple(into.shape), into.stride(), into.dtype, accumulate=True)
    step_for("w", {"x": x, "y": y}, None, result, call.geometry, algorithm).run(x, into, y)
    if not into.is_inference():
        torch.autograd.graph.increment_version(into)


def _refuse_gradients(*args: Any) -> None:
    """`convolution_weights_into` where autograd looks on: it has no gradients, so nothing may ask for them."""
    if torch.is_grad_enabled():
        for name, tensor in zip(("x", "y", "into"), args, strict=False):
            if tensor.requires_grad:
                hint = "give its .detach(), or call under torch.no_grad()"
                raise broken("input_grad", name, "a tensor that requires grad", hint=hint)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.convgrad.convolution_weights_into(*args)


def tangent(wanted: Role) -> Callable[..., Tensor | None]:
    """How the result moves with the inputs: a product, so each moves it while the other stands still."""

    def jvp(ctx: Any, first: Tensor | None, second: Tensor | None, *rest: Any) -> Tensor | None:
        a, b = ctx.inputs
        moved = [(first, b), (a, second)]
        call = ctx.call._replace(size=ctx.size, channels_last=ctx.last, dtype=ctx.dtype)
        terms = [call._replace(first=x, second=y).again(wanted) for x, y in moved if x is not None and y is not None]
        bias = rest[0] if wanted != "w" else None
        if bias is not None:
            shape = (1, -1, *(1,) * len(ctx.size))
            terms.append(bias.to(ctx.dtype).reshape(shape).expand(ctx.shape))
        return sum(terms[1:], terms[0]) if terms else None

    return jvp


def _function(wanted: Role, adds: bool = False) -> Any:
    """An operator as a Function, which torch.func can transform; or one that adds to the gradient of weights."""

    def forward(*args: Any) -> Tensor:
        call = Call.read(wanted, args)
        return call.again(wanted) if are_functions_transformed() else call.plainly(wanted)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        remember(wanted)(ctx, inputs, output)
        call = Call.read(wanted, inputs)
        if adds:
            ctx.parameter = call.second
            return
        if not has_level():
            return  # there is no `jvp` to come, and the backward pass has what it needs
        ctx.save_for_forward(call.first, call.second)
        ctx.inputs = (call.first, call.second)
        ctx.size, ctx.shape, ctx.last, ctx.dtype = call.size, output.shape, lies_channels_last(output), output.dtype

    members: dict[str, Any] = {"forward": forward, "setup_context": setup_context, "backward": gradients(wanted)}
    members |= {"jvp": tangent(wanted), "vmap": batched(wanted)}
    return type(OPERATORS[wanted], (torch.autograd.Function,), {k: staticmethod(v) for k, v in members.items()})


FUNCTIONS: dict[Role, Any] = {wanted: _function(wanted) for wanted in OPERATORS}
"""The operators for torch.func and forward-mode differentiation."""

ADDING: dict[Role, Any] = {wanted: _function(wanted, adds=True) for wanted in ("y", "x")}
"""The operators that add the gradient of weights to what they have."""


def _define() -> None:
    """Tell PyTorch all of this."""
    tags = (torch.Tag.pt2_compliant_tag,)
    wide = "bool wide_weights=False"
    inputs = {"y": f"Tensor x, Tensor w, Tensor? bias, {_GEOMETRY}, {_HOW}, {wide}"}
    inputs |= {"x": f"Tensor y, Tensor w, Tensor? bias, {_GEOMETRY}, {_HOW}, {wide}"}
    inputs |= {"w": f"Tensor x, Tensor y, {_GEOMETRY}, {_HOW}"}
    for wanted, name in OPERATORS.items():
        LIBRARY.define(f"{name}({inputs[wanted]}) -> Tensor", tags=tags)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, kernel(wanted), device)
            key = getattr(torch._C.DispatchKey, f"Autocast{device}")
            LIBRARY.impl(name, under_autocast(wanted, key), f"Autocast{device}")
        full = f"convgrad::{name}"
        _registry.register_fake(full, fake(wanted), lib=LIBRARY)
        _registry.register_autograd(full, gradients(wanted), setup_context=remember(wanted), lib=LIBRARY)
        _registry.register_vmap(full, batched(wanted), lib=LIBRARY)
    into = "convolution_weights_into"
    LIBRARY.define(f"{into}(Tensor x, Tensor y, Tensor(a!) into, {_GEOMETRY}, str algorithm='direct') -> ()", tags=tags)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(into, weights_into, device)
    LIBRARY.impl(into, _refuse_gradients, "Autograd")
    _registry.register_fake(f"convgrad::{into}", lambda *_: None, lib=LIBRARY)


_define()
