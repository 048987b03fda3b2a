"""The code of a `ChannelsInLanes` plan for y and x. That of w is in channels_weights.py.

A tile is a few neighbouring pixels of some rows of the result. What it reads is in window.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ..emit.frame import Frame
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import fma, size_of
from . import channels_weights
from .records import ChannelsInLanes
from .window import TilePair, Window

ARGUMENTS = ("p:in", "p:weights", "p:out", "p:bias", "i:i0", "i:i1", "i:i2", "i:i3", "i:rows", "i:columns", "i:first")
"""Of a tile: the source at the position of the first pixel, packed weights, the place of the first result, packed bias;
that position along each axis; rows and columns that are left; the first channel.
"""


class Left(NamedTuple):
    """What is left of the result for a masked tile: rows and columns, and the lanes that have a channel."""

    rows: Value
    columns: Value
    lanes: str


def write(plan: ChannelsInLanes) -> str:
    """The IR of a kernel for this plan."""
    if plan.layer.wanted == "w":
        return channels_weights.write(plan)
    m = Module()
    tiles = _tiles(m, plan)
    tap_weights = m.table("tap_weights", plan.layer.tap_offsets)

    frame = Frame(m, plan.buffers, plan.sum)
    _pack_weights(frame, plan, tap_weights)
    f, counts = frame.f, plan.counts
    with frame.items("second", plan.tasks) as task:
        q0, q1, part = f.split(task, [counts[0], counts[1], -(-counts[2] // plan.task_rows)])
        low = f.mul(part, plan.task_rows)
        high = f.min(f.add(low, plan.task_rows), counts[2])
        for window, pair in tiles:
            s0, s1, s2, s3 = window.segments
            with f.when(f.both(f.test("slt", q0, s0.stop), f.test("slt", q1, s1.stop))):
                stop = f.min(high, s2.stop)
                with f.loop(low, stop, plan.rows) as q2, f.loop(0, s3.stop, plan.vectors) as q3:
                    _compute(frame, window, pair, (q0, q1, q2, q3), stop)
    return frame.end(stream=plan.stream)


def _tiles(m: Module, plan: ChannelsInLanes) -> list[tuple[Window, TilePair]]:
    """What each phase with results reads, and its tiles."""
    phases = [p for p in product(*(axis.segments for axis in plan.maps)) if all(s.start < s.stop for s in p)]
    windows = [Window(plan, segments) for segments in phases]
    return [
        (window, TilePair(_tile(m, f"tile{i}", window, masked=False), _tile(m, f"tile{i}_masked", window, masked=True)))
        for i, window in enumerate(windows)
    ]


def _pack_weights(frame: Frame, plan: ChannelsInLanes, tap_weights: str) -> None:
    """Pack weights [tap][channel] and the bias as accumulators, channels rounded up to vectors; then a barrier."""
    f, layer, sum_ = frame.f, plan.layer, plan.sum
    n = Elements(layer.dtype, plan.lanes, sum_, layer.converts_f16)

    def pack(source: str, first: Value, step: int, to: str, tap: Value) -> None:
        with f.loop(0, plan.pitch) as c:
            channel = f.min(c, layer.channels - 1)
            value = n.load_one(f, f.at(source, f.add(first, f.mul(channel, step)), n.storage))
            f.store(value, f.at(to, f.add(f.mul(tap, plan.pitch), c), sum_), sum_, size_of(sum_))

    with frame.items("first", len(layer.tap_offsets) + 1) as tap:
        branch = f.either(f.test("slt", tap, len(layer.tap_offsets)))
        offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
        pack(frame.tensors["w"], offset, layer.w_step, frame.at["weights"], tap)
        f.otherwise(branch)
        if layer.bias is not None:
            pack(frame.tensors["bias"], 0, layer.bias, frame.at["bias"], 0)
        f.join(branch)
    frame.barrier()


def _compute(frame: Frame, window: Window, tiles: TilePair, q: Sequence[Value], stop: Value) -> None:
    """Compute the results at some positions, of which those along the third axis end at `stop`."""
    f, plan, layer = frame.f, window.plan, window.plan.layer
    source, wanted = (frame.tensors[name] for name in ("xy" if layer.wanted == "y" else "yx"))
    result = _results(plan).elements
    first = [f.mul(i, m.in_stride) for i, m in zip(q, plan.maps, strict=True)]
    steps = zip(first, plan.source.steps, strict=True)
    read = f.at(source, f.add(*(f.mul(i, step) for i, step in steps)), window.n.storage)
    axes = zip(q, plan.maps, window.segments, strict=True)
    out = [f.mul(f.add(f.mul(i, m.out_stride), s.residue), m.out_step) for i, m, s in axes]
    place = f.at(wanted, f.add(*out), result.storage)
    rows, columns = f.sub(stop, q[2]), f.sub(window.segments[3].stop, q[3])
    window.call(f, tiles, (read, frame.at["weights"], place, frame.at["bias"], *first, rows, columns))


def _tile(m: Module, name: str, window: Window, *, masked: bool) -> Function:
    """A function that computes one tile, for all channels from a given one on: see `ARGUMENTS`."""
    f = m.function(name, list(ARGUMENTS))
    source, weights, out, bias, *position, rows, columns, first = f.args
    plan, n = window.plan, window.n
    inside = window.rows_inside(f, position)
    there = window.columns_inside(f, position[3]) if masked else {}
    with window.channels(f, first, masked=masked) as c:
        left = Left(rows, columns, window.lanes(f, c)) if masked else None
        masks = None if left is None else {j: window.masked(f, ok, left.lanes) for j, ok in there.items()}
        start = "zeroinitializer"
        if plan.layer.bias is not None:
            start = f.load(f.at(bias, c, plan.sum), n.vector, window.align)
        sums = [[f.variable(n.vector, start) for _ in range(plan.vectors)] for _ in range(plan.rows)]
        for row, served in sorted(window.rows.items()):
            with f.when(inside[row]):
                values = window.load(f, source, c, row, masks)
                for (r, kernel_row), (k, o) in product(served, window.column_taps):
                    tap = (kernel_row * plan.maps[3].kernel + k) * plan.pitch
                    weight = f.load(f.at(weights, f.add(c, tap), plan.sum), n.vector, window.align)
                    for col, sum_ in enumerate(sums[r]):
                        value = values[col * window.stride + o]
                        f.set(sum_, n.vector, fma(f, value, weight, f.get(sum_, n.vector), plan.lanes, plan.sum))
        _store(f, plan, sums, f.at(out, c, _results(plan).elements.storage), left)
    return f


def _store(f: Function, plan: ChannelsInLanes, sums: list[list[str]], out: str, left: Left | None) -> None:
    """Round and write a tile; of a masked one, only the rows and columns that are left."""
    row_step, column_step = (m.out_step * m.out_stride for m in plan.maps[2:])
    results = _results(plan)
    n = results.elements
    places = list(product(range(plan.rows), range(plan.vectors)))

    def put(r: int, c: int, *, stream: bool = False) -> None:
        place = f.at(out, r * row_step + c * column_step, n.storage)
        value = f.get(sums[r][c], n.vector)
        if stream:
            n.store(f, value, place, stream=True)
        else:
            results.store(f, value, place, None if left is None else left.lanes)

    if left is not None:
        for r, c in places:
            with f.when(f.both(f.test("slt", r, left.rows), f.test("slt", c, left.columns))):
                put(r, c)
        return
    if plan.stream:
        # Pixels are whole vectors apart, so that all are aligned if the first one is.
        branch = f.either(f.aligned(out, n.bytes))
        for r, c in places:
            put(r, c, stream=True)
        f.otherwise(branch)
    for r, c in places:
        put(r, c)
    if plan.stream:
        f.join(branch)


def _results(plan: ChannelsInLanes) -> Results:
    """How results are written."""
    layer = plan.layer
    return Results(Elements(layer.out_dtype, plan.lanes, plan.sum, layer.converts_f16), layer.accumulate)
