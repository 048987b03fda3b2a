"""Tensors in the memory of this machine, through NumPy: what all back ends of the CPU share."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from . import memory
from .backend import Tensor
from .dtypes import DTYPES, Array, name_of
from .errors import OutOfMemoryError
from .spec.problem import Ints


class _Interface(ctypes.Structure):
    """NumPy's array interface as C code sees it."""

    _fields_ = [
        ("two", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("kind", ctypes.c_char),
        ("item", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("descr", ctypes.c_void_p),
    ]


_pointer = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_word = ctypes.c_size_t.from_address
_DATA = _Interface.data.offset


def address(array: Array) -> int:
    """The address of the first element. Each call asks for three, and this takes half as long as the other ways."""
    interface = array.__array_struct__
    return _word(_pointer(interface, None) + _DATA).value


def tensor(array: Array, locked: str = "", copied: bool = False) -> Tensor:
    """A NumPy array as a tensor; one that is locked is locked for NumPy, too."""
    if type(array) is not np.ndarray or locked:
        array = array.view(np.ndarray)
        array.flags.writeable = not locked
    dtype = name_of(array.dtype) or str(array.dtype)
    return Tensor(array, address(array), array.shape, array.strides, dtype, locked=locked, copied=copied)


def tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """NumPy arrays as tensors, by the same names."""
    return {name: tensor(array) for name, array in arrays.items()}


def empty(shape: Ints, dtype: str, strides: Ints | None = None, like: Any = None) -> tuple[Array, int]:
    """An array for a result, its values not set, and its address.

    A large one begins at a cache line, because stores across cache lines are slow.
    """
    kind = DTYPES[dtype].numpy
    size = prod(shape) * kind.itemsize
    try:
        if size < 4096:
            array: Array = np.ndarray(shape, kind, None, 0, strides)
            return array, address(array)
        block, start, at = memory.lend(size)
        return np.ndarray(shape, kind, block, start, strides), at
    except (MemoryError, ValueError):
        raise OutOfMemoryError(f"no memory for a result of shape {shape} in {dtype}, {memory.in_units(size)}") from None


def duplicate(original: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides."""
    low, high = original.bounds
    try:
        block: Array = np.empty(high - low, np.uint8)
    except (MemoryError, ValueError):
        what = f"a copy of shape {original.shape} in {original.dtype}, {memory.in_units(high - low)}"
        raise OutOfMemoryError(f"no memory for {what}") from None
    array: Array = np.ndarray(original.shape, original.memory.dtype, block, original.address - low, original.strides)
    array[...] = original.memory
    return tensor(array)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy values between tensors of one shape."""
    target.memory[...] = source.memory


class _Memory:
    """Memory of another library, in the form that NumPy looks at it; it lives as long as an array on it does."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def view(at: int, shape: Ints, strides: Ints | None, kind: np.dtype[Any], owner: object, locked: bool) -> Array:
    """An array on memory that `owner` keeps. Strides are in bytes; None is the order of the shape."""
    if 0 in shape:
        return np.empty(shape, kind)
    plain = kind if kind.kind in "biuf" else np.dtype(f"u{kind.itemsize}")  # bf16 has no name in the interface
    interface = {
        "data": (at, locked),
        "shape": shape,
        "strides": strides,
        "typestr": plain.str,
        "version": 3,
    }
    return np.asarray(_Memory(owner, interface)).view(kind)
