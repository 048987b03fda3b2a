"""Values that make results exact, and the comparison that needs no tolerance, as benchdnn does it.

Tensors hold small integers, and one of them is thinned until sums fit the digits of the result. So whatever the order
of summation, there is one right result, and it must be met to the bit. A result that is mostly zeros proves little: it
is right, but it is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .. import reference
from ..dtypes import DTYPES, Array
from ..spec import Problem
from ..spec.table import Op


@dataclass(frozen=True)
class Ranges:
    """The largest absolute values of a dtype's integers."""

    src: int
    weights: int
    transposed_weights: int
    diff_dst: int


RANGES = {
    "f32": Ranges(32, 32, 32, 8),
    "f64": Ranges(32, 32, 32, 8),
    "bf16": Ranges(4, 4, 8, 4),
    "f16": Ranges(4, 2, 2, 4),
}
BIAS = 8
TRUST = 0.3  # the share of values other than zero that a result needs


@dataclass(frozen=True)
class Recipe:
    """Integers from -largest to largest, of which a share is kept; the others are zeros."""

    largest: int
    density: float = 1.0


def length(op: Op, problem: Problem) -> int:
    """How many products a value of the result is the sum of, at most."""
    if problem.wanted == "w":
        # benchdnn takes the size of dst, which is x in a transposed operation.
        return problem.n * prod(problem.x if op.transposed else problem.y)
    return prod(problem.w) * (problem.cx if problem.wanted == "y" else problem.cy)


def recipes(op: Op, problem: Problem) -> dict[str, Recipe]:
    """What each input holds, by its name. One is thinned: src forward, diff_dst in both gradients."""
    ranges = RANGES[problem.dtype]
    weights = ranges.transposed_weights if op.transposed else ranges.weights
    safe = 2 ** DTYPES[problem.out_dtype].digits / (ranges.src * weights)
    density = min(1.0, safe / max(1, length(op, problem)))
    found = {"src": Recipe(ranges.src), "weights": Recipe(weights), "diff_dst": Recipe(ranges.diff_dst, density)}
    if "Backward" not in op.kind:
        found["src"] = Recipe(ranges.src, density)
    found["bias"] = Recipe(BIAS)
    return {arg.name: found[arg.name] for arg in op.inputs if arg.name in found}


def balanced(bounds: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """Densities for tensors that several operations share, by id.

    Each bound names the two tensors of an operation and what the product of their densities may be. If one tensor of
    each were thinned as for itself, others would get two thin ones and little but zeros. So the products are brought
    to their bounds together, in turns, and at last none may exceed its own.
    """
    found = {id: 1.0 for a, b, _ in bounds for id in (a, b)}
    for turn in range(60):
        for a, b, bound in bounds:
            factor = (bound / (found[a] * found[b])) ** 0.5
            if factor < 1 or turn < 50:
                found[a], found[b] = min(1.0, found[a] * factor), min(1.0, found[b] * factor)
    return found


def fill(array: Array, recipe: Recipe, seed: int) -> None:
    """Write a recipe's integers into an array of any strides. The first is positive, so that not all are zeros."""
    if not array.size:
        return
    random = np.random.default_rng([seed, array.size])
    values = random.integers(-recipe.largest, recipe.largest, array.shape, np.int8, endpoint=True)
    if recipe.density < 1:
        values[random.random(array.shape, np.float32) >= recipe.density] = 0
    first = (0,) * array.ndim
    values[first] = max(1, abs(int(values[first])))
    array[...] = values


def poison(array: Array) -> None:
    """Fill an array for a result with what no result may hold."""
    array[...] = np.nan


@dataclass(frozen=True)
class Verdict:
    """What a comparison has found."""

    total: int
    wrong: int = 0
    first: str = ""  # the first value that is wrong
    trusted: bool = True
    zeros: float = 0.0  # the share of zeros

    @property
    def passed(self) -> bool:
        """Whether every value is right."""
        return self.wrong == 0

    def __str__(self) -> str:
        if not self.passed:
            return f"{self.wrong} of {self.total} values are wrong, {self.first}"
        return f"{self.zeros:.0%} zeros" if not self.trusted else f"{self.total} values"


def expected(problem: Problem, given: Mapping[str, Array], prior: Array | None = None) -> Array:
    """The right result in its type, over the axes of `Problem.shape`. Arrays are the caller's, by role.

    `prior` is what the array for the result held, if the problem adds to that.
    """
    tensors = {role: reference.canonical(given[role], problem, role) for role in problem.given}
    if "bias" in given:
        tensors["bias"] = given["bias"].reshape(problem.g, -1)
    # Where even the largest sum is exact in f32, so is the reference; else it computes in f64.
    largest = prod(max(1.0, _largest(tensors[role])) for role in problem.given)
    longest = problem.n * prod(problem.y) if problem.wanted == "w" else prod(problem.w) * max(problem.cx, problem.cy)
    if largest * longest + 2**10 < 2 ** DTYPES["f64" if problem.dtype == "f64" else "f32"].digits:
        return reference.compute(problem, tensors, None if prior is None else np.array(prior))
    wide = reference.compute(problem, tensors, prior, oracle=True)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.astype(DTYPES[problem.out_dtype].numpy)


def _largest(array: Array) -> float:
    wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    return float(max(wide.max(initial=0), -wide.min(initial=0)))


def compare(right: Array, found: Array, *, trust: float = TRUST) -> Verdict:
    """Every value must be the right one; NaN and infinity only where they are due."""
    same = right == found
    wrong = ~same
    if wrong.any():
        wide, other = right.astype(np.float64), found.astype(np.float64)
        with np.errstate(invalid="ignore"):
            wrong &= ~((np.abs(wide) <= 1e-5) & (np.abs(wide - other) < 2.0**-23))
        wrong &= ~(np.isnan(wide) & np.isnan(other))
    count = int(np.count_nonzero(wrong))
    zeros = float(np.count_nonzero(right == 0)) / max(1, right.size)
    first = ""
    if count:
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        first = f"the first at {at}: {found[at]} instead of {right[at]}"
    return Verdict(right.size, count, first, zeros <= 1 - trust or not right.size, zeros)


def trust(op: Op, problem: Problem) -> float:
    """The share of values other than zero that a result needs; geometry that leaves gaps asks for less."""
    needed = TRUST
    if op.output.name == "diff_src" or problem.wanted == "x":
        needed /= max(1, prod(problem.stride))
    elif problem.wanted == "w":
        kernel = prod(problem.w)
        needed /= max(1.0, kernel / max(1, min(kernel, prod(problem.x), prod(problem.y))))
    elif prod(problem.y) > prod(problem.x):
        needed /= 2
    return min(needed, TRUST * reached(problem))


def reached(problem: Problem) -> float:
    """The share of the wanted tensor that is not zero for want of any product, beyond padding or between windows."""
    share = float(all(problem.size(role) for role in problem.given))
    for axis in range(problem.rank):
        size = {"x": problem.x, "w": problem.w, "y": problem.y}[problem.wanted][axis]
        met = np.zeros(size, bool)
        for k in range(problem.w[axis]):
            start, stop = problem.reach(axis, k)
            if start >= stop:
                continue
            if problem.wanted == "w":
                met[k] = True
            elif problem.wanted == "y":
                met[start:stop] = True
            else:
                shift = k * problem.dilation[axis] - problem.pad[axis]
                met[start * problem.stride[axis] + shift : (stop - 1) * problem.stride[axis] + shift + 1 :
                    problem.stride[axis]] = True  # fmt: skip
        share *= float(met.mean()) if size else 1.0
    return share


def check(op: Op, problem: Problem, given: Mapping[str, Array], out: Array, prior: Array | None = None) -> Verdict:
    """Compare a computed result, in the caller's array, with the right one."""
    found = reference.canonical(out, problem, problem.wanted)
    return compare(expected(problem, given, prior), found, trust=trust(op, problem))


def tolerance(problem: Problem, given: Mapping[str, Array]) -> Array:
    """How far a result may be off when its inputs are no small integers.

    A sum of n products in f32 is off by at most n * 2**-24 of the sum of their absolute values, in any order; the
    rounding of the result adds half a unit in its last place.
    """
    tensors = {r: np.abs(reference.canonical(given[r], problem, r).astype(np.float64)) for r in problem.given}
    sizes = reference.compute(problem, tensors, oracle=True)
    terms = problem.n * prod(problem.y) if problem.wanted == "w" else prod(problem.w) * max(problem.cx, problem.cy)
    rounding = 2.0 ** -DTYPES[problem.out_dtype].digits
    accumulated = (terms + 1) * 2.0 ** -DTYPES["f64" if problem.dtype == "f64" else "f32"].digits
    return sizes * (accumulated + rounding) * 1.01
