"""What a plan for w takes on tile registers, in cycles. Of the ways to lay out x and y, the cheapest one is taken.

Whichever it is, a weight sums the same products in the same order.
"""

from __future__ import annotations

from math import ceil, prod

from ..pack.unpack import Unpacker
from ..plan.tuning import SideCosts
from .records import Box, SumParts, TileSums
from .tiles import COLUMNS, STEP, Block, loads

# Cycles in which a line of memory is packed, in units of `SideCosts.line`. By these, four of 28 layers on an Emerald
# Rapids took the slower way, by 2 to 13%.
COPIED, TRANSPOSED, PAIRED = 1, 3, 1


def cost(plan: TileSums, tuned: SideCosts) -> float:
    """Cycles of all threads, but for what no way to lay out x and y changes."""
    parts = plan.units * plan.box.number * packed_lines(plan) + plan.units * written_lines(plan)
    return plan.work + waiting(plan, tuned) + tuned.line * parts


def steps(box: Box) -> int:
    """Steps of all boxes, for one tap and one block of tiles."""
    return box.number * prod(box.sizes[: box.flat]) * box.long_row // STEP


def blocks(parts: SumParts, block: Block) -> int:
    """Blocks of tiles in all parts of a group."""
    return ceil(parts.rows / block.height) * parts.row_parts * ceil(parts.columns / block.width) * parts.column_parts


def waiting(plan: TileSums, tuned: SideCosts) -> float:
    """Cycles in which products wait for rows that cross lines."""
    left, _ = loads(plan.tiles, plan.split.products)
    groups = plan.sides.groups
    return groups * steps(plan.box) * torn_taps(plan.box) * blocks(plan.parts, plan.tiles) * left * tuned.torn


def torn_taps(box: Box) -> int:
    """Taps that read rows which cross lines; those of few long rows may begin with lines in some of these."""
    if box.x_paired:
        return 0
    between = [prod(a.pack.count for a in box.axes[i + 1 :]) for i in range(box.flat) if box.sizes[i] > 1]
    if any(entries % STEP for entries in between):
        return len(box.entries)
    return sum(entry % STEP != 0 for entry in box.entries)


def packed_lines(plan: TileSums) -> float:
    """Lines that are packed for a box and a part, those that are transposed or paired counted several times."""
    box, (rows, columns) = plan.box, (plan.parts.rows / STEP, plan.parts.columns / STEP)
    entries, positions = len(box.runs) * box.run_entries, prod(box.sizes)
    to_rows = COPIED if box.row_packed else TRANSPOSED
    if box.x_paired:
        transposed = 0 if plan.sides.column_channel[1] == 1 else TRANSPOSED
        return entries * columns * (transposed + PAIRED * 2 / box.pair_step) + positions * rows * to_rows
    transposed = 0 if box.y_pack is None else TRANSPOSED
    return entries * rows * to_rows + positions * columns * (transposed + PAIRED)


def written_lines(plan: TileSums) -> float:
    """Vectors of results of a part that are written, those of squares and single elements counted several times."""
    parts, staging, taps = plan.parts, plan.staging, len(plan.weights)
    if staging.unpacker is Unpacker.CHANNELS:
        return taps * parts.rows * ceil(parts.columns / COLUMNS)
    if staging.unpacker is Unpacker.ELEMENTS:
        return 2 * taps * parts.rows * parts.columns
    together = taps * COLUMNS if staging.one_row else staging.extents[-1]
    return 2 * taps * parts.rows * parts.columns / together * ceil(together / COLUMNS)
