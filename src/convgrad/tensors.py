"""Arrays of any library become NumPy views on the same memory, and results go back to the caller's library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from . import memory
from .dtypes import DTYPES, Array, name_of
from .errors import OutOfMemoryError, SpecError
from .spec.bind import Description
from .spec.check import broken, shown
from .spec.table import DTYPES as DOCUMENTED
from .spec.table import EXTENDED_DTYPES


def open_array(value: Any, name: str, *, copies: bool = True) -> Array:
    """A NumPy view of a tensor in CPU memory, whatever the strides.

    A few tensors can only be read as copies (PyTorch's with a pending sign, say): those are read-only, or refused
    without `copies`. Read-only is also the view of a tensor that its library calls immutable.
    """
    copied = False
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and _is_masked(value):
            hint = "give its .data, which has none" if name == "out" else "give its .filled(0), or its .data"
            raise broken("input_array", name, "a masked array, whose mask would be lost", hint=hint)
        array: Array = value
    elif _is_torch(value):
        array, copied = _open_torch(value, name)
    elif _is_traced_by_jax(value):
        raise _traced_by_jax(value, name)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        array, copied = _open_dlpack(value, name)
    else:
        raise broken("input_array", name, f"an object of type {type(value).__name__}", hint=_as_array(value, name))
    if not array.dtype.isnative:
        hint = "convert it with a.astype(a.dtype.newbyteorder('='))"
        raise broken("byte_order", name, array.dtype.str, hint=hint)
    if copied and not copies:
        raise broken("input_array", name, "one that can only be read as a copy", hint="give a plain one")
    if copied or _immutable(value):
        array.flags.writeable = False
    return array


def _is_masked(value: Any) -> bool:
    """Whether an array has a mask; NumPy imports these when they are first used."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def _as_array(value: Any, name: str) -> str:
    """How to make an array of a value that is none, if that is any use."""
    if name == "out":
        return "give an array to write to, or none to get a new one"
    if isinstance(value, list):
        return "make one with numpy.asarray(..., numpy.float32)"
    if isinstance(value, memoryview) or hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return "make one with numpy.asarray"
    return ""


def describe(array: Array, name: str) -> Description:
    """What `bind` needs to know of an array."""
    dtype = name_of(array.dtype)
    if dtype is None:
        raise _other_dtype(name, str(array.dtype))
    size = array.itemsize
    return Description(dtype, array.shape, tuple(s // size for s in array.strides))


def _other_dtype(name: str, got: str) -> SpecError:
    """The error for an element type that no operation takes."""
    expected = ", ".join((*DOCUMENTED, *EXTENDED_DTYPES))
    hint = "" if name == "out" else "convert it to one of them"
    return broken("input_dtype", name, got, expected=expected, hint=hint)


def whole_strides(array: Array) -> bool:
    """Whether every stride is a number of whole elements; fields of a structured array may lie otherwise."""
    return all(s % array.itemsize == 0 for s, n in zip(array.strides, array.shape, strict=True) if n > 1)


def open_shape(value: Any, name: str) -> tuple[int, ...]:
    """The value of a shape input: a list of whole numbers, or an integer array of any shape."""
    if type(value) is tuple and all(type(v) is int for v in value):
        return value
    if not isinstance(value, np.ndarray) and (_is_torch(value) or hasattr(value, "__dlpack__")):
        value = open_array(value, name)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    if (array.dtype.kind not in "iu" and array.size) or array.ndim == 0:
        for size in value if isinstance(value, (list, tuple)) else ():
            if _is_traced_by_jax(size):
                raise _traced_by_jax(size, name)
        is_array = isinstance(value, np.ndarray)
        got = f"an array of {array.dtype} of shape {array.shape}" if is_array else shown(value)
        raise broken("shape_values", name, got, hint="give its shape, not the array" if array.ndim > 2 else "")
    return tuple(int(v) for v in array.ravel())


def check_writable(array: Array, owner: Any) -> None:
    """Results are not written into the memory of somebody who does not want that."""
    if not array.flags.writeable:
        read_only = "a read-only array" if isinstance(owner, np.ndarray) else ""
        got = _immutable(owner) or read_only or "one that is read-only, or can only be read as a copy"
        raise broken("out_writable", "out", got, hint="give a writable array, or none to get a new one")


def check_out(array: Array, owner: Any) -> None:
    """A result can be written into an array if its owner lets us, and every element has an address of its own."""
    check_writable(array, owner)
    if overlaps(array.shape, array.strides, array.itemsize):
        raise broken("out_overlap", "out", f"strides {array.strides} for shape {array.shape}")


def tell_owner(out: Any) -> None:
    """Let PyTorch know that a tensor was written to: its autograd refuses what it had saved of the old values."""
    if _is_torch(out) and not out.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(out)


_IMMUTABLE = {"jax": "JAX", "jaxlib": "JAX", "tensorflow": "TensorFlow", "pyarrow": "Arrow"}


def _immutable(value: Any) -> str:
    """What a value is, if its library promises that it never changes; else nothing.

    DLPack's flag for this is not set by all of them, and NumPy's own arrays carry theirs.
    """
    if isinstance(value, np.ndarray):
        return ""
    if _is_torch(value):
        torch: Any = sys.modules["torch"]
        locked = value.is_inference() and not torch.is_inference_mode_enabled()
        return "a tensor made under torch.inference_mode, which nothing outside of it may change" if locked else ""
    for root in _roots(value):
        if root in _IMMUTABLE:
            return f"an array of {_IMMUTABLE[root]}, whose arrays are immutable"
    interface = getattr(value, "__array_interface__", None)
    data = interface.get("data") if isinstance(interface, dict) else None
    return "one that its owner calls read-only" if isinstance(data, tuple) and data[1:] == (True,) else ""


def _roots(value: Any) -> list[str]:
    """The packages that the classes of a value come from."""
    return [kind.__module__.partition(".")[0] for kind in type(value).__mro__]


def _is_traced_by_jax(value: Any) -> bool:
    """Whether a value stands for an array inside of jit, grad, vmap and the like; JAX is never imported to find out."""
    jax = sys.modules.get("jax")
    return jax is not None and hasattr(jax, "core") and isinstance(value, jax.core.Tracer)


def _traced_by_jax(value: Any, name: str) -> SpecError:
    """The error for a value of a trace."""
    hint = "call convgrad outside of jit, grad and vmap, or through jax.pure_callback"
    return broken("input_traced", name, f"a JAX {type(value).__name__}", hint=hint)


def new_array(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> tuple[Array, int]:
    """An array for a result, its values not set, and its address. A large one begins at a cache line.

    `strides` are in bytes, of an order of axes without gaps; None is the order of the shape. Stores across cache lines
    are slow.
    """
    kind = DTYPES[dtype].numpy
    size = prod(shape) * kind.itemsize
    try:
        if size < 4096:
            array: Array = np.ndarray(shape, kind, None, 0, strides)
            return array, array.__array_interface__["data"][0]
        block, start, address = memory.lend(size)
        return np.ndarray(shape, kind, block, start, strides), address
    except (MemoryError, ValueError):
        raise OutOfMemoryError(f"no memory for a result of shape {shape} in {dtype}") from None


def give_back(array: Array, like: Any) -> Any:
    """A result as a tensor of the library that `like` belongs to, on the same memory where that library can."""
    if isinstance(like, np.ndarray):
        return array
    root = type(like).__module__.partition(".")[0]
    if _is_torch(like):
        torch: Any = sys.modules["torch"]
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if root.startswith("jax"):
        return sys.modules["jax"].numpy.asarray(array)
    namespace = like.__array_namespace__() if hasattr(like, "__array_namespace__") else sys.modules.get(root)
    if array.dtype != ml_dtypes.bfloat16 and hasattr(namespace, "from_dlpack"):
        return namespace.from_dlpack(array)  # type: ignore[union-attr]
    return array


def _is_torch(value: Any) -> bool:
    """Whether a value is a PyTorch tensor; PyTorch is never imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def _open_torch(tensor: Any, name: str) -> tuple[Array, bool]:
    """A view of a tensor, and whether it is one of a copy."""
    torch: Any = sys.modules["torch"]
    if tensor.device.type != "cpu":
        hint = "move it with .cpu()" if tensor.device.type != "meta" else "a meta tensor has no values; make a real one"
        raise broken("input_device", name, f"a tensor on {tensor.device}", hint=hint)
    if tensor.is_nested or tensor.is_quantized:
        kind, way = ("nested", "torch.nested.to_padded_tensor") if tensor.is_nested else ("quantized", ".dequantize()")
        raise broken("input_array", name, f"a {kind} tensor", hint=f"make a plain one with {way}")
    if tensor.layout is not torch.strided:
        raise broken("input_array", name, f"a tensor of layout {tensor.layout}", hint="make it dense with .to_dense()")
    if traced := _traced_by_torch(tensor):
        hint = "call convgrad outside of it, on plain tensors"
        raise broken("input_traced", name, f"a {type(tensor).__name__} {traced}", hint=hint)
    if asks := _asks_for_gradients(tensor):
        hint = "give its .detach(), or call under torch.no_grad()"
        raise broken("input_grad", name, f"a {type(tensor).__name__} {asks}", hint=hint)
    try:
        copied = tensor.is_neg() or tensor.is_conj()
        tensor = tensor.detach()
        if copied:
            tensor = tensor.resolve_conj().resolve_neg()
        array: Array
        if tensor.dtype is torch.bfloat16:
            array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = tensor.numpy()
    except (TypeError, RuntimeError, ValueError):
        # Types that NumPy has no name for, and subclasses without memory of their own, or not yet.
        raise broken("input_array", name, f"a {type(tensor).__name__} of {tensor.dtype}") from None
    if array.size and not tensor.data_ptr():
        raise broken("input_array", name, f"a {type(tensor).__name__} whose memory was given back")
    return array, copied


def _traced_by_torch(tensor: Any) -> str:
    """Where a tensor comes from that stands for others, or whose values a trace would take for constants."""
    torch: Any = sys.modules["torch"]
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside of torch.vmap, torch.func.grad or their like"
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return "that torch.compile, torch.export or a FakeTensorMode made"
    return "while torch.jit.trace records" if torch.jit.is_tracing() else ""


def _asks_for_gradients(tensor: Any) -> str:
    """What would be lost without a word: a gradient to come, or a tangent of forward-mode differentiation."""
    torch: Any = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        return "that requires grad"
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(tensor).tangent is not None:
        return "with a tangent"
    return ""


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


class _Memory:
    """Memory of another library, in the form that NumPy looks at it; it lives as long as an array on it does."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


_CPU_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_READ_ONLY, _COPIED = 1, 2
_KINDS = {0: "i", 1: "u", 2: "f"}  # DLPack's type code → NumPy's letter
_BFLOAT = 4


def _open_dlpack(value: Any, name: str) -> tuple[Array, bool]:
    """A view through DLPack, and whether it is one of a copy. NumPy's own reader refuses bf16, so the capsule is read
    here and left unconsumed.
    """
    try:
        device = tuple(map(int, value.__dlpack_device__()))
        if device[0] in _CPU_DEVICES:
            capsule = _capsule(value)
    except (BufferError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        deleted = getattr(value, "is_deleted", None)
        why = "that was deleted or donated" if callable(deleted) and deleted() else f"whose export fails: {error}"
        raise broken("input_array", name, f"an object of type {type(value).__name__} {why}") from None
    if device[0] not in _CPU_DEVICES:
        raise broken("input_device", name, f"a tensor on DLPack device {device}")
    tensor, flags = _read_capsule(capsule, name)
    bits = int(tensor.bits)
    letter = "u" if tensor.code == _BFLOAT and bits == 16 else _KINDS.get(tensor.code)
    if letter is None or tensor.lanes != 1 or bits not in (8, 16, 32, 64) or (letter, bits) == ("f", 8):
        got = f"DLPack type {tensor.code} of {bits} bits, {tensor.lanes} lanes"
        raise _other_dtype(name, got)
    stored = np.dtype(f"{letter}{bits // 8}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if 0 in shape:
        array = np.empty(shape, stored)
    elif tensor.data is None:
        raise broken("input_array", name, f"an object of type {type(value).__name__} without memory")
    else:
        strides = tuple(tensor.strides[i] * stored.itemsize for i in range(tensor.ndim)) if tensor.strides else None
        interface = {
            "data": (tensor.data + tensor.offset, bool(flags & _READ_ONLY)),
            "shape": shape,
            "strides": strides,
            "typestr": stored.str,
            "version": 3,
        }
        array = np.asarray(_Memory((value, capsule), interface))
    return array.view(ml_dtypes.bfloat16) if tensor.code == _BFLOAT else array, bool(flags & _COPIED)


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


def overlaps(shape: Sequence[int], strides: Sequence[int], item: int = 1, most: int | None = None) -> bool:
    """Whether two elements of a tensor share an address; `item` is an element's size in the unit of the strides.

    Axes that interleave count as sharing if the tensor has more than `most` elements to look at.
    """
    axes = sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1)
    if 0 in shape:
        return False
    reach = item
    for step, size in axes:
        if step < reach:
            break
        reach += step * (size - 1)
    else:
        return False
    if axes[0][0] < item or (most is not None and prod(shape) > most):
        return True
    # Axes that interleave: compare all addresses. Rare, and only for arrays made by hand.
    places: Array = np.zeros(1, np.int64)
    for step, size in axes:
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * step).ravel()
    places = np.sort(places)
    return bool((np.diff(places) < item).any())
