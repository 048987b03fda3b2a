"""Tile registers: the instructions by a model of them, plans by emulation, and the code for hardware by what it says.

Few machines have tile registers. So plans run with each instruction replaced by a call of plain code that does the
same; a model in NumPy judges that code, and the code for hardware is shown to be the same but for these calls.
`python tests/cpu/hardware.py` runs plans on a machine that has them.
"""

from __future__ import annotations

import ctypes
import errno
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from convgrad.cpu import caches, kernel, target
from convgrad.cpu.amx import gather_plan, permission, records, sums_kernel, sums_plan
from convgrad.cpu.amx.emulation import FILE, Emulation
from convgrad.cpu.amx.gather_plan import SHAPES, pairs_of_step
from convgrad.cpu.amx.records import TileGather, TileSums
from convgrad.cpu.amx.sums_cost import packed_lines, waiting
from convgrad.cpu.amx.tiles import INSTRUCTIONS, Block
from convgrad.cpu.compile import jit
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.pack.unpack import Unpacker
from convgrad.cpu.plan import tuning
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.plan.tuning import RegisterTuning, SideCosts
from convgrad.cpu.target import Target, Tiles
from convgrad.errors import UnsupportedError
from convgrad.spec.problem import Problem
from marks import slow_but

from .golden import normalised
from .machines import INTEL, MACHINES, SAPPHIRE_RAPIDS
from .named import TILED
from .problems import check, draw_tiled, however_small, targets
from .test_engine import going_new_ways
from .test_reals import Tensors, _check_infinities, bound, find
from .tiles import Fault, Model, registers_used

TARGETS = targets()
HERE = [name for name in ("tiles", "tiles in small caches") if name in TARGETS]
runs = pytest.mark.skipif(not HERE, reason="plain code for tiles needs AVX-512")
HARDWARE = INTEL["graniterapids, tiles"]


# The model.


def configuration(*shapes: tuple[int, int], **changes: int) -> bytearray:
    content = bytearray(64)
    content[0] = 1
    for i, (rows, width) in enumerate(shapes):
        content[16 + 2 * i : 18 + 2 * i] = width.to_bytes(2, "little")
        content[48 + i] = rows
    for at, value in changes.items():
        content[int(at[1:])] = value
    return content


@pytest.mark.parametrize(
    "content",
    [
        configuration((16, 64), b0=2),
        configuration((16, 64), b2=1),
        configuration((16, 64), b15=1),
        configuration((16, 64), b1=16),
        configuration((17, 64)),
        configuration((16, 65)),
        configuration((16, 0)),
        configuration((0, 64)),
        configuration(*[(1, 4)] * 9),
    ],
)
def test_what_hardware_refuses_the_model_refuses(content: bytearray) -> None:
    with pytest.raises(Fault):
        Model().ldtilecfg(bytes(content))


def test_tiles_must_match() -> None:
    model = Model()
    with pytest.raises(Fault, match="no configuration"):
        model.tilezero(0)
    model.ldtilecfg(bytes(configuration((3, 64), (3, 32), (8, 64), (4, 64))))
    model.tdpbf16ps(0, 1, 2)
    for wrong in ((0, 1, 3), (0, 1, 1), (0, 0, 2), (3, 1, 2), (0, 1, 4)):
        with pytest.raises(Fault):
            model.tdpbf16ps(*wrong)
    content = model.sttilecfg()
    assert content == bytes(configuration((3, 64), (3, 32), (8, 64), (4, 64)))
    model.tilerelease()
    assert model.sttilecfg() == bytes(64)


def test_even_and_odd_products_are_summed_apart() -> None:
    """Each order of addition loses another number here."""
    model = Model()
    model.ldtilecfg(bytes(configuration((1, 4), (1, 8), (2, 4))))
    big, one = 0x4B80, 0x3F80  # 2**24 and 1 as bf16
    model.tileloadd(1, [np.array([big, one, one, one], np.uint16).tobytes()])
    model.tileloadd(2, [np.array([one, one], np.uint16).tobytes()] * 2)
    model.tdpbf16ps(0, 1, 2)
    (row,) = model.tilestored(0)
    # (2**24 + 1) is 2**24; (1 + 1) is 2; together they are 2**24 + 2. One after another, it would be 2**24.
    assert np.frombuffer(row, np.float32)[0] == 2.0**24 + 2


# The emulation.


class Emulated:
    """The functions that stand for instructions, compiled."""

    def __init__(self, dtype: str) -> None:
        m = Module()
        emulation = Emulation(m, dtype, INSTRUCTIONS[dtype])
        for function in emulation.functions.values():
            function.exported = True
        host = TARGETS["native"]
        self.module = jit.load(str(m), host.triple, host.cpu, host.features)
        self.file = np.full(FILE, 0xFF, np.uint8)
        self.multiply = emulation.functions[INSTRUCTIONS[dtype]].name

    def call(self, name: str, *operands: int | np.ndarray) -> None:
        numbers = [ctypes.c_int64(n.ctypes.data if isinstance(n, np.ndarray) else n) for n in operands]
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (1 + len(numbers)))(self.module.address(name))(
            self.file.ctypes.data, *numbers
        )


def numbers(rng: np.random.Generator, size: int, dtype: str) -> np.ndarray:
    """Any bits, ordinary numbers, or numbers whose products are near the smallest."""
    kind = rng.random()
    if kind < 0.3:
        return rng.integers(0, 1 << 16, size, np.uint16)
    scale = 1.0 if kind < 0.6 else 1e-19 if dtype == "bf16" else 1e-4
    values = (rng.standard_normal(size) * scale).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(np.float16).view("u2")


@runs
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_emulation_does_what_the_model_does(dtype: str) -> None:
    emulated, model, rng = Emulated(dtype), Model(), np.random.default_rng(3)
    for _ in range(60):
        rows, columns, pairs = (int(rng.integers(1, 17)) for _ in range(3))
        content = bytes(configuration((rows, 4 * columns), (rows, 4 * pairs), (pairs, 4 * columns)))
        model.ldtilecfg(content)
        emulated.call("emulated_begin", np.frombuffer(content, np.uint8))
        emulated.call("emulated_clear", 0)
        model.tilezero(0)
        start = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(rng.choice([0.0, 1.0, 1e-38]))
        for tile, memory in ((0, start), (1, numbers(rng, 16 * 32, dtype)), (2, numbers(rng, 16 * 32, dtype))):
            step = 4 * columns if tile == 0 else 64
            held = memory.reshape(-1).view(np.uint8)
            model.tileloadd(tile, [held[r * step :].tobytes() for r in range(model.shapes[tile][0])])
            emulated.call("emulated_load", tile, memory, step)
        emulated.call(emulated.multiply, 0, 1, 2)
        getattr(model, INSTRUCTIONS[dtype])(0, 1, 2)
        out = np.full((17, 80), 0xAB, np.uint8)
        emulated.call("emulated_store", 0, out, 80)
        found, expected = out[:rows, : 4 * columns].copy().view(np.float32), model.tilestored(0)
        wanted = np.frombuffer(b"".join(expected), np.float32).reshape(rows, columns)
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(found), nan)
        assert np.array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])
        assert (out[rows:] == 0xAB).all()
        assert (out[:, 4 * columns :] == 0xAB).all()


@runs
def test_emulated_tiles_that_do_not_match_are_nan() -> None:
    emulated = Emulated("bf16")
    content = np.frombuffer(bytes(configuration((3, 64), (3, 32), (7, 64))), np.uint8)
    emulated.call("emulated_begin", content)
    emulated.call("emulated_clear", 0)
    emulated.call(emulated.multiply, 0, 1, 2)
    assert np.isnan(emulated.file[:1024].view(np.float32)).all()


# Plans, run by emulation.


def one_way(x_paired: bool) -> AbstractContextManager[Any]:
    """Plans for w whose pairs are of x, where they may be, or of y."""
    return mock.patch.object(sums_plan, "ways", lambda *given: (x_paired and True in WAYS(*given),))


WAYS = sums_plan.ways
SUMMED = [title for title, text in TILED.items() if text.startswith("w")]


def made(text: str, machine: Target, threads: int = 2) -> TileGather | TileSums:
    with however_small():
        plan = make_plan(Problem.parse(text), machine, threads)
    assert isinstance(plan, TileGather | TileSums), plan
    return plan


@runs
@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_sizes_with_a_reason(name: str) -> None:
    """Every tensor between unmapped pages, the workspace full of NaNs, buffers apart: equal to the reference."""
    texts = list(TILED.values())
    items = [(name, text) for text in texts] if name == HERE[0] else going_new_ways(texts, [name], PATHS)
    for _, text in items:
        assert made(text, TARGETS[name]).tasks
        assert not check(Problem.parse(text), TARGETS[name], (1, 3), 1, gaps=True)


@runs
@pytest.mark.parametrize(
    ("name", "first"), slow_but([(name, 0) for name in HERE[:1]], [(n, i) for n in HERE for i in range(0, 40, 10)])
)
def test_random_problems(name: str, first: int) -> None:
    for seed in range(first, first + 10):
        p = draw_tiled(seed)
        declined = check(p, TARGETS[name], (1, 3), seed, gaps=seed % 2 == 0)
        assert not declined, f"{p}: {declined}"


@runs
def test_the_problems_take_every_path() -> None:
    """Else the tests above would mean less."""
    plans = []
    for x_paired in (False, True):
        with one_way(x_paired):
            plans += [made(text, TARGETS[name]) for text in TILED.values() for name in HERE]
    assert not [name for name, path in PATHS.items() if not any(map(path, plans))]


def _gather(test: Callable[[TileGather], bool]) -> Callable[[Any], bool]:
    return lambda plan: isinstance(plan, TileGather) and test(plan)


def _sums(test: Callable[[TileSums], bool]) -> Callable[[Any], bool]:
    return lambda plan: isinstance(plan, TileSums) and test(plan)


def _several_rows_of_y(plan: TileSums) -> bool:
    return plan.box.x_paired and prod(plan.box.sizes[: plan.box.flat]) > 1


PATHS = {
    "in place": _gather(lambda p: p.positions.in_place),
    "in place, in boxes": _gather(lambda p: p.positions.in_place and p.positions.number > 1),
    "a last block of fewer channels": _gather(lambda p: bool(p.tile.last_vectors)),
    "several runs": _gather(lambda p: len(p.positions.runs) > 1),
    "a run for each tap": _gather(lambda p: any(len(a.runs) == 3 and a.in_stride == 1 for a in p.positions.axes)),
    "phases": _gather(lambda p: len(p.positions.phases) > 1),
    "phases without taps": _gather(lambda p: any(phase.count == 0 for phase in p.positions.phases)),
    "steps of fewer pairs": _gather(lambda p: p.tiles.pairs < 16),
    "odd channels": _gather(lambda p: bool(p.sums.odd)),
    "parts of the channels": _gather(lambda p: p.parts.parts > 1),
    "long rows of two axes": _gather(lambda p: p.positions.flat == 2),
    "long rows of three axes": _gather(lambda p: p.positions.flat == 3),
    "rounded first": _gather(lambda p: p.staging is not None and p.staging.round_first),
    "written tile by tile, evenly spaced": _gather(lambda p: p.staging is None and not p.lists_places),
    "written tile by tile, as listed": _gather(lambda p: p.lists_places),
    "blocks side by side": _gather(lambda p: p.parts.together > 1),
    "weights packed in parts": _gather(lambda p: p.weight_parts > 1),
    "the next input is prefetched": _gather(lambda p: p.prefetch is not None),
    "results are prefetched": _gather(lambda p: p.fetched_results and p.lists_places),
    "slices": _sums(lambda p: p.parts.slices > 1),
    "slices, taps inside": _sums(lambda p: p.parts.slices > 1 and p.parts.taps_inside),
    "slices, taps outside": _sums(lambda p: p.parts.slices > 1 and not p.parts.taps_inside),
    "parts of w": _sums(lambda p: p.parts.row_parts > 1 and p.parts.column_parts > 1),
    "rows of x packed as such": _sums(lambda p: not p.sides.swapped and p.box.row_packed),
    "rows of y, transposed": _sums(lambda p: p.sides.swapped and not p.box.x_paired and not p.box.row_packed),
    "rows of y, packed as such": _sums(lambda p: p.sides.swapped and not p.box.x_paired and p.box.row_packed),
    "rows of x packed otherwise": _sums(lambda p: not p.sides.swapped and not p.box.row_packed),
    "y paired as it lies": _sums(lambda p: p.box.y_pack is None),
    "y paired by way of a copy": _sums(lambda p: p.box.y_pack is not None),
    "pairs of x": _sums(lambda p: p.box.pair_step == 1 and not p.box.row_packed),
    "pairs of x, by way of a copy": _sums(lambda p: p.box.pair_step == 1 and p.box.row_packed),
    "pairs of x, for even taps": _sums(lambda p: p.box.pair_step == 2 and not p.box.row_packed),
    "pairs of x, for even taps, by way of a copy": _sums(lambda p: p.box.pair_step == 2 and p.box.row_packed),
    "pairs of x, in blocks of channels": _sums(lambda p: p.box.x_paired and p.box.pair_block < p.parts.columns),
    "pairs of x, of several runs": _sums(lambda p: p.box.x_paired and len(p.box.runs) > 1),
    "rows of y for pairs of x, several": _sums(_several_rows_of_y),
    "pairs of x, written by channels": _sums(lambda p: p.box.x_paired and p.staging.unpacker is Unpacker.CHANNELS),
    "no repair": _sums(lambda p: not p.repairs),
    "long rows of w of two axes": _sums(lambda p: p.box.flat == 2),
    "long rows of w of three axes": _sums(lambda p: p.box.flat == 3),
}
"""What the problems above must take, so that the tests above mean something."""


REAL = {
    "y": "y bf16 n2 g1 cx64 cy48 x20x20 w3x3 y20x20 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "x": "x f16 n2 g1 cx40 cy64 x21x21 w3x3 y11x11 s2x2 d1x1 p1x1",
    "w": "w bf16 n4 g1 cx48 cy64 x20x20 w3x3 y20x20 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio out:f32",
    "w, one tap": "w f16 n3 g2 cx64 cy32 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0",
}


@runs
@pytest.mark.parametrize("name", REAL)
def test_errors_and_bits(name: str) -> None:
    """Real numbers: within the bound, and the same bits on any number of threads, in boxes of any size."""
    p = Problem.parse(REAL[name])
    tensors = Tensors(p)
    result = tensors.compute(find(p, TARGETS["tiles"], 2))
    wrong = np.abs(result.astype(np.float64) - tensors.oracle()) > bound(tensors)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} beyond the bound"
    machines = [TARGETS["tiles"], replace(TARGETS["tiles"], own_l2=30000)]
    for machine, threads in ((m, threads) for m in machines for threads in (1, 3, 8, 16, 64)):
        again = tensors.compute(find(p, machine, threads))
        assert again.tobytes() == result.tobytes(), f"{threads} threads, {machine.own_l2} bytes"


@runs
@pytest.mark.parametrize("name", slow_but(["w", "x"], REAL))
def test_tuning_changes_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of cycles, and every way to share out the registers: the same results."""
    p = Problem.parse(REAL[name])
    tensors = Tensors(p)
    expected = tensors.compute(find(p, TARGETS["tiles"], 2)).tobytes()
    kind = tuning.kind(TARGETS["tiles"])
    row = tuning.KINDS[kind]
    for numbers in ((1, 1, 50, 0.01), (100, 1, 1, 0.9), (1, 500, 1, 0.1), (7, 13, 29, 0.03)):
        wild = RegisterTuning(
            *numbers, tasks=numbers[0], least_pixels=numbers[1], far=numbers[2], near=1000 * numbers[1],
            fetches_step=numbers[0] == 7, sides=SideCosts(numbers[2], numbers[1], numbers[0] > 1),
        )  # fmt: skip
        monkeypatch.setitem(tuning.KINDS, kind, replace(row, registers=wild))
        tuning.tuning.cache_clear()
        assert tensors.compute(find(p, TARGETS["tiles"], 2)).tobytes() == expected, numbers
    monkeypatch.undo()
    tuning.tuning.cache_clear()
    for shape in SHAPES:
        monkeypatch.setattr(gather_plan, "SHAPES", (shape,))
        monkeypatch.setattr(sums_plan, "SHAPES", (shape,))
        found = find(p, TARGETS["tiles"], 2)
        assert (found.plan.tiles.down, found.plan.tiles.across) == shape
        assert tensors.compute(found).tobytes() == expected, shape


@runs
@pytest.mark.slow
@pytest.mark.parametrize("x_paired", [False, True])
def test_pairs_of_either_side(x_paired: bool) -> None:
    """Whichever of x and y is in pairs, the sums are those of the reference."""
    with one_way(x_paired):
        for title in SUMMED:
            assert not check(Problem.parse(TILED[title]), TARGETS[HERE[-1]], (1, 3), 1, gaps=True), title


@runs
@pytest.mark.parametrize("first", slow_but([100], range(100, 220, 30)))
def test_random_pairs_of_x(first: int) -> None:
    drawn = {seed: draw_tiled(seed) for seed in range(first, first + 30)}
    with one_way(x_paired=True):
        for seed, p in drawn.items():
            if p.wanted == "w":
                assert not check(p, TARGETS["tiles"], (1, 3), seed, gaps=seed % 2 == 0)


@runs
@pytest.mark.parametrize("title", slow_but(SUMMED[::5], SUMMED))
def test_bits_do_not_depend_on_what_is_in_pairs(title: str) -> None:
    """Real numbers: the same products in the same order, in tiles of any shape."""
    p = Problem.parse(TILED[title])
    tensors, results = Tensors(p), set()
    for x_paired, threads in product((False, True), (1, 3)):
        with one_way(x_paired):
            results.add(tensors.compute(find(p, TARGETS["tiles"], threads)).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("machine", [name for name in INTEL if "tiles" in name])
def test_tiles_begin_with_lines_where_pairs_are_of_x(machine: str) -> None:
    """Whatever the tap: a tile whose rows cross lines takes several times as long to load."""
    line = 64
    with one_way(x_paired=True):
        for title in SUMMED:
            if title.split()[-1] not in INTEL[machine].tiles.dtypes:
                continue
            plan = made(TILED[title], INTEL[machine])
            box, pairs = plan.box, plan.box.pair_steps
            if box.x_paired:
                assert not [n for n in (box.row_pitch, box.y_row) if 2 * n % line]
                of_pairs = (pairs.beside, pairs.pair, pairs.step, *(entry * box.x_entry for entry in box.entries))
                assert not [n for n in of_pairs if 4 * n % line]
                assert {entry % box.pair_step for entry in box.entries} == {0}
                rows = [prod(a.pack.count for a in box.axes[i + 1 :]) for i in range(box.flat)]
                assert not [n for n in rows if n % box.pair_step]
                assert all(a.boxes == 1 for a in box.axes[box.flat + 1 :])  # else rows of y would have no zeros between


def test_pairs_are_of_x_where_that_costs_less() -> None:
    """Where many taps read rows that cross lines, and what is then packed twice does not take longer."""
    layer = "w bf16 n8 g1 cx64 cy64 x56x56 w{0} y56x56 s1x1 d1x1 p{1} x@nxc w@xio y@nxc"
    assert made(layer.format("3x3", "1x1"), HARDWARE).box.x_paired
    assert not made(layer.format("1x1", "0x0"), HARDWARE).box.x_paired
    strided = "w bf16 n8 g1 cx128 cy128 x56x56 w3x3 y28x28 s2x2 d1x1 p1x1"
    assert not made(strided, HARDWARE).box.x_paired
    assert made(f"{strided} x@nxc w@xio y@nxc", HARDWARE).box.x_paired
    assert not made("w f32 n8 g1 cx64 cy64 x28 w3 y28 s1 d1 p1 algorithm:bf16x3", HARDWARE).box.x_paired


def test_plans_wait_for_rows_that_cross_lines() -> None:
    """If packing costs nothing, no plan waits; if waiting does not, the one is taken that packs less."""
    tuned = SideCosts()
    plans = []
    for x_paired in (False, True):
        with one_way(x_paired):
            plans.append(made("w bf16 n8 g1 cx128 cy128 x56x56 w3x3 y28x28 s2x2 d1x1 p1x1", HARDWARE))
    rows, pairs = plans
    assert waiting(pairs, tuned) == 0 < waiting(rows, tuned)
    assert packed_lines(rows) < packed_lines(pairs)
    assert sums_plan.choose(plans, replace(tuned, line=0)) is pairs
    assert sums_plan.choose(plans, replace(tuned, torn=0)) is rows


SPOILT = [
    "w bf16 n3 g1 cx20 cy33 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1",
    "w bf16 n3 g1 cx20 cy32 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "w bf16 n2 g2 cx32 cy20 x7x9 w3x2 y7x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "w f16 n1 g2 cx16 cy24 x6x12 w2x5 y9x14 s1x1 d1x2 p2x5",
    "w bf16 n4 g1 cx32 cy48 x49 w1 y49 s1 d1 p0 x@nxc y@nxc",
    "w bf16 n2 g1 cx40 cy16 x9x9 w1x1 y9x10 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "w bf16 n1 g1 cx17 cy16 x13x13 w3x3 y7x7 s2x2 d1x1 p1x1",
    "x bf16 n2 g1 cx17 cy19 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "y bf16 n2 g1 cx19 cy17 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1",
]


@runs
@pytest.mark.parametrize("x_paired", [False, True])
def test_finite_sums_need_no_repair(x_paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tiles read beyond the positions of a box are zeros or data, not what memory happens to hold."""
    monkeypatch.setattr(sums_kernel, "_repair", lambda *_: None)
    with one_way(x_paired):
        for title in SUMMED:
            if title.endswith(" bf16"):
                assert not check(Problem.parse(TILED[title]), TARGETS["tiles"], (2,), 3), title


@runs
@pytest.mark.parametrize("text", SPOILT)
def test_infinities_spoil_what_they_meet(text: str) -> None:
    p = Problem.parse(text)
    for name, x_paired in product(HERE, (False, True) if p.wanted == "w" else (False,)):
        with one_way(x_paired):
            made(text, TARGETS[name])
            _check_infinities(p, TARGETS[name], tuple(role for role in p.given if role != "w"))


@runs
@pytest.mark.parametrize("layout", ["", " x@nxc y@nxc"])
@pytest.mark.parametrize("channels", ["cx16 cy40", "cx40 cy16"])
def test_infinities_that_no_window_reads(channels: str, layout: str) -> None:
    """A row of x may be longer than y needs: what is behind meets zeros, where rows have an even number of places."""
    p = Problem.parse(f"w bf16 n1 g1 {channels} x9x10 w1x1 y9x9 s1x1 d1x1 p0x0{layout}")
    tensors = Tensors(p)
    expected = tensors.compute(find(p, TARGETS["tiles"], 2)).tobytes()
    tensors.view["x"][..., 9] = np.inf
    assert tensors.compute(find(p, TARGETS["tiles"], 2)).tobytes() == expected


# The code for hardware.


def configured(plan: TileGather | TileSums) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in plan.tiles.configuration())


@pytest.mark.parametrize("title", TILED)
def test_no_instruction_would_fault(title: str) -> None:
    plan = made(TILED[title], HARDWARE)
    functions = registers_used(kernel.write(plan), configured(plan))
    assert functions
    assert all(name.startswith("tile_") for name in functions)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "pairs"), [(16, 16), (7, 9), (1, 1)])
def test_registers_suffice(shape: tuple[int, int], rows: int, pairs: int) -> None:
    block = Block(rows, pairs, *shape)
    used = [*range(block.down * block.across), *block.left, *block.right]
    assert len(set(used)) == len(used) <= 8
    assert block.left
    assert block.right
    Model().ldtilecfg(b"".join(word.to_bytes(8, "little") for word in block.configuration()))


CALLS = {
    "ldtilecfg": r"@emulated_begin\(ptr %\S+, ptr (\S+)\)",
    "tilerelease": r"@emulated_end\(ptr %[^,)]+\)",
    "tilezero": r"@emulated_clear\(ptr %\S+, i64 (\d+)\)",
    "tileloadd64": r"@emulated_load\(ptr %\S+, i64 (\d+), ptr (\S+), i64 (\S+)\)",
    "tilestored64": r"@emulated_store\(ptr %\S+, i64 (\d+), ptr (\S+), i64 (\S+)\)",
    "tdp": r"@emulated_multiply\(ptr %\S+, i64 (\d+), i64 (\d+), i64 (\d+)\)",
}
KINDS = {"ldtilecfg": ("ptr",), "tilerelease": (), "tilezero": ("i8",), "tdp": ("i8", "i8", "i8")}


def with_instructions(code: str, dtype: str) -> str:
    """Emulated code with instructions for calls, and without the file of registers."""
    functions = re.split(r"(?m)^(?=define )", code)
    code = "".join(f for f in functions if not f.startswith("define internal void @emulated"))
    for name, pattern in CALLS.items():
        kinds = KINDS.get(name, ("i8", "ptr", "i64"))
        operands = ", ".join(f"{kind} \\{i + 1}" for i, kind in enumerate(kinds))
        code = re.sub(pattern, f"@llvm.x86.{INSTRUCTIONS[dtype] if name == 'tdp' else name}({operands})", code)
    code = re.sub(r"(define internal void @tile_\d\(.*), ptr %file\)", r"\1)", code)
    code = re.sub(r"(call void @tile_\d\(.*), ptr %\w+\)", r"\1)", code)
    return re.sub(r"(?m)^declare .*\n", "", code)


@pytest.mark.parametrize("title", slow_but([*TILED][::3], TILED))
def test_code_for_hardware_is_the_emulated_code(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the instructions themselves, line by line."""
    monkeypatch.setattr(records, "FILE", 0)  # so that threads' buffers are as far apart
    plan = made(TILED[title], HARDWARE)
    emulated = kernel.write(replace(plan, code=replace(plan.code, emulated=True)))
    declared = re.compile(r"(?m)^declare .*\n")
    assert normalised(with_instructions(emulated, title.split()[-1])) == normalised(
        declared.sub("", kernel.write(plan))
    )


ASSEMBLED = [title for title in TILED if "3x3: " in title or "1x1" in title]


@pytest.mark.parametrize("title", slow_but(ASSEMBLED[::3], ASSEMBLED))
def test_hardware_code_is_assembled(title: str) -> None:
    plan = made(TILED[title], HARDWARE)
    code = kernel.write(plan)
    text = jit.assemble(code, HARDWARE.triple, HARDWARE.cpu, HARDWARE.features)
    name = INSTRUCTIONS[title.split()[-1]]
    products = len(re.findall(rf"\t{name}\t", text))
    assert products == code.count(f"call void @llvm.x86.{name}(") >= 1
    assert len(re.findall(r"\tldtilecfg\t", text)) == len(re.findall(r"\ttilerelease", text)) == 1
    from convgrad.cpu.compile import llvm

    assert llvm.emit_object(code, HARDWARE.triple, HARDWARE.cpu, HARDWARE.features)


# Which problems, and which machines.


def test_few_channels_are_left_to_others() -> None:
    for text in (
        "y bf16 n2 g1 cx8 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
        "x bf16 n2 g1 cx64 cy15 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
        "w bf16 n2 g16 cx4 cy4 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
        "y f32 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1",
    ):
        assert not make_plan(Problem.parse(text), HARDWARE, 2).nest.startswith("tile")
    text = "y f16 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1"
    assert make_plan(Problem.parse(text), SAPPHIRE_RAPIDS, 2).nest == "gather"
    assert make_plan(Problem.parse(text), HARDWARE, 2).split.whole


def test_steps_divide_the_channels() -> None:
    for channels in range(1, 400):
        pairs = pairs_of_step(channels)
        assert not pairs or (-(-channels // 2) % pairs == 0 and 1 <= pairs <= 16)
    assert [pairs_of_step(c) for c in (15, 16, 24, 32, 48, 64, 80, 96, 512)] == [0, 8, 12, 16, 12, 16, 10, 16, 16]


def test_pairs_of_bf16_are_not_multiplied_where_that_is_slow() -> None:
    """Intel's servers multiply f32 faster. Their plans are those of a machine without the instruction."""
    text = "y bf16 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1"
    for wanted in "xyw":
        p = Problem.parse(wanted + text[1:])
        plain = make_plan(p, MACHINES["avx512 without pairs"], 2)
        assert kernel.write(make_plan(p, SAPPHIRE_RAPIDS, 2)) == kernel.write(plain)
        assert kernel.write(make_plan(p, MACHINES["avx512"], 2)) != kernel.write(plain)


FACTS = (SAPPHIRE_RAPIDS.triple, "sapphirerapids", SAPPHIRE_RAPIDS.features)


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """A function that says what the machine at hand is, for what this process knows of it."""

    def forget() -> None:
        target.native.cache_clear()
        target._named_cached.cache_clear()

    def say(triple: str, cpu: str, features: str) -> None:
        monkeypatch.setattr(jit, "host", lambda: (triple, cpu, features))
        forget()

    yield say
    monkeypatch.undo()
    forget()


def test_tiles_are_used_where_the_machine_has_them(facts: Callable[[str, str, str], None]) -> None:
    facts(*FACTS)
    assert target.current().tiles == Tiles(("bf16",))
    assert target.named("native") == target.named("amx") == target.current()
    p = Problem.parse("x bf16 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
    assert make_plan(p, target.current(), 2).nest == "tiles"
    with pytest.raises(UnsupportedError, match=r"native \(amx\), avx512, avx2, baseline"):
        target.named("sse")


@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_lower_levels_leave_tiles_alone(name: str, facts: Callable[[str, str, str], None]) -> None:
    """They are as on a machine that has none."""
    facts(*FACTS)
    level = target.named(name)
    facts(FACTS[0], FACTS[1], ",".join(f for f in FACTS[2].split(",") if "amx" not in f))
    assert not level.tiles.dtypes
    assert replace(level, features="") == replace(target.named(name), features="")
    with pytest.raises(UnsupportedError, match=r"'amx' is not available; this machine has native \(avx512\), avx2"):
        target.named("amx")


@pytest.mark.parametrize(("number", "reason"), [(errno.EPERM, "not permitted"), (errno.ENOSPC, "stack for signals")])
def test_without_permission_others_compute(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "ask", lambda: number)
    permission.refusal.cache_clear()
    p = Problem.parse("y bf16 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
    plan = kernel.make_plan(p, HARDWARE, 2)
    permission.refusal.cache_clear()
    assert plan.nest == "gather"
    assert any(why.startswith("without tile registers: ") and reason in why.lower() for why in plan.why)
    assert kernel.write(plan) == kernel.write(make_plan(p, SAPPHIRE_RAPIDS, 2))


def test_permission_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(permission, "ask", lambda: asked.append(1) or 0)
    permission.refusal.cache_clear()
    p = Problem.parse("y bf16 n2 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
    for _ in range(3):
        assert kernel.make_plan(p, HARDWARE, 2).nest == "tiles"
    assert len(asked) == 1
    kernel.make_plan(replace(p, dtype="f32", out_dtype="f32"), HARDWARE, 2)
    kernel.make_plan(p, SAPPHIRE_RAPIDS, 2)
    assert len(asked) == 1
    permission.refusal.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a system call of Linux")
def test_this_system_answers() -> None:
    """0, or the number of an error: this machine may have no tile registers."""
    assert 0 <= permission.ask() < 4096


def test_plans_for_tiles_prefer_few_steps() -> None:
    """Tiles that are not full cost as much as full ones, so that shapes follow the sizes."""
    text = "y bf16 n8 g1 cx64 cy{} x32x32 w1x1 y32x32 s1x1 d1x1 p0x0 x@nxc y@nxc"
    shapes = {cy: made(text.format(cy), HARDWARE, 1).tiles for cy in (16, 32, 48, 64)}
    assert {cy: (block.down, block.across) for cy, block in shapes.items()} == {
        16: (2, 1), 32: (2, 2), 48: (1, 3), 64: (2, 2)
    }  # fmt: skip
    plan = made("y bf16 n8 g1 cx64 cy64 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1", HARDWARE, 1)
    assert prod(plan.positions.sizes[2:]) == 14 * 14


def test_blocks_of_tiles_follow_the_caches() -> None:
    """Weights that do not stay in the first-level cache are loaded for two rows of tiles, even if some positions are
    then computed in vain; those that mostly do are not. The sums of a part of w have room in the second-level cache.
    """
    volume = "n1 g1 cx128 cy128 x16x16x16 w3x3x3 y16x16x16 s1x1x1 d1x1x1 p1x1x1 x@nxc w@xio y@nxc"
    plan = made(f"x bf16 {volume}", HARDWARE, 1)
    assert (plan.tiles.down, plan.tiles.across, plan.positions.flat) == (2, 2, 2)
    three = made("x bf16 n8 g4 cx48 cy48 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc", HARDWARE, 1)
    assert (three.tiles.down, three.tiles.across) == (1, 3)
    sums = made(f"w bf16 {volume}", HARDWARE, 1)
    assert 4 * sums.part_sums <= HARDWARE.own_l2 // 2
    assert sums.fetched_step
    assert not made(f"w f32 {volume} algorithm:bf16x3", HARDWARE, 1).fetched_step


def test_the_tests_for_hardware_say_what_they_do() -> None:
    script = [sys.executable, str(Path(__file__).with_name("hardware.py"))]
    if not target.tile_types(target.native().features):
        done = subprocess.run(script, capture_output=True, text=True, check=True)
        assert done.stdout == "This machine has no tile registers (AMX): there is nothing to test.\n"
    if HERE:
        done = subprocess.run([*script, "--emulated", "--only", "fork"], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "all 1 passed"


# Caches.


def test_caches_are_read_from_files(tmp_path) -> None:
    sizes = {"index0": ("1", "Data", "48K"), "index1": ("1", "Instruction", "64K"), "index2": ("2", "Unified", "2048K")}
    sizes["index3"] = ("3", "Unified", "307200K")
    for folder, texts in sizes.items():
        (tmp_path / folder).mkdir()
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            (tmp_path / folder / name).write_text(f"{text}\n")
    assert caches.sizes("emeraldrapids", str(tmp_path)) == (48 << 10, 2 << 20, 300 << 20)


def test_caches_follow_from_the_name_where_nobody_says(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_library", lambda cpu: (0, 0, 0))
    assert caches.sizes("emeraldrapids", str(tmp_path)) == (48 << 10, 2 << 20, 0)
    assert caches.sizes("unheard of", str(tmp_path)) == (0, 0, 0)
    monkeypatch.setattr(caches, "_library", lambda cpu: (0, 3 << 20, 64 << 20))
    assert caches.sizes("emeraldrapids", str(tmp_path)) == (48 << 10, 3 << 20, 64 << 20)
