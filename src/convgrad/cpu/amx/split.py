"""Numbers that tile registers cannot multiply as they are, split into pieces that they can.

f32 has 24 bits, three times those of bf16: of nine products of pieces, `bf16x6` takes the six largest, and `bf16x3`
the three largest. f16 has 11 bits, so that two pieces and all four products are exact. docs/numerics.md has the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..target import Target, tile_types
from .tiles import Products


@dataclass(frozen=True)
class Split:
    """What tiles multiply in place of each number of the tensors, and with what."""

    dtype: str  # of the pieces, or of the number itself
    pieces: int = 1
    products: Products = ((0, 0),)
    rounds: bool = False  # the last piece is rounded
    lost: float = 0.0  # the most that products left out and rounded pieces amount to, relative to a product

    @property
    def whole(self) -> bool:
        """Whether numbers are multiplied as they are."""
        return self.pieces == 1

    def error(self, terms: int, steps: int) -> float:
        """The bound of a sum of so many terms in so many steps, if that of direct sums is 1: see docs/numerics.md."""
        bound = self.lost / ROUNDOFF + MAGNIFIED * (WITHIN + len(self.products) * steps)
        return 1.0 if self.whole else max(1.0, bound / terms)


AHEAD = 4096  # bytes: so far ahead memory is prefetched while numbers are split, which takes some time
ROUNDOFF = 2.0**-24  # of f32
MAGNIFIED = 1.01  # the most that the magnitudes of the products of pieces amount to, relative to a product
WITHIN = 16  # roundings of a product before it is added to the sums: of fifteen others, and of even and odd ones

# Each product but the first shares a piece with the one before, which is then in registers already.
SPLITS = {
    ("bf16x6", "f32"): Split("bf16", 3, ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)), lost=1.01 * 2.0**-24),
    ("bf16x3", "f32"): Split("bf16", 2, ((1, 0), (0, 0), (0, 1)), rounds=True, lost=1.01 * 2.0**-15),
    ("direct", "f16"): Split("bf16", 2, ((1, 0), (1, 1), (0, 1), (0, 0))),
}
"""By algorithm and type, where tiles do not multiply that type itself."""


def wanted(p: Problem, target: Target) -> Split | None:
    """How a problem's numbers would be multiplied in tiles, if the system lets this process use them; None if not."""
    if p.algorithm == "direct" and p.dtype in target.tiles.dtypes:
        return Split(p.dtype)
    found = SPLITS.get((p.algorithm, p.dtype))
    if found is None or found.dtype not in target.tiles.dtypes:
        return None
    # Weights of f16 take about as long so as in f32 on one thread, and longer on several (Emerald Rapids).
    return None if p.algorithm == "direct" and p.wanted == "w" else found


def split(p: Problem, target: Target) -> Split | None:
    """How a problem's numbers are multiplied in tiles; None if they are not."""
    return None if target.tiles.refused else wanted(p, target)


def hindrance(p: Problem, target: Target) -> str:
    """Why tiles do not multiply the numbers of a problem by the algorithm that it asks for."""
    able = [dtype for algorithm, dtype in SPLITS if algorithm == p.algorithm]
    if p.dtype not in able:
        return f"{p.algorithm} is for {' and '.join(able)}, not for {p.dtype}"
    needs = f"{p.algorithm} needs tile registers (Intel's AMX)"
    if target.tiles.refused:
        return f"{needs}: {target.tiles.refused}"
    has = bool(tile_types(target.features))
    return f"{needs}, which {'CONVGRAD_TARGET leaves out' if has else 'this machine does not have'}"


def multiplied(dtype: str, how: Split) -> str:
    """What tiles multiply, in words."""
    if how.whole:
        return f"tile registers multiply {dtype} (AMX)"
    made = f"{dtype} is split into {how.pieces} pieces of {how.dtype}"
    return f"{made}, of which tile registers (AMX) take {len(how.products)} products"
