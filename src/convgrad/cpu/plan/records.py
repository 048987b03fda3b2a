"""What all plans have in common. A plan is a value: everything that is decided, and that a code generator obeys.

The rest is in the records of each room: gather/records.py (y and x), wgrad/records.py (w) and depthwise/records.py.
How the records of axes are made is in axes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import ClassVar, NamedTuple

from ...backend import Estimate, Refusal
from ...spec.problem import Ints, Problem
from ..ir.vectors import size_of
from .bits import LEAST_ODD_PITCH
from .workspace import Buffer, elements


def up(value: int, step: int) -> int:
    """The next multiple."""
    return -(-value // step) * step


def pieces(start: int, stop: int, size: int) -> dict[int, int]:
    """How often pieces of each length there are, if a range is cut at the multiples of a size."""
    first, last = up(start, size), stop // size * size  # whole pieces lie between these
    if first > last:
        return {stop - start: 1} if start < stop else {}
    lengths = {size: (last - first) // size}
    for length in (first - start, stop - last):
        lengths[length] = lengths.get(length, 0) + 1
    return {length: often for length, often in lengths.items() if length * often}


@dataclass(frozen=True)
class Packed:
    """How one axis of a tensor is packed for a box.

    A run of `count` entries is packed for each offset: entry q of run r is coordinate start + q*step + offsets[r]. As a
    rule there is one run, of coordinates start, start + 1, ...
    """

    size: int  # of the tensor, along this axis
    stride: int  # elements between its neighbours
    count: int
    step: int = 1
    offsets: Ints = (0,)

    @property
    def extent(self) -> int:
        """Entries along this axis."""
        return self.count * len(self.offsets)


class LaneGroups(NamedTuple):
    """Groups of few channels side by side in the lanes of a vector: channels of one of them, in and out."""

    inputs: int
    outputs: int


class TapRanges(NamedTuple):
    """Where each weight reads: x at starts[tap] + Σ o*x_steps and y at Σ o*y_steps, for o in the tap's valid range."""

    starts: Ints
    valid: tuple[tuple[tuple[int, int], ...], ...]  # ranges: of each tap, per axis, where it lies inside x
    x_steps: Ints
    y_steps: Ints


@dataclass(frozen=True)
class Segment:
    """Positions q of an axis that have the same taps: the results q*out_stride + residue, start <= q < stop."""

    residue: int
    start: int
    stop: int
    taps: tuple[tuple[int, int], ...]  # (k, entry of the packed axis)


@dataclass(frozen=True)
class Phase:
    """Positions that have the same taps on every axis: `count` rows of the tap table, from the `first` on."""

    first: int
    count: int
    residues: Ints
    starts: Ints
    stops: Ints


@dataclass(frozen=True)
class AxisMap:
    """What the results along one axis read: position q of a box reads from q*in_stride on."""

    out: int  # results
    out_stride: int  # between results that one q after another makes
    in_stride: int  # between the inputs that these read
    out_step: int  # elements between neighbouring results
    box: int  # positions q in a box
    kernel: int  # taps
    low: int  # coordinate of the first packed entry, for q = 0
    packed_stride: int  # packed entries between the inputs of neighbouring q
    segments: tuple[Segment, ...]

    @property
    def boxes(self) -> int:
        """How many boxes the axis is cut into."""
        return ceil(ceil(self.out / self.out_stride) / self.box)


def busy_tiles(maps: tuple[AxisMap, ...], rows: int) -> int:
    """Tiles of a box that have products: a stride may leave results without taps."""
    return max(1, prod(w.box * len({s.residue for s in w.segments if s.taps}) for w in maps) // rows)


class Registers(NamedTuple):
    """The sums that a tile keeps in registers: their type, lanes of a vector, vectors in a row, rows."""

    sum: str
    lanes: int
    vectors: int
    rows: int


@dataclass(frozen=True)
class Nest:
    """What all plans have: sums of a type, tasks, buffers, reasons. `nest` names the loop nest, as registry.py does."""

    nest: ClassVar[str]
    loads_each: ClassVar[bool] = False  # each step loads an operand that no other step uses
    threads: int = field(kw_only=True)
    why: tuple[str, ...] = field(default=(), kw_only=True)
    estimate: Estimate | None = field(default=None, kw_only=True)  # see estimate.py

    @cached_property
    def registers(self) -> Registers:
        """What a tile keeps in registers."""
        raise NotImplementedError

    @property
    def sum(self) -> str:
        """Type of the sums."""
        return self.registers.sum

    @property
    def lanes(self) -> int:
        """Lanes of a vector."""
        return self.registers.lanes

    @property
    def vectors(self) -> int:
        """Vectors in a row of a tile."""
        return self.registers.vectors

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.registers.rows

    @property
    def block(self) -> int:
        """Lanes of a tile, over all its vectors."""
        return self.lanes * self.vectors

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        raise NotImplementedError

    @property
    def steps(self) -> float:
        """Steps of the tiles, of all threads: a step adds a vector of products, or of pairs of them, to a vector of
        sums. Where the plan was chosen by what packing takes, that is counted, too.
        """
        raise NotImplementedError

    @property
    def thread_steps(self) -> float:
        """Steps of each thread."""
        return self.steps / self.threads

    @property
    def error(self) -> float:
        """The largest error of a result, if the bound for direct sums is 1."""
        return 1.0

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        raise NotImplementedError

    @property
    def item(self) -> int:
        """Bytes of an accumulator."""
        return size_of(self.sum)

    @property
    def shared(self) -> int:
        """Bytes of the buffers that threads share."""
        return self.item * elements(self.buffers, per_thread=False)

    @property
    def shared_if_packed_for_all(self) -> int:
        """Bytes that threads would share if what each packs for itself were packed for all."""
        return self.shared

    @property
    def own_bytes(self) -> int:
        """Bytes of the buffers that each thread has of its own."""
        return self.item * elements(self.buffers, per_thread=True)

    @property
    def workspace(self) -> int:
        """Bytes of all buffers, for all threads."""
        return self.shared + self.threads * self.own_bytes


Made = Nest
Plan = Made | Refusal


def refuse(reason: str, instead: str = "") -> Refusal:
    """Why a problem is left to the reference, and what would have kernels take it."""
    return Refusal("cpu", reason, instead)


def unserved(p: Problem, reason: str) -> Refusal | None:
    """What a planner answers that does not serve a problem: a reason, if it was asked for by name."""
    return None if p.algorithm == "direct" else refuse(reason, "algorithm='direct'")


def pitch(channels: int, lanes: int) -> int:
    """Elements between pixels of a packed box: whole vectors, and an odd number of them: with a power of two,
    pixels would share a few cache sets.
    """
    vectors = ceil(channels / lanes)
    return lanes * (vectors if vectors < LEAST_ODD_PITCH or vectors % 2 else vectors + 1)


def entry_steps(packs: tuple[Packed, ...]) -> list[int]:
    """Entries between neighbours along each axis."""
    steps = [1] * len(packs)
    for i in reversed(range(len(packs) - 1)):
        steps[i] = steps[i + 1] * packs[i + 1].extent
    return steps
