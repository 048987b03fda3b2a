"""What decides speed: a table with a row for each kind of machine.

`tuning(target)` is the row of a machine. Planners read numbers from it and have none of their own. To tune a new CPU,
add a row to KINDS and let `kind` find it. Finite results stay the same, bit for bit, but for the sign of
a zero: where borders are cut decides that, and what an infinite weight makes there. See bits.py.

Costs are counted in steps: a vector times one channel, added to a sum. While boxes are chosen, a pair of channels is
two steps; of a plan that is made, it is one.

Origins: what is called measured was measured on Zen 4 and Zen 5 when it was written, and unless a commit has figures,
the runs were not kept. Nothing was measured on AVX2, NEON or baseline machines of their own: AVX2 code was timed on
machines with AVX-512, and the others take over what is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..target import LINE, Target
from .bits import row_steps

CACHE_WAY = 4096  # bytes: lines of memory that are so far apart share a set of the first-level cache


@dataclass(frozen=True)
class TileTuning:
    """How high tiles are, and what one takes that is not filled.

    The rows are pixels, or channels where sums are over pixels. More rows let each vector of weights that is loaded
    serve more products. The sums of a tile must fit in the registers beside a row of weights and one broadcast.
    """

    most_rows: dict[int, int]  # by the vectors in a row. Measured
    sum_rows: int = 8  # of a tile that sums over pixels with one vector in a row
    group_rows: int = 4  # of pixels where groups share lanes: the weights of all of a group's inputs are in registers
    group_sums: int = 14  # vectors of sums over pixels where groups share lanes
    row_price: float = 0.005  # what a step takes longer for each row that is missing. Measured
    enough_rows: int = 4  # if more than two vectors are in a row, a tile so high is as good as any. Measured
    whole_only: bool = False  # tiles of one vector take as long with fewer rows: eight are computed at a time
    least_rows: int = 3  # a tile of fewer takes as long, presumably waiting for weights. Measured
    flat_rows: int = 4  # a tile of more takes longer for each one more. Measured
    high_price: float = 0.003  # so much longer
    evenly_spaced: float = 0.997  # what a tile takes whose pixels are evenly spaced: one address serves them all
    uneven: float = 1.4  # steps for each row of a tile in `even_steps`, if its pixels are not evenly spaced
    even_steps: dict[int, float] = field(default_factory=dict)  # steps of higher tiles with evenly spaced pixels
    fixed: bool = False  # the target has a tile of its own: its height is taken as it is


# Steps of tiles with one vector in a row, where a tile of eight rows leaves multipliers idle: more rows keep them busy,
# if one address serves all pixels. Fitted to what Zen 5 gained: groups of 8 12 to 30% and short sums 1 to 5% (commit
# e1a392c), 16 channels 8 to 48% (50532cf).
HIGHER = {rows: rows * (1.075 - 0.0115 * rows) for rows in range(7, 15)}


@dataclass(frozen=True)
class BoxCosts:
    """What a box of pixels takes beside its products, in steps. All fitted to measured layers, runs not kept."""

    begin: int = 16  # products that a tile takes longer for each run of pixels
    pack: int = 3  # a vector of inputs that is packed, if channels are contiguous
    pack_transposed: int = 7  # the same if they are strided
    run: int = 120  # a run of results, if channels are strided
    torn_run: int = 300  # the same if another thread writes to its first or last line of memory
    task: int = 500  # a task: its pixels are listed
    waiting: float = 0.7  # of the time that threads wait, the share that is lost: presumably one of them is slower
    roomy: float = 0.6  # beyond this share of the second-level cache a box takes longer
    crowded: float = 0.05  # so much longer for all of that cache


@dataclass(frozen=True)
class BoxSearch:
    """Which boxes are looked at, so that planning takes milliseconds. Found by trying, figures not recorded."""

    smallest: int = 8  # boxes that are more than so many times smaller than the largest are not looked at
    looked_at: int = 32  # so many at most: those that overlap least, large ones first
    looked_at_by_many: int = 16  # the same by a team of more than 16 threads
    overlap: float = 0.1  # the share of the time in which inputs are packed, as far as it decides what is looked at
    shortest_row: int = 64  # positions of a row that is cut although it fits, if there are boxes enough
    enough_tasks: int = 2  # for a thread, if boxes then hold `least_tiles`
    least_tiles: int = 2
    many_tasks: int = 32  # for a thread: of more none is lost by waiting
    border_pieces: int = 1000  # borders of large kernels are not kept apart in more pieces than this


@dataclass(frozen=True)
class WeightTuning:
    """Who packs the weights of y and x."""

    copied: int = 640 << 10  # bytes that each thread packs for itself: Zen 5, +3.0% (6889dcf),
    pixels: int = 200  # if it has so many pixels,
    pixels_of_many: int = 2500  # or in a larger team so many: packing may take as long as some hundred of them
    task: int = 2048  # bytes that might be packed while a task of packing begins
    many: int = 8  # tasks for a thread: if they are more it does not matter that the last ones are not for all
    most_parts: int = 32  # of the steps of a panel
    shared: float = 1.25  # of the second-level cache: no more weights are shared by all threads. Zen 5, +0.5%


@dataclass(frozen=True)
class GatherTuning:
    """y and x."""

    weights: WeightTuning = WeightTuning()
    second_tile: float = 0.005  # a second tile takes time to compile: it must save this share. Origin not recorded
    interleaved: int = 4  # channels that are strided are interleaved, if so few; squares of more are transposed
    unrolled: int = (
        64  # channels (or pairs) times rows: so few products of one vector are written without a loop. Not recorded
    )
    task_bytes: int = 4 * LINE  # of input or of results of a pixel: so many groups are in a task
    tasks: int = 2  # for a thread
    cheap_tasks: int = 8  # for a thread, if it costs little to pack a box again
    cheap_steps: int = 16  # which it does if each input is used in so many steps
    packed_part: int = 3  # a box's input takes one part in so many of Target.l2,
    staged_part: int = 2  # or one in so many with the output staging beside it. Origins not recorded
    narrow_last: int = 4  # times `second_tile`, if the last block is narrower: it is two more functions then
    block_waiting: float = 0.05  # of the time: if threads wait no longer, each may take a block of channels for itself


@dataclass(frozen=True)
class LargeTeam:
    """How a large team shares the sums over pixels: such that the last task ends soonest."""

    threads: int = 16  # so many or more
    least_rows: int = 3  # of a task
    line: int = 20  # steps in which a line of the rows is read: it does not wait in a cache. Emerald Rapids
    read: float = 0.5  # of what copying the lanes takes: reading them in place
    few_products: int = 16  # of each element of the lanes in a task: then they are read in place. Zen 5, up to 23%
    task: int = 500  # steps in which a task begins


@dataclass(frozen=True)
class WgradTuning:
    """w, and 1x1 convolutions as sums over channels."""

    large: LargeTeam = LargeTeam()
    copy: float = 0.5  # steps in which an element is packed, where tasks are cut; bits.COPY chooses vectors by it
    least_sums: int = 6  # vectors of sums in a tile, so that products need not wait for each other
    better: float = 1.02  # tasks of another shape must take so much less time. Origin not recorded
    prefetched_results: int = 1 << 16  # bytes of a tile that is written: so many are prefetched. Origin not recorded
    least_height: int = 8  # rows of tiles that are looked at,
    shorter_by: int = 3  # or so many fewer than there might be
    part_tiles: int = 4  # the rows of a task are cut no lower than so many tiles,
    least_part_tiles: int = 2  # or so many, where there are no more tasks than threads. Origins not recorded
    uneven_tasks: int = 2  # for a thread, if tasks are of unequal size. Origin not recorded
    most_cuts: int = 16  # into so many parts rows and lanes may be cut otherwise. Origin not recorded
    pointwise_part: int = 4  # packed lanes that are pixels take one part in so many of Target.l2. Origin not recorded
    many_tasks: int = 8  # for a thread: if they are more it does not matter that the last ones are not for all


@dataclass(frozen=True)
class DepthwiseTuning:
    """Layers whose channels are each on their own."""

    tile_vectors: int = 16  # of sums, where pixels are in the lanes. Origin not recorded
    most_rows: int = 8  # the same: rows of a tile
    tasks: int = 16  # for a thread


@dataclass(frozen=True)
class SideCosts:
    """What x and y of w cost on tile registers, in cycles: which of them is in pairs follows from it."""

    # That a step takes longer for each tile on the left whose rows cross lines: 10 to 20 on an Emerald Rapids.
    torn: int = 16
    line: int = 4  # in which a line is packed; see sums_cost.py
    # Pairs of x lie together for a block of tiles, so that a step reads few pages: 0 to 3% quicker with channels first.
    by_blocks: bool = True


@dataclass(frozen=True)
class RegisterTuning:
    """Tile registers, in cycles, from Intel's documents; an Emerald Rapids took 16 for a product, too.

    There, a step of 2x2 tiles took 65 to 70 with its factors in the first-level cache, 70 to 72 with one of them in the
    second-level one and 92 with both, and 1x4 tiles 95 with their weights there. A tile of w whose rows cross lines
    took 50 to load. Boxes of an eighth to all of that cache, and 2 to 6 tasks for a thread, made no difference beyond
    its noise.
    """

    multiply: int = 16  # from one product of tiles to the next
    latency: int = 52  # until the sums of one can be added to
    load: int = 8  # of a tile, from the first-level cache; a quarter of it is assumed to be in the way of products
    box: float = 0.5  # part of the second-level cache that a box of y or x takes
    split_box: float = 0.25  # the same of numbers that are split, if all of their weights have room in that cache, too
    tasks: int = 3  # for a thread
    least_pixels: int = 128  # a box is not cut for threads if it has fewer
    panels: float = 0.5  # part of that cache that the weights of blocks take which are computed side by side
    fetches_input: bool = True  # of the next box, while one is computed
    fetches_results: bool = True  # the memory of a tile's results, while the one before is written
    far: int = 20  # to load a tile from the second-level cache
    near: int = 44 << 10  # bytes of weights that mostly stay in the first-level cache: 41 KiB did, by 1x3 tiles
    sums: float = 0.5  # part of the second-level cache that the sums of a part of w take
    fetches_step: bool = True  # what the next step of w loads: 1 to 1.2 times as fast; y and x were slower with it
    sides: SideCosts = SideCosts()


@dataclass(frozen=True)
class Speed:
    """How fast a machine of this kind is. Only estimates depend on it, and no plan: see estimate.py."""

    steps: float  # of one thread, in a second
    memory: float = 3e10  # bytes in a second, of all threads, if the tensors are larger than the last-level cache
    cache: float = 6e10  # the same if they are not
    begin: float = 6e-6  # seconds that a call takes before and after its work
    loading: float = 2.2  # steps that a step takes if each loads an operand of its own, as in depthwise layers


@dataclass(frozen=True)
class Tuning:
    """The row of a kind of machine. What is prefetched follows from the boxes: see prefetch.py."""

    tiles: TileTuning
    speed: Speed
    boxes: BoxCosts = BoxCosts()
    search: BoxSearch = BoxSearch()
    gather: GatherTuning = GatherTuning()
    wgrad: WgradTuning = WgradTuning()
    depthwise: DepthwiseTuning = DepthwiseTuning()
    registers: RegisterTuning = RegisterTuning()


THIRTY_TWO = {1: 8, 2: 8, 3: 8, 4: 6}  # rows of tiles, with so many registers
SIXTEEN = TileTuning({1: 8, 2: 6}, group_sums=9, row_price=0.03, enough_rows=16)

# Fitted on a Zen 5 of some 4.4 GHz by benchmarks/estimates.py; the others follow from the vectors in a cycle.
TWO_PER_CYCLE, ONE_PER_CYCLE = Speed(8.2e9), Speed(4.1e9)

KINDS = {
    # AVX-512, two vectors in each cycle: AMD Zen 5, Intel servers.
    "two per cycle": Tuning(TileTuning(THIRTY_TWO, sum_rows=16, even_steps=HIGHER), TWO_PER_CYCLE),
    # AVX-512 in two steps of 32 bytes: AMD Zen 4, with whole vectors and with vectors of half the width.
    "double pumped": Tuning(TileTuning(THIRTY_TWO), ONE_PER_CYCLE),
    "half width": Tuning(
        TileTuning({**THIRTY_TWO, 5: 5, 6: 4, 7: 3}, whole_only=True, even_steps=HIGHER), TWO_PER_CYCLE
    ),
    "avx2": Tuning(SIXTEEN, TWO_PER_CYCLE, depthwise=DepthwiseTuning(8)),
    "neon": Tuning(TileTuning(THIRTY_TWO), TWO_PER_CYCLE),
    "baseline": Tuning(SIXTEEN, ONE_PER_CYCLE, depthwise=DepthwiseTuning(8)),
}


def kind(target: Target) -> str:
    """The kind of a machine: its row in the table."""
    if target.registers < 32:
        return "avx2" if target.width == 32 else "baseline"
    if target.half_width:
        return "half width"
    if target.two_per_cycle:
        return "two per cycle"
    return "double pumped" if target.double_pumped else "neon"


@lru_cache(maxsize=64)
def tuning(target: Target) -> Tuning:
    """The row of a machine. One that has a tile of its own takes that, whatever the vectors in a row."""
    row = KINDS[kind(target)]
    if target.tile is None:
        return row
    rows, vectors = target.tile
    most_rows = dict.fromkeys(range(1, vectors + 1), rows)
    return replace(row, tiles=replace(row.tiles, most_rows=most_rows, sum_rows=rows, even_steps={}, fixed=True))


def tile(target: Target, lanes: int, channels: int, *, one_block: bool = False) -> tuple[int, int]:
    """(rows, vectors) of the register tile for so many channels in the lanes, all in one block if `one_block`."""
    if target.tile:
        return target.tile
    _, vectors = row_steps(target, lanes, channels, one_block=one_block)
    return tuning(target).tiles.most_rows[vectors], vectors


def sums_tile(target: Target, lanes: int, channels: int) -> tuple[int, int]:
    """(rows, vectors) of the register tile of sums over pixels, whose rows are channels: one address serves many."""
    rows, vectors = tile(target, lanes, channels)
    return (tuning(target).tiles.sum_rows if vectors == 1 else rows), vectors


def shorter(tiles: TileTuning, rows: int, vectors: int, height: int) -> float:
    """What a step takes in a tile with fewer rows than possible."""
    if tiles.whole_only and vectors == 1:
        return rows / height if height else 1.0
    if vectors > 2 and height >= min(tiles.enough_rows, rows):
        return 1.0
    return 1 + tiles.row_price * (rows - height)


def even_steps(target: Target, vectors: int, spread: int) -> dict[int, float]:
    """Heights of tiles whose pixels are evenly spaced, with the steps they take, if they gain by more rows.

    They do not if a stride spreads the results (`spread` is how many bytes, 0 without a stride) so that those of a tile
    share a few sets of the first-level cache: Zen 5, 18 to 26% lost there.
    """
    near = spread == 0 or gcd(spread, CACHE_WAY) < CACHE_WAY // 2
    return tuning(target).tiles.even_steps if vectors == 1 and near else {}


def half_width_text(lanes: int, channels: int) -> str:
    """Why vectors of half the width are used."""
    return f"vectors of {lanes}: {channels} channels fill them better than longer ones"


def converts_f16(target: Target) -> bool:
    """Whether the machine converts f16."""
    return target.name in ("amx", "avx512", "avx2", "neon")


def streams(p: Problem, target: Target) -> bool:
    """Whether results are written past the caches: there are more of them than these can keep for who reads them."""
    able = target.triple.startswith(("x86_64", "amd64")) and target.width in (16, 32, 64)
    return able and not p.accumulate and 2 * DTYPES[p.out_dtype].size * prod(p.shape(p.wanted)) > target.l3
