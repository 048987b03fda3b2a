"""The plan of a problem: of the kernels and tiles that serve it, those that the model expects to be quickest."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem, dense_strides
from ..target import Target
from .axes import LAST, Axes, Walk, is_wide, strides, three, unit, walk
from .cost import Work, fastest_precision, finish_seconds, rate, seconds
from .records import WORKSPACE, Constants, Launch, Plan
from .tiles import lane_tiles, tiles

MOST_WORKSPACE = 256 << 20
"""Bytes of parts of sums, at most; fewer where the tensors are small."""

MOST_PARTS = 128
MOST_PROGRAMS = 2**31 - 1  # of a launch
FINISH = 1024  # results of a program that adds parts


class Candidate(NamedTuple):
    """One way to take the sums of a problem. The quickest is chosen; of equal ones, the first."""

    seconds: float
    kernel: str
    tile: Ints
    flat: bool
    parts: int
    programs: int
    warps: int
    stages: int


def make(p: Problem, target: Target, asked: str = "default") -> Plan | str:
    """The plan for a problem, or why there is none. `asked` says how products of f32 are taken."""
    if not p.size(p.wanted):
        return Plan("", (), "", (), 0, 0, 0.0, ("the result has no elements",))
    if not p.flops:
        launch = _finish(p, 0)
        return Plan("finish", (launch,), "", (), 0, 0, 5e-6, ("no product reaches the result",))
    precision = _precision(p, target, asked)
    found = [*_products(p, target, precision), *_singles(p, target)]
    found = [candidate for candidate in found if candidate.programs <= MOST_PROGRAMS]
    if not found:
        return "it takes more programs than a launch may have"
    best = min(found, key=lambda candidate: candidate.seconds)
    why = _reasons(p, target, precision, best, found, asked)
    item = 8 if p.dtype == "f64" else 4
    split = best.parts > 1
    launches = (_sums(p, best, precision), *((_finish(p, best.parts),) if split else ()))
    workspace = best.parts * p.size(p.wanted) * item if split else 0
    told = precision if best.kernel in ("gather", "weights") and p.dtype == "f32" else ""
    return Plan(best.kernel, launches, told, best.tile, best.parts, workspace, best.seconds, why)


def _precision(p: Problem, target: Target, asked: str) -> str:
    if p.dtype != "f32":
        return "ieee"
    return fastest_precision(target) if asked == "default" else asked


def _reasons(
    p: Problem, target: Target, precision: str, best: Candidate, found: Iterable[Candidate], asked: str
) -> tuple[str, ...]:
    """What decided."""
    others: dict[str, float] = {}
    for candidate in found:
        name = candidate.kernel + (" with taps and channels as one axis" if candidate.flat else "")
        others[name] = min(candidate.seconds, others.get(name, candidate.seconds))
    told = ", ".join(f"{name} {time * 1e6:.0f}" for name, time in others.items())
    lines = [f"microseconds by the model for {target.name}: {told}; chosen: {best.kernel}"]
    if best.parts > 1:
        lines.append(f"{best.parts} parts give {best.programs} programs to {target.multiprocessors} multiprocessors")
    if p.dtype == "f32" and asked == "default" and best.kernel in ("gather", "weights"):
        reason = "the tensor cores take six products of bf16 sooner than the plain units take one of f32"
        lines.append(reason if precision == "bf16x6" else "the plain units are faster than split products here")
    if is_wide(p):
        lines.append("offsets take 64 bits")
    lines.append("the portable level; no kernel for one kind of GPU is chosen yet")
    return tuple(lines)


def _part_counts(p: Problem, programs: int, blocks: int, target: Target) -> list[int]:
    """In how many parts a sum may be taken: 1, and powers of two while there is work and memory."""
    counts = [1]
    item = 8 if p.dtype == "f64" else 4
    most = min(MOST_WORKSPACE, max(p.bytes, 16 << 20)) // (p.size(p.wanted) * item)
    parts = 2
    while parts <= min(most, MOST_PARTS, blocks // 2) and programs * parts <= 8 * target.multiprocessors:
        counts.append(parts)
        parts *= 2
    return counts


def _products(p: Problem, target: Target, precision: str) -> list[Candidate]:
    """Matrix products, each tap by itself or taps and channels as one axis."""
    item, found = DTYPES[p.dtype].size, []
    flop_rate = rate(target, p.dtype, precision)
    kernel = "weights" if p.wanted == "w" else "gather"
    for flat in (False, True):
        length = _length(p, flat)
        for tile in tiles(target, p.dtype, precision, length.depth):
            across = ceil(length.columns / tile.columns) * ceil(length.rows / tile.rows) * length.times
            blocks = ceil(length.depth / tile.depth) * length.repeats
            elements = (tile.rows + tile.columns) * tile.depth
            gathered = (tile.columns if kernel == "weights" else tile.rows) * tile.depth
            loads = elements * item * (1.5 if flat else 1.0)
            steps = 3.0 * elements + (14.0 * gathered if flat else 0.0) + 40.0 * tile.depth * (kernel == "weights")
            flops = 2 * tile.rows * tile.columns * tile.depth
            for parts in _part_counts(p, across, blocks, target):
                work = Work(across * parts, ceil(blocks / parts), flops, loads, steps, p.bytes)
                time = seconds(target, work, flop_rate)
                if parts > 1:
                    time += finish_seconds(target, p.size(p.wanted), parts, p.dtype)
                size = (tile.rows, tile.columns, tile.depth)
                found.append(Candidate(time, kernel, size, flat, parts, across * parts, tile.warps, tile.stages))
    return found


class _Length(NamedTuple):
    """The sizes of the matrix product of a problem: one of `times`, each a sum over `repeats` runs of `depth`."""

    rows: int
    columns: int
    depth: int
    repeats: int
    times: int


def _length(p: Problem, flat: bool) -> _Length:
    taps = prod(p.w)
    if p.wanted == "w":
        pixels = p.n * prod(p.y)
        return _Length(p.cy, p.cx * taps, pixels, 1, p.g) if flat else _Length(p.cy, p.cx, pixels, 1, p.g * taps)
    summed, made = _channels(p)
    over = walk(p)
    taps = max(1, ceil(taps / over.phases))
    times = p.g * over.phases
    if flat:
        return _Length(over.pixels, made, taps * summed, 1, times)
    return _Length(over.pixels, made, summed, taps, times)


def _channels(p: Problem) -> Ints:
    """Channels of a group that a gather sums over, and those that it makes."""
    return (p.cx, p.cy) if p.wanted == "y" else (p.cy, p.cx)


def _singles(p: Problem, target: Target) -> list[Candidate]:
    """Products one by one."""
    item, found = DTYPES[p.dtype].size, []
    taps = prod(p.w)
    if p.wanted == "w":
        kernel, lanes, rows, times = "lanes_weights", p.g * p.cy * p.cx, p.n * prod(p.y), taps
        pair = ("x", "y")
    else:
        (summed, made), over = _channels(p), walk(p)
        kernel, lanes, rows, times = "lanes", p.g * made, over.pixels, over.phases
        count = max(1, ceil(taps / over.phases)) * summed
        pair = ("x", "y")
    flop_rate = (target.double if p.dtype == "f64" else target.vector) * 0.8
    for height, width in lane_tiles(lanes, rows):
        tiles_across = ceil(lanes / width)
        if kernel == "lanes":
            across, blocks = tiles_across * ceil(rows / height) * times, count
        else:
            across, blocks = tiles_across * times, ceil(rows / height)
        elements = height * width
        share = min(_run(p, role, height, width) for role in pair)
        tensors = 2 if kernel == "lanes_weights" else 1
        work = Work(0, 0, 2 * elements, elements * item * tensors / share, 6.0 * elements + 20.0 * height, p.bytes)
        for parts in _part_counts(p, across, blocks, target):
            dealt = work._replace(programs=across * parts, blocks=ceil(blocks / parts))
            time = seconds(target, dealt, flop_rate)
            if parts > 1:
                time += finish_seconds(target, p.size(p.wanted), parts, p.dtype)
            found.append(Candidate(time, kernel, (height, width), False, parts, across * parts, 4, 2))
    return found


def _run(p: Problem, role: str, height: int, width: int) -> float:
    """The share of what is fetched that a tile uses: memory comes in pieces of 32 bytes."""
    axis = unit(strides(p, role))
    if axis < 0:
        return DTYPES[p.dtype].size / 32
    run = min(height, three(p).sizes(role)[-1]) if axis == LAST else width
    return min(1.0, run * DTYPES[p.dtype].size / 32)


def _sums(p: Problem, best: Candidate, precision: str) -> Launch:
    """The launch that takes the sums."""
    if best.kernel in ("weights", "lanes_weights"):
        return _weights_launch(p, best, precision)
    return _gather_launch(p, best, precision)


def _gather_launch(p: Problem, best: Candidate, precision: str) -> Launch:
    given = "x" if p.wanted == "y" else "y"
    summed, made = _channels(p)
    over = walk(p)
    split = best.parts > 1
    w_strides = strides(p, "w")
    if p.wanted == "y":
        w_strides = (w_strides[0], w_strides[2], w_strides[1], *w_strides[3:])
    out_strides = _workspace_strides(p) if split else strides(p, p.wanted)
    biased = p.bias_stride is not None and not split
    axes = dict(over.values)
    values = (
        ("a_strides", strides(p, given)),
        ("w_strides", w_strides),
        ("out_strides", out_strides),
        ("bias_stride", p.bias_stride or 0),
        *((name, axes[name]) for name in ("a_sizes", "out_sizes", "lead", "rest", "steps")),
        ("images", p.n),
        ("groups", p.g),
        ("summed", summed),
        ("made", made),
        ("parts", best.parts),
        ("part_stride", p.size(p.wanted) if split else 0),
    )
    constants: Constants = (
        *over.constants,
        ("A_UNIT", unit(strides(p, given))),
        ("W_UNIT", unit(w_strides)),
        ("OUT_UNIT", unit(out_strides)),
        ("ROWS", best.tile[0]),
        ("COLUMNS", best.tile[1]),
    )
    if best.kernel == "gather":
        even = not best.flat and summed % best.tile[2] == 0
        constants += (("DEPTH", best.tile[2]), ("FLAT", best.flat), ("EVEN", even), ("PRECISION", precision))
    constants += (
        ("DOUBLE", p.dtype == "f64"),
        ("WIDE", is_wide(p)),
        ("BIAS", biased),
        ("ACCUMULATE", p.accumulate and not split),
    )
    out = _out(p, split)
    tensors = ((given, p.dtype), ("w", p.dtype), out, ("bias", p.dtype) if biased else out)
    return Launch(best.kernel, best.programs, tensors, values, constants, best.warps, best.stages)


def _weights_launch(p: Problem, best: Candidate, precision: str) -> Launch:
    axes, split = three(p), best.parts > 1
    out_strides = _workspace_strides(p) if split else strides(p, "w")
    values = (
        ("x_strides", strides(p, "x")),
        ("y_strides", strides(p, "y")),
        ("out_strides", out_strides),
        ("x_sizes", axes.x),
        ("y_sizes", axes.y),
        ("pad", axes.pad),
        ("images", p.n),
        ("groups", p.g),
        ("x_channels", p.cx),
        ("y_channels", p.cy),
        ("parts", best.parts),
        ("part_stride", p.size("w") if split else 0),
    )
    constants: Constants = (
        ("KERNEL", axes.w),
        ("STRIDE", axes.stride),
        ("DILATION", axes.dilation),
        ("X_UNIT", unit(strides(p, "x"))),
        ("Y_UNIT", unit(strides(p, "y"))),
        ("OUT_UNIT", unit(out_strides)),
        ("ROWS", best.tile[0]),
        ("COLUMNS", best.tile[1]),
    )
    if best.kernel == "weights":
        constants += (("DEPTH", best.tile[2]), ("FLAT", best.flat), ("PRECISION", precision))
    constants += (("DOUBLE", p.dtype == "f64"), ("WIDE", is_wide(p)), ("ACCUMULATE", p.accumulate and not split))
    tensors = (("x", p.dtype), ("y", p.dtype), _out(p, split))
    return Launch(best.kernel, best.programs, tensors, values, constants, best.warps, best.stages)


def _out(p: Problem, split: bool) -> tuple[str, str]:
    return (WORKSPACE, "f64" if p.dtype == "f64" else "f32") if split else (p.wanted, p.out_dtype)


def _order(p: Problem) -> Ints:
    """The six axes of the result from the outermost to the innermost in memory, so that they are written in order."""
    of = strides(p, p.wanted)
    return tuple(sorted(range(6), key=lambda axis: (-abs(of[axis]), axis)))


def _shape(p: Problem) -> Ints:
    axes: Axes = three(p)
    return (*p.shape(p.wanted)[:3], *axes.sizes(p.wanted))


def _workspace_strides(p: Problem) -> Ints:
    """Strides of a part of the sums, which lies as the result does, but without gaps."""
    shape = _shape(p)
    dense = dense_strides(shape, _order(p))
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, dense, strict=True))


def _finish(p: Problem, parts: int) -> Launch:
    """The launch that adds parts."""
    order, shape, of = _order(p), _shape(p), strides(p, p.wanted)
    step = p.bias_stride or 0
    bias = (0, shape[2] * step, step, 0, 0, 0)
    elements = p.size(p.wanted)
    count = min(FINISH, max(128, 1 << (elements - 1).bit_length()))
    values = (
        ("sizes", tuple(shape[axis] for axis in order)),
        ("out_strides", tuple(of[axis] for axis in order)),
        ("bias_strides", tuple(bias[axis] for axis in order)),
        ("elements", elements),
        ("parts", parts),
    )
    constants: Constants = (
        ("COUNT", count),
        ("DOUBLE", p.dtype == "f64"),
        ("WIDE", is_wide(p) or parts * elements >= 2**31 - 2**20),
        ("BIAS", p.bias_stride is not None),
        ("ACCUMULATE", p.accumulate),
    )
    out = (p.wanted, p.out_dtype)
    sums = (WORKSPACE, "f64" if p.dtype == "f64" else "f32")
    tensors = (sums if parts else out, out, ("bias", p.dtype) if p.bias_stride is not None else out)
    return Launch("finish", ceil(elements / count), tensors, values, constants, 4, 1)


__all__ = ["MOST_WORKSPACE", "Walk", "make"]
