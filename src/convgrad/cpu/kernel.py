"""A kernel: machine code for one problem, found in memory or on disk, or planned, written and compiled now."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..backend import Refusal
from ..errors import OutOfMemoryError
from ..host_team import HOST_TEAM
from ..spec.problem import Problem
from .compile import jit, recall
from .target import LINE, Target
from .threads.team import borrowed, entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan.records import Made, Plan

KEEP = 64 << 20  # bytes of workspace that are kept for later calls


class Kernel:
    """Machine code for one problem, and what a call of it needs: bytes of workspace, and how many threads at most."""

    __slots__ = ("_address", "_entry", "_module", "_plan", "_threads", "_workspace")

    def __init__(self, module: jit.Module, workspace: int, threads: int, plan: Callable[[], Plan]) -> None:
        self._module = module
        self._address = module.address("kernel")
        self._workspace = workspace
        self._threads = threads
        self._plan = plan
        self._entry = entry()

    def __call__(self, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
        """Compute: write every element of the wanted tensor. Tensors are addresses; without a bias it is not read.

        `context` is the number of threads that this call may use, 0 for as many as planned, and whose they are. More
        than planned are not used, because the workspace has no room for them. The bits are the same for any number.
        """
        space = _take(self._workspace)
        args = space.args
        args[0], args[1], args[2], args[3] = x, w, y, bias
        threads, enter = self._threads, self._entry
        if context >= HOST_TEAM:
            enter, context = borrowed(context)
        enter(self._address, space.args_at, context if 0 < context < threads else threads)
        _give(space)

    @property
    def note(self) -> recall.Note:
        """What a later process needs to make the same kernel."""
        return self._module.key, self._workspace, self._threads

    @property
    def plan(self) -> Plan:
        """The plan that the code was written from."""
        return self._plan()


@lru_cache(maxsize=1024)
def find(problem: Problem, target: Target, num_threads: int) -> Kernel | Refusal:
    """The kernel for a problem, or why there is none."""
    target = permitted(problem, target)
    note = recall.recall(problem, target, num_threads)
    if isinstance(note, Refusal):
        return note
    if note is not None:
        key, workspace, threads = note
        module = jit.stored(key)
        if module is not None:
            return Kernel(module, workspace, threads, partial(make_plan, problem, target, num_threads))
    made = build(problem, target, num_threads)
    recall.keep(problem, target, num_threads, made if isinstance(made, Refusal) else made.note)
    return made


def build(problem: Problem, target: Target, num_threads: int) -> Kernel | Refusal:
    """The kernel for a problem, planned and written anew, or why there is none."""
    made = make_plan(problem, target, num_threads)
    if isinstance(made, Refusal):
        return made
    module = jit.load(write(made), target.triple, target.cpu, target.features)
    return Kernel(module, made.workspace, made.threads, lambda: made)


def write(plan: Made) -> str:
    """The IR of a plan."""
    from .plan import registry

    return registry.write(plan)


def make_plan(problem: Problem, target: Target, num_threads: int) -> Plan:
    """The plan alone."""
    from .plan import registry

    return registry.make_plan(problem, permitted(problem, target), num_threads)


def permitted(problem: Problem, target: Target) -> Target:
    """The target, without tile registers if it has them and the system does not let this process use them."""
    if not target.tiles.dtypes:
        return target
    from .amx.permission import allowed
    from .amx.split import wanted

    return allowed(target) if wanted(problem, target) else target


class _Workspace:
    """Memory for a call, aligned to a cache line, its values not set; and the arguments: its address is the last."""

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


# Workspaces that no call uses. Lists change in one step under the GIL, so neither threads nor a fork need a lock here.
_free: list[_Workspace] = []


def _take(size: int) -> _Workspace:
    """A workspace of at least that size, kept from an earlier call or new."""
    try:
        space = _free.pop()
    except IndexError:
        return _Workspace(size)
    return space if space.size >= size else _Workspace(size)


def _give(space: _Workspace) -> None:
    """Keep a workspace for a later call, unless much is kept already."""
    kept = sum([kept.size for kept in tuple(_free)]) if _free else 0
    if kept + space.size <= KEEP:
        _free.append(space)
