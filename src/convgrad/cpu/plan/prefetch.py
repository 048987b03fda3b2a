"""What is prefetched, and when: the memory of the next box, while the tiles of this one compute.

The prefetch distance is one box. A plan lists regions of memory: the input of the next box, where the results of this
one go, perhaps a part of the weights that are packed next. The lines of all regions are cut into as many portions as
tiles are called for a box. A call of a tile prefetches one portion: all of it at its start if it is a BURST, otherwise
line after line, evenly spread over its steps. `emit/prefetch.py` writes the code.

Nearer things are prefetched where they are used: weights in pack/weights.py, rows of depthwise layers in their kernels
and depthwise/window.py, results of the next tile of w in wgrad/write.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from ...spec.problem import Ints
from ..target import LINE

BURST = 4  # lines that a tile prefetches at once, at its start; the origin of the number is not recorded
FEW_LINES = 8  # a run of more prefetches no line beyond its end; the origin of the number is not recorded

Lines = tuple[tuple[int, int], ...]
"""Lines of memory: (how many, bytes between them), outermost first."""


@dataclass(frozen=True)
class Prefetch:
    """Lines of memory that are prefetched while a box is computed. A region is the lines of a box in one tensor."""

    regions: tuple[Lines, ...]
    calls: int  # of tiles that have products, for a box
    steps: int  # of a call, for one tap: each adds a product, or a pair of them, to every sum

    @property
    def lines_per_call(self) -> int:
        """Lines in a portion."""
        lines = sum(prod(count for count, _ in region) for region in self.regions)
        return ceil(lines / max(1, self.calls - len(self.regions) + 1))

    @property
    def burst(self) -> bool:
        """Whether a portion is prefetched all at once."""
        return self.lines_per_call <= BURST

    @property
    def steps_per_line(self) -> int:
        """Steps between lines, so that they are spread over the call: a power of two."""
        pause = 1
        while 2 * pause * self.lines_per_call <= self.steps:
            pause *= 2
        return pause

    def steps_needed(self, taps: int) -> int:
        """Steps of each of so many taps that suffice to prefetch a portion."""
        return ceil(self.lines_per_call * self.steps_per_line / taps)

    @property
    def portions(self) -> Ints:
        """Portions of each region."""
        return tuple(ceil(prod(count for count, _ in region) / self.lines_per_call) for region in self.regions)

    @property
    def size(self) -> int:
        """Lines of all portions."""
        return sum(self.portions) * self.lines_per_call


def lines(counts: Sequence[int], steps: Sequence[int], channels: int, channel_step: int, size: int) -> Lines:
    """The lines of a box of pixels with so many channels: a region to be prefetched. What is contiguous is one run.

    Where a line begins is not known: a run may touch one more than it fills. NumPy's arrays begin in the middle of one.
    """
    dims = sorted(
        (abs(step) * size, count) for step, count in ((channel_step, channels), *zip(steps, counts, strict=True))
    )
    run, outer = size, list[tuple[int, int]]()
    for step, count in dims:
        if step <= max(run, LINE) and not outer:
            run += (count - 1) * step
        elif count > 1:
            outer.append((count, step))
    count = ceil(run / LINE)
    ends = (count + 1, ceil((run - 1) / count)) if size < run and count <= FEW_LINES else (count, LINE)
    return (*reversed(outer), ends)
