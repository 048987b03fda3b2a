"""Logical tensors: what is known of a tensor before there is any memory for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from ..spec.check import S64, dtype_word, shown, values
from ..spec.problem import Ints, dense_strides
from ..spec.table import MAX_NDIMS
from .kinds import BITS, DataType, LayoutType, PropertyType, refuse

UNKNOWN_DIM = -(2**63)
"""A size that is not known yet. On input, any negative size means that."""

SIZE_MAX = 2**64 - 1
"""The memory size of a tensor whose layout or shape is not known; also the id of what has no id."""

IDS = range(SIZE_MAX + 1)
_SCALARS = (DataType.s32, DataType.f32, DataType.s64)


@dataclass(frozen=True, init=False)
class LogicalTensor:
    """Id, element type, shape and layout of a tensor. Immutable: to say more of it, make another with the same id.

    `dims` is a list of sizes, or just their number; -1, the default, leaves even that open. Without `strides` a
    strided tensor is dense, the last axis innermost.

    ::

        LogicalTensor(0, "f32", (8, 64, 56, 56))
        LogicalTensor(1, "f32", (64, 64, 3, 3), strides=(576, 1, 192, 64))
        LogicalTensor(2, "f32", 4, "any")
    """

    id: int
    dtype: DataType
    shape: Ints | None  # None: not even the number of dimensions is known
    strides: Ints | None
    layout_type: LayoutType
    property_type: PropertyType
    layout_id: int | None

    def __init__(
        self,
        id: int,
        dtype: str,
        dims: int | Sequence[int] = -1,
        layout_type: str = "strided",
        property_type: str = "undef",
        *,
        strides: Sequence[int] | None = None,
        layout_id: int | None = None,
    ) -> None:
        number = _whole(id)
        if number is None or number not in IDS:
            raise refuse("number", "the id of a tensor", repr(id), least=0, most="2**64 - 1")
        name = f"tensor {number}"
        if not isinstance(dtype, str) and isinstance(dtype_word(dims), str):
            raise refuse("exchanged", f"{name}: dtype", shown(dtype))
        kind = DataType.of(dtype, f"{name}: dtype")
        layout = LayoutType.of(layout_type, f"{name}: layout_type")
        known = PropertyType.of(property_type, f"{name}: property_type")
        shape = _shape(dims, name)
        if known == "host_scalar" and (shape != () or kind not in _SCALARS):
            raise refuse("host_scalar", name, f"{kind} of shape {shape}")
        if layout_id is not None or layout == "opaque":
            layout = LayoutType.opaque
            if strides is not None or layout_id is None:
                raise refuse("layout", f"{name}: layout_type='opaque'", expected="layout_id, and without strides")
        elif strides is not None and layout != "strided":
            raise refuse("layout", f"{name}: strides", f"'{layout}'", expected="layout_type='strided'")
        steps = None if strides is None else _strides(strides, shape, name)
        if layout == "strided" and steps is None and shape is not None and all(n >= 0 for n in shape):
            steps = dense_strides(shape)
        for field, value in (
            ("id", number),
            ("dtype", kind),
            ("shape", shape),
            ("strides", steps),
            ("layout_type", layout),
            ("property_type", known),
            ("layout_id", layout_id),
        ):
            object.__setattr__(self, field, value)

    @property
    def ndims(self) -> int:
        """The number of dimensions, or -1."""
        return -1 if self.shape is None else len(self.shape)

    @property
    def is_known(self) -> bool:
        """Whether every size is known."""
        return self.shape is not None and min(self.shape, default=0) >= 0

    def get_dims(self) -> Ints:
        """The sizes."""
        if self.shape is None:
            raise refuse("getter", f"the shape of tensor {self.id}", why="it has an unknown number of dimensions")
        return self.shape

    def get_strides(self) -> Ints:
        """The strides in elements."""
        if self.strides is None:
            why = f"its layout is {self.layout_type}" if self.layout_type != "strided" else "its shape is not known"
            raise refuse("getter", f"strides of tensor {self.id}", why=why)
        return self.strides

    def get_layout_id(self) -> int:
        """The number of an opaque layout."""
        if self.layout_id is None:
            raise refuse("getter", f"layout_id of tensor {self.id}", why=f"its layout is {self.layout_type}")
        return self.layout_id

    def get_mem_size(self) -> int:
        """Bytes of memory for the tensor: oneDNN's upper estimate, max(size * stride) elements. SIZE_MAX: not known."""
        if self.shape == ():
            return -(-BITS.get(self.dtype, 0) // 8)
        if self.shape is not None and 0 in self.shape:
            return 0
        if self.strides is None or self.shape is None or self.dtype not in BITS:
            return SIZE_MAX
        elements = max(n * (s if n > 1 else 1) for n, s in zip(self.shape, self.strides, strict=True))
        # A stride of 0 repeats elements; there is one of them all the same.
        return -(-max(elements, 1) * BITS[self.dtype] // 8)

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included: what memory for the tensor must hold."""
        if self.strides is None or self.shape is None:
            raise refuse("getter", f"strides of tensor {self.id}", why="its layout or shape is not known")
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.get_dims())

    def is_equal(self, other: object) -> bool:
        """Whether id, type, shape, layout and property are all the same; so does ==."""
        return self == other

    def replace(self, **changes: Any) -> LogicalTensor:
        """The same tensor with other fields, by the names of the constructor's arguments."""
        given: dict[str, Any] = {
            "id": self.id,
            "dtype": self.dtype,
            "dims": -1 if self.shape is None else self.shape,
            "layout_type": self.layout_type,
            "property_type": self.property_type,
            "strides": self.strides,
            "layout_id": self.layout_id,
        }
        if "dims" in changes or "layout_type" in changes:
            given["strides"] = None
        return LogicalTensor(**(given | changes))

    def tell(self) -> str:
        """Type, shape and strides in a few words, for messages."""
        shape = "?" if self.shape is None else "x".join(str(n) if n >= 0 else "?" for n in self.shape) or "scalar"
        dense = self.strides is None or self.strides == dense_strides(self.get_dims())
        layout = "" if dense else f" with strides {self.strides}"
        return f"{self.dtype} {shape}{layout}" + ("" if self.layout_type == "strided" else f" ({self.layout_type})")


def _whole(value: object) -> int | None:
    """A Python integer, or None for what is none."""
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _shape(dims: int | Sequence[int], name: str) -> Ints | None:
    """Sizes from a list or a count; None if not even the count is known."""
    count = _whole(dims)
    if count is not None:
        if count > MAX_NDIMS:
            raise refuse("ndims", name, count)
        return None if count < 0 else (UNKNOWN_DIM,) * count
    if isinstance(dims, (str, bytes)) or not hasattr(dims, "__len__"):
        raise refuse("dims", f"{name}: dims", repr(dims))
    sizes = [_whole(n) for n in dims]  # type: ignore[union-attr]
    if len(sizes) > MAX_NDIMS:
        raise refuse("ndims", name, len(sizes))
    if any(n is None or n not in S64 for n in sizes):
        raise refuse("dims", f"{name}: dims", repr(dims))
    return tuple(UNKNOWN_DIM if n is None or n < 0 else n for n in sizes)


def _strides(strides: Sequence[int], shape: Ints | None, name: str) -> Ints | None:
    """Strides as a tuple; None if any is unknown, which older files say with -1."""
    steps = [_whole(s) for s in strides]
    if all(s in (UNKNOWN_DIM, -1) for s in steps) and steps:
        return None
    if shape is None or any(n < 0 for n in shape):
        raise refuse("layout", f"{name}: strides", strides, expected="a known shape")
    if len(steps) != len(shape) or any(s is None or s not in S64 or s < 0 for s in steps):
        raise refuse("strides", f"{name}: strides", strides, expected=values(len(shape)))
    return tuple(s or 0 for s in steps)
