"""How products of f32 are taken where a device has faster ways than plain f32: what the user says."""

from __future__ import annotations

import os
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


def set_float32_precision(precision: str) -> None:
    """Say how later calls take products of f32 on a GPU: "ieee", "tf32", "tf32x3", "bf16x6" or "default".

    The CPU always computes in plain f32.
    """
    global _chosen
    _chosen = _word(precision, "set_float32_precision", "precision")


def get_float32_precision() -> str:
    """The last word of set_float32_precision(), else CONVGRAD_F32, else "default"."""
    global _chosen
    if not _chosen:
        _chosen = _word(os.environ.get("CONVGRAD_F32", "").strip() or "default", "", "CONVGRAD_F32")
    return _chosen


def _word(value: Any, operation: str, argument: str) -> str:
    if not isinstance(value, str) or value not in PRECISIONS:
        expected = ", ".join(map(repr, PRECISIONS))
        raise SpecError(f"{argument} must be one of {expected}, got {value!r}", argument=argument, operation=operation)
    return value
