"""Problems with a name: each is here for a reason, or because it was wrong once."""

from __future__ import annotations

from itertools import product

import numpy as np

from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem

# Without the wanted tensor and the dtype: every case serves for all of them.
GEOMETRIES = {
    "one element": "n1 g1 cx1 cy1 x1 w1 y1 s1 d1 p0",
    "plain": "n2 g1 cx3 cy4 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1",
    "channels last": "n2 g1 cx3 cy4 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc",
    "pointwise": "n2 g1 cx5 cy3 x4x4 w1x1 y4x4 s1x1 d1x1 p0x0",
    "grouped": "n2 g3 cx2 cy4 x6x5 w3x2 y4x4 s1x1 d1x1 p0x0",
    "grouped, channels last": "n2 g3 cx2 cy4 x6x5 w3x2 y4x4 s1x1 d1x1 p0x0 x@nxc w@xio y@nxc",
    "depthwise": "n1 g17 cx1 cy1 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1",
    "depthwise with a multiplier": "n1 g4 cx1 cy3 x6x6 w3x3 y3x3 s2x2 d1x1 p1x1 x@nxc w@xio y@nxc",
    "stride leaves a rest of x": "n1 g1 cx2 cy2 x8x9 w3x3 y3x3 s2x3 d1x1 p0x0",
    "stride beyond the kernel": "n1 g1 cx2 cy2 x11 w2 y3 s4 d1 p0",
    "dilation beyond x": "n1 g1 cx2 cy2 x3 w3 y1 s1 d4 p3",
    "padding beyond the kernel": "n1 g1 cx2 cy2 x1 w3 y100 s1 d1 p100",
    "padding hides x": "n1 g1 cx2 cy2 x2 w2 y3 s1 d1 p9",
    "kernel as large as x": "n3 g1 cx2 cy2 x5x5 w5x5 y1x1 s1x1 d1x1 p0x0",
    "kernel with gaps between windows": "n1 g1 cx1 cy2 x20 w3 y3 s7 d2 p1",
    "uneven axes": "n1 g2 cx2 cy1 x9x1x4 w2x1x3 y4x1x4 s2x1x1 d3x1x1 p1x0x1",
    "volume": "n1 g1 cx2 cy3 x4x5x6 w3x3x3 y4x5x6 s1x1x1 d1x1x1 p1x1x1",
    "volume, channels last": "n1 g2 cx2 cy3 x4x5x6 w3x2x1 y2x2x6 s2x3x1 d1x1x1 p1x0x0 x@nxc w@xio y@nxc",
    "no images": "n0 g1 cx2 cy2 x5 w3 y3 s1 d1 p0",
    "no pixels": "n1 g1 cx2 cy2 x0 w3 y2 s1 d1 p2",
    "stem": "n1 g1 cx3 cy8 x22x22 w7x7 y11x11 s2x2 d1x1 p3x3 x@nxc w@xio y@nxc",
    "x runs backwards": "n1 g1 cx2 cy2 x5 w3 y5 s1 d1 p1 x@0,0,5,-1",
    "x is one value": "n2 g1 cx2 cy2 x5 w3 y5 s1 d1 p1 x@0,0,0,0",
}


def problems(dtype: str = "f32") -> dict[str, Problem]:
    """Every geometry with every wanted tensor, in one element type."""
    found = {}
    for (name, text), wanted in product(GEOMETRIES.items(), "xwy"):
        if f"{wanted}@0," in text:
            continue  # two results cannot share an address, and a result runs forwards here
        found[f"{name}: {wanted}"] = Problem.parse(f"{wanted} {dtype} {text}")
    return found


def tensors(problem: Problem, rng: np.random.Generator, largest: int = 3) -> dict[str, np.ndarray]:
    """Integer values for the given tensors of a problem, over the axes of `Problem.shape`, in its strides."""
    return {role: array(problem, role, rng, largest) for role in problem.given}


def array(problem: Problem, role: str, rng: np.random.Generator, largest: int = 3) -> np.ndarray:
    """An array with a problem's shape and strides, filled with small integers."""
    shape, strides = problem.shape(role), problem.strides(role)
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    memory = rng.integers(-largest, largest + 1, 1 + sum(map(abs, reach)) if 0 not in shape else 1)
    memory = memory.astype(DTYPES[problem.dtype_of(role)].numpy)
    first = -sum(min(r, 0) for r in reach) if 0 not in shape else 0
    steps = [s * memory.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(memory[first:], shape, steps)


def definition(problem: Problem, given: dict[str, np.ndarray]) -> np.ndarray:
    """The wanted tensor straight from the definition, one pair of places at a time, in float64."""
    p = problem
    t = {role: given[role].astype(np.float64) for role in p.given}
    t[p.wanted] = np.zeros(p.shape(p.wanted))
    for o in product(*map(range, p.y)):
        for k in product(*map(range, p.w)):
            i = tuple(a * s + b * d - q for a, s, b, d, q in zip(o, p.stride, k, p.dilation, p.pad, strict=True))
            if all(0 <= a < n for a, n in zip(i, p.x, strict=True)):
                x, w, y = t["x"][(..., *i)], t["w"][(..., *k)], t["y"][(..., *o)]
                if p.wanted == "y":
                    y += np.einsum("ngi,goi->ngo", x, w)
                elif p.wanted == "x":
                    x += np.einsum("ngo,goi->ngi", y, w)
                else:
                    w += np.einsum("ngo,ngi->goi", y, x)
    return t[p.wanted]
