"""The algorithms of the CPU engine, and the plan for a problem by the first of them that serves it.

A plan is a pure function of problem, target and threads.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..target import Target
from .bits import TEAM
from .records import Declined, Made, Plan


class Algorithm(NamedTuple):
    """One way to compute: a folder of convgrad.cpu, with a planner and a writer.

    `plan(problem, target, threads)` in the first module makes a plan, or None for problems that it does not serve;
    `write(plan)` in the second one writes its IR.
    """

    name: str  # the `algorithm` that a caller asks for
    nest: str  # the loop nest, as its plans name it
    planner: str
    writer: str


ALGORITHMS = (
    Algorithm("direct", "depthwise pixels", "depthwise.pixels_plan", "depthwise.pixels_kernel"),
    Algorithm("direct", "depthwise channels", "depthwise.channels_plan", "depthwise.channels_kernel"),
    Algorithm("direct", "wgrad", "wgrad.plan", "wgrad.kernel"),
    Algorithm("direct", "gather", "gather.plan", "gather.kernel"),
)
"""In the order in which they are asked; the last one serves every problem."""

ALONE = 2_000_000  # fewer products and bytes than this are done before a second thread has begun
SHARED = 64 << 20  # bytes that the workspace may take beyond four times the largest tensor
OWN = 6 << 20  # and more for each thread


def make_plan(problem: Problem, target: Target, threads: int) -> Plan:
    """The plan for a problem.

    Work is cut for a rounded number of threads, so that one kernel serves neighbouring numbers of them.
    """
    if problem.flops < ALONE and problem.bytes < ALONE:
        threads = 1
    team = TEAM
    while team < threads:
        team *= 2
    plan = _cut(problem, target, team)
    largest = DTYPES[problem.dtype].accumulator.itemsize * max(problem.size(role) for role in ("x", "w", "y"))
    room = 4 * largest + SHARED
    if team > TEAM and not isinstance(plan, Declined) and max(plan.at_once, plan.shared + plan.own_bytes - OWN) > room:
        # Whether a problem is left to the reference must not depend on the number of threads.
        plan = _cut(problem, target, TEAM)
    if isinstance(plan, Declined):
        return plan
    if plan.shared > room:
        reason = f"{plan.shared >> 20} MiB of packed weights, most of it lanes without a channel"
        return Declined(reason, "more channels in the result, or a smaller kernel")
    threads = min(threads, plan.tasks)
    most = (room - plan.shared) // (plan.own_bytes - OWN) if plan.own_bytes > OWN else threads
    if most < 1:
        reason = f"{plan.own_bytes >> 20} MiB of packed data for one thread"
        return Declined(reason, "a smaller kernel, or fewer channels")
    if most < threads:
        plan = replace(plan, why=(*plan.why, f"{most} of {threads} threads: each takes {plan.own_bytes >> 20} MiB"))
    return replace(plan, threads=min(threads, most))


def _cut(problem: Problem, target: Target, team: int) -> Plan:
    """Work cut for so many threads."""
    for row in ALGORITHMS:
        plan: Plan | None = _module(row.planner).plan(problem, target, team)
        if plan is not None:
            return plan
    raise ValueError(f"no algorithm took {problem}")


def write(plan: Made) -> str:
    """The IR of a plan."""
    row = next(row for row in ALGORITHMS if row.nest == plan.nest)
    text: str = _module(row.writer).write(plan)
    return text


def _module(name: str) -> Any:
    return import_module(f"...{name}", __name__)
