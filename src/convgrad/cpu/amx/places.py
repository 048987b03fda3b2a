"""Results written tile by tile, where channels are contiguous: the places of a long row, and where each one is written.

Between the rows of a box there are places that are no positions. What tiles have summed there goes to a row of the
staging that nobody reads: a branch would often be guessed wrong.
"""

from __future__ import annotations

from math import ceil

from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.vectors import size_of
from ..target import LINE
from .records import TileGather

NOWHERE = -1 << 62  # the offset of a place that is no position: less than any other


def list_places(m: Module, plan: TileGather) -> Function | None:
    """A function that lists the offset of the result of each place, in elements: (table, positions of each axis). None
    if they are not listed.
    """
    if not plan.lists_places:
        return None
    positions = plan.positions
    f = m.function("list_places", ["p:table", *(f"i:n{i}" for i in range(len(positions.axes)))])
    table, *counts = f.args
    inner = slice(positions.flat, None)
    with f.loop(0, plan.places) as place:
        there = "true"
        offset: Value = 0
        for digit, count, step in zip(
            f.split(place, positions.extents[inner]), counts[inner], plan.out_steps[inner], strict=True
        ):
            there = f.both(there, f.test("slt", digit, count))
            offset = f.add(offset, f.mul(digit, step))
        f.store(f.choose(there, offset, NOWHERE), f.at(table, place, "i64"), "i64", 8)
    return f


def write_tile(m: Module, plan: TileGather, results: Results, channels: int) -> Function:
    """A function that writes the sums of a tile, of so many channels: (sums, tensor, offsets of the places, places,
    channels).

    Without listed places, positions are evenly spaced.
    """
    f = m.function(f"write_{channels}", ["p:from", "p:to", "p:places", "i:count", "i:channels"])
    source, _, _, count, given = f.args
    n, vectors = results.elements, ceil(channels / plan.lanes)
    # That mask is no constant, because LLVM 22 stores 32 bits for a constant one of a single lane of 16 bits.
    mask = n.mask(f, f.sub(given, (vectors - 1) * plan.lanes)) if channels % plan.lanes else None
    with f.loop(0, count) as i:
        place = _place(f, plan, results, i)
        if plan.fetched_results:
            later = _place(f, plan, results, f.add(i, plan.rows))
            for byte in range(0, channels * plan.layer.out_size, LINE):
                f.prefetch(f.at(later, byte, "i8"))
        sums = f.at(source, f.mul(i, plan.block), plan.sum)
        values = [f.load(f.at(sums, v * plan.lanes, plan.sum), n.vector, size_of(plan.sum)) for v in range(vectors)]
        results.store_row(f, values, place, mask)
    return f


def _place(f: Function, plan: TileGather, results: Results, i: Value) -> str:
    """Where the result of a place is, inside `write_tile`."""
    source, to, places, *_ = f.args
    storage = results.elements.storage
    if not plan.lists_places:
        return f.at(to, f.mul(i, plan.out_steps[-1]), storage)
    offset = f.load(f.at(places, i, "i64"), "i64", 8)
    somewhere = f.test("ne", offset, NOWHERE)
    spare = f.at(source, plan.rows * plan.block, plan.sum)
    return f.op(f"select i1 {somewhere}, ptr {f.at(to, offset, storage)}, ptr {spare}")
