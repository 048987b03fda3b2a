"""How products of f32 are taken where a device has faster ways than plain f32: what the user says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .errors import SpecError

PRECISIONS = {
    "default": "the fastest way whose errors are no larger than those of plain f32",
    "ieee": "plain f32",
    "tf32": "one product of operands rounded to 11 bits of mantissa",
    "tf32x3": "three products of operands split into two parts of 11 bits",
    "bf16x6": "six products of operands split into three parts of 8 bits",
}
"""The words for it, which are PyTorch's and Triton's."""

_chosen = ""  # by the user
_is_silent = True  # the user has chosen nothing, which is "default"
_followed: ContextVar[str] = ContextVar("followed", default="default")


def set_float32_precision(precision: str) -> None:
    """Say how later calls take products of f32 on a GPU: "ieee", "tf32", "tf32x3", "bf16x6" or "default".

    The CPU always computes in plain f32.
    """
    global _chosen, _is_silent
    _chosen, _is_silent = _word(precision, "set_float32_precision", "precision"), False


def get_float32_precision() -> str:
    """The last word of set_float32_precision(), else CONVGRAD_F32, else "default"."""
    global _chosen, _is_silent
    if not _chosen:
        word = os.environ.get("CONVGRAD_F32", "").strip()
        _chosen, _is_silent = _word(word or "default", "", "CONVGRAD_F32"), not word
    return _chosen


def is_silent() -> bool:
    """Whether the user has not said anything: then who computes for another library does as that one."""
    return get_float32_precision() == "default" and _is_silent


@contextmanager
def following(precision: str) -> Iterator[None]:
    """Have plans that are made in a block take products as another library does, unless the user has said how."""
    token = _followed.set(precision)
    try:
        yield
    finally:
        _followed.reset(token)


def in_force() -> str:
    """How a plan that is made here takes products."""
    return _followed.get() if is_silent() else get_float32_precision()


def _word(value: Any, operation: str, argument: str) -> str:
    if not isinstance(value, str) or value not in PRECISIONS:
        expected = ", ".join(map(repr, PRECISIONS))
        raise SpecError(f"{argument} must be one of {expected}, got {value!r}", argument=argument, operation=operation)
    return value
