"""Output staging: sums that wait in a buffer, and are then written to the tensor all at once.

They are transposed where the pixels of a channel are contiguous in the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ...spec.problem import Ints
from ..emit.store import Results
from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Elements
from ..ir.shuffle import piece, row_order, transpose, transpose_pieces
from ..ir.vectors import size_of
from ..target import LINE
from .box import transposable


@dataclass(frozen=True)
class Square:
    """A square of sums, [pixels][pitch], that is transposed into the tensor."""

    channel_step: int  # elements between channels of the tensor
    pitch: int  # elements between pixels of the sums
    round_first: bool = False  # sums become elements of 16 bits before, so that a vector holds two pixels of each
    whole: bool = False  # there are always as many channels as lanes


class Unpacker(Enum):
    """How staged sums are written to the tensor."""

    SQUARES = "squares"  # pixels are contiguous there: squares of pixels by channels are transposed
    CHANNELS = "channels"  # channels are: vectors of them are copied
    ELEMENTS = "elements"  # nothing is: one after another


@dataclass(frozen=True)
class Staging:
    """How output staging lies in its buffer, [extents of the axes][pitch], and where it goes."""

    unpacker: Unpacker
    extents: Ints
    steps: Ints  # elements between neighbours along each axis of the tensor
    channel_step: int
    pitch: int
    one_row: bool  # rows follow each other, in the tensor as in the staging: they are one
    round_first: bool  # see Square
    whole: bool


def unpacker(channel_step: int, pixel_step: int, lanes: int) -> Unpacker:
    """How staged sums are written, given the elements between channels and between pixels of the tensor."""
    if channel_step == 1:
        return Unpacker.CHANNELS
    return Unpacker.SQUARES if pixel_step == 1 and transposable(lanes) else Unpacker.ELEMENTS


def unpack(m: Module, results: Results, staging: Staging) -> Function:
    """A function that writes staged sums to the tensor: (staging, tensor, counts of each axis, channels).

    Counts say how much of the staging is there.
    """
    f = m.function("unpack", ["p:from", "p:to", "i:n0", "i:n1", "i:n2", "i:n3", "i:channels"])
    source, to, *counts, _ = f.args
    n, extents, steps = results.elements, staging.extents, staging.steps
    n0, n1, n2, n3 = list[Value](counts)
    transposed = None
    if staging.unpacker is Unpacker.SQUARES:
        if staging.one_row:
            n2, n3 = 1, f.mul(n2, n3)
        square = Square(staging.channel_step, staging.pitch, staging.round_first, staging.whole)
        transposed = unpack_square(m, "unpack_square", results, square)
    with f.loop(0, n0) as e0, f.loop(0, n1) as e1, f.loop(0, n2) as e2:
        row = f.add(f.mul(f.add(f.mul(f.add(f.mul(e0, extents[1]), e1), extents[2]), e2), extents[3] * staging.pitch))
        row_from = f.at(source, row, n.sum)
        row_to = f.at(to, f.add(f.mul(e0, steps[0]), f.mul(e1, steps[1]), f.mul(e2, steps[2])), n.storage)
        if transposed is not None:
            _row_of_squares(f, n, staging, transposed, (row_from, row_to, n3))
        elif staging.unpacker is Unpacker.CHANNELS:
            _row_of_channels(f, results, staging, (row_from, row_to, n3))
        else:
            _row_of_elements(f, results, staging, (row_from, row_to, n3))
    return f


Row = tuple[str, str, Value]
"""A row of pixels: where it begins in the staging and in the tensor, and how many there are."""


def _row_of_squares(f: Function, n: Elements, staging: Staging, square: Function, row: Row) -> None:
    source, to, pixels = row
    channels = f.args[-1]
    side = n.lanes * (2 if staging.round_first else 1)
    with f.loop(0, channels, n.lanes) as c, f.loop(0, pixels, side) as i:
        square_from = f.at(source, f.add(f.mul(i, staging.pitch), c), n.sum)
        square_to = f.at(to, f.add(f.mul(c, staging.channel_step), i), n.storage)
        f.call(square, square_from, square_to, f.sub(pixels, i), f.min(f.sub(channels, c), n.lanes))


def _row_of_channels(f: Function, results: Results, staging: Staging, row: Row) -> None:
    """Vectors of channels, which are contiguous."""
    n, (source, to, pixels) = results.elements, row
    channels = f.args[-1]
    with f.loop(0, pixels) as i:
        pixel = f.at(source, f.mul(i, staging.pitch), n.sum)
        place = f.at(to, f.mul(i, staging.steps[3]), n.storage)
        whole = f.mul(f.div(channels, n.lanes), n.lanes)
        with f.loop(0, whole, n.lanes) as c:
            value = f.load(f.at(pixel, c, n.sum), n.vector, size_of(n.sum))
            results.store(f, value, f.at(place, c, n.storage))
        rest = f.sub(channels, whole)
        with f.when(f.test("ne", rest, 0)):
            value = f.load(f.at(pixel, whole, n.sum), n.vector, size_of(n.sum))
            results.store(f, value, f.at(place, whole, n.storage), n.mask(f, rest))


def _row_of_elements(f: Function, results: Results, staging: Staging, row: Row) -> None:
    n, (source, to, pixels) = results.elements, row
    with f.loop(0, pixels) as i, f.loop(0, f.args[-1]) as c:
        value = f.load(f.at(source, f.add(f.mul(i, staging.pitch), c), n.sum), n.sum, size_of(n.sum))
        place = f.at(to, f.add(f.mul(i, staging.steps[3]), f.mul(c, staging.channel_step)), n.storage)
        results.store_one(f, value, place)


def transposed_sums(f: Function, n: Elements, rows: Sequence[str]) -> tuple[list[str], Elements]:
    """Vectors of sums, transposed: for each lane the vector of its sums, and as which elements it is written.

    There are as many vectors as lanes; or twice as many, whose sums are rounded to 16 bits before, two to a vector.
    """
    if len(rows) == n.lanes:
        return transpose(f, list(rows), n.lanes, n.sum), n
    raw = Elements(n.dtype, len(rows), "i16", n.converts_f16)
    twos = [n.narrow_two(f, rows[a], rows[b]) for a, b in row_order(n.lanes, 2, raw.sum)]
    return transpose(f, twos, raw.lanes, raw.sum), raw


def unpack_square(m: Module, name: str, results: Results, square: Square) -> Function:
    """A function that transposes a square of sums into the tensor: (sums, tensor, pixels and channels that are there).

    If sums are rounded first, it has twice as many pixels as channels.
    """
    if square.round_first and results.accumulate:
        raise ValueError("results that are added to others are not rounded before")
    f = m.function(name, ["p:from", "p:to", "i:pixels", "i:channels"])
    n, rounded = results.elements, list[str]()
    if square.round_first:
        places = range(2 * n.lanes)
        rows = [f.load(f.at(f.args[0], i * square.pitch, n.sum), n.vector, size_of(n.sum)) for i in places]
        rounded, out = transposed_sums(f, n, rows)
        results = replace(results, elements=out)
    _UnpackSquare(f, n, results, square, rounded).write()
    return f


class _UnpackSquare(NamedTuple):
    """`unpack_square` while it is written."""

    f: Function
    sums: Elements
    results: Results
    square: Square
    rounded: list[str]  # the vectors to write, if sums are rounded first

    def write(self) -> None:
        """All channels at once, or by way of the stack as many as there are."""
        f, results, out = self.f, self.results, self.results.elements
        _, _, pixels, channels = f.args
        if results.stream:
            # Channels may be aligned in any way, so each is tested for itself.
            self._by_memory(lambda value, place: results.store_streamed(f, value, place, pixels))
            return
        mask = out.mask(f, pixels)
        if out.lanes * size_of(out.sum) < LINE:  # where vectors are short, a masked store may be many branches
            self._by_memory(lambda value, place: results.store(f, value, place, mask))
            return
        branch = None if self.square.whole else f.either(f.test("sge", channels, self.sums.lanes))
        for i, value in enumerate(self._vectors()):
            results.store(f, value, self._place(i), mask)
        if branch is not None:
            f.otherwise(branch)
            self._by_memory(lambda value, place: results.store(f, value, place, mask))
            f.join(branch)

    def _place(self, channel: Value) -> str:
        """Where a channel begins in the tensor."""
        f = self.f
        return f.at(f.args[1], f.mul(channel, self.square.channel_step), self.sums.storage)

    def _vectors(self) -> Iterator[str]:
        """For each channel, a vector of its pixels; a few channels are transposed just before they are wanted."""
        f, n = self.f, self.sums
        if self.square.round_first:
            yield from self.rounded
            return
        few = piece(n.lanes, n.sum)
        for c in range(0, n.lanes, few):
            places = [f.at(f.args[0], i * self.square.pitch + c, n.sum) for i in range(n.lanes)]
            yield from transpose_pieces(f, [f.load(p, vector(few, n.sum), size_of(n.sum)) for p in places], n.sum)

    def _by_memory(self, write: Callable[[str, str], None]) -> None:
        """Keep the vectors on the stack, and write those of the channels that are there."""
        f, out = self.f, self.results.elements
        item = size_of(out.sum)
        square = f.name_value()
        f.allocas.append(f"{square} = alloca [{self.sums.lanes} x {out.vector}], align {LINE}")
        for i, value in enumerate(self._vectors()):
            f.store(value, f.at(square, i, out.vector), out.vector, LINE if out.lanes * item >= LINE else item)
        with f.loop(0, f.args[3]) as c:
            value = f.load(f.at(square, c, out.vector), out.vector, item)
            write(value, self._place(c))
