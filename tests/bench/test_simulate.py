"""The simulation of many threads takes the tasks of real plans, and shares them as kernels do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import layers
import simulate

from convgrad.cpu.plan.cost import busy

FOUND = {
    "machine": "a",
    "costs": [{"threads": n, "call": 1e-6 * n, "barrier": 5e-7 * n} for n in (1, 2, 4)],
    "speeds": {"1": 1.0, "2": 1.0, "4": 0.5},
    "bandwidths": {"1": 1e10, "4": 4e10},
    "times": [
        {
            "layer": "resnet-3x3-64",
            "direction": d,
            "threads": n,
            "alone": 8e-3,
            "together": 8e-3 / n if n == 4 else None,
        }
        for d in ("BWD_D", "BWD_W")
        for n in (1, 4, 64)
    ],
}


@pytest.mark.parametrize("sizes", [[1.0] * 7, [3.0, 1.0, 1.0, 1.0], [1.0, 2.0] * 20, [1.0]])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_group_takes_tasks_from_both_ends(sizes: list[float], threads: int) -> None:
    assert simulate.makespan(sizes, threads) == pytest.approx(sum(sizes) / threads / busy(sizes, threads))


def test_groups_take_over_what_others_have_left() -> None:
    assert simulate.makespan([1.0] * 192, 192) == 1.0
    assert simulate.makespan([1.0] * 193, 192) == 2.0
    # The first of two groups has all the work, of which the other takes its share.
    assert simulate.makespan([8.0] * 16 + [0.0] * 16, 16) == 8.0


@pytest.mark.parametrize("direction", ["FWD_D", "BWD_D", "BWD_W"])
@pytest.mark.parametrize("threads", [1, 16, 64])
def test_steps_have_all_tasks_of_a_plan(direction: str, threads: int) -> None:
    for layer in layers.LAYERS[:: 1 if threads == 16 else 7]:
        problem = simulate.problem_of(layer, direction)
        plan = simulate.planned(problem, threads)
        steps = simulate.steps_of(plan, problem)
        assert plan.tasks in [len(step.sizes) for step in steps]
        assert all(size > 0 for step in steps for size in step.sizes)


def test_reports_say_what_was_measured_and_what_was_not() -> None:
    lines = simulate.check(FOUND)
    assert "simulated ms" in lines[0]
    assert lines[-1].startswith("4 threads: simulated over measured")
    machine = simulate.server(FOUND, 64, 2, 2e11)
    assert machine.call(4) == 4e-6
    assert machine.call(64) > 2 * machine.call(32) > 0  # from another socket
    assert machine.bandwidth(64) == 4e11
    [alone, *_] = simulate.shares(FOUND, machine, [1])
    assert alone.share == 1.0
    assert all(0.3 < share.share <= 1.0 for share in simulate.shares(FOUND, machine, [64]))
