"""A plan, ready to be run: its kernels compiled and loaded for a device, launched on the stream of each call.

Triton's own way to launch takes tens of microseconds. A call here hands the driver what was laid out for its addresses
once, and kept. Where the parameters of Triton's kernels are not known, Triton launches them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..dtypes import DTYPES
from ..errors import CompileError, OutOfMemoryError
from . import driver, recall
from .compile import ALIGNED
from .plan.records import Descriptor, Launch, Plan, offsets
from .target import Target

PLACES = ("x", "w", "y", "bias")
"""The tensors of a problem, in the order in which `Executable` has their addresses."""

KEPT = 32  # calls with other addresses that an executable remembers

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A launch, and all that it is given; what it returns, if anything, is an error of the driver's."""

_loaded: dict[Any, Any] = {}  # kernels by what they were compiled from, and the device that they are on
_lock = threading.RLock()


class Ready(NamedTuple):
    """A plan with its kernels on a device."""

    plan: Plan
    kernels: tuple[Kernel, ...]
    offsets: Mapping[str, int]  # of areas
    workspace: int  # bytes
    calls: dict[tuple[int, ...], list[Call]]  # by addresses and stream


class Executable:
    """A problem's plan on one device. No call waits for the device, or copies anything.

    `anywhere` gives another plan for tensors that do not begin at multiples of 16 bytes; without it, it is the same.
    """

    def __init__(self, plan: Plan, target: Target, index: int, anywhere: Callable[[], Plan] | None = None) -> None:
        self.plan, self.target, self.index, self.anywhere = plan, target, index, anywhere
        self._torch: Any = sys.modules["torch"]
        cuda, inner = self._torch.cuda, getattr(self._torch, "_C", None)
        # What torch.cuda.caching_allocator_alloc and the others call, which take microseconds to set the device that is
        # set, or to see that PyTorch's own state is there: whoever has an address on the device has seen to that.
        self._raw = getattr(inner, "_cuda_cudaCachingAllocator_raw_alloc", None)
        self._free = getattr(inner, "_cuda_cudaCachingAllocator_raw_delete", cuda.caching_allocator_delete)
        self._device = getattr(inner, "_cuda_getDevice", cuda.current_device)
        self._ready: dict[bool, Ready] = {}
        self._prepare(True)

    def __call__(self, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
        """Write the wanted tensor, on the stream `context`."""
        if self._device() == self.index:
            self._run(x, w, y, bias, context)
        else:
            with self._torch.cuda.device(self.index):
                self._run(x, w, y, bias, context)

    def _run(self, x: int, w: int, y: int, bias: int, stream: int) -> None:
        aligned = not (x | w | y | bias) % ALIGNED
        ready = self._ready.get(aligned) or self._prepare(aligned)
        workspace = self._allocate(ready.workspace, stream) if ready.workspace else 0
        try:
            key = (x, w, y, bias, workspace, stream)
            calls = ready.calls.get(key) or self._remember(ready, key)
            for run, given in calls:
                if error := run(*given):
                    self._repeat(error, run, given)
        except RuntimeError as error:
            raise CompileError(f"{ready.plan.kernel} was not launched on {self.target.name}: {error}") from error
        finally:
            # Later memory of the same stream may lie here: what is launched after this comes after it on the device.
            if workspace:
                self._free(workspace)

    def _repeat(self, error: int, run: Callable[..., Any], given: tuple[Any, ...]) -> None:
        """Launch again, where it failed because this thread has not used the device yet."""
        if error == driver.NO_CONTEXT:
            driver.enter(self.index)
            error = run(*given)
        driver.check(error, "a launch")

    def _allocate(self, size: int, stream: int) -> int:
        """Memory for the areas of a plan, from PyTorch's allocator."""
        cuda = self._torch.cuda
        try:
            if self._raw is not None:
                return int(self._raw(size, stream))
            return int(cuda.caching_allocator_alloc(size, self.index, stream))
        except cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(f"no memory for {size} bytes of workspace on cuda {self.index}: {error}") from None

    def _remember(self, ready: Ready, key: tuple[int, ...]) -> list[Call]:
        """The launches of a call with such addresses."""
        *addresses, workspace, stream = key
        places = dict(zip(PLACES, addresses, strict=True))
        places |= {name: workspace + offset for name, offset in ready.offsets.items()}
        calls = [kernel.call(places, stream) for kernel in ready.kernels if kernel.launch.programs]
        with _lock:
            while len(ready.calls) >= KEPT:
                ready.calls.pop(next(iter(ready.calls)))
            ready.calls[key] = calls
        return calls

    def _prepare(self, aligned: bool) -> Ready:
        """The kernels, compiled and loaded."""
        with _lock, self._torch.cuda.device(self.index):
            plan = self.plan if aligned or self.anywhere is None else self.anywhere()
            kernels = tuple(Kernel(launch, self.target, self.index, aligned) for launch in plan.launches)
            found = self._ready[aligned] = Ready(plan, kernels, offsets(plan.areas), plan.workspace, {})
        return found


class Loaded(NamedTuple):
    """A kernel on a device: the driver's function."""

    function: int
    code: recall.Code


class Kernel:
    """A launch whose kernel is on a device."""

    def __init__(self, launch: Launch, target: Target, index: int, aligned: bool) -> None:
        self.launch = launch
        self.loaded = load(launch, target, index, aligned)
        self.by_triton: Any = None
        if isinstance(self.loaded, Loaded):
            return
        try:
            self.by_triton = self.loaded[(launch.programs, 1, 1)]  # puts code on the device
        except Exception as error:  # Triton's, which have no root in common
            raise CompileError(f"the GPU kernel {launch.kernel} was not loaded on {target.name}: {error}") from error

    def call(self, places: Mapping[str, int], stream: int) -> Call:
        """What launches it on a stream, with tensors and areas at such addresses."""
        launch = self.launch
        pointers = [places[role] for role, _ in launch.tensors]
        if self.by_triton is not None:
            if any(descriptor.steps for descriptor in launch.descriptors):
                raise CompileError(f"{launch.kernel} takes every few elements, which Triton's launcher cannot")
            views = [_View(descriptor, places[descriptor.tensor]) for descriptor in launch.descriptors]
            numbers = [value for _, value in (*launch.values, *launch.constants)]
            return partial(self.by_triton, stream=stream), (*views, *pointers, *numbers)
        function, code = self.loaded
        arguments: list[Any] = []
        for descriptor, made in zip(launch.descriptors, code.maps, strict=True):
            at = _begin(descriptor, places[descriptor.tensor])
            arguments += (driver.encode(descriptor, made, at), *descriptor.shape, *descriptor.strides)
        arguments += (*pointers, *_flat(value for _, value in launch.values))
        arguments += (0, 0)  # no memory of Triton's own, for programs and for profilers
        shape = driver.Shape(launch.programs, code.warps, code.shared, launch.early)
        return driver.launch(function, shape, stream, arguments)


def _flat(values: Iterator[Any]) -> Iterator[int]:
    """Numbers, and those in tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(iter(value))
        else:
            yield value


def _begin(descriptor: Descriptor, address: int) -> int:
    """Where a descriptor begins in a tensor at an address, which the copy engine must be able to reach."""
    item = DTYPES[descriptor.dtype].size
    begin = address + item * descriptor.offset
    assert descriptor.strides[-1] == 1, descriptor
    assert not any(step % ALIGNED for step in (begin, *(item * stride for stride in descriptor.strides[:-1]))), (
        descriptor
    )
    assert min(descriptor.shape) > 0, descriptor
    return begin


class _View:
    """A descriptor with its memory, as Triton reads it: as a tensor that is its own base."""

    def __init__(self, descriptor: Descriptor, address: int) -> None:
        self.base, self.padding = self, "zero"
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.address = _begin(descriptor, address)

    def data_ptr(self) -> int:
        """Its address."""
        return self.address


def load(launch: Launch, target: Target, index: int, aligned: bool) -> Loaded | Any:
    """A kernel on a device, or Triton's; problems that differ in their number of programs alone share one."""
    key = (replace(launch, programs=0), target.capability, index, aligned)
    found = _loaded.get(key)
    if found is None:
        try:
            found = recall.find(launch, target, aligned)
        except Exception as error:  # Triton's compiler raises whatever its parts raise
            raise CompileError(f"the GPU kernel {launch.kernel} did not compile: {error}") from error
        if isinstance(found, recall.Code):
            try:
                driver.enter(index)
                found = Loaded(driver.load(found.binary, found.name, found.shared), found)
            except (OSError, RuntimeError) as error:
                raise CompileError(
                    f"the GPU kernel {launch.kernel} was not loaded on {target.name}: {error}"
                ) from error
        _loaded[key] = found
    return found
