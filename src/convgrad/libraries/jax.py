"""JAX's arrays, on the host, which are read through DLPack and never change."""

from __future__ import annotations

import sys
from typing import Any

from ..backend import Tensor
from ..dtypes import Array
from ..spec.check import broken
from . import dlpack

name = "jax"


def owns(value: Any) -> bool:
    """Whether a value is an array, or stands for one inside of a transformation."""
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return _is_traced(value) or (not roots.isdisjoint(("jax", "jaxlib")) and dlpack.owns(value))


def _is_traced(value: Any) -> bool:
    """Whether a value stands for an array inside of jit, grad, vmap and the like."""
    jax = sys.modules.get("jax")
    return jax is not None and hasattr(jax, "core") and isinstance(value, jax.core.Tracer)


# An array is a new object with an address that takes long to ask for: it is opened at every call.
keyed, look, is_writable = dlpack.keyed, dlpack.look, dlpack.is_writable


def open(value: Any, name: str) -> Tensor:
    """The tensor of an array that is there."""
    if _is_traced(value):
        hint = "call convgrad outside of jit, grad and vmap, or through jax.pure_callback"
        raise broken("input_traced", name, f"a JAX {type(value).__name__}", hint=hint)
    return dlpack.open(value, name)._replace(locked="an array of JAX, whose arrays are immutable")


def wrap(memory: Array, like: Any) -> Any:
    """An array of JAX."""
    return sys.modules["jax"].numpy.asarray(memory)


def written(value: Any) -> None:
    """Nothing to note: arrays of JAX are never written to."""


def context(value: Any) -> int:
    """0: there is no stream on the host."""
    return 0
