"""How a gather may go over a problem: by the phases of its stride, one by one or all at once, and by groups."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

from ....spec.problem import Ints, Problem
from ..launches import channels
from .tensors import Operands
from .views import Space, View, steps_of, views

MOST_PHASES = 16
MOST_LOOPS = 8  # views that y is read from: each has a descriptor
MOST_ROWS = 9  # taps that read one box: the code has each of them
PACKED = 64  # channels of groups that share a column tile


class Way(NamedTuple):
    """A problem as tiles of positions by columns: how the gather goes over its input."""

    views: tuple[View, ...]
    tap_step: Ints  # of the tap, from one of a view to the next
    step: Ints  # of the position that it reads
    sizes: Ints  # of the input that a view sees, at most
    steps: Ints  # results of a phase, at most
    columns: int  # channels of the result that share what they read; of all positions within a stride, if `inner`
    inner: int
    loops: int  # views that a tile goes over
    groups: int  # whose channels share a column tile, as blocks of a matrix with zeros between them
    operands: Operands

    def window(self, p: Problem) -> int:
        """Channels of the input that these columns read: copies begin at multiples of eight."""
        read = self.groups * channels(p)[0]
        return read + (7 if read % 8 and p.g > 1 else 0)

    def column_tiles(self, p: Problem, columns: int) -> int:
        """Tiles of so many columns, of all groups."""
        return ceil(self.columns / columns) * ceil(p.g / self.groups)

    @property
    def rows(self) -> tuple[int, int]:
        """Taps along rows that may read one box, and by how many rows they are apart."""
        taps = [view.taps[1] for view in self.views]
        if self.operands.parts > 1:
            return 1, 0  # sums of parts are held twice: registers are too few for more of them
        if len(taps) == 1:
            return max(count for count in range(1, MOST_ROWS + 1) if taps[0] % count == 0), self.step[1]
        # There are descriptors for four views with boxes of both heights.
        return (max(taps) if max(taps) <= MOST_ROWS and self.loops <= MOST_LOOPS // 2 else 1), self.step[1]


def ways(p: Problem, s: Space, operands: Operands) -> Iterator[Way]:
    """How the phases of a stride may be taken: of x one by one or all at once, of what y reads one after another."""
    groups = min(p.g, max(1, PACKED // max(channels(p))))
    made = channels(p)[1] * groups
    tap_step, step = steps_of(s)
    found = views(s, p.wanted == "x")
    if p.wanted == "y":
        sizes = tuple(ceil(n / at) for n, at in zip(s.given, s.stride, strict=True))
        if len(found) <= MOST_LOOPS:
            numbered = tuple(view._replace(source=at) for at, view in enumerate(found))
            yield Way(numbered, tap_step, step, sizes, s.made, made, 0, len(numbered), groups, operands)
        return
    steps = tuple(ceil(n / at) for n, at in zip(s.made, s.stride, strict=True))
    if len(found) <= MOST_PHASES:
        yield Way(found, tap_step, tuple(-by for by in step), s.given, steps, made, 0, 1, groups, operands)
    if prod(s.stride) > 1 and p.g == 1:
        first, taps = meeting(s)
        if min(taps) > 0:
            view = View(0, 0, (0, 0, 0), (0, 0, 0), taps, first)
            yield Way((view,), (1, 1, 1), (1, 1, 1), s.given, steps, made * prod(s.stride), made, 1, 1, operands)


def meeting(s: Space) -> tuple[Ints, Ints]:
    """The positions of y that the positions of x within a stride meet, on each axis: the first, and how many.

    x at t*stride + i meets y at t + u by the tap k with k*dilation = i + pad - u*stride, for i from 0 to stride - 1.
    """
    axes = list(zip(s.stride, s.dilation, s.pad, s.kernel, strict=True))
    first = tuple(ceil((pad - (k - 1) * d) / by) for by, d, pad, k in axes)
    last = tuple((by - 1 + pad) // by for by, _, pad, _ in axes)
    return first, tuple(high - low + 1 for low, high in zip(first, last, strict=True))
