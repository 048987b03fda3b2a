"""Which back end computes a problem, and why."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from . import reference
from .cpu import kernel as kernels
from .cpu import target
from .cpu.threads.count import get_num_threads
from .errors import UnsupportedError
from .spec import Problem

Array = np.ndarray[Any, np.dtype[Any]]


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
    if not all(problem.size(role) for role in ("x", "w", "y")):
        return "nothing to sum: a tensor is empty"
    return kernels.find(problem, machine, team)


def explain(problem: Problem) -> list[str]:
    """Lines that tell a person how a problem is computed here, and why that way."""
    lines = [str(problem), f"{problem.flops / 1e6:.3f} MFLOP, {problem.bytes / 2**20:.3f} MiB in the three tensors"]
    try:
        from .cpu.plan.records import Declined

        machine, team = target.current(), get_num_threads()
    except (ImportError, UnsupportedError) as error:
        return [*lines, f"engine: reference (NumPy); cpu: {error}"]
    if not all(problem.size(role) for role in ("x", "w", "y")):
        return [*lines, "engine: reference (NumPy); cpu: nothing to sum, a tensor is empty"]
    plan = kernels.explain(problem, machine, team)
    if isinstance(plan, Declined):
        return [*lines, f"engine: reference (NumPy); cpu: {plan.reason}"]
    return [*lines, f"engine: cpu, target {machine.name} ({machine.cpu}), {team} threads", *str(plan).splitlines()]
