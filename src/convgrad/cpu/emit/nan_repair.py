"""The repair of NaN: weights that became NaN because padding was multiplied are summed again, without padding.

Tiles of the weight gradient run over padding too where channels are on their own, or groups are side by side in the
lanes. A product with a zero of the padding adds nothing, unless the other factor is infinite or NaN. Sums are looked at
before they are written, which is all that finite data costs. A vector of sums with a NaN among them is computed again,
for which all pixels are read, and what was NaN is replaced. That takes several times as long as to sum finite data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Elements
from ..ir.vectors import any_lane, fma, size_of
from ..plan.records import TapRanges
from .tile import of_group


class NanRepair:
    """Code that sums the weights of one tap again, for the lanes of a vector: channels of y, and inputs of their group.

    `groups` are the channels of a group, (of x, of y); `steps` are the elements between channels of x and of y.
    """

    def __init__(
        self, m: Module, tap_ranges: TapRanges, n: Elements, groups: tuple[int, int], steps: tuple[int, int], pitch: int
    ) -> None:
        self.tap_ranges, self.n, self.groups, self.steps, self.pitch = tap_ranges, n, groups, steps, pitch
        self.starts = m.table("tap_starts", tap_ranges.starts)
        self.ends = m.table("tap_ends", [end for tap in tap_ranges.valid for axis in tap for end in axis])
        self.function = f = m.function("repair", ["p:x", "p:y", "i:tap", "p:to", "i:left"])
        if steps == (1, 1):
            self._vectors(f)
        else:
            self._one_by_one(f)

    def repair(self, f: Function, x: str, y: str, tap: Value, at: str, left: Value) -> None:
        """Repair the sums at an address, `pitch` elements apart for each input, if one of them is NaN.

        x and y are the addresses of the first lane's channels; `left` lanes are left.
        """
        n, inputs = self.n, self.groups[0]
        rows = [f.load(f.at(at, j * self.pitch, n.sum), n.vector, size_of(n.sum)) for j in range(inputs)]
        with f.when(_any(f, n, self._nan_lanes(f, rows, left))):
            f.call(self.function, x, y, tap, at, left)

    def _nan_lanes(self, f: Function, rows: Sequence[str], left: Value) -> list[str]:
        """Of each input, which of the lanes that are left are NaN."""
        bits, there = vector(self.n.lanes, "i1"), self.n.mask(f, left)
        return [f.op(f"and {bits} {nan(f, self.n.vector, row)}, {there}") for row in rows]

    def _vectors(self, f: Function) -> None:
        """Channels are contiguous: all lanes at once."""
        n, (inputs, outputs) = self.n, self.groups
        x, y, tap, to, left = f.args
        places = [f.at(to, j * self.pitch, n.sum) for j in range(inputs)]
        before = [f.load(place, n.vector, size_of(n.sum)) for place in places]
        bad = self._nan_lanes(f, before, left)
        totals = [f.variable(n.vector, "zeroinitializer") for _ in range(inputs)]
        y_mask = n.mask(f, left)
        x_mask = n.mask(f, f.mul(f.div(left, outputs), inputs))
        bits = vector(n.lanes, "i1")

        def more() -> str:
            # What is NaN stays NaN: once all that is to be repaired is, no more rows are read.
            open_ = []
            for total, lanes in zip(totals, bad, strict=True):
                number = f.op(f"fcmp ord {n.vector} {f.get(total, n.vector)}, zeroinitializer")
                open_.append(f.op(f"and {bits} {number}, {lanes}"))
            return _any(f, n, open_)

        def add(x_at: Value, y_at: Value) -> None:
            left_side = n.load(f, f.at(x, x_at, n.storage), x_mask)
            right = n.load(f, f.at(y, y_at, n.storage), y_mask)
            for j, total in enumerate(totals):
                picked = of_group(f, n.vector, left_side, n.lanes, self.groups, j)
                f.set(total, n.vector, fma(f, picked, right, f.get(total, n.vector), n.lanes, n.sum))

        self._each_pixel(f, tap, add, more)
        for place, old, lanes, total in zip(places, before, bad, totals, strict=True):
            new = f.op(f"select {bits} {lanes}, {n.vector} {f.get(total, n.vector)}, {n.vector} {old}")
            f.store(new, place, n.vector, size_of(n.sum))

    def _one_by_one(self, f: Function) -> None:
        """Channels are strided: one lane and one input at a time."""
        n, (inputs, outputs), (x_step, y_step) = self.n, self.groups, self.steps
        x, y, tap, to, left = f.args
        with f.loop(0, left) as lane, f.loop(0, inputs) as j:
            place = f.at(to, f.add(lane, f.mul(j, self.pitch)), n.sum)
            with f.when(nan(f, n.sum, f.load(place, n.sum, size_of(n.sum)))):
                group, _ = f.split(lane, [0, outputs])
                x_here = f.at(x, f.mul(f.add(f.mul(group, inputs), j), x_step), n.storage)
                y_here = f.at(y, f.mul(lane, y_step), n.storage)
                total = f.variable(n.sum, "0.0")

                def more(total: str = total) -> str:
                    return f.op(f"fcmp ord {n.sum} {f.get(total, n.sum)}, 0.0")

                def add(x_at: Value, y_at: Value, x: str = x_here, y: str = y_here, total: str = total) -> None:
                    a, b = n.load_one(f, f.at(x, x_at, n.storage)), n.load_one(f, f.at(y, y_at, n.storage))
                    product = f.op(f"fmul {n.sum} {a}, {b}")
                    f.set(total, n.sum, f.op(f"fadd {n.sum} {f.get(total, n.sum)}, {product}"))

                self._each_pixel(f, tap, add, more)
                f.store(f.get(total, n.sum), place, n.sum, size_of(n.sum))

    def _each_pixel(
        self, f: Function, tap: Value, add: Callable[[Value, Value], None], more: Callable[[], str]
    ) -> None:
        """Call `add` at each pixel in the valid range of a tap, row by row as long as there is `more` to do."""
        x_steps, y_steps = self.tap_ranges.x_steps, self.tap_ranges.y_steps
        axes = len(x_steps)

        def along(axis: int, x_at: Value, y_at: Value) -> None:
            if axis == axes:
                add(x_at, y_at)
                return
            place = f.at(self.ends, f.add(f.mul(tap, 2 * axes), 2 * axis), "i64")
            low, high = (f.load(f.at(place, i, "i64"), "i64", 8) for i in range(2))
            if axis == axes - 1:
                high = f.op(f"select i1 {more()}, i64 {high}, i64 {low}")
            with f.loop(low, high) as i:
                along(axis + 1, f.add(x_at, f.mul(i, x_steps[axis])), f.add(y_at, f.mul(i, y_steps[axis])))

        along(0, f.load(f.at(self.starts, tap, "i64"), "i64", 8), 0)


def nan(f: Function, kind: str, value: str) -> str:
    """Whether a number is NaN, or which lanes of a vector are."""
    return f.op(f"fcmp uno {kind} {value}, {'zeroinitializer' if kind.startswith('<') else '0.0'}")


def _any(f: Function, n: Elements, lanes: Sequence[str]) -> str:
    """Whether a bit is set in one of some vectors."""
    first, *rest = lanes
    for more in rest:
        first = f.op(f"or {vector(n.lanes, 'i1')} {first}, {more}")
    return any_lane(f, n.lanes, first)
