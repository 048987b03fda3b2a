"""What the kernels of `kernels/hopper/weights.py` do, in NumPy: they run on Hopper alone; no interpreter knows them.

It follows the launches of a plan, not the planner: copies of boxes with zeros outside, rows by which taps are shifted,
the runs of programs, slots, and which sum is which weight.
"""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np

KERNEL, STRIDE, DILATION, PAD, BOX, STEP, TAPS, UNITS, SKIP, LINES = 0, 3, 6, 9, 12, 16, 17, 18, 19, 20


PAIRS = {1: ((0, 0),), 2: ((0, 0), (0, 1), (1, 0)), 3: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))}
"""The parts of x and y that are multiplied, by how many there are."""


class Numbers(dict):
    """What a launch gives its kernel, by name."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.__dict__ = self


def numbers(launch: Any) -> Numbers:
    return Numbers((*launch.values, *launch.constants))


def taps_of(unit, n):
    walk, group = n.WALK, unit // n.blocks
    k2, group = group % walk[2], group // walk[2]
    k1, first = group % walk[1], group // walk[1]
    return unit % n.blocks, first % walk[STEP] + first // walk[STEP] * (walk[STEP] * walk[TAPS]), k1, k2


def reach(first, last, axis, n):
    walk = n.WALK
    stride, dilation, pad = (walk[at + axis] for at in (STRIDE, DILATION, PAD))
    start = -(-max(pad - last * dilation, 0) // stride)
    stop = -(-max(n.x_sizes[axis] + pad - first * dilation, 0) // stride)
    return start, min(stop, n.y_sizes[axis])


def boxes(part, n):
    """How many boxes, where they begin, and how many on each axis."""
    walk = n.WALK
    spans = [(0, size) for size in n.y_sizes]
    if walk[SKIP]:
        spans = [(size, 0) for size in n.y_sizes]
        for unit in range(part * walk[UNITS], min((part + 1) * walk[UNITS], n.units)):
            _, k0, k1, k2 = taps_of(unit, n)
            last = min(k0 + walk[STEP] * (walk[TAPS] - 1), walk[0] - 1)
            found = reach(k0, last, 0, n), reach(k1, k1, 1, n), reach(k2, k2, 2, n)
            spans = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(spans, found, strict=True)]
    counts = [-(-max(end - begin, 0) // walk[BOX + at]) for (begin, end), at in zip(spans, (0, 1, 3), strict=True)]
    return prod(counts) * -(-n.images // walk[BOX + 2]), [begin for begin, _ in spans], counts


def find(at, n):
    group, rest = divmod(at, n.whole)
    part = 0
    if n.WALK[SKIP]:
        part = sum(rest >= start * n.columns for start in n.starts[1:])
        rest -= n.starts[part] * n.columns
    count, begins, counts = boxes(part, n)
    if not n.WALK[SKIP]:
        part, rest = divmod(rest, count * n.columns)
    return group, part, rest // count, rest % count, count, begins, counts


def copy(tensor, at, block, steps):
    """A block of a tensor from a position on, with zeros outside."""
    found = np.zeros(block, tensor.dtype)
    places = [[start + i * step for i in range(size)] for start, size, step in zip(at, block, steps, strict=True)]
    inside = [
        [i for i, place in enumerate(line) if 0 <= place < size]
        for line, size in zip(places, tensor.shape, strict=True)
    ]
    if all(inside):
        source = np.ix_(*[[line[i] for i in kept] for line, kept in zip(places, inside, strict=True)])
        found[np.ix_(*inside)] = tensor[source]
    return found


def seen(descriptor, memory):
    """A tensor as a descriptor shows it, in flat memory."""
    size = memory.itemsize
    return np.lib.stride_tricks.as_strided(
        memory[descriptor.offset :], descriptor.shape, [size * stride for stride in descriptor.strides]
    )


def weights_boxes(launch: Any, memory: dict[str, np.ndarray]) -> np.ndarray:
    """The slots, from tensors and areas in flat memory; what nothing writes is NaN."""
    n, walk = numbers(launch), numbers(launch).WALK
    of_y, of_x, of_halo = launch.descriptors
    x, y = memory[of_x.tensor], memory[of_y.tensor]
    every = walk[UNITS] * n.BLOCK // 64 * walk[TAPS]
    side = prod(walk[BOX + 1 : BOX + 4])
    pixels, beside = walk[BOX] * side, 64 // n.BLOCK
    shift = n.HALO // (walk[TAPS] - 1) if n.HALO else 0
    align = 4 if n.TF32 else 8
    many = -(-n.units // walk[UNITS])
    tiles = n.total // n.whole * many * n.columns

    def arranged(at: Any) -> Any:
        return (*at[:3], at[4], at[3])

    def arranged_box(box: np.ndarray) -> np.ndarray:
        return box.swapaxes(3, 4)

    x_lines, y_lines = walk[LINES] == 2, walk[LINES] > 0

    slots = np.full((launch.programs + tiles, every, 64, n.COLUMNS * n.SPLIT), np.nan)
    for program in range(launch.programs):
        at, end = program * n.total // launch.programs, (program + 1) * n.total // launch.programs
        while at < end:
            group, part, column, box, count, begins, counts = find(at, n)
            todo = min(count - box, end - at)
            at += todo
            x_channel = group * n.x_group // align * align
            y_channel = group * n.y_group // align * align + column * n.COLUMNS * n.SPLIT
            sums = np.zeros(slots.shape[1:])
            for number in range(box, box + todo):
                p, q2 = divmod(number, counts[2])
                p, q1 = divmod(p, counts[1])
                image, q0 = divmod(p, counts[0])
                o = [
                    b + q * s
                    for b, q, s in zip(begins, (q0, q1, q2), (*walk[BOX : BOX + 2], walk[BOX + 3]), strict=True)
                ]
                image *= walk[BOX + 2]
                for x_part, y_part in PAIRS[n.PARTS]:
                    x_image, y_image = image + x_part * n.images, image + y_part * n.images
                    halves = []
                    for h in range(n.SPLIT):
                        c = y_channel + h * n.COLUMNS
                        at_y = (o[0], o[1], y_image, o[2], c)
                        half = copy(seen(of_y, y), arranged(at_y) if y_lines else at_y, of_y.block, (1,) * 5)
                        halves.append((arranged_box(half) if y_lines else half).reshape(pixels, n.COLUMNS))
                    y_block = np.concatenate(halves, 1)
                    units = []
                    for u in range(walk[UNITS]):
                        block, *taps = taps_of(part * walk[UNITS] + u, n)
                        i = [o[a] * walk[STRIDE + a] + taps[a] * walk[DILATION + a] - walk[PAD + a] for a in range(3)]
                        c = x_channel + block * n.BLOCK
                        steps = of_x.steps or (1,) * 5
                        at_x = (i[0], i[1], x_image, i[2], c)
                        rows = [copy(seen(of_x, x), arranged(at_x) if x_lines else at_x, of_x.block, steps)]
                        for h in range(n.HALO // n.HALO_BOX):
                            i[0] += (walk[BOX] if h == 0 else n.HALO_BOX) * walk[STRIDE]
                            at_x = (i[0], i[1], x_image, i[2], c)
                            at_x = arranged(at_x) if x_lines else at_x
                            rows.append(copy(seen(of_halo, x), at_x, of_halo.block, steps))
                        rows = [arranged_box(row) for row in rows] if x_lines else rows
                        units.append(np.concatenate([row.reshape(-1, n.BLOCK) for row in rows]))
                    for s in range(every):
                        place, row = s // walk[TAPS] * beside, s % walk[TAPS] * shift * side
                        left = np.concatenate([units[place + b][row : row + pixels] for b in range(beside)], 1)
                        sums[s] += left.T @ y_block
            slots[program + (group * many + part) * n.columns + column] = sums
    return slots


def finish_weights(launch: Any, slots: np.ndarray, out: np.ndarray) -> None:
    """Weights in flat memory, each of which is written once."""
    n, walk = numbers(launch), numbers(launch).WALK
    _, every, _, columns = slots.shape
    many = -(-n.units // walk[UNITS])
    tiles = n.total // n.whole * many * n.columns
    written = np.zeros(out.shape, bool)
    for tile in range(tiles):
        part, group = tile // n.columns % many, tile // n.columns // many
        count = boxes(part, n)[0]
        at = group * n.whole + n.columns * (n.starts[part] if walk[SKIP] else part * count)
        at += tile % n.columns * count
        first = ((at + 1) * n.runs - 1) // n.total
        last = ((at + count) * n.runs - 1) // n.total if count else first - 1
        found = slots[first + tile : last + tile + 1].sum(0)
        for which in range(every):
            for row in range(64):
                unit = part * walk[UNITS] + which // walk[TAPS] * (64 // n.BLOCK) + row // n.BLOCK
                block, k0, k1, k2 = taps_of(unit, n)
                k0 += which % walk[TAPS] * walk[STEP]
                c = group * n.x_group // n.ALIGN * n.ALIGN + block * n.BLOCK + row % n.BLOCK
                if unit >= n.units or k0 >= walk[KERNEL]:
                    continue
                k = [k0, k1, k2]
                if prod(n.FOLD) > 1:
                    folded, g = c // n.x_channels, 0
                    f = (folded // (n.FOLD[2] * n.FOLD[1]), folded // n.FOLD[2] % n.FOLD[1], folded % n.FOLD[2])
                    k = [a * b + d for a, b, d in zip(k, n.FOLD, f, strict=True)]
                    if folded >= prod(n.FOLD) or any(a >= b for a, b in zip(k, n.kernel, strict=True)):
                        continue
                else:
                    g = c // n.x_channels
                    if not group * n.x_group <= c < min((group + 1) * n.x_group, n.groups * n.x_channels):
                        continue
                q = group * n.y_group // n.ALIGN * n.ALIGN + tile % n.columns * columns + np.arange(columns)
                real = (q >= group * n.y_group) & (q < min((group + 1) * n.y_group, n.groups * n.y_channels))
                real &= q // n.y_channels == g
                places = g * n.out_strides[0] + c % n.x_channels * n.out_strides[2]
                places += sum(a * b for a, b in zip(k, n.out_strides[3:], strict=True))
                places = places + q[real] % n.y_channels * n.out_strides[1]
                assert not written[places].any(), "a weight is written twice"
                written[places] = True
                out[places] = found[which, row][real] + (out[places] if n.ACCUMULATE else 0)


def laid(launch: Any, memory: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Memory with what a launch before the sums makes."""
    lay = {"fold_taps": fold_taps, "split": split}[launch.kernel]
    return memory | {launch.tensors[1][0]: lay(launch, memory[launch.tensors[0][0]])}


def parts_of(values: np.ndarray, count: int) -> list[np.ndarray]:
    found = []
    for _ in range(count):
        found.append(values if count == 1 else values.astype(ml_dtypes.bfloat16).astype(float))
        values = values - found[-1]
    return found


def split(launch: Any, given: np.ndarray) -> np.ndarray:
    """A tensor of f32 in parts, each with its channels side by side."""
    n = numbers(launch)
    images = launch.programs // (-(-prod(n.sizes) // n.PIXELS) * -(-n.made // n.CHANNELS))
    found = np.zeros((images, *n.sizes, n.made))
    image, *at, c = np.ix_(*map(range, (images, *n.sizes, n.all_channels)))
    place = (image, c // n.group_channels, c % n.group_channels, *at)
    found[..., : n.all_channels] = given[sum(i * s for i, s in zip(place, n.given_strides, strict=True))]
    assert found.size == n.part_stride
    return np.concatenate([part.reshape(-1) for part in parts_of(found, n.PARTS)])


def fold_taps(launch: Any, x: np.ndarray) -> np.ndarray:
    """x with taps as channels, or in parts, in flat memory."""
    n = numbers(launch)
    image, *pixel, column = np.ix_(*map(range, (n.images, *n.OUT_SIZES, n.WIDTH)))
    assert launch.programs * n.PIXELS * n.COLUMNS >= n.images * prod(n.OUT_SIZES) * n.WIDTH
    f, c = divmod(column, n.CHANNELS)
    taps = (f // (n.FOLD[2] * n.FOLD[1]), f // n.FOLD[2] % n.FOLD[1], f % n.FOLD[2])
    at = [q * s + t * d - b for q, s, t, d, b in zip(pixel, n.STEPS, taps, n.SPREAD, n.PADS, strict=True)]
    inside, offset = f < prod(n.FOLD), sum(i * s for i, s in zip((image, c, *at), n.x_strides, strict=True))
    for i, size in zip(at, n.X_SIZES, strict=True):
        inside = inside & (i >= 0) & (i < size)
    out = np.where(inside, x[np.where(inside, offset, 0)], 0)
    return np.concatenate([part.reshape(-1) for part in parts_of(out, n.SPLIT)])
