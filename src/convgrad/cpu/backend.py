"""The front door of the CPU engine, as a back end: plans and kernels for the problems that others bring.

Planner, compiler and kernels are imported when a problem is new, so that `import convgrad` costs little.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..backend import Device, Executable, Refusal
from ..host import copy, duplicate, empty
from ..spec.problem import Problem
from .threads.count import get_num_threads

if TYPE_CHECKING:
    from .plan.records import Made
    from .target import Target

__all__ = ["copy", "device", "duplicate", "empty", "has_compiler", "load", "machine", "name", "plan", "setting"]

name = "cpu"
device = "cpu"

# The dictionary behind os.environ, which takes many steps to look up one word.
_environment: Any = getattr(os.environ, "_data", os.environ)
_target: Any = os.environ.encodekey("CONVGRAD_TARGET") if hasattr(os.environ, "_data") else "CONVGRAD_TARGET"


def setting() -> Hashable:
    """The number of threads, and the machine that kernels are written for."""
    return get_num_threads(), _environment.get(_target)


def load(problem: Problem, device: Device) -> Executable | Refusal:
    """The kernel for a problem on the threads now set."""
    if refusal := _hindrance(problem):
        return refusal
    from . import kernel, target

    return kernel.find(problem, target.current(), get_num_threads())


def plan(problem: Problem, device: Device) -> Made | Refusal:
    """The plan for a problem on the threads now set."""
    if refusal := _hindrance(problem):
        return refusal
    from . import kernel, target

    return kernel.make_plan(problem, target.current(), get_num_threads())


def _hindrance(problem: Problem) -> Refusal | None:
    """What no kernel can do anything about."""
    if not all(problem.size(role) for role in ("x", "w", "y")):
        return Refusal(name, "nothing to sum: a tensor is empty")
    return None if has_compiler() else Refusal(name, "llvmlite, which compiles its kernels, is not installed")


def machine() -> Target:
    """The machine that kernels are written for."""
    from . import target

    return target.current()


@lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Whether llvmlite is there."""
    return find_spec("llvmlite") is not None
