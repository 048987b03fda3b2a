"""The kernels as they compile, for GPUs that are not here: from Triton down to machine code, with what they take.

python tests/gpu/test_offline.py     every layer, result, type and kind of GPU, some 700 of them
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from gpu_problems import NXC, PROBLEMS
from triton.backends.compiler import GPUTarget

from convgrad.gpu import compile as compiler
from convgrad.gpu.plan import blocks, choose, registry, relaid, rows
from convgrad.gpu.plan.records import Descriptor, Launch
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem
from marks import slow_but

KINDS = ["sm_80", "sm_90", "sm_100"]

LAYERS = {
    "dense": f"{{}} {{}} n8 g1 cx64 cy128 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {NXC}",
    "large": f"{{}} {{}} n8 g1 cx512 cy512 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1 {NXC}",
    "strided": "{} {} n8 g1 cx64 cy64 x56x56 w3x3 y28x28 s2x2 d1x1 p1x1",
    "stem": f"{{}} {{}} n8 g1 cx3 cy64 x224x224 w7x7 y112x112 s2x2 d1x1 p3x3 {NXC}",
    "depthwise": f"{{}} {{}} n8 g192 cx1 cy1 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {NXC}",
    "beyond 2^31": "{} {} n64 g1 cx64 cy64 x1024x1024 w3x3 y1024x1024 s1x1 d1x1 p1x1",
    **PROBLEMS,
}

QUICK = [
    ("stem", "w", "bf16", "sm_90"),
    ("depthwise", "w", "bf16", "sm_90"),
    ("depthwise", "x", "f32", "sm_100"),
]
"""Every kernel but one, which the next test compiles."""
CHOSEN = [
    *QUICK,
    ("dense", "x", "bf16", "sm_90"),
    ("dense", "w", "f32", "sm_100"),
    ("large", "x", "f16", "sm_80"),
    ("strided", "x", "f32", "sm_80"),
    ("3d", "y", "f64", "sm_90"),
    ("beyond 2^31", "y", "bf16", "sm_80"),
]
SPILLS = 4  # instructions in a loop of hundreds: split products of f32 come close to the registers that there are

ALL = [(n, w, t, k) for n in LAYERS for w in "xyw" for t in ("f32", "bf16", "f16", "f64") for k in KINDS]


def told_by(tool: str, option: str, kernel) -> str:
    """What a tool of CUDA says of a kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    file = next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    return subprocess.run([path, option, file], capture_output=True, text=True, check=True).stdout


def machine_code(kernel) -> str:
    """A kernel as the processor has it."""
    return told_by("nvdisasm", "-c", kernel)


def spills(kernel) -> int:
    """Instructions within loops that move registers to memory and back, because there were too few."""
    # What is moved lies on the stack. To read the code takes ten times as long as to ask whether there is one.
    stack = re.search(r"STACK:(\d+)", told_by("cuobjdump", "-res-usage", kernel))
    if stack[1] == "0":
        return 0
    labels, code = {}, []
    for line in machine_code(kernel).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    assert code
    found: set[int] = set()
    for at, instruction in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if jump and labels.get(jump[1], at + 1) <= at:
            found |= {i for i in range(labels[jump[1]], at) if re.search(r"\b(LDL|STL)\b", code[i])}
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_spills_are_seen(kind):
    """Where a kernel is left too few registers."""
    target = of_kind(kind)
    plan = choose.plan(Problem.parse(LAYERS["depthwise"].format("w", "f32")), target)
    assert spills(compiler.build(replace(plan.launches[0], registers=32), target, aligned=True)) > SPILLS


@pytest.mark.parametrize(("name", "wanted", "dtype", "kind"), slow_but(QUICK, CHOSEN))
def test_plans_compile(name, wanted, dtype, kind):
    target = of_kind(kind)
    plan = choose.plan(Problem.parse(LAYERS[name].format(wanted, dtype)), target)
    assert plan.launches
    for launch in plan.launches:
        kernel = compiler.build(launch, target, aligned=True)
        assert kernel.metadata.shared <= target.shared
        assert len(kernel.asm["cubin"])
        assert (found := spills(kernel)) <= SPILLS, f"{found} spills: {plan}"
        if launch.kernel in ("gather", "weights") and (dtype in ("bf16", "f16") or plan.precision == "bf16x6"):
            assert "mma" in kernel.asm["ptx"], "tensor cores"


WITH_COPIES = {
    "copies": "{} {} n32 g1 cx128 cy128 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1",
    "blocks": f"{{}} {{}} n32 g32 cx4 cy4 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {NXC}",
}


# Every level, tensor and type, on kinds of GPU in turn.
EVERY_COPY = [(n, w, t) for n in WITH_COPIES for w in "xw" for t in ("f32", "bf16", "f64")]
DEALT_COPIES = [(*case, KINDS[at % len(KINDS)]) for at, case in enumerate(EVERY_COPY)]


@pytest.mark.parametrize(
    ("level", "wanted", "dtype", "kind"),
    slow_but(
        [("blocks", "w", "bf16", "sm_80")],
        DEALT_COPIES,
    ),
)
def test_copies_compile(level, wanted, dtype, kind):
    """They load and store 16 bytes at a time, whatever lies between."""
    target = of_kind(kind)
    problem = Problem.parse(WITH_COPIES[level].format(wanted, dtype))
    if level == "copies":
        plan = relaid.around(problem, relaid.ways(problem)[0], target, "default")
    else:
        plan = blocks.joined(problem, 16, target, "default")
    for launch in plan.launches:
        code = compiler.build(launch, target, aligned=True).asm["ptx"]
        if launch.kernel == "relay" and level == "copies" and "w" not in dict(launch.tensors):
            assert re.search(r"ld\.global\S*(v4\.b32|v2\.b64)", code)
            assert re.search(r"st\.global\S*(v4\.b32|v2\.b64)", code)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["x", "w"])
def test_products_on_tensor_cores_do_not_wait_for_each_other(wanted, tmp_path):
    """The assembler says where it makes them, as it did of tiles of 128x128 while a loop might not run at all."""
    target = of_kind("sm_90")
    problem = Problem.parse(LAYERS["large"].format(wanted, "bf16"))
    ways = [way for way in choose.candidates(problem, target) if way.tile in ((128, 128, 64), (128, 256, 64))]
    assert len({way.tile for way in ways}) == 2
    for way in {way.tile: way for way in ways}.values():
        kernel = compiler.build(choose.settle(problem, target, way).launches[0], target, aligned=True)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        (tmp_path / "code.ptx").write_text(kernel.asm["ptx"], encoding="utf-8")
        command = [str(tool), "-v", "--gpu-name=sm_90a", "code.ptx", "-o", "code.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stderr
        assert "Used" in told, "verbose"
        assert "Performance Loss" not in told, way


WALKS = [
    ("depthwise", "x", "bf16", "sm_90"),
    ("depthwise", "w", "f32", "sm_80"),
    ("pixels", "y", "bf16", "sm_100"),
    ("pixels", "w", "bf16", "sm_90"),
    ("large kernel", "x", "bf16", "sm_90"),
    ("large kernel", "w", "bf16", "sm_90"),
    ("large kernel, pixels", "x", "bf16", "sm_80"),
    ("four of a group", "x", "f32", "sm_90"),
    ("one dimension", "x", "bf16", "sm_100"),
    ("one dimension", "w", "f32", "sm_90"),
]
DEPTHWISE = {
    "depthwise": f"{{}} {{}} n8 g192 cx1 cy1 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1 {NXC}",
    "pixels": "{} {} n8 g192 cx1 cy1 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1",
    "large kernel": f"{{}} {{}} n8 g96 cx1 cy1 x56x56 w7x7 y56x56 s1x1 d1x1 p3x3 {NXC}",
    "large kernel, pixels": "{} {} n8 g96 cx1 cy1 x56x56 w7x7 y56x56 s1x1 d1x1 p3x3",
    "four of a group": f"{{}} {{}} n8 g32 cx4 cy4 x56x56 w3x1 y56x56 s1x1 d1x1 p1x0 {NXC}",
    "one dimension": "{} {} n8 g1024 cx1 cy1 x4096 w4 y4099 s1 d1 p3 x@nxc y@nxc",
}


@pytest.mark.parametrize(("name", "wanted", "dtype", "kind"), slow_but(WALKS[3:4], WALKS))
def test_walks_compile(name, wanted, dtype, kind):
    """Rows that are kept stay in registers, and neighbours are loaded together, all of them through shared memory."""
    target, problem = of_kind(kind), Problem.parse(DEPTHWISE[name].format(wanted, dtype))
    plan = registry.make_plan(problem, target)
    assert plan.level == ("bands" if name == "large kernel, pixels" else "rows")
    kernel = compiler.build(plan.launches[0], target, aligned=True)
    assert spills(kernel) == 0
    assert ".local" not in kernel.asm["ptx"]
    if plan.level == "bands":
        assert "ldmatrix" in kernel.asm["ptx"]
    elif plan.launches[0].constant("STAGES") > 1:
        assert re.search(r"cp\.async\.c[ag]\.shared", kernel.asm["ptx"])
        beside = kernel.metadata.shared - rows.shared(problem, rows.choose(problem, target))
        assert 0 <= beside <= 2048, "weights may change their layout before the loop"
    elif name != "large kernel":  # a thread has a channel or two of it
        assert re.search(r"ld\.global\.v[24]\.b32", kernel.asm["ptx"])


@pytest.mark.slow
def test_neighbours_are_loaded_together():
    """Channels that lie side by side come in pieces of 16 bytes; of memory that begins anywhere, one by one."""
    target = of_kind("sm_90")
    plan = choose.plan(Problem.parse(LAYERS["dense"].format("x", "bf16")), target)
    (launch,) = plan.launches
    aligned, anywhere = (compiler.build(launch, target, aligned=way).asm["ptx"] for way in (True, False))
    pieces = re.compile(r"cp\.async\.cg\.shared\.global [^;]*0x10, ")
    assert pieces.search(aligned)
    assert not pieces.search(anywhere)


@pytest.mark.parametrize("name", ["gather", "lanes"])
def test_a_phase_without_taps_divides_by_nothing(name):
    """What a loop loads first is computed before it is known whether it runs at all, so nothing may divide by no taps:
    the compiler would conclude that there are some, and drop the question. What is left are divisions of programs.
    """
    target = of_kind("sm_90")
    channels = "g1 cx64 cy64" if name == "gather" else "g64 cx1 cy1"
    problem = Problem.parse(f"x bf16 n2 {channels} x64x64 w1x1 y32x32 s2x2 d1x1 p0x0 {NXC}")
    (launch,) = choose.plan(problem, target).launches
    assert launch.kernel == name
    code = compiler.build(launch, target, aligned=True).asm["llir"]
    assert not re.search(r"\b(udiv|urem)\b", code), "taps are what is known not to be negative"


@pytest.mark.slow
def test_results_are_stored_together():
    """16 bytes at a time, by kernels of sums in parts as well."""
    target = of_kind("sm_90")
    for wanted in "xyw":
        plan = choose.plan(Problem.parse(LAYERS["dense"].format(wanted, "bf16")), target)
        for launch in plan.launches[:1]:
            code = compiler.build(launch, target, aligned=True).asm["ptx"]
            assert set(re.findall(r"st\.global\.(\S+)", code)) == {"v4.b32"}


@pytest.mark.parametrize("precision", slow_but(["tf32x3"], ["ieee", "tf32x3"]))
def test_precisions_compile(precision):
    target = of_kind("sm_90")
    plan = choose.plan(Problem.parse(LAYERS["dense"].format("x", "f32")), target, precision)
    assert plan.precision == precision
    assert ("mma" in compiler.build(plan.launches[0], target, True).asm["ptx"]) == (precision != "ieee")


@pytest.mark.slow
def test_portable_kernels_compile_for_gpus_of_amd():
    """Nothing is computed there, but nothing in these kernels stands in the way either."""
    plan = choose.plan(Problem.parse(LAYERS["dense"].format("x", "f32")), of_kind("sm_80"))
    for launch in plan.launches:
        target, options = GPUTarget("hip", "gfx942", 64), {"num_warps": launch.warps, "num_stages": 2}
        kernel = triton.compile(compiler.source(launch, aligned=True), target, options)
        assert kernel.metadata.shared <= 64 << 10
        assert len(kernel.asm["hsaco"])


@pytest.mark.parametrize("swizzle", [128, 64])
def test_kernels_in_gluon_compile(monkeypatch, swizzle):
    """Descriptors become tensor maps, which the compiler tells how to encode; code for Hopper uses its copy engine."""
    import copying

    monkeypatch.setattr(compiler, "function", lambda launch: copying.copying)
    wide = Descriptor("x", "bf16", (16, 256), (256, 1), (16, 64), swizzle)
    launch = Launch(
        "copying", 4, (("notes", "f32"),), (("columns", 256),), (("BLOCK", 16),), 4, 1,
        descriptors=(wide, replace(wide, tensor="y", offset=64)), registers=64,
    )  # fmt: skip
    kernel = compiler.build(launch, of_kind("sm_90"), aligned=True)
    first, second = kernel.metadata.tensordesc_meta
    assert first == second
    assert (first["elem_size"], first["block_size"]) == (2, [16, swizzle // 2])
    assert "cp.async.bulk.tensor.2d.shared" in kernel.asm["ptx"]
    assert ".maxnreg 64" in kernel.asm["ptx"]


def main() -> int:
    failures = 0
    for at, which in enumerate(ALL, 1):
        try:
            test_plans_compile(*which)
        except Exception as error:  # whatever it is, the next one is tried
            failures += 1
            print(*which, f"{type(error).__name__}: {error}"[:600], flush=True)
        if at % 50 == 0:
            print(f"{at} of {len(ALL)}, {failures} failed", flush=True)
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
