"""Numbers split into the pieces that tiles read, after they were packed as they are."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..ir.builder import Function, Module, Value, vector
from ..ir.pieces import Pieces
from ..ir.shuffle import transpose
from ..ir.vectors import size_of
from ..pack.weights import PackWeights, block_lanes
from .records import Box


def split_weights(m: Module, p: PackWeights, n: Pieces) -> Function:
    """A function that splits a chunk of a panel, [tap][channel][lane]: (chunk, panel, block, which chunk it is).

    The panel is [piece][tap][pair of channels][lane][first, second]; the partner of an odd last channel is zero.
    """
    f = m.function("split_weights", ["p:from", "p:to", "i:block", "i:chunk"])
    source, to, block, chunk = f.args
    lanes, taps, pairs = block_lanes(f, p, block), len(p.tap_offsets), ceil(p.channels / 2)
    first = f.mul(chunk, p.chunk)
    channels = f.min(f.sub(p.channels, first), p.chunk)

    def split(n: Pieces, tap: Value, pair: Value, *, alone: bool) -> None:
        row = f.mul(f.add(f.mul(tap, channels), f.mul(pair, 2)), lanes)
        place = f.mul(f.add(f.mul(tap, pairs), f.div(first, 2), pair), lanes)
        with f.loop(0, lanes, n.lanes) as lane:
            at = f.at(source, f.add(row, lane), "float")
            one = f.load(at, f"<{n.lanes} x float>", 4)
            two = "zeroinitializer" if alone else f.load(f.at(at, lanes, "float"), f"<{n.lanes} x float>", 4)
            n.put_pairs(f, one, two, f.at(to, f.add(place, lane), "float"))

    step = f.mul(2 * taps * pairs, lanes)
    n = replace(n, step=step)
    with f.loop(0, taps) as tap:
        with f.loop(0, f.div(channels, 2)) as pair:
            split(n, tap, pair, alone=False)
        if p.channels % 2:
            with f.when(f.test("ne", f.rem(channels, 2), 0)):
                split(n, tap, f.div(channels, 2), alone=True)
    return f


def transpose_rows(m: Module, n: Pieces, box: Box) -> Function:
    """A function that makes [piece][channel][entry] of [entry][channel], a square at a time: (from, to)."""
    f = m.function("transpose_x", ["p:from", "p:to"])
    source, to = f.args
    rows, _ = box.channels
    raw, pitch = vector(n.lanes, n.storage), box.x_pack.pitch
    with f.loop(0, rows, n.lanes) as c, f.loop(0, box.row_pitch, n.lanes) as e:
        at = [f.at(source, f.add(f.mul(f.add(e, i), pitch), c), n.storage) for i in range(n.lanes)]
        columns = transpose(f, [f.load(place, raw, size_of(n.storage)) for place in at], n.lanes, n.storage)
        for i, column in enumerate(columns):
            place = f.at(to, f.add(f.mul(f.add(c, i), box.row_pitch), e), n.sum)
            n.put(f, n.widen(f, column, n.lanes), place)
    return f


def split_rows(m: Module, n: Pieces, box: Box) -> Function:
    """A function that makes [piece][channel][entry] of [channel][entry]: (from, to, rows)."""
    f = m.function("split_x", ["p:from", "p:to", "i:rows"])
    source, to, rows = f.args
    with f.loop(0, f.mul(rows, box.row_pitch), n.lanes) as e:
        n.put(f, n.load(f, f.at(source, e, n.storage)), f.at(to, e, n.sum))
    return f
