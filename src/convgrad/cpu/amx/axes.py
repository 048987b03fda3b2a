"""Axes of a convolution as tile registers need them: inputs of neighbouring positions evenly spaced."""

from __future__ import annotations

from itertools import product
from math import ceil, prod

from ..plan.axes import Axis as Geometry
from ..plan.axes import offsets, phase_of
from ..plan.records import Packed, entry_steps
from .records import Axis, Phase


def axis(a: Geometry, forward: bool, box: int) -> Axis:
    """What positions along an axis read, for a box of so many: runs of inputs as far apart as the stride.

    If that is more than a run for each tap, because most of what lies between taps is not read, there are such runs.
    """
    found = offsets(a, forward)
    out, out_stride, out_step = (a.y, 1, a.y_step) if forward else (a.x, a.stride, a.x_step)
    in_stride, size, step = (a.stride, a.x, a.x_step) if forward else (1, a.y, a.y_step)
    low = min(found)
    firsts = sorted({(o - low) % in_stride for o in found})
    count = box + (max(found) - low) // in_stride
    starts, place = [low + first for first in firsts], {}
    for o in found:
        place[o] = (firsts.index((o - low) % in_stride), (o - low) // in_stride)
    if len(set(found)) * box < len(starts) * count:
        starts, count = sorted(set(found)), box
        place = {o: (starts.index(o), 0) for o in found}
    taps = tuple((phase_of(a, k, forward), k, *place[o]) for k, o in enumerate(found))
    return Axis(out, out_stride, out_step, box, in_stride, tuple(starts), taps, Packed(size, step, count, in_stride))


def phases_of(
    geometry: tuple[Geometry, ...], axes: tuple[Axis, ...], pitch: int
) -> tuple[tuple[Phase, ...], tuple[tuple[int, int], ...]]:
    """The phases of the results and, in their order, the table of taps: (which tap, elements into the packed runs)."""
    steps = entry_steps(tuple(a.pack for a in axes))
    entries = prod(a.pack.count for a in axes)
    runs = [prod(len(b.runs) for b in axes[i + 1 :]) for i in range(len(axes))]
    phases: list[Phase] = []
    table: list[tuple[int, int]] = []
    for residues in product(*(range(min(a.out_stride, a.out)) for a in axes)):
        first = len(table)
        own = [[tap for tap in a.taps if tap[0] == r] for a, r in zip(axes, residues, strict=True)]
        for taps in product(*own):
            number = at = 0
            for (_, k, run, shift), a, step, several in zip(taps, geometry, steps, runs, strict=True):
                number = number * a.k + k
                at += run * several * entries + shift * step
            table.append((number, at * pitch))
        phases.append(Phase(first, len(table) - first, residues))
    return tuple(phases), tuple(table)


def long_row(box: tuple[int, ...], counts: tuple[int, ...], flat: int) -> int:
    """Places of the long row that the axes from `flat` on make, up to its last position."""
    return 1 + sum((box[i] - 1) * prod(counts[i + 1 :]) for i in range(flat, len(box)))


def tiles_of(box: tuple[int, ...], counts: tuple[int, ...], flat: int, height: int) -> int:
    """Blocks of so many rows that a box takes."""
    return prod(box[:flat]) * ceil(long_row(box, counts, flat) / height)
