"""The plan of a weight gradient as records: each is what one step of plan.py decides.

Each weight is a sum over pixels o of y:
    w[tap][cx][cy] = Σ_o x[o*stride + offset(tap)][cx] · y[o][cy]
The rows of a register tile are channels of one side, x or y, and its lanes are channels of the other. It runs over the
pixels of one box after another, always in the same order, so that the bits of a sum depend on nothing else. A 1x1
convolution can be such a sum too, over channels: see pointwise.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple

from ...spec.problem import Ints
from ..pack.box import PackBox, Pairing
from ..plan.prefetch import Prefetch
from ..plan.records import LaneGroups, Nest, Packed, Registers, TapRanges
from ..plan.workspace import Buffer, per_thread, shared


class Mode(Enum):
    """How tiles read one side of the sum."""

    IN_PLACE = "in place"
    ROWS = "row-packed"  # packed channel by channel, the pixels of a row contiguous
    VECTORS = "packed"  # packed pixel by pixel, channels contiguous


class Writing(Enum):
    """How the sums of a task are written to w."""

    VECTORS = "vectors"  # lanes are contiguous in w
    ELEMENTS = "elements"  # nothing is: one after another
    TRANSPOSED_TAPS = "transposed taps"  # taps are contiguous in w: squares of lanes by taps are transposed
    TRANSPOSED_TILES = "transposed tiles"  # taps are, and the next row follows the last tap: all of a tile at once
    GROUPS = "groups"  # one after another, each lane to its group


@dataclass(frozen=True)
class Tensors:
    """The tensors that are x, y and w of the sum, the types of the inputs and of the result, and that of the sums."""

    names: tuple[str, str, str]
    dtype: str
    out_dtype: str
    sum: str
    converts_f16: bool


@dataclass(frozen=True)
class Roles:
    """What the rows and the lanes of a register tile hold."""

    row_side: str  # whose channels are the rows: "x" or "y"
    row_channels: int  # in a group
    lane_channels: int  # in a group, or in all of them if they are side by side
    groups: int  # summed one after another
    lane_groups: LaneGroups | None  # rows are then taps, times the channels of x in a group
    lanes: int  # of a vector
    vectors: int  # in a row of the tile
    most_rows: int  # that fit in the registers
    pairs: bool  # pixels of bf16 are taken two at a time, by the machine's own instruction
    image_pairs: bool  # those of a pair are of two images: the last axis, and rows of pixels are the last but one

    @cached_property
    def block(self) -> int:
        """Lanes of a tile, over all its vectors."""
        return self.lanes * self.vectors

    @cached_property
    def blocks(self) -> int:
        """Blocks of lanes in a group."""
        return ceil(self.lane_channels / self.block)

    @property
    def per_step(self) -> int:
        """Pixels that one step of a tile takes."""
        return 2 if self.pairs else 1


class Modes(NamedTuple):
    """How tiles read the side in the rows and the one in the lanes."""

    rows: Mode
    lanes: Mode


@dataclass(frozen=True)
class Boxes:
    """How pixels are cut. With `Roles` this decides the bits of a sum, so the number of threads has no part in it."""

    sizes: Ints  # pixels of y along each axis
    box: Ints  # of them, what is packed and summed at a time
    slices: int  # parts of the sum, each over as many boxes, which are added in order

    @property
    def counts(self) -> Ints:
        """Boxes along each axis."""
        return tuple(ceil(n / b) for n, b in zip(self.sizes, self.box, strict=True))

    @property
    def number(self) -> int:
        """Boxes over all axes."""
        return prod(self.counts)


@dataclass(frozen=True)
class Parts:
    """How the sums are cut into tasks, and those of a task into register tiles."""

    rows: int  # of a tile
    row_part: int  # row channels of one task
    lane_part: int  # blocks of lanes of one task
    row_parts: int  # parts of the row channels
    lane_parts: int  # parts of the blocks of lanes
    tiles: int  # for one block of lanes: along the row channels, or along the taps if groups are in the lanes
    tap_step: int  # taps that one tile sums
    tap_parts: int  # parts of the taps: they have their sums in one place, and are different tasks
    lanes_in_place: bool  # the lanes are read in place, because tasks are too small to pack them
    saves_copies: bool  # cut otherwise than tasks alone would ask, so that less is packed more than once


Terms = tuple[tuple[int, int], ...]
"""Where a packed axis starts: the axes of a box whose starts are added, each times a number."""


@dataclass(frozen=True)
class Side:
    """One side of the sum, x or y: how it is packed, and how tiles step through it."""

    name: str
    mode: Mode
    channel: Ints  # strides of (group, channel) in the tensor
    channels: int  # in a group, or in all of them if they are side by side
    at_once: int  # channels packed at a time: those of a block of lanes, or all of a task's rows
    by_block: bool  # it is packed once for each block of lanes, else once for a box
    packs: tuple[Packed, ...]  # what of each axis a box needs
    pack: PackBox  # how that is packed, some axes merged; not used if it is read in place
    starts: tuple[Terms, ...]  # of these axes
    pitch: int  # elements between pixels of the packed side, or between channels if it is row-packed
    pair: tuple[int, int]  # pixels between the two of a packed pair, and between the first ones of neighbouring pairs
    steps: Ints  # elements between what neighbouring pixels of y read, along each axis
    low: Ints  # coordinate at which a box that starts at 0 begins
    in_stride: Ints  # and how much further it begins for each pixel of y

    @property
    def pairs_by_copy(self) -> bool:
        """Whether pixels are packed one by one, and then as pairs."""
        return self.mode is Mode.VECTORS and self.pack.pairing is Pairing.COPY

    @property
    def pixels(self) -> int:
        """Pixels in the packed side."""
        return prod(p.extent for p in self.packs)

    @property
    def size(self) -> int:
        """Elements of the packed side for the channels packed at a time; a pair is one."""
        return self.pixels // self.pair[1] * self.pitch

    @property
    def row_step(self) -> int:
        """Elements between channels, where tiles read them one by one."""
        return {Mode.IN_PLACE: self.channel[1], Mode.ROWS: self.pitch, Mode.VECTORS: 1}[self.mode]


@dataclass(frozen=True)
class Taps:
    """The kernel elements: where each lies in w and in x, and the pixels for which it is inside x."""

    weights: Ints  # offset in w of each
    entries: Ints  # elements into x as tiles read it, of each
    ranges: TapRanges


@dataclass(frozen=True)
class Output:
    """How results are written."""

    strides: Ints  # of (group, row, lane) in w
    writing: Writing
    direct: bool  # tiles write whole sums themselves: they are in no parts, and vectors of them are contiguous in w
    accumulate: bool
    stream: bool  # results are written past the caches
    prefetch: bool  # the memory of a tile's results is prefetched before they are written


@dataclass(frozen=True)
class WeightGradient(Nest):
    """The plan for w, or for a 1x1 convolution as such a sum."""

    nest = "wgrad"

    tensors: Tensors
    roles: Roles
    boxes: Boxes
    parts: Parts
    x: Side
    y: Side
    taps: Taps
    output: Output
    prefetch: Prefetch | None  # of the next box, of x and of y

    @cached_property
    def registers(self) -> Registers:
        """What a tile keeps in registers."""
        return Registers(self.tensors.sum, self.roles.lanes, self.roles.vectors, self.parts.rows)

    @property
    def sides(self) -> tuple[Side, Side]:
        """The side in the rows and the side in the lanes."""
        return (self.x, self.y) if self.roles.row_side == "x" else (self.y, self.x)

    @property
    def last_vectors(self) -> int:
        """Vectors of the last block of lanes, if they are fewer; 0 if it is a block as the others."""
        roles = self.roles
        return 0 if roles.lane_groups else ceil(roles.lane_channels / roles.lanes) % roles.vectors

    @property
    def units(self) -> int:
        """Parts of the result: each is as many tasks as it has parts of the taps, times the slices of the sum."""
        return self.roles.groups * self.parts.row_parts * self.parts.lane_parts

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        return self.units * self.parts.tap_parts * self.boxes.slices

    @property
    def tap_part(self) -> int:
        """Taps of a task, or fewer in the last one of them."""
        return ceil(self.tile_taps / self.parts.tap_parts)

    @property
    def steps(self) -> float:
        """Steps of all threads: every tile runs over all pixels, for each of its taps."""
        roles, parts = self.roles, self.parts
        tiles = roles.groups * roles.blocks * parts.row_parts * parts.tiles
        return tiles * self.tile_taps * parts.rows * roles.vectors * prod(self.boxes.sizes) / roles.per_step

    @property
    def tile_taps(self) -> int:
        """Taps whose sums are kept one after another for each place of a tile; with groups in the lanes they are rows
        of the tile.
        """
        return 1 if self.roles.lane_groups else len(self.taps.weights)

    @property
    def tile_sums(self) -> int:
        """Elements of the sums of a tile, of all its taps."""
        return self.tile_taps * self.rows * self.block

    @property
    def task_sums(self) -> int:
        """Elements of the sums of a task."""
        return self.parts.lane_part * self.parts.tiles * self.tile_sums

    def always_inside(self, axis: int) -> bool:
        """Whether every tap is inside x for all pixels along an axis."""
        return all(ends[axis] == (0, self.boxes.sizes[axis]) for ends in self.taps.ranges.valid)

    @property
    def repairs(self) -> bool:
        """Whether tiles sum padding too, so that a NaN may have to be repaired: see nan_repair.py."""
        return self.roles.lane_groups is not None and not all(map(self.always_inside, range(len(self.boxes.sizes))))

    @property
    def ragged(self) -> bool:
        """Whether of a pair of pixels one may be outside x: a zero beside data, which makes NaN of an infinity."""
        return self.roles.pairs and any(end % 2 for ends in self.taps.ranges.valid for end in ends[3])

    @property
    def row_unit(self) -> str:
        """The type of what lies between the elements of the row side, where tiles read them."""
        return "i16" if self.roles.pairs and self.sides[0].mode is not Mode.VECTORS else self.sum

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        # Sums are read in squares of vectors, which may reach beyond the last tap. Of packed sides whole vectors are
        # written, which reach beyond the last pixel, and a square of them up to a vector of pixels beyond it.
        beyond = self.lanes * self.rows * self.block
        several = self.boxes.slices > 1
        entries = 0 if self.prefetch is None else self.prefetch.size * (8 // self.item)
        return (
            shared("sums", self.task_sums * self.units * self.boxes.slices + beyond if several else 0),
            per_thread("x", self._packed(self.x)),
            per_thread("y", self._packed(self.y)),
            per_thread("accumulators", 0 if several else self.task_sums + beyond),
            per_thread("x_raw", self._raw(self.x)),
            per_thread("y_raw", self._raw(self.y)),
            per_thread("lines", entries),
        )

    def _packed(self, side: Side) -> int:
        """Elements of a packed side, and room beyond it."""
        if side.mode is Mode.ROWS:
            return ceil((self.parts.row_part * side.pitch + 2 * self.lanes) / self.roles.per_step)
        blocks = self.parts.lane_part if side.by_block else 1
        return (0 if side.mode is Mode.IN_PLACE else side.size * blocks) + self.lanes * side.pitch

    def _raw(self, side: Side) -> int:
        """Elements for pixels as they come, before they are copied as pairs."""
        if not side.pairs_by_copy:
            return 0
        return ceil((side.pixels + 2 * self.lanes + side.pair[0]) * side.pitch / 2)
