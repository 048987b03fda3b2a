"""A problem brought to a common form, and how its axes meet: the arithmetic that all plans rest on.

Batch is treated as one more spatial axis with a kernel of 1, and axes that nothing tells apart are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Whether x and y walk along this axis together, with no kernel."""
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
    """Input offset of each tap of an axis."""
    if forward:
        return [k * a.dilation - a.pad for k in range(a.k)]
    return [-((k * a.dilation - a.pad) // a.stride) for k in range(a.k)]


def reach(a: Axis, forward: bool) -> int:
    """Inputs from the first that a result meets along an axis to the last."""
    found = offsets(a, forward)
    return max(found) - min(found) + 1


def spans(a: Axis, box: int, forward: bool) -> tuple[int, int]:
    """Inputs that a box meets along an axis, and how many elements lie between them: all from the first to the last.

    A stride without a kernel leaves out those between.
    """
    in_stride, size, step = (a.stride, a.x, a.x_step) if forward else (1, a.y, a.y_step)
    if reach(a, forward) == 1:
        return min(box, ceil(size / in_stride)), in_stride * step
    return min((box - 1) * in_stride + reach(a, forward), size), step


def valid_range(a: Axis, offset: int) -> tuple[int, int]:
    """The range of y for which a tap at that offset lies inside x."""
    return max(0, -(offset // a.stride)), min(a.y, -((offset - a.x) // a.stride))


def tap_ranges(axes: tuple[Axis, ...]) -> TapRanges:
    """What each weight meets."""
    found = [[(o * a.x_step, valid_range(a, o)) for o in offsets(a, True)] for a in axes]
    taps = list(product(*found))
    return TapRanges(
        tuple(sum(at for at, _ in tap) for tap in taps),
        tuple(tuple(ends for _, ends in tap) for tap in taps),
        tuple(a.stride * a.x_step for a in axes),
        tuple(a.y_step for a in axes),
    )


def inside(a: Axis, forward: bool) -> bool:
    """Whether every input that an axis meets lies inside the tensor, so that no padding is read."""
    if forward:
        return a.pad == 0 and (a.y - 1) * a.stride + (a.k - 1) * a.dilation < a.x
    for k in range(a.k):
        residue = (k * a.dilation - a.pad) % a.stride
        offset = (residue + a.pad - k * a.dilation) // a.stride
        count = ceil((a.x - residue) / a.stride)
        if count > 0 and (offset < 0 or count - 1 + offset >= a.y):
            return False
    return True


def tap_offsets(axes: tuple[Axis, ...]) -> Ints:
    """Where each kernel element lies in w."""
    return tuple(
        sum(k * a.w_step for k, a in zip(ks, axes, strict=True)) for ks in product(*(range(a.k) for a in axes))
    )


def axis_maps(
    axes: tuple[Axis, ...], forward: bool, box: Sequence[int], split: Sequence[bool], in_place: bool,
    thinned: bool = False,
) -> tuple[AxisMap, ...]:  # fmt: skip
    """How the output maps over the input, for boxes of a size. In place, entries are coordinates.

    Of rows that are `thinned`, the inputs of neighbouring outputs lie side by side.
    """
    maps: list[AxisMap] = []
    for i, (a, size, apart) in enumerate(zip(axes, box, split, strict=True)):
        found = offsets(a, forward)
        out_stride, in_stride = (1, a.stride) if forward else (a.stride, 1)
        low = min(found)
        separate = not in_place and _separate(a, size, in_stride, found)
        distinct = sorted(set(found))
        thin = thinned and not separate and i == AXES - 1
        if in_place:
            entry = {o: o for o in found}
        elif thin:
            residues, count = _thinned(size, in_stride, found)
            entry = {o: residues.index((o - low) % in_stride) * count + (o - low) // in_stride for o in found}
        else:
            entry = {o: distinct.index(o) * size if separate else o - low for o in found}
        out, inner = (a.y, a.x) if forward else (a.x, a.y)
        step = a.y_step if forward else a.x_step
        segments: list[Segment] = []
        met_by_residue: list[list[tuple[int, int]]] = [[] for _ in range(out_stride)]
        for k, o in enumerate(found):
            met_by_residue[(k * a.dilation - a.pad) % out_stride].append((k, o))
        for residue, taps in enumerate(met_by_residue):
            count = max(0, ceil((out - residue) / out_stride))
            # A tap is met where 0 <= q*in_stride + o < inner.
            met = {k: (max(0, -(o // in_stride)), min(count, -((o - inner) // in_stride))) for k, o in taps}
            cuts = sorted({0, count, *(min(max(c, 0), count) for ends in met.values() for c in ends if apart)})
            for start, stop in pairwise(cuts):
                here = [(k, entry[o]) for k, o in taps if not apart or (met[k][0] <= start and stop <= met[k][1])]
                segments.append(Segment(residue, start, stop, tuple(here)))
        band = (0, in_stride) if in_place else (0, 1) if separate else (low, 1 if thin else in_stride)
        maps.append(AxisMap(out, out_stride, in_stride, step, size, a.k, *band, tuple(segments)))
    return tuple(maps)


def _separate(a: Axis, box: int, in_stride: int, found: list[int]) -> bool:
    """Whether a band holds one run per tap because the span that the taps cover is mostly not read."""
    return box * a.k < (box - 1) * in_stride + max(found) - min(found) + 1


def _thinned(box: int, in_stride: int, found: list[int]) -> tuple[list[int], int]:
    """Runs of every `in_stride`th input, as many as taps reach: how far from the lowest each begins, how long."""
    above = [o - min(found) for o in found]
    return sorted({o % in_stride for o in above}), box + max(above) // in_stride


def packed(a: Axis, w: AxisMap, forward: bool, in_place: bool) -> Packed:
    """How the input of an axis is copied for a box."""
    size, stride = (a.x, a.x_step) if forward else (a.y, a.y_step)
    found = offsets(a, forward)
    if in_place:
        return Packed(size, stride, 1)
    if _separate(a, w.box, w.in_stride, found):
        return Packed(size, stride, w.box, w.in_stride, tuple(sorted(set(found))))
    if w.packed_stride < w.in_stride:
        residues, count = _thinned(w.box, w.in_stride, found)
        return Packed(size, stride, count, w.in_stride, tuple(residues))
    return Packed(size, stride, (w.box - 1) * w.in_stride + reach(a, forward))


def phases_of(
    axes: tuple[Axis, ...], maps: tuple[AxisMap, ...], step: Sequence[int]
) -> tuple[tuple[Phase, ...], tuple[tuple[int, int], ...]]:
    """The phases of the output and, in their order, the taps each meets: (which tap, elements into the band).

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
