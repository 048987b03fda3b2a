"""The launches of a plan: each kernel with its arguments, for the way that was chosen."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...spec.problem import Ints, Problem, dense_strides
from .axes import LAST, factors, is_wide, strides, three, unit, walk
from .records import PARTS, Constants, Launch, Values

FINISH = 1024  # results of a program that adds parts, at most
FINISHERS = 512  # such programs at least, if there are results enough
TOGETHER = 8  # parts that are on their way at once


class Candidate(NamedTuple):
    """One way to take the sums of a problem. The quickest is chosen; of equal ones, the first."""

    seconds: float
    kernel: str
    tile: Ints
    flat: bool
    parts: int
    programs: int
    warps: int
    stages: int


def channels(p: Problem) -> Ints:
    """Channels of a group that a gather sums over, and those that it makes."""
    return (p.cx, p.cy) if p.wanted == "y" else (p.cy, p.cx)


def sums(p: Problem, best: Candidate, precision: str) -> Launch:
    """The launch that takes the sums."""
    if best.kernel in ("weights", "lanes_weights"):
        return _weights_launch(p, best, precision)
    return _gather_launch(p, best, precision)


def _gather_launch(p: Problem, best: Candidate, precision: str) -> Launch:
    given = "x" if p.wanted == "y" else "y"
    summed, made = channels(p)
    over = walk(p)
    split = best.parts > 1
    w_strides = strides(p, "w")
    if p.wanted == "y":
        w_strides = (w_strides[0], w_strides[2], w_strides[1], *w_strides[3:])
    out_strides = workspace_strides(p) if split else strides(p, p.wanted)
    biased = p.bias_stride is not None and not split
    axes = dict(over.values)
    values: Values = (
        ("a_strides", strides(p, given)),
        ("w_strides", w_strides),
        ("out_strides", out_strides),
        ("bias_stride", p.bias_stride or 0),
        *((name, axes[name]) for name in ("a_sizes", "out_sizes", "lead", "rest", "steps", "step_factors")),
        ("images", p.n),
        ("groups", p.g),
        ("summed", summed),
        ("summed_factor", factors((summed,))[0]),
        ("summed_shift", factors((summed,))[1]),
        ("made", made),
        ("parts", best.parts),
        ("part_stride", p.size(p.wanted) if split else 0),
    )
    constants: Constants = (
        ("RANK", p.rank),
        *over.constants,
        ("A_UNIT", unit(strides(p, given))),
        ("W_UNIT", unit(w_strides)),
        ("OUT_UNIT", unit(out_strides)),
        ("ROWS", best.tile[0]),
        ("COLUMNS", best.tile[1]),
    )
    if best.kernel == "gather":
        even = not best.flat and summed % best.tile[2] == 0
        constants += (("DEPTH", best.tile[2]), ("FLAT", best.flat), ("EVEN", even), ("PRECISION", precision))
    constants += (
        ("DOUBLE", p.dtype == "f64"),
        ("WIDE", is_wide(p)),
        ("BIAS", biased),
        ("ACCUMULATE", p.accumulate and not split),
    )
    out = out_tensor(p, split)
    tensors = ((given, p.dtype), ("w", p.dtype), out, ("bias", p.dtype) if biased else out)
    return Launch(best.kernel, best.programs, tensors, values, constants, best.warps, best.stages)


def _weights_launch(p: Problem, best: Candidate, precision: str) -> Launch:
    axes, split = three(p), best.parts > 1
    out_strides = workspace_strides(p) if split else strides(p, "w")
    values = (
        ("x_strides", strides(p, "x")),
        ("y_strides", strides(p, "y")),
        ("out_strides", out_strides),
        ("x_sizes", axes.x),
        ("y_sizes", axes.y),
        ("y_factors", factors(axes.y)),
        ("pad", axes.pad),
        ("images", p.n),
        ("groups", p.g),
        ("x_channels", p.cx),
        ("y_channels", p.cy),
        ("parts", best.parts),
        ("part_stride", p.size("w") if split else 0),
    )
    constants: Constants = (
        ("RANK", p.rank),
        ("KERNEL", axes.w),
        ("STRIDE", axes.stride),
        ("DILATION", axes.dilation),
        ("X_UNIT", unit(strides(p, "x"))),
        ("Y_UNIT", unit(strides(p, "y"))),
        ("OUT_UNIT", unit(out_strides)),
        ("ROWS", best.tile[0]),
        ("COLUMNS", best.tile[1]),
    )
    if best.kernel == "weights":
        inside = is_inside(p)
        over = axes.x == axes.y and axes.stride == (1, 1, 1)
        constants += (
            ("DEPTH", best.tile[2]),
            ("FLAT", best.flat),
            ("X_EVEN", over and _is_even(p, "x")),
            ("Y_EVEN", _is_even(p, "y")),
            ("INSIDE", inside),
            ("PRECISION", precision),
        )
    constants += (("DOUBLE", p.dtype == "f64"), ("WIDE", is_wide(p)), ("ACCUMULATE", p.accumulate and not split))
    tensors = (("x", p.dtype), ("y", p.dtype), out_tensor(p, split))
    return Launch(best.kernel, best.programs, tensors, values, constants, best.warps, best.stages, "weights")


def is_inside(p: Problem) -> bool:
    """Whether no tap of any result lies in the padding."""
    ends = ((o - 1) * s + (k - 1) * d - b for o, s, k, d, b in zip(p.y, p.stride, p.w, p.dilation, p.pad, strict=True))
    return not any(p.pad) and all(end < size for end, size in zip(ends, p.x, strict=True))


def _is_even(p: Problem, role: str) -> bool:
    """Whether pixels of all images follow each other at one distance, that of the innermost axis."""
    of, shape = strides(p, role), (*p.shape(role)[:3], *three(p).sizes(role))
    step = of[LAST]
    for axis in (5, 4, 3, 0):
        if shape[axis] > 1 and of[axis] != step:
            return False
        step *= shape[axis]
    return shape[LAST] > 1


def out_tensor(p: Problem, split: bool) -> tuple[str, str]:
    """What the kernel of the sums writes: the result, or parts of it."""
    return (PARTS, "f64" if p.dtype == "f64" else "f32") if split else (p.wanted, p.out_dtype)


def _order(p: Problem) -> Ints:
    """The six axes of the result from the outermost to the innermost in memory, so that they are written in order."""
    of = strides(p, p.wanted)
    return tuple(sorted(range(6), key=lambda axis: (-abs(of[axis]), axis)))


def _shape(p: Problem) -> Ints:
    return (*p.shape(p.wanted)[:3], *three(p).sizes(p.wanted))


def workspace_strides(p: Problem) -> Ints:
    """Strides of a part of the sums, which lies as the result does, but without gaps."""
    shape = _shape(p)
    dense = dense_strides(shape, _order(p))
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, dense, strict=True))


def finish(p: Problem, parts: int) -> Launch:
    """The launch that adds parts."""
    order, shape, of = _order(p), _shape(p), strides(p, p.wanted)
    step = p.bias_stride or 0
    bias = (0, shape[2] * step, step, 0, 0, 0)
    elements = p.size(p.wanted)
    count = finishers(elements)
    # Few results make small programs, which read several parts side by side, or all would wait for memory in turn.
    beside = min(FINISH // count // 2, 16, 1 << (parts - 1).bit_length()) if parts and count < 128 else 1
    values = (
        ("sizes", tuple(shape[axis] for axis in order)),
        ("out_strides", tuple(of[axis] for axis in order)),
        ("bias_strides", tuple(bias[axis] for axis in order)),
        ("elements", elements),
        ("parts", parts),
    )
    constants: Constants = (
        ("COUNT", count),
        ("BESIDE", beside),
        ("TOGETHER", max(1, min(TOGETHER, ceil(parts / beside)))),
        ("DOUBLE", p.dtype == "f64"),
        ("WIDE", is_wide(p) or parts * elements >= 2**31 - 2**20),
        ("BIAS", p.bias_stride is not None),
        ("ACCUMULATE", p.accumulate),
    )
    out = (p.wanted, p.out_dtype)
    sums = (PARTS, "f64" if p.dtype == "f64" else "f32")
    tensors = (sums if parts else out, out, ("bias", p.dtype) if p.bias_stride is not None else out)
    return Launch("finish", ceil(elements / count), tensors, values, constants, 4, 1)


def finishers(elements: int) -> int:
    """Results of a program that adds parts."""
    count = FINISH
    while count > 32 and elements < count * FINISHERS:
        count //= 2
    return count
