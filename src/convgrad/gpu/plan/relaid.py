"""Tensors whose channels are not side by side are copied so that they are, and the sums are left to another level.

Copies run at the speed of memory. What reads neighbours in space, of which every tap needs other ones, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem, Role, dense_strides, settle
from ..target import Target
from . import choose, registry
from .axes import factors, strides, three, unit
from .cost import HOPEFUL, copy_seconds
from .records import Launch, Plan, Values

PIECE = 16  # bytes: channels of a tensor that is copied fill so many, and again so many
ELEMENTS = 4096  # of a tile
SIDE_BY_SIDE = "channels are side by side"
MOST = 8 << 30  # bytes of copies; and no more than three times those of the tensors


def plan(p: Problem, target: Target, precision: str) -> Plan | str:
    """The plan of the problem whose tensors were copied, between the copies; or why there is none."""
    if not p.flops or not p.size(p.wanted):
        return "there is nothing to sum"
    found = ways(p)
    if not found:
        return SIDE_BY_SIDE
    direct = choose.plan(p, target, precision)
    best: Plan | None = None
    for way in found:
        if sum(way.bytes.values()) > min(MOST, 3 * p.bytes + (64 << 20)):
            continue
        copied = around(p, way, target, precision)
        if copied is not None and (best is None or copied.seconds < best.seconds):
            best = copied
    if best is None:
        return "copies would take too much memory"
    if not isinstance(direct, str):
        expected = direct.seconds * (1 if "portable" in best.why[0] else HOPEFUL)
        if expected <= best.seconds:
            return f"with copies it takes {best.seconds * 1e6:.0f} us, without {expected * 1e6:.0f}"
    return best


class Way(NamedTuple):
    """A problem between copies."""

    inner: Problem
    bytes: Mapping[Role, int]  # of the tensors that are copied


def ways(p: Problem) -> list[Way]:
    """The problems that it may become."""
    tried = (_way(p, padded, ends) for padded in (False, True) for ends in (True, False))
    return list({way.inner: way for way in tried if way is not None}.values())


def _way(p: Problem, padded: bool, ends: bool) -> Way | None:
    """The problem whose tensors have their channels side by side: with `padded`, so many that they fill pieces.

    Without `ends`, the sums are written where the result is, if it has the same channels.
    """
    piece = PIECE // DTYPES[p.dtype].size
    cx, cy = ((ceil(c / piece) * piece if padded and c > 1 else c) for c in (p.cx, p.cy))
    if padded and (cx, cy) == (p.cx, p.cy):
        return None
    changed = {"x": cx != p.cx, "y": cy != p.cy, "w": (cx, cy) != (p.cx, p.cy)}
    wanted = p.wanted if ends else ""
    moved = [role for role in ("x", "w", "y") if changed[role] or (role in (wanted, *p.given) and _is_worth(p, role))]
    if not any(role in moved for role in ("x", "y")):
        return None
    accumulates = p.accumulate and p.wanted in moved
    biased = p.bias_stride is not None and p.wanted in moved and (accumulates or changed[p.wanted])
    inner = replace(p, cx=cx, cy=cy, accumulate=p.accumulate and not accumulates)
    if accumulates or biased:
        # What a result held before, and its bias, are added to sums that were not rounded.
        inner = replace(inner, out_dtype=_sums(p), bias_stride=None if biased else p.bias_stride)
    x, w, y = (_last(inner, role) if role in moved else p.strides(role) for role in ("x", "w", "y"))
    inner = replace(inner, x_strides=x, w_strides=w, y_strides=y)
    return Way(inner, {role: inner.size(role) * DTYPES[inner.dtype_of(role)].size for role in moved})


def _is_worth(p: Problem, role: Role) -> bool:
    """Whether a tensor is copied for where its channels are."""
    if role == "w":  # what is written to it is little
        return p.wanted != "w" and not any(p.w_strides[axis] == 1 for axis in (1, 2))
    channels = p.g * (p.cx if role == "x" else p.cy)
    return channels > 1 and p.strides(role)[2 if p.g == 1 or p.shape(role)[2] > 1 else 1] != 1


def _last(p: Problem, role: Role) -> Ints:
    """Strides with the channels last: of w, those of x."""
    shape = p.shape(role)
    space = tuple(range(3, len(shape)))
    order = (0, 1, *space, 2) if role == "w" else (0, *space, 1, 2)
    return settle(shape, dense_strides(shape, order))


def _sums(p: Problem) -> str:
    return "f64" if p.dtype == "f64" else "f32"


def around(p: Problem, way: Way, target: Target, precision: str) -> Plan | None:
    """The plan of the inner problem, with copies before and after it."""
    inner = registry.make_plan(way.inner, target, precision)
    if isinstance(inner, str):
        return None
    names = {role: f"{role}, channels last" for role in way.bytes}
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
    told += f": {way.inner.cx} and {way.inner.cy} of a group, for {p.cx} and {p.cy}" if padded else ""
    why = (
        f"{told}; the sums by the level {inner.level}",
        *(reason for reason in inner.why if reason != f"not copies: {SIDE_BY_SIDE}"),
    )
    return replace(inner, launches=launches, areas=(*areas, *inner.areas), seconds=seconds, why=why)


def _copy(given: Problem, made: Problem, role: Role, names: tuple[str, str]) -> Launch:
    """A copy of a tensor of one problem to that of another one: they have the same sizes, but for channels."""
    shapes = [_shape(p, role) for p in (given, made)]
    of = [strides(p, role) for p in (given, made)]
    shapes, of = _merged(shapes, of)
    channels, space = shapes[1][2], shapes[1][3:]
    tile = min(64, 1 << (channels - 1).bit_length())
    pixels = min(ELEMENTS // tile, max(16, 1 << (prod(space) - 1).bit_length()))
    ends = role == made.wanted
    biased = ends and made.bias_stride is not None and given.bias_stride is None
    accumulates = ends and made.accumulate and not given.accumulate
    values: Values = (
        ("given_strides", of[0]),
        ("out_strides", of[1]),
        ("sizes", space),
        ("size_factors", factors(space)),
        ("groups", shapes[1][1]),
        ("made", channels),
        ("given_groups", shapes[0][1]),
        ("given_channels", shapes[0][2]),
        ("bias_stride", made.bias_stride or 0),
    )
    wide = max(sum(abs(s) * size for s, size in zip(o, s_, strict=True)) for o, s_ in zip(of, shapes, strict=True))
    constants = (
        ("GIVEN_UNIT", unit(of[0])),
        ("OUT_UNIT", unit(of[1])),
        ("MERGED", space[:2] == (1, 1)),
        ("CHANNELS", tile),
        ("PIXELS", pixels),
        ("DOUBLE", made.dtype == "f64"),
        ("WIDE", wide >= 2**31 - 2**20),
        ("BIAS", biased),
        ("ACCUMULATE", accumulates),
    )
    out = (names[1], made.dtype_of(role))
    tensors = ((names[0], given.dtype_of(role)), out, ("bias", made.dtype) if biased else out)
    programs = ceil(prod(space) / pixels) * ceil(channels / tile) * shapes[1][1] * shapes[1][0]
    return Launch("relay", programs, tensors, values, constants, 4, 1)


def _shape(p: Problem, role: Role) -> Ints:
    """The six axes of a tensor: those of weights are taken for images, groups and channels in their order."""
    return (*p.shape(role)[:3], *three(p).sizes(role))


def _merged(shapes: list[Ints], of: list[Ints]) -> tuple[list[Ints], list[Ints]]:
    """The same two tensors, whose axes in space are one where they can be, as are groups and channels."""
    sizes, steps = [list(shape) for shape in shapes], [list(o) for o in of]
    for outer, inner in ((4, 5), (3, 4), (4, 5), (1, 2)):
        if sizes[0][inner] != sizes[1][inner] or sizes[0][outer] != sizes[1][outer]:
            continue
        if all(size[inner] == 1 for size in sizes):  # the outer axis takes its place
            for size, step in zip(sizes, steps, strict=True):
                size[inner], size[outer], step[inner], step[outer] = size[outer], 1, step[outer], 0
        elif all(o[outer] == o[inner] * size[inner] or size[outer] == 1 for o, size in zip(steps, sizes, strict=True)):
            for size, step in zip(sizes, steps, strict=True):
                size[inner], size[outer], step[outer] = size[inner] * size[outer], 1, 0
    return [tuple(size) for size in sizes], [tuple(step) for step in steps]
