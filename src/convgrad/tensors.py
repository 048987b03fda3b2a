"""What is asked of a tensor before it is computed: a description for `bind`, and whether it can be written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from .backend import Device, Tensor
from .dtypes import DTYPES, Array
from .errors import SpecError
from .spec.bind import Description
from .spec.check import broken
from .spec.table import DTYPES as DOCUMENTED
from .spec.table import EXTENDED_DTYPES


def describe(tensor: Tensor, name: str) -> Description:
    """What `bind` needs to know of a tensor."""
    if tensor.dtype not in DTYPES:
        raise other_dtype(name, tensor.dtype)
    size = tensor.item
    return Description(tensor.dtype, tensor.shape, tuple(s // size for s in tensor.strides))


def other_dtype(name: str, got: str) -> SpecError:
    """The error for an element type that no operation takes."""
    expected = ", ".join((*DOCUMENTED, *EXTENDED_DTYPES))
    hint = "" if name == "out" else "convert it to one of them"
    return broken("input_dtype", name, got, expected=expected, hint=hint)


def whole_strides(tensor: Tensor) -> bool:
    """Whether every stride is a number of whole elements; fields of a structured array may lie otherwise."""
    size = tensor.item if tensor.dtype in DTYPES else 1
    return all(s % size == 0 for s, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1)


def one_device(tensors: Mapping[str, Tensor]) -> Device:
    """The device that all of some tensors are on."""
    (first, tensor), *others = tensors.items()
    for name, other in others:
        if other.device != tensor.device:
            what = f"{name} must be where {first} is, on {tensor.device}, got a tensor on {other.device}"
            raise SpecError(what, argument=name)
    return tensor.device


def check_writable(locked: str) -> None:
    """Results are not written into the memory of somebody who does not want that; `locked` is what that memory is."""
    if locked:
        raise broken("out_writable", "out", locked, hint="give a writable array, or none to get a new one")


def check_out(out: Tensor) -> None:
    """A result can be written into a tensor if its owner lets us, and every element has an address of its own."""
    check_writable(out.locked)
    if overlaps(out.shape, out.strides, out.item):
        raise broken("out_overlap", "out", f"strides {out.strides} for shape {out.shape}")


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
