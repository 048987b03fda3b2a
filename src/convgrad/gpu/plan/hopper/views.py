"""A problem as a gather sees it: its axes as planes, rows and pixels, and what each phase of the stride reads.

Any order of the axes will do. Taps along rows may read one box, so rows are the axis with most taps; pixels, which
lie innermost in a box, are the last of the others in memory.
"""

from __future__ import annotations

from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

from ....spec.problem import Ints, Problem, Role
from ..axes import strides, three


class Space(NamedTuple):
    """Sizes on the three axes: planes, rows and pixels. With `lines`, pixels lie innermost in memory."""

    order: Ints  # which of the problem's three axes they are
    given: Ints  # sizes of the input of the gather
    made: Ints  # of its result
    kernel: Ints
    stride: Ints
    dilation: Ints
    pad: Ints
    lines: bool = False


class View(NamedTuple):
    """What one remainder of positions by the stride reads, or makes: see `kernels.hopper.gather`."""

    source: int
    channel: int
    phase: Ints
    tap: Ints
    taps: Ints
    first: Ints

    @property
    def entries(self) -> Ints:
        """What the kernel is told."""
        return (self.source, self.channel, *self.phase, *self.tap, *self.taps, *self.first)

    @property
    def entries_of_y(self) -> Ints:
        """What the kernel is told where the phase is one of the input: results are not at a phase."""
        return self._replace(phase=(0, 0, 0)).entries


def space(p: Problem, lines: bool = False) -> Space:
    """The axes of a problem. Where pixels are to be lines, they are the last axis."""
    axes = three(p)
    given, made = (axes.x, axes.y) if p.wanted == "y" else (axes.y, axes.x)
    single = [at for at in range(3) if axes.stride[at] == 1]
    axes_of_rows = range(2 if lines else 3)
    rows = max(axes_of_rows, key=lambda at: (at in single and axes.w[at] > 1, axes.w[at], made[at], at == 1))
    planes, pixels = sorted((at for at in range(3) if at != rows), key=lambda at: (lines or made[at] > 1, at))
    order = (planes, rows, pixels)

    def arranged(of: Ints) -> Ints:
        return tuple(of[at] for at in order)

    given, made, kernel, stride, dilation, pad = map(
        arranged, (given, made, axes.w, axes.stride, axes.dilation, axes.pad)
    )
    return Space(order, given, made, kernel, stride, dilation, pad, lines)


def arranged_strides(p: Problem, role: Role, order: Ints) -> Ints:
    """Strides of a tensor: its first three axes, then planes, rows and pixels."""
    of = strides(p, role)
    return (*of[:3], *(of[3 + at] for at in order))


def steps_of(s: Space) -> tuple[Ints, Ints]:
    """By how much the tap grows from one tap of a phase to the next, and by how much the position that it reads."""
    common = [gcd(step, d) for step, d in zip(s.stride, s.dilation, strict=True)]
    taps = tuple(step // c for step, c in zip(s.stride, common, strict=True))
    return taps, tuple(d // c for d, c in zip(s.dilation, common, strict=True))


def views(s: Space, back: bool) -> tuple[View, ...]:
    """What the phases see, those with most taps first. For y, `back` is false, and phases without taps are left out.

    Phase r of x, or of what y is read from, has the taps with k*dilation = r + pad modulo the stride.
    """
    found = []
    for phase in product(*(range(step) for step in s.stride)):
        taps = [_axis_taps(s, axis, r, back) for axis, r in enumerate(phase)]
        tap, count, first = (tuple(values) for values in zip(*taps, strict=True))
        inside = all(r < size for r, size in zip(phase, s.made if back else s.given, strict=True))
        if inside and (back or prod(count)):
            found.append(View(0, 0, phase, tap, count, first))
    return tuple(sorted(found, key=lambda view: -prod(view.taps)))


def _axis_taps(s: Space, axis: int, phase: int, back: bool) -> tuple[int, int, int]:
    """Of a phase on one axis: the first tap, how many there are, and the position that the first one reads."""
    step, dilation, pad = s.stride[axis], s.dilation[axis], s.pad[axis]
    common = gcd(step, dilation)
    if (phase + pad) % common:
        return 0, 0, 0
    apart = step // common
    tap = (phase + pad) // common * pow(dilation // common, -1, apart) % apart
    taps = ceil((s.kernel[axis] - tap) / apart) if tap < s.kernel[axis] else 0
    moved = (tap * dilation - pad - phase) // step
    return (tap, taps, -moved if back else moved) if taps else (0, 0, 0)


def live_taps(at: int, box: int, reads: tuple[int, int, int], step: int, given: int) -> int:
    """Taps of an axis that bring anything to a box of results. `reads`: the taps, the first position, the results."""
    taps, first, steps = reads
    starts = (at + first + tap * step for tap in range(taps))
    return sum(start < given and start + min(box, steps - at) > 0 for start in starts)
