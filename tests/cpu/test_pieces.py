"""Numbers split into pieces of bf16 for tile registers: the pieces, the sums of their products, who may ask for them.

Plans run by emulation, as in test_amx.py.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import replace
from math import ceil, prod
from zlib import crc32

import numpy as np
import pytest

import convgrad
from convgrad.backend import Refusal
from convgrad.cpu import kernel
from convgrad.cpu.amx import permission, sums_kernel
from convgrad.cpu.amx.records import TileGather, TileSums
from convgrad.cpu.amx.split import SPLITS
from convgrad.cpu.compile import jit
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.ir.pieces import Pieces
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.target import Target, Tiles
from convgrad.errors import UnsupportedError
from convgrad.spec.problem import Problem
from marks import slow_but

from .machines import INTEL, SAPPHIRE_RAPIDS
from .named import SPLIT
from .problems import check, draw_tiled, however_small, targets
from .test_amx import HERE, SPOILT, configured, made, runs
from .test_reals import Tensors, _check_infinities, find
from .tiles import registers_used

MACHINES = {name: replace(targets()[name], tiles=Tiles(("bf16",), emulated=True)) for name in HERE}
HARDWARE = INTEL["sapphirerapids, tiles"]
WAYS = tuple(SPLITS)  # (algorithm, type)


def taken(wanted: str) -> list[tuple[str, str]]:
    """The ways in which a tensor is computed: weights of f16 are left to other nests."""
    return [(algorithm, dtype) for algorithm, dtype in WAYS if algorithm != "direct" or wanted != "w"]


# The pieces.


def upper(values: np.ndarray) -> np.ndarray:
    """The bits of bf16, as floats."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """To bf16, ties away from zero."""
    return upper((values.view(np.uint32) + np.uint32(0x8000)).view(np.float32))


def model(values: np.ndarray, count: int) -> list[np.ndarray]:
    """The pieces of f32 that do not become infinite."""
    found, left = [rounded(values)], values
    while len(found) < count:
        left = left - found[-1]
        found.append(rounded(left))
    return found


class Splitter:
    """The code that splits, compiled: by vectors of so many lanes, with the instruction for it or without."""

    def __init__(self, dtype: str, lanes: int, count: int, instruction: bool, single: bool = False) -> None:
        m = Module()
        f = m.function("split", ["p:from", "p:to", "i:n"], exported=True)
        source, to, n = f.args
        pieces = Pieces(dtype, lanes, "bfloat", True, instruction, 0, count, n, count == 2)
        with f.loop(0, n, 1 if single else lanes) as i:
            at, place = f.at(source, i, pieces.storage), f.at(to, i, "i16")
            if single:
                pieces.put_one(f, pieces.load_one(f, at), place)
            else:
                pieces.put(f, pieces.load(f, at), place)
        host = targets()["native"]
        self.count, self.module = count, jit.load(str(m), host.triple, host.cpu, host.features)

    def __call__(self, values: np.ndarray) -> list[np.ndarray]:
        out = np.zeros((self.count, values.size), np.uint16)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        call(self.module.address("split"))(values.ctypes.data, out.ctypes.data, values.size)
        return [(row.astype(np.uint32) << 16).view(np.float32) for row in out]


def every_kind(size: int) -> np.ndarray:
    """Any bits, whole numbers, and those at the ends of what f32 holds."""
    rng = np.random.default_rng(1)
    values = rng.integers(0, 1 << 32, size, np.uint32).view(np.float32)
    values[: size // 4] = rng.integers(-70000, 70000, size // 4)
    ends = [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
        0x7FFFFFFF,
    ]
    both = np.array([*ends, *(bits + 0x80000000 for bits in ends)], np.uint32)
    values[-both.size :] = both.view(np.float32)
    return values


def without_subnormals(values: np.ndarray) -> np.ndarray:
    """Tiles take them for zeros, and so does the instruction that makes pieces."""
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), values)


@runs
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("lanes", "instruction", "single"), [(16, 1, 0), (32, 1, 0), (16, 0, 0), (16, 0, 1)])
def test_pieces_are_as_in_the_model(lanes: int, instruction: bool, single: bool, count: int) -> None:
    """What is infinite, NaN, or would become infinite has pieces that add up to NaN, times any finite number."""
    if instruction and "+avx512bf16" not in targets()["native"].features:
        pytest.skip("this machine has no instruction that makes bf16")
    values = every_kind(1 << 12)
    found = Splitter("f32", lanes, count, bool(instruction), bool(single))(values)
    plain = np.abs(values) < 2.0**128 * (1 - 2.0**-9)
    with np.errstate(all="ignore"):
        for piece, wanted in zip(found, model(values, count), strict=True):
            assert np.array_equal(without_subnormals(piece)[plain], without_subnormals(wanted)[plain])
        for factor in np.array([1, 0, -0.375, 1e-37], np.float32):
            assert np.isnan(sum(piece[~plain] * factor for piece in found)).all()


def test_pieces_are_as_small_as_is_claimed() -> None:
    """What docs/numerics.md derives its bounds from; and three pieces are the whole number."""
    values = every_kind(1 << 14)
    values = values[(np.abs(values) < 3.38e38) & (np.abs(values) >= 2.0**-102)].astype(np.float64)
    first, second, third = (piece.astype(np.float64) for piece in model(values.astype(np.float32), 3))
    size = np.abs(values)
    assert (first + second + third == values).all()
    assert (np.abs(second) <= 2.0**-8 * size).all()
    assert (np.abs(third) <= 2.0**-17 * size).all()


def test_two_pieces_of_f16_are_the_whole_number() -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        first, second = model(values, 2)
    assert (first[finite] + second[finite] == values[finite]).all()


# Plans, run by emulation.

EVERY_OTHER = list(SPLIT)[::2]
QUICK = [title for title in EVERY_OTHER[:: len(WAYS) + 1] if "many" not in title]


@runs
@pytest.mark.parametrize("title", slow_but(QUICK, EVERY_OTHER))
def test_sizes_with_a_reason(title: str) -> None:
    """Whole numbers: equal to the reference, whatever the pieces. Problems take the ways to split in turn."""
    machine = list(MACHINES.values())[crc32(title.encode()) % len(MACHINES)]
    assert not made(SPLIT[title], machine).split.whole
    assert not check(Problem.parse(SPLIT[title]), machine, (1, 3), 1, gaps=True)


@runs
@pytest.mark.parametrize("seed", slow_but(range(100, 104), range(100, 124)))
def test_random_problems(seed: int) -> None:
    for algorithm, dtype in WAYS:
        p = replace(draw_tiled(seed), algorithm=algorithm, dtype=dtype, out_dtype="f32")
        with however_small():
            plan = make_plan(p, MACHINES["tiles"], 2)
        if isinstance(plan, Refusal):
            assert "channels" in plan.reason
            continue
        assert not check(p, MACHINES["tiles"], (1, 3), seed, gaps=seed % 2 == 0)


@runs
def test_finite_sums_need_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tiles read beyond the positions of a box are zeros or data, not what memory happens to hold."""
    monkeypatch.setattr(sums_kernel, "_repair", lambda *_: None)
    for title in [title for title in SPLIT if ": w f32 six" in title][::2]:
        assert not check(Problem.parse(SPLIT[title]), MACHINES["tiles"], (2,), 3), title


REAL = {
    "y": "y f32 n2 g1 cx64 cy48 x20x20 w3x3 y20x20 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio bias",
    "x": "x f32 n2 g1 cx40 cy64 x21x21 w3x3 y11x11 s2x2 d1x1 p1x1 accumulate",
    "w": "w f32 n4 g1 cx48 cy64 x20x20 w3x3 y20x20 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "w, one tap": "w f32 n3 g2 cx64 cy32 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0",
}


def bound(tensors: Tensors, plan: TileGather | TileSums) -> np.ndarray:
    """How far a result may be from the float64 oracle: docs/numerics.md has the reasons.

    What the pieces leave out; and of each product of pieces, 16 roundings inside the instruction that adds it, and one
    for each other one that adds to the same sum, for what slices and a bias add to it, or for what was there before.
    """
    if isinstance(plan, TileGather):
        steps = plan.layer.taps * (plan.sums.channels // 2 // plan.tiles.pairs) + 2
    else:
        outer = plan.box.number * prod(plan.box.sizes[: plan.box.flat])
        steps = outer * ceil(plan.box.long_row / 32) * 1 + plan.parts.slices + 1
    roundings = (16 + len(plan.split.products) * steps) * 2.0**-24
    return (plan.split.lost + 1.01 * roundings / (1 - roundings)) * tensors.oracle(np.abs)


@runs
@pytest.mark.parametrize(
    ("name", "algorithm", "dtype"),
    slow_but([(n, *way) for n in "yw" for way in taken(n)], [(n, *way) for n in REAL for way in taken(n[0])]),
)
def test_errors_and_bits(name: str, algorithm: str, dtype: str) -> None:
    """Real numbers: within the bound, and the same bits on any number of threads, in boxes of any size."""
    p = replace(Problem.parse(REAL[name]), algorithm=algorithm, dtype=dtype)
    machine, tensors = MACHINES["tiles"], Tensors(p)
    found = find(p, machine, 2)
    result = tensors.compute(found)
    wrong = np.abs(result.astype(np.float64) - tensors.oracle()) > bound(tensors, found.plan)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} beyond the bound"
    for own_l2, threads in ((0, 1), (0, 3), (0, 8), (0, 16), (30000, 5)):
        again = tensors.compute(find(p, replace(machine, own_l2=own_l2), threads))
        assert again.tobytes() == result.tobytes(), f"{threads} threads, {own_l2} bytes"


@runs
def test_six_products_are_as_exact_as_f32() -> None:
    """As a rule, they are more exact: fewer roundings of larger parts of a sum."""
    p = Problem.parse(REAL["y"])
    tensors = Tensors(p)
    oracle = tensors.oracle()
    machines = {"direct": targets()["native"], "bf16x6": MACHINES["tiles"], "bf16x3": MACHINES["tiles"]}
    error = {
        name: np.linalg.norm(tensors.compute(find(replace(p, algorithm=name), machine, 2)) - oracle)
        / np.linalg.norm(oracle)
        for name, machine in machines.items()
    }
    assert error["bf16x6"] < error["direct"] < 1e-6 < error["bf16x3"] < 1e-5


@runs
@pytest.mark.parametrize("layout", ["", "x@nxc y@nxc"])
def test_every_number_comes_through(layout: str) -> None:
    """Multiplied by one, large ones, infinities and NaN too; below 2**-102 bits are lost, and no more."""
    p = Problem.parse(f"y f32 n1 g1 cx16 cy16 x4096 w1 y4096 s1 d1 p0 {layout} algorithm:bf16x6")
    tensors = Tensors(p)
    values = every_kind(4096)
    tensors.view["x"][...] = 0
    tensors.view["x"][0, 0, 0] = values
    tensors.view["w"][...] = 0
    tensors.view["w"][0, :, 0] = 1
    result = tensors.compute(find(p, MACHINES["tiles"], 2))
    nan, small = np.isnan(values), np.abs(values) < 2.0**-102
    for channel in result[0, 0]:
        assert np.array_equal(np.isnan(channel), nan)
        assert np.array_equal(channel[~nan & ~small], values[~nan & ~small])
        assert (np.abs(channel[small].astype(np.float64) - values[small]) <= 2.0**-125).all()


@runs
@pytest.mark.parametrize(
    ("text", "algorithm", "dtype"),
    slow_but(
        [(t, *way) for t in SPOILT[::3] for way in taken(t[0])], [(t, *way) for t in SPOILT for way in taken(t[0])]
    ),
)
def test_infinities_spoil_what_they_meet(text: str, algorithm: str, dtype: str) -> None:
    """As in f32: a result is infinite or NaN where the definition is, and nowhere else."""
    wanted, _, *rest = text.split()
    p = replace(Problem.parse(" ".join([wanted, dtype, *rest])), algorithm=algorithm)
    for machine in MACHINES.values():
        made(str(p), machine)
        _check_infinities(p, machine, tuple(role for role in p.given if role != "w"))


@runs
@pytest.mark.parametrize("wanted", ["y", "x", "w"])
def test_an_infinity_stays_one(wanted: str) -> None:
    """Without a kernel and padding, too, where sums of weights would need no repair otherwise."""
    p = Problem.parse(f"{wanted} f32 n1 g1 cx32 cy48 x49 w1 y49 s1 d1 p0 x@nxc y@nxc algorithm:bf16x3")
    tensors = Tensors(p)
    for role in p.given:
        tensors.view[role][...] = 3
    tensors.view[p.given[-1]][0, 0, 5, 7 if wanted == "w" else 0] = np.inf
    result = tensors.compute(find(p, MACHINES["tiles"], 2))
    oracle = tensors.oracle()
    assert 0 < np.isposinf(oracle).sum() < oracle.size
    assert np.array_equal(result, oracle.astype(np.float32))


# The code for hardware.


@pytest.mark.parametrize("title", list(SPLIT)[:: len(WAYS) + 1])
def test_no_instruction_would_fault(title: str) -> None:
    plan = made(SPLIT[title], HARDWARE)
    code = kernel.write(plan)
    assert registers_used(code, configured(plan))
    assert code.count("call void @llvm.x86.tdpbf16ps(") % len(plan.split.products) == 0


def test_pieces_in_registers_are_not_loaded_again() -> None:
    """Of a block of 2x2 tiles, six products of four would take 24 loads."""
    plan = made("y f32 n8 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 algorithm:bf16x6", HARDWARE, 1)
    assert (plan.tiles.down, plan.tiles.across) == (2, 2)
    assert kernel.write(plan).count("call void @llvm.x86.tileloadd64(") == 14


# Who may ask for it.

LAYER = "n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1"


def reason(text: str, machine: Target) -> str:
    plan = make_plan(Problem.parse(text), machine, 2)
    assert isinstance(plan, Refusal), plan
    return plan.reason


def test_direct_f32_never_takes_pieces() -> None:
    for wanted in "xyw":
        assert not make_plan(Problem.parse(f"{wanted} f32 {LAYER}"), HARDWARE, 2).nest.startswith("tile")
        for algorithm in ("bf16x6", "bf16x3"):
            plan = make_plan(Problem.parse(f"{wanted} f32 {LAYER} algorithm:{algorithm}"), HARDWARE, 2)
            assert plan.nest.startswith("tile")
            assert any("pieces of bf16" in why for why in plan.why)
            assert (plan.estimate.error > 1) == (algorithm == "bf16x3")


def test_f16_is_split_where_tiles_do_not_multiply_it() -> None:
    plan = make_plan(Problem.parse(f"y f16 {LAYER}"), HARDWARE, 2)
    assert plan.nest == "tiles"
    assert plan.split.products == SPLITS["direct", "f16"].products
    assert plan.estimate.error == 1
    assert make_plan(Problem.parse(f"y f16 {LAYER}"), SAPPHIRE_RAPIDS, 2).nest == "gather"
    assert make_plan(Problem.parse(f"w f16 {LAYER}"), HARDWARE, 2).nest == "wgrad"


def test_refusals_have_one_reason() -> None:
    plain = replace(SAPPHIRE_RAPIDS, features=SAPPHIRE_RAPIDS.features.replace("+amx", "-amx"))
    small = LAYER.replace("cx64", "cx8")
    for wanted in "xyw":
        asked = f"{wanted} f32 {LAYER} algorithm:bf16x6"
        assert reason(asked, plain) == "bf16x6 needs tile registers (Intel's AMX), which this machine does not have"
        assert reason(asked, SAPPHIRE_RAPIDS).endswith("which CONVGRAD_TARGET leaves out")
        assert reason(asked.replace("f32", "bf16"), HARDWARE) == "bf16x6 is for f32, not for bf16"
        assert "16 channels of a group" in reason(f"{wanted} f32 {small} algorithm:bf16x3", HARDWARE)


def test_a_refused_algorithm_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by direct sums nor by the reference; but where nothing is to be summed, it does not matter."""
    monkeypatch.setenv("CONVGRAD_TARGET", "baseline")
    x, w = np.ones((1, 9, 9, 32), np.float32), np.ones((3, 3, 32, 32), np.float32)
    ones = {"strides": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1]}
    with pytest.raises(
        UnsupportedError, match=r"^Convolution: bf16x6 needs tile registers .* \(cpu\); .*: reference: it"
    ):
        convgrad.convolution(x, w, **ones, algorithm="bf16x6")
    with pytest.raises(UnsupportedError, match="bf16x3 needs tile registers"):
        convgrad.explain(f"y f32 {LAYER} algorithm:bf16x3")
    assert convgrad.convolution(x[:0], w, **ones, algorithm="bf16x6").shape == (0, 9, 9, 32)


def test_without_permission_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "ask", lambda: errno.EPERM)
    permission.refusal.cache_clear()
    six = kernel.make_plan(Problem.parse(f"y f32 {LAYER} algorithm:bf16x6"), HARDWARE, 2)
    half = kernel.make_plan(Problem.parse(f"y f16 {LAYER}"), HARDWARE, 2)
    permission.refusal.cache_clear()
    assert isinstance(six, Refusal)
    assert "not permitted" in six.reason.lower()
    assert half.nest == "gather"
    assert any(why.startswith("without tile registers: ") for why in half.why)
