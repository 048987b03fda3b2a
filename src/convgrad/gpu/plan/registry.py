"""The levels of the GPU engine: ways to compute, from those for one kind of GPU to the portable one.

Levels stand in stages. A plan is made in the first stage where a level serves the problem; where several do, the model
says which is the quickest. It is a pure function of problem, GPU and precision.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

from ...spec.problem import Problem
from ..target import Target
from .chains import chained
from .patches import merged
from .records import Plan


class Level(NamedTuple):
    """A way to compute, for some kinds of GPU.

    `plan(problem, target, precision)` in its module makes a plan, or tells in a few words why it does not serve: since
    it cannot, or since its model expects that a later level is quicker. `precision` is the setting of
    `set_float32_precision`, "default" among them.
    """

    name: str
    planner: str  # a module beside this one
    least: int = 0  # the compute capabilities that it is for, times ten
    most: int = 10**6
    aligned: bool = False  # whether tensors must begin at multiples of 16 bytes
    stage: int = 0


LEVELS: tuple[Level, ...] = (
    Level("bands", "bands"),
    Level("rows", "rows"),
    Level("Hopper's gathers", "hopper.gather", least=90, most=90, aligned=True),
    Level("weights on Hopper", "hopper.weights", least=90, most=90, aligned=True),
    Level("channels first on Hopper", "hopper.lines", least=90, most=90, aligned=True),
    Level("blocks", "blocks", aligned=True, stage=1),
    Level("copies", "relaid", aligned=True, stage=1),
    Level("portable", "choose", stage=2),
)
"""In the order in which they are asked; the last one serves every problem.

A new one is a module here with `plan`, kernels in gpu/kernels, and a row.
"""


def make_plan(p: Problem, target: Target, precision: str = "default", aligned: bool = True) -> Plan | str:
    """The plan for a problem, or why there is none. `aligned`: all tensors begin at multiples of 16 bytes."""
    notes, passed = list[str](), list[str]()
    reason = "no level serves it"
    if (simpler := merged(p)) is not p:
        p = simpler
        notes.append(f"windows touch: taken for a convolution of {p.cx} channels with a kernel of {p.w}")
    for _, stage in groupby(LEVELS, lambda level: level.stage):
        made: list[Plan] = []
        for level in stage:
            if not level.least <= target.capability <= level.most:
                continue
            if level.aligned and not aligned:
                passed.append(f"not {level.name}: a tensor does not begin at a multiple of 16 bytes")
                continue
            found: Plan | str = _module(level.planner).plan(p, target, precision)
            if isinstance(found, Plan):
                made.append(replace(found, level=level.name))
            else:
                reason = found
                passed.append(f"not {level.name}: {found}")
        if made:
            best = min(made, key=lambda plan: plan.seconds)
            passed += [
                f"not {plan.level}: expected to take {plan.seconds / best.seconds:.2f} times as long"
                for plan in made
                if plan is not best
            ]
            return chained(replace(best, notes=(*notes, *best.notes), passed=tuple(passed)), target)
    return reason


def _module(name: str) -> Any:
    return import_module(f".{name}", __package__)
