"""The front door of the GPU engine, as a back end for CUDA devices.

Triton and the planner are imported when a problem is new; PyTorch, whose memory and streams are used, when there is a
tensor on such a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..backend import Device, Executable, Refusal, Tensor
from ..dtypes import DTYPES
from ..errors import OutOfMemoryError
from ..precision import get_float32_precision, in_force
from ..spec.problem import Ints, Problem, dense_strides

if TYPE_CHECKING:
    from .plan.records import Plan
    from .target import Target

name = "gpu"
device = "cuda"

TORCH_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}


setting: Callable[[], Hashable] = get_float32_precision  # without a step between: each call asks


def load(problem: Problem, device: Device) -> Executable | Refusal:
    """The kernels for a problem, compiled and loaded."""
    if reason := hindrance(device):
        return Refusal(name, reason)
    target = machine(device)
    precision = in_force()
    from . import recall
    from .launch import Executable

    def planned(aligned: bool) -> Plan | Refusal:
        def make() -> Plan | Refusal:
            return _plan(problem, target, precision, aligned)

        return recall.plan(problem, target, (precision, aligned), make)

    def anywhere() -> Plan:
        """The plan for tensors that begin anywhere: the last level asks nothing of them."""
        plan = planned(aligned=False)
        assert not isinstance(plan, Refusal), plan
        return plan

    found = planned(aligned=True)
    return found if isinstance(found, Refusal) else Executable(found, target, device.index, anywhere)


def plan(problem: Problem, device: Device) -> Plan | Refusal:
    """The plan for a problem on a device, or for the kind of GPU that CONVGRAD_GPU_TARGET names."""
    if kind := os.environ.get("CONVGRAD_GPU_TARGET", ""):
        from .target import of_kind

        return _plan(problem, of_kind(kind), in_force())
    if reason := hindrance(device):
        return Refusal(name, reason)
    return _plan(problem, machine(device), in_force())


def _plan(problem: Problem, target: Target, precision: str, aligned: bool = True) -> Plan | Refusal:
    from .plan.registry import make_plan

    if problem.algorithm != "direct":
        return Refusal(name, f"no kernel computes it by the algorithm {problem.algorithm!r}", "another algorithm")
    found = make_plan(problem, target, precision, aligned)
    return Refusal(name, found) if isinstance(found, str) else found


def hindrance(device: Device) -> str:
    """What no kernel can do anything about."""
    missing = [library for library in ("torch", "triton") if not _is_installed(library)]
    if missing:
        named = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}"
        return f"{named} not installed; the extra `cuda` of convgrad has both"
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here"
    if device.index >= torch.cuda.device_count():
        return f"there is no CUDA device {device.index}"
    if torch.version.hip:
        return "it computes on NVIDIA's GPUs only"
    from .target import LEAST

    target = machine(device)
    if target.capability < LEAST:
        least, has = (f"{capability // 10}.{capability % 10}" for capability in (LEAST, target.capability))
        return f"Triton needs compute capability {least}, {target.name} has {has}"
    return ""


def machine(device: Device) -> Target:
    """The GPU that kernels are written for."""
    from . import target

    return target.current(device.index)


@lru_cache(maxsize=8)
def _is_installed(library: str) -> bool:
    return find_spec(library) is not None


def empty(shape: Ints, dtype: str, strides: Ints | None, like: Any) -> tuple[Any, int]:
    """A tensor of PyTorch on the device of `like`, its values not set, and its address."""
    torch: Any = import_module("torch")
    size = DTYPES[dtype].size
    steps = dense_strides(shape) if strides is None else tuple(step // size for step in strides)
    index = like.device.index if isinstance(like, torch.Tensor) else int(like.__dlpack_device__()[1])
    kind = getattr(torch, TORCH_NAMES[dtype])
    try:
        quick = quick_empty(index)
        if quick is not None:
            made = quick(shape, steps, kind)
        else:
            made = torch.empty_strided(shape, steps, dtype=kind, device=torch.device("cuda", index))
    except torch.cuda.OutOfMemoryError:
        raise OutOfMemoryError(f"no memory on cuda {index} for a result of shape {shape} in {dtype}") from None
    return made, made.data_ptr()


def quick_empty(index: int) -> Callable[..., Any] | None:
    """What Inductor's code makes tensors with, in a third of the time, on the current device; None if that is another.

    It takes shape, strides and element type.
    """
    make, current = _makers()
    return make if make is not None and current() == index else None


@lru_cache(maxsize=1)
def _makers() -> tuple[Any, Any]:
    """What makes tensors on the current device, and what tells which one that is; None where PyTorch has it not."""
    inner: Any = getattr(import_module("torch"), "_C", None)
    current = getattr(inner, "_cuda_getDevice", None)
    guards = getattr(getattr(inner, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda", None) if current is not None else None, current


def duplicate(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides; a tensor that spans gaps keeps them."""
    torch: Any = import_module("torch")
    low, high = tensor.bounds
    original = tensor.memory
    try:
        block = torch.empty((high - low) // tensor.item, dtype=original.dtype, device=original.device)
    except torch.cuda.OutOfMemoryError:
        raise OutOfMemoryError(f"no memory on {tensor.device} for a copy of shape {tensor.shape}") from None
    start = (tensor.address - low) // tensor.item
    memory = torch.as_strided(block, original.shape, original.stride(), start)
    memory.copy_(original)
    return tensor._replace(memory=memory, address=memory.data_ptr())


def copy(source: Tensor, target: Tensor) -> None:
    """Copy values between tensors of one shape, on the current stream."""
    target.memory.copy_(source.memory)
