"""The reference as a back end: it takes every problem in the memory of the host."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from . import host, reference
from .backend import Device, Executable, Refusal
from .dtypes import DTYPES, Array
from .host import copy, duplicate, empty
from .spec.problem import Ints, Problem

__all__ = ["copy", "device", "duplicate", "empty", "load", "name", "plan", "setting"]

name = "reference"
device = "cpu"


def setting() -> Hashable:
    """Nothing changes how it computes."""
    return None


def load(problem: Problem, device: Device) -> Executable | Refusal:
    """The computation of the definition."""
    return _hindrance(problem) or partial(_compute, problem)


def plan(problem: Problem, device: Device) -> Refusal | None:
    """Nothing to plan."""
    return _hindrance(problem)


def _hindrance(problem: Problem) -> Refusal | None:
    """It knows no other algorithm; but where there is nothing to sum, all are the same."""
    if problem.algorithm == "direct" or not all(problem.size(role) for role in ("x", "w", "y")):
        return None
    return Refusal(name, "it takes direct sums alone")


def _compute(problem: Problem, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
    at = {"x": x, "w": w, "y": y}
    views = {role: _view(at[role], problem.shape(role), problem.strides(role), problem.dtype_of(role)) for role in at}
    out = views.pop(problem.wanted)
    if problem.bias_stride is not None:
        shape = (problem.g, problem.cx if problem.wanted == "x" else problem.cy)
        step = problem.bias_stride
        views["bias"] = _view(bias, shape, (shape[1] * step, step), problem.dtype)
    reference.compute(problem, views, out)


def _view(address: int, shape: Ints, strides: Ints, dtype: str) -> Array:
    kind = DTYPES[dtype].numpy
    return host.view(address, shape, tuple(s * kind.itemsize for s in strides), kind, None, locked=False)
