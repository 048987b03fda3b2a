"""The kernel of a problem: found in a cache, or planned, written and compiled; and run on a team of threads."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OutOfMemoryError
from ..spec.problem import Problem
from .compile import jit, recall
from .target import LINE, Target
from .threads.team import entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan.records import Made, Plan

KEEP = 64 << 20  # bytes of workspace that are kept for later calls


class Kernel:
    """Machine code for one problem. Call it with the addresses of x, w, y and bias."""

    __slots__ = ("_address", "_bytes", "_entry", "_module", "_plan", "_threads")

    def __init__(self, module: jit.Module, workspace: int, team: int, plan: Callable[[], Plan]) -> None:
        self._module = module
        self._address = module.address("kernel")
        self._bytes = workspace
        self._threads = team
        self._plan = plan
        self._entry = entry()

    def __call__(self, x: int, w: int, y: int, bias: int) -> None:
        """Compute: every element of the wanted tensor is written."""
        space = _take(self._bytes)
        args = space.args
        args[0], args[1], args[2], args[3] = x, w, y, bias
        self._entry(self._address, space.args_at, self._threads)
        _give(space)

    @property
    def note(self) -> recall.Note:
        """What a later process needs to know of it."""
        return self._module.key, self._bytes, self._threads

    @property
    def plan(self) -> Plan:
        """What the code was written from."""
        return self._plan()


@lru_cache(maxsize=1024)
def find(problem: Problem, target: Target, team: int) -> Kernel | str:
    """The kernel for a problem, or why there is none."""
    note = recall.recall(problem, target, team)
    if isinstance(note, str):
        return note
    if note is not None:
        code, workspace, members = note
        module = jit.stored(code)
        if module is not None:
            return Kernel(module, workspace, members, partial(explain, problem, target, team))
    made = build(problem, target, team)
    recall.keep(problem, target, team, made if isinstance(made, str) else made.note)
    return made


def build(problem: Problem, target: Target, team: int) -> Kernel | str:
    """The kernel for a problem, planned and written anew, or why there is none."""
    from .plan.records import Declined

    plan = explain(problem, target, team)
    if isinstance(plan, Declined):
        return plan.reason
    module = jit.load(write(plan), target.triple, target.cpu, target.features)
    return Kernel(module, plan.workspace, plan.threads, lambda: plan)


def write(plan: Made) -> str:
    """The IR of a plan."""
    from .plan import registry

    return registry.write(plan)


def explain(problem: Problem, target: Target, team: int) -> Plan:
    """The plan alone."""
    from .plan.registry import make_plan

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
