"""Array libraries: each one a file, found by the values that a caller passes, and none ever imported here.

A new library is a module with the members of `convgrad.backend.Library`, and `register`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Library, Tensor
from ..dtypes import Array
from ..spec.check import broken, shown
from . import dlpack, jax, numpy, torch

LIBRARIES: list[Library] = [numpy, torch, jax, dlpack]
"""In the order in which they are asked; DLPack, which many libraries speak, comes last."""

KEYED: dict[type, Library] = dict.fromkeys(numpy.keyed(), numpy)
"""Libraries by the exact types that have come up so far and can be known again without being opened."""


def register(library: Library) -> None:
    """Add an array library; it is asked before all others."""
    LIBRARIES.insert(0, library)


def find(value: Any) -> Library | None:
    """The library that a value belongs to."""
    found = KEYED.get(type(value))
    if found is not None:
        return found
    for library in LIBRARIES:
        if library.owns(value):
            if type(value) in library.keyed():
                KEYED[type(value)] = library
            return library
    return None


def open_tensor(value: Any, name: str) -> Tensor:
    """A value of any library as a tensor on the same memory, whatever its strides. A few can only be read as copies."""
    library = find(value)
    if library is None:
        raise broken("input_array", name, f"an object of type {type(value).__name__}", hint=_as_array(value, name))
    return library.open(value, name)


def weight_of(value: Any, name: str) -> str:
    """A hint at the weights that a layer holds, such as a torch.nn.Module, if they are what is asked for."""
    asked = name.startswith(("weight", "filter"))
    return "pass its .weight" if asked and find(getattr(value, "weight", None)) is not None else ""


def _as_array(value: Any, name: str) -> str:
    """How to make an array of a value that is none, or to get at the one in it, if that is any use."""
    if name == "out":
        return "give an array to write to, or none to get a new one"
    if isinstance(value, list):
        return "make one with numpy.asarray(..., numpy.float32)"
    if isinstance(value, memoryview) or hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return "make one with numpy.asarray"
    return weight_of(value, name)


def open_array(value: Any, name: str) -> Array:
    """A NumPy view of a tensor in the memory of the host."""
    return on_host(open_tensor(value, name), name)


def on_host(tensor: Tensor, name: str) -> Array:
    """The NumPy view of a tensor; one on another device has none."""
    if not isinstance(tensor.memory, np.ndarray):
        raise broken("input_device", name, f"a tensor on {tensor.device}", where="CPU memory")
    return tensor.memory


def open_shape(value: Any, name: str) -> tuple[int, ...]:
    """The value of a shape input: a list of whole numbers, or an integer array of any shape."""
    if type(value) is tuple and all(type(v) is int for v in value):
        return value
    if not isinstance(value, (np.ndarray, tuple, list)) and find(value) is not None:
        value = open_array(value, name)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    if (array.dtype.kind not in "iu" and array.size) or array.ndim == 0:
        for size in value if isinstance(value, (list, tuple)) else ():
            library = find(size)
            if library is not None:  # which may say better why a size has no value, such as one of a trace
                library.open(size, name)
        is_array = isinstance(value, np.ndarray)
        got = f"an array of {array.dtype} of shape {array.shape}" if is_array else shown(value)
        raise broken("shape_values", name, got, hint="give its shape, not the array" if array.ndim > 2 else "")
    return tuple(int(v) for v in array.ravel())
