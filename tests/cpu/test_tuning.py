"""The table of tuning decides speed alone: whatever its numbers, results are the same, bit for bit."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad.cpu import kernel
from convgrad.cpu.kernel import Kernel
from convgrad.cpu.plan import bits, tuning
from convgrad.cpu.target import Target
from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem
from marks import slow_but

from .machines import AVX2, AVX512, BASELINE, HALVES, MACHINES, NEON
from .problems import built, however_small, targets

TARGETS = targets()
PROBLEMS = (
    "y f32 n1 g1 cx200 cy40 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "y f32 n2 g1 cx70 cy16 x12x12 w1x1 y12x12 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio bias",
    "y f32 n1 g1 cx5 cy2 x9x20 w3x3 y9x20 s1x1 d1x1 p1x1",
    "x f32 n1 g1 cx24 cy90 x15x15 w3x3 y8x8 s2x2 d1x1 p1x1",
    "x f64 n2 g6 cx4 cy4 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "w f32 n2 g1 cx24 cy40 x30x30 w3x3 y30x30 s1x1 d1x1 p1x1",
    "w f32 n3 g1 cx9 cy16 x40x40 w1x1 y40x40 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio",
    "w f64 n1 g4 cx3 cy3 x12x20 w3x3 y12x20 s1x1 d1x1 p1x1",
    "w f32 n1 g40 cx1 cy1 x30x30 w3x3 y30x30 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "y f32 n2 g7 cx1 cy1 x20x20 w3x3 y20x20 s1x1 d1x1 p1x1",
)
KEPT = {"fixed", "most_rows", "sum_rows", "group_rows", "group_sums", "tile_vectors"}
"""Not made wild but smaller: what is more than that would not fit in registers."""


def wild(value: Any, rng: np.random.Generator, name: str = "") -> Any:
    """The same with other numbers, each up to eight times as large or as small."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: wild(getattr(value, f.name), rng, f.name) for f in fields(value)})
    if isinstance(value, bool):
        return value if name in KEPT else bool(rng.integers(0, 2))
    if isinstance(value, dict):
        return {key: wild(number, rng, name) for key, number in value.items()}
    if name in KEPT:
        return int(rng.integers(ceil(value / 2), value + 1))
    factor = 8.0 ** rng.uniform(-1, 1)
    return max(1, round(value * factor)) if isinstance(value, int) else min(value * factor, 0.9 + 0.1 * value)


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Rows are read anew, before and after."""
    tuning.tuning.cache_clear()
    yield
    tuning.tuning.cache_clear()


def computed(p: Problem, target: Target, team: int = 3) -> tuple[bytes, str]:
    """The bits of the result, of numbers whose sums are rounded; and the code."""
    rng = np.random.default_rng(5)
    arrays = {role: rng.standard_normal(p.shape(role)).astype(DTYPES[p.dtype].numpy) for role in "xwy"}
    places = {role: np.empty(p.size(role), DTYPES[p.dtype].numpy) for role in "xwy"}
    for role, flat in places.items():
        view = np.lib.stride_tricks.as_strided(flat, p.shape(role), [s * flat.itemsize for s in p.strides(role)])
        view[...] = arrays[role]
    places[p.wanted][...] = np.nan
    bias = rng.standard_normal(p.g * max(p.cx, p.cy)).astype(DTYPES[p.dtype].numpy)
    with however_small():
        made = built(p, target, team)
    assert isinstance(made, Kernel)
    made(*(places[role].ctypes.data for role in "xwy"), bias.ctypes.data)
    assert not np.isnan(places[p.wanted]).any()
    return places[p.wanted].tobytes(), kernel.write(made.plan)


SAMPLED = ["native in small caches", "halves", "avx2 in small caches"]


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("name", slow_but(["native in small caches"], SAMPLED))
def test_a_row_of_the_table_never_changes_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in TARGETS:
        pytest.skip(f"this machine has no {name}")
    rng = np.random.default_rng(3)
    problems = [Problem.parse(text) for text in PROBLEMS]
    usual = [computed(p, TARGETS[name]) for p in problems]
    for kind, row in tuning.KINDS.items():
        monkeypatch.setitem(tuning.KINDS, kind, wild(row, rng))
    tuning.tuning.cache_clear()
    other = [computed(p, TARGETS[name]) for p in problems]
    assert sum(code != before for (_, before), (_, code) in zip(usual, other, strict=True)) > len(problems) // 2
    for p, (before, _), (after, _) in zip(problems, usual, other, strict=True):
        assert before == after, p


@pytest.mark.parametrize(
    ("constant", "value", "l1", "text"),
    [
        ("CHUNK_PART", 99, 32768, PROBLEMS[0]),
        ("FOLD", 1e9, 32768, "x f32 n1 g1 cx2 cy9 x9x40 w3x5 y9x20 s1x2 d1x1 p1x2"),
        ("SLICE_BYTES", 1, 2048, PROBLEMS[6]),
        ("DEPTHWISE_SLICES", (1, 1), 32768, PROBLEMS[8]),
        ("IN_PLACE_ROWS", 0, 32768, "w f32 n3 g1 cx32 cy64 x40x40 w1x1 y40x40 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio"),
    ],
)
def test_constants_of_bits_do(constant: str, value: Any, l1: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, target = Problem.parse(text), replace(TARGETS["native"], l1=l1)
    before, _ = computed(p, target)
    assert hasattr(bits, constant)
    for module in [m for name, m in sys.modules.items() if name.startswith("convgrad.cpu") and hasattr(m, constant)]:
        monkeypatch.setattr(module, constant, value)
    after, _ = computed(p, target)
    assert before != after


@pytest.mark.parametrize(
    ("file", "functions"),
    [
        ("wgrad/roles.py", ()),
        ("wgrad/pointwise.py", ()),
        ("wgrad/cut.py", ("cut_pixels", "_bytes_of_pixel", "_task_blocks", "_cut", "_slices")),
        ("depthwise/choose.py", ()),
        ("depthwise/channels_plan.py", ()),
        ("plan/records.py", ("pitch",)),
    ],
)
def test_planners_of_sums_have_no_constants_of_their_own(file: str, functions: tuple[str, ...]) -> None:
    """They are in bits.py. What a pair needs may be written out, and how many registers AVX-512 has."""
    tree = ast.parse((Path(kernel.__file__).parent / file).read_text())
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    parts = [found[name] for name in functions] or [tree]
    values = {node.value for part in parts for node in ast.walk(part) if isinstance(node, ast.Constant)}
    numbers = {value for value in values if type(value) in (int, float)}
    assert numbers <= {0, 1, 2, 32}


def test_every_machine_has_a_row() -> None:
    kinds = [tuning.kind(target) for target in (AVX512, HALVES, HALVES.at_half_width(), AVX2, NEON, BASELINE)]
    assert kinds == list(tuning.KINDS)
    made_up = MACHINES["vector of 3"]
    assert tuning.tile(made_up, 3, 100) == made_up.tile


@pytest.mark.parametrize("target", [AVX512, HALVES, HALVES.at_half_width(), AVX2, NEON, BASELINE], ids=tuning.kind)
def test_tiles_fit_in_the_registers(target: Target) -> None:
    """All sums, a row of weights, and one broadcast."""
    tiles = tuning.tuning(target).tiles
    assert set(bits.block_widths(target).cost) <= set(tiles.most_rows)
    for vectors in bits.block_widths(target).cost:
        assert tiles.most_rows[vectors] * vectors + vectors + 1 <= target.registers
    assert tiles.sum_rows + 2 <= target.registers
    assert tiles.group_sums + 2 <= target.registers
    assert max(tiles.even_steps, default=0) + 2 <= target.registers
