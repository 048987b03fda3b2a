"""Loops over elements, a vector or a piece at a time, and over what is left of the last one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from .builder import Function, Value
from .convert import Elements


def each_vector(f: Function, n: Elements, count: Value, unroll: int, do: Callable[[Value, str | None], None]) -> None:
    """Call `do` with the first element of each vector, and a mask if the vector is not whole.

    If `count` is known, up to `unroll` vectors are written out one after another.
    """
    whole = f.mul(f.div(count, n.lanes), n.lanes)
    group = 1
    if isinstance(whole, int):
        group = next(g for g in (8, 4, 3, 2, 1) if g <= unroll and whole // n.lanes % g == 0)
    once = whole == group * n.lanes
    with nullcontext(0) if once else f.loop(0, whole, group * n.lanes) as c:
        for v in range(group):
            do(f.add(c, v * n.lanes), None)
    rest = f.sub(count, whole)
    if rest != 0:
        with f.when(f.test("ne", rest, 0)):
            do(whole, n.mask(f, rest))


def each_piece(f: Function, count: Value, size: int, do: Callable[[Value, Value], None]) -> None:
    """Call `do` with the first element of each piece of `size` elements, and how many of them there are."""
    whole = f.mul(f.div(count, size), size)
    if isinstance(whole, int) and whole <= 2 * size:
        for first in range(0, whole, size):
            do(first, size)
    else:
        with f.loop(0, whole, size) as at:
            do(at, size)
    rest = f.sub(count, whole)
    if rest != 0:
        with nullcontext() if isinstance(rest, int) else f.when(f.test("sgt", rest, 0)):
            do(whole, rest)
