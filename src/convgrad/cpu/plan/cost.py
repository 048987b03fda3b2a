"""What it costs to compute results in boxes of pixels and in register tiles, and which boxes cost least.

Threads take boxes as tasks; tiles compute the pixels of a box. `TileCosts` counts the steps of tiles: pixels at the
border have fewer taps, but if they are kept apart, they fill tiles badly. `BoxSearcher` adds what a box costs
beside that: inputs that are packed again where boxes overlap, lines of memory that two threads write, threads that
wait. The numbers are in tuning.py, and so is the unit: a step is a vector times one channel, added to a sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapreplace, nsmallest
from itertools import product
from math import ceil, gcd, inf, prod
from typing import NamedTuple

from .axes import Axis, axis_maps, longest, reach
from .records import pieces, up
from .tuning import Tuning, shorter

ROUNDED = 16
"""Up to so many threads, work is cut for the next power of two, and beyond for the next multiple of half as many: with
256 equal tasks, two of three of 192 threads would wait for the last 64.
"""
MANY_PHASES = 64  # of so many, none is looked at closely: planning would take long. Origin not recorded


class Tiling(NamedTuple):
    """Rows of a tile, rows of a second one for what is left, and the axes on which border pixels are kept apart."""

    rows: int
    short: int
    split: tuple[bool, ...]


class TileWork(NamedTuple):
    """What tiles do, whatever the boxes."""

    most_rows: int
    vectors: int  # in a row
    channels: int  # that are summed
    second_tile: float  # the share of the time that a second tile must save
    even_steps: dict[int, float]  # steps of tiles of other heights, if their pixels are always evenly spaced
    tuning: Tuning


class TileCosts:
    """Steps of the tiles of all boxes, for one vector of channels."""

    def __init__(self, axes: tuple[Axis, ...], forward: bool, in_place: bool, work: TileWork) -> None:
        self.work, self.tuned = work, work.tuning.tiles
        none = (False,) * len(axes)
        self.splits = [none]
        self.tiles = [(work.most_rows, 0)]
        if prod(_out_strides(axes, forward)) <= MANY_PHASES:
            heights = [work.most_rows] if self.tuned.fixed else range(work.most_rows, max(work.most_rows - 3, 0), -1)
            self.tiles = [(height, short) for height in heights for short in range(height)]
            if not in_place:
                self.splits += _splits(axes, work.tuning.search.border_pieces)
        self.tile_steps = {tile: self._tile_steps(*tile) for tile in self.tiles}
        # Where segments of pixels with the same taps begin and end does not depend on the box.
        whole = [a.y if forward else a.x for a in axes]
        able = tuple(any(split[i] for split in self.splits) for i in range(len(axes)))
        self.maps = {any(split): axis_maps(axes, forward, whole, split, in_place) for split in {none, able}}
        self.segments = cache(self._segments)
        self.common = cache(self._common)

    def best(self, box: Sequence[int]) -> tuple[float, Tiling]:
        """The fewest steps, and the tiling that takes them."""
        tiles = [*self.tiles, *((rows, 0) for rows in self.work.even_steps)]
        found = []
        for split in self.splits:
            total, common = self.runs(box, split).items(), self.common(split[-1], box[-1])
            found += [(self._steps(rows, short, total, common), (rows, short, split)) for rows, short in tiles]
        steps, tiling = min(found)
        return steps, Tiling(*tiling)

    def steps(self, box: Sequence[int], tiling: Tiling) -> float:
        """The steps with given tiles."""
        total, common = self.runs(box, tiling.split).items(), self.common(tiling.split[-1], box[-1])
        return self._steps(tiling.rows, tiling.short, total, common)

    def runs(self, box: Sequence[int], split: Sequence[bool]) -> dict[int, int]:
        """For runs of so many pixels in a box, the products that each pixel takes, of all such runs together."""
        total: dict[int, int] = {}
        begin = self.work.tuning.boxes.begin
        segments = (self.segments(i, is_split, b) for i, (is_split, b) in enumerate(zip(split, box, strict=True)))
        for parts in product(*segments):
            pixels = taps = often = 1
            for (n, along), times in parts:
                pixels, taps, often = pixels * n, taps * along, often * times
            total[pixels] = total.get(pixels, 0) + often * (taps * self.work.channels + begin)
        return total

    def _steps(self, height: int, short: int, total: Iterable[tuple[int, int]], common: int) -> float:
        """The steps of all runs; `common` divides their pixels. Planning spends most of its time here."""
        whole, less = self.tile_steps.get((height, short), (self.tuned.uneven * height, 0.0))
        if common % height == 0:
            whole = self.work.even_steps.get(height, self.tuned.evenly_spaced * whole)
        if short == 0:
            return sum([products * ((n + height - 1) // height * whole) for n, products in total])
        up = height - 1 - short
        return sum([
            products * ((n + up) // height * whole + (less if 0 < n % height <= short else 0.0))
            for n, products in total
        ])  # fmt: skip

    def _tile_steps(self, height: int, short: int) -> tuple[float, float]:
        """The steps of a tile and of a second one, for each product of a pixel."""
        work, tuned = self.work, self.tuned
        price = 1 + work.second_tile if short else 1.0
        price *= 1 + tuned.high_price * max(height - tuned.flat_rows, 0)
        whole = shorter(tuned, work.most_rows, work.vectors, height) * height
        less = shorter(tuned, work.most_rows, work.vectors, short) * max(short, tuned.least_rows)
        return price * whole, price * less

    def _segments(self, axis: int, is_split: bool, box: int) -> tuple[tuple[tuple[int, int], int], ...]:
        """How often there are so many positions with so many taps along an axis, in boxes of a size."""
        seen: dict[tuple[int, int], int] = {}
        for s in self.maps[is_split][axis].segments:
            for n, often in pieces(s.start, s.stop, box).items():
                seen[n, len(s.taps)] = seen.get((n, len(s.taps)), 0) + often
        return tuple(seen.items())

    def _common(self, is_split: bool, box: int) -> int:
        """The greatest number that divides all pieces of rows in boxes: tiles of its divisors fill them."""
        axis = len(self.maps[is_split]) - 1
        return gcd(*(n for (n, _), _ in self.segments(axis, is_split, box)))


def _out_strides(axes: tuple[Axis, ...], forward: bool) -> list[int]:
    return [1 if forward else a.stride for a in axes]


def _splits(axes: tuple[Axis, ...], pieces: int) -> list[tuple[bool, ...]]:
    """Axes on which borders may be kept apart: one of them, or all."""
    long = [i for i, a in enumerate(axes) if a.k > 1]
    longest_kernel = 9 if len(long) > 1 else 16
    long = [i for i in long if axes[i].k <= longest_kernel]
    chosen = [{i} for i in long]
    if len(long) > 1 and prod(2 * axes[i].k - 1 for i in long) <= pieces:
        chosen.append(set(long))
    return [tuple(i in one for i in range(len(axes))) for one in chosen]


class BoxTasks(NamedTuple):
    """What a box is to threads: how often it is packed, and how many tasks it makes; none if tasks have all boxes."""

    packed: int
    tasks: int


@dataclass(frozen=True)
class BoxNeeds:
    """What a box may take, and what it costs beside its products."""

    entry_bytes: int  # of an input, packed, and what is kept beside it
    budget: int  # bytes of all entries
    most_results: int
    weight_bytes: int
    result_bytes: int
    l2: int
    packing: float  # steps for an input
    channels: int  # of the results, if they are strided


class BoxSearcher:
    """Boxes of results, each with the inputs that its taps reach.

    `line` is how many results along the last axis are in a line of memory.
    """

    def __init__(self, axes: tuple[Axis, ...], forward: bool, needs: BoxNeeds, line: int, tuning: Tuning) -> None:
        self.axes, self.needs, self.line = axes, needs, line
        self.costs, self.search = tuning.boxes, tuning.search
        self.out_strides = _out_strides(axes, forward)
        self.in_strides = [a.stride if forward else 1 for a in axes]
        self.results = [a.y if forward else a.x for a in axes]
        self.positions = [ceil(n / f) for n, f in zip(self.results, self.out_strides, strict=True)]
        self.overlap = [reach(a, forward) - 1 for a in axes]
        self.choices = cache(self._choices)

    def entries(self, box: Sequence[int]) -> int:
        """Inputs that are packed for a box."""
        ends = zip(box, self.in_strides, self.overlap, self.axes, strict=True)
        return prod(min((b - 1) * s + d + 1, b * a.k) for b, s, d, a in ends)

    def number(self, box: Sequence[int]) -> int:
        """How many boxes there are."""
        return prod(ceil(n / b) for n, b in zip(self.positions, box, strict=True))

    def fits(self, box: Sequence[int]) -> bool:
        """Whether a box is small enough."""
        small = prod(box) * prod(self.out_strides) <= self.needs.most_results or all(b == 1 for b in box)
        return small and self.entries(box) * self.needs.entry_bytes <= self.needs.budget

    def best(
        self,
        threads: int,
        least: int,
        steps: Callable[[list[int]], float],
        tasks: Callable[[list[int]], BoxTasks],
    ) -> tuple[float, list[int]]:
        """The fewest steps, of all threads and with those in which some wait; and the box that takes them.

        Boxes have no fewer than `least` positions, if every thread has enough tasks then. `steps` says what the
        products take in all boxes, `tasks` what a box is to threads.
        """
        looked_at = self._looked_at(threads, least, tasks)
        # Threads that wait only make it longer, so a box that costs more even if none waits need not be looked at.
        waiting = self.costs.waiting
        least_cost, best = inf, looked_at[0]
        for alone, box in sorted((self._cost(box, steps(box), tasks(box)), box) for box in looked_at):
            if alone >= least_cost:
                break
            waited = self._waited(box, tasks(box).tasks, threads)
            cost = alone * (1 - waiting + waiting / (1 - waited))
            if cost < least_cost:
                least_cost, best = cost, box
        return least_cost, best

    def _looked_at(self, threads: int, least: int, tasks: Callable[[list[int]], BoxTasks]) -> list[list[int]]:
        """The boxes to choose from: those that leave fewest threads without work, and of these overlap least."""
        if threads > ROUNDED:
            return self._looked_at_by_many(threads, least, tasks)
        wanted = self.search.enough_tasks * threads

        def useful_tasks(box: list[int]) -> int:
            each = tasks(box).tasks
            return min(self.number(box) * each, wanted) if each else wanted

        found = [b for b in self.choices(False) if useful_tasks(b) == wanted and prod(b) >= least]
        if found:
            largest = max(map(prod, found))
            found = [b for b in found if self.search.smallest * prod(b) >= largest]
        else:  # few results: as many boxes as there can be
            found = self.choices(True)
            found = [b for b in found if prod(b) >= least] or found
        return nsmallest(
            self.search.looked_at, found, key=lambda b: (-useful_tasks(b), self.entries(b) / prod(b), -prod(b))
        )  # fmt: skip

    def _looked_at_by_many(self, threads: int, least: int, tasks: Callable[[list[int]], BoxTasks]) -> list[list[int]]:
        """The same for a large team, which may have one task for each thread.

        Threads that have nothing to do at the end cost it more than inputs that are packed again.
        """
        choices = self.choices(True)
        largest = max((prod(b) for b in choices if self.number(b) * tasks(b).tasks >= threads), default=0)
        found = [b for b in choices if prod(b) >= least and self.search.smallest * prod(b) >= largest]
        counted = [(b, self.number(b) * tasks(b).tasks or threads) for b in found or choices]
        keys = [
            (
                -min(number, threads),
                ceil(number / threads) / number * (1 + self.search.overlap * self.entries(b) / prod(b)),
                -prod(b),
                b,
            )
            for b, number in counted
        ]
        return [key[-1] for key in nsmallest(self.search.looked_at_by_many, keys)]

    def _choices(self, short_rows: bool) -> list[list[int]]:
        """All boxes that fit. Rows are short only if they may be `short_rows`."""
        found: list[list[int]] = [[]]
        for axis in reversed(range(len(self.positions))):
            sizes = self._row_lengths(short_rows) if axis == len(self.positions) - 1 else self._lengths(axis)
            found = [[s, *b] for b in found for s in sizes if s == 1 or self.fits([*[1] * axis, s, *b])]
        return found

    def _lengths(self, axis: int) -> list[int]:
        """Lengths of boxes along an axis that is not the last."""
        n = self.positions[axis]
        return sorted({size for size in (*(ceil(n / cuts) for cuts in CUTS), 1, 2, 3, 4) if size <= n})

    def _row_lengths(self, short_rows: bool) -> list[int]:
        """Lengths of boxes along the last axis: in whole lines of memory, if a row is cut."""
        axis, n = len(self.positions) - 1, self.positions[-1]
        size = longest(n, lambda size: self.fits([*[1] * axis, size]))
        cuts = ceil(n / size)
        lengths = [ceil(n / c) for c in (*range(cuts, cuts + 8), 2 * cuts, 3 * cuts, 4 * cuts)]
        if short_rows:
            lengths += [ceil(n / (cuts * c)) for c in CUTS]
        line = ceil(self.line / self.out_strides[axis])
        whole = {up(s, line) if 2 * line <= s < n else s for s in lengths}
        least = 1 if short_rows else min(self.search.shortest_row, size)
        return sorted(s for s in whole if s >= least and self.fits([*[1] * axis, s])) or [size]

    def _cost(self, box: list[int], steps: float, tasks: BoxTasks) -> float:
        """The steps of all boxes, if no thread waits."""
        number, costs, needs = self.number(box), self.costs, self.needs
        packing = needs.packing * self.entries(box) * number * tasks.packed
        ends = needs.channels * number * self._end_steps(box, shared=tasks.tasks > 0 and tasks.packed == 1)
        results = prod(box) * prod(self.out_strides) * needs.result_bytes
        footprint = self.entries(box) * needs.entry_bytes + results + needs.weight_bytes
        crowded = max(0.0, footprint / needs.l2 - costs.roomy)
        return (steps + packing + ends + costs.task * number) * (1 + costs.crowded * crowded)

    def _end_steps(self, box: Sequence[int], shared: bool) -> float:
        """Steps for the ends of runs of results in a box, of one channel: rows, or several of them if they are whole.

        `shared` says that other threads write the same channels meanwhile.
        """
        *outer, rows, columns = [b * f for b, f in zip(box, self.out_strides, strict=True)]
        *_, height, width = self.results
        whole = columns >= width
        runs = (rows * width,) if whole else (columns, width)
        torn = any(n % self.line for n in runs) and not (whole and rows >= height)
        return prod(outer) * (1 if whole else rows) * (self.costs.torn_run if torn and shared else self.costs.run)

    def _waited(self, box: Sequence[int], tasks: int, threads: int) -> float:
        """The share of time that threads wait, if a box is so many tasks: see `waited`."""
        many = self.search.many_tasks
        if not tasks or self.number(box) > many * threads:
            return 0.0
        lengths = [[min(b, n - at) for at in range(0, n, b)] for n, b in zip(self.positions, box, strict=True)]
        return waited([prod(sides) for sides in product(*lengths)], tasks, threads, many)


CUTS = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64)  # an axis is cut into so many boxes. Origin not recorded


def waited(sizes: Sequence[int], each: int, threads: int, many: int) -> float:
    """The share of time that threads wait for the last one, if each takes the next task when it has done one.

    Each size stands for `each` tasks. The mean over `threads`, which is two or more, and half of them, because work is
    cut for a rounded number of threads; 0 if there are more than `many` tasks for each thread.
    """
    if each * len(sizes) > many * threads:
        return 0.0
    tasks = [size for size in sizes for _ in range(each)]
    teams = (threads // 2, threads) if threads <= ROUNDED else (threads,)
    return sum(1 - busy(tasks, team) for team in teams) / len(teams)


def busy(sizes: Sequence[float], threads: int) -> float:
    """The share of their time for which threads have work, if they take tasks of those sizes from both ends."""
    left = deque(sizes)
    ends = [(0.0, thread) for thread in range(threads)]
    while left:
        end, thread = ends[0]
        heapreplace(ends, (end + (left.pop() if thread % 2 else left.popleft()), thread))
    return sum(sizes) / threads / max(ends)[0]
