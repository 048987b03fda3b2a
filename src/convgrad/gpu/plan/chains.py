"""Launches of a plan that begin before the one before them ends: each takes a place as soon as there is one, and waits.

The first launch comes after all that a stream did before. Every later one that may begin early waits in each of its
programs until the launch before it is complete, and is not complete itself before: so all that came earlier is.
"""

from __future__ import annotations

from dataclasses import replace

from ..target import Target
from .records import Launch, Plan

LEAST = 90  # the compute capability, times ten, from which GPUs have this

WAITING = ("gather", "pack", "weights_boxes", "finish_weights", "fold_taps")
"""Kernels for Hopper that wait before they read what others wrote. `relay` is told when it should."""

GIVEN = ("x", "w", "y")


def chained(plan: Plan, target: Target) -> Plan:
    """The plan whose launches begin as early as they may."""
    if target.capability < LEAST or len(plan.launches) < 2:
        return plan
    first, *others = plan.launches
    early = (_early(launch, before) for before, launch in zip(plan.launches, others, strict=False))
    return replace(plan, launches=(_ordered(first, "first"), *early))


def _early(launch: Launch, before: Launch) -> Launch:
    if launch.kernel == "gather" and before.kernel == "pack" and before.constant("ROUND"):
        # In tf32, gathers of 5 of 32 layers took a tenth longer when they began before weights were packed.
        return launch
    if launch.kernel == "relay":
        # A copy of what the caller gave needs nothing of the launches before it.
        launch = _ordered(launch, "beside" if launch.tensors[0][0] in GIVEN else "after")
    waits = launch.kernel == "relay" or (launch.module.startswith("hopper.") and launch.kernel in WAITING)
    return replace(launch, early=True) if waits else launch


def _ordered(launch: Launch, order: str) -> Launch:
    """A copy that is told when it waits."""
    constants = tuple((name, order if name == "ORDER" else value) for name, value in launch.constants)
    return replace(launch, constants=constants) if launch.kernel == "relay" else launch
