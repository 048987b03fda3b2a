"""A plan, ready to be run: its kernels compiled and loaded for a device, launched on the stream of each call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import CompileError, OutOfMemoryError
from .compile import ALIGNED, build
from .plan.records import WORKSPACE, Launch, Plan
from .target import Target

PLACES = ("x", "w", "y", "bias", WORKSPACE)
"""The tensors of a launch, in the order in which `Executable` has their addresses."""

_loaded: dict[Any, Any] = {}  # kernels by what they were compiled from, and the device that they are on
_lock = threading.RLock()


class Executable:
    """A problem's plan on one device. No call waits for the device, or copies anything."""

    def __init__(self, plan: Plan, target: Target, index: int) -> None:
        self.plan, self.target, self.index = plan, target, index
        self._torch: Any = sys.modules["torch"]
        self._ready: dict[bool, list[tuple[Callable[..., None], tuple[int, ...], tuple[Any, ...]]]] = {}
        self._prepare(True)

    def __call__(self, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
        """Write the wanted tensor, on the stream `context`."""
        aligned = not (x | w | y | bias) % ALIGNED
        launches = self._ready.get(aligned)
        if launches is None:
            launches = self._prepare(aligned)
        cuda = self._torch.cuda
        workspace = self._allocate(context) if self.plan.workspace else 0
        places = (x, w, y, bias, workspace)
        try:
            with cuda.device(self.index):
                for run, picks, rest in launches:
                    run(*[places[pick] for pick in picks], *rest, stream=context)
        except RuntimeError as error:
            raise CompileError(f"{self.plan.kernel} was not launched on {self.target.name}: {error}") from error
        finally:
            # Later memory of the same stream may lie here: what is launched after this comes after it on the device.
            if workspace:
                cuda.caching_allocator_delete(workspace)

    def _allocate(self, stream: int) -> int:
        """Memory for parts of sums, from PyTorch's allocator."""
        cuda, size = self._torch.cuda, self.plan.workspace
        try:
            with cuda.device(self.index):
                return int(cuda.caching_allocator_alloc(size, self.index, stream))
        except cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(f"no memory for {size} bytes of sums on cuda {self.index}: {error}") from None

    def _prepare(self, aligned: bool) -> list[tuple[Callable[..., None], tuple[int, ...], tuple[Any, ...]]]:
        """The kernels, compiled and loaded, each with what it is given besides addresses."""
        found = []
        with _lock, self._torch.cuda.device(self.index):
            for launch in self.plan.launches:
                run = _loaded_for(launch, self.target, self.index, aligned)
                picks = tuple(PLACES.index(role) for role, _ in launch.tensors)
                found.append((run, picks, rest(launch)))
            self._ready[aligned] = found
        return found


def _loaded_for(launch: Launch, target: Target, index: int, aligned: bool) -> Callable[..., None]:
    """What launches a kernel with all its programs; this is where its code is put on the device."""
    kernel = load(launch, target, index, aligned)
    try:
        run: Callable[..., None] = kernel[(launch.programs, 1, 1)]
    except Exception as error:  # Triton's, which have no root in common
        raise CompileError(f"the GPU kernel {launch.kernel} was not loaded on {target.name}: {error}") from error
    return run


def rest(launch: Launch) -> tuple[Any, ...]:
    """The arguments of a kernel after its pointers; constants have a place, but no value is looked at."""
    return tuple(value for _, value in (*launch.values, *launch.constants))


def load(launch: Launch, target: Target, index: int, aligned: bool) -> Any:
    """A compiled kernel on a device; problems that differ in numbers alone share one."""
    shape = launch.tensors, launch.constants, launch.warps, launch.stages
    numbers = tuple((name, value) for name, value in launch.values)
    key = (launch.kernel, shape, numbers, target.capability, index, aligned)
    kernel = _loaded.get(key)
    if kernel is None:
        try:
            kernel = _loaded[key] = build(launch, target, aligned)
        except Exception as error:  # Triton's compiler raises whatever its parts raise
            raise CompileError(f"the GPU kernel {launch.kernel} did not compile: {error}") from error
    return kernel
