"""What tiles of w read: rows of positions for each channel of one side, and pairs of positions of the other.

Both are made of [position][channel], elements of two bytes: y in pairs as it lies if its channels are contiguous, else
what `pack.rows` has made. Where the pixels of a side are contiguous, `pack.rows` makes rows of them itself, and pairs
of x it makes in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod

from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.pieces import Pieces
from ..ir.shuffle import transpose
from ..plan.records import up
from .records import Box
from .tiles import PAIRS, STEP

WIDE = f"<{STEP} x i16>"


def transpose_x(m: Module, box: Box) -> Function:
    """A function that makes [channel][entry] of [entry][channel], a square of 32 at a time: (from, to)."""
    f = m.function("transpose_x", ["p:from", "p:to"])
    rows, _ = box.channels
    pitch = box.x_pack.pitch
    with f.loop(0, rows, STEP) as c, f.loop(0, box.row_pitch, STEP) as e:
        _transpose_square(f, (c, e), STEP, (pitch, box.row_pitch))
    return f


def transpose_y(m: Module, box: Box) -> Function:
    """A function that makes [channel][place] of [place][channel], of a long row: (from, to). After its last position
    there are zeros.
    """
    if box.y_pack is None:
        raise ValueError("rows of y are packed before they are transposed")
    f = m.function("transpose_y", ["p:from", "p:to"])
    rows, _ = box.channels
    pitches = box.y_pack.pitch, box.row_pitch
    left = box.places % STEP
    with f.loop(0, rows, STEP) as c:
        with f.loop(0, box.places - left, STEP) as e:
            _transpose_square(f, (c, e), STEP, pitches)
        if left:
            _transpose_square(f, (c, box.places - left), left, pitches)
    return f


def _transpose_square(f: Function, first: tuple[Value, Value], count: int, pitches: tuple[int, int]) -> None:
    """Transpose a square from the first channel and place on, of which so many places are there."""
    (source, to), (c, e), (from_pitch, to_pitch) = f.args, first, pitches
    at = [f.at(source, f.add(f.mul(f.add(e, i), from_pitch), c), "i16") for i in range(count)]
    vectors = [f.load(place, WIDE, 2) for place in at] + ["zeroinitializer"] * (STEP - count)
    for i, column in enumerate(transpose(f, vectors, STEP, "i16")):
        f.store(column, f.at(to, f.add(f.mul(f.add(c, i), to_pitch), e), "i16"), WIDE, 64)


def end_rows(m: Module, n: Elements, pitch: int, entries: int, end: int) -> Function:
    """A function that clears what follows the entries in each row, up to an end: (rows, how many)."""
    f = m.function("end_rows", ["p:to", "i:rows"])
    to, rows = f.args
    with f.loop(0, rows) as c:
        row = f.at(to, f.mul(c, pitch), n.sum)
        first = up(entries, n.lanes)
        if first > entries:
            n.store(f, "zeroinitializer", f.at(row, entries, n.sum), n.mask(f, first - entries))
        with f.loop(first, end, n.lanes) as e:
            f.store("zeroinitializer", f.at(row, e, n.sum), n.vector, 2)
    return f


def each_long_row(f: Function, box: Box, counts: Sequence[Value], stack: ExitStack) -> tuple[Value, Value]:
    """Loop over the long rows of a box, so many along each axis: where one begins among the entries, and its number."""
    entry: Value = 0
    number: Value = 0
    for i, count in enumerate(counts):
        q = stack.enter_context(f.loop(0, count))
        entry = f.add(entry, f.mul(q, prod(a.pack.count for a in box.axes[i + 1 :])))
        number = f.add(number, f.mul(q, prod(box.sizes[i + 1 : box.flat])))
    return entry, number


def pair_y(m: Module, n: Elements, box: Box, clear: Function) -> Function:
    """A function that makes tiles of pairs of [position][channel]: (from, to, positions along each axis, channels).

    Of a long row, it is [step][16 channels][pair of positions][channel][first, second]: each tile is contiguous. Places
    without a position are zeros: those at the end of a long row, and all between rows of a box. What is split becomes
    [piece][step] and so on.
    """
    pieces = [i * n.step for i in range(n.count)] if isinstance(n, Pieces) else [0]

    def clear_all(place: str, count: Value) -> None:
        for piece in pieces:
            f.call(clear, f.at(place, piece, n.sum), count)

    f = m.function("pair_y", ["p:from", "p:to", *(f"i:n{i}" for i in range(len(box.sizes))), "i:channels"])
    source, to, *counts, _ = f.args
    flat, last = box.flat, len(box.sizes) - 1
    with ExitStack() as stack:
        read: Value = 0
        place: Value = 0
        for i in range(flat):
            q = stack.enter_context(f.loop(0, counts[i]))
            read = f.add(read, f.mul(q, box.y_steps[i]))
            place = f.add(place, f.mul(q, prod(box.sizes[i + 1 : flat])))
        row = f.at(to, f.mul(place, 2 * box.y_row), n.sum)
        if flat < last:
            clear_all(row, 2 * box.y_row)
        pairs: Value = 0
        for i in range(flat, last):
            q = stack.enter_context(f.loop(0, counts[i]))
            read = f.add(read, f.mul(q, box.y_steps[i]))
            pairs = f.add(pairs, f.mul(q, prod(box.extents[i + 1 :]) // 2))
        if flat == last:
            whole = f.div(counts[last], STEP)
            left = f.sub(box.long_row // STEP, whole)
            clear_all(f.at(row, f.mul(whole, STEP * box.pair_pitch), n.sum), f.mul(left, STEP * box.pair_pitch))
        _pair_row(f, n, box, f.at(source, read, n.storage), (row, pairs))
    return f


def _pair_row(f: Function, n: Elements, box: Box, source: str, place: tuple[str, Value]) -> None:
    """The positions of a row, in pairs; a last one without a partner is paired with a zero. They go to a long row, from
    a pair on.
    """
    (to, pairs), (*_, count, channels) = place, f.args

    def pair(e: Value, *, alone: bool) -> None:
        at = f.add(pairs, e)
        step, row = f.div(at, PAIRS), f.rem(at, PAIRS)
        start = f.add(f.mul(step, STEP * box.pair_pitch), f.mul(row, STEP))
        with f.loop(0, channels, n.lanes) as c:
            mask = n.mask(f, f.sub(channels, c))
            first = f.at(source, f.add(f.mul(e, 2 * box.y_steps[-1]), c), n.storage)
            one = n.load(f, first, mask)
            two = "zeroinitializer" if alone else n.load(f, f.at(first, box.y_steps[-1], n.storage), mask)
            n.put_pairs(f, one, two, f.at(to, f.add(start, f.mul(c, STEP)), n.sum))

    with f.loop(0, f.div(count, 2)) as e:
        pair(e, alone=False)
    with f.when(f.test("ne", f.rem(count, 2), 0)):
        pair(f.div(count, 2), alone=True)
