"""Weights that became NaN by a zero that is no data: summed once more, over the pixels that they meet.

Where channels are on their own, or groups share the lanes, tiles of the weight gradient run over padding too: a product
with zero, which is nothing unless the other side is infinite or NaN. Sums are looked at when they are written; those of
usual data cost no more than that.
"""

from __future__ import annotations

from .ir import Function, Module, Value
from .nests import Met
from .numbers import Numbers, size_of


class Mend:
    """A function of the module that sums one weight anew: (x and y of its channels, which tap, where the sum is)."""

    def __init__(self, m: Module, met: Met, n: Numbers) -> None:
        self.sum = n.sum
        self.function = f = m.function("mend", ["p:x", "p:y", "i:tap", "p:to"])
        starts = m.table("met_starts", met.starts)
        ends = m.table("met_ends", [end for tap in met.reach for axis in tap for end in axis])
        x, y, tap, to = f.args
        first = f.load(f.at(starts, tap, "i64"), "i64", 8)
        total = f.variable(n.sum, "0.0")

        def walk(axis: int, x_at: Value, y_at: Value) -> None:
            if axis == len(met.x_steps):
                a, b = n.load_one(f, f.at(x, x_at, n.storage)), n.load_one(f, f.at(y, y_at, n.storage))
                added = f.op(f"fadd {n.sum} {f.get(total, n.sum)}, {f.op(f'fmul {n.sum} {a}, {b}')}")
                f.set(total, n.sum, added)
                return
            place = f.at(ends, f.add(f.mul(tap, 2 * len(met.x_steps)), 2 * axis), "i64")
            low, high = (f.load(f.at(place, i, "i64"), "i64", 8) for i in range(2))
            if axis == len(met.x_steps) - 1:
                # Once it is NaN it stays so: no more rows are read.
                high = f.op(f"select i1 {nan(f, f.get(total, n.sum), n.sum)}, i64 {low}, i64 {high}")
            with f.loop(low, high) as i:
                walk(axis + 1, f.add(x_at, f.mul(i, met.x_steps[axis])), f.add(y_at, f.mul(i, met.y_steps[axis])))

        walk(0, first, 0)
        f.store(f.get(total, n.sum), to, n.sum, size_of(n.sum))

    def look(self, f: Function, at: str, x: str, y: str, tap: Value) -> str:
        """The sum that lies there, mended if it is NaN."""
        with f.when(nan(f, f.load(at, self.sum, size_of(self.sum)), self.sum)):
            f.call(self.function, x, y, tap, at)
        return f.load(at, self.sum, size_of(self.sum))


def nan(f: Function, value: str, type_: str) -> str:
    """Whether a number is none."""
    return f.op(f"fcmp uno {type_} {value}, 0.0")
