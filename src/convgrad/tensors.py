"""Arrays of any library become NumPy views on the same memory, and results go back to the caller's library."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np

from .dtypes import DTYPES, name_of
from .spec.bind import Description
from .spec.check import broken
from .spec.table import DTYPES as DOCUMENTED
from .spec.table import EXTENDED_DTYPES

Array = np.ndarray[Any, np.dtype[Any]]


def open_array(value: Any, name: str) -> Array:
    """A NumPy view of a tensor in CPU memory. No copy, whatever the strides."""
    if isinstance(value, np.ndarray):
        array: Array = value
    elif _is_torch(value):
        array = _open_torch(value, name)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        array = _open_dlpack(value, name)
    else:
        raise broken("input_array", name, type(value).__name__, hint="make one with numpy.asarray(..., numpy.float32)")
    if not array.dtype.isnative:
        hint = "convert it with a.astype(a.dtype.newbyteorder('='))"
        raise broken("byte_order", name, array.dtype.str, hint=hint)
    return array


def describe(array: Array, name: str) -> Description:
    """What `bind` needs to know of an array."""
    dtype = name_of(array.dtype)
    if dtype is None:
        raise broken("input_dtype", name, str(array.dtype), expected=", ".join((*DOCUMENTED, *EXTENDED_DTYPES)))
    size = array.itemsize
    return Description(dtype, array.shape, tuple(s // size for s in array.strides))


def whole_strides(array: Array) -> bool:
    """Whether every stride is a number of whole elements; fields of a structured array may lie otherwise."""
    return all(s % array.itemsize == 0 for s, n in zip(array.strides, array.shape, strict=True) if n > 1)


def open_shape(value: Any, name: str) -> tuple[int, ...]:
    """The value of a shape input: a list of whole numbers, or an integer array of any shape."""
    if not isinstance(value, np.ndarray) and (_is_torch(value) or hasattr(value, "__dlpack__")):
        value = open_array(value, name)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    if (array.dtype.kind not in "iu" and array.size) or array.ndim == 0:
        raise broken("shape_values", name, repr(value) if array.ndim == 0 else array.dtype)
    return tuple(int(v) for v in array.ravel())


def check_out(array: Array) -> None:
    """A result can be written into an array if every element has an address of its own."""
    if not array.flags.writeable:
        raise broken("out_writable", "out", "a read-only array")
    if _overlaps(array):
        raise broken("out_overlap", "out", f"strides {array.strides} for shape {array.shape}")


def new_array(shape: tuple[int, ...], dtype: str) -> Array:
    """An array for a result, its values not set."""
    try:
        return np.empty(shape, DTYPES[dtype].numpy)
    except (MemoryError, ValueError) as e:
        raise MemoryError(f"no memory for a result of shape {shape} in {dtype}") from e


def give_back(array: Array, like: Any) -> Any:
    """A result as a tensor of the library that `like` belongs to, on the same memory where that library can."""
    if isinstance(like, np.ndarray):
        return array
    root = type(like).__module__.partition(".")[0]
    library = sys.modules.get(root)
    if root == "torch":
        torch: Any = library
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if root.startswith("jax"):
        return sys.modules["jax"].numpy.asarray(array)
    namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else library
    if array.dtype != ml_dtypes.bfloat16 and hasattr(namespace, "from_dlpack"):
        return namespace.from_dlpack(array)  # type: ignore[union-attr]
    return array


def _is_torch(value: Any) -> bool:
    """Whether a value is a PyTorch tensor; PyTorch is never imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def _open_torch(tensor: Any, name: str) -> Array:
    torch: Any = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise broken("input_device", name, f"a tensor on {tensor.device}", hint="move it with .cpu()")
    if tensor.layout is not torch.strided:
        raise broken("input_array", name, f"a tensor of layout {tensor.layout}", hint="make it dense with .to_dense()")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    try:
        array: Array = tensor.numpy()
        return array
    except (TypeError, RuntimeError):
        raise broken("input_array", name, f"a tensor of {tensor.dtype}") from None


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor; the first member of a managed one."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


_CPU_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_DL_DTYPES = {  # (type code, bits) → element type
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (2, 64): np.dtype(np.float64),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (0, 32): np.dtype(np.int32),
    (0, 64): np.dtype(np.int64),
}


def _open_dlpack(value: Any, name: str) -> Array:
    """A view through DLPack. NumPy's own reader refuses bf16, so the capsule is read here and left unconsumed."""
    device = value.__dlpack_device__()
    if int(device[0]) not in _CPU_DEVICES:
        raise broken("input_device", name, f"a tensor on DLPack device {tuple(map(int, device))}")
    capsule = value.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    dtype = _DL_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise broken("input_array", name, f"a tensor of DLPack type {tensor.code}, {tensor.bits} bits")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    span = 1
    for size, stride in zip(shape, strides or _dense(shape, dtype.itemsize), strict=True):
        span = 0 if size == 0 or span == 0 else span + (size - 1) * (stride // dtype.itemsize)
    address = (tensor.data or 0) + tensor.offset
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address) if span else b""
    if span:
        memory.owner = (value, capsule)  # type: ignore[union-attr]
    return np.ndarray(shape, dtype, memory, strides=strides if span else None)


def _dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    return np.empty(shape, np.dtype((np.void, item))).strides if 0 not in shape else (0,) * len(shape)


def _overlaps(array: Array) -> bool:
    """Whether two elements of an array share an address."""
    axes = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if array.size == 0:
        return False
    reach = array.itemsize
    for step, size in axes:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False
    if axes[0][0] < array.itemsize:
        return True
    # Axes that interleave: compare all addresses. Rare, and only for arrays made by hand.
    places = np.zeros((), np.int64)
    for step, size in axes:
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * step)
    places = np.sort(places.ravel())
    return bool((np.diff(places) < array.itemsize).any())
