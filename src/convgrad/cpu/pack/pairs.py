"""How bf16 are packed in pairs, for the instruction that multiplies two and adds both products.

A pair is two neighbouring elements of 16 bits in the packed box, so an entry is [channel][first, second]. `Pairing`
says where the two come from:

- IMAGES: the same pixel of two images, `image_step` apart. Squares of them: `transpose.square_of_images`; row-packed or
  an element at a time: `rows`.
- CHANNELS: pixels whose channels are contiguous. Vectors of two pixels are interleaved: `pair_channels`.
- PIXELS: neighbouring pixels, contiguous in the tensor. They are pairs already, and squares of pairs are transposed:
  `pair_pixels`.
- COPY: pixels that were packed without pairs before: `pair_copied`.

Where pixels are row-packed without images, neighbours are pairs as they lie. Pairs of weights are made by `weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.loops import each_vector
from ..ir.shuffle import interleave
from ..ir.vectors import size_of
from .box import PackBox
from .transpose import square

ROW = ("p:row", "p:to", "i:first", "i:channels")
UNROLL = 4  # vectors of two pixels that are interleaved in one go. Origin not recorded


def pair_channels(m: Module, n: Elements, box: PackBox) -> Function:
    """A function that packs pairs of pixels along the last axis: (row, packed, first coordinate, channels).

    With `box.pair` = (distance, step), entry e holds pixels e*step and e*step + distance, channel by channel.
    """
    f = m.function(f"{box.name}_row", ROW)
    _PairChannels(f, n, box).write()
    return f


class _PairChannels(NamedTuple):
    """`pair_channels` while it is written."""

    f: Function
    n: Elements
    box: PackBox

    def write(self) -> None:
        """All entries of a row."""
        f, box = self.f, self.box
        _, _, first, channels = f.args
        axis, (distance, step) = box.axes[-1], box.pair
        entries = axis.extent // step
        if step == 1 and box.flat:
            # Entries follow each other like the pixels: those whose pixels both lie in the tensor are one.
            low = f.min(f.max(f.sub(0, first), 0), entries)
            high = f.max(low, f.min(f.sub(axis.size - distance, first), entries))
            with f.loop(0, low) as e:
                self._partly(*self._places(e))
            self._entries(first, low, high)
            with f.loop(high, entries) as e:
                self._partly(*self._places(e))
            return
        with f.loop(0, entries) as e:
            inside, pixels, entry = self._places(e)
            branch = f.either(f.both(*inside))
            self._wholly(channels if box.channels is None else box.channels, pixels, entry)
            f.otherwise(branch)
            self._partly(inside, pixels, entry)
            f.join(branch)

    def _places(self, e: Value) -> tuple[list[str], list[str], str]:
        """Of an entry: whether each pixel lies in the tensor, where each pixel begins, and where the entry does."""
        f, axis, (distance, step) = self.f, self.box.axes[-1], self.box.pair
        row, to, first, _ = f.args
        at = [f.add(first, f.mul(f.add(f.mul(e, step), shift), axis.step)) for shift in (0, distance)]
        pixels = [f.at(row, f.mul(i, axis.stride), self.n.storage) for i in at]
        inside = [f.test("ult", i, axis.size) for i in at]
        return inside, pixels, f.at(to, f.mul(e, self.box.entry_pitch), self.n.sum)

    def _entries(self, first: Value, low: Value, high: Value) -> None:
        """All entries from `low` to `high` - 1, as if they were one."""
        f, n, pitch = self.f, self.n, self.box.pitch
        row, to, *_ = f.args
        pixels = [f.at(row, f.mul(f.add(first, low, shift), pitch), n.storage) for shift in (0, self.box.pair[0])]
        self._wholly(f.mul(f.sub(high, low), pitch), pixels, f.at(to, f.mul(low, self.box.entry_pitch), n.sum))

    def _wholly(self, count: Value, pixels: list[str], entry: str) -> None:
        """So many elements of two pixels that both lie in the tensor."""
        each_vector(self.f, self.n, count, UNROLL, lambda c, mask: self._interleave(c, pixels, entry, (mask, mask)))

    def _partly(self, inside: list[str], pixels: list[str], entry: str) -> None:
        """An entry with a pixel that may lie outside: then it is zero, and nothing of it is read."""
        f, n = self.f, self.n
        channels = f.args[3]
        there = [f.choose(i, channels, 0) for i in inside]
        with f.loop(0, channels, n.lanes) as c:
            self._interleave(c, pixels, entry, [n.mask(f, f.sub(count, c)) for count in there])

    def _interleave(self, c: Value, pixels: list[str], entry: str, masks: Sequence[str | None]) -> None:
        """A vector of channels of each pixel, from channel `c` on."""
        f, n = self.f, self.n
        two = [n.load(f, f.at(p, c, n.storage), mask) for p, mask in zip(pixels, masks, strict=True)]
        place = f.at(entry, f.mul(c, 2), n.sum)
        f.store(interleave(f, n.vector, n.lanes, *two), place, f"<{2 * n.lanes} x {n.sum}>", size_of(n.sum))


def pair_pixels(m: Module, n: Elements, box: PackBox, clear: Function) -> Function:
    """A function that packs pairs of neighbouring pixels: (row, packed, first coordinate, channels).

    Entry e holds pixels 2*e and 2*e + 1, channel by channel. The first coordinate is not negative. A short last square
    writes garbage beyond the row, which whatever comes next overwrites.
    """
    f = m.function(f"{box.name}_row", ROW)
    row, to, first, channels = f.args
    axis = box.axes[-1]
    there = f.min(f.max(f.sub(axis.size, first), 0), axis.count)
    entries = f.div(f.add(there, 1), 2)
    transposed = square(m, n, box)
    last = f.sub(channels, 1)
    with f.loop(0, channels, n.lanes) as c, f.loop(0, entries, n.lanes) as e:
        source = f.at(row, f.add(f.mul(c, box.channel_step), first, f.mul(e, 2)), n.storage)
        place = f.at(to, f.mul(f.add(f.mul(e, box.pitch), c), 2), n.sum)
        f.call(transposed, source, place, f.sub(there, f.mul(e, 2)), f.sub(last, c))
    width = box.entry_pitch
    f.call(clear, f.at(to, f.mul(entries, width), n.sum), f.mul(f.sub(axis.count // 2, entries), width))
    return f


def pair_copied(m: Module, n: Elements, box: PackBox, packing: Function, clear: Function) -> Function:
    """A function that packs a box by `packing`, and then its pixels in pairs: the arguments of `packing`, then memory
    for the pixels.

    With `box.pair` = (distance, step), entry e holds pixels e*step and e*step + distance, channel by channel.
    """
    f = m.function(f"{box.name}_pairs", ["p:from", "p:to", "i:s0", "i:s1", "i:s2", "i:s3", "i:channels", "p:raw"])
    source, to, *start, channels, raw = f.args
    pitch, (distance, step) = box.pitch, box.pair
    f.call(packing, source, raw, *start, channels)
    f.call(clear, f.at(raw, box.pixels * pitch, n.sum), distance * pitch)
    with f.loop(0, box.pixels // step) as e, f.loop(0, channels, n.lanes) as c:
        at = f.add(f.mul(e, step * pitch), c)
        two = [f.load(f.at(raw, f.add(at, shift), n.sum), n.vector, 2) for shift in (0, distance * pitch)]
        place = f.at(to, f.add(f.mul(e, pitch), c), "float")
        f.store(interleave(f, n.vector, n.lanes, *two), place, f"<{2 * n.lanes} x {n.sum}>", 4)
    return f
