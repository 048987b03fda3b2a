"""Groups of few channels, several taken for one: its weights are blocks on a diagonal, and zeros beside them.

Most products are with zeros then, but they are those of tensor cores, which take whole tiles anyway.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem, dense_strides, settle
from ..target import Target
from . import choose, registry
from .copies import View, copy, zeros
from .cost import copy_seconds
from .records import Plan, free_name

SIZES = (32, 64, 128)  # channels of what is taken for a group, at most
MOST_BYTES = 256 << 20


def plan(p: Problem, target: Target, precision: str) -> Plan | str:
    """The plan of the problem of fewer groups, with what makes its weights or takes them apart; or why it is none."""
    if not p.flops or not counts(p):
        return "there are no groups of few channels that follow each other"
    found = [made for made in (joined(p, k, target, precision) for k in counts(p)) if made is not None]
    if not found:
        return "no level takes groups of more channels"
    best = min(found, key=lambda made: made.seconds)
    direct = choose.plan(p, target, precision)
    if not isinstance(direct, str) and direct.seconds <= best.seconds:
        return f"as blocks it takes {best.seconds * 1e6:.0f} us, without {direct.seconds * 1e6:.0f}"
    return best


def counts(p: Problem) -> list[int]:
    """How many groups may be taken for one, so that they have enough channels: or all of them."""
    channels = max(p.cx, p.cy)
    if p.g == 1 or channels >= SIZES[0] or not _follow(p):
        return []
    divisors = [k for k in range(2, min(p.g, SIZES[-1]) + 1) if p.g % k == 0]
    enough = [k for k in divisors if k * channels >= SIZES[0] or k == p.g]
    return sorted({k for size in SIZES for k in [max((k for k in enough if k * channels <= size), default=0)] if k})


def _follow(p: Problem) -> bool:
    """Whether groups follow each other in x and y as their channels do, and the taps of w each other."""
    for of, count in ((p.x_strides, p.cx), (p.y_strides, p.cy)):
        if count > 1 and of[1] != count * of[2]:
            return False
    space = [(size, stride) for size, stride in zip(p.w, p.w_strides[3:], strict=True) if size > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(space))


def fewer(p: Problem, k: int) -> Problem:
    """The problem with `k` groups taken for one."""

    def strides(of: Ints, count: int) -> Ints:
        return (of[0], of[1] * k if p.g > k else 0, of[2] if count > 1 else of[1], *of[3:])

    x, y = strides(p.x_strides, p.cx), strides(p.y_strides, p.cy)
    made = replace(p, g=p.g // k, cx=p.cx * k, cy=p.cy * k, x_strides=x, y_strides=y)
    if p.wanted == "w":
        made = replace(made, accumulate=False, out_dtype=_sums(p) if p.accumulate else p.out_dtype)
    shape = made.shape("w")
    order = (0, 1, *range(3, len(shape)), 2)
    return replace(made, w_strides=settle(shape, dense_strides(shape, order)))


def _sums(p: Problem) -> str:
    return "f64" if p.dtype == "f64" else "f32"


def joined(p: Problem, k: int, target: Target, precision: str) -> Plan | None:
    """The plan with `k` groups taken for one."""
    simpler = fewer(p, k)
    size = simpler.size("w") * DTYPES[simpler.dtype_of("w")].size
    if size > MOST_BYTES:
        return None
    inner = registry.make_plan(simpler, target, precision)
    if isinstance(inner, str):
        return None
    area = free_name("w, in blocks", inner.areas)
    launches = tuple(launch.moved({"w": area}) for launch in inner.launches)
    apart, together = _apart(p, k), _together(simpler, k, area)
    if p.wanted == "w":
        launches = (*launches, copy(together, apart, None, p.accumulate))
    else:
        launches = (zeros(area, p.dtype, simpler.size("w")), copy(apart, together), *launches)
    seconds = inner.seconds + 2 * copy_seconds(target, size)
    within = inner.within or inner.level
    told = f"{k} groups are taken for one of {simpler.cx} and {simpler.cy} channels; the sums by the level {within}"
    areas, notes = ((area, size), *inner.areas), (told, *inner.notes)
    return replace(inner, launches=launches, areas=areas, seconds=seconds, notes=notes, within=within)


def _apart(p: Problem, k: int) -> View:
    """The weights of groups: of each of those that are left, groups in it, channels of x and y, and taps."""
    of = p.w_strides
    return View(
        "w", p.dtype_of("w"), (p.g // k, k, p.cx, 1, p.cy, prod(p.w)), (of[0] * k, of[0], of[2], 0, of[1], _step(p))
    )


def _together(p: Problem, k: int, name: str) -> View:
    """The same elements, where they are blocks on the diagonals of fewer groups."""
    of, cx, cy = p.w_strides, p.cx // k, p.cy // k
    shape, inside = (p.g, k, cx, 1, cy, prod(p.w)), cy * of[1] + cx * of[2]
    return View(name, p.dtype_of("w"), shape, (of[0], inside, of[2], 0, of[1], _step(p)))


def _step(p: Problem) -> int:
    """The distance of a tap from the next one."""
    return next((step for size, step in zip(reversed(p.w), reversed(p.w_strides[3:]), strict=True) if size > 1), 0)
