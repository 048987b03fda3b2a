"""What the kernels of `kernels/hopper/gather.py` do, in NumPy: they run on Hopper alone; no interpreter knows them.

It follows the launches of a plan, not the planner: which taps a tile needs, boxes with zeros outside, rows by which
taps are shifted, parts, stages, and where results go. Tensors and areas are flat memory.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
from boxes import copy, numbers, parts_of, seen, split

SOURCE, CHANNEL, PHASE, TAP, TAPS, FIRST = 0, 1, 2, 5, 8, 11  # where a view has its entries
LINES = 4  # in a box, after its four sizes: whether pixels lie innermost


def pack(launch: Any, w: np.ndarray) -> np.ndarray:
    """Weights by rows of all column tiles, taps and channels."""
    n = numbers(launch)
    taps = prod(n.taps)
    rows = launch.programs * n.ROWS * n.DEPTH // (taps * n.depth)
    found = np.zeros((rows, n.PARTS, taps, n.depth))
    row, tap = np.ix_(range(rows), range(taps))
    tile, j = divmod(row, n.columns)
    share, j = tile // n.subtiles, tile % n.subtiles * n.columns + j
    at = list(np.unravel_index(tap, n.taps))
    group, c, has = 0, j % max(n.INNER, 1), j < n.made
    if n.INNER:
        inside = np.unravel_index(np.where(has, j // n.INNER, 0), n.STRIDE)
        for axis, d in enumerate(n.DILATION):
            at[axis], left = divmod(n.shift[axis] + inside[axis] - at[axis] * n.STRIDE[axis], d)
            has = has & (left == 0) & (at[axis] >= 0) & (at[axis] < n.kernel[axis])
    else:
        group, c = divmod(share * n.share_made + j, n.group_made)
        has = has & (j < n.share_made) & (share * n.share_made + j < n.made) & (tap >= 0)
    for k, channel in enumerate(even_first(n.depth) if n.EVEN_FIRST else range(n.depth)):
        summed = share * n.window // 8 * 8 + channel
        kept = has & (summed // n.group_summed == group)
        place = sum(i * s for i, s in zip((group, c, summed % n.group_summed, *at), n.strides, strict=True))
        values = w[np.broadcast_to(place, kept.shape)[kept]]
        for part, each in enumerate(parts_of(values, n.PARTS)):
            found[:, part, :, k][kept] = each
    return found.reshape(-1)


def even_first(count: int) -> list[int]:
    """Channels in the order in which f32 comes through registers."""
    return [start + at for start in range(0, count, 8) for at in (0, 2, 4, 6, 1, 3, 5, 7)]


def needed(n: Any, view: Any, first: tuple[int, ...], rows: int) -> list[range]:
    """The taps of a view that a tile needs, on each axis."""
    found = []
    for axis, extent in enumerate((n.BOX[1], n.BOX[0], n.BOX[3])):
        taps = range(view[TAPS + axis])
        if not n.RESIDENT:
            starts = [first[axis] + view[FIRST + axis] + tap * n.OSTEP[axis] for tap in taps]
            count = min(extent, n.steps[axis] - first[axis])
            live = [tap for tap in taps if starts[tap] < n.sizes[axis] and starts[tap] + count > 0]
            taps = range(live[0], live[-1] + 1) if live else range(0)
            assert list(taps) == live, "taps that reach something follow each other"
        found.append(range(-(-view[TAPS + 1] // rows)) if axis == 1 and n.ROWS > 1 else taps)
    return found


def sums(launch: Any, memory: dict[str, np.ndarray], number: int) -> tuple[np.ndarray, Any]:
    """The sums of a tile, and where it is: its columns' tile, planes, rows and pixels, image and view."""
    n = numbers(launch)
    *inputs, weights = launch.descriptors[:9]
    tile, place = number, []
    for size in n.tiles:
        tile, at = divmod(tile, size)
        place.append(at)
    column, p2, p1, p0, image = (
        at * by for at, by in zip(place, (1, n.BOX[3], n.BOX[0], n.BOX[1], n.BOX[2]), strict=True)
    )
    acc, uses = np.zeros((prod(n.BOX[:LINES]), n.COLUMNS)), 0
    row = prod(n.BOX[1:LINES])
    for view in n.VIEWS if n.LOOPS > 1 else n.VIEWS[tile : tile + 1]:
        rows = n.ROWS if len(n.VIEWS) == 1 else max(min(n.ROWS, view[TAPS + 1]), 1)
        planes, chains, pixels = needed(n, view, (p0, p1, p2), n.ROWS if n.LOOPS == 1 else rows)
        back = min((rows - 1) * n.OSTEP[1], 0)
        for k0, k1, block, k2, part in product(planes, chains, range(n.blocks), pixels, range(n.PARTS)):
            c = view[CHANNEL] + column // n.subtiles * n.window // 8 * 8 + block * n.DEPTH
            at = [
                p1 + view[FIRST + 1] + back + k1 * n.ROWS * n.OSTEP[1] if rows > 1 or n.ROWS == 1 or n.LOOPS == 1
                else p1 + view[FIRST + 1] + k1 * n.OSTEP[1],
                p0 + view[FIRST] + k0 * n.OSTEP[0],
                image + part * n.images,
                p2 + view[FIRST + 2] + k2 * n.OSTEP[2],
                c,
            ]  # fmt: skip
            source = inputs[view[SOURCE]]
            at = [*at[:3], at[4], at[3]] if n.BOX[LINES] else at
            box = [copy(seen(source, memory[source.tensor]), at, source.block, (1,) * 5)]
            if n.MORE:
                halo = inputs[view[SOURCE] + 4]
                assert halo.block[0] == n.MORE >= (n.ROWS - 1) * abs(n.OSTEP[1])
                box.append(copy(seen(halo, memory[halo.tensor]), [at[0] + n.BOX[0], *at[1:]], halo.block, (1,) * 5))
            box = [b.swapaxes(3, 4) for b in box] if n.BOX[LINES] else box
            left = np.concatenate([b.reshape(-1, n.DEPTH) for b in box])
            if n.BOX[LINES] and source.dtype == "f32":
                left = left[:, even_first(n.DEPTH)]
            along = k1 * (n.ROWS if rows > 1 or n.LOOPS == 1 else 1)
            taps = [view[TAP + a] + k * n.KSTEP[a] for a, k in enumerate((k0, along, k2))]
            for use in range(rows * (n.PARTS - part)):
                which, other = use % rows, use // rows
                tap = sum(t * s for t, s in zip(taps, n.TAP_STEPS, strict=True))
                tap += which * n.KSTEP[1] * n.TAP_STEPS[1] + other * n.taps
                ends = (block * n.DEPTH, tap, column * n.COLUMNS)
                ends = ends if n.ACROSS else ends[::-1]
                right = copy(seen(weights, memory[weights.tensor]), ends, weights.block, (1,) * 3)
                right = right.reshape(weights.block[0], weights.block[2])
                shift = abs(n.OSTEP[1]) * (which if n.OSTEP[1] > 0 else rows - 1 - which) * row
                acc += left[shift : shift + len(acc)] @ (right if n.ACROSS else right.T)
                uses += 1
    assert not n.RESIDENT or uses == n.B_STAGES, "every block of weights stays where it is"
    return acc, (column, (p0, p1, p2), image, tile)


def places(launch: Any, column: int, first: tuple[int, ...], image: int, tile: int) -> np.ndarray:
    """Where the results of a tile go, by its rows and columns; -1 is nowhere."""
    n = numbers(launch)
    base, within = column // n.subtiles * n.share_made, column % n.subtiles * n.COLUMNS
    view = n.VIEWS[tile]
    m, j = np.ix_(range(prod(n.BOX[:LINES])), range(within, within + n.COLUMNS))
    t1, t0, i, t2 = np.unravel_index(m, n.BOX[:LINES])
    inside, c = (0, 0, 0), base + j
    has = (image + i < n.images) & (j < (n.made if n.INNER else n.share_made))
    if n.INNER:
        inside, c = np.unravel_index(np.where(j < n.made, j // n.INNER, 0), n.STRIDE), j % n.INNER
    else:
        has = has & (c < n.made)
    place = (image + i) * n.out_strides[0] + c * n.out_strides[1]
    for axis, by in enumerate((t0, t1, t2)):
        t = first[axis] + by
        p = t * n.STRIDE[axis] + view[PHASE + axis] + inside[axis]
        has = has & (t < n.steps[axis]) & (p < n.out_sizes[axis])
        place = place + p * n.out_strides[2 + axis]
    return np.where(has, place, -1)


def copied_places(launch: Any, column: int, first: tuple[int, ...], image: int, tile: int) -> np.ndarray:
    """The same where the copy engine brings the results: each half of a tile is a box."""
    n = numbers(launch)
    result = launch.descriptors[9 + (tile if len(n.VIEWS) > n.LOOPS else 0)]
    halves, lines = [], n.STORE == "lines"

    def arranged(values: Any) -> Any:
        return [*values[:3], values[4], values[3]] if lines else values

    for group in (0, 1):
        start = [first[1], first[0], image, first[2], column // n.subtiles * n.share_made]
        start[4] += column % n.subtiles * n.COLUMNS
        block = arranged(result.block)
        start = arranged([
            at + group * (size - half)
            for at, size, half in zip(start, (*n.BOX[:LINES], 0), (*block[:4], 0), strict=True)
        ])  # fmt: skip
        axes = np.ix_(*[np.arange(at, at + size) for at, size in zip(start, result.block, strict=True)])
        inside = np.ones(result.block, bool)
        for axis, size in zip(axes, result.shape, strict=True):
            inside = inside & (axis < size)
        at = result.offset + sum(axis * stride for axis, stride in zip(axes, result.strides, strict=True))
        found = np.where(inside, at, -1)
        halves.append((found.swapaxes(3, 4) if lines else found).reshape(-1, n.COLUMNS))
    return np.concatenate(halves)


def gather(launch: Any, memory: dict[str, np.ndarray], bias: np.ndarray | None) -> None:
    """All tiles; every result is written once."""
    n = numbers(launch)
    out = memory[launch.tensors[0][0]]
    written = np.zeros(out.shape, bool)
    assert n.total == prod(n.tiles) * (len(n.VIEWS) // n.LOOPS)
    assert not n.RESIDENT or launch.programs % n.tiles[0] == 0
    for number in range(n.total):
        acc, (column, *where) = sums(launch, memory, number)
        found = places(launch, column, *where)
        if n.STORE in ("copy", "lines"):
            assert np.array_equal(copied_places(launch, column, *where), found)
        j = np.arange(n.COLUMNS) + column % n.subtiles * n.COLUMNS
        channels = j % n.INNER if n.INNER else column // n.subtiles * n.share_made + j
        has = found >= 0
        if n.BIAS:
            acc = acc + np.where(has, bias[np.where(has, channels, 0) * n.bias_stride], 0)
        assert not written[found[has]].any(), "a result is written twice"
        written[found[has]] = True
        out[found[has]] = acc[has] + (out[found[has]] if n.ACCUMULATE else 0)


def compute(plan: Any, memory: dict[str, np.ndarray], bias: np.ndarray | None) -> None:
    """A plan's launches, one after another."""
    for launch in plan.launches:
        if launch.kernel == "gather":
            gather(launch, memory, bias)
        else:
            step = {"split": split, "pack": pack}[launch.kernel]
            memory[launch.tensors[1][0]] = step(launch, memory[launch.tensors[0][0]])
