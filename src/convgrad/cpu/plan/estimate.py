"""What a plan is expected to take: its steps at the speed of a machine of that kind, or the tensors through memory.

How good these guesses are is in docs/internals.md. No plan is chosen by them: planners compare steps.
"""

from __future__ import annotations

from ...backend import Estimate
from ...spec.problem import Problem
from ..target import Target
from .records import Made
from .tuning import tuning


def estimate(plan: Made, problem: Problem, target: Target) -> Estimate:
    """The time of a call whose kernel is there, its workspace, and its error."""
    speed = tuning(target).speed
    computing = plan.thread_steps * (speed.loading if plan.loads_each else 1) / speed.steps
    moving = problem.bytes / (speed.memory if problem.bytes > target.l3 else speed.cache)
    return Estimate(speed.begin + max(computing, moving), plan.workspace, plan.error)
