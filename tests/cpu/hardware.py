"""Tests of tile registers on a machine that has them (Intel's AMX): python tests/cpu/hardware.py, or make test-cpu.

It needs Python, NumPy, and what convgrad itself needs; no pytest. Each line is a test; the last one says how many
failed. Where there are no tile registers it says so and does nothing. `--emulated` runs the same tests, but for those
of the instructions, with plain code in their place, on any machine with AVX-512: to test the tests.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import numpy as np  # noqa: E402

from convgrad.backend import Refusal  # noqa: E402
from convgrad.cpu import kernel  # noqa: E402
from convgrad.cpu.amx import sums_plan  # noqa: E402
from convgrad.cpu.amx.permission import refusal  # noqa: E402
from convgrad.cpu.amx.tiles import INSTRUCTIONS, TileCode, configuration  # noqa: E402
from convgrad.cpu.compile import jit  # noqa: E402
from convgrad.cpu.ir.builder import Module  # noqa: E402
from convgrad.cpu.target import Target, Tiles, native, tile_types  # noqa: E402
from convgrad.cpu.threads.count import available  # noqa: E402
from convgrad.spec.problem import Problem  # noqa: E402
from cpu.named import SPLIT, TILED  # noqa: E402
from cpu.problems import check, draw_tiled, however_small  # noqa: E402
from cpu.tiles import Model  # noqa: E402

REAL = (
    "y bf16 n4 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "x bf16 n4 g1 cx128 cy96 x29x29 w3x3 y15x15 s2x2 d1x1 p1x1",
    "w bf16 n4 g1 cx64 cy96 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "w bf16 n4 g2 cx32 cy48 x29x29 w3x3 y15x15 s2x2 d1x1 p1x1",
    "w bf16 n4 g1 cx128 cy64 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0",
    "y f32 n4 g1 cx64 cy64 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio algorithm:bf16x6",
    "w f32 n4 g1 cx64 cy96 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 algorithm:bf16x3",
    "x f16 n4 g1 cx128 cy96 x29x29 w3x3 y15x15 s2x2 d1x1 p1x1",
)


class Call:
    """A problem with real numbers, its result, and kernels that compute it again."""

    def __init__(self, text: str, machine: Target) -> None:
        self.p, self.machine = Problem.parse(text), machine
        rng = np.random.default_rng(2)
        self.arrays = {}
        for role in ("x", "w", "y"):
            size = 1 + sum((n - 1) * s for n, s in zip(self.p.shape(role), self.p.strides(role), strict=True))
            values = rng.standard_normal(size).astype(np.float32)
            if self.p.dtype == "bf16":
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
            self.arrays[role] = values.astype(np.float16) if self.p.dtype == "f16" else values

    def result(self, threads: int, machine: Target | None = None) -> bytes:
        """The bytes of the result on so many threads."""
        with however_small():
            found = kernel.build(self.p, machine or self.machine, threads)
        if not isinstance(found, kernel.Kernel) or not found.plan.nest.startswith("tile"):
            raise AssertionError(f"{self.p} is not computed in tiles: {found}")
        return self.again(found)

    def again(self, found: kernel.Kernel) -> bytes:
        """The bytes of the result of a kernel."""
        out = self.arrays[self.p.wanted].copy()
        out.view(np.uint8)[...] = 0xFF
        places = {role: (out if role == self.p.wanted else array).ctypes.data for role, array in self.arrays.items()}
        found(places["x"], places["w"], places["y"], 0)
        return out.tobytes()


def same(machine: Target, compute: Callable[[Call], bytes], what: str) -> None:
    """Every problem of REAL, computed in some way, must have the bits that one thread gives."""
    for text in REAL:
        call = Call(text, machine)
        if compute(call) != call.result(1):
            raise AssertionError(f"other bits {what}: {text}")


# The tests. Each takes the machine, and raises if something is wrong.


def the_instructions(machine: Target) -> None:
    """One multiplication after another on random tiles, against the model in tiles.py, bit by bit."""
    rng = np.random.default_rng(5)
    for dtype in machine.tiles.dtypes:
        for _ in range(20):
            rows, columns, pairs = (int(rng.integers(1, 17)) for _ in range(3))
            shapes = [(rows, 4 * columns), (rows, 4 * pairs), (pairs, 4 * columns)]
            words = np.array(configuration(shapes), np.uint64)
            m = Module()
            f = m.function("run", ["p:config", "p:sums", "p:left", "p:right", "p:out"], exported=True)
            code = TileCode(f, dtype, None, "")
            code.begin(f.args[0])
            for tile in range(3):
                code.load(tile, f.args[1 + tile], 64)
            code.multiply(0, 1, 2)
            code.store(0, f.args[4], 64)
            code.end()
            module = jit.load(str(m), machine.triple, machine.cpu, machine.features)
            data = [rng.integers(0, 1 << 16, 512, np.uint16) for _ in range(3)]
            out = np.zeros(256, np.uint32)
            address = ctypes.c_void_p
            run = ctypes.CFUNCTYPE(None, *[address] * 5)(module.address("run"))
            run(words.ctypes.data, *(array.ctypes.data for array in data), out.ctypes.data)
            model = Model()
            model.ldtilecfg(words.tobytes())
            for tile, array in enumerate(data):
                model.tileloadd(tile, [array[32 * r : 32 * (r + 1)].tobytes() for r in range(16)])
            getattr(model, INSTRUCTIONS[dtype])(0, 1, 2)
            expected = np.array([np.frombuffer(row, np.float32) for row in model.tilestored(0)])
            found = out.view(np.float32).reshape(16, 16)[:rows, :columns]
            nan = np.isnan(expected)
            if not np.array_equal(np.isnan(found), nan) or found[~nan].tobytes() != expected[~nan].tobytes():
                raise AssertionError(f"{dtype}: tiles of {shapes} are multiplied otherwise than the model says")


def registers_are_given_back(machine: Target) -> None:
    """After a call the calling thread has no configuration: nothing of tiles is saved for it any more."""
    m = Module()
    f = m.function("look", ["p:to"], exported=True)
    m.declarations.add("declare void @llvm.x86.sttilecfg(ptr)")
    f.do(f"call void @llvm.x86.sttilecfg(ptr {f.args[0]})")
    module = jit.load(str(m), machine.triple, machine.cpu, machine.features)
    Call(REAL[0], machine).result(2)
    seen = np.full(64, 0xFF, np.uint8)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(module.address("look"))(seen.ctypes.data)
    if seen.any():
        raise AssertionError("the registers are still configured")


def exactness(machine: Target) -> None:
    """Small integers, between unmapped pages, with poisoned buffers, on several threads: equal to the reference."""
    for text in (*TILED.values(), *SPLIT.values()):
        if kernel.make_plan(Problem.parse(text), machine, 1).nest.startswith("tile"):
            check(Problem.parse(text), machine, (1, 2, min(16, available())), 1, gaps=True)


def random_problems(machine: Target, problems: int = 300) -> None:
    """The same of random ones."""
    for seed in range(problems):
        p = draw_tiled(seed)
        if seed % 3 == 0:
            p = replace(p, dtype="f32", out_dtype="f32", algorithm=("bf16x6", "bf16x3")[seed % 2])
        plan = kernel.make_plan(p, machine, 1)
        if not isinstance(plan, Refusal) and plan.nest.startswith("tile"):
            check(p, machine, (1, 3), seed, gaps=seed % 2 == 0)


def bits_of_the_emulation(machine: Target) -> None:
    """Real numbers have the bits that plain code gives."""
    emulated = replace(machine, tiles=replace(machine.tiles, emulated=True))
    same(machine, lambda call: call.result(2, emulated), "in the emulation")


def bits_on_any_number_of_threads(machine: Target) -> None:
    """1 to 16 and 64 threads."""
    for threads in (*range(2, 17), 64):
        same(machine, lambda call, n=threads: call.result(n), f"on {threads} threads")  # type: ignore[misc]


def bits_of_pairs_of_either_side(machine: Target) -> None:
    """Weights whose tiles read pairs of x have the bits of those that read pairs of y, which are the right ones."""
    every = [text for text in (*TILED.values(), *REAL) if text.startswith("w")]
    for text in every:
        p, results = Problem.parse(text), set[bytes]()
        if p.algorithm != "direct" or p.dtype not in machine.tiles.dtypes or max(p.w) == 1:
            continue
        for x_paired in (False, True):
            with mock.patch.object(sums_plan, "ways", lambda *_, way=x_paired: (way,)):
                results |= {Call(text, machine).result(threads) for threads in (1, 3)}
                check(p, machine, (1, 2), 1, gaps=True)
        if len(results) > 1:
            raise AssertionError(f"other bits if other sides are in pairs: {text}")


def many_more_threads_than_cpus(machine: Target) -> None:
    """Threads that are put aside in the middle of a sum keep what their registers hold."""
    stop = threading.Event()
    crowd = [threading.Thread(target=_spin, args=(stop,), daemon=True) for _ in range(2)]
    for thread in crowd:
        thread.start()
    try:
        for text in REAL:
            call = Call(text, machine)
            expected = call.result(1)
            with however_small():
                found = kernel.build(call.p, machine, 4 * available())
            for _ in range(50):
                if call.again(found) != expected:
                    raise AssertionError(f"other bits with more threads than CPUs: {text}")
    finally:
        stop.set()


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def threads_that_come_and_go(machine: Target) -> None:
    """Python's threads, each of which calls and ends."""
    wrong: list[str] = []

    def work(text: str) -> None:
        call = Call(text, machine)
        if len({call.result(n) for n in (1, 2, 3)}) != 1:
            wrong.append(text)

    for _ in range(5):
        crowd = [threading.Thread(target=work, args=(text,)) for text in REAL]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
    if wrong:
        raise AssertionError(f"other bits in a thread of Python's: {wrong[0]}")


def signals(machine: Target) -> None:
    """A signal each half millisecond, with a handler of Python's."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            same(machine, lambda call: call.result(2), "with signals")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if not seen:
        raise AssertionError("no signal came")


def fork(machine: Target) -> None:
    """A child computes as its parent does, and its own child too."""
    call = Call(REAL[0], machine)
    expected = call.result(2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            good = call.result(2) == expected
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if call.result(2) == expected else 1)
            good = good and os.waitpid(grandchild, 0)[1] == 0
            status = 0 if good else 1
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        raise AssertionError("the child of a fork has failed")
    if call.result(2) != expected:
        raise AssertionError("other bits after a fork")


def ends_of_processes(machine: Target) -> None:
    """A process ends well after its work. With a handler of faults on a stack of its own, it may be refused tiles."""
    for words in ([sys.executable, "-c"], [sys.executable, "-Xfaulthandler", "-c"]):
        code = f"import sys; sys.argv = ['', {str(machine.tiles.emulated)!r}]; import runpy; "
        code += f"runpy.run_path({str(Path(__file__))!r})['once']()"
        done = subprocess.run([*words, code], capture_output=True, text=True, check=False)
        if done.returncode or done.stdout.strip() not in ("computed", "refused"):
            raise AssertionError(f"a process ended with {done.returncode}: {done.stdout}{done.stderr}")


def once() -> None:
    """One call, in a process of its own."""
    machine = emulated() if sys.argv[1] == "True" else native()
    if not machine.tiles.emulated and refusal():
        print("refused")
        return
    print("computed" if Call(REAL[0], machine).result(3) else "")


TESTS: tuple[Callable[[Target], None], ...] = (
    the_instructions,
    registers_are_given_back,
    exactness,
    random_problems,
    bits_of_the_emulation,
    bits_on_any_number_of_threads,
    bits_of_pairs_of_either_side,
    many_more_threads_than_cpus,
    threads_that_come_and_go,
    signals,
    fork,
    ends_of_processes,
)
ON_HARDWARE = (the_instructions, registers_are_given_back, bits_of_the_emulation)


def emulated() -> Target:
    """This machine, with tile registers in memory."""
    return replace(native(), name="amx", tiles=Tiles(("bf16", "f16"), emulated=True))


def run(machine: Target, tests: tuple[Callable[[Target], None], ...]) -> int:
    """Run tests; gives how many have failed."""
    failed = 0
    for test in tests:
        started = time.monotonic()
        try:
            test(machine)
        except Exception:
            failed += 1
            print(f"FAILED  {test.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok      {test.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="run with plain code in place of the instructions")
    parser.add_argument("--only", default="", help="tests whose names have this in them")
    given = parser.parse_args()
    tests = tuple(test for test in TESTS if given.only in test.__name__)
    if given.emulated:
        machine, tests = emulated(), tuple(test for test in tests if test not in ON_HARDWARE)
    elif not tile_types(native().features):
        print("This machine has no tile registers (AMX): there is nothing to test.")
        return 0
    elif reason := refusal():
        print(f"This machine has tile registers (AMX), but {reason}.")
        return 1
    else:
        machine = native()
    print(f"{machine.cpu}, tiles of {', '.join(machine.tiles.dtypes)}, {available()} CPUs", flush=True)
    failed = run(machine, tests)
    print(f"{failed} of {len(tests)} failed" if failed else f"all {len(tests)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
