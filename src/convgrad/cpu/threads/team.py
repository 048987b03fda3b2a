"""The team of threads that runs kernels: a fork-join of our own, written as LLVM IR (team_ir.py).

Every thread of the team runs the same function on the same arguments:

    void kernel(ptr args, i64 thread, i64 threads, ptr team)

The caller is thread 0. The others, the workers, are created when they are first needed. After its work a worker spins
for some microseconds and then sleeps. Python does not know workers; they take no signals and live until the process
ends.

Only one call at a time has the team. A call from another Python thread meanwhile does not wait: it runs alone, with one
thread. The result is the same, because kernels give the same bits for any number of threads.

Why not OpenMP? Without a compiled extension there is no copy of it to rely on. Where the caller's library has loaded
one (PyTorch does), its threads can run a kernel as well, and do if the call says so (`HOST_TEAM` in its context): two
teams that spin on the same CPUs take them from each other, which costs more than any kernel gains. The code of a kernel
is the same, and so are its results. Why not a pool of Python threads? Each of them needs the interpreter and its lock
to begin and to end its part, which takes longer than many whole calls; and at the barriers inside a kernel all of them
must be running at the same time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ...host_team import HOST_TEAM, THREADS_OF
from .count import available
from .team_ir import source

# Seconds that a thread spins before it sleeps. Origin of the numbers not recorded.
IDLE_SPIN = 30e-6  # a worker without work
BUSY_SPIN = 150e-6  # a thread at a barrier or at the end of a call: longer than it takes to wake a worker

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")

Entry = Callable[[int, int, int], None]

_entry: Entry | None = None
_reset: Callable[[], None] | None = None
_borrowed: Entry | None = None


def run(kernel: int, args: int, threads: int) -> None:
    """Run a kernel on up to so many threads; the GIL is free meanwhile."""
    (_entry or entry())(kernel, args, threads)


def entry() -> Entry:
    """The compiled function behind `run`: takes the addresses of kernel and args, and the number of threads."""
    global _entry, _reset
    if _entry is None:
        # If two threads come here at once, they get the same module; to set it up twice does no harm.
        built, _reset = build(source(_host()[0]))
        _entry = built
    return _entry


def borrowed(context: int) -> tuple[Entry, int]:
    """The function that runs a kernel on the threads which a context asks for, and how many of them; 0 for all.

    These are the host's where its OpenMP is found, and else our own. So they are in the child of a fork, which has none
    of the threads that OpenMP believes to have.
    """
    global _borrowed
    if _borrowed is None:
        _borrowed = _adopted() or entry()
    return _borrowed, context & (HOST_TEAM - 1)


def _adopted() -> Entry | None:
    """A team of the threads of the OpenMP that the host program uses; None if there is none."""
    functions = _openmp()
    if functions is None or sys.platform == "win32":
        return None
    module = _load(source(_host()[0], openmp=True))
    address = ctypes.c_void_p
    ctypes.CFUNCTYPE(None, *[address] * 4)(module.address("adopt"))(*functions)
    return _ready(module)


def _openmp() -> list[int] | None:
    """The addresses of what we call of OpenMP: as the host's code finds them, which is first in all that is loaded
    for everyone, then in the libraries that it names.
    """
    for library in (None, *THREADS_OF):
        try:
            loaded: Any = ctypes.CDLL(library)
            return [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in OPENMP]
        except (OSError, AttributeError, TypeError):
            continue
    return None


def build(text: str) -> tuple[Entry, Callable[[], None]]:
    """The functions `entry` and `reset` of a team's IR, compiled and ready to be called."""
    module = _load(text)
    return _ready(module), ctypes.CFUNCTYPE(None)(module.address("reset"))


def _load(text: str) -> Any:
    """The code of a team. Workers run in it until the process ends."""
    from ..compile import jit

    module = jit.load(text, *jit.host())
    module.keep()
    return module


def _ready(module: Any) -> Entry:
    """The function `entry` of a team's code, which is told how long to spin."""
    word = ctypes.c_int64
    pauses = ctypes.CFUNCTYPE(None, word)(module.address("pauses"))
    setup = ctypes.CFUNCTYPE(None, word, word, word)(module.address("setup"))
    # How long a pause takes differs much between CPUs (5 to 50 ns), so it is measured here.
    pause = min(_time(pauses, 100) for _ in range(5)) / 100
    setup(available(), *(max(20, min(round(wait / pause), 100_000)) for wait in (IDLE_SPIN, BUSY_SPIN)))
    address = ctypes.c_void_p
    return ctypes.CFUNCTYPE(None, address, address, word)(module.address("entry"))


def _host() -> tuple[str, str, str]:
    from ..compile import jit

    return jit.host()


def _time(function: Callable[[int], None], argument: int) -> float:
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def _after_fork() -> None:
    """Start anew in the child of a fork: workers, and a call that has the team, are in the parent only."""
    global _borrowed
    if _reset is not None:
        _reset()
    if _borrowed is not None:
        _borrowed = entry()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
