"""How the two sides of the sum lie in memory for a box: what is packed of them, and how tiles step through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ...spec.problem import Ints
from ..pack.box import PackBox, Pairing, packer
from ..plan.axes import AXES, axis_maps, packed, phases_of
from ..plan.records import AxisMap, Packed, entry_steps, pitch, up
from .records import Boxes, Mode, Modes, Parts, Roles, Side, Terms
from .work import Work


class Source(NamedTuple):
    """The pixels of one side that a box needs, whatever their channels."""

    name: str
    mode: Mode
    channel: Ints  # strides of (group, channel)
    packs: tuple[Packed, ...]
    pair: tuple[int, int]
    low: Ints
    in_stride: Ints
    packed_stride: Ints  # packed pixels between those of neighbouring pixels of y


def lay_out(work: Work, roles: Roles, modes: Modes, boxes: Boxes, parts: Parts) -> tuple[Side, Side, Ints]:
    """The sides x and y: what is packed of them, and how tiles step through it. And the entry of each tap in x."""
    x_mode, y_mode = modes if roles.row_side == "x" else modes[::-1]
    in_place = x_mode is Mode.IN_PLACE
    # Where channels are packed one by one, x is thinned out as its stride asks: pixels of a pair become neighbours.
    thinned = work.pairs and x_mode is Mode.ROWS and not work.image_pairs
    box = [*boxes.box[:-1], up(boxes.box[-1], 2)] if thinned else boxes.box
    maps = axis_maps(work.axes, True, box, (False,) * AXES, in_place, thinned)
    whole = [n == 1 for n in boxes.counts]
    x = _side(work, roles, parts, _x_source(work, maps, x_mode), whole)
    y = _side(work, roles, parts, _y_source(work, boxes, y_mode), whole)
    # Along a row taps are pixels apart, and entries may be pairs of pixels.
    *outer, last = _entry_steps(x, x.pitch)
    pair_step = 1 if in_place else x.pair[1]
    _, tap_table = phases_of(work.axes, maps, [*(pair_step * s for s in outer), last])
    return x, y, tuple(entry // pair_step for _, entry in tap_table)


def _x_source(work: Work, maps: tuple[AxisMap, ...], mode: Mode) -> Source:
    last = work.axes[-1]
    packs = tuple(packed(a, m, True, mode is Mode.IN_PLACE) for a, m in zip(work.axes, maps, strict=True))
    pair, next_ = (0, 1), maps[-1].packed_stride
    if work.pairs:
        # Where channels are packed one by one, any two neighbours are a pair; else every pixel is the first of one, or
        # every other if all taps are an even number of pixels apart.
        evenly = last.stride == 1 and last.dilation % 2 == 0 and len(packs[-1].offsets) == 1
        pair = (0, 1) if mode is Mode.ROWS else (next_, 2 * next_ if last.k == 1 or evenly else 1)
        packs = (*packs[:-1], replace(packs[-1], count=up(packs[-1].count, pair[1])))
    low, in_stride, stride = zip(*((m.low, m.in_stride, m.packed_stride) for m in maps), strict=True)
    return Source("x", mode, work.shape.x_channel, packs, pair, low, in_stride, stride)


def _y_source(work: Work, boxes: Boxes, mode: Mode) -> Source:
    packs = tuple(Packed(a.y, a.y_step, b) for a, b in zip(work.axes, boxes.box, strict=True))
    pair = (0, 1)
    if work.pairs:
        pair = (0, 1) if mode is Mode.ROWS else (1, 2)
        packs = (*packs[:-1], replace(packs[-1], count=up(boxes.box[-1], 2)))  # a last pixel is paired with a zero
    zeros, ones = (0,) * AXES, (1,) * AXES
    return Source("y", mode, work.shape.y_channel, packs, pair, zeros, ones, ones)


def _side(work: Work, roles: Roles, parts: Parts, source: Source, whole: Sequence[bool]) -> Side:
    """One side, with as many channels as a task or a block of lanes has. `whole` axes are in one box."""
    name, mode, groups = source.name, source.mode, roles.lane_groups
    by_block = groups is not None or name != roles.row_side
    channels, at_once = (roles.lane_channels, roles.block) if by_block else (roles.row_channels, parts.row_part)
    if groups and name == "x":
        channels, at_once = (n // groups.outputs * groups.inputs for n in (channels, at_once))
    if by_block:
        step = up(at_once, roles.lanes)
    elif mode is Mode.ROWS:
        step = pitch(prod(q.extent for q in source.packs), roles.lanes * roles.per_step)
    else:
        # A few contiguous channels are kept without a gap, so that pixels can be copied as one run.
        few = source.channel[1] == 1 and at_once < 4 * roles.lanes
        step = at_once if few else pitch(at_once, roles.lanes)
    axes, starts = _packed_axes(source, work.image_pairs)
    row, _ = starts[-1][-1]
    box = PackBox(
        name=f"pack_{name}",
        axes=axes,
        channel_step=source.channel[1],
        pitch=step,
        channels=at_once if not by_block or channels % at_once == 0 else None,
        pairing=_pairing(work, source),
        pair=source.pair,
        image_step=source.packs[3].stride if work.image_pairs else None,
        first=source.low[row] if mode is Mode.ROWS and name == "x" and whole[row] else None,
    )
    pack = replace(box, packer=packer(box, roles.lanes, row_packed=mode is Mode.ROWS))
    *outer, last = (a * b for a, b in zip(_entry_steps(source, step), source.packed_stride, strict=True))
    if work.pairs:
        last = 2 * last // (1 if mode is Mode.IN_PLACE else source.pair[1])
    return Side(
        name, mode, source.channel, channels, at_once, by_block, source.packs, pack, starts, step, source.pair,
        (*outer, last), source.low, source.in_stride,
    )  # fmt: skip


def _entry_steps(side: Source | Side, pitch: int) -> list[int]:
    """Elements between entries of a side along each axis, as tiles read it: pixels, or along a row pairs of them."""
    if side.mode is Mode.IN_PLACE:
        return [p.stride for p in side.packs]
    *outer, last = entry_steps(side.packs)
    pixel = 1 if side.mode is Mode.ROWS else pitch
    return [*(s // side.pair[1] * pixel for s in outer), last * pixel]


def _pairing(work: Work, source: Source) -> Pairing:
    """How the pixels of a side become pairs as they are packed."""
    if work.image_pairs:
        return Pairing.IMAGES
    if not work.pairs or source.mode is not Mode.VECTORS:
        return Pairing.NONE
    last = source.packs[-1]
    if len(last.offsets) > 1:
        return Pairing.COPY
    if source.channel[1] == 1:
        return Pairing.CHANNELS
    neighbours = source.pair == (1, 2) and last.stride == last.step == 1
    return Pairing.PIXELS if neighbours and source.low[-1] == last.offsets[0] == 0 else Pairing.COPY


def _packed_axes(source: Source, image_pairs: bool) -> tuple[tuple[Packed, ...], tuple[Terms, ...]]:
    """The axes along which a side is packed, and where they start. The last one is a row of pixels: of pairs of images
    it is the last but one of the side.
    """
    columns = 2 if image_pairs else 3
    before, row = source.packs[:columns], source.packs[columns]
    starts: list[Terms] = [((i, 1),) for i in range(columns)]
    along: Terms = ((columns, 1),)
    # Rows of y that follow each other, and are packed whole, are one; between those of x there is padding.
    rows = before[-1]
    if source.name == "y" and rows.count > 1 and row.count == row.size and rows.stride == row.size * row.stride:
        along = ((columns - 1, row.size), *along)
        row = Packed(rows.size * row.size, row.stride, rows.count * row.count)
        before, starts = before[:-1], starts[:-1]
    missing = 3 - len(before)
    return (*before, *[Packed(1, 0, 1)] * missing, row), (*starts, *[()] * missing, along)
