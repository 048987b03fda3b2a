"""NumPy's arrays, which are also what the host's back ends compute on."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from .. import host
from ..backend import Tensor
from ..dtypes import Array
from ..spec.check import broken

name = "numpy"


def owns(value: Any) -> bool:
    """Whether a value is an array, of a subclass too."""
    return isinstance(value, np.ndarray)


def keyed() -> tuple[type, ...]:
    """The plain array: subclasses may mean more than their memory says."""
    return (np.ndarray,)


def look(value: Array) -> tuple[Hashable, int]:
    """What binding looks at, and the address."""
    return (value.shape, value.strides, value.dtype), host.address(value)


def is_writable(value: Array) -> bool:
    """Whether the owner allows it."""
    return value.flags.writeable


def open(value: Array, name: str) -> Tensor:
    """The tensor of an array."""
    if type(value) is not np.ndarray and _is_masked(value):
        hint = "give its .data, which has none" if name == "out" else "give its .filled(0), or its .data"
        raise broken("input_array", name, "a masked array, whose mask would be lost", hint=hint)
    if not value.dtype.isnative:
        hint = "convert it with a.astype(a.dtype.newbyteorder('='))"
        raise broken("byte_order", name, value.dtype.str, hint=hint)
    return host.tensor(value, "" if value.flags.writeable else "a read-only array")


def _is_masked(value: Array) -> bool:
    """Whether an array has a mask; NumPy imports these when they are first used."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def wrap(memory: Array, like: Array) -> Array:
    """The array itself."""
    return memory


def written(value: Array) -> None:
    """NumPy keeps no account."""


def context(value: Array) -> int:
    """0: there is no stream on the host."""
    return 0
