"""Numbers that tile registers cannot multiply as they are, split into pieces that they can.

f32 has 24 bits, three times those of bf16: of nine products of pieces, `bf16x6` takes the six largest, and `bf16x3`
the three largest. f16 has 11 bits, so that two pieces and all four products are exact. docs/numerics.md has the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..target import Target
from ..plan.bits import TILE_CHANNELS


@dataclass(frozen=True)
class Split:
    """What tiles multiply in place of each number of the tensors, and with what."""

    dtype: str  # of the pieces, or of the number itself
    pieces: int = 1  # 0 and 1 are both the largest, 0 alone has infinities and NaN
    products: tuple[tuple[int, int], ...] = ((0, 0),)  # of a piece on the left and one on the right, in order
    lost: float = 0.0  # the most that products left out and rounded pieces amount to, relative to a product

    @property
    def whole(self) -> bool:
        """Whether numbers are multiplied as they are."""
        return self.pieces == 1


# Each product but the first shares a piece with the one before, which is then in registers already.
SPLITS = {
    ("bf16x6", "f32"): Split("bf16", 4, ((3, 1), (2, 1), (2, 2), (1, 2), (1, 3), (0, 0)), 1.01 * 2.0**-24),
    ("bf16x3", "f32"): Split("bf16", 3, ((2, 1), (1, 2), (0, 0)), 1.01 * 2.0**-15),
    ("direct", "f16"): Split("bf16", 3, ((2, 1), (2, 2), (1, 2), (0, 0))),
}
"""By algorithm and type, where tiles do not multiply that type itself."""


def split(p: Problem, target: Target) -> Split | None:
    """How a problem's numbers are multiplied in tiles; None if they are not."""
    if p.algorithm == "direct" and target.tiles.multiply(p.dtype):
        return Split(p.dtype)
    found = SPLITS.get((p.algorithm, p.dtype))
    return found if found is not None and target.tiles.multiply(found.dtype) else None


def multiplied(dtype: str, how: Split) -> str:
    """What tiles multiply, in words."""
    if how.whole:
        return f"tile registers multiply {dtype} (AMX)"
    return f"{dtype} is split into {how.pieces - 1} pieces of {how.dtype}, of which tile registers (AMX) take " + (
        f"{len(how.products)} products"
    )
