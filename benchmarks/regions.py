"""What it costs to have threads work together: to start and join them, to meet at a barrier, to wake them after a rest.

    python benchmarks/regions.py --threads 1,2,4,8,16

The kernel of a call is empty. Calls in a row are made without Python in between; before a call after a rest, the caller
computes for so long and the other threads have nothing to do. All figures are microseconds: of calls and barriers the
middle of some rounds, of rests the middle and, in brackets, the longest but one of ten.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from run import counts, table

from convgrad.bench import timing
from convgrad.cpu.compile import jit
from convgrad.cpu.threads import team

RESTS = (1e-4, 1e-3, 20e-3)  # seconds
BARRIERS = 200  # in one call

KERNELS = f"""
define void @empty(ptr %args, i64 %thread, i64 %threads, ptr %team) nounwind {{
  ret void
}}

define void @barriers(ptr %args, i64 %thread, i64 %threads, ptr %team) nounwind {{
entry:
  %barrier = load ptr, ptr %team
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  call void %barrier(ptr %team, i64 %thread)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, {BARRIERS}
  br i1 %more, label %loop, label %done
done:
  ret void
}}

define void @calls(ptr %enter, ptr %kernel, i64 %threads, i64 %times) nounwind {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  call void %enter(ptr %kernel, ptr null, i64 %threads)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %times
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


@dataclass(frozen=True)
class Costs:
    """Seconds, on so many threads."""

    threads: int
    call: float  # start and join
    barrier: float
    rests: tuple[tuple[float, float, float], ...]  # the rest, then the middle of calls after it and a long one


class Bench:
    """The code that is timed. `enter` is the function that has a team run a kernel: `team.entry()`."""

    def __init__(self, enter: Callable[..., None]) -> None:
        self.module = jit.load(KERNELS, *jit.host())
        address = ctypes.c_void_p
        self.enter = enter
        self.entry = ctypes.cast(enter, address).value  # type: ignore[arg-type]
        self.empty, self.barriers = self.module.address("empty"), self.module.address("barriers")
        word = ctypes.c_int64
        self.calls = ctypes.CFUNCTYPE(None, address, address, word, word)(self.module.address("calls"))

    def costs(self, threads: int, seconds: float = 0.5, rests: Sequence[float] = RESTS) -> Costs:
        """Measure them all, in about so many seconds."""
        call = self._in_a_row(self.empty, threads, seconds / 4)
        barrier = (self._in_a_row(self.barriers, threads, seconds / 4) - call) / BARRIERS
        return Costs(threads, call, barrier, tuple((rest, *self._after(rest, threads)) for rest in rests))

    def _in_a_row(self, kernel: int, threads: int, seconds: float) -> float:
        """The time of a call among others: the middle of some rounds."""
        times, rounds = 1, list[float]()
        self.calls(self.entry, kernel, threads, 20)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rounds) < 5:
            start = time.perf_counter()
            self.calls(self.entry, kernel, threads, times)
            took = time.perf_counter() - start
            if took < seconds / 50:
                times, rounds = 2 * times, []
            else:
                rounds.append(took / times)
        return median(rounds)

    def _after(self, rest: float, threads: int) -> tuple[float, float]:
        """The time of a call after a rest: the middle, and a long one."""
        found = []
        for _ in range(10 if rest > 1e-2 else 30):
            end = time.perf_counter() + rest
            while time.perf_counter() < end:
                pass
            start = time.perf_counter()
            self.enter(self.empty, None, threads)
            found.append(time.perf_counter() - start)
        return median(found), sorted(found)[-len(found) // 10 - 1]


def topology() -> str:
    """CPUs, cores, and how many CPUs share the last-level cache."""
    root = Path("/sys/devices/system/cpu")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))

    def read(cpu: int, name: str) -> str:
        try:
            return (root / f"cpu{cpu}" / name).read_text().strip()
        except OSError:
            return "?"

    cores = {(read(cpu, "topology/physical_package_id"), read(cpu, "topology/core_id")) for cpu in cpus}
    caches = {read(cpu, "cache/index3/shared_cpu_list") for cpu in cpus}
    known = "" if caches == {"?"} else f", last-level caches of the CPUs {'; '.join(sorted(caches))}"
    return f"{timing.cpu_name()}: {len(cpus)} CPUs, {len(cores)} cores{known}"


def rows(found: Sequence[Costs]) -> list[str]:
    """The table."""
    names = [f"{rest * 1e3:g} ms of rest" for rest, *_ in found[0].rests]
    cells = [
        [f"{c.threads}", f"{c.call * 1e6:.2f}", f"{c.barrier * 1e6:.2f}"]
        + [f"{middle * 1e6:.0f} ({long * 1e6:.0f})" for _, middle, long in c.rests]
        for c in found
    ]
    return list(table(["threads", "start and join", "barrier", *names], cells))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=counts, default=[1, 2, 4, 8, 16], help="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number of threads (0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    print(topology())
    bench = Bench(team.entry())
    found = [bench.costs(threads, args.seconds) for threads in args.threads]
    print("\n".join(rows(found)))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": topology(), "costs": [asdict(c) for c in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
