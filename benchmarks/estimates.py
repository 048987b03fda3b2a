"""How good the estimates of plans are: the time of real layers beside what is expected of them.

    python benchmarks/estimates.py --every 3

Of every third layer, y, x and w in f32 and bf16. A ratio of 2 is a call that takes twice as long as expected.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

import numpy as np
from layers import LAYERS

from convgrad import calls, engine, host
from convgrad.backend import Device
from convgrad.spec import Problem, bind


def ratio(problem: Problem) -> float:
    """The time of a call, the shortest of some, as a multiple of what is expected."""
    plan, choice = engine.explain(problem).plan, engine.choose(problem, Device())
    assert plan is not None
    assert plan.estimate is not None
    memory = {}
    for role in ("x", "w", "y"):
        memory[role], _ = host.empty((problem.size(role),), problem.dtype_of(role))
        memory[role][...] = 1
    places = calls.addresses(problem, host.tensors(memory), host.tensor(memory[problem.wanted]))
    shortest, stop = float("inf"), time.perf_counter() + 0.08
    while time.perf_counter() < stop or shortest == float("inf"):
        start = time.perf_counter()
        choice.execute(*places)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest / plan.estimate.seconds


def main() -> None:
    """Print the ratios, and their spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=3, help="take every so-manieth layer (3)")
    found = []
    for layer in LAYERS[:: parser.parse_args().every]:
        for direction in ("FWD_D", "BWD_D", "BWD_W"):
            for dtype in ("f32", "bf16"):
                operation = layer.descriptor.operation(direction, dtype=dtype)
                problem = bind(operation.op, operation.inputs, operation.attributes).problem
                found.append(ratio(problem))
                print(f"{found[-1]:6.2f}  {problem.wanted} {dtype:5} {layer.name}")
    tenths = quantiles(found, n=10)
    print(f"{len(found)} calls: median {median(found):.2f}, eight of ten within {tenths[0]:.2f} and {tenths[-1]:.2f}, "
          f"all within {min(found):.2f} and {max(found):.2f}; mean factor "
          f"{np.exp(np.mean(np.abs(np.log(found)))):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
