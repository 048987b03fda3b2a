"""Plans for depthwise layers on tensor cores: rows of taps as bands of matrices (`kernels/bands.py`)."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...spec.problem import Ints, Problem, Role
from ..target import Target
from . import rows
from .axes import is_wide, strides
from .launches import finish, out_tensor
from .records import PARTS, Constants, Launch, Plan, Values

DOES = "rows of taps as bands of matrices, by tensor cores, along rows"
WIDTH = 16  # columns of a run
ALIGNED = 8  # elements of 16 bits that are read at once
WORTH = 5  # taps of a row from which on bands are the quicker way
MOST_SUMS = 7  # rows of taps whose sums a warp holds, each in sixteen registers
MOST_BANDS = 9  # of 32 by 16: a warp holds one in eight registers


class Window(NamedTuple):
    """What a run reads of a row."""

    origin: int  # columns from run to run
    first: int
    size: int  # a power of two
    needed: int  # of its columns
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
    if p.wanted != "w" and p.accumulate:
        return "it is not for sums that are added to what was there"
    if reason := rows.hindrance(p):
        return reason
    if (p.cx if p.wanted == "y" else p.cy if p.wanted == "x" else p.cx * p.cy) > 1:
        return "it is for one channel of a group"
    depth, row, column = rows.spatial(p)
    if column.w < 3 or (p.wanted != "w" and depth.w * row.w > MOST_BANDS):
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
    pixels = rows.lie_in_space(p)
    # Pixels that lie side by side are read 16 bytes at a time.
    first = min(needed) // ALIGNED * ALIGNED if pixels else min(needed)
    size = max(16, 1 << (max(needed) - first).bit_length())
    read = size if pixels else max(needed) - first + 1
    if p.wanted == "x":
        band = (-axis.stride, 1, axis.pad - first * axis.stride, axis.dilation)
        return Window(WIDTH // axis.stride, first, size, read, band)
    return Window(WIDTH * axis.stride, first, size, read, (1, -axis.stride, first + axis.pad, axis.dilation))


def choose(p: Problem, target: Target) -> rows.Way:
    """The way for a problem."""
    pixels, back = rows.lie_in_space(p), p.wanted == "w"
    taps = min(rows.spatial(p)[1].w, MOST_SUMS) if back else 0
    over = rows.walk(p, taps)
    way = rows.Way(pixels, 32, 4, WIDTH, over.results, 4, 3, 1, taps)
    if back:
        way = way._replace(rows=16, columns=1 if pixels else 8, warps=1 if pixels else 8, ahead=1)
    elif not pixels:
        way = way._replace(rows=16, columns=8, warps=8, ahead=1, registers=128)
    heights = {ceil(over.results / chunks) for chunks in rows.CHUNKS}
    ways = [way._replace(height=height) for height in sorted(heights, reverse=True)]
    return rows.quickest(p, target, ways, pace_of(p, target, way))


def pace_of(p: Problem, target: Target, way: rows.Way) -> rows.Pace:
    """The pace of a tile: products of 16 by 8 by 16, and what brings operands to them."""
    depth, row, column = rows.spatial(p)
    size, warp = window(p).size, way.rows * way.columns / (16 * way.warps)  # products' rows of a warp
    if p.wanted == "w":
        products = way.taps * warp * size / 16 * WIDTH / 8
        tiles = ceil(rows.across(p, way) / way.columns) * ceil(row.w / way.taps) * depth.w
        at_once = (8 // way.warps or 1) * target.multiprocessors
        return rows.Pace(5 * products + 60, at_once, tiles, 2.0 * column.w, 0.8e-6)
    products = depth.w * row.w / (column.stride if p.wanted == "x" else 1) * warp * size / 16 * WIDTH / 8
    tiles = ceil(rows.across(p, way) / way.columns)
    instructions = 2.5 * products + (40 if way.pixels else 90) * warp
    return rows.Pace(instructions, 2 * target.multiprocessors, tiles, rows.STEPS, 0.6e-6)


def settle(p: Problem, target: Target, way: rows.Way, why: tuple[str, ...] = ()) -> Plan:
    """The plan that goes a way."""
    time = rows.seconds(p, target, way, pace_of(p, target, way))
    tile = (way.rows, way.columns, way.width, way.height)
    if p.wanted != "w":
        return Plan("bands", DOES, (_launch(p, way),), (), time, why, "", tile)
    split = rows.is_split(p, way)
    launches = (_weights_launch(p, way), *((finish(p, way.parts),) if split else ()))
    areas = ((PARTS, way.parts * p.size("w") * 4),) if split else ()
    return Plan("bands_weights", DOES, launches, areas, time, why, "", tile, way.parts)


def _weights_launch(p: Problem, way: rows.Way) -> Launch:
    over, read, axes = rows.walk(p, way.taps), window(p), rows.spatial(p)
    values = rows.weights_values(p, way)
    x, y = (rows.arranged(p, strides(p, role)) for role in ("x", "y"))
    constants: Constants = (
        ("KERNEL", tuple(axis.w for axis in axes)),
        ("DEPTH", rows.along(p, axes[0])),
        ("TAPS", way.taps),
        ("LIVE", over.live),
        ("DOWN", over.down),
        ("CLASSES", over.classes),
        ("ROW", over.row),
        ("ORIGIN", read.origin),
        ("FIRST", read.first),
        ("WINDOW", read.size),
        ("NEEDED", read.needed),
        ("BAND", read.band),
        ("COLUMN", axes[2][3:]),
        ("X_UNIT", rows.unit(x, way.pixels)),
        ("Y_UNIT", rows.unit(y, way.pixels)),
        ("PIXELS", way.pixels),
        ("WIDTH", WIDTH),
        ("ROWS", way.rows),
        ("COLUMNS", way.columns),
        ("WIDE", is_wide(p)),
    )
    programs = ceil(p.g / way.columns) * ceil(axes[1].w / way.taps) * axes[0].w * way.parts
    tensors = (("x", p.dtype), ("y", p.dtype), out_tensor(p, rows.is_split(p, way)))
    stages = max(1, way.ahead)
    return Launch("bands_weights", programs, tensors, values, constants, way.warps, stages, registers=way.registers)


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
        ("NEEDED", read.needed),
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
