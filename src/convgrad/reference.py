"""The three computations, as plainly as NumPy can say them. Right for every problem, fast for none.

Numerics: products and sums are taken in the accumulator type (float32 for f32, bf16 and f16; float64 for f64), in
no particular order. A bias, and what `out` held when accumulating, are added there too; then one rounding to nearest
even gives the result. With `oracle=True` everything is float64 and comes back unrounded.

Each kernel element k meets x in a strided slice that lines up with a slice of y, so each computation is a sum over k
of one matrix product on those slices. What lies outside x has no product at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from .dtypes import DTYPES, Array
from .spec.problem import Problem

Index = tuple[Any, ...]


def compute(problem: Problem, tensors: dict[str, Array], out: Array | None = None, *, oracle: bool = False) -> Array:
    """The wanted tensor, over the axes of `Problem.shape`.

    `tensors` holds the given two by role, in the same axes, and `bias` if there is one, as (g, c). `out` is the array
    to write to, and to add to when accumulating; without it a new one is made.
    """
    sums = np.float64 if oracle else DTYPES[problem.dtype].accumulator
    wide = {role: np.asarray(array, sums) for role, array in tensors.items()}
    result = _COMPUTE[problem.wanted](problem, wide, np.dtype(sums))
    if "bias" in wide:
        result += wide["bias"][(None, ...) + (None,) * problem.rank]
    if problem.accumulate and out is not None:
        result += np.asarray(out, sums)
    if oracle:
        return result
    # Overflow to infinity is what rounding to a narrow type means; it is no accident to warn of.
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = result.astype(DTYPES[problem.out_dtype].numpy, copy=False)
    if out is None:
        return rounded
    out[...] = rounded
    return out


def _tap_ranges(p: Problem) -> Iterator[tuple[Index, Index, Index]]:
    """Of each kernel element: its place in w, the slice of x it reads and the slice of y it serves."""
    for k in product(*map(range, p.w)):
        reach = [p.reach(axis, k[axis]) for axis in range(p.rank)]
        if all(start < stop for start, stop in reach):
            shift = [t * d - b for t, d, b in zip(k, p.dilation, p.pad, strict=True)]
            x = (
                slice(s * start + f, s * (stop - 1) + f + 1, s)
                for s, (start, stop), f in zip(p.stride, reach, shift, strict=True)
            )
            yield (..., *k), (..., *x), (..., *(slice(start, stop) for start, stop in reach))


def _flat(a: Array) -> Array:
    """(n, g, c, *space) as (n, g, c, pixels)."""
    return a.reshape(*a.shape[:3], int(np.prod(a.shape[3:])))


def _forward(p: Problem, t: dict[str, Array], sums: np.dtype[Any]) -> Array:
    y = np.zeros(p.shape("y"), sums)
    for k, at_x, at_y in _tap_ranges(p):
        x = t["x"][at_x]
        y[at_y] += (t["w"][k] @ _flat(x)).reshape(p.n, p.g, p.cy, *x.shape[3:])
    return y


def _data(p: Problem, t: dict[str, Array], sums: np.dtype[Any]) -> Array:
    x = np.zeros(p.shape("x"), sums)
    for k, at_x, at_y in _tap_ranges(p):
        y = t["y"][at_y]
        x[at_x] += (t["w"][k].swapaxes(1, 2) @ _flat(y)).reshape(p.n, p.g, p.cx, *y.shape[3:])
    return x


def _weights(p: Problem, t: dict[str, Array], sums: np.dtype[Any]) -> Array:
    w = np.zeros(p.shape("w"), sums)
    for k, at_x, at_y in _tap_ranges(p):
        # (g, cy, images and pixels) @ (g, images and pixels, cx)
        y, x = (np.moveaxis(_flat(a), 0, 2) for a in (t["y"][at_y], t["x"][at_x]))
        length = p.n * y.shape[-1]
        w[k] = y.reshape(p.g, p.cy, length) @ x.reshape(p.g, p.cx, length).swapaxes(1, 2)
    return w


_COMPUTE = {"y": _forward, "x": _data, "w": _weights}


def canonical(array: Array, problem: Problem, role: str) -> Array:
    """A caller's array as a view over the axes of `Problem.shape`, through the problem's strides."""
    strides = tuple(s * array.itemsize for s in problem.strides(role))
    return np.lib.stride_tricks.as_strided(array, problem.shape(role), strides)
