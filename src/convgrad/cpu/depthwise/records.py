"""The plans of depthwise layers as records. What decides between the two: choose.py.

Each channel c is computed on its own; y, for example, is
    y[n][o][c] = Σ_k x[n][o*stride + k*dilation - pad][c] · w[k][c]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from ...spec.problem import Ints, Problem
from ..ir.vectors import sum_type
from ..plan.axes import Axis, tap_offsets
from ..plan.records import AxisMap, Nest, Registers, TapRanges, up
from ..plan.tuning import converts_f16
from ..plan.workspace import Buffer, per_thread, shared
from ..target import Target


@dataclass(frozen=True)
class Layer:
    """The problem: its types, its channels and its weights. Nothing is decided here."""

    wanted: str  # the tensor computed: "y", "x" or "w"
    dtype: str
    out_dtype: str
    sum: str  # type of the sums
    converts_f16: bool  # the machine does
    channels: int
    tap_offsets: Ints  # offset in w of each kernel element
    w_step: int  # elements of w between channels
    bias: int | None  # elements between bias values; None: there is no bias
    accumulate: bool


def layer_of(p: Problem, axes: tuple[Axis, ...], target: Target) -> Layer:
    """The layer of a problem, its kernel elements in the order of the axes."""
    return Layer(
        wanted=p.wanted,
        dtype=p.dtype,
        out_dtype=p.out_dtype,
        sum=sum_type(p.dtype),
        converts_f16=converts_f16(target),
        channels=p.g,
        tap_offsets=tap_offsets(axes),
        w_step=p.w_strides[0],
        bias=p.bias_stride,
        accumulate=p.accumulate,
    )


@dataclass(frozen=True)
class Tile:
    """The sums that are in registers at a time."""

    lanes: int  # of a vector
    rows: int  # of pixels
    vectors: int  # in a row: one for each pixel if lanes are channels


@dataclass(frozen=True)
class Source:
    """The tensor that is read: x, or y for the gradient of x."""

    sizes: Ints
    steps: Ints  # elements between neighbours, along each axis


@dataclass(frozen=True)
class Depthwise(Nest):
    """What both plans have."""

    loads_each = True

    layer: Layer
    tile: Tile

    @cached_property
    def registers(self) -> Registers:
        """What a tile keeps in registers."""
        return Registers(self.layer.sum, self.tile.lanes, self.tile.vectors, self.tile.rows)


@dataclass(frozen=True)
class ChannelsInLanes(Depthwise):
    """The plan for a layer whose channels are contiguous: for y, x or w.

    There are four axes, the batch among them. `maps` go from the result to the source, for w from y to x.
    """

    nest = "depthwise channels"

    source: Source
    maps: tuple[AxisMap, ...]
    task_rows: int  # positions along the third axis in a task
    slices: int  # of a weight gradient: the sum over y is cut into so many parts, added in order
    tap_ranges: TapRanges | None  # of a weight gradient: the pixels for which each tap lies inside x
    stream: bool  # results are written past the caches

    @property
    def pitch(self) -> int:
        """Elements between the packed weights of two taps."""
        return up(self.layer.channels, self.lanes)

    @property
    def whole_channels(self) -> int:
        """Channels that fill whole vectors."""
        return self.layer.channels // self.lanes * self.lanes

    @property
    def counts(self) -> Ints:
        """Positions along each axis, of the phase that has most."""
        return positions(self.maps)

    @property
    def tasks(self) -> int:
        """Tasks: slices of a weight gradient; else some rows of pixels, of all channels."""
        if self.layer.wanted == "w":
            return self.slices
        return self.counts[0] * self.counts[1] * ceil(self.counts[2] / self.task_rows)

    @property
    def steps(self) -> float:
        """Steps of all threads: of a strided gradient each result uses the taps of its phase only."""
        pixels = prod(ceil(m.out / m.out_stride) for m in self.maps)
        return len(self.layer.tap_offsets) * pixels * ceil(self.layer.channels / self.lanes)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors."""
        weights = len(self.layer.tap_offsets) * self.pitch
        if self.layer.wanted == "w":
            return (shared("sums", self.slices * weights),)
        return shared("weights", weights), shared("bias", self.pitch)


@dataclass(frozen=True)
class Images:
    """A tensor as images of one channel each, of three axes: those that the layer lacks are of size 1, in front."""

    sizes: Ints
    steps: Ints  # elements between neighbours, along each axis
    strides: Ints  # elements between images, and between channels


@dataclass(frozen=True)
class PackedImage:
    """How an image of the source is packed, with its padding."""

    extents: Ints  # rows, along the two outer axes
    pitch: int  # elements between rows: what a row of tiles reads, in whole vectors
    low: Ints  # coordinate of the first element, along each axis
    kernel: Ints  # size of the kernel
    taps: tuple[tuple[int, int], ...]  # along each axis: where the first tap reads, and how much further the next one


@dataclass(frozen=True)
class PixelsInLanes(Depthwise):
    """The plan for y or x of a layer whose pixels are contiguous along rows: one image of one channel after another."""

    nest = "depthwise pixels"

    images: int  # of each channel
    source: Images
    result: Images
    packed: PackedImage
    task_images: int  # images of one channel each, in a task

    @property
    def tasks(self) -> int:
        """Tasks: some images, one after another."""
        return ceil(self.images * self.layer.channels / self.task_images)

    @property
    def steps(self) -> float:
        """Steps of all threads: rows are computed in whole vectors."""
        *outer, width = self.result.sizes
        images = self.images * self.layer.channels
        return images * len(self.layer.tap_offsets) * prod(outer) * ceil(width / self.lanes)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What a kernel needs besides the tensors: an image, and the weights of a channel with its bias."""
        image = prod(self.packed.extents) * self.packed.pitch
        return per_thread("packed", image), per_thread("weights", len(self.layer.tap_offsets) + 1)


def positions(maps: tuple[AxisMap, ...]) -> Ints:
    """Positions along each axis, of the phase that has most."""
    return tuple(max(s.stop for s in m.segments) for m in maps)
