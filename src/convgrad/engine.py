"""Which back end computes a problem, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import reference
from .cpu import kernel as kernels
from .cpu import target
from .cpu.threads.count import get_num_threads
from .dtypes import Array
from .spec import Problem

if TYPE_CHECKING:
    from .cpu.plan.records import Made


def run(problem: Problem, given: dict[str, Array], out: Array, kernel: Any = None) -> None:
    """Compute the wanted tensor into `out`. Arrays are the caller's, by role; the problem's strides describe them.

    `kernel` is what `find` gave for the problem; None has the reference compute it.
    """
    if out.size == 0:
        return
    if kernel is None:
        tensors = {role: reference.canonical(given[role], problem, role) for role in problem.given}
        if "bias" in given:
            tensors["bias"] = given["bias"].reshape(problem.g, -1)
        reference.compute(problem, tensors, reference.canonical(out, problem, problem.wanted))
        return
    at = {role: array.__array_interface__["data"][0] for role, array in given.items()}
    at[problem.wanted] = out.__array_interface__["data"][0]
    kernel(at["x"], at["w"], at["y"], at.get("bias", 0))


def find(problem: Problem) -> Any:
    """The CPU kernel for a problem on the threads now set, or None where the reference computes it."""
    found = _found(problem, target.current(), get_num_threads())
    return None if isinstance(found, str) else found


# The dictionary behind os.environ, which takes many steps to look up one word.
_environment: Any = getattr(os.environ, "_data", os.environ)
_target: Any = os.environ.encodekey("CONVGRAD_TARGET") if hasattr(os.environ, "_data") else "CONVGRAD_TARGET"


def setting() -> tuple[Any, ...]:
    """What a choice of kernel depends on besides the problem."""
    return get_num_threads(), _environment.get(_target)


def _found(problem: Problem, machine: target.Target, team: int) -> kernels.Kernel | str:
    """A kernel, or the reason why there is none."""
    return EMPTY if _empty(problem) else kernels.find(problem, machine, team)


EMPTY = "nothing to sum: a tensor is empty"


def _empty(problem: Problem) -> bool:
    return not all(problem.size(role) for role in ("x", "w", "y"))


@dataclass(frozen=True)
class Way:
    """How a problem is computed here: by the plan, or by the reference for a reason."""

    machine: target.Target
    threads: int  # that there are; a plan may take fewer
    plan: Made | None
    reason: str = ""
    instead: str = ""  # what would have the CPU's kernels compute it

    @property
    def engine(self) -> str:
        """Who computes."""
        return "reference" if self.plan is None else "cpu"


def explain(problem: Problem) -> Way:
    """How a problem is computed on the target and threads now set."""
    from .cpu.plan.records import Declined

    machine, team = target.current(), get_num_threads()
    if _empty(problem):
        return Way(machine, team, None, EMPTY)
    plan = kernels.explain(problem, machine, team)
    if isinstance(plan, Declined):
        return Way(machine, team, None, plan.reason, plan.instead)
    return Way(machine, team, plan)
