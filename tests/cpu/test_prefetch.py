"""Prefetch: portions hold all lines of all regions, and a tile has the steps to prefetch a portion."""

from __future__ import annotations

import ctypes
from itertools import product
from math import ceil, prod

import numpy as np
import pytest

from convgrad.cpu.compile import jit
from convgrad.cpu.emit.frame import Frame
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.plan.prefetch import BURST, Lines, Prefetch, lines
from convgrad.cpu.plan.workspace import per_thread
from convgrad.cpu.target import LINE
from convgrad.cpu.threads import team

REGIONS: tuple[Lines, ...] = (((3, 1000), (5, 64)), ((7, 64),))


@pytest.mark.parametrize("calls", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("regions", [REGIONS, REGIONS[:1]])
def test_slices_hold_all_lines(regions: tuple[Lines, ...], calls: int) -> None:
    """A portion is of one region, so that a tile needs one base; there are no more portions than calls."""
    prefetch = Prefetch(regions, calls, steps=64)
    for region, portions in zip(regions, prefetch.portions, strict=True):
        total = prod(count for count, _ in region)
        assert total <= portions * prefetch.lines_per_call < total + prefetch.lines_per_call
    assert sum(prefetch.portions) <= max(calls, len(regions))


@pytest.mark.parametrize("steps", [1, 8, 22, 23, 64, 1000])
@pytest.mark.parametrize("calls", [1, 5, 30])
def test_lines_are_spread_over_the_steps_of_a_call(calls: int, steps: int) -> None:
    prefetch = Prefetch(REGIONS, calls, steps)
    assert prefetch.burst == (prefetch.lines_per_call <= BURST)
    if prefetch.lines_per_call <= steps:
        assert steps < 2 * prefetch.lines_per_call * prefetch.steps_per_line <= 2 * steps
    for taps in (1, 9):
        assert taps * prefetch.steps_needed(taps) >= prefetch.lines_per_call * prefetch.steps_per_line


def test_offsets_are_listed_by_region() -> None:
    """What fills up the last portion of a region is its first line."""
    prefetch = Prefetch(REGIONS, 5, 64)
    frame = Frame(Module(), [per_thread("lines", 2 * prefetch.size)], "float")
    frame.list_lines(prefetch)
    table = np.full(prefetch.size + 8, -1, np.int64)
    arguments = (ctypes.c_int64 * 5)(0, 0, 0, 0, table.ctypes.data)
    module = jit.load(frame.end(), *jit.host())
    team.run(module.address("kernel"), ctypes.addressof(arguments), 1)
    wanted: list[int] = []
    for region, portions in zip(REGIONS, prefetch.portions, strict=True):
        offsets = [sum(at) for at in product(*(range(0, count * step, step) for count, step in region))]
        wanted += offsets + [0] * (portions * prefetch.lines_per_call - len(offsets))
    assert list(table[: prefetch.size]) == wanted
    assert (table[prefetch.size :] == -1).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_lines_are_prefetched_wherever_an_array_begins(size: int) -> None:
    """But for the last of many."""
    for channels in (1, 2, 8, 15, 16, 17, 32, 48, 100, 128, 300):
        bytes_ = size * channels
        (count, step), *inner = lines([3], [1000], channels, 1, size)
        assert (count, step) == (3, 1000 * size)
        offsets = [sum(at) for at in product(*(range(0, n * by, by) for n, by in inner))]
        for begin in range(0, LINE, size):
            fetched = {(begin + offset) // LINE for offset in offsets}
            touched = {(begin + byte) // LINE for byte in range(bytes_)}
            assert len(touched - fetched) <= (bytes_ > 8 * LINE)
        assert len(offsets) <= ceil(bytes_ / LINE) + (channels > 1)
