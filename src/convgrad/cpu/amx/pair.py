"""From packed boxes to what tiles of w read: x transposed to rows of positions, y in pairs of positions.

Both begin as [position][channel], elements of two bytes; `pack.rows` has dealt with layout and padding.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

from ..ir.builder import Function, Module, Value
from ..ir.shuffle import interleave, transpose
from .records import Box
from .tiles import COLUMNS, STEP

WIDE = f"<{STEP} x i16>"


def transpose_x(m: Module, box: Box) -> Function:
    """A function that makes [channel][entry] of [entry][channel], a square of 32 at a time: (from, to)."""
    f = m.function("transpose_x", ["p:from", "p:to"])
    source, to = f.args
    rows, _ = box.channels
    with f.loop(0, rows, STEP) as c, f.loop(0, box.x_pitch, STEP) as e:
        at = [f.at(source, f.add(f.mul(f.add(e, i), box.x_pack.pitch), c), "i16") for i in range(STEP)]
        columns = transpose(f, [f.load(place, WIDE, 2) for place in at], STEP, "i16")
        for i, column in enumerate(columns):
            f.store(column, f.at(to, f.add(f.mul(f.add(c, i), box.x_pitch), e), "i16"), WIDE, 64)
    return f


def pair_y(m: Module, box: Box, clear: Function) -> Function:
    """A function that makes [pair of positions][channel][first, second] of [position][channel]: (from, to).

    Places without a position are zeros: those at the end of a long row, and all between rows of a box.
    """
    f = m.function("pair_y", ["p:from", "p:to"])
    source, to = f.args
    sizes, extents, flat = box.sizes, box.extents, box.flat
    whole = flat == len(sizes) - 1
    with ExitStack() as stack:
        dense: Value = 0
        place: Value = 0
        for i in range(flat):
            q = stack.enter_context(f.loop(0, sizes[i]))
            dense = f.add(dense, f.mul(q, prod(sizes[i + 1 :])))
            place = f.add(place, f.mul(q, prod(sizes[i + 1 : flat])))
        row = f.at(to, f.mul(place, 2 * box.y_row), "i16")
        if not whole:
            f.call(clear, row, 2 * box.y_row)
        pairs: Value = 0
        for i in range(flat, len(sizes) - 1):
            q = stack.enter_context(f.loop(0, sizes[i]))
            dense = f.add(dense, f.mul(q, prod(sizes[i + 1 :])))
            pairs = f.add(pairs, f.mul(q, prod(extents[i + 1 :]) // 2))
        here = f.at(source, f.mul(dense, box.y_pack.pitch), "i16")
        _pair_row(f, box, here, f.at(row, f.mul(pairs, 2 * box.y_pitch), "i16"))
        if whole:
            used = (sizes[-1] + 1) // 2
            left = 2 * (box.long_row // 2 - used) * box.y_pitch
            if left:
                f.call(clear, f.at(row, 2 * used * box.y_pitch, "i16"), left)
    return f


def _pair_row(f: Function, box: Box, source: str, to: str) -> None:
    """The positions of a row, in pairs; a last one without a partner is paired with a zero."""
    count, pitch = box.sizes[-1], box.y_pack.pitch
    half = f"<{COLUMNS} x i16>"

    def pair(e: Value, *, alone: bool) -> None:
        with f.loop(0, box.y_pitch, COLUMNS) as c:
            first = f.at(source, f.add(f.mul(e, 2 * pitch), c), "i16")
            one = f.load(first, half, 2)
            two = "zeroinitializer" if alone else f.load(f.at(first, pitch, "i16"), half, 2)
            place = f.at(to, f.mul(f.add(f.mul(e, box.y_pitch), c), 2), "i16")
            f.store(interleave(f, half, COLUMNS, one, two), place, WIDE, 4)

    with f.loop(0, count // 2) as e:
        pair(e, alone=False)
    if count % 2:
        pair(count // 2, alone=True)
