"""Plans for depthwise layers whose channels lie together: each channel on its own."""

from __future__ import annotations

from math import ceil, prod

from ...dtypes import DTYPES
from ...spec.problem import Problem
from ..plan.axes import AXES, axis_maps, simplify, tap_offsets, tap_ranges
from ..plan.bits import HALF_COST_DEPTHWISE, fitted
from ..plan.records import Slide, up
from ..plan.tuning import converts_f16, half_width_text, streams
from ..target import Target

SLABS = 2 << 20  # bytes of the sums of all slices of a weight gradient, if four of them fit


def _serves(p: Problem) -> bool:
    """Whether each channel is computed on its own, tensors read in place: depthwise, channels together, few taps."""
    phases = prod(p.stride) if p.wanted == "x" else 1
    steps = (p.x_strides[1], p.y_strides[1])
    return p.g > 1 and p.cx == p.cy == 1 and steps == (1, 1) and phases <= 8 and 1 < prod(p.w) <= 50


def plan(p: Problem, target: Target, threads: int) -> Slide | None:
    """A plan for a depthwise layer, or None for others."""
    if not _serves(p):
        return None
    shape = simplify(p)
    forward = p.wanted != "x"
    item = DTYPES[p.dtype].accumulator.itemsize
    why = ["each channel on its own, the input read where it lies"]
    if p.wanted != "w":
        target = fitted(target, lambda t, step: step * ceil(p.g / t.lanes(item)), HALF_COST_DEPTHWISE)
    lanes = target.lanes(item)
    if target.half_width:
        why.append(half_width_text(lanes, p.g))
    one = [1] * AXES
    maps = axis_maps(shape.axes, forward, one, (False,) * AXES, True)
    taps = prod(a.k for a in shape.axes)
    rows, vectors = (2, 4) if target.registers >= 32 else (1, 4)
    counts = [max(s.stop for s in w.segments) for w in maps]
    outer = counts[0] * counts[1]
    band = max(1, min(counts[2], ceil(outer * counts[2] / (16 * threads))))
    stream = streams(p, target) and all(w.out_step % lanes == 0 for w in maps)
    # Slices must not depend on the number of threads.
    slab = taps * up(p.g, lanes) * item
    slices = max(1, min(outer * ceil(counts[2] / rows) // 2, 32, max(4, SLABS // slab)))
    return Slide(
        wanted=p.wanted, dtype=p.dtype, out_dtype=p.out_dtype, sum="float" if item == 4 else "double",
        lanes=lanes, rows=rows, vectors=vectors, channels=p.g, maps=maps,
        in_sizes=tuple(a.x if forward else a.y for a in shape.axes),
        in_steps=tuple(a.x_step if forward else a.y_step for a in shape.axes),
        taps=tap_offsets(shape.axes), w_step=shape.w_channel[0], band=up(band, rows), slices=slices,
        tap_ranges=tap_ranges(shape.axes) if p.wanted == "w" else None, bias=p.bias_stride, accumulate=p.accumulate,
        stream=stream, converts_f16=converts_f16(target), threads=threads,
        why=tuple(why),
    )  # fmt: skip
