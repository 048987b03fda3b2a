"""Packing by transposes: the tensor has the pixels of a channel contiguous, the packed box the channels of a pixel.

A square has as many channels as lanes. Few channels are interleaved instead. Pixels may be evenly spaced in the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Elements
from ..ir.loops import each_piece
from ..ir.shuffle import interleave, piece, shuffle, transpose, transpose_pieces
from ..ir.vectors import size_of
from .box import PackBox, Pairing

SQUARE = ("p:from", "p:to", "i:pixels", "i:last")


def thinned(f: Function, n: Elements, place: str, step: int, mask: str | None) -> str:
    """A vector of elements that lie `step` apart: a longer one is read, by a mask, thinned out and then widened.

    LLVM 22 miscompiles the other order: f16 that is widened first, then thinned to a fourth and interleaved over four
    channels.
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
    members, unit = (2, "float") if box.pairing is Pairing.PIXELS else (1, n.storage)
    few = replace(n, lanes=members * piece(n.lanes, unit), sum=n.storage)
    _Square(f, n, box, members, unit, few).write()
    return f


class _Square(NamedTuple):
    """`square` while it is written: channels by pixels of the tensor become pixels by channels."""

    f: Function
    n: Elements
    box: PackBox
    members: int  # pixels of an entry
    unit: str  # the type of an entry's element while it is transposed
    few: Elements  # a piece of a channel: the pixels that are transposed at a time

    def write(self) -> None:
        """The whole square if all of it is there; else a piece at a time, as far as there are pixels."""
        f, n, box, *_ = self
        *_, pixels, last = f.args
        side, size = self.members * n.lanes, self.few.lanes
        whole = self.members == 1 and box.channels is not None and box.channels % n.lanes == 0
        complete = f.test("sge", pixels, side)
        branch = f.either(complete if whole else f.both(complete, f.test("sge", last, n.lanes - 1)))
        known: list[Value] = [i * box.channel_step for i in range(n.lanes)]
        for first in range(0, side, size):
            self._transpose(first, self._rows(first, size, known))
        f.otherwise(branch)
        there = known if whole else [f.mul(f.min(last, i), box.channel_step) for i in range(n.lanes)]

        def some(first: Value, count: Value) -> None:
            self._transpose(first, self._rows(first, count, there, beyond=not whole))

        each_piece(f, f.min(pixels, side), size, some)
        f.join(branch)

    def _rows(self, first: Value, count: Value, channels: Sequence[Value], *, beyond: bool = False) -> list[str]:
        """So many pixels of each channel; `beyond` says that there may be channels beyond the last."""
        f, n, box, members, unit, few = self
        source, _, _, last = f.args
        step, kind = box.axes[-1].step, vector(few.lanes // members, unit)
        wide = replace(few, lanes=few.lanes * step)
        mask = wide.window(f, 0, f.add(f.mul(f.sub(count, 1), step), 1))
        rows = []
        for i, channel in enumerate(channels):
            at = f.at(source, f.add(channel, f.mul(first, step)), n.storage)
            row = thinned(f, few, at, step, mask)
            if members > 1:
                row = f.op(f"bitcast {few.vector} {row} to {kind}")
            if box.zero_rest and beyond:
                row = f.op(f"select i1 {f.test('sle', i, last)}, {kind} {row}, {kind} zeroinitializer")
            rows.append(row)
        return rows

    def _transpose(self, first: Value, rows: list[str]) -> None:
        """Transpose pieces of all channels, and write them."""
        f, n, box, members, unit, _ = self
        element = n.sum if members == 1 else unit
        entry = f.div(first, members)
        for i, row in enumerate(transpose_pieces(f, rows, unit)):
            value = row if members > 1 else n.widen(f, row, n.lanes)
            place = f.at(f.args[1], f.mul(f.add(entry, i), box.entry_pitch // members), element)
            if members > 1:
                f.store(value, place, vector(n.lanes, element), size_of(element))
            else:
                n.put(f, value, place)


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


def interleaved(m: Module, n: Elements, box: PackBox) -> Function:
    """A function that interleaves a vector of pixels of a few channels: (tensor, packed, pixels that are there).

    Channels beyond those of the tensor, up to the pitch, are zeros.
    """
    f = m.function(f"{box.name}_interleave", ["p:from", "p:to", "i:pixels"])
    source, to, pixels = f.args
    step, pitch, channels = box.axes[-1].step, box.pitch, box.channels or 0
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
