"""Packing by transposes: the tensor has the pixels of a channel contiguous, the packed box the channels of a pixel.

A square has as many channels as lanes. Few channels are interleaved instead. Pixels may be evenly spaced in the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Elements
from ..ir.loops import each_piece
from ..ir.shuffle import interleave, piece, shuffle, transpose, transpose_pieces
from ..ir.vectors import size_of
from .box import PackBox, Pairing

SQUARE = ("p:from", "p:to", "i:pixels", "i:last")


def thinned(f: Function, n: Elements, place: str, step: int, mask: str | None) -> str:
    """A vector of elements that lie `step` apart: a longer one is read, by a mask, thinned out and then widened.

    Widened first, four channels of f16 that are thinned to a fourth and interleaved come out wrong: LLVM 22 errs.
    """
    wide = replace(n, lanes=n.lanes * step, sum=n.storage)
    value = wide.load(f, place, mask)
    if step > 1:
        value = shuffle(f, wide.vector, value, value, [i * step for i in range(n.lanes)])
    return n.widen(f, value, n.lanes)


def square(m: Module, n: Elements, box: PackBox) -> Function:
    """A function that packs one square: (tensor, packed, pixels that are there, last channel that is there).

    Channels beyond the last repeat it, or are zeros if `box.zero_rest`. A few pixels are transposed at a time, and then
    widened. Pairs of neighbouring pixels, of 16 bits, are transposed as one number of 32.
    """
    f = m.function(f"{box.name}_square", SQUARE)
    return _Square(f, n, box).function


class _Square:
    """A square while it is written: channels by pixels of the tensor, pixels by channels of the packed box."""

    def __init__(self, f: Function, n: Elements, box: PackBox) -> None:
        self.function, self.n, self.box = f, n, box
        self.step = box.axes[-1].step
        pairs = box.pairing is Pairing.PIXELS
        self.unit, self.members = ("float", 2) if pairs else (n.storage, 1)
        self.piece = piece(n.lanes, self.unit)  # entries that are transposed at a time
        self.read = replace(n, lanes=self.members * self.piece, sum=n.storage)
        *_, pixels, last = f.args
        whole = not pairs and box.channels is not None and box.channels % n.lanes == 0
        self.all = [i * box.channel_step for i in range(n.lanes)]
        side = self.members * n.lanes
        full = f.test("sge", pixels, side)
        branch = f.either(full if whole else f.both(full, f.test("sge", last, n.lanes - 1)))
        for first in range(0, side, self.read.lanes):
            self._transpose(first, self.read.lanes, self.all)
        f.otherwise(branch)
        there = self.all if whole else [f.mul(f.min(last, i), box.channel_step) for i in range(n.lanes)]
        each_piece(f, f.min(pixels, side), self.read.lanes, lambda first, count: self._transpose(first, count, there))
        f.join(branch)

    def _transpose(self, first: Value, count: Value, channels: Sequence[Value]) -> None:
        """Transpose so many pixels of a piece, of the channels at these offsets."""
        f, n, read = self.function, self.n, self.read
        to = f.args[1]
        last_pixel = f.mul(f.sub(count, 1), self.step)
        mask = replace(read, lanes=read.lanes * self.step).window(f, 0, f.add(last_pixel, 1))
        rows = self._rows(first, channels, mask)
        element = n.sum if self.members == 1 else self.unit
        entry = f.div(first, self.members)
        for i, row in enumerate(transpose_pieces(f, rows, self.unit)):
            value = row if self.members > 1 else n.widen(f, row, n.lanes)
            place = f.at(to, f.mul(f.add(entry, i), self.box.entry_pitch // self.members), element)
            f.store(value, place, vector(n.lanes, element), size_of(element))

    def _rows(self, first: Value, channels: Sequence[Value], mask: str | None) -> list[str]:
        """A piece of each channel."""
        f, read, kind = self.function, self.read, vector(self.piece, self.unit)
        source, _, _, last = f.args
        rows = []
        for i, channel in enumerate(channels):
            at = f.at(source, f.add(channel, f.mul(first, self.step)), self.n.storage)
            row = thinned(f, read, at, self.step, mask)
            if self.members > 1:
                row = f.op(f"bitcast {read.vector} {row} to {kind}")
            if self.box.zero_rest and channels is not self.all:
                row = f.op(f"select i1 {f.test('sle', i, last)}, {kind} {row}, {kind} zeroinitializer")
            rows.append(row)
        return rows


def square_of_images(m: Module, n: Elements, box: PackBox) -> Function:
    """`square` for pairs of a pixel of two images: two elements are transposed as one."""
    f = m.function(f"{box.name}_square", SQUARE)
    source, to, pixels, last = f.args
    step = box.axes[-1].step
    wide = replace(n, lanes=n.lanes * step)
    mask = wide.mask(f, f.add(f.mul(f.sub(pixels, 1), step), 1))
    kind = vector(n.lanes, "float")
    rows = []
    for i in range(n.lanes):
        channel = f.mul(f.min(last, i), box.channel_step)
        two = [thinned(f, n, f.at(source, f.add(channel, s), n.storage), step, mask) for s in box.members]
        both = interleave(f, n.vector, n.lanes, *two)
        rows.append(f.op(f"bitcast {vector(2 * n.lanes, n.sum)} {both} to {kind}"))
    for i, row in enumerate(transpose(f, rows, n.lanes, "float")):
        f.store(row, f.at(to, i * box.entry_pitch, n.sum), kind, size_of(n.sum))
    return f


def interleaved(m: Module, n: Elements, box: PackBox, channels: int) -> Function:
    """A function that interleaves a vector of pixels of a few channels: (tensor, packed, pixels that are there).

    Channels beyond those of the tensor, up to the pitch, are zeros.
    """
    f = m.function(f"{box.name}_interleave", ["p:from", "p:to", "i:pixels"])
    source, to, pixels = f.args
    step, pitch = box.axes[-1].step, box.pitch
    wide = replace(n, lanes=n.lanes * step)
    mask = wide.mask(f, f.add(f.mul(f.sub(pixels, 1), step), 1))
    rows = [thinned(f, n, f.at(source, c * box.channel_step, n.storage), step, mask) for c in range(channels)]
    rows += ["zeroinitializer"] * (pitch - channels)
    for v in range(pitch):
        places = [divmod(v * n.lanes + lane, pitch) for lane in range(n.lanes)]  # (pixel, channel) of each lane
        value = shuffle(f, n.vector, rows[0], rows[0], [pixel for pixel, _ in places])
        for c, row in enumerate(rows[1:], start=1):
            order = [n.lanes + pixel if c == at else lane for lane, (pixel, at) in enumerate(places)]
            value = shuffle(f, n.vector, value, row, order)
        f.store(value, f.at(to, v * n.lanes, n.sum), n.vector, size_of(n.sum))
    return f
