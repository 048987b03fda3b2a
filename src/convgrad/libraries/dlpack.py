"""Any library that speaks DLPack, on the host; and on CUDA devices, if PyTorch is there to read it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

from .. import host
from ..backend import Device, Tensor
from ..dtypes import Array
from ..errors import SpecError
from ..spec.check import DEVICES, broken
from ..tensors import other_dtype
from .torch import on_device, stream

name = "dlpack"

IMMUTABLE = {"tensorflow": "TensorFlow", "pyarrow": "Arrow"}


def owns(value: Any) -> bool:
    """Whether a value can be exported."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def keyed() -> tuple[type, ...]:
    """None: only opening a value tells what it is."""
    return ()


def look(value: Any) -> tuple[Hashable, int] | None:
    """None: it is opened at every call."""
    return None


def is_writable(value: Any) -> bool:
    """Known as it is opened."""
    return False


def open(value: Any, name: str) -> Tensor:
    """The tensor on the same memory, or on a copy that the library has made."""
    if _device(value, name)[0] in _CUDA_DEVICES and _pytorch_reaches_gpus():
        return _on_device(value, name)
    array, copied = _view(value, name)
    locked = _immutable(value)
    if not locked and (copied or not array.flags.writeable):
        locked = "one that is read-only, or can only be read as a copy"
    return host.tensor(array, locked, copied)


def _immutable(value: Any) -> str:
    """What a value is, if its library promises that it never changes; DLPack's flag for this is not set by all."""
    for root in (kind.__module__.partition(".")[0] for kind in type(value).__mro__):
        if root in IMMUTABLE:
            return f"an array of {IMMUTABLE[root]}, whose arrays are immutable"
    interface = getattr(value, "__array_interface__", None)
    data = interface.get("data") if isinstance(interface, dict) else None
    return "one that its owner calls read-only" if isinstance(data, tuple) and data[1:] == (True,) else ""


def _pytorch_reaches_gpus() -> bool:
    return find_spec("torch") is not None and bool(import_module("torch").cuda.is_available())


def _on_device(value: Any, name: str) -> Tensor:
    """A tensor in the memory of a CUDA device. PyTorch has its library wait until the current stream may read it."""
    try:
        plain = import_module("torch").from_dlpack(value)
    except _FAILURES as error:
        raise _failed(value, name, error) from None
    return on_device(plain, Device("cuda", plain.get_device()))._replace(locked=_immutable(value))


def wrap(memory: Any, like: Any) -> Any:
    """A tensor of the same library on the same memory, where the library can make one; else the array."""
    root = type(like).__module__.partition(".")[0]
    namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else sys.modules.get(root)
    if memory.dtype != ml_dtypes.bfloat16 and hasattr(namespace, "from_dlpack"):
        return namespace.from_dlpack(memory)  # type: ignore[union-attr]
    return memory


def written(value: Any) -> None:
    """DLPack keeps no account."""


def context(value: Any) -> int:
    """On a CUDA device, PyTorch's current stream, which the value was opened for; on the host there is none."""
    kind, index = map(int, value.__dlpack_device__())
    return stream(index) if kind in _CUDA_DEVICES else 0


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor; the first member of a managed one."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _DLVersioned(ctypes.Structure):
    """A managed tensor since DLPack 1.0, which can say that it must not be written to, or is a copy."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_CPU_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY, _COPIED = 1, 2
_KINDS = {0: "i", 1: "u", 2: "f"}  # DLPack's type code → NumPy's letter
_BFLOAT = 4


def _view(value: Any, name: str) -> tuple[Array, bool]:
    """A view through DLPack, and whether it is one of a copy. NumPy's own reader refuses bf16, so the capsule is read
    here and left unconsumed.
    """
    device = _device(value, name)
    if device[0] not in _CPU_DEVICES:
        raise broken("input_device", name, f"a tensor on DLPack device {device}", where=DEVICES)
    try:
        capsule = _capsule(value)
    except _FAILURES as error:
        raise _failed(value, name, error) from None
    tensor, flags = _read_capsule(capsule, name)
    bits = int(tensor.bits)
    letter = "u" if tensor.code == _BFLOAT and bits == 16 else _KINDS.get(tensor.code)
    if letter is None or tensor.lanes != 1 or bits not in (8, 16, 32, 64) or (letter, bits) == ("f", 8):
        got = f"DLPack type {tensor.code} of {bits} bits, {tensor.lanes} lanes"
        raise other_dtype(name, got)
    kind = np.dtype(ml_dtypes.bfloat16 if tensor.code == _BFLOAT else f"{letter}{bits // 8}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * kind.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    if tensor.data is None and 0 not in shape:
        raise broken("input_array", name, f"an object of type {type(value).__name__} without memory")
    address = (tensor.data or 0) + tensor.offset
    array = host.view(address, shape, strides, kind, (value, capsule), bool(flags & _READ_ONLY))
    return array, bool(flags & _COPIED)


_FAILURES = (BufferError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, AssertionError)
"""What libraries raise when a value cannot be exported."""


def _device(value: Any, name: str) -> tuple[int, ...]:
    """DLPack's kind of a value's device, and its number."""
    try:
        return tuple(map(int, value.__dlpack_device__()))
    except _FAILURES as error:
        raise _failed(value, name, error) from None


def _failed(value: Any, name: str, error: Exception) -> SpecError:
    """The error for a value that its library does not export."""
    deleted = getattr(value, "is_deleted", None)
    why = "that was deleted or donated" if callable(deleted) and deleted() else f"whose export fails: {error}"
    return broken("input_array", name, f"an object of type {type(value).__name__} {why}")


def _capsule(value: Any) -> object:
    """The newest capsule that a library hands out."""
    try:
        return value.__dlpack__(max_version=(1, 0))
    except TypeError:  # older libraries do not know the word
        return value.__dlpack__()


def _read_capsule(capsule: object, name: str) -> tuple[_DLTensor, int]:
    """The description in a capsule, and its flags."""
    valid, pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    if valid(capsule, b"dltensor_versioned"):
        address = pointer(capsule, b"dltensor_versioned")
        managed = ctypes.cast(address, ctypes.POINTER(_DLVersioned)).contents
        return managed.tensor, managed.flags
    if valid(capsule, b"dltensor"):
        return ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents, 0
    raise broken("input_array", name, f"a DLPack export of type {type(capsule).__name__} that is none")
