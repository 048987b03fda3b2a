"""Results of split numbers that became NaN: an infinity times its pieces has no value, so they are summed again in f32.

The sums of a tile are looked at once, which is all that finite data cost. What is NaN is summed from the tensors, one
product after another, until that is NaN, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ..emit.nan_repair import nan
from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Elements
from ..ir.vectors import any_lane
from .records import Positions, TileGather

UNROLL = 4  # rows of sums that are looked at without a loop


def reads(plan: TileGather) -> list[int]:
    """For each row of the table of taps: where the weight is in the tensor, and the coordinates read for q = 0."""
    positions, found = plan.positions, list[int]()
    for phase in positions.phases:
        own = [[tap for tap in a.taps if tap[0] == r] for a, r in zip(positions.axes, phase.residues, strict=True)]
        for taps, (number, _) in zip(product(*own), positions.taps[phase.first :], strict=False):
            found.append(plan.weights.tap_offsets[number])
            found += [
                a.runs[run] + shift * a.in_stride for (_, _, run, shift), a in zip(taps, positions.axes, strict=True)
            ]
    return found


def repair_tile(m: Module, plan: TileGather, inputs: Elements) -> Function:
    """A function that looks at the sums of a tile: (sums, input and weights of the group, bias, reads of the phase,
    how many, channels, the place of the first sum in its long row, and along each axis: the position where that row
    begins, and the positions of the box).
    """
    axes = range(len(plan.positions.axes))
    addresses = ["p:sums", "p:input", "p:weights", "p:bias", "p:reads", "i:count", "i:channels", "i:first"]
    f = m.function("repair_tile", [*addresses, *(f"i:q{i}" for i in axes), *(f"i:n{i}" for i in axes)])
    sums, source, weights, bias, table, count, channels, first, *rest = f.args
    row_sums = replace(inputs, lanes=plan.lanes)
    with f.when(_any_nan(f, row_sums, sums, (plan.rows, plan.vectors))), f.loop(0, plan.rows) as row:
        there, place = _place(f, plan.positions, f.add(first, row), (rest[: len(axes)], rest[len(axes) :]))
        with f.when(there), f.loop(0, channels) as lane:
            at = f.at(sums, f.add(f.mul(row, plan.block), lane), "float")
            with f.when(nan(f, "float", f.load(at, "float", 4))):
                given = "0.0" if plan.layer.bias is None else f.load(f.at(bias, lane, "float"), "float", 4)
                total = f.variable("float", given)
                with f.loop(0, count) as t:
                    tap = f.at(table, f.mul(t, 1 + len(axes)), "i64")
                    own = f.at(weights, f.mul(lane, plan.layer.w_strides[1]), inputs.storage)
                    _add_tap(f, plan, inputs, (source, own, tap), (place, total))
                f.store(f.get(total, "float"), at, "float", 4)
    return f


def _any_nan(f: Function, n: Elements, sums: str, size: tuple[int, int]) -> str:
    """Whether there may be a NaN among so many rows of vectors: their sum is NaN then, and of infinities as well."""
    rows, vectors = size
    once = rows % UNROLL == 0
    totals = [f.variable(n.vector, "zeroinitializer") for _ in range(vectors)]
    with f.loop(0, rows, UNROLL if once else 1) as row:
        for i in range(UNROLL if once else 1):
            for v, total in enumerate(totals):
                at = f.at(sums, f.add(f.mul(f.add(row, i), vectors * n.lanes), v * n.lanes), "float")
                more = f.op(f"fadd {n.vector} {f.get(total, n.vector)}, {f.load(at, n.vector, 4)}")
                f.set(total, n.vector, more)
    found = nan(f, n.vector, f.get(totals[0], n.vector))
    for total in totals[1:]:
        found = f.op(f"or {vector(n.lanes, 'i1')} {found}, {nan(f, n.vector, f.get(total, n.vector))}")
    return any_lane(f, n.lanes, found)


def _place(
    f: Function, positions: Positions, place: Value, row: tuple[Sequence[Value], Sequence[Value]]
) -> tuple[str, list[Value]]:
    """Whether a place of a long row is a position, and which. Of the row: where it begins, and positions of the box."""
    start, counts = row
    found, there = list(start), "true"
    digits: Value = place
    for i in range(positions.flat, len(counts)):
        inner = prod(positions.extents[i + 1 :])
        digit = f.div(digits, inner)
        digits = f.sub(digits, f.mul(digit, inner))
        there = f.both(there, f.test("slt", digit, counts[i]))
        found[i] = f.add(start[i], digit)
    return there, found


def _add_tap(f: Function, plan: TileGather, n: Elements, at: tuple[str, str, str], to: tuple[list[Value], str]) -> None:
    """Add the products of a tap, if it lies inside the input and there is no NaN yet: `at` are the input and weights of
    the first tap, and what the tap reads; `to` is the position, and the sum.
    """
    (source, weights, tap), (place, total) = at, to
    there = f.op(f"fcmp ord float {f.get(total, 'float')}, 0.0")
    x_at: Value = 0
    for i, (q, a) in enumerate(zip(place, plan.positions.axes, strict=True)):
        coordinate = f.add(f.mul(q, a.in_stride), f.load(f.at(tap, 1 + i, "i64"), "i64", 8))
        there = f.both(there, f.test("ult", coordinate, a.pack.size))
        x_at = f.add(x_at, f.mul(coordinate, a.pack.stride))
    with f.when(there), f.loop(0, plan.layer.cin) as c:
        x = f.at(source, f.add(x_at, f.mul(c, plan.layer.in_channel[1])), n.storage)
        w = f.at(weights, f.add(f.load(tap, "i64", 8), f.mul(c, plan.layer.w_strides[2])), n.storage)
        term = f.op(f"fmul float {n.load_one(f, x)}, {n.load_one(f, w)}")
        f.set(total, "float", f.op(f"fadd float {f.get(total, 'float')}, {term}"))
