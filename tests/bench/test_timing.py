"""Timing in blocks, and the measured limits of the machine."""

from __future__ import annotations

import ctypes
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from convgrad.bench import timing
from convgrad.cpu.compile import jit


class Clock:
    """Time that passes only by sleeping and working, so that a busy machine does not matter here."""

    def __init__(self):
        self.now = 0.0
        self.used = 0.0
        self.spins_until = 0.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.used

    def sleep(self, seconds):
        # A thread of the process goes on spinning meanwhile.
        self.used += max(0.0, min(seconds, self.spins_until - self.now))
        self.now += seconds

    def work(self, seconds):
        self.now += seconds
        self.used += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_callables_take_turns_in_blocks(clock, monkeypatch):
    order = []
    rest = timing.rest
    monkeypatch.setattr(timing, "rest", lambda: (order.append("rest"), rest()))
    callables = {
        "a": lambda: (order.append("a"), clock.work(0.0005)),
        "b": lambda: (order.append("b"), clock.work(0.002 if len(order) % 2 else 0.003)),
    }
    found = timing.alternate(callables, timing.Pace(budget=0.4, blocks=3))
    assert [name for name, _ in itertools.groupby(order)] == [*["rest", "a", "rest", "b"] * 3, "rest"]
    assert found["a"].blocks == found["b"].blocks == 3
    assert found["a"].least == pytest.approx(0.0005)
    assert found["b"].least == pytest.approx(0.002)
    # A block begins with warm-up runs that do not count: at least 4 ms of them.
    assert order.count("a") >= found["a"].runs + 3 * 8
    assert found["a"].runs > 50
    assert clock.now == pytest.approx(0.4, rel=0.1)


def test_the_middle_is_that_of_the_blocks(clock, monkeypatch):
    """One block in three with ten times as many runs moves the middle of all runs, not that of the blocks' middles."""
    blocks = []
    monkeypatch.setattr(timing, "rest", lambda: blocks.append(clock.now))
    callables = {"a": lambda: clock.work(0.0001 if len(blocks) == 2 else 0.001)}
    found = timing.alternate(callables, timing.Pace(budget=0.3, blocks=3))
    assert found["a"].least == pytest.approx(0.0001)
    assert found["a"].middle == pytest.approx(0.001)


def test_blocks_in_a_slow_moment_do_not_count(clock, monkeypatch):
    """Neither the one before the probe that tells of it nor the one after, though a run of them is the quickest."""
    monkeypatch.setattr(timing, "rest", lambda: None)
    moments = iter([True, True, False, True, True])
    blocks = itertools.count()
    lengths = [0.004, 0.001, 0.002, 0.003]
    state = {"length": None}

    def steady():
        state["length"] = lengths[min(next(blocks), 3)]
        return next(moments)

    found = timing.alternate({"a": lambda: clock.work(state["length"])}, timing.Pace(budget=0.4), steady)
    assert found["a"].blocks == 2
    assert found["a"].least == pytest.approx(0.003)
    assert found["a"].steady
    assert next(moments, None) is None


def test_blocks_are_repeated_until_two_count(clock):
    """Only those of a callable that has fewer."""
    order = []
    callables = {name: lambda name=name: (order.append(name), clock.work(0.001)) for name in "ab"}
    # Before a, b, a, b, a, b and after them; then before and after b, until its second block counts.
    moments = iter([True, True, True, True, False, True, False, True, False, True, True])
    found = timing.alternate(callables, timing.Pace(budget=0.4, blocks=3), lambda: next(moments))
    assert [name for name, _ in itertools.groupby(order)] == ["a", "b", "a", "b", "a", "b"]
    assert found["a"].blocks == found["b"].blocks == 2
    assert next(moments, None) is None


def test_a_long_rest_leaves_time_for_a_block(clock, monkeypatch):
    monkeypatch.setattr(timing, "rest", lambda: clock.sleep(0.2))
    found = timing.alternate({"a": lambda: clock.work(0.001)}, timing.Pace(budget=0.4, blocks=4))
    assert found["a"].runs >= 20 * found["a"].blocks > 0


def test_a_machine_that_never_rests_is_said_to_be_restless(clock):
    callables = {"a": lambda: clock.work(0.001), "b": lambda: clock.work(0.002)}
    found = timing.alternate(callables, timing.Pace(budget=0.4, blocks=2), lambda: False)
    assert timing.restless(found) == "a, b"
    assert found["a"].least == pytest.approx(0.001)
    assert found["a"].blocks > 2
    assert 0.8 <= clock.now <= 1.2


def test_the_probe_knows_how_fast_the_machine_was(clock):
    length = {"now": 0.001}
    probe = timing.Probe(lambda: clock.work(length["now"]))
    verdicts = []
    for length["now"] in (0.001, 0.0011, 0.0015, 0.002, 0.0005, 0.001):
        verdicts.append(probe.steady())
    assert verdicts == [True, True, False, False, True, False]


@pytest.mark.slow
def test_the_probe_computes():
    """On a busy machine it may be steady or not."""
    assert timing.Probe.of(2).steady() in (True, False)


def test_a_slow_callable_does_not_spend_the_time_of_others(clock):
    calls = []
    callables = {"slow": lambda: (calls.append(1), clock.work(0.2)), "fast": lambda: clock.work(0.001)}
    found = timing.alternate(callables, timing.Pace(budget=0.3, blocks=4))
    assert len(calls) == found["slow"].runs == 1
    assert found["slow"].least == pytest.approx(0.2)
    assert found["fast"].blocks == 4


def test_real_time_passes():
    found = timing.alternate({"sleep": lambda: time.sleep(0.001)}, timing.Pace(budget=0.05))
    assert 0.001 <= found["sleep"].least <= found["sleep"].middle


def test_rest_waits_for_threads_that_spin(clock):
    clock.spins_until = 0.05
    timing.rest()
    assert 0.05 <= clock.now < 0.07


def test_rest_is_short_where_nobody_spins(clock):
    timing.rest()
    assert clock.now == pytest.approx(2 * 0.004)


def test_rest_gives_up(clock):
    clock.spins_until = 1e9
    timing.rest(longest=0.05)
    assert 0.05 <= clock.now < 0.06


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_the_loop_does_the_work_it_is_counted_for(dtype):
    """Every multiply-add of 0.5 * 0.5 adds 0.25 to a sum; the sums together tell how many there were."""
    text, flops = timing._fma_loop(dtype, jit.host()[0], jit.host()[2].split(","))
    module = jit.load(text, *jit.host())
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(module.address("fma"))
    data = np.zeros(1 << 12, np.float32 if dtype == "f32" else np.float64)
    factors = flops // 2 // (12 * 8) if jit.host()[0].startswith("x86") else flops // 2 // (20 * 8)
    data[: 2 * factors] = 0.5
    function(3, data.ctypes.data)
    assert data[2 * factors :].sum() / 0.25 == 3 * flops / 2


def test_speeds_are_those_of_a_computer():
    one = timing.fma_speed("f32", 1, 0.02)
    assert 1e8 < one < 1e13
    assert 1e8 < timing.fma_speed("f32", 2, 0.02) < 2.5 * 1e13
    assert 1e7 < timing.copy_speed(1 << 20, 2, 0.02) < 1e13


def test_bf16_needs_the_feature():
    assert timing._fma_loop("bf16", "x86_64-linux", ["+avx512f"]) is None
    text, flops = timing._fma_loop("bf16", "x86_64-linux", ["+avx512f", "+avx512bf16"])
    assert "dpbf16ps" in text
    assert flops == 2 * timing._fma_loop("f32", "x86_64-linux", ["+avx512f"])[1]


MACHINE = timing.Machine(
    cpu="a",
    threads=1,
    fma={"f32": 1e11, "f64": 5e10},
    fma_single={"f32": 1e11, "f64": 5e10},
    bf16_dot=None,
    copies={1 << 20: 4e10, 1 << 24: 1e10},
)


def test_bound():
    assert MACHINE.copy_speed(1 << 22) == pytest.approx(2.5e10)
    assert MACHINE.copy_speed(1) == 4e10
    assert MACHINE.copy_speed(1 << 30) == 1e10
    assert MACHINE.bound(10**9, 1 << 20, "bf16") == (pytest.approx(0.01), "fma")
    dots = replace(MACHINE, bf16_dot=2e11)
    assert dots.bound(10**9, 1 << 20, "bf16") == (pytest.approx(0.005), "dot")
    assert dots.bound(10**9, 1 << 20, "f16") == (pytest.approx(0.01), "fma")
    assert MACHINE.bound(10**9, 1 << 20, "f64") == (pytest.approx(0.02), "fma")
    assert MACHINE.bound(10**6, 1 << 24, "f32") == (pytest.approx((1 << 24) / 1e10), "copy")


def test_own_work_is_not_that_of_others():
    others = timing.OtherWork()
    share = others.share()
    assert share is None or 0 <= share <= 1


def test_work_of_others_is_what_this_process_did_not_do(monkeypatch):
    readings = iter([(10.0, 1.0, 100.0), (16.0, 3.0, 104.0)])
    monkeypatch.setattr(timing, "_cpu_seconds", lambda: next(readings))
    monkeypatch.setattr(timing, "cpu_count", lambda: 2)
    # Busy for 6 s of which 2 are ours, on two CPUs in 4 s.
    assert timing.OtherWork().share() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cpus", "found", "taken"),
    [
        (2, [117.0, 117.0, 230.0, 400.0], 230.0),  # two threads that shared a CPU at first
        (2, [117.0] * 9, 117.0),
        (1, [60.0, 230.0], 60.0),  # there is one CPU only
    ],
)
def test_threads_that_shared_a_cpu_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, cpus: int, found: list[float], taken: float
) -> None:
    speeds = iter(found)
    monkeypatch.setattr(timing, "fma_speed", lambda *_: next(speeds))
    monkeypatch.setattr(timing, "cpu_count", lambda: cpus)
    assert timing._together("f32", 2, 117.0, 0.01) == taken
