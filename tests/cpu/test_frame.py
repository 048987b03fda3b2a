"""The frame of a kernel: where its buffers are, and what its threads share."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from convgrad.cpu.compile import jit
from convgrad.cpu.emit.frame import Frame
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.plan.workspace import Buffer
from convgrad.cpu.threads import team

HOST = jit.host()
SIZES = {"sums": (16, False), "mine": (32, True), "weights": (48, False), "yours": (64, True)}


@pytest.mark.parametrize(("sum_", "kind"), [("float", np.float32), ("double", np.float64)])
def test_shared_buffers_come_first_and_then_those_of_each_thread(sum_: str, kind: type[np.floating]) -> None:
    """Every thread fills its own; the first one to come fills what is shared."""
    threads = 3
    frame = Frame(Module(), [Buffer(name, *size) for name, size in SIZES.items()], sum_)
    f = frame.f
    number = f.op(f"sitofp i64 {f.args[1]} to {sum_}")

    def fill(name: str, value: str) -> None:
        with f.loop(0, SIZES[name][0]) as i:
            f.store(value, f.at(frame.at[name], i, sum_), sum_, kind().itemsize)

    with frame.items("first", 1):
        fill("sums", "10.0")
        fill("weights", "20.0")
    fill("mine", number)
    frame.barrier()
    fill("yours", number)
    memory = np.full(64 + threads * 96 + 1, np.nan, kind)
    arguments = (ctypes.c_int64 * 5)(0, 0, 0, 0, memory.ctypes.data)
    module = jit.load(frame.end(), *HOST)
    team.run(module.address("kernel"), ctypes.addressof(arguments), threads)
    wanted = [*[10.0] * 16, *[20.0] * 48, *(float(t) for t in range(threads) for _ in range(96))]
    assert list(memory[:-1]) == wanted
    assert np.isnan(memory[-1])


def test_each_phase_has_a_counter_of_its_own() -> None:
    frame = Frame(Module(), [], "float")
    f = frame.f
    for phase, count in (("first", 5), ("second", 7)):
        with frame.items(phase, count) as item:
            f.op(f"atomicrmw add ptr {f.at(frame.tensors['y'], item, 'i64')}, i64 1 monotonic")
        frame.barrier()
    taken = np.zeros(8, np.int64)
    arguments = (ctypes.c_int64 * 5)(0, 0, taken.ctypes.data, 0, 0)
    module = jit.load(frame.end(), *HOST)
    team.run(module.address("kernel"), ctypes.addressof(arguments), 2)
    assert list(taken) == [2] * 5 + [1] * 2 + [0]
