"""What the machine asks of a plan: the shape of a tile, instructions that are there, results beyond the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd, inf, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..target import Target

NARROW, NARROW_PAIRS, NARROW_SLIDE = 1.05, 1.1, 1.25  # what two steps of half the width cost beside one
TEAM = 4  # work is cut for so many threads at least
WAY = 4096  # bytes: lines that lie so far apart share a set of the first-level cache
SUMS_ALONE = 16  # rows of a tile that sums pixels, if one vector is all there is and two are multiplied at a time
ROOM = 4 << 20  # bytes that a thread may keep of one thing, whatever the number of channels


@dataclass(frozen=True)
class Tiles:
    """Register tiles, by the vectors in a row.

    The accumulators, one vector of weights per column and one broadcast must fit in the registers. More vectors are
    better, since each value that is broadcast then serves more products; the last block of channels may have fewer.
    """

    rows: dict[int, int]  # at most
    cost: dict[int, float]  # of a step, in vectors
    last: dict[int, float]  # of a step of the last block, if the others are wider
    alone: float  # of a step if one vector is all there is


WHOLE = Tiles({1: 8, 2: 8, 3: 8, 4: 6}, {1: 1.25, 2: 2.1, 3: 3.03, 4: 4.0}, {1: 1.25, 2: 2.1, 3: 3.03}, 1.05)
FEW = Tiles({1: 8, 2: 6}, {1: 1.25, 2: 2.1}, {1: 1.25}, 1.25)  # with 16 registers
HALF = Tiles(
    {1: 8, 2: 8, 3: 8, 4: 6, 5: 5, 6: 4, 7: 3},
    {1: 1.6, 2: 2.4, 3: 3.05, 4: 4.0, 5: 5.0, 6: 6.05, 7: 7.1},
    {1: 1.8, 2: 2.3, 3: 3.05, 4: 4.0, 5: 5.05, 6: 6.1},
    1.4,
)


def tiles(target: Target) -> Tiles:
    """The tiles to choose from."""
    if target.tile:
        rows, vectors = target.tile
        every = {v: float(v) for v in range(1, vectors + 1)}
        return Tiles(dict.fromkeys(every, rows), every, every, 1.0)
    return FEW if target.registers < 32 else HALF if target.half_width else WHOLE


def tile(target: Target, lanes: int, channels: int, *, together: bool = False) -> tuple[int, int]:
    """(rows, vectors) of the register tile for so many channels in the lanes, all in one block if `together`."""
    if target.tile:
        return target.tile
    _, vectors = row_steps(target, lanes, channels, together=together)
    return tiles(target).rows[vectors], vectors


def sums_tile(target: Target, lanes: int, channels: int) -> tuple[int, int]:
    """(rows, vectors) of the register tile of sums over pixels, whose rows are channels: one address serves many."""
    rows, vectors = tile(target, lanes, channels)
    return (SUMS_ALONE if vectors == 1 and target.two_per_cycle and not target.tile else rows), vectors


def row_steps(target: Target, lanes: int, channels: int, *, together: bool = False) -> tuple[float, int]:
    """The steps that a row of the tile takes for so many channels, and how many vectors go in one.

    `together` wants all channels in one block; where there is no such tile, that takes steps without end.
    """
    needed, known = ceil(channels / lanes), tiles(target)
    if needed == 1:
        return known.alone, 1

    def steps(vectors: int) -> float:
        return needed // vectors * known.cost[vectors] + known.last.get(needed % vectors, 0.0)

    fitting = [v for v in known.cost if v == needed or (v < needed and not together)]
    cost, vectors = min(((steps(v), -v) for v in fitting), default=(inf, 0))
    return cost, -vectors


def shares(target: Target, lanes: int, groups: int, inputs: int, outputs: int, pairs: bool) -> bool:
    """Whether groups have so few channels that several share a vector, each lane picking the inputs of its own.

    One that fills a vector of half the width has it to itself, or half of a whole one if products of bf16 can then be
    taken in pairs.
    """
    alone = (target.may_halve_width or pairs) and 2 * outputs == lanes
    return groups > 1 and inputs <= outputs < lanes and lanes % outputs == 0 and not alone


def shared_steps(lanes: int, channels: int, outputs: int) -> float:
    """The vectors that groups of so many channels side by side take: without end where they do not fit."""
    return ceil(channels / lanes) if lanes % outputs == 0 else inf


def widths(target: Target, price: float) -> list[tuple[Target, float]]:
    """The target, and the same with vectors of half the width if it has them, each with what a step costs.

    `price` is what two steps of half the width cost beside one.
    """
    narrow = [(target.at_half_width(), price / 2)] if target.may_halve_width else []
    return [(target, 1.0), *narrow]


def fitted(target: Target, cost: Callable[[Target, float], float], price: float) -> Target:
    """The target, or the same with vectors of half the width if the work costs less in all.

    `cost` is asked what it costs, given a target and what a step does.
    """
    return min(widths(target, price), key=lambda width: cost(*width))[0]


def narrow_text(lanes: int, channels: int) -> str:
    """Why vectors of half the width are used."""
    return f"vectors of {lanes}: {channels} channels fill them better than longer ones"


def most_vectors(target: Target) -> int:
    """Vectors that a tile may have in a row."""
    return max(tiles(target).cost)


def shorter(target: Target, rows: int, vectors: int, height: int) -> float:
    """What a tile of fewer rows than there might be costs: each vector of columns that is loaded serves fewer products.

    With 32 registers and more than two vectors, four rows are as good as more. Eight vectors of half the width are
    computed at a time: fewer take as long.
    """
    if target.registers < 32:
        return 1 + 0.03 * (rows - height)
    if target.half_width and vectors == 1:
        return rows / height if height else 1.0
    return 1.0 if vectors > 2 and height >= min(4, rows) else 1 + 0.005 * (rows - height)


def even(target: Target, vectors: int, apart: int) -> dict[int, float]:
    """Rows of tiles whose pixels are evenly spaced, so that one address serves them all, with what they cost.

    Single vectors, where two are multiplied at a time, gain by it and by more rows; not if a stride spreads the results
    (`apart` is how many bytes, 0 without a stride) so that those of a tile share a few sets of the first-level cache.
    """
    alone = (target.half_width or target.two_per_cycle) and vectors == 1 and not target.tile
    spread = apart == 0 or gcd(apart, WAY) < WAY // 2
    return {rows: rows * (1.075 - 0.0115 * rows) for rows in range(7, 15)} if alone and spread else {}


def dots(target: Target) -> bool:
    """Whether the machine multiplies and adds pairs of bf16."""
    return target.width in (32, 64) and "+avx512bf16" in target.features.split(",")


def converts_f16(target: Target) -> bool:
    """Whether the machine converts f16."""
    return target.name in ("avx512", "avx2", "neon")


def streams(p: Problem, target: Target) -> bool:
    """Whether results are written past the caches: there are more of them than these can keep for who reads them."""
    able = target.triple.startswith(("x86_64", "amd64")) and target.width in (16, 32, 64)
    return able and not p.accumulate and 2 * DTYPES[p.out_dtype].size * prod(p.shape(p.wanted)) > target.l3
