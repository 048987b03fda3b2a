"""Axes of a problem in a common form, and where taps meet the input along them: the arithmetic that all plans rest on.

Batch is one more axis, with a kernel of 1, and axes that nothing tells apart are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil

from ...spec.problem import Ints, Problem
from .records import AxisMap, Packed, Phase, Segment, TapRanges

AXES = 4


@dataclass(frozen=True)
class Axis:
    """One axis of the geometry, batch included, with the strides of the three tensors along it."""

    x: int
    y: int
    k: int = 1
    stride: int = 1
    dilation: int = 1
    pad: int = 0
    x_step: int = 0
    w_step: int = 0
    y_step: int = 0

    @property
    def plain(self) -> bool:
        """Whether each y reads the x at its own place along this axis, and no other."""
        return self.k == 1 and self.stride == 1 and self.pad == 0 and self.x == self.y


@dataclass(frozen=True)
class Shape:
    """A problem with its axes brought to a common form: always four, the last one innermost."""

    axes: tuple[Axis, ...]
    g: int
    cx: int
    cy: int
    x_channel: Ints  # strides of (g, cx)
    y_channel: Ints  # strides of (g, cy)
    w_channel: Ints  # strides of (g, cy, cx)


def spatial(p: Problem) -> list[Axis]:
    """The spatial axes of a problem."""
    kernels = (p.x, p.y, p.w, p.stride, p.dilation, p.pad)
    steps = (p.x_strides[3:], p.w_strides[3:], p.y_strides[3:])
    return [Axis(*numbers) for numbers in zip(*kernels, *steps, strict=True)]


def simplify(p: Problem) -> Shape:
    """Merge what can be merged: a kernel of 1 with stride 1 makes neighbouring axes one, batch among them."""
    axes = [Axis(p.n, p.n, x_step=p.x_strides[0], y_step=p.y_strides[0]), *spatial(p)]
    merged: list[Axis] = []
    for axis in axes:
        if axis.plain and axis.x == 1:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.plain
            and axis.plain
            and last.x_step == axis.x * axis.x_step
            and last.y_step == axis.y * axis.y_step
        ):
            merged[-1] = replace(axis, x=last.x * axis.x, y=last.y * axis.y)
        else:
            merged.append(axis)
    filler = [Axis(1, 1)] * (AXES - len(merged))
    channels = (p.x_strides[1:3], p.y_strides[1:3], p.w_strides[:3])
    return Shape(tuple(filler + merged), p.g, p.cx, p.cy, *channels)


def offsets(a: Axis, forward: bool) -> list[int]:
    """Where each tap of an axis reads: position q of the result reads coordinate q*in_stride + offset of the input.

    Backward, q counts the results of one phase: see `phase_of`.
    """
    if forward:
        return [k * a.dilation - a.pad for k in range(a.k)]
    return [-((k * a.dilation - a.pad) // a.stride) for k in range(a.k)]


def phase_of(a: Axis, tap: int, forward: bool) -> int:
    """The results that a tap serves: those at q*out_stride + phase."""
    return 0 if forward else (tap * a.dilation - a.pad) % a.stride


def valid_range(offset: int, stride: int, size: int, count: int) -> tuple[int, int]:
    """Where a tap lies inside the input: the first and the end of all q < count with 0 <= q*stride + offset < size.

    The end may be below the first: then it lies outside everywhere.
    """
    return max(0, -(offset // stride)), min(count, -((offset - size) // stride))


def inside(a: Axis, forward: bool) -> bool:
    """Whether all taps of an axis lie inside the input everywhere, so that no padding is read."""
    if forward:
        return a.pad == 0 and (a.y - 1) * a.stride + (a.k - 1) * a.dilation < a.x
    for k, offset in enumerate(offsets(a, forward)):
        count = ceil((a.x - phase_of(a, k, forward)) / a.stride)
        if count > 0 and valid_range(offset, 1, a.y, count) != (0, count):
            return False
    return True


def tap_ranges(axes: tuple[Axis, ...]) -> TapRanges:
    """Where each weight reads x and y, as the weight gradient needs it."""
    found = [[(o * a.x_step, valid_range(o, a.stride, a.x, a.y)) for o in offsets(a, True)] for a in axes]
    taps = list(product(*found))
    return TapRanges(
        tuple(sum(at for at, _ in tap) for tap in taps),
        tuple(tuple(ends for _, ends in tap) for tap in taps),
        tuple(a.stride * a.x_step for a in axes),
        tuple(a.y_step for a in axes),
    )


def tap_offsets(axes: tuple[Axis, ...]) -> Ints:
    """Where each kernel element is in w."""
    return tuple(
        sum(k * a.w_step for k, a in zip(ks, axes, strict=True)) for ks in product(*(range(a.k) for a in axes))
    )


def reach(a: Axis, forward: bool) -> int:
    """Inputs from the first that a result reads along an axis to the last."""
    found = offsets(a, forward)
    return max(found) - min(found) + 1


def spans(a: Axis, box: int, forward: bool) -> tuple[int, int]:
    """Inputs that a box reads along an axis, and elements from one to the next: all from the first to the last.

    A stride without a kernel leaves out those between.
    """
    in_stride, size, step = (a.stride, a.x, a.x_step) if forward else (1, a.y, a.y_step)
    if reach(a, forward) == 1:
        return min(box, ceil(size / in_stride)), in_stride * step
    return min((box - 1) * in_stride + reach(a, forward), size), step


def axis_maps(
    axes: tuple[Axis, ...], forward: bool, box: Sequence[int], split: Sequence[bool], in_place: bool,
    thinned: bool = False,
) -> tuple[AxisMap, ...]:  # fmt: skip
    """What results read, for boxes of a size. In place, entries are coordinates.

    On axes that are `split`, each segment has only the taps that lie inside. If rows are `thinned`, the inputs of
    neighbouring results are contiguous in them.
    """
    maps: list[AxisMap] = []
    for i, (a, size, is_split) in enumerate(zip(axes, box, split, strict=True)):
        out, out_stride, step = (a.y, 1, a.y_step) if forward else (a.x, a.stride, a.x_step)
        in_stride = a.stride if forward else 1
        layout = _Layout.of(a, forward, size, in_place, thinned and i == AXES - 1)
        segments = tuple(_segments(a, forward, is_split, layout.entries))
        low, packed_stride = layout.low, layout.packed_stride
        maps.append(AxisMap(out, out_stride, in_stride, step, size, a.k, low, packed_stride, segments))
    return tuple(maps)


def _segments(a: Axis, forward: bool, is_split: bool, entries: dict[int, int]) -> Iterator[Segment]:
    """The results of an axis, cut where taps begin and end to lie inside if borders are kept apart."""
    out, out_stride, in_stride, size = (a.y, 1, a.stride, a.x) if forward else (a.x, a.stride, 1, a.y)
    of_phase: list[list[tuple[int, int]]] = [[] for _ in range(out_stride)]
    for k, o in enumerate(offsets(a, forward)):
        of_phase[phase_of(a, k, forward)].append((k, o))
    for phase, taps in enumerate(of_phase):
        count = max(0, ceil((out - phase) / out_stride))
        valid = {k: valid_range(o, in_stride, size, count) if is_split else (0, count) for k, o in taps}
        cuts = sorted({0, count, *(min(max(c, 0), count) for ends in valid.values() for c in ends)})
        for start, stop in pairwise(cuts):
            here = ((k, entries[o]) for k, o in taps if valid[k][0] <= start and stop <= valid[k][1])
            yield Segment(phase, start, stop, tuple(here))


@dataclass(frozen=True)
class _Layout:
    """How the inputs of a box are packed along an axis: entry q*packed_stride + entries[offset] for each tap."""

    low: int  # coordinate of the first entry, for q = 0
    packed_stride: int
    entries: dict[int, int]

    @classmethod
    def of(cls, a: Axis, forward: bool, box: int, in_place: bool, thinned: bool) -> _Layout:
        """Chosen by what is packed: nothing, a run for each tap, every `in_stride`th input, or all of them."""
        found = offsets(a, forward)
        in_stride = a.stride if forward else 1
        low = min(found)
        if in_place:
            return cls(0, in_stride, {o: o for o in found})
        if _by_taps(a, box, in_stride, found):
            return cls(0, 1, {o: i * box for i, o in enumerate(sorted(set(found)))})
        if thinned:
            firsts, count = _thinned(box, in_stride, found)
            entries = {o: firsts.index((o - low) % in_stride) * count + (o - low) // in_stride for o in found}
            return cls(low, 1, entries)
        return cls(low, in_stride, {o: o - low for o in found})


def _by_taps(a: Axis, box: int, in_stride: int, found: list[int]) -> bool:
    """Whether a run is packed for each tap, because most of what lies between taps is not read."""
    return box * a.k < (box - 1) * in_stride + max(found) - min(found) + 1


def _thinned(box: int, in_stride: int, found: list[int]) -> tuple[list[int], int]:
    """Runs of every `in_stride`th input, as many as taps reach: how far from the lowest each begins, how long."""
    above = [o - min(found) for o in found]
    return sorted({o % in_stride for o in above}), box + max(above) // in_stride


def packed(a: Axis, m: AxisMap, forward: bool, in_place: bool) -> Packed:
    """How the input of an axis is packed for a box: see `_Layout`."""
    size, stride = (a.x, a.x_step) if forward else (a.y, a.y_step)
    found = offsets(a, forward)
    if in_place:
        return Packed(size, stride, 1)
    if _by_taps(a, m.box, m.in_stride, found):
        return Packed(size, stride, m.box, m.in_stride, tuple(sorted(set(found))))
    if m.packed_stride < m.in_stride:
        firsts, count = _thinned(m.box, m.in_stride, found)
        return Packed(size, stride, count, m.in_stride, tuple(firsts))
    return Packed(size, stride, (m.box - 1) * m.in_stride + reach(a, forward))


def phases_of(
    axes: tuple[Axis, ...], maps: tuple[AxisMap, ...], step: Sequence[int]
) -> tuple[tuple[Phase, ...], tuple[tuple[int, int], ...]]:
    """The phases of the results and, in their order, the table of taps: (which tap, elements into the packed box).

    Those without taps are the last.
    """
    phases: list[Phase] = []
    tap_table: list[tuple[int, int]] = []
    for combo in product(*(w.segments for w in maps)):
        mine = []
        for taps in product(*(s.taps for s in combo)):
            number = 0
            for (k, _), a in zip(taps, axes, strict=True):
                number = number * a.k + k
            mine.append((number, sum(e * s for (_, e), s in zip(taps, step, strict=True))))
        ends = zip(*((s.residue, s.start, s.stop) for s in combo), strict=True)
        phases.append(Phase(len(tap_table), len(mine), *(tuple(e) for e in ends)))
        tap_table += mine
    phases.sort(key=lambda phase: phase.count == 0)
    return tuple(phases), tuple(tap_table)


def longest(size: int, fits: Callable[[int], bool]) -> int:
    """An axis cut into the fewest pieces that fit: how long they are, or 1 if none fits."""
    low, high = 1, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return ceil(size / ceil(size / low))
