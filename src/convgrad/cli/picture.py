"""A picture, in characters, of where the kernel lands on each axis of x."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from ..spec import Problem
from ..spec.problem import extent

NAMES = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


@dataclass(frozen=True)
class Glyphs:
    """What stands for what."""

    tap: str  # a kernel element that meets x
    lost: str  # one that meets padding
    gap: str  # between the elements of a dilated kernel
    pad: str
    more: str


UNICODE = Glyphs("█", "▒", "─", "·", "…")
ASCII = Glyphs("#", "o", "-", ".", "~")


def picture(
    problem: Problem, *, width: int = 96, rows: int = 6, glyphs: Glyphs = UNICODE, names: tuple[str, str] = ("x", "y")
) -> list[str]:
    """Lines for every axis: the positions of x, then one row per window. Axes alike are drawn once.

    `names` are those of x and y.
    """
    alike: dict[tuple[int, ...], list[str]] = {}
    p = problem
    for name, numbers in zip(NAMES[p.rank], zip(p.x, p.w, p.y, p.stride, p.dilation, p.pad, strict=True), strict=True):
        alike.setdefault(numbers, []).append(name)
    lines: list[str] = []
    for found in alike.values():
        axis = NAMES[p.rank].index(found[0])
        lines += [*_axis(p, axis, ", ".join(found), width, rows, glyphs, names), ""]
    key = f"{glyphs.tap} meets {names[0]}   {glyphs.lost} meets padding   {glyphs.pad} padding"
    if max(p.dilation) > 1:
        key += f"   {glyphs.gap} dilation"
    return [*lines, key]


def _axis(p: Problem, axis: int, name: str, width: int, rows: int, glyphs: Glyphs, names: tuple[str, str]) -> list[str]:
    x, k, y = p.x[axis], p.w[axis], p.y[axis]
    s, d, begin = p.stride[axis], p.dilation[axis], p.pad[axis]
    span = extent(k, d)
    end = (y - 1) * s + span - begin - x if y else -x
    told = f"{name}: {names[0]} {x}, kernel {k}, stride {s}, dilation {d}, "
    told += f"padding used: {begin} before, {max(end, 0)} after, {names[1]} {y}"
    label = max(len(f"{names[1]} {max(y - 1, 0)}"), 2) + 2
    room = max(16, width - label)
    last = x + max(end, 0)
    cut = begin + last > room
    stop = -begin + room - 1 if cut else last
    shown = range(-begin, stop)
    head = "".join(str(i % 10) if 0 <= i < x else glyphs.pad for i in shown) + (glyphs.more if cut else "")
    lines = [*wrap(told, width, subsequent_indent="   "), " " * label + head]
    # The first windows, and the last one if there is room between.
    windows = list(range(min(y, rows - 1))) + ([y - 1] if y > rows - 1 else [])
    for before, o in zip([-1, *windows], windows, strict=False):
        if o != before + 1:
            lines.append(glyphs.more)
        lines.append(f"{f'{names[1]} {o}':<{label}}" + _window(o, p, axis, shown, glyphs))
    reached = {i for o in range(min(y, 4 * room)) for i in range(o * s - begin, o * s - begin + span, d)}
    missed = [i for i in shown if 0 <= i < x and i not in reached]
    if missed and y <= 4 * room:
        marks = " " * label + "".join("^" if i in set(missed) else " " for i in shown).rstrip()
        told = f"no window reaches {'these' if len(missed) > 1 else 'this'}"
        beside = len(marks) + 1 + len(told) <= width
        lines += [f"{marks} {told}"] if beside else [marks, " " * label + told]
    return lines


def _window(o: int, p: Problem, axis: int, shown: range, glyphs: Glyphs) -> str:
    """One row: the kernel at window o."""
    first = o * p.stride[axis] - p.pad[axis]
    cells = {}
    for i in range(first, first + extent(p.w[axis], p.dilation[axis])):
        if i >= shown.stop:
            break
        on = (i - first) % p.dilation[axis] == 0
        cells[i] = (glyphs.tap if 0 <= i < p.x[axis] else glyphs.lost) if on else glyphs.gap
    if first >= shown.stop:
        return " " * len(shown) + glyphs.more
    return "".join(cells.get(i, " ") for i in shown).rstrip()
