"""PyTorch's tensors, on the host and on CUDA devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable
from typing import Any

import ml_dtypes
import numpy as np

from .. import host
from ..backend import Device, Tensor
from ..dtypes import Array
from ..host_team import HOST_TEAM, share_threads
from ..spec.check import broken

name = "torch"

DTYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
"""The element types that are computed, by PyTorch's names."""


def owns(value: Any) -> bool:
    """Whether a value is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def keyed() -> tuple[type, ...]:
    """Plain tensors and parameters: subclasses may have no memory of their own."""
    torch: Any = sys.modules["torch"]
    share_threads(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu"))
    known = hasattr(torch._C, "_dispatch_keys") and hasattr(torch._C.DispatchKeySet, "raw_repr")
    return (torch.Tensor, torch.nn.Parameter) if known else ()


def look(value: Any) -> tuple[Hashable, int] | None:
    """What binding looks at, and the address. PyTorch's dispatch keys tell everything else of a tensor: its device,
    whether it is sparse, nested or quantized, has a sign pending, or stands for others.
    """
    torch: Any = sys.modules["torch"]
    try:
        at = value.data_ptr()
        if not at or _asks_for_gradients(value) or torch._C._is_tracing():
            return None
        kind = torch._C._dispatch_keys(value).raw_repr()
        # Of several devices of a kind, the keys do not tell which.
        return (value.shape, value.stride(), value.dtype, kind, value.get_device()), at
    except (RuntimeError, ValueError):
        return None  # One without memory; `open` says why.


def is_writable(value: Any) -> bool:
    """Whether PyTorch allows it here."""
    return not value.is_inference() or sys.modules["torch"].is_inference_mode_enabled()


def open(value: Any, name: str) -> Tensor:
    """The tensor on the same memory, or on a copy where PyTorch has only noted a change of the values."""
    torch: Any = sys.modules["torch"]
    kind = type(value).__name__
    if value.device.type not in ("cpu", "cuda"):
        hint = "move it with .cpu()" if value.device.type != "meta" else "a meta tensor has no values; make a real one"
        raise broken("input_device", name, f"a tensor on {value.device}", hint=hint)
    if value.is_nested or value.is_quantized:
        what, way = ("nested", "torch.nested.to_padded_tensor") if value.is_nested else ("quantized", ".dequantize()")
        raise broken("input_array", name, f"a {what} tensor", hint=f"make a plain one with {way}")
    if value.layout is not torch.strided:
        raise broken("input_array", name, f"a tensor of layout {value.layout}", hint="make it dense with .to_dense()")
    if traced := _traced(value):
        raise broken("input_traced", name, f"a {kind} {traced}", hint="call convgrad outside of it, on plain tensors")
    if asks := _asks_for_gradients(value):
        hint = "give its .detach(), or call under torch.no_grad()"
        raise broken("input_grad", name, f"a {kind} {asks}", hint=hint)
    try:
        copied = value.is_neg() or value.is_conj()
        plain = value.detach()
        if copied:
            plain = plain.resolve_conj().resolve_neg()
        if plain.is_cuda:
            return on_device(plain, _locked(value, copied), copied)
        array: Array
        if plain.dtype is torch.bfloat16:
            array = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = plain.numpy()
    except (TypeError, RuntimeError, ValueError):
        # Types that NumPy has no name for, and subclasses without memory of their own, or not yet.
        raise broken("input_array", name, f"a {kind} of {value.dtype}") from None
    if array.size and not plain.data_ptr():
        raise broken("input_array", name, f"a {kind} whose memory was given back")
    return host.tensor(array, _locked(value, copied or not array.flags.writeable), copied)


def on_device(plain: Any, locked: str = "", copied: bool = False) -> Tensor:
    """A tensor of PyTorch on a CUDA device, which other libraries' memory is opened as, too."""
    size, dtype = plain.element_size(), str(plain.dtype).removeprefix("torch.")
    strides = tuple(step * size for step in plain.stride())
    where = Device("cuda", plain.device.index)
    return Tensor(
        plain, plain.data_ptr(), tuple(plain.shape), strides, DTYPE_NAMES.get(dtype, dtype), where, locked, copied
    )


def _locked(value: Any, is_fixed: bool) -> str:
    """What a tensor is, if nobody may write to it."""
    if not is_writable(value):
        return "a tensor made under torch.inference_mode, which nothing outside of it may change"
    return "one that is read-only, or can only be read as a copy" if is_fixed else ""


def _traced(value: Any) -> str:
    """Where a tensor comes from that stands for others, or whose values a trace would take for constants."""
    torch: Any = sys.modules["torch"]
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
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(value).tangent is not None:
        return "with a tangent"
    return ""


def wrap(memory: Any, like: Any) -> Any:
    """A tensor on the same memory; on a CUDA device, the memory is one."""
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


def context(value: Any) -> int:
    """On a CUDA device its current stream. On the host, PyTorch's own threads: those of another team would wait for the
    CPUs on which PyTorch's spin.
    """
    return stream(value.get_device()) if value.is_cuda else HOST_TEAM


def stream(index: int) -> int:
    """The current stream of a CUDA device."""
    return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)
