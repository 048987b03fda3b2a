"""The element types, by oneDNN's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array of any element type, which is what NumPy's own annotations leave out."""


@dataclass(frozen=True)
class DType:
    """One element type: its name, its NumPy type, the type that sums are kept in, and where it comes from."""

    name: str
    numpy: np.dtype[Any]
    accumulator: np.dtype[Any]
    digits: int  # of the mantissa, the hidden one included: integers up to 2**digits are exact
    extension: bool = False

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize


_f32, _f64 = np.dtype(np.float32), np.dtype(np.float64)

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", _f32, _f32, 24),
        DType("bf16", np.dtype(ml_dtypes.bfloat16), _f32, 8),
        DType("f16", np.dtype(np.float16), _f32, 11),
        DType("f64", _f64, _f64, 53, extension=True),
    )
}

_BY_NUMPY = {d.numpy: d.name for d in DTYPES.values()}


def name_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a NumPy element type, or None for one that no operation takes."""
    return _BY_NUMPY.get(dtype)
