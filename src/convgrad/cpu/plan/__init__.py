"""How a problem is computed on a CPU. A pure function of problem, target and threads; every heuristic lives here."""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..nests import Declined, Plan
from ..target import Target
from . import gather, plane, reduce, slide
from .machine import TEAM
from .shape import Axis, simplify

__all__ = ["Axis", "make_plan", "simplify"]

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
        return Declined(
            f"{plan.own_bytes >> 20} MiB of packed data for one thread", "a smaller kernel, or fewer channels"
        )
    if most < threads:
        plan = replace(plan, why=(*plan.why, f"{most} of {threads} threads: each takes {plan.own_bytes >> 20} MiB"))
    return replace(plan, threads=min(threads, most))


def _cut(problem: Problem, target: Target, team: int) -> Plan:
    """Work cut for so many threads. Each kind of nest is asked if it serves the problem; the last one serves all."""
    return (
        plane.plan(problem, target, team)
        or slide.plan(problem, target, team)
        or reduce.plan(problem, target, team)
        or gather.plan(problem, target, team)
    )
