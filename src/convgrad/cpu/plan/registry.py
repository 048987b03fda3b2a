"""The algorithms of the CPU engine. A plan is made by the first of them that serves a problem.

It is a pure function of problem, target and threads.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from ...backend import Refusal
from ...spec.problem import Problem
from ..target import Target
from . import workspace
from .bits import TEAM
from .cost import ROUNDED
from .estimate import estimate
from .records import Made, Plan, refuse, up


class Algorithm(NamedTuple):
    """One way to compute: a folder of convgrad.cpu, with a planner and a writer.

    `plan(problem, target, threads)` in the first module makes a plan, or None for problems that it does not serve, or a
    refusal if it knows that no algorithm of that name does; `write(plan)` in the second one writes its IR.
    """

    name: str  # the `algorithm` that a caller asks for: `Problem.algorithm`
    nest: str  # the loop nest, as its plans name it
    planner: str
    writer: str


ALGORITHMS = (
    Algorithm("direct", "depthwise pixels", "depthwise.pixels_plan", "depthwise.pixels_kernel"),
    Algorithm("direct", "depthwise channels", "depthwise.channels_plan", "depthwise.channels_kernel"),
    Algorithm("direct", "tiles", "amx.gather_plan", "amx.gather_kernel"),
    Algorithm("direct", "tile sums", "amx.sums_plan", "amx.sums_kernel"),
    Algorithm("bf16x6", "tiles", "amx.gather_plan", "amx.gather_kernel"),
    Algorithm("bf16x6", "tile sums", "amx.sums_plan", "amx.sums_kernel"),
    Algorithm("bf16x3", "tiles", "amx.gather_plan", "amx.gather_kernel"),
    Algorithm("bf16x3", "tile sums", "amx.sums_plan", "amx.sums_kernel"),
    Algorithm("direct", "wgrad", "wgrad.plan", "wgrad.kernel"),
    Algorithm("direct", "gather", "gather.plan", "gather.kernel"),
)
"""In the order in which they are asked, those whose name the problem has; the last direct one serves every problem.

A new one, Winograd for example, is a folder beside `gather`, a row here, and a function in cpu/telling.py. If its
errors are larger than those of direct sums, it has another `name`, for which a caller must ask: ALGORITHMS in
spec/table.py lists those.
"""

ALONE = 2_000_000
"""Fewer products and bytes than these are done before a second thread has begun. Origin not recorded."""


def make_plan(problem: Problem, target: Target, threads: int) -> Plan:
    """The plan for a problem.

    Work is cut for a rounded number of threads, so that one kernel serves neighbouring numbers of them.
    """
    if problem.flops < ALONE and problem.bytes < ALONE:
        threads = 1
    team = TEAM
    while team < min(threads, ROUNDED):
        team *= 2
    if threads > ROUNDED:
        team = up(threads, ROUNDED // 2)
    plan, bound = _cut(problem, target, team), workspace.bound(problem)
    if team > TEAM and not isinstance(plan, Refusal) and workspace.exceeds(plan, bound):
        # Whether a problem is left to the reference must not depend on the number of threads.
        plan = _cut(problem, target, TEAM)
    if target.tiles.refused and not isinstance(plan, Refusal) and _module("amx.split").wanted(problem, target):
        plan = replace(plan, why=(*plan.why, f"without tile registers: {target.tiles.refused}"))
    if not isinstance(plan, Refusal):
        plan = _within(plan, bound, threads)
    return plan if isinstance(plan, Refusal) else replace(plan, estimate=estimate(plan, problem, target))


def _within(plan: Made, bound: int, threads: int) -> Plan:
    """The plan for as many threads as have tasks, and whose workspace is not more than the bound."""
    if plan.shared > bound:
        reason = f"{plan.shared >> 20} MiB of packed weights, most of it lanes without a channel"
        return refuse(reason, "more channels in the result, or a smaller kernel")
    threads = min(threads, plan.tasks)
    most = workspace.threads(plan, bound)
    if most is None or most >= threads:
        return replace(plan, threads=threads)
    if most < 1:
        reason = f"{plan.own_bytes >> 20} MiB of packed data for one thread"
        return refuse(reason, "a smaller kernel, or fewer channels")
    why = f"{most} of {threads} threads: each takes {plan.own_bytes >> 20} MiB"
    return replace(plan, why=(*plan.why, why), threads=most)


def _cut(problem: Problem, target: Target, team: int) -> Plan:
    """Work cut for so many threads."""
    asked = [row for row in ALGORITHMS if row.name == problem.algorithm]
    for row in asked:
        plan: Plan | None = _module(row.planner).plan(problem, target, team)
        if plan is not None:
            return plan
    return refuse(f"no nest computes it by the algorithm {problem.algorithm!r}", "another algorithm")


def write(plan: Made) -> str:
    """The IR of a plan."""
    row = next(row for row in ALGORITHMS if row.nest == plan.nest)
    text: str = _module(row.writer).write(plan)
    return text


def _module(name: str) -> Any:
    return import_module(f"...{name}", __name__)
