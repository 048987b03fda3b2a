"""The portable level: of the kernels and tiles that serve a problem, those that the model expects to be quickest."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, gcd, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..target import Target
from .axes import LAST, is_wide, strides, three, unit, walk
from .cost import SPLIT_TIMES, Work, beside, fastest_precision, finish_seconds, rate, seconds
from .launches import Candidate, channels, finish, is_inside, sums
from .records import PARTS, Plan
from .tiles import Tile, lane_tiles, tiles

MOST_WORKSPACE = 256 << 20
"""Bytes of parts of sums, at most; fewer where the tensors are small."""

MOST_PARTS = 1024
MOST_PROGRAMS = 2**31 - 1  # of a launch


KERNELS = {
    "gather": "matrix products over taps and channels",
    "lanes": "products one by one, channels of all groups side by side",
    "weights": "matrix products over pixels, for each tap",
    "lanes_weights": "products one by one over pixels, for each tap, channels of all groups side by side",
}
"""What the kernels do."""


def plan(p: Problem, target: Target, asked: str = "default") -> Plan | str:
    """The plan for a problem, or why there is none. `asked` says how products of f32 are taken."""
    if not p.size(p.wanted):
        return Plan("", "nothing to write: the result is empty", (), (), 0.0, ("the result has no elements",))
    if not p.flops:
        does = "no sums: the result without a product"
        return Plan("finish", does, (finish(p, 0),), (), 5e-6, ("no product reaches the result",))
    found = candidates(p, target, asked)
    if not found:
        return "it takes more programs than a launch may have"
    best = min(found, key=lambda candidate: candidate.seconds)
    return settle(p, target, best, asked, _reasons(p, target, best, found, asked))


def candidates(p: Problem, target: Target, asked: str = "default") -> list[Candidate]:
    """All ways to take the sums of a problem, each with the time that it is expected to take."""
    found = [*_products(p, target, precision_of(p, target, asked)), *_singles(p, target)]
    return [candidate for candidate in found if candidate.programs <= MOST_PROGRAMS]


def settle(p: Problem, target: Target, best: Candidate, asked: str = "default", notes: tuple[str, ...] = ()) -> Plan:
    """The plan that takes one of the ways."""
    precision = precision_of(p, target, asked)
    split = best.parts > 1
    launches = (sums(p, best, precision), *((finish(p, best.parts),) if split else ()))
    areas = ((PARTS, best.parts * p.size(p.wanted) * _item(p)),) if split else ()
    told = precision if best.kernel in ("gather", "weights") and p.dtype == "f32" else ""
    does = KERNELS[best.kernel]
    return Plan(best.kernel, does, launches, areas, best.seconds, notes, told, best.tile, best.parts)


def precision_of(p: Problem, target: Target, asked: str) -> str:
    """How products of a problem are taken by matrix products."""
    if p.dtype != "f32":
        return "ieee"
    return fastest_precision(target) if asked == "default" else asked


def _item(p: Problem) -> int:
    """Bytes of a sum."""
    return DTYPES[p.dtype].accumulator.itemsize


def _reasons(p: Problem, target: Target, best: Candidate, found: Iterable[Candidate], asked: str) -> tuple[str, ...]:
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
        split = precision_of(p, target, asked) == "bf16x6"
        lines.append(reason if split else "the plain units are faster than split products here")
    if is_wide(p):
        lines.append("offsets take 64 bits")
    return tuple(lines)


def _part_counts(p: Problem, programs: int, blocks: int, target: Target) -> list[int]:
    """In how many parts, of which none is empty, a sum may be taken: 1, and about powers of two while there is work."""
    counts = [1]
    most = min(MOST_WORKSPACE, max(p.bytes, 16 << 20)) // (p.size(p.wanted) * _item(p))
    parts = 2
    while parts <= min(most, MOST_PARTS, blocks // 2) and programs * parts <= 8 * target.multiprocessors:
        counts.append(ceil(blocks / ceil(blocks / parts)))
        parts *= 2
    return counts


def _products(p: Problem, target: Target, precision: str) -> list[Candidate]:
    """Matrix products, each tap by itself or taps and channels as one axis."""
    found = []
    flop_rate = rate(target, p.dtype, precision)
    kernel = "weights" if p.wanted == "w" else "gather"
    for flat in (False, True):
        length, access = _length(p, flat), _accesses(p, flat)
        for tile in tiles(target, p.dtype, precision, length.depth, flat, is_wide(p)):
            across = ceil(length.columns / tile.columns) * ceil(length.rows / tile.rows) * length.times
            blocks = ceil(length.depth / tile.depth) * length.repeats
            one = _work(p, tile, access, target)
            for parts in _part_counts(p, across, ceil(blocks), target):
                work = one._replace(programs=across * parts, blocks=blocks / parts)
                time = seconds(target, work, flop_rate)
                if p.dtype == "f32" and precision == "bf16x6":
                    time *= SPLIT_TIMES[kernel]
                if parts > 1:
                    time += finish_seconds(target, p.size(p.wanted), parts, p.dtype)
                size = (tile.rows, tile.columns, tile.depth)
                found.append(Candidate(time, kernel, size, flat, parts, across * parts, tile.warps, tile.stages))
    return found


class _Access(NamedTuple):
    """How an operand of a matrix product is read, or its result written."""

    together: int  # elements of an instruction of one thread
    fetched: int  # bytes that come from the caches for an element
    instructions: float  # of one thread, for so many elements


# Instructions that it takes like, to load an element alone and to wait for it, in these cases.
NEIGHBOURS, PIXELS, STRIDED = 23.0, 44.0, 72.0


def _accesses(p: Problem, flat: bool) -> tuple[_Access, _Access, _Access]:
    """Those of the rows' operand, of the columns' operand, and of the result. Counted in machine code for Hopper."""
    if p.wanted == "w":
        rows, columns = _access(p, "y", 2, 5.0), _access(p, "x", 2, 5.0)
        if flat:  # each element has a pixel of its own
            columns = _Access(1, 32, 13.0)
        return rows, columns, _Access(4, 4, 4.0)
    given = "x" if p.wanted == "y" else "y"
    rows, columns = _access(p, given, 2, 17.0), _access(p, "w", 1 if p.wanted == "x" else 2, 6.0)
    if columns.together == 1:
        columns = max(columns, _access(p, "w", 2 if p.wanted == "x" else 1, 6.0))
    if flat:
        rows = _Access(1, min(rows.fetched, 32), 15.0)
    return rows, columns, _access(p, p.wanted, 2, 4.0)


def _access(p: Problem, role: str, axis: int, instructions: float) -> _Access:
    """How elements along an axis of channels are read: together, where they are neighbours."""
    of, item = strides(p, role), DTYPES[p.dtype_of(role)].size
    if of[axis] == 1:
        most = 16 // item
        counts = [stride for stride in of if stride != 1] + [p.shape(role)[axis]]
        together = gcd(most, *counts)
        return _Access(together, item, instructions if together * item >= 4 else PIXELS)
    # Neighbours in space are read by neighbouring threads, but those of weights are taps, of which one is wanted.
    if unit(of) == LAST and role != "w":
        return _Access(1, item, PIXELS if p.wanted == "w" else NEIGHBOURS)
    return _Access(1, 32, STRIDED)


def _work(p: Problem, tile: Tile, access: tuple[_Access, _Access, _Access], target: Target) -> Work:
    """What a program does with a tile, in each block of its sum and at its end."""
    rows, columns, result = access
    item = DTYPES[p.dtype].size
    elements = (tile.rows * tile.depth, tile.columns * tile.depth)
    loads = elements[0] * rows.fetched + elements[1] * columns.fetched
    counts = [n / a.together / 32 for n, a in zip(elements, (rows, columns), strict=True)]
    count = 45 * tile.warps + counts[0] * rows.instructions + counts[1] * columns.instructions
    if p.wanted == "w":
        # Pixels are found for each load of either operand; once, if both are loaded by threads in the same places.
        pixels = 7.0 if is_inside(p) else 22.0 if max(p.stride) == 1 else 28.0
        count += pixels * (counts[0] if counts[0] == counts[1] or columns.fetched == 32 else sum(counts))
    ends = tile.rows * tile.columns / 32 * (3 + result.instructions / result.together)
    threads = 32 * tile.warps
    held = tile.rows * tile.columns // threads + 56
    shared = tile.stages * sum(elements) * item
    many = beside(target, tile.warps, shared, min(255, held))
    # With fewer rows than a group of warps takes, tensor cores wait; with fewer columns, rows are read more often.
    flops = 2 * tile.rows * (tile.columns + 14) * tile.depth * (1 if tile.rows >= 64 else 2)
    return Work(0, 0, flops, loads, count, 400 * tile.warps + ends, many, p.bytes)


class _Length(NamedTuple):
    """The sizes of the matrix product of a problem: one of `times`, each a sum over `repeats` runs of `depth`."""

    rows: int
    columns: int
    depth: int
    repeats: float  # in the mean: phases have different taps
    times: int


def _length(p: Problem, flat: bool) -> _Length:
    taps = prod(p.w)
    if p.wanted == "w":
        pixels = p.n * prod(p.y)
        return _Length(p.cy, p.cx * taps, pixels, 1, p.g) if flat else _Length(p.cy, p.cx, pixels, 1, p.g * taps)
    summed, made = channels(p)
    over = walk(p)
    times = p.g * over.phases
    if flat:
        return _Length(over.pixels, made, max(1, ceil(taps / over.phases)) * summed, 1, times)
    return _Length(over.pixels, made, summed, taps / over.phases, times)


def _singles(p: Problem, target: Target) -> list[Candidate]:
    """Products one by one."""
    item, found = DTYPES[p.dtype].size, []
    taps = prod(p.w)
    if p.wanted == "w":
        kernel, lanes, rows, times = "lanes_weights", p.g * p.cy * p.cx, p.n * prod(p.y), taps
        pair = ("x", "y")
    else:
        (summed, made), over = channels(p), walk(p)
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
        steps = elements / 32 * (40.0 if kernel == "lanes_weights" else 25.0)
        work = Work(0, 0, 2 * elements, elements * item * tensors / share, steps, 1000.0 + elements / 4, 8, p.bytes)
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
