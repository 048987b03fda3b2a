"""Kernels as they are called: by addresses, on as many threads as the caller allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from convgrad import libraries
from convgrad.cpu import kernel, target
from convgrad.host_team import HOST_TEAM
from convgrad.spec.problem import Problem

TEXT = "y f32 n2 g1 cx64 cy64 x30x30 w3x3 y30x30 s1x1 d1x1 p1x1"


@pytest.fixture
def found() -> kernel.Kernel:
    made = kernel.find(Problem.parse(TEXT), target.current(), 3)
    assert isinstance(made, kernel.Kernel)
    assert made.plan.threads == 3
    return made


@pytest.mark.parametrize(("context", "threads"), [(0, 3), (1, 1), (2, 2), (3, 3), (4, 3), (1000, 3), (-1, 3)])
def test_a_call_takes_no_more_threads_than_it_may(
    found: kernel.Kernel, monkeypatch: pytest.MonkeyPatch, context: int, threads: int
) -> None:
    """And never more than planned, for whom there is no workspace."""
    seen = []
    monkeypatch.setattr(found, "_entry", lambda address, args, n: seen.append(n))
    found(0, 0, 0, 0, context)
    assert seen == [threads]
    if context >= 0:
        monkeypatch.setattr(kernel, "borrowed", lambda wanted: (lambda *args: seen.append(args[2]), wanted - HOST_TEAM))
        found(0, 0, 0, 0, HOST_TEAM + context)
        assert seen == [threads] * 2


def test_any_number_of_threads_gives_the_same_bits(found: kernel.Kernel) -> None:
    problem, rng = Problem.parse(TEXT), np.random.default_rng(5)
    x, w = (rng.standard_normal(problem.shape(role), np.float32) for role in "xw")
    results = []
    assert libraries.find(torch.zeros(1)) is not None  # lends its threads
    for context in (0, 1, 2, 3, *(HOST_TEAM + threads for threads in (0, 1, 2, 3))):
        y = np.full(problem.shape("y"), np.nan, np.float32)
        found(*(a.__array_interface__["data"][0] for a in (x, w, y)), 0, context)
        results.append(y.tobytes())
    assert len(set(results)) == 1
    assert not np.isnan(y).any()
