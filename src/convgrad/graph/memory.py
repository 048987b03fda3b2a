"""Engines, streams, and tensors: logical tensors with memory. And the question whether there is memory enough."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import OutOfMemoryError, UnsupportedError
from ..libraries import on_host, open_tensor
from ..memory import in_units
from ..spec.check import broken
from ..spec.problem import settle
from .kinds import NUMPY, EngineKind, PropertyType, refuse
from .logical import LogicalTensor

SMALL = 1 << 24
"""Bytes that are not worth asking the system about; if they are not there, the allocation itself fails."""


class Engine:
    """A device to compute on. There is one: the CPU of this machine."""

    def __init__(self, kind: str = "cpu", index: int = 0) -> None:
        self.kind = EngineKind.of(kind, "the kind of an engine")
        self.index = index
        if self.kind != "cpu" or index != 0:
            raise UnsupportedError(f"no engine {self.kind} {index} here: graphs compute on cpu 0")

    def get_kind(self) -> EngineKind:
        """The kind of the device."""
        return self.kind

    def __repr__(self) -> str:
        return f"Engine({str(self.kind)!r})"


class Stream:
    """An order of execution on an engine. What is executed is done when `execute` returns."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()

    def get_engine(self) -> Engine:
        """The engine that the stream belongs to."""
        return self.engine

    def wait(self) -> None:
        """Nothing is ever pending."""


class Tensor:
    """A logical tensor and its memory: an array of the same shape and strides, or a flat buffer that is large enough.

    Without `handle` memory is allocated, its values not set; a tensor whose shape is not known yet gets it from the
    execution that writes it.
    """

    def __init__(self, logical: LogicalTensor, engine: Engine | None = None, handle: Any = None) -> None:
        if not isinstance(logical, LogicalTensor):
            raise refuse("logical_tensor", "the description of a Tensor", type(logical).__name__)
        self.logical = logical
        self.engine = engine or Engine()
        self._handle: Any = None
        self._array: Array | None = None
        self._locked = ""
        if handle is not None:
            self.set_data_handle(handle)
        elif logical.strides is not None:
            self.set_data_handle(allocate(logical))

    @classmethod
    def make_scalar_tensor(cls, logical: LogicalTensor, value: Any) -> Tensor:
        """A scalar that lives with the caller; for a host_scalar only."""
        if logical.property_type != PropertyType.host_scalar:
            raise refuse("host_scalar", f"tensor {logical.id}", f"property_type={str(logical.property_type)!r}")
        return cls(logical, None, np.array(value, NUMPY[logical.dtype]))

    @property
    def array(self) -> Array:
        """The memory as an array of the tensor's shape and strides."""
        if self._array is None:
            raise refuse("handle_absent", f"tensor {self.logical.id}")
        return self._array

    def get_data_handle(self) -> Any:
        """What was given as memory, or the array that was allocated."""
        return self._handle

    def set_data_handle(self, handle: Any) -> None:
        """Put the tensor on other memory."""
        self._array, self._locked = view(self.logical, handle)
        self._handle = handle

    @property
    def locked(self) -> str:
        """What the memory is, if nobody may write to it."""
        return self._locked or ("" if self.array.flags.writeable else "a read-only array")

    def get_engine(self) -> Engine:
        """The engine that the memory belongs to."""
        return self.engine

    def get_logical_tensor(self) -> LogicalTensor:
        """The description."""
        return self.logical

    def settle(self, logical: LogicalTensor, array: Array) -> None:
        """Take the shape and the memory that an execution has found."""
        self.logical, self._array, self._handle, self._locked = logical, array, array, ""


def view(logical: LogicalTensor, handle: Any) -> tuple[Array, str]:
    """An array of a tensor's shape and strides on given memory, and what that is if nobody may write to it."""
    name = f"the memory of tensor {logical.id}"
    dtype = NUMPY.get(logical.dtype)
    if logical.strides is None or logical.shape is None or dtype is None:
        raise refuse("handle", name, expected=f"given later: {logical.tell()} has no known strides yet")
    opened = open_tensor(handle, name)
    if opened.copied:
        raise broken("input_array", name, "one that can only be read as a copy", hint="give a plain one")
    array = on_host(opened, name)
    steps = tuple(s * dtype.itemsize for s in logical.strides)
    if array.dtype == dtype and array.shape == logical.shape:
        if array.size and settle(array.shape, array.strides) != settle(logical.shape, steps):
            got = f"strides {tuple(s // array.itemsize for s in array.strides)}"
            raise refuse("handle", name, got, expected=f"an array of strides {logical.strides}, as described")
        return array, opened.locked
    flat = array.ndim == 1 and array.dtype in (dtype, np.uint8) and array.flags.c_contiguous
    bytes_needed = logical.span * dtype.itemsize
    if not flat or array.nbytes < bytes_needed:
        got = f"{array.dtype} of shape {array.shape}"
        expected = f"{logical.tell()}, or a flat buffer of at least {bytes_needed} bytes"
        raise refuse("handle", name, got, expected=expected)
    if array.ctypes.data % dtype.itemsize:
        raise refuse("handle", name, "another address", expected=f"aligned to {dtype.itemsize} bytes")
    whole = array[: bytes_needed // array.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(whole, logical.shape, steps), opened.locked


def allocate(logical: LogicalTensor) -> Array:
    """New memory for a tensor, as an array of its shape and strides."""
    dtype = NUMPY.get(logical.dtype)
    if dtype is None or logical.strides is None or logical.shape is None:
        raise refuse("handle", f"the memory of tensor {logical.id}", expected=f"given: {logical.tell()} has no size")
    span = logical.span
    require(span * dtype.itemsize, f"tensor {logical.id}, {logical.tell()}")
    try:
        buffer = np.empty(max(span, 1), dtype)
    except (MemoryError, ValueError):
        raise OutOfMemoryError(f"no memory for tensor {logical.id}, {logical.tell()}") from None
    return np.lib.stride_tricks.as_strided(buffer, logical.shape, tuple(s * dtype.itemsize for s in logical.strides))


def require(count: int, what: str) -> None:
    """Refuse what this machine has no memory for, before any of it is taken."""
    if count < SMALL:
        return
    free = available()
    if count > free:
        raise OutOfMemoryError(f"{what}: needs {in_units(count)} of memory, and {in_units(free)} are available")


def available() -> int:
    """Bytes of memory that can still be taken, by the system's account, that of a container, and the process limit."""
    limits = [sys.maxsize]
    for limit in (_system, _container, _process):
        with suppress(ImportError, AttributeError, OSError, ValueError):
            limits.append(limit())
    return max(0, min(limits))


def _system() -> int:
    if Path("/proc/meminfo").exists():
        return _field("/proc/meminfo", "MemAvailable:") * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container() -> int:
    group = Path("/sys/fs/cgroup")
    used = int((group / "memory.current").read_text()) - _field(str(group / "memory.stat"), "inactive_file")
    return int((group / "memory.max").read_text()) - used


def _process() -> int:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - _field("/proc/self/status", "VmSize:") * 1024


def _field(path: str, name: str) -> int:
    """A number from one of the system's accounts."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(name)
