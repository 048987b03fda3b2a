"""Boxes of a tensor packed row by row: padding, layout and element type are dealt with here, and tiles need no bounds.

`pack_box` uses the packer that the box names. Copies and row-packing are in this file, transposes in
transpose.py, pairs of bf16 in pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.loops import each_vector
from ..ir.shuffle import interleave, shuffle
from ..ir.vectors import size_of
from ..plan.records import Packed
from .box import PackBox, Packer, Pairing
from .pairs import ROW, pair_channels, pair_copied, pair_pixels
from .transpose import interleaved, square, square_of_images, thinned

BOX = ("p:from", "p:to", "i:s0", "i:s1", "i:s2", "i:s3", "i:channels")
FEW = 8  # runs of a row, or vectors of one, that are written out without a loop. Origin not recorded
UNROLL = 8  # vectors of a pixel that are copied in one go. Origin not recorded


def zero(m: Module, n: Elements, name: str = "zero") -> Function:
    """A function that clears whole vectors: (address, elements)."""
    f = m.function(name, ["p:to", "i:count"])
    to, count = f.args
    with f.loop(0, count, n.lanes) as i:
        f.store("zeroinitializer", f.at(to, i, n.sum), n.vector, size_of(n.sum))
    return f


def pack_box(m: Module, n: Elements, box: PackBox, clear: Function) -> Function:
    """A function that packs a box: (tensor, packed, start coordinate of each axis, channels).

    Entries outside the tensor become zeros. Whole vectors are written, and up to a vector of pixels beyond the end.
    Pairs by a copy take one more argument: see `pair_copied`.
    """
    if box.packer is Packer.ROWS:
        return _pack_by_channel(m, n, box, clear)
    f = m.function(box.name, BOX)
    source, packed, *starts, channels = f.args
    if box.packer is Packer.PAIR_CHANNELS:
        pack_row = pair_channels(m, n, box)
    elif box.packer is Packer.PAIR_PIXELS:
        pack_row = pair_pixels(m, n, box, clear)
    else:
        pack_row = _row(m, n, box, clear)
    last, width = box.axes[-1], box.row_elements
    with _rows(m, f, box, starts) as (row, inside, offset):
        to = f.at(packed, f.mul(row, width), n.sum)
        branch = f.either(inside)
        start_row = f.at(source, offset, n.storage)
        if len(last.offsets) == 1:
            f.call(pack_row, start_row, to, f.add(starts[3], last.offsets[0]), channels)
        else:
            table = m.table(f"{box.name}_3", last.offsets)
            with f.loop(0, len(last.offsets)) as r:
                shift = f.load(f.at(table, r, "i64"), "i64", 8)
                run = f.at(to, f.mul(r, width // len(last.offsets)), n.sum)
                f.call(pack_row, start_row, run, f.add(starts[3], shift), channels)
        f.otherwise(branch)
        f.call(clear, to, width)
        f.join(branch)
    return pair_copied(m, n, box, f, clear) if box.pairing is Pairing.COPY else f


@contextmanager
def _rows(m: Module, f: Function, box: PackBox, starts: Sequence[Value]) -> Iterator[tuple[Value, str, Value]]:
    """Loop over the rows of a box: which it is, whether it lies in the tensor, and its place there in elements."""
    axes = box.axes
    steps = [1, 1, 1]
    for i in (1, 0):
        steps[i] = steps[i + 1] * axes[i + 1].extent
    with f.loop(0, axes[0].extent) as e0, f.loop(0, axes[1].extent) as e1, f.loop(0, axes[2].extent) as e2:
        offset: Value = 0
        inside = ""
        row: Value = 0
        for entry, axis, start, step, index in zip((e0, e1, e2), axes, starts, steps, range(3), strict=False):
            at = _coordinate(m, f, f"{box.name}_{index}", axis, (start, entry))
            ok = f.test("ult", at, axis.size)
            inside = ok if not inside else f.both(inside, ok)
            offset = f.add(offset, f.mul(at, axis.stride))
            row = f.add(row, f.mul(entry, step))
        yield row, inside, offset


def _coordinate(m: Module, f: Function, table: str, axis: Packed, place: tuple[Value, Value]) -> Value:
    """The tensor's coordinate of an entry of an axis: `place` is where the axis starts, and the entry."""
    start, entry = place
    if len(axis.offsets) == 1:
        return f.add(start, f.mul(entry, axis.step), axis.offsets[0])
    r, q = f.split(entry, [len(axis.offsets), axis.count])
    shift = f.load(f.at(m.table(table, axis.offsets), r, "i64"), "i64", 8)
    return f.add(start, f.mul(q, axis.step), shift)


# A row, pixel by pixel.


def _row(m: Module, n: Elements, box: PackBox, clear: Function) -> Function:
    """A function that packs pixels along the last axis: (row, packed, first coordinate, channels)."""
    f = m.function(f"{box.name}_row", ROW)
    _, to, first, _ = f.args
    axis, pitch = box.axes[-1], box.entry_pitch
    below = f.max(f.sub(0, first), 0)
    left = f.max(f.sub(axis.size, first), 0)
    if axis.step > 1:
        below, left = f.div(f.add(below, axis.step - 1), axis.step), f.div(f.add(left, axis.step - 1), axis.step)
    low = f.min(below, axis.count)
    high = f.max(low, f.min(left, axis.count))
    f.call(clear, to, f.mul(low, pitch))
    ROW_PACKERS[box.packer](f, n, box, low, high)
    f.call(clear, f.at(to, f.mul(high, pitch), n.sum), f.mul(f.sub(axis.count, high), pitch))
    return f


def _copy_rows(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """All pixels at once: they follow each other, here and there."""
    row, to, first, _ = f.args
    source = f.at(row, f.mul(f.add(first, low), box.pitch), n.storage)
    _copy(f, n, source, f.at(to, f.mul(low, box.pitch), n.sum), f.mul(f.sub(high, low), box.pitch))


def _copy_zero(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """Pixels that follow each other: as many at a time as a vector holds, with a zero after each."""
    row, to, first, _ = f.args
    known, pitch = box.pitch - 1, box.pitch
    group = n.lanes // pitch
    order = [n.lanes if c == known else i * known + c for i in range(group) for c in range(pitch)]
    with f.loop(low, high, group) as i:
        source = f.at(row, f.mul(f.add(first, i), known), n.storage)
        mask = n.mask(f, f.mul(f.min(f.sub(high, i), group), known))
        value = shuffle(f, n.vector, n.load(f, source, mask), "zeroinitializer", order)
        f.store(value, f.at(to, f.mul(i, pitch), n.sum), n.vector, size_of(n.sum))


def _copy_pixels(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """A pixel after another, each a copy of its channels."""
    row, to, first, channels = f.args
    axis = box.axes[-1]
    count = channels if box.channels is None or box.channels % n.lanes else box.channels
    with f.loop(low, high) as i:
        source = f.at(row, f.mul(f.add(first, f.mul(i, axis.step)), axis.stride), n.storage)
        _copy(f, n, source, f.at(to, f.mul(i, box.entry_pitch), n.sum), count)


def _copy(f: Function, n: Elements, source: str, to: str, count: Value) -> None:
    """Copy contiguous elements."""

    def move(c: Value, mask: str | None) -> None:
        n.put(f, n.load(f, f.at(source, c, n.storage), mask), f.at(to, c, n.sum))

    each_vector(f, n, count, UNROLL, move)


def _interleave(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """Vectors of pixels of a few channels. A short last one writes garbage beyond the row, as a short square does."""
    row, to, first, _ = f.args
    interleave_few = interleaved(f.module, n, box)
    with f.loop(low, high, n.lanes) as i:
        source = f.at(row, f.add(first, f.mul(i, box.axes[-1].step)), n.storage)
        f.call(interleave_few, source, f.at(to, f.mul(i, box.entry_pitch), n.sum), f.sub(high, i))


def _transpose(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """Squares of pixels by channels. A short last square writes garbage beyond the row, which whatever comes next
    overwrites.
    """
    row, to, first, channels = f.args
    m, step, pitch = f.module, box.axes[-1].step, box.entry_pitch
    transposed = square(m, n, box) if box.packer is Packer.TRANSPOSE else square_of_images(m, n, box)
    last = f.sub(channels, 1)
    with f.loop(0, channels, n.lanes) as c, f.loop(low, high, n.lanes) as i:
        source = f.at(row, f.add(f.mul(c, box.channel_step), first, f.mul(i, step)), n.storage)
        place = f.at(to, f.add(f.mul(i, pitch), f.mul(c, len(box.members))), n.sum)
        f.call(transposed, source, place, f.sub(high, i), f.sub(last, c))


def _elements(f: Function, n: Elements, box: PackBox, low: Value, high: Value) -> None:
    """One element after another, wherever they are."""
    row, to, first, channels = f.args
    axis, members = box.axes[-1], box.members
    with f.loop(low, high) as i:
        source = f.at(row, f.mul(f.add(first, f.mul(i, axis.step)), axis.stride), n.storage)
        pixel = f.at(to, f.mul(i, box.entry_pitch), n.sum)
        with f.loop(0, channels) as c:
            for t, shift in enumerate(members):
                value = n.load_one(f, f.at(source, f.add(f.mul(c, box.channel_step), shift), n.storage))
                n.put_one(f, value, f.at(pixel, f.add(f.mul(c, len(members)), t), n.sum))


ROW_PACKERS = {
    Packer.COPY_ROWS: _copy_rows,
    Packer.COPY_ZERO: _copy_zero,
    Packer.COPY_PIXELS: _copy_pixels,
    Packer.INTERLEAVE: _interleave,
    Packer.TRANSPOSE: _transpose,
    Packer.TRANSPOSE_IMAGES: _transpose,
    Packer.ELEMENTS: _elements,
}

# Row-packed: channel by channel.


def _pack_by_channel(m: Module, n: Elements, box: PackBox, clear: Function) -> Function:
    """A function that packs a box channel by channel: (tensor, packed, start coordinate of each axis, channels).

    The pixels of a row are contiguous in the tensor. Of two images, each entry is followed by that of the other one.
    Up to a vector is written beyond the end.
    """
    f = m.function(box.name, BOX)
    source, packed, *starts, channels = f.args
    last, members = box.axes[-1], len(box.members)
    begin: Value = starts[3] if box.first is None else box.first
    with f.loop(0, channels) as c, _rows(m, f, box, starts) as (row, inside, offset):
        to = f.at(packed, f.add(f.mul(c, box.pitch), f.mul(row, members * last.extent)), n.sum)
        start_row = f.at(source, f.add(f.mul(c, box.channel_step), offset), n.storage)
        branch = f.either(inside)
        if len(last.offsets) <= FEW:
            for r, offset_ in enumerate(last.offsets):
                here = f.at(to, f.mul(r, members * last.count), n.sum)
                _run(f, n, box, (start_row, here), f.add(begin, offset_))
        else:
            table = m.table(f"{box.name}_3", last.offsets)
            with f.loop(0, len(last.offsets)) as which:
                shift = f.load(f.at(table, which, "i64"), "i64", 8)
                here = f.at(to, f.mul(which, members * last.count), n.sum)
                _run(f, n, box, (start_row, here), f.add(begin, shift))
        f.otherwise(branch)
        f.call(clear, to, members * last.extent)
        f.join(branch)
    return f


def _run(f: Function, n: Elements, box: PackBox, places: tuple[str, str], start: Value) -> None:
    """A run of a row of one channel, from a coordinate on: `places` are the row in the tensor, and the run here."""
    row, to = places
    last, members = box.axes[-1], len(box.members)
    each = replace(n, lanes=n.lanes // members)
    wide = replace(n, lanes=each.lanes * last.step)

    def move(i: Value) -> None:
        at = f.add(start, f.mul(i, last.step))
        mask = wide.window(f, f.sub(0, at), f.sub(last.size, at))
        values = [thinned(f, each, f.at(row, f.add(at, s), n.storage), last.step, mask) for s in box.members]
        value = values[0] if members == 1 else interleave(f, each.vector, each.lanes, *values)
        f.store(value, f.at(to, f.mul(i, members), n.sum), n.vector, size_of(n.sum))

    if last.count <= FEW * each.lanes:
        for i in range(0, last.count, each.lanes):
            move(i)
        return
    with f.loop(0, last.count, each.lanes) as place:
        move(place)
