"""Plans for depthwise layers on tensor cores: rows of taps as bands of matrices (`kernels/bands.py`)."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...spec.problem import Ints, Problem, Role
from ..target import Target
from . import rows
from .axes import is_wide, strides
from .cost import BANDWIDTH_SHARE, LAUNCH
from .records import Constants, Launch, Plan, Values

DOES = "rows of taps as bands of matrices, by tensor cores, along rows"
WIDTH = 16  # columns of a run
ALIGNED = 8  # elements of 16 bits that are read at once
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
    return settle(p, target, choose(p, target))


def hindrance(p: Problem) -> str:
    """Why a problem is not served."""
    if p.dtype not in ("bf16", "f16"):
        return "it is for bf16 and f16"
    if p.wanted == "w" or p.accumulate:
        return "it is for y and x that are not added to what was there"
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
        return Window(
            WIDTH // axis.stride, first, size, (-axis.stride, 1, axis.pad - first * axis.stride, axis.dilation)
        )
    return Window(WIDTH * axis.stride, first, size, (1, -axis.stride, first + axis.pad, axis.dilation))


def choose(p: Problem, target: Target) -> rows.Way:
    """The way for a problem."""
    pixels, over = rows.lie_in_space(p), rows.walk(p)
    channels = p.g * (p.cy if p.wanted == "y" else p.cx)
    columns = min(4 if pixels else 16, 1 << (channels - 1).bit_length())
    way = rows.Way(pixels, 16, columns, WIDTH, over.results, 4, 1, 1)
    best, least = way, float("inf")
    for chunks in range(1, min(over.results, 32) + 1):
        found = way._replace(height=ceil(over.results / chunks))
        tiles = ceil(rows.lanes(p, found) / way.rows) * ceil(channels / way.columns)
        rounds = ceil(tiles / (target.multiprocessors * 4))
        cost = rounds * (found.height + over.extra + 6)
        if cost < least * 0.98:
            best, least = found, cost
    return best


def settle(p: Problem, target: Target, way: rows.Way, why: tuple[str, ...] = ()) -> Plan:
    """The plan that goes a way."""
    time = p.bytes / (target.bandwidth * 1e9 * BANDWIDTH_SHARE) + LAUNCH
    tile = (way.rows, way.columns, way.width, way.height)
    return Plan("bands", DOES, (_launch(p, way),), (), time, why, "", tile)


def _launch(p: Problem, way: rows.Way) -> Launch:
    given: Role = "x" if p.wanted == "y" else "y"
    over, read, axes = rows.walk(p), window(p), rows.spatial(p)
    made = p.cy if p.wanted == "y" else 1
    a, out = (rows.arranged(p, strides(p, role)) for role in (given, p.wanted))
    w = rows.arranged(p, strides(p, "w"))
    if p.wanted == "y":
        w = (w[0], w[2], w[1], *w[3:])
    flat = made == 1 or out[1] == made * out[2]
    if made == 1:
        out = (out[0], out[1], out[1], *out[3:])
    sizes = rows.sizes_of(p, p.wanted)
    values: Values = (
        ("a_strides", a),
        ("w_strides", w),
        ("out_strides", out),
        ("bias_stride", p.bias_stride or 0),
        ("a_sizes", rows.sizes_of(p, given)),
        ("out_sizes", sizes),
        ("images", p.n),
        ("channels", p.g * made),
        ("runs", ceil(sizes[2] / WIDTH)),
        ("chunks", ceil(over.results / way.height)),
        ("height", way.height),
    )
    out_unit = next((axis for axis in ((5, 2) if way.pixels else (2, 5)) if out[axis] == 1), -1)
    constants: Constants = (
        ("KERNEL", tuple(axis.w for axis in axes)),
        ("DEPTH", rows.along(p, axes[0])),
        ("DOWNWARDS", rows.along(p, axes[1])),
        ("ASIDE", rows.along(p, axes[2])),
        ("LIVE", over.live),
        ("DOWN", over.down),
        ("UP", over.up),
        ("CLASSES", over.classes),
        ("ROW", over.row),
        ("EXTRA", over.extra),
        ("ROW_TAPS", over.taps),
        ("ORIGIN", read.origin),
        ("FIRST", read.first),
        ("WINDOW", read.size),
        ("BAND", read.band),
        ("MADE", made),
        ("FLAT", flat),
        ("A_UNIT", rows.unit(a, way.pixels)),
        ("W_UNIT", 0 if w[0] == 1 else -1),
        ("OUT_UNIT", out_unit),
        ("PIXELS", way.pixels),
        ("WIDTH", WIDTH),
        ("ROWS", way.rows),
        ("COLUMNS", way.columns),
        ("WIDE", is_wide(p)),
        ("BIAS", p.bias_stride is not None),
    )
    result = (p.wanted, p.out_dtype)
    tensors = ((given, p.dtype), ("w", p.dtype), result, ("bias", p.dtype) if p.bias_stride is not None else result)
    programs = ceil(rows.lanes(p, way) / way.rows) * ceil(p.g * made / way.columns)
    return Launch("bands", programs, tensors, values, constants, way.warps, max(1, way.ahead), registers=way.registers)
