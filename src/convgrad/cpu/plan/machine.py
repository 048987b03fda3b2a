"""What the machine asks of a plan: the shape of a tile, instructions that are there, results beyond the caches."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..target import Target

NARROW = {False: 1.05, True: 1.1}  # what two steps of half the width cost beside one, if not or if in pairs of bf16
TEAM = 4  # work is cut for so many threads at least
ROOM = 4 << 20  # bytes that a thread may keep of one thing, whatever the number of channels


def tile(target: Target, lanes: int, channels: int) -> tuple[int, int]:
    """(rows, vectors) of the register tile for so many channels in the lanes.

    The accumulators, one vector of weights per column and one broadcast must fit in the registers.
    """
    if target.tile:
        return target.tile
    _, vectors = row_steps(target, lanes, channels)
    by_vectors = {4: 6, 3: 8, 2: 8, 1: 8} if target.registers >= 32 else {2: 6, 1: 8}
    return by_vectors[vectors], vectors


def row_steps(target: Target, lanes: int, channels: int) -> tuple[float, int]:
    """The steps that a row of the tile takes for so many channels, and how many vectors go in one.

    More are better, since each value that is broadcast then serves more products; the last block may have fewer.
    """
    needed = ceil(channels / lanes)
    cost = {0: 0.0, 1: 1.25, 2: 2.1, 3: 3.03, 4: 4.0}  # of a step with so many
    sizes = range(min(most_vectors(target), needed), 0, -1)
    return min(((needed // v * cost[v] + cost[needed % v], v) for v in sizes), key=lambda found: found[0])


def widths(target: Target, price: float) -> list[tuple[Target, float]]:
    """The target, and the same with vectors of half the width if it has them, each with what a step costs.

    `price` is what two steps of half the width cost beside one.
    """
    narrow = [(target.halved(), price / 2)] if target.halves and not target.tile else []
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
    return 4 if target.registers >= 32 else 2


def shorter(target: Target, rows: int, vectors: int, height: int) -> float:
    """What a tile of fewer rows than there might be costs: each vector of columns that is loaded serves fewer products.

    With 32 registers and three or four vectors, four rows are as good as more.
    """
    if target.registers < 32:
        return 1 + 0.03 * (rows - height)
    return 1.0 if vectors > 2 and height >= 4 else 1 + 0.005 * (rows - height)


def dots(target: Target) -> bool:
    """Whether the machine multiplies and adds pairs of bf16."""
    return target.width in (32, 64) and "+avx512bf16" in target.features.split(",")


def half(target: Target) -> bool:
    """Whether the machine converts f16."""
    return target.name in ("avx512", "avx2", "neon")


def streams(p: Problem, target: Target) -> bool:
    """Whether results are written past the caches: there are more of them than these can keep for who reads them."""
    able = target.triple.startswith(("x86_64", "amd64")) and target.width in (16, 32, 64)
    return able and not p.accumulate and 2 * DTYPES[p.out_dtype].size * prod(p.shape(p.wanted)) > target.l3
