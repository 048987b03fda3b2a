"""The level of Hopper's gathers: y and x where channels lie side by side, as boxes that the copy engine brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

from ....dtypes import DTYPES
from ....spec.problem import Problem
from ...target import Target
from .. import choose
from ..axes import is_wide
from ..launches import channels
from ..patches import met
from ..records import Plan
from .boxes import Box, boxes, shapes, staged
from .cost import LONG, NARROW, SHORT, seconds
from .fold import folded
from .launches import Candidate, scatters, settle, staged_bytes, stored, stores
from .tensors import Operands, input_parts, seen, seen_in_lines
from .views import Space, space
from .ways import Way, ways

SPARE = 2048  # bytes of shared memory for barriers


def plan(p: Problem, target: Target, precision: str = "default") -> Plan | str:
    """The plan for a problem, or why this level does not serve it."""
    precision = "bf16x6" if precision == "default" else precision
    p = met(p) if p.dtype == "f32" and precision == "bf16x6" else p
    found = plan_as_it_is(p, target, precision, space(p))
    other = folded(p)
    if other is not None:
        told = "the pixels of a window are read as channels, its rows as planes"
        turned = plan_as_it_is(other, target, precision, space(other))
        if not isinstance(turned, str) and (isinstance(found, str) or turned.seconds < found.seconds):
            return replace(turned, notes=(told, *turned.notes))
    return found


def plan_as_it_is(p: Problem, target: Target, precision: str, s: Space) -> Plan | str:
    """The plan for a problem by the axes that it has."""
    operands = operands_of(p, precision)
    reason = refusal(p, precision)
    if reason or operands is None:
        return reason
    given = (seen_in_lines if s.lines else seen)(p, "x" if p.wanted == "y" else "y", s.given, s.order)
    if operands.parts == 1 and isinstance(given, str):
        return given
    if s.lines and s.stride[2] > 1 and p.wanted == "y":
        return "it takes every pixel of a row"
    found = [candidate for way in ways(p, s, operands) for candidate in candidates(p, s, way, target)]
    if not found:
        return "the stride has too many phases"
    best = min(found, key=lambda candidate: candidate.seconds)
    store = stored(p, s, best.way, best.shape.columns, best.box.has_lines(DTYPES[p.out_dtype].size))
    if store == "plain" and scatters(p, s, best.way):
        return "results would be written one by one"
    if operands.parts > 1:
        plain = choose.plan(p, target, precision)
        if prod(input_parts(p, s).shape) >= 3 * 2**31:
            return "offsets take 64 bits"
        if not isinstance(plain, str) and plain.seconds <= best.seconds:
            return f"in three parts it takes {best.seconds * 1e6:.0f} us, at once {plain.seconds * 1e6:.0f}"
    return settle(p, s, best, target)


def operands_of(p: Problem, precision: str) -> Operands | None:
    """What the matrix units are given; f32 itself is what they take for tf32. None if nothing serves."""
    if p.dtype in ("bf16", "f16"):
        return Operands(p.dtype)
    given = {"tf32": Operands("f32"), "bf16x6": Operands("bf16", 3)}
    return given.get(precision) if p.dtype == "f32" else None


def refusal(p: Problem, precision: str) -> str:
    """What this level does not compute."""
    reasons = {
        "it makes y and x": p.wanted == "w",
        "no product reaches the result": not p.flops,
        "f64 has other matrix units": p.dtype == "f64",
        f"it does not take f32 in {precision}": operands_of(p, precision) is None,
        "offsets take 64 bits": is_wide(p),
        "products of so few channels are taken one by one": p.g > 1 and p.cx * p.cy < 4,
        f"groups of {p.wanted} do not lie side by side": p.g > 1 and not _follows(p),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _follows(p: Problem) -> bool:
    """Whether channels of the result go on from group to group."""
    group, channel = p.strides(p.wanted)[1:3]
    count = channels(p)[1]
    return count == 1 or group == count * channel


def candidates(p: Problem, s: Space, way: Way, target: Target) -> Iterator[Candidate]:
    """Boxes and shapes for a way, each with its time."""
    summed = way.window(p)
    item, out_item = way.operands.item, DTYPES[p.out_dtype].size
    for shape in shapes(item, way.operands.parts, way.columns, summed):
        blocks = ceil(summed / shape.depth)
        both = {lines: stored(p, s, way, shape.columns, lines) for lines in (False, True)}
        for box in boxes(shape, way.steps, p.n, way.rows):
            if s.lines and not box.has_lines(item):
                continue
            store = both[box.has_lines(out_item)]
            label = stores(p, s, way, store)
            room = target.shared - SPARE - staged_bytes(p, shape, store)
            uses = prod(way.views[0].taps) * blocks if len(way.views) == way.operands.parts == 1 else 0
            tiles = (
                way.column_tiles(p, shape.columns),
                *(ceil(way.steps[axis] / box.size[at]) for axis, at in ((2, 3), (1, 0), (0, 1))),
                ceil(p.n / box.size[2]),
                len(way.views) // way.loops,
            )
            for fitted in staged(box, shape, item, room, uses):
                if not fitted.resident or tiles[0] <= target.multiprocessors:
                    expected = seconds(p, way, shape, fitted, target, label)
                    expected *= _slower(box, item) if s.lines else 1.0
                    yield Candidate(expected, way, shape, fitted, tiles)


def _slower(box: Box, item: int) -> float:
    """How many times as long the lines of a box take for being short."""
    line = box.size[3] * item
    return NARROW.get(line, SHORT if item == 4 and line < LONG else 1.0)
