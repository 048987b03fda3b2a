"""Plans for tile registers as records: each is what one step of a planner decides.

Rows of a tile lie evenly spaced in memory. So the inputs of a box are packed such that neighbouring positions always
are, even from one row of pixels to the next: the positions of the innermost axes are one long row, with a few between
rows that are computed in vain. A stride is taken out by packing inputs that lie so far apart as runs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints
from ..gather.records import Layer, Sums, Tile
from ..pack.box import PackBox, Packer, Pairing
from ..pack.unpack import Staging
from ..pack.weights import PackWeights
from ..plan.prefetch import Prefetch
from ..plan.records import Nest, Packed, Registers, TapRanges, up
from ..plan.workspace import Buffer, per_thread, shared
from .split import Split
from .tiles import COLUMNS, FILE, PAIRS, STEP, Block


@dataclass(frozen=True)
class Axis:
    """What the positions q of a box read along one axis: entry q + shift of a run of evenly spaced inputs."""

    out: int  # results
    out_stride: int  # between results that one q after another makes
    out_step: int  # elements between neighbouring results
    box: int  # positions in a box
    in_stride: int  # coordinates between entries of a run
    runs: Ints  # the coordinate at which each run begins, for q = 0
    taps: tuple[tuple[int, int, int, int], ...]  # (results q*out_stride + residue that have it, tap, its run and shift)
    pack: Packed  # a run

    @property
    def positions(self) -> int:
        """Positions of the results with the most of them."""
        return ceil(self.out / self.out_stride)

    @property
    def boxes(self) -> int:
        """How many boxes the axis is cut into."""
        return ceil(self.positions / self.box)


@dataclass(frozen=True)
class Phase:
    """Results that have the same taps: how many rows of the table of taps, from the first on, and their residues."""

    first: int
    count: int
    residues: Ints


@dataclass(frozen=True)
class Boxes:
    """How positions are cut into boxes. In a box, those of the axes from `flat` on are one long row."""

    axes: tuple[Axis, ...]
    flat: int

    @property
    def sizes(self) -> Ints:
        """Positions of a box along each axis."""
        return tuple(a.box for a in self.axes)

    @property
    def number(self) -> int:
        """Boxes over all axes."""
        return prod(a.boxes for a in self.axes)

    @property
    def runs(self) -> tuple[Ints, ...]:
        """Where each packed run begins along each axis, for the first position."""
        return tuple(product(*(a.runs for a in self.axes)))

    @property
    def run_entries(self) -> int:
        """Entries of one run of all axes."""
        return prod(a.pack.count for a in self.axes)


@dataclass(frozen=True)
class Positions(Boxes):
    """How the inputs of a box lie, for y or x."""

    in_place: bool  # inputs are read where they lie
    pitch: int  # elements between neighbouring positions; pieces of numbers are elements of their own
    steps: Ints  # elements of the input between neighbouring positions along each axis
    phases: tuple[Phase, ...]
    taps: tuple[tuple[int, int], ...]  # in phase order: (which of the taps, elements into the input)

    @property
    def extents(self) -> Ints:
        """Places of positions along each axis, with those computed in vain."""
        counts = self.sizes if self.in_place else tuple(a.pack.count for a in self.axes)
        return self.sizes[: self.flat + 1] + counts[self.flat + 1 :]


@dataclass(frozen=True)
class Parts:
    """What threads take: a box with a part of the blocks of channels."""

    parts: int
    blocks: int  # of channels, in a part
    together: int  # of these blocks, computed for some positions before the next positions


@dataclass(frozen=True)
class Code:
    """How tile instructions are written."""

    emulated: bool  # as calls of plain code that does the same
    rounds_bf16: bool  # the machine has an instruction that rounds to bf16, and results are rounded by it
    splits_bf16: bool  # the machine has it, and pieces of numbers are made by it


@dataclass(frozen=True)
class TileGather(Nest):
    """The plan for y or x on tile registers: rows are positions, columns are channels out."""

    nest = "tiles"

    layer: Layer
    tile: Tile
    sums: Sums
    tiles: Block
    positions: Positions
    pack: PackBox | None  # None: inputs are read where they lie
    weights: PackWeights
    parts: Parts
    code: Code
    staging: Staging | None  # None: sums are written tile by tile, because channels are contiguous in the tensor
    prefetch: Prefetch | None  # the input of the next box, by the calls of tiles
    fetched_results: bool  # the memory of results is prefetched while the tile before is written
    work: float  # cycles of all threads in which tiles are multiplied, as tuning.py counts them
    split: Split  # how numbers are split into those that tiles multiply

    @cached_property
    def registers(self) -> Registers:
        """The sums of a block of tiles."""
        return Registers(self.layer.sum, COLUMNS, self.tiles.across, self.tiles.height)

    @property
    def tasks(self) -> int:
        """Pieces of work."""
        return self.layer.groups * self.positions.number * self.parts.parts

    @property
    def steps(self) -> float:
        """Cycles in which tiles are multiplied, as steps of vectors, of which a machine does two in a cycle."""
        return 2 * self.work

    # What follows from several records.

    @property
    def error(self) -> float:
        """That of a result with all taps; a bias and what is added to are two more terms."""
        taps = max(1, *(phase.count for phase in self.positions.phases))
        return self.split.error(taps * self.layer.cin, taps * self.sums.channels // 2 // self.tiles.pairs + 2)

    @property
    def copies_lines(self) -> bool:
        """Whether inputs are packed by copies of whole lines."""
        pack = self.pack
        return pack is not None and pack.packer in (Packer.COPY_ROWS, Packer.COPY_PIXELS) and pack.pitch % STEP == 0

    @property
    def fetched_lines(self) -> int:
        """Lines that a step prefetches, so that a tile with few taps has its portion."""
        if self.prefetch is None:
            return 0
        taps = min((phase.count for phase in self.positions.phases if phase.count), default=1)
        return ceil(self.prefetch.lines_per_call / (taps * self.prefetch.steps))

    @property
    def weight_parts(self) -> int:
        """Parts in which the weights of one column of tiles are packed."""
        if not self.split.whole:
            return ceil(self.weights.channels / self.weights.chunk)
        part = self.weights.part
        return 1 if part is None else ceil(self.sums.channels // 2 / part)

    @property
    def columns(self) -> int:
        """Tiles side by side for all channels of a group."""
        return ceil(self.layer.cout / self.lanes)

    @property
    def panel(self) -> int:
        """Elements of the packed weights of a column of tiles, with all pieces; a pair is one. Tiles are contiguous."""
        return self.split.pieces * self.layer.taps * self.sums.channels // 2 * self.lanes

    @property
    def group_weights(self) -> int:
        """Elements of the packed weights of a group."""
        return self.columns * self.panel

    @property
    def raw_weights(self) -> int:
        """Elements of weights that a thread packs before it splits them."""
        return self.layer.taps * self.weights.chunk * self.lanes

    @property
    def out_steps(self) -> Ints:
        """Elements of the tensor between the results of neighbouring positions along each axis."""
        return tuple(a.out_step * a.out_stride for a in self.positions.axes)

    @property
    def lists_places(self) -> bool:
        """Whether the places of a long row are listed with where they are in the tensor: those of one axis need not."""
        return self.staging is None and self.positions.flat < len(self.positions.axes) - 1

    @property
    def staged(self) -> int:
        """Elements of the sums that wait: of a tile, and a row for what is not written to the tensor; or of a box for
        one block of channels, and what is written or read beyond them.
        """
        if self.staging is None:
            return (self.rows + 1) * self.block
        return (prod(self.positions.extents) + self.rows + 2 * self.lanes) * self.block

    @property
    def places(self) -> int:
        """Places of a long row, of the tile at its end, and of another one that is prefetched."""
        return prod(self.positions.extents[self.positions.flat :]) + 2 * self.rows

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        layer, positions = self.layer, self.positions
        packed = 0
        if not positions.in_place:
            # Tiles read beyond the last position, and whole vectors and squares of them are packed.
            beyond = self.rows + self.lanes + 1
            packed = (len(positions.runs) * positions.run_entries + beyond) * positions.pitch // 2
        return (
            shared("weights", layer.groups * self.group_weights),
            shared("bias", layer.groups * self.columns * self.lanes if layer.bias is not None else 0),
            per_thread("packed", packed),
            per_thread("staging", self.staged),
            per_thread("places", self.places * 8 // self.item if self.lists_places else 0),
            per_thread("lines", 0 if self.prefetch is None else self.prefetch.size * 8 // self.item),
            per_thread("registers", FILE // 4 if self.code.emulated else 0),
            *((per_thread("raw_weights", self.raw_weights),) if not self.split.whole else ()),
        )


@dataclass(frozen=True)
class Sides:
    """The problem of w: its types, its channels and where they lie."""

    dtype: str
    out_dtype: str
    sum: str
    converts_f16: bool
    groups: int
    channels: tuple[int, int]  # in rows and in columns, in a group
    row_channel: Ints  # strides of (group, channel) of what is in the rows
    column_channel: Ints
    w_channel: Ints  # strides of (group, channel in the rows, channel in the columns)
    accumulate: bool
    swapped: bool  # rows are of y and columns of x; else the other way round

    @property
    def size(self) -> int:
        """Bytes of an element of x and y."""
        return DTYPES[self.dtype].size


class PairSteps(NamedTuple):
    """How the pairs lie that tiles read, in pairs."""

    channel: int  # from a channel to the next, if each is the first of a block of tiles
    beside: int  # from a tile to the one beside it
    pair: int  # from a row of a tile to the next
    step: int  # from a tile to that of the next step


@dataclass(frozen=True)
class Box(Boxes):
    """How x and y of a box lie in memory, while tiles read them.

    If rows are of x, it is [channel][entry], and y is [long row][step][16 channels][pair of positions][channel][first,
    second]. A tap reads rows from any entry on, so that most rows of a tile cross lines of memory.

    If pairs are of x, it is [block of channels][pair of entries][channel][first, second], where a pair begins at every
    entry, or at every second one if no tap begins at the others; y is [channel][long row][position]. Tiles read whole
    lines of both.

    y is zero where a position has no result: what x has there is then multiplied by zeros.
    """

    entries: Ints  # elements from the first entry of x that a tap reads to that of each tap
    channels: tuple[int, int]  # in rows and in columns that there is room for
    x_pack: PackBox  # [entry][channel], which is then transposed; or row-packed, as it is to be; or pairs
    y_pack: PackBox | None  # [position][channel], before positions are paired; None: they are as they lie. Or rows of y
    y_steps: Ints  # elements between neighbouring positions along each axis, before they are paired
    row_pitch: int  # elements between channels in the rows
    pair_pitch: int  # pairs between pairs of positions
    pair_step: int  # entries of x from where a pair begins to where the next one does; 0: pairs are of y
    pair_block: int  # channels of x whose pairs are packed together

    @property
    def extents(self) -> Ints:
        """Places of positions along each axis, with those that have no result."""
        return self.sizes[: self.flat + 1] + tuple(a.pack.count for a in self.axes[self.flat + 1 :])

    @property
    def row_packed(self) -> bool:
        """Whether rows are packed channel by channel, as tiles read them."""
        pack = self.y_pack if self.x_paired else self.x_pack
        return pack is not None and pack.packer is Packer.ROWS

    @property
    def x_paired(self) -> bool:
        """Whether pairs are of x and rows of y."""
        return self.pair_step > 0

    @property
    def places(self) -> int:
        """Places in a long row, up to its last position."""
        return 1 + sum((self.sizes[i] - 1) * prod(self.extents[i + 1 :]) for i in range(self.flat, 4))

    @property
    def long_row(self) -> int:
        """The same, rounded up to whole steps."""
        return up(self.places, STEP)

    @property
    def y_row(self) -> int:
        """From a long row of y to the next: pairs of all channels, or elements."""
        return self.long_row if self.x_paired else self.long_row // 2 * self.pair_pitch

    @property
    def x_entry(self) -> int:
        """From an entry of x to the next: elements, or pairs of all channels for each."""
        return self.pair_pitch // self.pair_step if self.x_paired else 1

    @property
    def x_pairs(self) -> int:
        """Pairs of x that are packed, of one channel."""
        return len(self.runs) * self.run_entries // self.pair_step

    @property
    def read_pairs(self) -> int:
        """Pairs of x that tiles read of one channel, where steps may go beyond the last entry."""
        rows = sum((self.sizes[i] - 1) * prod(a.pack.count for a in self.axes[i + 1 :]) for i in range(self.flat))
        return ceil((max(self.entries) + rows + self.long_row) / self.pair_step)

    @property
    def pairs(self) -> int:
        """Pairs of x that there is room for, of one channel."""
        return max(self.x_pairs, self.read_pairs)

    @property
    def pair_steps(self) -> PairSteps:
        """How pairs lie."""
        if self.x_paired:
            channel = self.pairs if self.pair_block < self.channels[1] else 1
            return PairSteps(channel, COLUMNS, 2 * self.x_entry, STEP * self.x_entry)
        return PairSteps(PAIRS, PAIRS * COLUMNS, COLUMNS, PAIRS * self.pair_pitch)


@dataclass(frozen=True)
class SumParts:
    """Parts of w, and of the sums: each is a task."""

    rows: int  # channels in the rows of a part
    columns: int
    row_parts: int
    column_parts: int
    slices: int  # parts of the sum, added in order
    taps_inside: bool  # sums are [row][tap][column], as in w; else [tap][row][column]


@dataclass(frozen=True)
class TileSums(Nest):
    """The plan for w on tile registers: rows and columns are channels of x and y, products those of positions."""

    nest = "tile sums"

    sides: Sides
    box: Box
    parts: SumParts
    tiles: Block
    staging: Staging  # how sums of a part are written; if taps are outside, those of a tap
    weights: Ints  # where each tap lies in w
    ranges: TapRanges  # where it lies inside x
    repairs: bool  # x may be multiplied by a zero that is no result: what becomes NaN so is summed again
    code: Code
    work: float
    split: Split
    fetched_step: bool  # what the next step loads is prefetched into the first-level cache

    @cached_property
    def registers(self) -> Registers:
        """The sums of a block of tiles."""
        return Registers(self.sides.sum, COLUMNS, self.tiles.across, self.tiles.height)

    @property
    def units(self) -> int:
        """Parts of the result."""
        return self.sides.groups * self.parts.row_parts * self.parts.column_parts

    @property
    def tasks(self) -> int:
        """Pieces of work: each part of the result, for each slice of the sum."""
        return self.units * self.parts.slices

    @property
    def steps(self) -> float:
        """Cycles in which tiles are multiplied, as steps of vectors, of which a machine does two in a cycle."""
        return 2 * self.work

    @property
    def error(self) -> float:
        """That of a weight whose tap lies inside x for all positions."""
        rows = self.box.number * prod(self.box.sizes[: self.box.flat])
        positions = prod(a.out for a in self.box.axes)
        return self.split.error(positions, rows * self.box.long_row // STEP + self.parts.slices)

    @property
    def row_room(self) -> int:
        """Rows of the sums of a part, rounded up to whole blocks."""
        return up(self.parts.rows, self.tiles.height)

    @property
    def column_room(self) -> int:
        """The same of columns."""
        return up(self.parts.columns, COLUMNS)

    @property
    def tap_step(self) -> int:
        """Elements between the sums of neighbouring taps."""
        return self.column_room * (1 if self.parts.taps_inside else self.row_room)

    @property
    def row_step(self) -> int:
        """Elements between the sums of neighbouring rows."""
        return self.column_room * (len(self.weights) if self.parts.taps_inside else 1)

    @property
    def part_sums(self) -> int:
        """Elements of the sums of a part."""
        return len(self.weights) * self.row_room * self.column_room

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        box, several, pieces = self.box, self.parts.slices > 1, self.split.pieces
        beyond = 2 * self.lanes * self.column_room  # squares of sums are read beyond the last
        raw_x, raw_y = self._raw_of_rows_of_x()
        x, y = self.row_piece, self.pair_piece
        if box.x_paired:
            raw_x, raw_y = self._raw_of_pairs_of_x()
            x, y = y, x
        return (
            shared("sums", self.part_sums * self.tasks + beyond if several else 0),
            per_thread("accumulators", 0 if several else self.part_sums + beyond),
            per_thread("x", pieces * x // 2),
            per_thread("y", pieces * y // 2),
            per_thread("x_raw", raw_x),
            per_thread("y_raw", raw_y),
            per_thread("registers", FILE // 4 if self.code.emulated else 0),
        )

    @property
    def row_piece(self) -> int:
        """Elements of one piece of the numbers in the rows of a box."""
        return up(max(self.row_room, self.parts.rows), STEP) * self.box.row_pitch

    @property
    def pair_piece(self) -> int:
        """The same of those in pairs."""
        box = self.box
        if box.x_paired:
            return 2 * box.pairs * box.pair_pitch * ceil(self.parts.columns / box.pair_block)
        return 2 * prod(box.sizes[: box.flat]) * box.y_row

    def _raw_of_rows_of_x(self) -> tuple[int, int]:
        """Elements for what is packed before x is in rows, and before y is in pairs."""
        box = self.box
        raw_x = self._raw(box.x_pack, box.row_pitch)
        if box.row_packed:
            raw_x = 0 if self.split.whole else self.row_piece * self.sides.size // 4
        return raw_x, self._raw(box.y_pack, prod(box.sizes))

    def _raw_of_pairs_of_x(self) -> tuple[int, int]:
        """Elements for what is packed before x is in pairs, run by run, and before y is in rows, one after another."""
        box = self.box
        raw_x = self._raw(box.x_pack, box.run_entries) if box.x_pack.pairing is Pairing.COPY else 0
        return raw_x, 0 if box.row_packed else self._raw(box.y_pack, prod(box.extents[box.flat :]))

    def _raw(self, pack: PackBox | None, entries: int) -> int:
        """Elements for what is packed first, and what is written beyond it."""
        return 0 if pack is None else (entries + self.lanes + 1) * pack.pitch * self.sides.size // 4
