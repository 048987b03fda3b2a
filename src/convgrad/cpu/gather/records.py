"""The plan of y or x as records: each is what one step of plan.py decides.

Each result gathers its products over the kernel taps and the channels in:
    out[q*out_stride + a] = Σ_tap Σ_c in[q*in_stride + offset(tap)][c] · w[tap][c]
For y, in_stride is the stride and out_stride is 1. For x, in_stride is 1 and out_stride is the stride: an x at
q*stride + a uses only the taps of its own phase a, so each phase is a convolution with stride 1 over y, and nothing is
multiplied by a zero that the stride made. A box of pixels and its halo is packed with its padding; a register tile of
rows (pixels) and lanes (channels) then runs without a condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil, prod

from ...dtypes import DTYPES
from ...spec.problem import Ints
from ..ir.vectors import size_of
from ..pack.box import PackBox
from ..pack.unpack import Staging
from ..pack.weights import PackWeights
from ..plan.axes import Axis
from ..plan.prefetch import Prefetch
from ..plan.records import AxisMap, LaneGroups, Nest, Packed, Phase, Registers, pieces
from ..plan.workspace import Buffer, per_thread, shared
from ..target import Target


class TaskOrder(Enum):
    """What a task is, and which of them come one after another."""

    BOX = "box by box"  # a box of pixels with a part of the channels; all parts of a box before the next box
    PART = "part by part"  # the same, but all boxes with one part before another part
    CHANNEL = "by channels"  # a block of channels with all boxes


class WeightPacking(Enum):
    """Who packs the weights."""

    TEAM = "team"  # the threads share the work, then wait for each other
    THREAD_ALL = "each thread, all"  # each thread packs all of them for itself and waits for no one
    THREAD_BLOCK = "each thread, its blocks"  # each thread packs those of the block of channels that it takes


@dataclass(frozen=True)
class Layer:
    """The problem as a gather: its types, its axes, its channels and where they lie.

    Its values are the problem's until `fill_lanes` puts groups or neighbouring results side by side.
    """

    wanted: str  # the tensor computed: "y" or "x"
    dtype: str
    out_dtype: str
    sum: str  # type of the sums
    converts_f16: bool  # the machine does
    axes: tuple[Axis, ...]
    forward: bool  # results are y, or neighbours side by side, which are computed as if they were
    groups: int  # computed one after another
    cin: int  # channels in of a group
    cout: int  # channels out of a group
    in_channel: Ints  # strides of (group, channel)
    out_channel: Ints
    w_strides: Ints  # strides of (group, channel out, channel in)
    bias: int | None  # elements between bias values; None: there is no bias
    accumulate: bool

    @property
    def taps(self) -> int:
        """Elements of the kernel."""
        return prod(a.k for a in self.axes)

    @property
    def out_strides(self) -> list[int]:
        """Between results of the same phase, along each axis."""
        return [1 if self.forward else a.stride for a in self.axes]

    @property
    def item(self) -> int:
        """Bytes of an accumulator."""
        return size_of(self.sum)

    @property
    def size(self) -> int:
        """Bytes of an element of the inputs."""
        return DTYPES[self.dtype].size

    @property
    def out_size(self) -> int:
        """Bytes of a result."""
        return DTYPES[self.out_dtype].size


@dataclass(frozen=True)
class Fold:
    """Neighbouring results side by side in the lanes, where few channels are wanted: see fold.py.

    A lane is a place (how far along each axis) and a channel. `sizes` and `steps` are of the result.
    """

    factors: Ints  # results along each axis
    sizes: Ints
    steps: Ints
    channels: int
    channel_step: int
    table: Ints  # of each tap and lane: 0 if the lane does not have that tap; else 2*n + 1 if its weight is n-th in w


@dataclass(frozen=True)
class Tile:
    """What the lanes of a register tile hold, and how large it may be."""

    target: Target  # the machine, perhaps with vectors of half the width
    lanes: int  # of a vector
    vectors: int  # in a row of the tile
    last_vectors: int  # in a row for the last block of channels, if they are fewer; else 0
    most_rows: int  # that fit in the registers
    blocks: int  # of channels out, in a group
    lane_groups: LaneGroups | None  # groups side by side in the lanes
    fold: Fold | None  # neighbouring results side by side in the lanes

    @property
    def block(self) -> int:
        """Lanes of a tile, over all its vectors."""
        return self.lanes * self.vectors

    @property
    def last_block(self) -> int:
        """Lanes of the last block of channels."""
        return self.lanes * (self.last_vectors or self.vectors)


def pixel_channels(layer: Layer, tile: Tile) -> int:
    """Channels of an input pixel: of a group, or of all groups if they are side by side in the lanes."""
    groups = tile.lane_groups
    return layer.cin if groups is None else layer.cout // groups.outputs * groups.inputs


@dataclass(frozen=True)
class Sums:
    """How the sum over the channels in is taken."""

    channels: int  # summed over, in a group: an even number if they are taken in pairs
    chunk: int  # summed in one go
    pairs: bool  # products of bf16 are taken two at a time, by the machine's own instruction
    odd: bool  # there is one channel fewer than `channels`: the last one is paired with a weight of zero
    most_pixels: int  # of a box, so that what is kept for each of them stays small

    @property
    def chunks(self) -> int:
        """Parts of the sum."""
        return max(1, ceil(self.channels / self.chunk))

    @property
    def per_step(self) -> int:
        """Channels that one step of a tile takes."""
        return 2 if self.pairs else 1

    @property
    def real_chunk(self) -> int:
        """Channels of a chunk that exist."""
        return self.chunk - self.odd


@dataclass(frozen=True)
class Source:
    """How tiles read the input."""

    in_place: bool  # where it lies; else it is packed
    channels: int | None  # packed for each pixel; None if the last chunk has fewer
    pitch: int  # elements between the pixels of a packed box
    unit: str  # type of a packed element
    interleaved: bool  # channels are strided and few: whole pixels are made of them, without a gap between pixels


@dataclass(frozen=True)
class Output:
    """How results are written."""

    staged: bool  # sums wait in a buffer, the output staging; else tiles write results themselves
    stream: bool  # results are written past the caches
    prefetch: bool  # the memory of a box's results is prefetched while the box before it is computed


@dataclass(frozen=True)
class Cut:
    """How pixels are cut into boxes, and those of a box into tiles."""

    rows: int  # of a tile
    short_rows: int  # of a second tile, for what is left of a phase's pixels; 0 if there is none
    unrolled: bool  # tiles have all steps over the channels one after another, without a loop
    borders: tuple[bool, ...]  # axes on which pixels at the border have tiles of their own, without taps in the padding
    maps: tuple[AxisMap, ...]
    packs: tuple[Packed, ...]
    phases: tuple[Phase, ...]
    tap_table: tuple[tuple[int, int], ...]  # in phase order: (which of the taps, elements into the packed box)
    steps: float  # of all threads, as cost.py counts them: what these boxes and tiles are expected to take

    @property
    def boxes(self) -> int:
        """Boxes over all axes."""
        return prod(m.boxes for m in self.maps)

    @property
    def region(self) -> Ints:
        """Results of a box along each axis."""
        return tuple(m.box * m.out_stride for m in self.maps)

    @property
    def pixels(self) -> int:
        """Room for the pixels of a box, those of each phase rounded up to whole tiles."""
        return prod(self.region) + self.rows * len(self.phases)

    @property
    def evenly_spaced(self) -> bool:
        """Whether the pixels of a tile always lie in one row: what a box has of a row is whole tiles."""
        columns = self.maps[-1]
        lengths = [n for s in columns.segments for n in pieces(s.start, s.stop, columns.box)]
        return all(n % self.rows == 0 for n in lengths)

    @property
    def row_contiguous(self) -> bool:
        """Whether rows of results follow each other, in the tensor as in the staging: they are one long row."""
        rows, columns = self.maps[2:]
        return columns.out_step == 1 and columns.out == self.region[3] == rows.out_step


@dataclass(frozen=True)
class Task:
    """What threads take, one after another."""

    order: TaskOrder
    groups: int  # of a task
    parts: int  # that the blocks of channels of a box are cut into
    blocks: int  # of channels, that it computes of a box
    weights: WeightPacking


@dataclass(frozen=True)
class Gather(Nest):
    """The plan for y or x. See the module's text for the loop nest."""

    nest = "gather"

    layer: Layer
    tile: Tile
    sums: Sums
    source: Source
    output: Output
    cut: Cut
    task: Task
    pack: PackBox | None  # how the input of a box is packed; None if it is read in place
    staging: Staging | None  # how sums that wait are written; None if none do, or neighbours side by side
    weights: PackWeights
    prefetch: Prefetch | None  # the input of the next box, where this one's results go, and a part of the next weights
    weights_step: int  # bytes between the weights that one box prefetches and the next; 0: they are not prefetched

    # What all plans have.

    @cached_property
    def registers(self) -> Registers:
        """What a tile keeps in registers."""
        return Registers(self.layer.sum, self.tile.lanes, self.tile.vectors, self.cut.rows)

    @property
    def tasks(self) -> int:
        """Tasks of all groups."""
        if self.task.order is TaskOrder.CHANNEL:
            return self.layer.groups * self.tile.blocks
        return self.group_parts * self.cut.boxes * self.task.parts

    @property
    def steps(self) -> float:
        """Steps of all threads, by which the boxes were chosen."""
        return self.cut.steps

    # What follows from several records.

    @property
    def group_parts(self) -> int:
        """Parts of the groups: a task takes one."""
        return ceil(self.layer.groups / self.task.groups)

    @property
    def input_step(self) -> int:
        """Elements between what neighbouring results of a row read."""
        along = self.cut.packs[-1].stride if self.source.in_place else self.source.pitch
        return self.cut.maps[-1].packed_stride * along

    @property
    def box_accumulators(self) -> int:
        """Elements of the staging for one block of channels of a box, and what squares of them may read beyond."""
        return (prod(self.cut.region) + 2 * self.lanes) * self.block

    @property
    def panel(self) -> int:
        """Elements of the packed weights of one block of channels; a pair is one."""
        return self.layer.taps * (self.sums.channels // self.sums.per_step) * self.block

    @property
    def group_weights(self) -> int:
        """Elements of the packed weights of a group."""
        tile = self.tile
        lanes = (tile.blocks - 1) * tile.block + tile.last_block
        return self.layer.taps * (self.sums.channels // self.sums.per_step) * lanes

    @property
    def shared_if_packed_for_all(self) -> int:
        """Bytes that threads would share if what each packs for itself were packed for all."""
        alone = self.task.weights is not WeightPacking.TEAM
        return self.shared + alone * self.item * self.layer.groups * self.group_weights

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        packs = shared if self.task.weights is WeightPacking.TEAM else per_thread
        return (
            packs("weights", self._weights),
            packs("bias", self._bias),
            per_thread("packed", self._packed),
            per_thread("staging", self._staging),
            per_thread("pixels", (2 * self.cut.pixels + 3 * len(self.cut.phases)) * (8 // self.item)),
            per_thread("lines", 0 if self.prefetch is None else self.prefetch.size * (8 // self.item)),
        )

    @property
    def _weights(self) -> int:
        """Elements of the packed weights."""
        if self.task.weights is WeightPacking.THREAD_BLOCK:  # of a block of channels and a chunk
            return self.layer.taps * (self.sums.chunk // self.sums.per_step) * self.block
        return self.layer.groups * self.group_weights

    @property
    def _bias(self) -> int:
        """Elements of the packed bias."""
        if self.task.weights is WeightPacking.THREAD_BLOCK:
            return self.block
        return self.layer.groups * self.tile.blocks * self.block

    @property
    def _packed(self) -> int:
        """Elements of a packed box, and room beyond it: whole vectors of it are written, and squares of them."""
        source = self.source
        beyond = self.lanes * (source.pitch + 1)
        box = 0 if source.in_place else prod(p.extent for p in self.cut.packs) * source.pitch + beyond
        return ceil(box / self.sums.per_step)

    @property
    def _staging(self) -> int:
        """Elements of the output staging: between chunks, sums of all blocks of a box or of all boxes are kept."""
        if not self.output.staged:
            return 0
        several = self.cut.boxes if self.task.order is TaskOrder.CHANNEL else self.tile.blocks
        return self.box_accumulators * (several if self.sums.chunks > 1 else 1)
