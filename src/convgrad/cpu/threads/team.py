"""The team of threads under the kernels: a fork-join of our own, compiled once for a process.

Every thread of the team runs the same function on the same arguments:

    void kernel(ptr args, i64 thread, i64 threads, ptr team)

The caller is thread 0. The others are created when first needed, spin for some microseconds after their work and then
sleep. They are known to no one but this folder: not Python threads, no signals, never ended. One call at a time has the
team; another call at the same time, from another Python thread, does not wait but runs alone, with one thread. Kernels
give the same bits for any number of threads, so nobody can tell.

Why not OpenMP? There is none that could be relied on without a compiled extension, and two copies of it in one process
(PyTorch brings one) get in each other's way. Why not a pool of Python threads? Each would take the interpreter and its
lock to begin and to end, which lasts longer than many whole calls, and a kernel has barriers inside.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from .count import available
from .team_ir import source

# How long an idle worker spins before it sleeps, and how long a thread spins for others at a barrier or at the end:
# longer than a worker takes to wake up. Who sleeps there may be woken on the CPU of another thread, and wait for that.
IDLE = 30e-6
PATIENCE = 150e-6

Entry = Callable[[int, int, int], None]

_entry: Entry | None = None
_reset: Callable[[], None] | None = None


def run(kernel: int, args: int, threads: int) -> None:
    """Run a kernel on up to so many threads; the GIL is free meanwhile."""
    (_entry or entry())(kernel, args, threads)


def entry() -> Entry:
    """The function behind `run`, for callers that count every microsecond: takes kernel, args and threads."""
    global _entry, _reset
    if _entry is None:
        from ..compile import jit

        # Two threads may come here at once: they get the same module, and setting it up twice does no harm.
        built, _reset = build(source(jit.host()[0]))
        _entry = built
    return _entry


def build(text: str) -> tuple[Entry, Callable[[], None]]:
    """The functions `entry` and `reset` of a team's IR, ready to be called."""
    from ..compile import jit

    module = jit.load(text, *jit.host())
    # Workers stay in this code to the end of the process.
    module.keep()
    word = ctypes.c_int64
    pauses = ctypes.CFUNCTYPE(None, word)(module.address("pauses"))
    setup = ctypes.CFUNCTYPE(None, word, word, word)(module.address("setup"))
    # A pause takes between 5 and 50 ns, so its time is taken and not guessed.
    pause = min(_time(pauses, 100) for _ in range(5)) / 100
    setup(available(), *(max(20, min(round(wait / pause), 100_000)) for wait in (IDLE, PATIENCE)))
    address = ctypes.c_void_p
    enter = ctypes.CFUNCTYPE(None, address, address, word)(module.address("entry"))
    return enter, ctypes.CFUNCTYPE(None)(module.address("reset"))


def _time(function: Callable[[int], None], argument: int) -> float:
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def _after_fork() -> None:
    """Begin afresh in a child: it has no workers, and the call that had the team goes on in the parent only."""
    if _reset is not None:
        _reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
