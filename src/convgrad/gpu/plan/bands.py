"""Plans for depthwise layers on tensor cores: rows of taps as bands of matrices (`kernels/bands.py`)."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...spec.problem import Ints, Problem
from ..target import Target
from . import rows
from .axes import is_wide
from .records import Constants, Launch, Plan

DOES = "rows of taps as bands of matrices, by tensor cores, along rows"
WIDTH = 16  # columns of a run
ALIGNED = 8  # elements of 16 bits that are read at once
WORTH = 5  # taps of a row from which on bands are the quicker way
MOST_BANDS = 9  # of 32 by 16: a warp holds one in eight registers


class Window(NamedTuple):
    """What a run reads of a row."""

    origin: int  # columns from run to run
    first: int
    size: int  # a power of two
    band: Ints  # the tap of an entry: by column of the window, of the run, start, divisor


def plan(p: Problem, target: Target, asked: str = "default") -> Plan | str:
    """The plan for a problem, or why there is none."""
    if reason := hindrance(p):
        return reason
    if rows.spatial(p)[2].w < WORTH:
        return "rows of few taps take no longer without matrices"
    return settle(p, target, choose(p, target))


def hindrance(p: Problem) -> str:
    """Why a problem is not served."""
    if p.dtype not in ("bf16", "f16"):
        return "it is for bf16 and f16"
    if p.wanted == "w" or p.accumulate:
        return "it is for y and x that are not added to what was there"
    if not rows.lie_in_space(p):
        return "it is for pixels that lie side by side"
    if reason := rows.hindrance(p):
        return reason
    if (p.cx if p.wanted == "y" else p.cy) > 1:
        return "it is for one channel of a group"
    depth, row, column = rows.spatial(p)
    if column.w < 3 or depth.w * row.w > MOST_BANDS:
        return "it is for rows of three taps and more, at most nine of them"
    if p.wanted == "x" and WIDTH % column.stride:
        return "runs would begin between columns"
    if window(p).size > 64:
        return "its windows would be too long"
    return ""


def window(p: Problem) -> Window:
    """The window of a run."""
    axis = rows.spatial(p)[2]
    needed = [first + i for first, size in rows.reads(p, WIDTH).pieces for i in range(size)]
    first = min(needed) // ALIGNED * ALIGNED
    size = max(16, 1 << (max(needed) - first).bit_length())
    if p.wanted == "x":
        band = (-axis.stride, 1, axis.pad - first * axis.stride, axis.dilation)
        return Window(WIDTH // axis.stride, first, size, band)
    return Window(WIDTH * axis.stride, first, size, (1, -axis.stride, first + axis.pad, axis.dilation))


def choose(p: Problem, target: Target) -> rows.Way:
    """The way for a problem."""
    over = rows.walk(p)
    way = rows.Way(True, 32, 4, WIDTH, over.results, 4, 3, 1)
    heights = {ceil(over.results / chunks) for chunks in rows.CHUNKS}
    ways = [way._replace(height=height) for height in sorted(heights, reverse=True)]
    return rows.quickest(p, target, ways, pace_of(p, target, way))


def pace_of(p: Problem, target: Target, way: rows.Way) -> rows.Pace:
    """The pace of a tile: products of 16 by 8 by 16, and what brings operands to them."""
    depth, row, column = rows.spatial(p)
    warp = way.rows * way.columns / (16 * way.warps)  # products' rows of a warp
    products = depth.w * row.w / (column.stride if p.wanted == "x" else 1) * warp * window(p).size / 16 * WIDTH / 8
    tiles = ceil(rows.across(p, way) / way.columns)
    return rows.Pace(2.5 * products + 40 * warp, 2 * target.multiprocessors, tiles, rows.STEPS, 0.55e-6)


def settle(p: Problem, target: Target, way: rows.Way) -> Plan:
    """The plan that goes a way."""
    time = rows.seconds(p, target, way, pace_of(p, target, way))
    tile = (way.rows, way.columns, way.width, way.height)
    return Plan("bands", DOES, (_launch(p, way),), (), time, (), "", tile)


def _launch(p: Problem, way: rows.Way) -> Launch:
    at, read, axes = rows.ends(p, way, WIDTH), window(p), rows.spatial(p)
    constants: Constants = (
        ("KERNEL", tuple(axis.w for axis in axes)),
        ("DEPTH", rows.along(p, axes[0])),
        ("DOWNWARDS", rows.along(p, axes[1])),
        ("ASIDE", rows.along(p, axes[2])),
        *rows.over_rows(rows.walk(p)),
        ("ORIGIN", read.origin),
        ("FIRST", read.first),
        ("WINDOW", read.size),
        ("BAND", read.band),
        ("MADE", at.made),
        ("FLAT", at.flat),
        ("A_UNIT", rows.unit(at.a, way.pixels)),
        ("W_UNIT", 0 if at.w[0] == 1 else -1),
        ("OUT_UNIT", at.unit),
        ("WIDTH", WIDTH),
        ("ROWS", way.rows),
        ("COLUMNS", way.columns),
        ("WIDE", is_wide(p)),
        ("BIAS", p.bias_stride is not None),
    )
    programs = ceil(rows.lanes(p, way) / way.rows) * ceil(rows.across(p, way) / way.columns)
    return Launch("bands", programs, at.tensors, at.values, constants, way.warps, max(1, way.ahead))
