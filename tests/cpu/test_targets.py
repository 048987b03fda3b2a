"""Machines: code for others assembles, levels of this one can be forced, and an unknown one is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import convgrad
from convgrad import ConvgradError
from convgrad.cpu import kernel, target
from convgrad.cpu.compile import jit
from convgrad.cpu.depthwise.records import ChannelsInLanes, PixelsInLanes
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.target import Target
from convgrad.cpu.wgrad.records import WeightGradient
from convgrad.spec.problem import Problem
from marks import slow_but

from . import machines
from .machines import ARM, X86

# The machine, and how its code looks: what multiplies and adds in f32 and f64, and what must not occur.
MACHINES = {
    "avx512": (
        machines.AVX512,
        (r"vfmadd\d+ps.*zmm", r"vfmadd\d+pd.*zmm"),
        "vdpbf16ps",
    ),
    "avx512 with bf16": (
        machines.AVX512_PAIRS,
        (r"vfmadd\d+ps.*zmm|vdpbf16ps.*zmm", r"vfmadd\d+pd.*zmm"),
        "vmulps",
    ),
    "avx2": (machines.AVX2, (r"vfmadd\d+ps.*ymm", r"vfmadd\d+pd.*ymm"), "zmm"),
    "baseline": (machines.BASELINE, (r"\bmulps.*xmm", r"\bmulpd.*xmm"), "ymm"),
    "neon": (machines.NEON, (r"fmla\s+v\d+\.4s", r"fmla\s+v\d+\.2d"), "bl\tfma"),
    "neon on a Mac": (
        Target("neon", "arm64-apple-macosx", "apple-m1", "+neon", 16, 32),
        (r"fmla\.4s", r"fmla\.2d"),
        "bl\t_fma",
    ),
    "risc-v": (
        Target("baseline", "riscv64-unknown-linux-gnu", "generic-rv64", "+d", 16, 16),
        (r"fmul\.s|fmadd\.s", r"fmul\.d|fmadd\.d"),
        "vle",
    ),
}
# Everything for the four kinds of machine; one for those that differ in name only.
CASES = [
    (name, wanted, dtype)
    for name in MACHINES
    for wanted in "xwy"
    for dtype in ("f32", "bf16", "f16", "f64")
    if name in ("avx512", "avx2", "baseline", "neon") or (wanted, dtype) in (("x", "bf16"), ("w", "bf16"), ("y", "f32"))
]


QUICK = [(name, *case) for name in MACHINES for case in (("x", "bf16"), ("w", "bf16"), ("y", "f32"))]


@pytest.mark.parametrize(("name", "wanted", "dtype"), slow_but(QUICK, CASES))
def test_code_for_other_machines(name: str, wanted: str, dtype: str) -> None:
    machine, products, never = MACHINES[name]
    cx, cy, layout = (18, 34, "x@nxc y@nxc w@xio") if dtype in ("f32", "bf16") else (33, 7, "")
    plan = make_plan(
        Problem.parse(f"{wanted} {dtype} n2 g1 cx{cx} cy{cy} x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {layout}"), machine, 2
    )
    assert isinstance(plan, Gather | WeightGradient)
    text = jit.assemble(kernel.write(plan), machine.triple, machine.cpu, machine.features)
    assert re.search(products[dtype == "f64"], text)
    assert never not in text
    assert "kernel" in text


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_a_pair_is_read_and_spread_by_the_instruction_that_multiplies_it(wanted: str) -> None:
    machine = MACHINES["avx512 with bf16"][0]
    text = f"{wanted} bf16 n2 g1 cx16 cy16 x6x16 w3x3 y6x16 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio"
    plan = make_plan(Problem.parse(text), machine, 2)
    code = jit.assemble(kernel.write(plan), machine.triple, machine.cpu, machine.features)
    products = re.findall(r"vdpbf16ps.*", code)
    assert products
    assert all("{1to16}" in product for product in products)


@pytest.mark.parametrize("name", ["avx2", "neon"])
def test_groups_side_by_side_on_other_machines(name: str) -> None:
    machine, _, never = MACHINES[name]
    for wanted in "xw":
        plan = make_plan(Problem.parse(f"{wanted} f32 n2 g24 cx1 cy1 x6x7 w3x3 y3x4 s2x2 d1x1 p1x1"), machine, 2)
        assert isinstance(plan, Gather | WeightGradient)
        assert (plan.tile.lane_groups if isinstance(plan, Gather) else plan.roles.lane_groups) == (1, 1)
        assert never not in jit.assemble(kernel.write(plan), machine.triple, machine.cpu, machine.features)
        plan = make_plan(
            Problem.parse(f"{wanted} f32 n2 g26 cx1 cy1 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 x@nxc y@nxc"), machine, 2
        )
        assert isinstance(plan, ChannelsInLanes)
        assert never not in jit.assemble(kernel.write(plan), machine.triple, machine.cpu, machine.features)
    for dtype in ("f32", "bf16", "f16"):
        plan = make_plan(Problem.parse(f"y {dtype} n2 g26 cx1 cy1 x6x17 w3x3 y6x17 s1x1 d1x1 p1x1 bias"), machine, 2)
        assert isinstance(plan, PixelsInLanes)
        assert never not in jit.assemble(kernel.write(plan), machine.triple, machine.cpu, machine.features)


@pytest.mark.parametrize(
    ("features", "triple", "level"),
    [
        ("+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx2,+fma", X86, ("avx512", 64, 32)),
        ("+avx512f,+avx2,+fma,+f16c", X86, ("avx2", 32, 16)),  # of no use without the others
        ("+avx2,+f16c", X86, ("baseline", 16, 16)),
        ("+sse4.2", X86, ("baseline", 16, 16)),
        ("+neon", ARM, ("neon", 16, 32)),
        ("", "arm64-apple-macosx", ("neon", 16, 32)),
        ("", "riscv64-unknown-linux-gnu", ("baseline", 16, 16)),
    ],
)
def test_level_of_features(features: str, triple: str, level: tuple[str, int, int]) -> None:
    assert target._level(frozenset(features.split(",")), triple) == level


COMPUTE = """
import numpy as np
import convgrad
from convgrad import calls, engine, numpy_backend
from convgrad.cpu import target

rng = np.random.default_rng(0)
x, w = rng.integers(-5, 6, (2, 9, 9, 19)).astype("f"), rng.integers(-5, 6, (3, 3, 19, 33)).astype("f")
attributes = dict(strides=2, pads_begin=1, pads_end=1, dilations=1)


def all_three():
    y = convgrad.convolution(x, w, **attributes)
    dx = convgrad.convolution_backward_data(y, w, x.shape, **attributes)
    return y, dx, convgrad.convolution_backward_weights(x, y, w.shape, **attributes)


results = all_three()
found = [call.choice.execute for call in calls.KNOWN.values()]
assert len(found) == 3 and all(f.plan.lanes == target.current().width // 4 for f in found), found
engine.BACKENDS = [numpy_backend]
for a, b in zip(results, all_three(), strict=True):
    assert np.array_equal(a, b)
print(target.current().name, target.current().width)
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "CONVGRAD_CACHE": "off", **environment}, text=True,
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "width"), [("avx2", 32), ("baseline", 16)])
def test_a_level_can_be_forced(name: str, width: int) -> None:
    if name == "avx2" and target.native().name not in ("avx512", "avx2"):
        pytest.skip("this machine has no AVX2")
    done = run(COMPUTE, CONVGRAD_TARGET=name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name, str(width)]


@pytest.mark.parametrize("name", ["", "native"])
def test_native_is_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_TARGET", name)
    assert target.current() == target.native()


@pytest.mark.parametrize("name", ["avx3", "AVX2 ", "neon" if target.native().name != "neon" else "avx2", "\u2713"])
def test_an_unknown_level_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_TARGET", name)
    one = np.ones((1, 1, 1), np.float32)
    for _ in range(2):
        with pytest.raises(
            ConvgradError, match=r"CONVGRAD_TARGET=.*this machine has native \(\w+\), .*baseline"
        ) as error:
            convgrad.convolution(one, one, strides=1, pads_begin=0, pads_end=0, dilations=1)
        assert repr(name) in str(error.value)
    # A mistake in the environment is no reason not to compute when it is gone.
    monkeypatch.delenv("CONVGRAD_TARGET")
    assert convgrad.convolution(one, one, strides=1, pads_begin=0, pads_end=0, dilations=1) == 1
