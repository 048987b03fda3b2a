"""Plans for tile registers as records: each is what one step of a planner decides.

Rows of a tile lie evenly spaced in memory. So the inputs of a box are packed such that neighbouring positions always
are, even from one row of pixels to the next: the positions of the innermost axes are one long row, with a few between
rows that are computed in vain. A stride is taken out by packing inputs that lie so far apart as runs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ...spec.problem import Ints
from ..gather.records import Layer, Sums, Tile
from ..pack.box import PackBox
from ..pack.weights import PackWeights
from ..plan.records import Nest, Packed
from ..plan.workspace import Buffer, per_thread, shared
from .tiles import COLUMNS, FILE, Block


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
class Positions:
    """How the positions of a box are laid out: those of the axes from `flat` on are one long row."""

    axes: tuple[Axis, ...]
    flat: int
    in_place: bool  # inputs are read where they lie
    pitch: int  # elements between neighbouring positions
    steps: Ints  # elements of the input between neighbouring positions along each axis
    phases: tuple[Phase, ...]
    taps: tuple[tuple[int, int], ...]  # in phase order: (which of the taps, elements into the input)

    @property
    def box(self) -> Ints:
        """Positions of a box along each axis."""
        return tuple(a.box for a in self.axes)

    @property
    def extents(self) -> Ints:
        """Places of positions along each axis, with those computed in vain."""
        counts = self.box if self.in_place else tuple(a.pack.count for a in self.axes)
        return self.box[: self.flat + 1] + counts[self.flat + 1 :]

    @property
    def boxes(self) -> int:
        """Boxes over all axes."""
        return prod(a.boxes for a in self.axes)

    @property
    def runs(self) -> tuple[Ints, ...]:
        """Where each packed run begins along each axis, for the first position."""
        found: list[Ints] = [()]
        for a in self.axes:
            found = [(*starts, start) for starts in found for start in a.runs]
        return tuple(found)

    @property
    def run_entries(self) -> int:
        """Entries of one run of all axes."""
        return prod(a.pack.count for a in self.axes)


@dataclass(frozen=True)
class Parts:
    """What threads take: a box with a part of the blocks of channels."""

    parts: int
    blocks: int  # of channels, in a part


@dataclass(frozen=True)
class Code:
    """How tile instructions are written."""

    emulated: bool  # as calls of plain code that does the same
    rounds_bf16: bool  # the machine has an instruction that rounds to bf16


@dataclass(frozen=True)
class TileGather(Nest):
    """The plan for y or x on tile registers: rows are positions, columns are channels out."""

    nest = "tiles"

    layer: Layer
    tile: Tile
    sums: Sums
    registers: Block
    positions: Positions
    pack: PackBox | None  # None: inputs are read where they lie
    weights: PackWeights
    parts: Parts
    code: Code
    round_first: bool  # sums are rounded before they are transposed
    work: float  # cycles of all threads in which tiles are multiplied, as tuning.py counts them

    @property
    def sum(self) -> str:
        """Type of the sums."""
        return self.layer.sum

    @property
    def lanes(self) -> int:
        """Sums in a row of a tile."""
        return COLUMNS

    @property
    def rows(self) -> int:
        """Rows of a block of tiles."""
        return self.registers.height

    @property
    def vectors(self) -> int:
        """Tiles side by side."""
        return self.registers.across

    @property
    def tasks(self) -> int:
        """Pieces of work."""
        return self.layer.groups * self.positions.boxes * self.parts.parts

    @property
    def steps(self) -> float:
        """Cycles of all threads: of plans for one machine, those with fewer are better."""
        return self.work

    # What follows from several records.

    @property
    def panel(self) -> int:
        """Elements of the packed weights of one block of channels; a pair is one."""
        return self.layer.taps * self.sums.channels // 2 * self.block

    @property
    def group_weights(self) -> int:
        """Elements of the packed weights of a group."""
        lanes = (self.tile.blocks - 1) * self.block + self.tile.last_block
        return self.layer.taps * self.sums.channels // 2 * lanes

    @property
    def staging(self) -> int:
        """Elements of the sums of a box for one block of channels, and what is written or read beyond them."""
        return (prod(self.positions.extents) + self.rows + 2 * self.lanes) * self.block

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        layer, positions = self.layer, self.positions
        blocks = layer.groups * self.tile.blocks
        packed = 0
        if not positions.in_place:
            # Tiles read beyond the last position, and whole vectors and squares of them are packed.
            beyond = self.rows + self.lanes + 1
            packed = (len(positions.runs) * positions.run_entries + beyond) * positions.pitch // 2
        return (
            shared("weights", layer.groups * self.group_weights),
            shared("bias", blocks * self.block if layer.bias is not None else 0),
            per_thread("packed", packed),
            per_thread("staging", self.staging),
            per_thread("registers", FILE // 4 if self.code.emulated else 0),
        )
