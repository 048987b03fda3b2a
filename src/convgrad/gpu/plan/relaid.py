"""Tensors whose channels are not side by side are copied so that they are, and the sums are left to another level.

Copies run at the speed of memory. What reads neighbours in space, of which every tap needs other ones, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem, Role, dense_strides, settle
from ..target import Target
from . import choose, registry
from .axes import strides, three
from .copies import View, copy
from .cost import copy_seconds
from .records import Launch, Plan, free_name

PIECE = 16  # bytes: channels of a tensor that is copied fill so many, and again so many
FEW = 4
SIDE_BY_SIDE = "channels are side by side"
MOST = 8 << 30  # bytes of workspace; and no more than four times the largest tensor, and a little
LITTLE = 64 << 20


def plan(p: Problem, target: Target, precision: str) -> Plan | str:
    """The plan of the problem whose tensors were copied, between the copies; or why there is none."""
    if not p.flops or not p.size(p.wanted):
        return "there is nothing to sum"
    found = ways(p)
    if not found:
        return SIDE_BY_SIDE
    direct = choose.plan(p, target, precision)
    most = min(MOST, 4 * max(p.size(role) * DTYPES[p.dtype_of(role)].size for role in ("x", "w", "y")) + LITTLE)
    best: Plan | None = None
    for way in found:
        copied = around(p, way, target, precision)
        if copied is None or copied.workspace > most:
            continue
        if copied.within == "portable" and way.kept:
            continue
        if copied.within == "portable" and _is_worth(p, p.wanted) and p.wanted not in way.bytes:
            continue  # its model does not know what it takes to store to so many places: up to three times as long
        if best is None or copied.seconds < best.seconds:
            best = copied
    if best is None:
        return "copies would take too much memory"
    knows = not (_has_phases(p) and _is_worth(p, p.wanted))
    if not isinstance(direct, str) and direct.seconds <= best.seconds and knows:
        return f"with copies it takes {best.seconds * 1e6:.0f} us, without {direct.seconds * 1e6:.0f}"
    return best


def thinned(p: Problem) -> Problem:
    """A pointwise problem by the pixels of x that it meets, as if there were no others; itself, if it meets all."""
    sizes = zip(p.x, p.y, p.stride, strict=True)
    if max(p.w) > 1 or any(p.pad) or max(p.stride) == 1 or any(-(-x // step) != y for x, y, step in sizes):
        return p
    of = tuple(stride * step for stride, step in zip(p.x_strides[3:], p.stride, strict=True))
    thin = replace(p, x=p.y, stride=(1,) * p.rank)
    return replace(thin, x_strides=settle(thin.shape("x"), (*p.x_strides[:3], *of)))


def read(p: Problem) -> Problem:
    """The problem by the pixels of x that it reads."""
    return p if p.wanted == "x" else thinned(p)


class Way(NamedTuple):
    """A problem between copies."""

    inner: Problem
    bytes: Mapping[Role, int]  # of the tensors that are copied
    kept: bool = False  # whether what is given stays as it is, although its channels are apart


def ways(p: Problem) -> list[Way]:
    """The problems that it may become.

    Results are written where they belong only if neighbours in space are made together, in tiles of several rows: of
    phases of a stride, and along one axis, that took 2 to 20 times as long as a copy on an H200. Phases of few channels
    are made together.
    """
    apart = p.rank == 1 or _has_phases(p)
    p = read(p)
    kinds: list[tuple[bool, bool, tuple[Role, ...]]] = []
    for padded in (False, True):
        kinds += [(padded, ends, ()) for ends in ((True,) if apart else (True, False))]
    if p.wanted == "w" and DTYPES[p.dtype].size == 2 and p.y_strides[-1] == 1:
        # Taps are shifts of x alone: matrix units may read pixels of y as they lie.
        kinds.append((False, True, ("y",)))
    if p.dtype == "f32" and p.wanted != "w":  # what takes f32 apart reads it as it lies
        kinds.append((False, True, p.given))
    tried = (_way(p, *kind) for kind in kinds)
    return list({way.inner: way for way in tried if way is not None and way.inner != p}.values())


def _has_phases(p: Problem) -> bool:
    """Whether pixels of x are made apart from their neighbours."""
    return p.wanted == "x" and max(p.stride) > 1 and (p.cx > FEW or max(p.stride) > FEW)


def _way(p: Problem, padded: bool, ends: bool, kept: tuple[Role, ...]) -> Way | None:
    """The problem whose tensors have their channels side by side: with `padded`, so many that they fill pieces.

    Without `ends`, the sums are written where the result is, if it has the same channels. What is `kept` is
    read where it lies.
    """
    piece = PIECE // DTYPES[p.dtype].size
    cx, cy = ((ceil(c / piece) * piece if padded and c > 1 else c) for c in (p.cx, p.cy))
    if padded and (cx, cy) == (p.cx, p.cy):
        return None
    changed = {"x": cx != p.cx, "y": cy != p.cy, "w": (cx, cy) != (p.cx, p.cy)}
    wanted = p.wanted if ends else ""
    moved = [role for role in ("x", "w", "y") if changed[role] or (role in (wanted, *p.given) and _is_worth(p, role))]
    moved = [role for role in moved if role not in kept]
    if not moved:
        return None
    accumulates = p.accumulate and p.wanted in moved
    biased = p.bias_stride is not None and p.wanted in moved and (accumulates or changed[p.wanted])
    inner = replace(p, cx=cx, cy=cy, accumulate=p.accumulate and not accumulates)
    if accumulates or biased:
        # What a result held before, and its bias, are added to sums that were not rounded.
        inner = replace(inner, out_dtype=_sums(p), bias_stride=None if biased else p.bias_stride)
    x, w, y = (_last(inner, role) if role in moved else p.strides(role) for role in ("x", "w", "y"))
    inner = replace(inner, x_strides=x, w_strides=w, y_strides=y)
    return Way(inner, {role: inner.size(role) * DTYPES[inner.dtype_of(role)].size for role in moved}, bool(kept))


def _is_worth(p: Problem, role: Role) -> bool:
    """Whether a tensor is copied for where its channels are."""
    if role == "w":  # what is written to it is little
        return p.wanted != "w" and p.cx * p.cy > 1 and not any(p.w_strides[axis] == 1 for axis in (1, 2))
    channels = p.g * (p.cx if role == "x" else p.cy)
    return channels > 1 and p.strides(role)[2 if p.g == 1 or p.shape(role)[2] > 1 else 1] != 1


def _last(p: Problem, role: Role) -> Ints:
    """Strides with the channels last: of w, those of x, if there are several."""
    shape = p.shape(role)
    space = tuple(range(3, len(shape)))
    order = (0, *space, 1, 2)
    if role == "w":
        order = (0, 1, *space, 2) if p.cx > 1 else (0, *space, 2, 1)
    return settle(shape, dense_strides(shape, order))


def _sums(p: Problem) -> str:
    return "f64" if p.dtype == "f64" else "f32"


def around(p: Problem, way: Way, target: Target, precision: str) -> Plan | None:
    """The plan of the inner problem, with copies before and after it."""
    p = read(p)
    inner = registry.make_plan(way.inner, target, precision)
    if isinstance(inner, str):
        return None
    names = {role: free_name(f"{role}, channels last", inner.areas) for role in way.bytes}
    before = [_copy(p, way.inner, role, (role, names[role])) for role in way.bytes if role != p.wanted]
    after = [_copy(way.inner, p, role, (names[role], role)) for role in way.bytes if role == p.wanted]
    launches = (*before, *(launch.moved(names) for launch in inner.launches), *after)
    if max(launch.programs for launch in launches) > choose.MOST_PROGRAMS:
        return None
    seconds = inner.seconds
    for role, size in way.bytes.items():
        seconds += copy_seconds(target, size + p.size(role) * DTYPES[p.dtype_of(role)].size)
    areas = tuple((names[role], size) for role, size in way.bytes.items())
    told = f"{' and '.join(names)} copied so that channels are side by side"
    padded = (way.inner.cx, way.inner.cy) != (p.cx, p.cy)
    told += ", but for pixels that no window meets" if way.inner.stride != p.stride else ""
    told += f": {way.inner.cx} and {way.inner.cy} of a group, for {p.cx} and {p.cy}" if padded else ""
    within = inner.within or inner.level
    notes = (f"{told}; the sums by the level {within}", *inner.notes)
    areas = (*areas, *inner.areas)
    return replace(inner, launches=launches, areas=areas, seconds=seconds, notes=notes, within=within)


def _copy(given: Problem, made: Problem, role: Role, names: tuple[str, str]) -> Launch:
    """A copy of a tensor of one problem to that of another one: they have the same sizes, but for channels."""
    first, second = (
        View(name, p.dtype_of(role), _shape(p, role), strides(p, role))
        for name, p in zip(names, (given, made), strict=True)
    )
    ends = role == made.wanted
    biased = ends and made.bias_stride is not None and given.bias_stride is None
    bias = (made.bias_stride or 0, made.dtype) if biased else None
    return copy(first, second, bias, ends and made.accumulate and not given.accumulate)


def _shape(p: Problem, role: Role) -> Ints:
    """The six axes of a tensor: those of weights are taken for images, groups and channels in their order."""
    return (*p.shape(role)[:3], *three(p).sizes(role))
