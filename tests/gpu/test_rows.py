"""Depthwise layers that are walked along rows: exact in every way to walk, by Triton's interpreter."""

from __future__ import annotations

import zlib

import interpreter
import numpy as np
import pytest
from gpu_problems import WALKED
from test_interpreted import check

from convgrad import reference
from convgrad.gpu.plan import rows
from convgrad.spec import Problem
from marks import slow_but

KINDS = ["f32", "bf16 bias@3 accumulate", "f16 out:f32 accumulate", "bf16 bias"]


def every_walk(line, name):
    """A problem in the way that is chosen, and in some others: chunks, parts and tiles that do not fit it."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for turn, multiprocessors in enumerate((1, 132)):
        dtype, *more = KINDS[rng.integers(len(KINDS))].split()
        more = [word for word in more if line[0] != "w" or "bias" not in word]
        problem = Problem.parse(" ".join([line.format(dtype), *more]))
        machine = interpreter.small("sm_90", multiprocessors)
        way = rows.choose(problem, machine)
        if turn:
            way = other(problem, way, rng)
        plan = rows.settle(problem, machine, way)
        check(problem, interpreter.widened(plan) if turn else plan)


def other(problem, way, rng):
    """A way that nobody would choose."""
    results = rows.walk(problem, way.taps).results
    way = way._replace(height=int(rng.integers(1, results + 2)), ahead=int(rng.choice([0, 2])), unroll=2)
    way = way._replace(rows=max(1, way.rows // 2), columns=2 * way.columns)
    if problem.wanted == "w":
        kernel = rows.spatial(problem)[1].w
        way = way._replace(parts=int(rng.integers(1, 5)), taps=int(rng.integers(1, kernel + 1)))
    if problem.wanted != "x" or rows.spatial(problem)[2].stride == 1:
        way = way._replace(width=max(1, way.width // 2))
    return way


QUICK = [("pixels", "y"), ("channels", "w"), ("channels, strided", "x"), ("pixels, strided", "w"), ("3d, pixels", "x")]


@pytest.mark.parametrize(("name", "wanted"), slow_but(QUICK, [(name, w) for name in WALKED for w in "xyw"]))
def test_every_walk_is_exact(interpreted, name, wanted):
    interpreted(every_walk, WALKED[name].replace("{}", wanted, 1), name + wanted)


def infinite(line, role):
    """An infinity has a product with what it meets in its windows, and with nothing else."""
    problem, rng = Problem.parse(line), np.random.default_rng(0)
    machine = interpreter.small("sm_90", 8)
    way = rows.choose(problem, machine)._replace(height=4)
    for at in [(0, 0), (5, 5), (2, 3)]:
        arrays = {}
        for name in "xwy":
            block = np.zeros(problem.size(name), np.float32)
            steps = [4 * stride for stride in problem.strides(name)]
            arrays[name] = np.lib.stride_tricks.as_strided(block, problem.shape(name), steps)
            arrays[name][...] = rng.integers(1, 3, problem.shape(name))
        arrays[problem.wanted][...] = np.nan
        arrays[role][0, 1, 0][at] = np.inf
        expected = reference.compute(problem, {name: arrays[name] for name in problem.given})
        assert np.isfinite(expected).any()
        assert not np.isfinite(expected).all()
        places = {name: array.ctypes.data for name, array in arrays.items()} | {"bias": 0}
        interpreter.run(rows.settle(problem, machine, way), places)
        assert np.array_equal(arrays[problem.wanted], expected)


@pytest.mark.parametrize(
    ("wanted", "role", "layout"),
    slow_but(
        [("w", "x", "")],
        [(w, r, t) for w, r in (("w", "x"), ("w", "y"), ("x", "y"), ("y", "x")) for t in ("", " x@nxc y@nxc")],
    ),
)
def test_infinities_keep_to_their_windows(interpreted, wanted, role, layout):
    interpreted(infinite, f"{wanted} f32 n2 g4 cx1 cy1 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1{layout}", role)
