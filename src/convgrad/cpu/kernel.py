"""A plan made callable: code written, compiled or found in a cache, and run on a team of threads."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from ..errors import OutOfMemoryError
from ..spec.problem import Problem
from . import gather, jit, plane, reduce, slide, threads
from .nests import Declined, Gather, Plan, Plane, Reduce, Slide
from .numbers import LINE
from .plan import make_plan
from .target import Target

KEEP = 64 << 20  # bytes of workspace that are kept for later calls


class Kernel:
    """Machine code for one problem. Call it with the addresses of x, w, y and bias."""

    __slots__ = ("_address", "_bytes", "_entry", "_module", "_threads", "plan")

    def __init__(self, plan: Gather | Reduce | Slide | Plane, target: Target) -> None:
        self.plan = plan
        self._module = jit.load(write(plan), target.triple, target.cpu, target.features)
        self._address = self._module.address("kernel")
        self._bytes = plan.workspace
        self._threads = plan.threads
        self._entry = threads.entry()

    def __call__(self, x: int, w: int, y: int, bias: int) -> None:
        """Compute: every element of the wanted tensor is written."""
        space = _take(self._bytes)
        args = space.args
        args[0], args[1], args[2], args[3] = x, w, y, bias
        self._entry(self._address, space.args_at, self._threads)
        _give(space)


def write(plan: Gather | Reduce | Slide | Plane) -> str:
    """The IR of a plan."""
    if isinstance(plan, Slide):
        return slide.write(plan)
    if isinstance(plan, Plane):
        return plane.write(plan)
    return gather.write(plan) if isinstance(plan, Gather) else reduce.write(plan)


@lru_cache(maxsize=1024)
def find(problem: Problem, target: Target, team: int) -> Kernel | Declined:
    """The kernel for a problem, or why there is none."""
    plan = make_plan(problem, target, team)
    return plan if isinstance(plan, Declined) else Kernel(plan, target)


def explain(problem: Problem, target: Target, team: int) -> Plan:
    """The plan alone."""
    return make_plan(problem, target, team)


class _Space:
    """Aligned memory for one call, its values not set, and the block of arguments that ends with its address."""

    __slots__ = ("address", "args", "args_at", "memory", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self.memory = np.empty(size + LINE, np.uint8)
        except (MemoryError, ValueError):
            raise OutOfMemoryError(f"no memory for a workspace of {size >> 20} MiB; fewer threads need less") from None
        self.address: int = -(-self.memory.__array_interface__["data"][0] // LINE) * LINE
        self.args = (ctypes.c_void_p * 5)(0, 0, 0, 0, self.address)
        self.args_at = ctypes.addressof(self.args)


# Spaces that no call uses. Lists change in one step under the GIL, so neither threads nor a fork need a lock here.
_free: list[_Space] = []


def _take(size: int) -> _Space:
    """Memory of at least that size, kept from an earlier call or new."""
    try:
        space = _free.pop()
    except IndexError:
        return _Space(size)
    return space if space.size >= size else _Space(size)


def _give(space: _Space) -> None:
    """Keep memory for a later call, unless much is kept already."""
    if sum(kept.size for kept in tuple(_free)) + space.size <= KEEP:
        _free.append(space)
