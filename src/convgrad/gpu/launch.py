"""A plan, ready to be run: its kernels compiled and loaded for a device, launched on the stream of each call.

Triton's own way to launch takes tens of microseconds. A call here hands tuples of arguments straight to what Triton
compiled to launch each kernel; they are made once for addresses, and kept.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from ..errors import CompileError, OutOfMemoryError
from .compile import ALIGNED, build
from .plan.records import Descriptor, Launch, Plan, offsets
from .target import Target

PLACES = ("x", "w", "y", "bias")
"""The tensors of a problem, in the order in which `Executable` has their addresses."""

KEPT = 32  # calls with other addresses that an executable remembers
DIRECT = "3.6."  # the version of Triton whose launchers are known

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A launch, and all that it is given."""

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
                run(*given)
        except RuntimeError as error:
            raise CompileError(f"{ready.plan.kernel} was not launched on {self.target.name}: {error}") from error
        finally:
            # Later memory of the same stream may lie here: what is launched after this comes after it on the device.
            if workspace:
                self._free(workspace)

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
        calls = [kernel.call(places, stream) for kernel in ready.kernels]
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


class Kernel:
    """A launch whose kernel is on a device."""

    def __init__(self, launch: Launch, target: Target, index: int, aligned: bool) -> None:
        self.launch = launch
        self.numbers = tuple(value for _, value in (*launch.values, *launch.constants))
        kernel = load(launch, target, index, aligned)
        grid = (launch.programs, 1, 1)
        # What the compiler made of each descriptor.
        metas = getattr(kernel.metadata, "tensordesc_meta", None) if launch.descriptors else None
        self.metas = tuple(metas or (None,) * len(launch.descriptors))
        try:
            # Code is put on the device here, by either.
            self.direct = _launcher(kernel)
            self.slow = kernel[grid] if self.direct is None else None
        except Exception as error:  # Triton's, which have no root in common
            raise CompileError(f"the GPU kernel {launch.kernel} was not loaded on {target.name}: {error}") from error
        if self.direct is not None:
            run = kernel.run
            modes = (run.launch_cooperative_grid, run.launch_pdl)
            self.before = grid
            # No memory of Triton's own; the kernel's warps and shared memory; no hooks of profilers.
            self.after = (kernel.function, *modes, None, None, kernel.packed_metadata, None, None, None)

    def call(self, places: Mapping[str, int], stream: int) -> Call:
        """What launches it on a stream, with tensors and areas at such addresses."""
        pointers = [places[role] for role, _ in self.launch.tensors]
        views = [_View(descriptor, places[descriptor.tensor]) for descriptor in self.launch.descriptors]
        if self.slow is not None:
            if any(descriptor.steps for descriptor in self.launch.descriptors):
                raise CompileError(f"{self.launch.kernel} takes every few elements, which Triton's launcher cannot")
            return partial(self.slow, stream=stream), (*views, *pointers, *self.numbers)
        assert self.direct is not None
        maps = [part for view, meta in zip(views, self.metas, strict=True) for part in _encoded(view, meta)]
        return self.direct, (*self.before, stream, *self.after, *maps, *pointers, *self.numbers)


class _View:
    """A descriptor with its memory, as Triton reads it: as a tensor that is its own base."""

    def __init__(self, descriptor: Descriptor, address: int) -> None:
        from ..dtypes import DTYPES

        item = DTYPES[descriptor.dtype].size
        self.base, self.padding = self, "zero"
        self.shape, self.strides, self.steps = descriptor.shape, descriptor.strides, descriptor.steps
        self.address = address + item * descriptor.offset
        steps = [self.address, *(item * stride for stride in self.strides[:-1])]
        assert self.strides[-1] == 1, descriptor
        assert not any(step % ALIGNED for step in steps), descriptor
        assert min(self.shape) > 0, descriptor

    def data_ptr(self) -> int:
        """Its address."""
        return self.address


def _encoded(view: _View, meta: Any) -> list[Any]:
    """What a kernel is given for a descriptor: a map of the tensor, its shape and its strides."""
    driver = import_module("triton.backends.nvidia.driver")
    found = list(driver.make_tensordesc_arg(view, meta))
    if view.steps:
        _encode_steps(found[0], view, meta, driver.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]])
    return found


def _encode_steps(tensor_map: Any, view: _View, meta: Any, kind: int) -> None:
    """Write a map again, with steps, which Triton has no word for: what it made holds the map 128 bytes on."""

    def many(kind: Any, values: Sequence[int]) -> Any:
        return (kind * len(values))(*reversed(values))

    sizes, steps, item = view.shape, view.steps, meta["elem_size"]
    box = [side * step for side, step in zip(meta["block_size"], steps, strict=True)]
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    error = encode(
        ctypes.c_void_p(id(tensor_map) + 128),
        kind,
        ctypes.c_uint32(len(sizes)),
        ctypes.c_void_p(view.address),
        many(ctypes.c_uint64, sizes),
        many(ctypes.c_uint64, [item * stride for stride in view.strides[:-1]]),
        many(ctypes.c_uint32, box),
        many(ctypes.c_uint32, steps),
        0,  # channels are not interleaved
        meta["swizzle"],
        2,  # fetch 128 bytes into the second cache
        0,  # zeros outside
    )
    if error:
        raise RuntimeError(f"a tensor of shape {sizes} and strides {view.strides} has no map: CUDA error {error}")


def _launcher(kernel: Any) -> Callable[..., Any] | None:
    """What Triton compiled to launch a kernel; None where it is not known, or does more than that."""
    import triton

    run = kernel.run
    if not triton.__version__.startswith(DIRECT) or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch: Callable[..., Any] = run.launch
    code = getattr(launch, "__code__", None)
    if code is None:  # written in C
        return launch
    # With descriptors, a function encodes them in each call; what it calls then is what is looked for.
    cells = dict(zip(code.co_freevars, launch.__closure__ or (), strict=True))
    return cells["launcher"].cell_contents if "launcher" in cells else None


def load(launch: Launch, target: Target, index: int, aligned: bool) -> Any:
    """A compiled kernel on a device; problems that differ in their number of programs alone share one."""
    key = (replace(launch, programs=0), target.capability, index, aligned)
    kernel = _loaded.get(key)
    if kernel is None:
        try:
            kernel = _loaded[key] = build(launch, target, aligned)
        except Exception as error:  # Triton's compiler raises whatever its parts raise
            raise CompileError(f"the GPU kernel {launch.kernel} did not compile: {error}") from error
    return kernel
