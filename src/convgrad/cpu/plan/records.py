"""The loop nests of the CPU engine, as values: all that a plan decides and a code generator obeys.

`Gather` computes y and x: see gather/records.py.

`Reduce` computes w. Each weight sums over all pixels:
    w[tap][cx][cy] = Σ_o x[o*stride + offset(tap)][cx] · y[o][cy]
A register tile of rows (one side's channels) and lanes (the other side's) runs over the pixels of one packed box after
another, always in the same order, so the sum has a fixed shape. A 1x1 convolution is such a sum too, over channels.

`Slide` computes depthwise layers whose channels lie together, all three: see slide.py. `Plane` computes y and x of
those whose pixels lie together along rows: see plane.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints
from .prefetch import Prefetch

MUCH = 1 << 16  # bytes of a tile's sums


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
    """How one axis of a tensor is copied into a band.

    The band holds one run of `count` entries per offset, entry q of run r being coordinate start + q*step + offsets[r].
    As a rule there is one run, of coordinates start, start + 1, ...
    """

    size: int
    stride: int
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
    """What each weight meets: x at starts[tap] + Σ o*x_steps and y at Σ o*y_steps, for every o within its reach."""

    starts: Ints
    reach: tuple[tuple[tuple[int, int], ...], ...]  # of each tap, per axis: the range of o for which it lies inside x
    x_steps: Ints
    y_steps: Ints


@dataclass(frozen=True)
class Segment:
    """Positions q of an axis, of one residue, that meet the same taps: start <= q < stop."""

    residue: int
    start: int
    stop: int
    taps: tuple[tuple[int, int], ...]  # (k, entry in the band)


@dataclass(frozen=True)
class Phase:
    """Positions that share their taps on every axis. `first` and `count` pick their taps from the plan's list."""

    first: int
    count: int
    residues: Ints
    starts: Ints
    stops: Ints


@dataclass(frozen=True)
class AxisMap:
    """One axis of a gather: how the output maps over the input."""

    out: int
    out_stride: int  # between results that one q after another makes
    in_stride: int  # between the inputs that these read
    out_step: int
    box: int  # positions q that one task covers
    kernel: int
    low: int  # coordinate of the band's first entry, for q = 0
    packed_stride: int  # entries between the inputs of neighbouring q
    segments: tuple[Segment, ...]

    @property
    def boxes(self) -> int:
        """How many boxes the axis is cut into."""
        return ceil(ceil(self.out / self.out_stride) / self.box)


def busy_tiles(maps: tuple[AxisMap, ...], rows: int) -> int:
    """Tiles of a box that have products: a stride may leave residues that no tap meets."""
    return max(1, prod(w.box * len({s.residue for s in w.segments if s.taps}) for w in maps) // rows)


@dataclass(frozen=True)
class Nest:
    """What all plans have: sums of a type, and buffers of so many elements, those of a thread marked by a dot."""

    nest: ClassVar[str]
    threads: int = field(kw_only=True)
    why: tuple[str, ...] = field(default=(), kw_only=True)

    if TYPE_CHECKING:  # a plan has these as fields, or from one of its records

        @property
        def sum(self) -> str:
            """Type of the sums."""
            ...

        @property
        def lanes(self) -> int:
            """Lanes of a vector."""
            ...

        @property
        def rows(self) -> int:
            """Rows of a tile."""
            ...

        @property
        def vectors(self) -> int:
            """Vectors in a row of a tile."""
            ...

    @property
    def block(self) -> int:
        """Lanes of a tile, over all its vectors."""
        return self.lanes * self.vectors

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each buffer."""
        raise NotImplementedError

    @property
    def item(self) -> int:
        """Bytes of an accumulator."""
        return 4 if self.sum == "float" else 8

    @property
    def shared(self) -> int:
        """Bytes of the buffers that threads share."""
        return self.item * sum(v for k, v in self.sizes.items() if not k.startswith("."))

    @property
    def at_once(self) -> int:
        """Bytes that threads would share if what each packs for itself were packed for all."""
        return self.shared

    @property
    def own_bytes(self) -> int:
        """Bytes of the buffers that each thread has of its own."""
        return self.item * sum(v for k, v in self.sizes.items() if k.startswith("."))

    @property
    def workspace(self) -> int:
        """Bytes of all buffers, for all threads."""
        return self.shared + self.threads * self.own_bytes


class Packing(NamedTuple):
    """How one side of a weight gradient is packed: along four axes, pixels lying together along the last of them."""

    axes: tuple[Packed, ...]
    starts: tuple[tuple[tuple[int, int], ...], ...]  # where each starts: the axes of a box that count, and how much
    twin: int | None  # elements from a pixel to that of the other image, if pairs are of two


@dataclass(frozen=True)
class Reduce(Nest):
    """The plan for w. See the module's text for the loop nest."""

    nest = "reduce"

    dtype: str
    out_dtype: str
    sum: str
    lanes: int
    rows: int  # accumulators down the tile: channels of the row side, or taps times channels when groups share lanes
    vectors: int
    groups: int
    row_side: str  # whose channels are the rows of the tile: "x" or "y"
    crow: int  # channels on the rows, in a group
    clane: int  # channels in the lanes, in a group
    share: tuple[int, int] | None  # groups side by side in the lanes: (channels of x, channels of y) of one
    pairs: bool  # pixels of bf16 are taken two at a time, by the machine's own instruction
    twins: bool  # those of a pair are of two images, the last axis, and rows lie along the last but one
    x_join: tuple[int, int]  # pixels between those of a pair made in the band of x, and between the first of each
    y_join: tuple[int, int]
    sizes_y: Ints  # pixels of y along each axis
    box: Ints
    x_packs: tuple[Packed, ...]
    x_pitch: int  # elements between pixels in the band of x, or between channels if it is strung
    x_low: Ints
    x_in_stride: Ints
    x_walk: Ints  # elements between the x of neighbouring o, along each axis
    y_packs: tuple[Packed, ...]
    y_pitch: int
    y_walk: Ints
    in_place: bool  # the row side is read where it lies
    lanes_in_place: bool  # so is the lane side
    strung: bool  # the row side is packed channel by channel, as it lies: neighbouring pixels are pairs already
    row_part: int  # row channels of one task
    lane_part: int  # blocks of lanes of one task
    x_channel: Ints
    y_channel: Ints
    w_strides: Ints  # strides of (group, row, lane)
    taps: Ints  # offset in w of each kernel element
    entries: Ints  # elements into the band of x, of each
    tap_ranges: TapRanges
    slices: int  # the sum over boxes is cut into so many parts, added in order
    operands: tuple[str, str, str]  # the tensors that are x, y and w here
    stream: bool  # results are written past the caches
    prefetch: Prefetch | None  # the next box, of x and of y
    accumulate: bool
    converts_f16: bool

    @property
    def reach(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each tap, per axis: the range of o for which it lies inside x."""
        return self.tap_ranges.reach

    @property
    def mends(self) -> bool:
        """Whether tiles run over padding too, so that sums may have to be mended."""
        whole = tuple((0, n) for n in self.sizes_y)
        return self.share is not None and any(ends != whole for ends in self.reach)

    @property
    def lane_blocks(self) -> int:
        """Blocks of lanes in a group."""
        return ceil(self.clane / self.block)

    @property
    def tail(self) -> int:
        """Vectors of the last block, if they are fewer; 0 if it is a block as the others."""
        return _tail(self.clane, self.lanes, self.vectors) if self.share is None else 0

    @property
    def row_parts(self) -> int:
        """Parts that the row channels are cut into."""
        return ceil(self.crow / self.row_part)

    @property
    def lane_parts(self) -> int:
        """Parts that the blocks of lanes are cut into."""
        return ceil(self.lane_blocks / self.lane_part)

    @property
    def direct(self) -> bool:
        """Whether tiles write whole sums themselves: one tap, vectors that lie together, boxes one after another."""
        return 1 == self.slices == len(self.taps) == self.w_strides[2] and not (self.share or self.accumulate)

    @property
    def asks_for_results(self) -> bool:
        """Whether the memory of a tile's sums is asked for before they are written: it is not written past the caches,
        and not so much that it would drive out what is needed before.
        """
        size = self.rows * self.block * len(self.taps) * DTYPES[self.out_dtype].size
        return self.prefetch is not None and not self.stream and size <= MUCH

    def lies(self, side: str) -> bool:
        """Whether a side is read where it lies."""
        return self.in_place if side == self.row_side else self.lanes_in_place

    def strings(self, side: str) -> bool:
        """Whether a side is packed channel by channel."""
        return self.strung and side == self.row_side

    @property
    def row_unit(self) -> str:
        """The type of what lies between the elements of the row side, where the tile reads them."""
        return "i16" if self.pairs and (self.in_place or self.strung) else self.sum

    @property
    def row_step(self) -> int:
        """Elements between the channels of the row side, where the tile reads them."""
        of_x = self.row_side == "x"
        if self.strung:
            return self.x_pitch if of_x else self.y_pitch
        return (self.x_channel if of_x else self.y_channel)[1] if self.in_place else 1

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        return self.groups * self.row_parts * self.lane_parts * self.slices

    @property
    def box_counts(self) -> Ints:
        """Boxes along each axis."""
        return tuple(ceil(n / b) for n, b in zip(self.sizes_y, self.box, strict=True))

    @property
    def tap_step(self) -> int:
        """Taps that one tile serves."""
        return self.rows // self.share[0] if self.share else 1

    @property
    def tiles(self) -> int:
        """Register tiles for one block of lanes: along the row channels, or along the taps when groups share lanes."""
        if self.share:
            return ceil(len(self.taps) / self.tap_step)
        return ceil(self.row_part / self.rows)

    @property
    def slab(self) -> int:
        """Elements of the sums of one task."""
        return self.lane_part * self.tiles * (1 if self.share else len(self.taps)) * self.rows * self.block

    @property
    def x_entries(self) -> int:
        """Pixels in the band of x."""
        return prod(p.extent for p in self.x_packs)

    @property
    def y_entries(self) -> int:
        """Pixels in the band of y."""
        return prod(p.extent for p in self.y_packs)

    @property
    def x_steps(self) -> int:
        """Entries in the band of x: pixels, or pairs of them."""
        return self.x_entries // self.x_join[1]

    @property
    def y_steps(self) -> int:
        """Entries in the band of y: pixels, or pairs of them."""
        return self.y_entries // self.y_join[1]

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each buffer: first what threads share, then what each has of its own (marked by a dot)."""
        line = 16
        # Sums are read in squares of vectors, which may reach beyond the last tap. Of the bands whole vectors are
        # written, which reach beyond the last pixel, and a square of them up to a vector of pixels beyond it.
        beyond = self.lanes * self.rows * self.block
        return {
            "sums": up(self.slab * self.tasks + beyond if self.slices > 1 else 0, line),
            ".x": up(self._band("x"), line),
            ".y": up(self._band("y"), line),
            ".slab": up(self.slab + beyond if self.slices == 1 else 0, line),
            ".x_raw": up(self._raw("x"), line),
            ".y_raw": up(self._raw("y"), line),
            ".lines": up(_table(self.prefetch, self.sum), line),
        }

    def packing(self, side: str) -> Packing:
        """How a side is packed."""
        packs = self.x_packs if side == "x" else self.y_packs
        columns = 2 if self.twins else 3
        before, row = packs[:columns], packs[columns]
        starts = [((i, 1),) for i in range(columns)]
        along: tuple[tuple[int, int], ...] = ((columns, 1),)
        # Rows of y that follow each other, and are packed whole, are one; between those of x there is padding.
        rows = before[-1]
        if side == "y" and rows.count > 1 and row.count == row.size and rows.stride == row.size * row.stride:
            along = ((columns - 1, row.size), *along)
            row = Packed(rows.size * row.size, row.stride, rows.count * row.count)
            before, starts = before[:-1], starts[:-1]
        missing = 3 - len(before)
        axes = (*before, *[Packed(1, 0, 1)] * missing, row)
        return Packing(axes, (*starts, *[()] * missing, along), packs[3].stride if self.twins else None)

    def _band(self, side: str) -> int:
        """Elements of the band of a side, and room beyond it."""
        steps, pitch = (self.x_steps, self.x_pitch) if side == "x" else (self.y_steps, self.y_pitch)
        if self.strings(side):
            return ceil((self.row_part * pitch + 2 * self.lanes) / (2 if self.pairs else 1))
        parts = 1 if side == self.row_side and not self.share else self.lane_part
        return (0 if self.lies(side) else steps * pitch * parts) + self.lanes * pitch

    @property
    def ragged(self) -> bool:
        """Whether a pair of pixels may hold one that is not met: a zero beside data, which makes NaN of an infinity."""
        return self.pairs and any(end % 2 for ends in self.reach for end in ends[3])

    def joining(self, side: str) -> str:
        """How the pixels of a side become pairs: "" if they do not, or lie so already; "twins" if they are of two
        images; "channels" if channels lie together, "pixels" if pairs do; else "copy", by way of a copy.
        """
        if not self.pairs or self.lies(side) or self.strings(side):
            return ""
        packs, channel, join = (self.x_packs, self.x_channel, self.x_join) if side == "x" else (
            self.y_packs, self.y_channel, self.y_join
        )  # fmt: skip
        last = packs[-1]
        if self.twins:
            return "twins"
        if len(last.offsets) > 1:
            return "copy"
        if channel[1] == 1:
            return "channels"
        low = self.x_low[-1] if side == "x" else 0
        return "pixels" if join == (1, 2) and last.stride == last.step == 1 and low == last.offsets[0] == 0 else "copy"

    def _raw(self, side: str) -> int:
        """Elements for pixels as they come, before they are paired."""
        x, y = (self.x_entries, self.x_pitch, self.x_join), (self.y_entries, self.y_pitch, self.y_join)
        entries, pitch, (apart, _) = x if side == "x" else y
        return ceil((entries + 2 * self.lanes + apart) * pitch / 2) if self.joining(side) == "copy" else 0


@dataclass(frozen=True)
class Slide(Nest):
    """The plan for depthwise layers whose channels lie together. See slide.py for the loop nests.

    `maps` go over the results, or over y for the weight gradient; `in_sizes` and `in_steps` are of the other tensor.
    """

    nest = "slide"

    wanted: str
    dtype: str
    out_dtype: str
    sum: str
    lanes: int
    rows: int  # of a tile
    vectors: int  # in a row of it, one for each pixel
    channels: int
    maps: tuple[AxisMap, ...]
    in_sizes: Ints
    in_steps: Ints
    taps: Ints  # offset in w of each kernel element
    w_step: int  # elements of w between channels
    band: int  # positions along the third axis that a task covers
    slices: int  # of a weight gradient: the sum over y is cut into so many parts, added in order
    tap_ranges: TapRanges | None  # of a weight gradient
    bias: int | None
    accumulate: bool
    stream: bool
    converts_f16: bool

    @property
    def pitch(self) -> int:
        """Elements between the packed weights of two taps."""
        return up(self.channels, self.lanes)

    @property
    def counts(self) -> Ints:
        """Positions along each axis, of the phase that has most."""
        return tuple(max(s.stop for s in w.segments) for w in self.maps)

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        if self.wanted == "w":
            return self.slices
        return self.counts[0] * self.counts[1] * ceil(self.counts[2] / self.band)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each buffer; threads have none of their own."""
        if self.wanted == "w":
            return {"sums": up(self.slices * len(self.taps) * self.pitch, 16)}
        return {"weights": up(len(self.taps) * self.pitch, 16), "bias": up(self.pitch, 16)}


@dataclass(frozen=True)
class Plane(Nest):
    """The plan for y or x of depthwise layers whose pixels lie together along rows. See plane.py for the loop nest.

    Of three axes each: an image of one channel, filled up in front.
    """

    nest = "plane"

    wanted: str
    dtype: str
    out_dtype: str
    sum: str
    lanes: int
    rows: int  # of a tile
    vectors: int
    images: int
    channels: int
    kernel: Ints
    in_sizes: Ints
    out_sizes: Ints
    in_steps: Ints
    out_steps: Ints
    in_plane: Ints  # strides of (image, channel)
    out_plane: Ints
    low: Ints  # coordinate of the band's first entry
    spans: Ints  # entries that the band has beyond the results
    entries: tuple[tuple[int, int], ...]  # entry of the first tap, and from one tap to the next
    taps: Ints  # offset in w of each kernel element
    w_step: int  # elements of w between channels
    each: int  # images that a task takes
    bias: int | None
    accumulate: bool
    converts_f16: bool

    @property
    def pitch(self) -> int:
        """Elements between rows of the band: what a row of tiles reads, in whole vectors."""
        return up(up(self.out_sizes[2], self.block) + self.spans[2], self.lanes)

    @property
    def extents(self) -> Ints:
        """Entries of the band along the outer axes."""
        return tuple(n + s for n, s in zip(self.out_sizes[:2], self.spans[:2], strict=True))

    @property
    def tasks(self) -> int:
        """Pieces of work that threads take."""
        return ceil(self.images * self.channels / self.each)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each buffer, all of them a thread's own."""
        return {".band": up(prod(self.extents) * self.pitch, 16), ".weights": up(len(self.taps) + 1, 16)}


@dataclass(frozen=True)
class Declined:
    """A problem that is left to the reference, why, and what would change that."""

    reason: str
    instead: str


Made = Nest
Plan = Made | Declined


def pitch(channels: int, lanes: int) -> int:
    """Elements between pixels of a band: whole vectors, and an odd number of them, since pixels that lie a power of two
    apart would share a few cache sets.
    """
    vectors = ceil(channels / lanes)
    return lanes * (vectors if vectors < 4 or vectors % 2 else vectors + 1)


def _tail(channels: int, lanes: int, vectors: int) -> int:
    return ceil(channels / lanes) % vectors


def _table(prefetch: Prefetch | None, sum_: str) -> int:
    """Elements that the offsets of lines take."""
    return 0 if prefetch is None else prefetch.size * (2 if sum_ == "float" else 1)


def entry_steps(packs: tuple[Packed, ...]) -> list[int]:
    """Band entries between neighbours along each axis."""
    steps = [1] * len(packs)
    for i in reversed(range(len(packs) - 1)):
        steps[i] = steps[i + 1] * packs[i + 1].extent
    return steps
