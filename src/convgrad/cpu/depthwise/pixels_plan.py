"""Plans for depthwise layers whose pixels lie together along rows: one image of one channel after another."""

from __future__ import annotations

from math import ceil, prod

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem
from ..plan.axes import Axis, offsets, reach, spatial, tap_offsets
from ..plan.records import Plane, up
from ..plan.tuning import converts_f16
from ..target import Target

AXES = 3
TALLEST = 9  # rows of a kernel: their weights are in registers


def plan(p: Problem, target: Target, threads: int) -> Plane | None:
    """A plan for y or x of a depthwise layer, or None if another kind serves it better."""
    forward = p.wanted == "y"
    alone = p.wanted != "w" and p.g > 1 and p.cx == p.cy == 1 and set(p.stride) == {1}
    if not alone or p.x_strides[-1] != 1 or p.y_strides[-1] != 1:
        return None
    axes = [Axis(1, 1)] * (AXES - p.rank)
    axes += spatial(p)
    item = DTYPES[p.dtype].accumulator.itemsize
    out_sizes: Ints = tuple(a.y if forward else a.x for a in axes)
    lanes, width = target.lanes(item), out_sizes[2]
    why = ["one image of one channel after another, pixels of a row in the lanes"]
    # Measured: vectors of half the width, which cross fewer lines of memory, are quicker unless a row is two or more
    # whole ones; rows of less than one of them are quicker by another nest where they must be converted.
    shorter = target.may_halve_width and (width % lanes > 0 or width == lanes)
    if shorter and (width >= lanes // 2 or DTYPES[p.dtype].size == item):
        lanes = target.at_half_width().lanes(item)
        why.append(f"vectors of {lanes}: in rows of {width} they cross fewer lines of memory than longer ones")
    needed = ceil(width / lanes)
    few = [len(range(0, needed, v)) * v for v in range(1, 5)]
    vectors = target.tile[1] if target.tile else max(v for v in range(1, 5) if few[v - 1] == min(few))
    rows = target.tile[0] if target.tile else (16 if target.registers >= 32 else 8) // vectors
    rows = min(rows, out_sizes[1], 8)
    found = [offsets(a, forward) for a in axes]
    made = Plane(
        wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if item == 4 else "double", lanes=lanes,
        rows=rows, vectors=vectors, images=p.n, channels=p.g, kernel=tuple(a.k for a in axes),
        in_sizes=tuple(a.x if forward else a.y for a in axes), out_sizes=out_sizes,
        in_steps=tuple(a.x_step if forward else a.y_step for a in axes),
        out_steps=tuple(a.y_step if forward else a.x_step for a in axes),
        in_plane=(p.x_strides if forward else p.y_strides)[:2], out_plane=(p.y_strides if forward else p.x_strides)[:2],
        low=tuple(min(o) for o in found), spans=tuple(reach(a, forward) - 1 for a in axes),
        entries=tuple((o[0] - min(o), o[1] - o[0] if len(o) > 1 else 0) for o in found),
        taps=tap_offsets(tuple(axes)), w_step=p.w_strides[0], each=max(1, p.n * p.g // (16 * threads)),
        bias=p.bias_stride, accumulate=p.accumulate, converts_f16=converts_f16(target), threads=threads,
        why=tuple(why),
    )  # fmt: skip
    full = width >= 0.5 * up(width, lanes)
    fits = made.sizes[".band"] * item <= target.l2 // 2
    return made if full and fits and 1 < prod(p.w) <= 128 and made.kernel[1] <= TALLEST else None
