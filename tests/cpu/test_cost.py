"""What boxes and tiles cost, counted before there is a plan."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from convgrad.cpu.plan.axes import Axis, axis_maps
from convgrad.cpu.plan.cost import ROUNDED, BoxNeeds, BoxSearcher, BoxTasks, TileCosts, TileWork, busy, waited
from convgrad.cpu.plan.tuning import tuning

from .machines import AVX512

ROW = tuning(AVX512)
IMAGES = (Axis(1, 1), Axis(8, 8), Axis(28, 28, 3, pad=1), Axis(28, 28, 3, pad=1))


def boxes_of(axes: tuple[Axis, ...], *, forward: bool, line: int = 16) -> BoxSearcher:
    """Boxes of results whose channels are strided."""
    return BoxSearcher(axes, forward, BoxNeeds(1, 1 << 20, 4096, 0, 0, 1 << 20, 0, 1), line, ROW)


def test_runs_that_share_lines_with_those_of_other_threads_cost_more() -> None:
    boxes = boxes_of(IMAGES, forward=False)

    def cost(box: list[int], *, shared: bool) -> float:
        return boxes._cost(box, 0.0, BoxTasks(1, int(shared))) - ROW.boxes.task * boxes.number(box)

    def run(box: list[int], *, shared: bool) -> float:
        return cost(box, shared=shared) / boxes.number(box)

    whole, torn = run([1, 1, 4, 28], shared=True), run([1, 1, 7, 28], shared=True)
    assert whole < torn  # 112 results are seven lines of 16, 196 are not whole ones
    assert run([1, 1, 7, 28], shared=False) == whole
    assert run([1, 2, 28, 28], shared=True) == 2 * whole  # a run of each image
    assert run([1, 1, 4, 16], shared=True) == 4 * torn  # a run of each row, and rows are not whole lines


@pytest.mark.parametrize("forward", [False, True])
def test_tiles_are_counted_as_they_are_computed(forward: bool) -> None:
    """Of runs of pixels in a box that have the same taps."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        axes = []
        for _ in range(4):
            k, stride, x = (int(rng.integers(1, high)) for high in (5, 4, 12))
            pad = int(rng.integers(0, k))
            axes.append(Axis(x, max(1, (x + 2 * pad - k) // stride + 1), k, stride, 1, pad))
        split = tuple(bool(n) for n in rng.integers(0, 2, 4))
        box = [int(rng.integers(1, 9)) for _ in axes]
        costs = TileCosts(tuple(axes), forward, False, TileWork(6, 4, 10, 0.0, {}, ROW))
        costs.splits, costs.maps = [split], {
            is_split: axis_maps(tuple(axes), forward, box, (is_split,) * 4, False) for is_split in (False, True)
        }  # fmt: skip
        maps = axis_maps(tuple(axes), forward, box, split, False)
        counted: dict[int, int] = {}
        for corner in product(*(range(0, m.boxes * m.box, m.box) for m in maps)):
            for part in product(*(m.segments for m in maps)):
                ends = [min(s.stop, at + b) - max(s.start, at) for s, at, b in zip(part, corner, box, strict=True)]
                if min(ends) > 0:
                    taps = prod(len(s.taps) for s in part)
                    counted[prod(ends)] = counted.get(prod(ends), 0) + taps * 10 + ROW.boxes.begin
        steps, tiling = costs.best(box)
        assert steps == costs.steps(box, tiling)
        assert costs.runs(box, split) == counted


@pytest.mark.parametrize("threads", [4, 16, 64])
def test_every_thread_has_tasks_if_boxes_can_be_small_enough(threads: int) -> None:
    boxes = boxes_of(IMAGES, forward=True)
    _, box = boxes.best(threads, 12, lambda box: 1000.0, lambda box: BoxTasks(1, 1))
    assert boxes.fits(box)
    assert boxes.number(box) >= (ROW.search.enough_tasks if threads <= ROUNDED else 1) * threads


def test_threads_wait_for_the_last_task() -> None:
    assert busy([1, 1, 1, 1], 2) == busy([2, 1, 1], 2) == 1.0
    assert busy([1, 1, 1], 2) == 0.75  # one of two threads waits half of the time
    assert waited([5, 5], 2, 4, 32) == 0.0
    assert waited([1], 3, 2, 32) == (0.0 + 0.25) / 2  # of one thread, and of two
    assert waited([1], 3, 2, 1) == 0.0  # more tasks than one for each
    assert waited([1], 48, 32, 8) == 0.25  # for so many threads alone: work is cut for just as many
