"""Which back end computes a problem."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import reference
from .spec import Problem

Array = np.ndarray[Any, np.dtype[Any]]


def run(problem: Problem, given: dict[str, Array], out: Array) -> None:
    """Compute the wanted tensor into `out`. Arrays are the caller's, by role; the problem's strides describe them."""
    if out.size == 0:
        return
    tensors = {role: reference.canonical(given[role], problem, role) for role in problem.given}
    if "bias" in given:
        tensors["bias"] = given["bias"].reshape(problem.g, -1)
    reference.compute(problem, tensors, reference.canonical(out, problem, problem.wanted))
