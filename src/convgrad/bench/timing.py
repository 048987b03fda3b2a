"""Timing that several thread pools can share a machine for, and the limits of the machine itself.

Two pools that spin while they wait, ours and an OpenMP one, slow each other two to three times when they take turns
quickly. So callables are measured in blocks, and a block begins when no thread of the process uses the CPU any more.

A virtual machine has moments in which everything takes up to twice as long, and no counter of the system shows them. So
a probe runs between the blocks, and those beside a slow one do not count.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count as count_up
from math import inf
from statistics import median
from typing import Any

import numpy as np

STEADY = 1.2  # a probe that takes so many times as long as its quickest run tells of a slow moment
PROBES = 10  # runs of a probe, of which the quickest counts
ENOUGH = 2  # blocks that must count: a slow moment may fall between two probes
PAUSE = 0.05  # seconds to wait before blocks are repeated


@dataclass(frozen=True)
class Timing:
    """How long one callable took, in seconds: the least of all runs, and the middle of the blocks' middles.

    `steady` says that none of them was in a moment in which the machine was known to be slow.
    """

    least: float
    middle: float
    runs: int
    blocks: int
    steady: bool = True


@dataclass(frozen=True)
class Pace:
    """How the time for one case is spent."""

    budget: float = 2.0  # seconds for all callables of a case together, the pauses included
    blocks: int = 4  # per callable
    warm_up: float = 0.004  # seconds at the beginning of a block whose runs do not count
    shortest: int = 3  # runs that a block has at least, unless a single run takes longer than its share of the budget


@dataclass
class _Block:
    """Runs in a row, and whether the machine was steady before and after them."""

    name: str
    times: list[float]
    before: bool
    after: bool | None = None

    @property
    def counts(self) -> bool:
        return self.before and self.after is True


def alternate(
    callables: Mapping[str, Callable[[], object]],
    pace: Pace = Pace(),
    steady: Callable[[], bool] = lambda: True,
) -> dict[str, Timing]:
    """Time callables in turns, one block each, until the budget is spent.

    `steady` says whether the machine is as fast as usual. A block counts if it was so before and after. A callable with
    too few such blocks gets more, for the time of the budget again; if it has none in the end, all its blocks count,
    and its timing says so.
    """
    blocks: list[_Block] = []
    share = pace.budget / max(1, len(callables))
    spent = dict.fromkeys(callables, 0.0)

    def moment() -> bool:
        rest()
        now = steady()
        if blocks and blocks[-1].after is None:
            blocks[-1].after = now
        return now

    def add(name: str, seconds: float) -> None:
        began = time.perf_counter()
        now = moment()
        # However long that took, half of the time is for the block.
        until = max(began + seconds, time.perf_counter() + seconds / 2)
        blocks.append(_Block(name, _block(callables[name], until, pace), now))
        spent[name] += time.perf_counter() - began

    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(pace.blocks):
            for name in callables:
                if not number or spent[name] < share:
                    add(name, (share - spent[name]) / (pace.blocks - number))
        moment()
        enough = {name: min(ENOUGH, count) for name, count in Counter(block.name for block in blocks).items()}
        end = time.perf_counter() + pace.budget
        while time.perf_counter() < end:
            counting = Counter(block.name for block in blocks if block.counts)
            lacking = [name for name in callables if counting[name] < enough[name]]
            if not lacking:
                break
            time.sleep(PAUSE)
            for name in lacking:
                add(name, share / pace.blocks)
            moment()
    finally:
        if collecting:
            gc.enable()
    return {name: _timing([block for block in blocks if block.name == name]) for name in callables}


def restless(times: Mapping[str, Timing]) -> str:
    """The names of those that were timed while the machine was slow."""
    return ", ".join(name for name, found in times.items() if not found.steady)


def _timing(blocks: list[_Block]) -> Timing:
    """What blocks of one callable tell: those that count, or all if none does."""
    counting = [block.times for block in blocks if block.counts]
    times = counting or [block.times for block in blocks]
    return Timing(
        least=min(map(min, times)),
        middle=median(map(median, times)),
        runs=sum(map(len, times)),
        blocks=len(times),
        steady=bool(counting),
    )


class Probe:
    """A short computation that tells whether the machine is as fast as it has been."""

    def __init__(self, work: Callable[[], object], learn: int = 20) -> None:
        self._work = work
        self._least = inf
        for _ in range(learn):
            self.steady()
            time.sleep(PAUSE / 2)

    @classmethod
    def of(cls, threads: int) -> Probe:
        """A convolution that is long enough for so many threads, which convgrad is to be set to."""
        from ..functional import convolution

        # Long beside what threads have to tell each other, which takes longer where their CPUs have no cache in common.
        data = np.ones((2 * threads, 28, 28, 64), np.float32)
        weights = np.ones((3, 3, 64, 64), np.float32)
        # Written to memory that is there: what the system takes to give some depends on what the process did before.
        out = np.zeros_like(data)
        return cls(lambda: convolution(data, weights, strides=1, pads_begin=1, pads_end=1, dilations=1, out=out))

    def steady(self) -> bool:
        """Whether it takes about as long now as it ever did."""
        took = []
        for _ in range(1 + PROBES):
            start = time.perf_counter()
            self._work()
            took.append(time.perf_counter() - start)
        least = min(took[1:])  # threads wake up in the first
        self._least = min(self._least, least)
        return least <= STEADY * self._least


def _block(function: Callable[[], object], until: float, pace: Pace) -> list[float]:
    """The times of runs in a row, the first ones left out. A run that takes all the time there is counts by itself."""
    clock = time.perf_counter
    start = clock()
    function()
    took = clock() - start
    if clock() + took > until:
        return [took]
    warm = start + pace.warm_up
    while clock() < warm:
        function()
    times: list[float] = []
    while True:
        start = clock()
        function()
        end = clock()
        times.append(end - start)
        if end >= until and len(times) >= pace.shortest:
            return times


def rest(longest: float = 0.25, step: float = 0.004, quiet: int = 2) -> None:
    """Sleep until no thread of this process has used the CPU for some steps: workers spin after their last task."""
    end = time.perf_counter() + longest
    calm = 0
    while calm < quiet and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(step)
        calm = calm + 1 if time.process_time() - before < step / 8 else 0


@dataclass(frozen=True)
class Machine:
    """What this machine can do at most with so many threads, measured now."""

    cpu: str
    threads: int
    fma: Mapping[str, float]  # element type → FLOP/s of multiply-adds in registers
    fma_single: Mapping[str, float]  # the same on one thread
    bf16_dot: float | None  # FLOP/s of the CPU's bf16 dot products, where it has them
    copies: Mapping[int, float]  # bytes of a working set → bytes/s, read and written, of a copy
    bf16_tiles: float | None = None  # FLOP/s of products of bf16 in tile registers, where it has them

    def copy_speed(self, size: int) -> float:
        """Bytes per second of a copy that touches so many bytes in all, between the sizes that were measured."""
        sizes = sorted(self.copies)
        speeds = [self.copies[s] for s in sizes]
        return float(np.interp(np.log(max(size, 1)), np.log(sizes), speeds))

    def bound(self, flops: int, size: int, dtype: str) -> tuple[float, str]:
        """The least time that flops and bytes allow, and what sets it: "fma", "dot" (that of bf16 pairs), "tile"
        (of bf16 in tile registers) or "copy".
        """
        compute, unit = flops / self.fma["f64" if dtype == "f64" else "f32"] if self.fma else 0.0, "fma"
        if dtype == "bf16" and self.bf16_dot:
            compute, unit = flops / self.bf16_dot, "dot"
        if dtype == "bf16" and self.bf16_tiles:
            compute, unit = flops / self.bf16_tiles, "tile"
        move = size / self.copy_speed(size)
        return (compute, unit) if compute >= move else (move, "copy")


def measure_machine(threads: int, seconds: float = 2.0) -> Machine:
    """Measure the limits of this machine; the time is divided between them."""
    sizes = [1 << power for power in (18, 20, 21, 22, 23, 24, 25, 26, 28)]
    piece = seconds / 16
    rest()
    fma, single = {}, {}
    for dtype in ("f32", "f64"):
        one = fma_speed(dtype, 1, piece)
        if one is None:
            break
        single[dtype] = one
        fma[dtype] = _together(dtype, threads, one, piece)
    dot, tiles = (
        None if (one := fma_speed(kind, 1, piece)) is None else _together(kind, threads, one, piece)
        for kind in ("bf16", "tiles")
    )
    copies = {size: copy_speed(size, threads, piece) for size in sizes}
    return Machine(cpu_name(), threads, fma, single, dot, copies, tiles)


def _together(dtype: str, threads: int, one: float, seconds: float) -> float:
    """The speed of all threads; measured again if they are hardly faster than one, which had a CPU to itself."""
    best = 0.0
    for _ in range(5):
        best = max(best, fma_speed(dtype, threads, seconds) or one)
        if best > 1.3 * one or not 1 < threads <= cpu_count():
            break
        time.sleep(0.05)
    return best


def cpu_name() -> str:
    """The CPU's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """How many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OtherWork:
    """How much of this process's CPUs other processes use, from the moment this is made."""

    def __init__(self) -> None:
        self._before = _cpu_seconds()

    def share(self) -> float | None:
        """CPU time of others over the time that there was, from 0 to 1; None where the system does not tell."""
        now = _cpu_seconds()
        if self._before is None or now is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self._before, now, strict=True))
        return min(1.0, max(0.0, busy - own) / max(wall * cpu_count(), 1e-9))

    def told(self) -> str:
        """A sentence about it, or nothing if it is little or unknown."""
        share = self.share()
        if share is None or share <= 0.02:
            return ""
        return f"Other processes took {share:.0%} of the CPUs meanwhile: do not trust these times."


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Seconds that the CPUs of this process were busy, that they worked for this process, and on the clock."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            for line in file:
                name, *fields = line.split()
                if name in names:
                    # user, nice, system, (idle, iowait left out), irq, softirq, steal
                    busy += sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7))
    except (OSError, IndexError, ValueError):
        return None
    return busy / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic()


def fma_speed(dtype: str, threads: int, seconds: float = 0.1) -> float | None:
    """FLOP/s of multiply-adds between registers, on so many threads; None where no code for them can be made.

    "bf16" stands for the CPU's own dot products of bf16 pairs, "tiles" for its products of bf16 in tile registers; None
    where it has none.
    """
    from ..cpu.compile import jit  # LLVM is loaded when it is needed.

    triple, _, features = jit.host()
    loop = _tile_loop(features) if dtype == "tiles" else _fma_loop(dtype, triple, features.split(","))
    module = None if loop is None else _loaded(loop[0])
    if loop is None or module is None:
        return None
    flops = loop[1]
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(module.address("fma"))
    places = [np.full(1 << 12, 1e-3, np.float32 if dtype != "f64" else np.float64) for _ in range(threads)]
    turns = 1 << 17  # some milliseconds: threads do not begin at quite the same time

    def work(thread: int) -> None:
        function(turns, places[thread].ctypes.data)

    took = _side_by_side(work, threads, seconds)
    del module
    return threads * turns * flops / took


def copy_speed(size: int, threads: int, seconds: float = 0.1) -> float:
    """Bytes per second, read and written, of copies that touch `size` bytes in all on so many threads."""
    from ..cpu.compile import jit
    from ..cpu.threads import team

    half = max(size // 2 // threads, 64)
    pairs = [(np.ones(half, np.uint8), np.zeros(half, np.uint8)) for _ in range(threads)]
    # Enough copies in a row to make the start of the threads small. Python's own threads take long to start: each needs
    # the interpreter.
    times = max(1, (1 << 24) * threads // size)
    places = [array.ctypes.data for pair in pairs for array in pair]
    move = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
    args = (ctypes.c_int64 * (3 + len(places)))(move, half, times, *places)
    module = jit.load(COPIES, *jit.host())
    best, end = inf, time.perf_counter() + seconds
    for turn in count_up():
        start = time.perf_counter()
        team.run(module.address("copies"), ctypes.addressof(args), threads)
        now = time.perf_counter()
        best = min(best, now - start)
        if turn >= 2 and now > end:
            break
    del module
    return 2 * half * threads * times / best


# A kernel: each thread copies its own bytes, again and again.
COPIES = """
define void @copies(ptr %args, i64 %thread, i64 %threads, ptr %team) nounwind {
entry:
  %half.p = getelementptr i64, ptr %args, i64 1
  %times.p = getelementptr i64, ptr %args, i64 2
  %own = getelementptr i64, ptr %args, i64 3
  %number = shl i64 %thread, 1
  %from.p = getelementptr ptr, ptr %own, i64 %number
  %to.p = getelementptr ptr, ptr %from.p, i64 1
  %move = load ptr, ptr %args
  %half = load i64, ptr %half.p
  %times = load i64, ptr %times.p
  %from = load ptr, ptr %from.p
  %to = load ptr, ptr %to.p
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %r = call ptr %move(ptr %to, ptr %from, i64 %half)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %times
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""


def _loaded(text: str) -> Any:
    """Machine code for this machine; None if none can be made."""
    from ..cpu.compile import jit
    from ..errors import CompileError

    try:
        return jit.load(text, *jit.host())
    except CompileError:
        return None


def _side_by_side(work: Callable[[int], None], threads: int, seconds: float) -> float:
    """The least time in which all threads have done their work once, each beginning at a common signal."""
    rounds: list[float] = []
    gate = threading.Barrier(threads + 1)
    running = True

    def follow(thread: int) -> None:
        while True:
            gate.wait()
            if not running:
                return
            began[thread] = time.perf_counter()
            work(thread)
            ended[thread] = time.perf_counter()
            gate.wait()

    began, ended = [0.0] * threads, [0.0] * threads
    followers = [threading.Thread(target=follow, args=(i,), daemon=True) for i in range(threads)]
    for follower in followers:
        follower.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 3:
        gate.wait()
        gate.wait()
        rounds.append(max(ended) - min(began))
    running = False
    gate.wait()
    for follower in followers:
        follower.join()
    return min(rounds)


def _tile_loop(features: str) -> tuple[str, int] | None:
    """IR of a loop of independent products of tiles of bf16, and the FLOPs of one turn; None if there are none, or the
    system does not let this process use them.
    """
    from ..cpu.amx.permission import refusal
    from ..cpu.amx.tiles import COLUMNS, PAIRS, ROWS, configuration
    from ..cpu.target import tile_types

    if "bf16" not in tile_types(features) or refusal():
        return None
    words = configuration([(ROWS, 4 * COLUMNS)] * 8)
    sums, unroll = 6, 2
    body = [f"  call void @llvm.x86.tdpbf16ps(i8 {i}, i8 6, i8 7)" for i in range(sums)] * unroll
    text = "\n".join(
        [
            f"@configuration = private constant [8 x i64] [{', '.join(f'i64 {word}' for word in words)}], align 64",
            "declare void @llvm.x86.ldtilecfg(ptr)",
            "declare void @llvm.x86.tilerelease()",
            "declare void @llvm.x86.tilezero(i8)",
            "declare void @llvm.x86.tdpbf16ps(i8, i8, i8)",
            "define void @fma(i64 %turns, ptr %data) {",
            "entry:",
            "  call void @llvm.x86.ldtilecfg(ptr @configuration)",
            *(f"  call void @llvm.x86.tilezero(i8 {i})" for i in range(8)),
            "  br label %loop",
            "loop:",
            "  %turn = phi i64 [ 0, %entry ], [ %turn.next, %loop ]",
            *body,
            "  %turn.next = add i64 %turn, 1",
            "  %more = icmp slt i64 %turn.next, %turns",
            "  br i1 %more, label %loop, label %exit",
            "exit:",
            "  call void @llvm.x86.tilerelease()",
            "  ret void",
            "}",
            "",
        ]
    )
    return text, 2 * ROWS * COLUMNS * 2 * PAIRS * sums * unroll


def _fma_loop(dtype: str, triple: str, features: list[str]) -> tuple[str, int] | None:
    """IR of a loop of independent multiply-adds, and the FLOPs of one turn."""
    x86 = triple.startswith(("x86_64", "i686", "amd64"))
    wide = 64 if "+avx512f" in features else 32 if "+avx" in features else 16
    scalar, size = ("double", 8) if dtype == "f64" else ("float", 4)
    lanes = wide // size
    vector = f"<{lanes} x {scalar}>"
    if dtype == "bf16":
        if "+avx512bf16" not in features:
            return None
        factor = f"<{2 * lanes} x bfloat>"
        name, order, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", "{c}, {f} %a, {f} %b", 2
        declared = f"{vector}, {factor}, {factor}"
    else:
        factor = vector
        # Fused where the CPU can, else two instructions.
        name, order, pairs = f"llvm.fmuladd.v{lanes}f{8 * size}", "{f} %a, {f} %b, {c}", 1
        declared = f"{vector}, {vector}, {vector}"
    # Two units with a latency of 4 need 8 sums in flight, four need 16; 16 registers also hold the two factors.
    sums = 12 if x86 else 20
    unroll = 8
    body, values = [], [f"%s{i}" for i in range(sums)]
    for turn in range(unroll):
        for i in range(sums):
            args = order.format(c=f"{vector} {values[i]}", f=factor)
            values[i] = f"%t{turn}.{i}"
            body.append(f"  {values[i]} = call {vector} @{name}({args})")
    phis = [f"  %s{i} = phi {vector} [ zeroinitializer, %entry ], [ {values[i]}, %loop ]" for i in range(sums)]
    stores = []
    for i in range(sums):
        # Every sum goes to a place of its own, or the optimizer would find it unused.
        stores.append(f"  %p{i} = getelementptr {vector}, ptr %data, i64 {i + 2}")
        stores.append(f"  store {vector} {values[i]}, ptr %p{i}, align {size}")
    text = "\n".join(
        [
            f"declare {vector} @{name}({declared})",
            "define void @fma(i64 %turns, ptr %data) #0 {",
            "entry:",
            f"  %a = load {factor}, ptr %data, align {size}",
            f"  %next = getelementptr {vector}, ptr %data, i64 1",
            f"  %b = load {factor}, ptr %next, align {size}",
            "  br label %loop",
            "loop:",
            "  %turn = phi i64 [ 0, %entry ], [ %turn.next, %loop ]",
            *phis,
            *body,
            "  %turn.next = add i64 %turn, 1",
            "  %more = icmp slt i64 %turn.next, %turns",
            "  br i1 %more, label %loop, label %exit",
            "exit:",
            *stores,
            "  ret void",
            "}",
            # Some CPUs' tuning halves vectors of 512 bits unless told otherwise.
            f'attributes #0 = {{ "min-legal-vector-width"="{8 * wide}" "prefer-vector-width"="{8 * wide}" }}',
            "",
        ]
    )
    return text, 2 * pairs * lanes * sums * unroll
