"""How results are cut: boxes of pixels that tasks take, register tiles in them, borders that are kept apart.

Of all that fits, what costs least is taken. Costs are counted in steps: a vector times one channel, added to a sum.
Where channels are taken in pairs, a pair is two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapreplace, nsmallest
from itertools import product
from math import ceil, gcd, inf, prod
from typing import NamedTuple

from ..target import Target
from .axes import Axis, axis_maps, longest, reach
from .records import pieces, up
from .tuning import Tuning, shorter, tuning


class Tiling(NamedTuple):
    """Rows of a tile, rows of a second one for what is left, and the axes on which border pixels are kept apart."""

    rows: int
    short: int
    split: tuple[bool, ...]


class Filling:
    """What tiles in boxes cost: a border pixel meets fewer taps, but pixels in tiles of their own fill them badly.

    A second tile must save more than its price, a share of the time. `even` has rows and costs of tiles that are to
    fill up what is in a box of each row.
    """

    def __init__(
        self, axes: tuple[Axis, ...], forward: bool, rows: int, vectors: int, channels: int, in_place: bool,
        target: Target, price: float, even: dict[int, float],
    ) -> None:  # fmt: skip
        self.channels = channels
        row = tuning(target)
        tiles = row.tiles
        self.tuned, self.begin = tiles, row.boxes.begin
        self.even = even
        self.out_stride = [1 if forward else a.stride for a in axes]
        heights = [rows] if tiles.fixed else range(rows, max(rows - 3, 0), -1)
        none = (False,) * len(axes)
        self.splits = [none]
        self.tiles = [(rows, 0)]
        if prod(self.out_stride) <= 64:
            self.tiles = [(height, short) for height in heights for short in range(height)]
            if not in_place:
                self.splits += _splits(axes, row.search.border_pieces)
        # Where segments of pixels that meet the same taps begin and end does not depend on the box.
        whole = [a.y if forward else a.x for a in axes]
        able = tuple(any(split[i] for split in self.splits) for i in range(len(axes)))
        self.maps = {any(split): axis_maps(axes, forward, whole, split, in_place) for split in {none, able}}

        def price_of(tile: tuple[int, int]) -> tuple[float, float]:
            height, short = tile
            more = (1 + price if short else 1.0) * (1 + tiles.high_price * max(height - tiles.flat_rows, 0))
            whole = shorter(tiles, rows, vectors, height) * height
            less = shorter(tiles, rows, vectors, short) * max(short, tiles.least_rows)
            return more * whole, more * less

        self.prices = {tile: price_of(tile) for tile in self.tiles}
        self.segments = cache(self._segments)
        self.common = cache(self._common)

    def _segments(self, axis: int, apart: bool, box: int) -> tuple[tuple[tuple[int, int], int], ...]:
        """How often so many positions along an axis, in a box, meet so many taps."""
        seen: dict[tuple[int, int], int] = {}
        for s in self.maps[apart][axis].segments:
            for n, often in pieces(s.start, s.stop, box).items():
                seen[n, len(s.taps)] = seen.get((n, len(s.taps)), 0) + often
        return tuple(seen.items())

    def best(self, box: Sequence[int]) -> tuple[float, Tiling]:
        """The steps of the tiles of all boxes for one vector of channels, and those that take the fewest."""
        totals = [(split, self.runs(box, split)) for split in self.splits]
        tiles = [*self.tiles, *((rows, 0) for rows in self.even)]
        return min(
            (self._steps(box, Tiling(*tile, split), total), Tiling(*tile, split))
            for split, total in totals
            for tile in tiles
        )

    def steps(self, box: Sequence[int], tiling: Tiling) -> float:
        """The steps with given tiles."""
        return self._steps(box, tiling, self.runs(box, tiling.split))

    def _common(self, apart: bool, box: int) -> int:
        """The greatest number that divides all that boxes have of rows: tiles of its divisors fill them."""
        axis = len(self.out_stride) - 1
        return gcd(*(n for (n, _), _ in self.segments(axis, apart, box)))

    def runs(self, box: Sequence[int], split: Sequence[bool]) -> dict[int, int]:
        """For runs of so many pixels in a box, the products that each of them takes, of all together."""
        total: dict[int, int] = {}
        segments = (self.segments(i, apart, b) for i, (apart, b) in enumerate(zip(split, box, strict=True)))
        for parts in product(*segments):
            pixels = taps = often = 1
            for (n, met), times in parts:
                pixels, taps, often = pixels * n, taps * met, often * times
            total[pixels] = total.get(pixels, 0) + often * (taps * self.channels + self.begin)
        return total

    def _steps(self, box: Sequence[int], tiling: Tiling, total: dict[int, int]) -> float:
        height, short, split = tiling
        whole, less = self.prices.get((height, short), (self.tuned.uneven * height, 0.0))
        if self.common(split[-1], box[-1]) % height == 0:
            whole = self.even.get(height, self.tuned.evenly_spaced * whole)
        return sum(
            products * ((n - short + height - 1) // height * whole + (0 < n % height <= short) * less)
            for n, products in total.items()
        )


def _splits(axes: tuple[Axis, ...], pieces: int) -> list[tuple[bool, ...]]:
    """Axes on which borders may be kept apart: one of them, or all."""
    long = [i for i, a in enumerate(axes) if a.k > 1]
    longest_kernel = 9 if len(long) > 1 else 16
    long = [i for i in long if axes[i].k <= longest_kernel]
    chosen = [{i} for i in long]
    if len(long) > 1 and prod(2 * axes[i].k - 1 for i in long) <= pieces:
        chosen.append(set(long))
    return [tuple(i in one for i in range(len(axes))) for one in chosen]


class Tasks(NamedTuple):
    """What a box is to threads: how often it is packed, and how many tasks it makes; none if tasks have all boxes."""

    again: int
    each: int


@dataclass(frozen=True)
class Room:
    """What a box may take, and what it costs beside its products."""

    entry_bytes: int  # of an input, packed, and what is kept beside it
    budget: int  # bytes
    most: int  # results
    weight_bytes: int
    result_bytes: int
    l2: int
    packing: float  # steps for an input
    channels: int  # of the results, if they lie apart


class Boxes:
    """Boxes of results, each with the inputs that it meets."""

    def __init__(self, axes: tuple[Axis, ...], forward: bool, room: Room, line: int, row: Tuning) -> None:
        self.axes, self.room = axes, room
        self.costs, self.search = row.boxes, row.search
        self.out_stride = [1 if forward else a.stride for a in axes]
        self.in_stride = [a.stride if forward else 1 for a in axes]
        self.results = [a.y if forward else a.x for a in axes]
        self.count = [ceil(n / f) for n, f in zip(self.results, self.out_stride, strict=True)]
        self.spread = [reach(a, forward) - 1 for a in axes]
        self.line = line  # results along the last axis in a line of memory
        self.choices = cache(self._choices)

    def entries(self, box: Sequence[int]) -> int:
        """Inputs that are packed for a box."""
        ends = zip(box, self.in_stride, self.spread, self.axes, strict=True)
        return prod(min((b - 1) * s + d + 1, b * a.k) for b, s, d, a in ends)

    def number(self, box: Sequence[int]) -> int:
        """How many boxes there are."""
        return prod(ceil(c / b) for c, b in zip(self.count, box, strict=True))

    def fits(self, box: Sequence[int]) -> bool:
        """Whether a box is small enough."""
        small = prod(box) * prod(self.out_stride) <= self.room.most or all(b == 1 for b in box)
        return small and self.entries(box) * self.room.entry_bytes <= self.room.budget

    def footprint(self, box: Sequence[int]) -> int:
        """Bytes that a task has in the caches."""
        results = prod(box) * prod(self.out_stride) * self.room.result_bytes
        return self.entries(box) * self.room.entry_bytes + results + self.room.weight_bytes

    def sizes(self, axis: int, *, narrow: bool) -> list[int]:
        """Lengths along an axis to choose from. Rows are short only if they may be `narrow`."""
        n = self.count[axis]
        many = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64)
        if axis < len(self.count) - 1:
            return sorted({size for size in (*(ceil(n / cuts) for cuts in many), 1, 2, 3, 4) if size <= n})
        size = longest(n, lambda size: self.fits([*[1] * axis, size]))
        cuts = ceil(n / size)
        shorter = [ceil(n / c) for c in (*range(cuts, cuts + 8), 2 * cuts, 3 * cuts, 4 * cuts)]
        if narrow:
            shorter += [ceil(n / (cuts * c)) for c in many]
        line = ceil(self.line / self.out_stride[axis])
        whole = {up(s, line) if 2 * line <= s < n else s for s in shorter}
        least = 1 if narrow else min(self.search.narrowest, size)
        return sorted(s for s in whole if s >= least and self.fits([*[1] * axis, s])) or [size]

    def _choices(self, narrow: bool) -> list[list[int]]:
        """All boxes that fit, made of those lengths."""
        found: list[list[int]] = [[]]
        for axis in reversed(range(len(self.count))):
            sizes = self.sizes(axis, narrow=narrow)
            found = [[s, *b] for b in found for s in sizes if s == 1 or self.fits([*[1] * axis, s, *b])]
        return found

    def best(
        self, threads: int, least: int, steps: Callable[[list[int]], float], tasks: Callable[[list[int]], Tasks]
    ) -> list[int]:
        """The box that costs least. `steps` says what the products take in all boxes; `tasks` what a box is to threads.

        Each of them has something to do if that takes boxes of no fewer than `least` positions.
        """
        costs = self.costs
        wanted = self.search.enough_tasks * threads

        def busy(box: list[int]) -> int:
            each = tasks(box).each
            return min(self.number(box) * each, wanted) if each else wanted

        found = [b for b in self.choices(False) if busy(b) == wanted and prod(b) >= least]
        if found:
            largest = max(map(prod, found))
            found = [b for b in found if self.search.smallest * prod(b) >= largest]
        else:  # few results: as many boxes as there can be
            found = self.choices(True)
            found = [b for b in found if prod(b) >= least] or found
        looked_at = nsmallest(
            self.search.looked_at, found, key=lambda b: (-busy(b), self.entries(b) / prod(b), -prod(b))
        )

        def cost(box: list[int]) -> float:
            number, (again, each) = self.number(box), tasks(box)
            packing = self.room.packing * self.entries(box) * number * again
            ends = self.room.channels * number * self.ends(box, shared=each > 0 and again == 1)
            crowded = max(0.0, self.footprint(box) / self.room.l2 - costs.roomy)
            return (steps(box) + packing + ends + costs.task * number) * (1 + costs.crowded * crowded)

        # Threads that wait only make it longer, so no box that costs more without that need be asked.
        least_cost, best = inf, looked_at[0]
        for alone, box in sorted((cost(box), box) for box in looked_at):
            if alone >= least_cost:
                break
            waiting = self.waiting(box, tasks(box).each, threads)
            together = alone * (1 - costs.waiting + costs.waiting / (1 - waiting))
            if together < least_cost:
                least_cost, best = together, box
        return best

    def waiting(self, box: Sequence[int], each: int, threads: int) -> float:
        """The share of time that threads wait, if a box is so many tasks: see `lost`."""
        if not each or self.number(box) > self.search.many_tasks * threads:
            return 0.0
        lengths = [[min(b, c - at) for at in range(0, c, b)] for c, b in zip(self.count, box, strict=True)]
        return lost([prod(sides) for sides in product(*lengths)], each, threads, self.search.many_tasks)

    def ends(self, box: Sequence[int], shared: bool) -> float:
        """Steps for the ends of runs of results in a box, of one channel: rows, or several of them if they are whole.

        `shared` says that other threads write the same channels meanwhile.
        """
        *outer, rows, columns = [b * f for b, f in zip(box, self.out_stride, strict=True)]
        *_, height, width = self.results
        whole = columns >= width
        lengths = (rows * width,) if whole else (columns, width)
        torn = any(n % self.line for n in lengths) and not (whole and rows >= height)
        return prod(outer) * (1 if whole else rows) * (self.costs.torn_run if torn and shared else self.costs.run)


def lost(sizes: Sequence[int], each: int, threads: int, many: int) -> float:
    """The share of time that threads wait for the last of them, each taking the next piece when it is done with one.

    Each size stands for so many pieces. The mean for that number of threads, two at least, and half of it;
    none if there are more than `many` pieces for each.
    """
    if each * len(sizes) > many * threads:
        return 0.0
    pieces = [size for size in sizes for _ in range(each)]
    return sum(1 - busy(pieces, team) for team in (threads // 2, threads)) / 2


def busy(sizes: Sequence[float], threads: int) -> float:
    """How much of their time threads have work that take pieces of those sizes, from both ends in turns: see ir.py."""
    left = deque(sizes)
    ends = [(0.0, thread) for thread in range(threads)]
    while left:
        end, thread = ends[0]
        heapreplace(ends, (end + (left.pop() if thread % 2 else left.popleft()), thread))
    return sum(sizes) / threads / max(ends)[0]
