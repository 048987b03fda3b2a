"""What a packer is told: how a box of a tensor lies there, how it is to lie in a buffer, and which packer does it.

`packer` chooses, for planners. No code is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from ..plan.bits import MOST_STEP
from ..plan.records import Packed


class Pairing(Enum):
    """Where the two bf16 of a pair come from, which one instruction multiplies and adds. See pairs.py."""

    NONE = ""
    CHANNELS = "channels"  # from two pixels whose channels are contiguous: their vectors are interleaved
    PIXELS = "pixels"  # from neighbouring pixels, which are contiguous: squares of pairs are transposed
    IMAGES = "images"  # from the same pixel of two images
    COPY = "copy"  # from two pixels of a box that was packed without pairs before


class Packer(Enum):
    """How a box is packed."""

    COPY_ROWS = "the pixels of a row follow each other without a gap, here and there: a row is one copy"
    COPY_ZERO = "the same, with a zero after the channels of each pixel"
    COPY_PIXELS = "channels are contiguous: a pixel is a copy"
    INTERLEAVE = "few channels, whose pixels are contiguous, are interleaved"
    TRANSPOSE = "squares of contiguous pixels are transposed"
    TRANSPOSE_IMAGES = "the same, for pairs of a pixel of two images"
    ELEMENTS = "one element after another"
    PAIR_CHANNELS = "vectors of channels of two pixels are interleaved"
    PAIR_PIXELS = "squares of pairs of pixels are transposed"
    ROWS = "row-packed: channel after channel, rows of pixels as they are"


@dataclass(frozen=True)
class PackBox:
    """A box of a tensor, and the packed box that it becomes: [entries of the axes][channels, up to the pitch].

    An entry is a pixel, or a pair of pixels. Row-packed, it is [channels][entries, up to the pitch] instead.
    """

    name: str  # of the function that packs it
    axes: tuple[Packed, ...]
    channel_step: int  # elements between channels of the tensor
    pitch: int  # elements, or pairs, between entries of the packed box; if row-packed, elements between channels
    packer: Packer = Packer.ELEMENTS
    channels: int | None = None  # how many, if they are always as many
    zero_rest: bool = False  # the rest of the last vector of channels is zero
    pairing: Pairing = Pairing.NONE
    pair: tuple[int, int] = (1, 1)  # pixels between those of a pair, and between the first of a pair and of the next
    image_step: int | None = None  # elements from a pixel to that of the other image, if these are paired
    first: int | None = None  # where the last axis starts, if row-packed and always the same
    pieces: int = 1  # of each number, which lie a pitch apart: see ir/pieces.py

    @property
    def members(self) -> tuple[int, ...]:
        """How far from a pixel those that make its entry are, in elements."""
        return (0,) if self.image_step is None else (0, self.image_step)

    @property
    def entry_pitch(self) -> int:
        """Elements between the entries of the packed box."""
        if self.pairing in (Pairing.CHANNELS, Pairing.PIXELS):
            return 2 * self.pitch
        return self.pitch * len(self.members) * self.pieces

    @property
    def row_elements(self) -> int:
        """Elements of a packed row."""
        step = self.pair[1] if self.pairing in (Pairing.CHANNELS, Pairing.PIXELS) else 1
        return self.axes[-1].extent // step * self.entry_pitch

    @property
    def pixels(self) -> int:
        """Pixels of the box."""
        return prod(axis.extent for axis in self.axes)

    @property
    def flat(self) -> bool:
        """Whether pixels follow each other without a gap, in the tensor as in the packed box."""
        last = self.axes[-1]
        return self.pitch == self.channels == last.stride and last.step == len(self.members) == self.pieces == 1


def packer(box: PackBox, lanes: int, *, row_packed: bool = False, interleave: bool = False) -> Packer:
    """The packer for a box, with vectors of so many lanes.

    It may be asked for row-packing, or to interleave channels that are few and fill the pitch.
    """
    if row_packed:
        return Packer.ROWS
    if box.pairing is Pairing.CHANNELS:
        return Packer.PAIR_CHANNELS
    if box.pairing is Pairing.PIXELS:
        return Packer.PAIR_PIXELS
    last = box.axes[-1]
    if box.channel_step == 1:
        if box.flat:
            return Packer.COPY_ROWS
        follow = box.channels == last.stride == box.pitch - 1 and last.step == box.pieces == 1
        return Packer.COPY_ZERO if box.zero_rest and follow and lanes % box.pitch == 0 else Packer.COPY_PIXELS
    contiguous = last.stride == 1 and last.step <= MOST_STEP
    if interleave and box.channels is not None and contiguous:
        return Packer.INTERLEAVE
    if contiguous and transposable(lanes):
        return Packer.TRANSPOSE if box.image_step is None else Packer.TRANSPOSE_IMAGES
    return Packer.ELEMENTS


def transposable(lanes: int) -> bool:
    """Whether squares of so many lanes can be transposed."""
    return lanes >= 4 and lanes & (lanes - 1) == 0
