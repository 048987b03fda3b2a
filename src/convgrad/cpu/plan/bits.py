"""What decides bits: in which order the terms of a sum are added, and whether two are multiplied and added at a time.

Floating-point sums depend on their order. Ours follows from the problem and from the kind of vectors, never from the
number of threads, and never from a row of the table in tuning.py: that table may get a row for every CPU, and all
CPUs with the same vectors still give equal results, bit for bit. Constants that the order of a sum depends on are here.
Rules that use them are also in wgrad/roles.py, wgrad/cut.py (`cut_pixels` and what it calls), gather/plan.py, and
depthwise/: they have no numbers of their own, and depend on problem and target alone. To change a constant or such a
rule changes results in their last bits: CHANGELOG must say so.

A sum is ordered by
- `row_steps`: the vectors in a row of a tile. Chunks of channels and boxes of pixels are as large as the packed data of
  one block of channels allows, and a block is one row. `fitted` chooses vectors of half the width, with other blocks.
- Chunks (y, x): channels whose weights are summed in one go, before the next are.
- Boxes and slices (w): pixels that are summed in one go, and parts of the sum that are added in order.
- Folds and groups in lanes, which bring taps into another order, and pairs of bf16: see `fit_lane_groups`, `dots`.

Machines have other caches than these, but `Target.l1` and `Target.l2` are the same for all, since sums are cut by them.

Only one choice is left to costs that matters beyond speed: whether taps that meet nothing but padding are left out at a
border (`Tiling.split` in cost.py). Products with padding are zeros, so ordinary sums are the same; but they decide the
sign of a sum that is zero, and an infinite weight makes NaN of them.

Origins: "measured" constants were measured on Zen 4 and Zen 5 when they were written; the runs were not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from ..target import LINE, Target

TEAM = 4
"""The smallest number of threads that work is cut for. A sum has as many slices whatever the number of threads, so
that number does not change bits; borders are cut as for this team. Origin not recorded.
"""

THREAD_BYTES = 4 << 20
"""Bytes that a thread may keep of one thing, whatever the number of channels: sums between chunks, for example. A sum
over channels is not cut where its sums would be more. Origin not recorded.
"""

LEAST_ODD_PITCH = 4
"""Vectors: a pixel of a packed box that has as many or more has an odd number of them. Origin not recorded."""

# What is left to the reference, which adds in another order. Origins not recorded.

MOST_PHASES = 4096  # of the results: strides in the hundreds
BEYOND = 64 << 20  # bytes that a workspace may take beyond four times the largest tensor
PER_THREAD = 6 << 20  # and more for each thread

# y and x.

MOST_STEP = 4  # of so many contiguous pixels that are read, one is used at least: a row is copied. Not recorded
FOLDED_LANES = 2  # a fold is looked for if it has so many results or more in a vector. Origin not recorded
CHUNK_PART = 3  # the weights of a chunk and a block of channels out take one part in so many of Target.l2. Measured
WHOLE_PART = (3, 5)  # or this part, if all channels are then one chunk and products are quick. Measured
ODD_CHANNELS = 256  # an odd number of channels is taken in pairs up to here: the last one's is a zero. Not recorded
BOX_RESULTS = 4096  # of a box, at most: its tables and the output staging stay small. Origin not recorded
FOLD = 1.2  # results are folded if that saves so much. Origin not recorded
FOLDED_WEIGHT = 4  # to pack one of folded results takes as long as so many steps of a row. Measured on Zen 5
FOLDED_WEIGHTS = 16 << 20  # bytes of the weights of folded results, at most. Origin not recorded

# Tile registers (Intel's AMX): which layers they compute. On Emerald Rapids TILE_PIXELS of 256 and 1024, and TILE_PART
# of 64 and 256, were no faster on the whole; the others are as they were chosen, without a machine.

TILE_CHANNELS = 16  # in and out of a group, at least
TILE_STEPS = 3, 2  # steps over the channels are so many times those of whole tiles, at most
TILE_PART = 128  # channels of each side of a part of w, at most: its boxes are cut for as many
TILE_UNIT = 64  # channels of each side for which slices of w are counted
TILE_BOX = 2, 3  # part of Target.l2 that a box of w takes, at most
TILE_PIXELS = 512  # positions in such a box, about
TILE_SLICE_BYTES = 8 << 20  # of the sums of all slices

# w: which sides are read in place says how many pixels are in a box, and so does what is packed. Said to be
# measured, unless a line says that no origin is recorded.

POINTWISE_VECTORS = 4  # a 1x1 convolution is a sum over channels if its pixels fill so many. Not recorded
POINTWISE_FILLED = 0.95  # and if so much of their lanes is filled. Origin not recorded
PAIRS_FILLED = 0.99  # pixels are paired along a row, not across images, if pairs are so full. Origin not recorded
FEW_PIXELS = 4096  # of y in a 1x1 layer: with fewer, lanes are what is contiguous in w. Origin not recorded
ROW_CHANNELS = 256  # of a pixel in the second-level cache: more than that are not counted. Origin not recorded
SPREAD_CHANNELS = 4  # vectors: so many channels in the rows take room beside those in the lanes. Not recorded
FEW_TAPS = 4  # with no more, a line of the first-level cache serves few products. Origin not recorded
BROADCAST_PART = 7, 4  # pixels take so much more room if what is broadcast lies beside them. Origin not recorded
GROUP_LANES = 1, 2  # pixels take so much of their bytes if groups are in the lanes, on the side in the lanes,
GROUP_ROWS = 2, 1  # and on the side in the rows. Origin not recorded
GROUP_BLOCKS = 4  # blocks of groups in the lanes that a task takes, for whole cache lines. Origin not recorded
OVERLAP_CUTS = 8  # ways to cut a row that are tried. Origin not recorded
IN_PLACE_ROWS = 112  # for no more rows the side in the lanes is read in place
IN_PLACE_POINTWISE = 48  # rows, if pixels are in the lanes: vectors of them are far from each other
IN_PLACE_SPREAD = 200  # rows, if so, and pixels read in turn fall into all sets of the first-level cache
IN_PLACE_SHORT = 12  # rows, if so, and vectors are shorter than a cache line
SPREAD_LINES = 4  # pixels do if the steps between their sets are of no more lines than that. Origin not recorded
KEPT_LINES = 46  # a box whose lines stay in the first-level cache has fewer pixels, if each serves few products
COPY = 0.5  # steps in which an element is packed
SLICE_BYTES = 5 << 18  # of the sums of all slices, if four of them fit
# If each pixel of x is packed more than 2.5 times, a box is taken in which it is packed less than 0.6 times as often.
OVERLAP, LESS_OVERLAP = 2.5, 0.6
SHORTEST_ROW = 64  # pixels: rows are not cut shorter than this to reduce that overlap
OVERLAP_BOX = 2  # and the box has up to so many times as many pixels
WHOLE_LINES = 2  # a row is cut into whole cache lines if its pieces have so many. Origin not recorded
LEAST_BOX = 16  # pixels of a box. Origin not recorded, as of the next two
SLICED_BOXES = 16  # a sum over fewer boxes is not cut into slices; a slice has four boxes at least
MOST_SLICES = 16  # for all units of the result together; if there are as many units, none is cut


def spread_bytes(taps: int) -> int:
    """Bytes that a pixel takes of what is spread beside it: lines that serve two pixels. With one tap these are used
    once, and nothing should wait for them. Origin not recorded.
    """
    return LINE if taps == 1 else LINE // 2


def half_line(item: int) -> int:
    """Channels that fill half a cache line: groups of so many are packed, because the other half is not theirs."""
    return LINE // (2 * item)


def box_bytes(target: Target) -> tuple[int, int]:
    """Bytes of a box of pixels: of the side in the lanes, and of the side in the rows. Origin not recorded."""
    return target.l1 * 7 // 8, target.l2 * 4 // 5


def sum_bytes(target: Target) -> int:
    """Bytes of sums that stay in the second-level cache beside a box. Origin not recorded."""
    return target.l2 // 3


def most_packed_stride(target: Target) -> int:
    """Of so many pixels one may be taken by the shuffles that pack a row; with few registers, masks may be branches."""
    return 8 if target.registers >= 32 else 2


# Depthwise layers, whose channels are each on their own: the slices of w, and which kernel serves a layer. Another one
# takes taps in another order. See depthwise/choose.py. Origins not recorded.

DEPTHWISE_SLICE_BYTES = 2 << 20  # of the sums of all slices of w, if the fewest slices fit
DEPTHWISE_SLICES = 4, 32  # the fewest and the most, if there are rows enough
CHANNELS_MOST_PHASES = 8  # of x: each phase has code of its own
CHANNELS_MOST_TAPS = 50  # they are written out one by one
PIXELS_MOST_TAPS = 128
PIXELS_MOST_KERNEL_ROWS = 9  # the weights of a column of the kernel are in registers
PIXELS_LEAST_FILLED = 2  # pixels fill one part in so many of the lanes
PIXELS_IMAGE_PART = 2  # a packed image takes one part in so many of Target.l2
PIXELS_MOST_VECTORS = 4  # of a row of the tile, which rounds up the packed image
SLICE_TILE_ROWS = 2  # rows of tiles in a slice of w, at least


def depthwise_tile(target: Target) -> tuple[int, int]:
    """Rows of a tile whose lanes are channels, and pixels in a row: the products of w are added tile by tile.

    Origin not recorded.
    """
    return (2, 4) if target.registers >= 32 else (1, 4)


@dataclass(frozen=True)
class BlockWidths:
    """How many vectors a row of a tile may have, and what a step costs then, in vectors.

    All sums of a tile, one vector of weights for each column and one broadcast must fit in the registers. More vectors
    in a row are better, since each value that is broadcast then serves more products. The last block of channels may
    have fewer than the others.
    """

    cost: dict[int, float]
    last: dict[int, float]  # of the last block, if the others are wider
    alone: float  # if one vector is all there is


# Measured; which runs is not recorded.
WHOLE = BlockWidths({1: 1.25, 2: 2.1, 3: 3.03, 4: 4.0}, {1: 1.25, 2: 2.1, 3: 3.03}, 1.05)
SIXTEEN_REGISTERS = BlockWidths({1: 1.25, 2: 2.1}, {1: 1.25}, 1.25)
HALF_WIDTH = BlockWidths(
    {1: 1.6, 2: 2.4, 3: 3.05, 4: 4.0, 5: 5.0, 6: 6.05, 7: 7.1},
    {1: 1.8, 2: 2.3, 3: 3.05, 4: 4.0, 5: 5.05, 6: 6.1},
    1.4,
)

HALF_COST, HALF_COST_PAIRS, HALF_COST_DEPTHWISE = 1.05, 1.1, 1.25
"""What two steps of half the width cost beside one of the whole, on machines that may halve vectors. Measured on
Zen 4, runs not kept.
"""


def block_widths(target: Target) -> BlockWidths:
    """The widths of tiles to choose from; a target that has a tile of its own may have all up to that."""
    if target.tile:
        every = {v: float(v) for v in range(1, target.tile[1] + 1)}
        return BlockWidths(every, every, 1.0)
    return SIXTEEN_REGISTERS if target.registers < 32 else HALF_WIDTH if target.half_width else WHOLE


def most_vectors(target: Target) -> int:
    """Vectors that a row of a tile may have."""
    return max(block_widths(target).cost)


def row_steps(target: Target, lanes: int, channels: int, *, one_block: bool = False) -> tuple[float, int]:
    """The steps that a row of the tile takes for so many channels, and how many vectors go in one.

    `one_block` wants all channels in one block; where no tile is so wide, that takes steps without end.
    """
    needed, known = ceil(channels / lanes), block_widths(target)
    if needed == 1:
        return known.alone, 1

    def steps(vectors: int) -> float:
        return needed // vectors * known.cost[vectors] + known.last.get(needed % vectors, 0.0)

    fitting = [v for v in known.cost if v == needed or (v < needed and not one_block)]
    cost, vectors = min(((steps(v), -v) for v in fitting), default=(inf, 0))
    return cost, -vectors


def vector_widths(target: Target, price: float) -> list[tuple[Target, float]]:
    """The target, and the same with vectors of half the width if it may halve them, each with what a step costs.

    `price` is what two steps of half the width cost beside one.
    """
    halved = [(target.at_half_width(), price / 2)] if target.may_halve_width else []
    return [(target, 1.0), *halved]


def fitted(target: Target, cost: Callable[[Target, float], float], price: float) -> Target:
    """The target, or the same with vectors of half the width if the work costs less in all.

    `cost` says what it costs, given a target and what a step does.
    """
    return min(vector_widths(target, price), key=lambda width: cost(*width))[0]


def fit_lane_groups(target: Target, lanes: int, groups: int, inputs: int, outputs: int, pairs: bool) -> bool:
    """Whether groups have so few channels that several share a vector, each lane picking the inputs of its own.

    One that fills a vector of half the width has it to itself, or half of a whole one if products of bf16 can then be
    taken in pairs.
    """
    alone = (target.may_halve_width or pairs) and 2 * outputs == lanes
    return groups > 1 and inputs <= outputs < lanes and lanes % outputs == 0 and not alone


def lane_group_steps(lanes: int, channels: int, outputs: int) -> float:
    """The vectors that groups of so many channels side by side take: without end where they do not fit."""
    return ceil(channels / lanes) if lanes % outputs == 0 else inf


SLOW_DOTS = ("cooperlake", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")
"""LLVM's names of CPUs whose products of pairs of bf16 are slower than those of f32. On Emerald Rapids the former gave
89 to 130 GFLOP/s on a core, the latter 97 to 178; the others are assumed to be like it.
"""


def dots(target: Target) -> bool:
    """Whether the machine multiplies and adds pairs of bf16, with a rounding of its own, and gains by it."""
    able = target.width in (32, 64) and "+avx512bf16" in target.features.split(",")
    return able and target.cpu not in SLOW_DOTS
