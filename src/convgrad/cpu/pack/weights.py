"""Weights packed for the tiles of a gather: for each tap and step over the channels in, one run of the lanes.

A panel is the weights of one block of channels out: [tap][step][lane]. A step is a channel in, or a pair of them. The
weights of a tensor may have any strides, so there are several packers; the plan says which one is used.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from math import ceil

from ...spec.problem import Ints
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.loops import each_piece
from ..ir.shuffle import interleave, piece, transpose_pieces
from ..ir.vectors import size_of
from ..plan.records import LaneGroups


class WeightPacker(Enum):
    """How a panel is made of weights."""

    COPY = "copy"  # channels out are contiguous: vectors of them are copied
    TRANSPOSE_CHANNELS = "transpose channels"  # channels in are: squares of channels out by channels in are transposed
    TRANSPOSE_TAPS = "transpose taps"  # taps are: squares of channels out by taps are transposed
    ELEMENTS = "elements"  # anything else: one after another


@dataclass(frozen=True)
class PackWeights:
    """What is packed, and how."""

    packer: WeightPacker
    elements: Elements
    strides: Ints  # of (group, channel out, channel in)
    tap_offsets: Ints  # in the tensor
    outputs: int  # channels out, in a group
    channels: int  # channels in, in a group; an even number if they are taken in pairs
    chunk: int  # channels in of a panel
    pairs: bool
    odd: bool  # the last channel in does not exist: it is packed as zeros
    block: int  # lanes of a block of channels out
    last_block: int  # lanes of the last one
    lane_groups: LaneGroups | None  # groups side by side in the lanes
    fold: Ints | None  # of each tap and lane: 0 if it has no weight; else 2*n + 1 if that is n-th in the tensor
    part: int | None = None  # steps over the channels in that are packed at a time; None: all those of a chunk
    tap_part: int | None = None  # taps that are packed at a time; None: all

    @property
    def per_step(self) -> int:
        """Channels in of a step."""
        return 2 if self.pairs else 1

    @property
    def outputs_first(self) -> bool:
        """Whether channels out are the outer ones in the tensor, and are in the loops that follow it."""
        return self.strides[1] > self.strides[2]

    @property
    def parts(self) -> int:
        """Parts in which a panel is packed."""
        return self.tap_parts * self.step_parts

    @property
    def tap_parts(self) -> int:
        """Parts of the taps."""
        return ceil(len(self.tap_offsets) / (self.tap_part or len(self.tap_offsets)))

    @property
    def step_parts(self) -> int:
        """Parts of the steps."""
        return 1 if self.part is None else ceil(min(self.chunk, self.channels) / self.per_step / self.part)

    @property
    def lanes(self) -> int:
        """Lanes of a vector."""
        return self.elements.lanes

    @property
    def raw(self) -> Elements:
        """The elements as they are moved: those of pairs keep their 16 bits."""
        return replace(self.elements, sum="i16") if self.pairs else self.elements


def block_lanes(f: Function, p: PackWeights, block: Value) -> Value:
    """Lanes of a block of channels in the packed weights."""
    if p.last_block == p.block:
        return p.block
    return f.choose(f.test("eq", block, ceil(p.outputs / p.block) - 1), p.last_block, p.block)


@dataclass(frozen=True)
class _Panel:
    """A panel while code is written that packs it."""

    f: Function
    source: str  # where the weights of the group begin
    to: str
    first: Value  # channel out of the first lane
    last: Value  # lane of the last channel out; it may be beyond this panel
    lanes: Value
    channel: Value  # first channel in
    steps: Value
    tap_steps: Value  # between the taps of the panel
    taps: tuple[Value, Value]  # the first, and the one after the last

    def inner(self, p: PackWeights, step: Value) -> Value:
        """The first channel in of a step."""
        return self.f.add(self.channel, self.f.mul(step, p.per_step))

    def outer(self, lane: Value) -> Value:
        """The channel out of a lane; those beyond the last one repeat it."""
        return self.f.add(self.first, self.f.min(lane, self.last))


def pack_weights(m: Module, p: PackWeights, tap_offsets: str) -> Function:
    """A function that packs one panel: (weights, panel, group, block, chunk). If panels are packed in parts, the last
    argument counts these, of all chunks.

    `tap_offsets` is the address of a table of them. Lanes beyond the last channel hold anything.
    """
    f = m.function("pack_weights", ["p:from", "p:to", "i:group", "i:block", "i:chunk"])
    source, to, group, block, chunk = f.args
    base = f.at(source, f.mul(group, p.strides[0]), p.elements.storage)
    first = f.mul(block, p.block)
    lanes = block_lanes(f, p, block)
    last = f.sub(f.sub(p.outputs, 1), first)
    number, tap, part = (chunk, 0, 0) if p.parts == 1 else _part_numbers(f, p, chunk)
    done, tap = f.mul(part, p.part or 0), f.mul(tap, p.tap_part or 0)
    to = f.at(to, f.mul(done, lanes), p.elements.sum)
    channel = f.mul(number, p.chunk)
    steps = tap_steps = f.div(f.min(f.sub(p.channels, channel), p.chunk), p.per_step)
    if p.part is not None:
        channel, steps = f.add(channel, f.mul(done, p.per_step)), f.min(f.sub(tap_steps, done), p.part)
    count = len(p.tap_offsets)
    taps = (tap, count if p.tap_part is None else f.min(f.add(tap, p.tap_part), count))
    panel = _Panel(f, base, to, first, last, lanes, channel, steps, tap_steps, taps)
    if p.packer is WeightPacker.TRANSPOSE_TAPS:
        _transpose_taps(m, p, panel)
    elif p.packer is WeightPacker.TRANSPOSE_CHANNELS:
        _transpose_channels(m, p, panel, tap_offsets)
    elif p.packer is WeightPacker.COPY:
        _copy(p, panel, tap_offsets)
    else:
        _elements(m, p, panel, tap_offsets)
    return f


def _part_numbers(f: Function, p: PackWeights, index: Value) -> list[Value]:
    """Of a part of all chunks: which chunk, which part of its taps, and which of its steps."""
    sizes = [ceil(p.channels / p.chunk), p.tap_parts, p.step_parts]
    several = [i for i, size in enumerate(sizes) if size > 1]
    digits = dict(zip(several, f.split(index, [sizes[i] for i in several]), strict=True))
    return [digits.get(i, 0) for i in range(3)]


# Channels out are contiguous.


def _copy(p: PackWeights, panel: _Panel, tap_offsets: str) -> None:
    """Vectors of channels out, copied."""
    f, elements = panel.f, p.elements
    with f.loop(*panel.taps) as tap:
        offset = f.load(f.at(tap_offsets, tap, "i64"), "i64", 8)
        to = f.at(panel.to, f.mul(f.mul(tap, panel.tap_steps), panel.lanes), elements.sum)
        with f.loop(0, panel.steps) as step:
            inner = panel.inner(p, step)
            source = f.at(panel.source, f.add(offset, panel.first, f.mul(inner, p.strides[2])), elements.storage)
            _copy_step(p, panel, source, f.at(to, f.mul(step, panel.lanes), elements.sum))


def _copy_step(p: PackWeights, panel: _Panel, source: str, to: str) -> None:
    """The lanes of one step: of a pair of channels in, those of both are interleaved."""
    f, elements, raw = panel.f, p.elements, p.raw
    with f.loop(0, panel.lanes, p.lanes) as lane:
        mask = None if p.outputs % p.lanes == 0 else elements.mask(f, f.sub(f.add(panel.last, 1), lane))
        place = f.at(to, lane, elements.sum)
        if not p.pairs:
            value = elements.load(f, f.at(source, lane, elements.storage), mask)
            f.store(value, place, elements.vector, size_of(elements.sum))
        else:
            two = [raw.load(f, f.at(source, f.add(lane, j * p.strides[2]), "i16"), mask) for j in range(2)]
            f.store(interleave(f, raw.vector, p.lanes, *two), place, f"<{2 * p.lanes} x i16>", 4)


# Channels in are contiguous.


def _transpose_channels(m: Module, p: PackWeights, panel: _Panel, tap_offsets: str) -> None:
    """Squares of channels out by channels in, transposed."""
    f, elements = panel.f, p.elements
    transpose = _channel_square(m, p)
    with f.loop(*panel.taps) as tap:
        offset = f.load(f.at(tap_offsets, tap, "i64"), "i64", 8)
        to = f.at(panel.to, f.mul(f.mul(tap, panel.tap_steps), panel.lanes), elements.sum)
        with f.loop(0, panel.lanes, p.lanes) as lane, f.loop(0, panel.steps, p.lanes) as step:
            inner = panel.inner(p, step)
            corner = f.add(f.mul(panel.outer(lane), p.strides[1]), offset, inner)
            place = f.at(to, f.add(f.mul(step, panel.lanes), lane), elements.sum)
            left = f.max(f.sub(panel.last, lane), 0)
            count = f.min(f.sub(panel.steps, step), p.lanes)
            f.call(transpose, f.at(panel.source, corner, elements.storage), place, left, count, panel.lanes)


def _channel_square(m: Module, p: PackWeights) -> Function:
    """A function that transposes one square: (weights, panel, last channel out, steps, elements between them in the
    panel).

    A pair of channels in is moved as one number of 32 bits.
    """
    f = m.function("transpose_channels", ["p:from", "p:to", "i:left", "i:count", "i:step"])
    source, to, left, count, step = f.args
    unit = replace(p.elements, dtype="f32") if p.pairs else p.elements
    few = replace(unit, lanes=piece(p.lanes, unit.storage), sum=unit.storage)
    out = [f.mul(f.min(left, i), p.strides[1]) for i in range(p.lanes)]
    # Squares are far apart in the tensor: meanwhile, that of the next channels out is prefetched, at the end of what is
    # read of it, since it may begin in a line that is there already.
    further = p.per_step * p.lanes - 1 + p.lanes * p.strides[1]
    for at in out:
        f.prefetch(f.at(source, f.add(at, further), p.elements.storage))

    def transpose(first: Value, there: Value) -> None:
        """Transpose so many steps, no more than a few."""
        mask = few.window(f, 0, there)
        storage = p.elements.storage
        rows = [few.load(f, f.at(source, f.add(at, f.mul(first, p.per_step)), storage), mask) for at in out]
        for i, row in enumerate(transpose_pieces(f, rows, unit.storage)):
            with nullcontext() if there == few.lanes else f.when(f.test("slt", i, there)):
                place = f.at(to, f.mul(step, f.add(first, i)), unit.sum)
                f.store(unit.widen(f, row, p.lanes), place, unit.vector, size_of(unit.sum))

    each_piece(f, count, few.lanes, transpose)
    return f


# Taps are contiguous.


def _transpose_taps(m: Module, p: PackWeights, panel: _Panel) -> None:
    """Squares of channels out by taps, transposed, in the order in which weights lie in the tensor."""
    f, elements = panel.f, p.elements
    transpose = _tap_square(m, p)
    _, out_step, in_step = p.strides

    def transpose_one(lane: Value, step: Value) -> None:
        inner = panel.inner(p, step)
        corner = f.add(f.mul(panel.outer(lane), out_step), f.mul(inner, in_step))
        place = f.at(panel.to, f.add(f.mul(step, panel.lanes), lane), elements.sum)
        source = f.at(panel.source, corner, elements.storage)
        f.call(transpose, source, place, f.max(f.sub(panel.last, lane), 0), f.mul(panel.tap_steps, panel.lanes))

    if p.outputs_first:
        with f.loop(0, panel.lanes, p.lanes) as lane, f.loop(0, panel.steps) as step:
            transpose_one(lane, step)
    else:
        with f.loop(0, panel.steps) as step, f.loop(0, panel.lanes, p.lanes) as lane:
            transpose_one(lane, step)


def _tap_square(m: Module, p: PackWeights) -> Function:
    """A function that transposes a vector of channels out, for one step: (weights, panel, last channel out, elements
    between taps in the panel).
    """
    f = m.function("transpose_taps", ["p:from", "p:to", "i:left", "i:step"])
    source, to, left, step = f.args
    taps, (_, out_step, in_step) = len(p.tap_offsets), p.strides
    unit = p.raw
    few = replace(unit, lanes=piece(p.lanes, unit.storage), sum=unit.storage)
    all_there = p.outputs % p.lanes == 0
    out = [f.mul(i if all_there else f.min(left, i), out_step) for i in range(p.lanes)]
    members = [[f.add(at, j * in_step) for at in out] for j in range(p.per_step)]
    # Meanwhile the next step is prefetched, at its end: it may begin in a line that is there already.
    for at in chain(*members):
        f.prefetch(f.at(source, f.add(at, p.per_step * in_step + min(taps, p.lanes) - 1), unit.storage))

    def transpose(first: Value, count: Value) -> None:
        """Transpose so many taps, no more than a few."""
        mask = few.window(f, 0, count)
        columns = []
        for member in members:
            rows = [few.load(f, f.at(source, f.add(at, first), unit.storage), mask) for at in member]
            found = transpose_pieces(f, rows, unit.storage)[: int(count)]
            columns.append([unit.widen(f, row, p.lanes) for row in found])
        for i, values in enumerate(zip(*columns, strict=True)):
            place = f.at(to, f.mul(f.add(first, i), step), p.elements.sum)
            if len(values) == 2:
                both = interleave(f, unit.vector, p.lanes, *values)
                f.store(both, place, f"<{2 * p.lanes} x i16>", 4)
            else:
                f.store(values[0], place, p.elements.vector, size_of(p.elements.sum))

    each_piece(f, taps, few.lanes, transpose)
    return f


# Anything else.


def _elements(m: Module, p: PackWeights, panel: _Panel, tap_offsets: str) -> None:
    """One element after another, wherever it lies."""
    f, elements = panel.f, p.elements
    table = "" if p.fold is None else m.table("fold", p.fold)
    with f.loop(0, panel.steps) as step, f.loop(*panel.taps) as tap:
        offset = f.load(f.at(tap_offsets, tap, "i64"), "i64", 8)
        to = f.at(panel.to, f.mul(f.add(f.mul(tap, panel.tap_steps), step), panel.lanes), elements.sum)
        inner = panel.inner(p, step)
        source = f.at(panel.source, f.add(offset, f.mul(inner, p.strides[2])), elements.storage)
        codes = "" if p.fold is None else f.at(table, f.mul(tap, p.outputs), "i64")
        with f.loop(0, panel.lanes) as lane:
            channel = panel.outer(lane)
            at: Value = f.mul(channel, p.strides[1])
            if p.lane_groups is not None:
                group, output = f.split(channel, [0, p.lane_groups.outputs])
                at = f.add(f.mul(group, p.strides[0]), f.mul(output, p.strides[1]))
            there = ""
            if codes:
                code = f.load(f.at(codes, channel, "i64"), "i64", 8)
                there, at = f.test("ne", code, 0), f.op(f"ashr i64 {code}, 1")
            for j in range(p.per_step):
                _element(p, panel, (source, at), (to, lane), (inner, j), there)


def _element(
    p: PackWeights, panel: _Panel, source: tuple[str, Value], to: tuple[str, Value], channel: tuple[Value, int],
    there: str,
) -> None:  # fmt: skip
    """One element, or zero unless it is `there`: from an address and an offset to a run of lanes and a lane in it.

    The channel is the first one in of the step, and how far from it.
    """
    f, raw, (inner, j) = panel.f, p.raw, channel
    offset: Value = j * p.strides[2]
    if j and p.odd:
        more = f.test("slt", f.add(inner, j), p.channels - 1)
        offset = f.choose(more, offset, 0)
        there = f.both(there, more) if there else more
    value = raw.load_one(f, f.at(source[0], f.add(source[1], offset), raw.storage))
    if there:
        value = f.op(f"select i1 {there}, {raw.sum} {value}, {raw.sum} {'0' if p.pairs else '0.0'}")
    f.store(value, f.at(to[0], f.add(f.mul(to[1], p.per_step), j), raw.sum), raw.sum, size_of(raw.sum))
