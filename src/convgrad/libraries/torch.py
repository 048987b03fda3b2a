"""PyTorch's tensors, on the host and on CUDA devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .. import host
from ..backend import Device, Tensor
from ..dtypes import DTYPES, Array
from ..host_team import HOST_TEAM, share_threads
from ..spec.check import DEVICES, broken

name = "torch"

ADDRESSED = ("cpu", "cuda")
"""The kinds of devices where an address is all that a back end needs to reach a tensor's memory."""

_NAMES = {d.numpy.name: d.name for d in DTYPES.values()}


def owns(value: Any) -> bool:
    """Whether a value is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


GUARDED: frozenset[type] = frozenset()
"""Types of values that `guard` tells apart, once PyTorch is there."""

_guards: Any = None


def keyed() -> tuple[type, ...]:
    """Plain tensors and parameters: subclasses may have no memory of their own."""
    global GUARDED, _guards
    torch: Any = sys.modules["torch"]
    share_threads(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu"))
    known = hasattr(torch._C, "_dispatch_keys") and hasattr(torch._C.DispatchKeySet, "raw_repr")
    plain = (torch.Tensor, torch.nn.Parameter) if known else ()
    _guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    GUARDED = frozenset(plain if _guards is not None else ())
    _questions()
    return plain


def guard(values: Sequence[Any]) -> Callable[..., bool] | None:
    """What tells whether other values are like these in all that `look` has in its key, and ask for gradients or not
    as these do; None if nothing can.

    PyTorch's own: of torch.compile, which asks it before it runs what it has compiled.
    """
    if not GUARDED.issuperset(map(type, values)):
        return None
    sizes, strides = [[*value.shape] for value in values], [[*value.stride()] for value in values]
    try:
        check: Callable[..., bool] = _guards(*values, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*values) else None  # it refuses a tensor that comes twice
    except (RuntimeError, TypeError, SystemError):
        return None  # Not as this version of PyTorch has it.


def is_watched() -> bool:
    """Whether somebody looks on at what is called whom `guard` does not see: torch.compile, or forward-mode
    differentiation.
    """
    functions = _functions
    return bool(functions[2]() or functions[4]._current_level >= 0)


def is_grad_enabled() -> bool:
    """Whether autograd looks on."""
    return bool(_functions[3]())


def look(value: Any) -> tuple[Hashable, int] | None:
    """What binding looks at, and the address. PyTorch's dispatch keys tell everything else of a tensor: the kind of its
    device, whether it is sparse, nested or quantized, has a sign pending, or stands for others.
    """
    dispatch_keys, is_tracing, is_compiling, is_grad_enabled, forward_ad, _ = _functions or _questions()
    try:
        at = value.data_ptr()
        if is_compiling() or not at or is_tracing() or (value.requires_grad and is_grad_enabled()):
            return None
        if forward_ad._current_level >= 0 and has_tangent(value):
            return None
        return (value.shape, value.stride(), value.dtype, dispatch_keys(value).raw_repr(), value.get_device()), at
    except (RuntimeError, ValueError):
        return None  # One without memory; `open` says why.


_functions: tuple[Any, ...] = ()


def _questions() -> tuple[Any, ...]:
    """What PyTorch is asked at each call, looked up once. (TorchDynamo warns of functions with a cache.)"""
    global _functions
    torch: Any = sys.modules["torch"]
    _functions = (
        torch._C._dispatch_keys,
        torch._C._is_tracing,
        torch.compiler.is_compiling,
        torch.is_grad_enabled,
        torch.autograd.forward_ad,
        torch.autograd.graph.increment_version,
    )
    return _functions


def are_recorded(values: Sequence[Any]) -> bool:
    """Whether values are tensors of which some stand for others, ask for gradients, or have no values: those on meta.

    Calls of such become operators of PyTorch's. None stands for an input that was left out. In `torch.jit.trace` sizes
    would become constants without a word.
    """
    given = [value for value in values if value is not None]
    if not given or not all(map(owns, given)) or sys.modules["torch"].jit.is_tracing():
        return False
    return any(_traced(v) or _asks_for_gradients(v) for v in given) or all(v.device.type == "meta" for v in given)


def is_writable(value: Any) -> bool:
    """Whether PyTorch allows it here."""
    return not value.is_inference() or sys.modules["torch"].is_inference_mode_enabled()


def open(value: Any, name: str) -> Tensor:
    """The tensor on the same memory, or on a copy where PyTorch has only noted a change of the values."""
    torch: Any = sys.modules["torch"]
    kind = type(value).__name__
    if value.device.type not in ADDRESSED:
        hint = "move it with .cpu()" if value.device.type != "meta" else "a meta tensor has no values; make a real one"
        raise broken("input_device", name, f"a tensor on {value.device}", hint=hint, where=DEVICES)
    if value.is_nested or value.is_quantized:
        what, way = ("nested", "torch.nested.to_padded_tensor") if value.is_nested else ("quantized", ".dequantize()")
        raise broken("input_array", name, f"a {what} tensor", hint=f"make a plain one with {way}")
    if value.layout is not torch.strided:
        raise broken("input_array", name, f"a tensor of layout {value.layout}", hint="make it dense with .to_dense()")
    if traced := _traced(value):
        raise broken("input_traced", name, f"a {kind} {traced}", hint="call convgrad outside of it, on plain tensors")
    if asks := _asks_for_gradients(value):
        hint = "give its .detach(), or call under torch.no_grad(); functions of PyTorch tensors alone, without `out`, "
        hint += "have gradients"
        raise broken("input_grad", name, f"a {kind} {asks}", hint=hint)
    try:
        copied = value.is_neg() or value.is_conj()
        plain = value.detach()
        if copied:
            plain = plain.resolve_conj().resolve_neg()
        array = _as_array(plain) if value.device.type == "cpu" else None
        at = plain.data_ptr()
    except (TypeError, RuntimeError, ValueError):
        # Types that NumPy has no name for, and subclasses without memory of their own, or not yet.
        raise broken("input_array", name, f"a {kind} of {value.dtype}") from None
    if plain.numel() and not at:
        raise broken("input_array", name, f"a {kind} whose memory was given back")
    locked = ""
    if not is_writable(value):
        locked = "a tensor made under torch.inference_mode, which nothing outside of it may change"
    elif copied or (array is not None and not array.flags.writeable):
        locked = "one that is read-only, or can only be read as a copy"
    if array is not None:
        return host.tensor(array, locked, copied)
    device = Device(value.device.type, value.get_device())
    return on_device(plain, device)._replace(locked=locked, copied=copied)


def on_device(plain: Any, device: Device) -> Tensor:
    """A tensor of PyTorch on another device than the host, as which memory of other libraries is opened, too."""
    dtype = str(plain.dtype).removeprefix("torch.")
    strides = tuple(step * plain.element_size() for step in plain.stride())
    return Tensor(plain, plain.data_ptr(), tuple(plain.shape), strides, _NAMES.get(dtype, dtype), device)


def _as_array(plain: Any) -> Array:
    """A tensor on the host as an array of NumPy, on the same memory."""
    torch: Any = sys.modules["torch"]
    is_bf16 = plain.dtype is torch.bfloat16
    array: Array = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bf16 else plain.numpy()
    return array


def _traced(value: Any) -> str:
    """Where a tensor comes from that stands for others, or whose values a trace would take for constants."""
    torch: Any = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return "that torch.compile or torch.export traces"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "inside of torch.vmap, torch.func.grad or their like"
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(value, fake.FakeTensor):
        return "that torch.compile, torch.export or a FakeTensorMode made"
    return "while torch.jit.trace records" if torch.jit.is_tracing() else ""


def _asks_for_gradients(value: Any) -> str:
    """What would be lost without a word: a gradient to come, or a tangent of forward-mode differentiation."""
    torch: Any = sys.modules["torch"]
    if value.requires_grad and torch.is_grad_enabled():
        return "that requires grad"
    return "with a tangent" if has_tangent(value) else ""


def has_tangent(value: Any) -> bool:
    """Whether a tensor carries a tangent of forward-mode differentiation."""
    return sys.modules["torch"].autograd.forward_ad.unpack_dual(value).tangent is not None


def wrap(memory: Any, like: Any) -> Any:
    """A tensor on an array's memory. Back ends of other devices give tensors, which PyTorch's allocator has made."""
    torch: Any = sys.modules["torch"]
    if isinstance(memory, torch.Tensor):
        return memory
    if memory.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(memory)


def written(value: Any) -> None:
    """Let PyTorch know: its autograd refuses what it had saved of the old values."""
    if not value.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(value)


def count_change(value: Any) -> None:
    """`written` of one that is known to be no inference tensor."""
    _functions[5](value)


def context(value: Any) -> int:
    """On the host, PyTorch's own threads: those of another team would wait for the CPUs on which PyTorch's spin. On a
    CUDA device, the stream that is current there.
    """
    return HOST_TEAM if value.is_cpu else stream(value.get_device())


def stream(index: int) -> int:
    """The current stream of a CUDA device."""
    found: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(index)
    return found
