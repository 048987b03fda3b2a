"""The team of threads that runs kernels: a fork-join of our own, written as LLVM IR (team_ir.py).

Every thread of the team runs the same function on the same arguments:

    void kernel(ptr args, i64 thread, i64 threads, ptr team)

The caller is thread 0. The others, the workers, are created when they are first needed. After its work a worker spins
for some microseconds and then sleeps. Python does not know workers; they take no signals and live until the process
ends.

Only one call at a time has the team. A call from another Python thread meanwhile does not wait: it runs alone, with one
thread. The result is the same, because kernels give the same bits for any number of threads.

Why not OpenMP? Without a compiled extension there is no copy of it to rely on, and two copies in one process (PyTorch
brings one) get in each other's way. Why not a pool of Python threads? Each of them needs the interpreter and its lock
to begin and to end its part, which takes longer than many whole calls; and at the barriers inside a kernel all of them
must be running at the same time.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from .count import available
from .team_ir import source

# Seconds that a thread spins before it sleeps. Origin of the numbers not recorded.
IDLE_SPIN = 30e-6  # a worker without work
BUSY_SPIN = 150e-6  # a thread at a barrier or at the end of a call: longer than it takes to wake a worker

Entry = Callable[[int, int, int], None]

_entry: Entry | None = None
_reset: Callable[[], None] | None = None


def run(kernel: int, args: int, threads: int) -> None:
    """Run a kernel on up to so many threads; the GIL is free meanwhile."""
    (_entry or entry())(kernel, args, threads)


def entry() -> Entry:
    """The compiled function behind `run`: takes the addresses of kernel and args, and the number of threads."""
    global _entry, _reset
    if _entry is None:
        from ..compile import jit

        # If two threads come here at once, they get the same module; to set it up twice does no harm.
        built, _reset = build(source(jit.host()[0]))
        _entry = built
    return _entry


def build(text: str) -> tuple[Entry, Callable[[], None]]:
    """The functions `entry` and `reset` of a team's IR, compiled and ready to be called."""
    from ..compile import jit

    module = jit.load(text, *jit.host())
    # Workers run in this code until the process ends.
    module.keep()
    word = ctypes.c_int64
    pauses = ctypes.CFUNCTYPE(None, word)(module.address("pauses"))
    setup = ctypes.CFUNCTYPE(None, word, word, word)(module.address("setup"))
    # How long a pause takes differs much between CPUs (5 to 50 ns), so it is measured here.
    pause = min(_time(pauses, 100) for _ in range(5)) / 100
    setup(available(), *(max(20, min(round(wait / pause), 100_000)) for wait in (IDLE_SPIN, BUSY_SPIN)))
    address = ctypes.c_void_p
    enter = ctypes.CFUNCTYPE(None, address, address, word)(module.address("entry"))
    return enter, ctypes.CFUNCTYPE(None)(module.address("reset"))


def _time(function: Callable[[int], None], argument: int) -> float:
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def _after_fork() -> None:
    """Start anew in the child of a fork: workers, and a call that has the team, are in the parent only."""
    if _reset is not None:
        _reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
