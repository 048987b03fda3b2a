"""The register tile: accumulators of rows by lanes, which stay in registers while products are added."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.builder import Function, Value, vector
from ..ir.shuffle import shuffle
from ..ir.vectors import any_lane, fma, splat


class Accumulators:
    """Accumulators of rows by vectors, as variables that become registers."""

    def __init__(self, f: Function, start: Sequence[Sequence[str]], lanes: int, sum_: str) -> None:
        self.f = f
        self.lanes = lanes
        self.sum = sum_
        self.kind = vector(lanes, sum_)
        self.places = [[f.variable(self.kind, value) for value in row] for row in start]
        self.masks: list[str] = []  # of each column, if products are added in some lanes only

    def set(self, values: Sequence[Sequence[str]]) -> None:
        """Give the accumulators other values."""
        for row, new in zip(self.places, values, strict=True):
            for place, value in zip(row, new, strict=True):
                self.f.set(place, self.kind, value)

    def may_be_nan(self) -> str:
        """Whether a sum may be NaN: one is, or two are infinities of different sign."""
        f = self.f
        sums = [value for row in self.values() for value in row]
        while len(sums) > 1:
            halves = zip(sums[::2], sums[1::2], strict=False)
            odd = sums[-1:] if len(sums) % 2 else []
            sums = [f.op(f"fadd {self.kind} {a}, {b}") for a, b in halves] + odd
        return any_lane(f, self.lanes, f.op(f"fcmp uno {self.kind} {sums[0]}, zeroinitializer"))

    def values(self) -> list[list[str]]:
        """The sums as they stand."""
        return [[self.f.get(place, self.kind) for place in row] for row in self.places]

    def add_broadcast(self, rows: Sequence[str], columns: str, align: int) -> None:
        """Add one product to each accumulator: an element for each row, times a vector for each column."""
        f = self.f
        width = len(self.places[0])
        right = [f.load(f.at(columns, v * self.lanes, self.sum), self.kind, align) for v in range(width)]
        for address, row in zip(rows, self.places, strict=True):
            left = splat(f, self.lanes, self.sum, f.load(address, self.sum, 1))
            for v, (place, value) in enumerate(zip(row, right, strict=True)):
                self._add(place, left, value, v)

    def add_pairs(self, rows: Sequence[str], columns: str, align: int, keep: str | None = None) -> None:
        """Add two products to each accumulator: a pair of bf16 for each row, times a vector of pairs for each column.

        This is the machine's own instruction, with products and sums in f32. It can load and broadcast its last operand
        by itself, so that is the row's pair. `keep` is a mask of 32 bits for all pairs: what it leaves out is zero.
        """
        f = self.f
        width = len(self.places[0])
        words, pairs = vector(self.lanes, "i32"), vector(2 * self.lanes, "bfloat")
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        f.module.declarations.add(f"declare {self.kind} @{name}({self.kind}, {pairs}, {pairs})")
        right = []
        for v in range(width):
            word = f.load(f.at(columns, v * self.lanes, "i32"), words, align)
            if keep is not None:
                word = f.op(f"and {words} {word}, {splat(f, self.lanes, 'i32', keep)}")
            right.append(f.op(f"bitcast {words} {word} to {pairs}"))
        for address, row in zip(rows, self.places, strict=True):
            one = f.load(address, "i32", 2)
            both = splat(f, self.lanes, "i32", one if keep is None else f.op(f"and i32 {one}, {keep}"))
            left = f.op(f"bitcast {words} {both} to {pairs}")
            for v, (place, value) in enumerate(zip(row, right, strict=True)):
                sum_ = f.get(place, self.kind)
                added = f.op(f"call {self.kind} @{name}({self.kind} {sum_}, {pairs} {value}, {pairs} {left})")
                self._put(place, sum_, added, v)

    def _add(self, place: str, left: str, right: str, column: int = 0) -> None:
        f = self.f
        sum_ = f.get(place, self.kind)
        self._put(place, sum_, fma(f, left, right, sum_, self.lanes, self.sum), column)

    def _put(self, place: str, before: str, added: str, column: int) -> None:
        f = self.f
        if self.masks:
            added = f.op(
                f"select {vector(self.lanes, 'i1')} {self.masks[column]}, {self.kind} {added}, {self.kind} {before}"
            )
        f.set(place, self.kind, added)

    def add_lane_groups(self, rows: Sequence[str], columns: str, align: int, inputs: int, outputs: int) -> None:
        """Add the products of groups side by side in the lanes: each lane takes the inputs of its own group.

        Lane l belongs to group l // outputs. `columns` has a vector for each input of a group, and for each column.
        """
        f = self.f
        width = len(self.places[0])
        advance = self.lanes // outputs * inputs
        right = [
            [f.load(f.at(columns, (j * width + v) * self.lanes, self.sum), self.kind, align) for v in range(width)]
            for j in range(inputs)
        ]
        for address, row in zip(rows, self.places, strict=True):
            for v, place in enumerate(row):
                left = f.load(f.at(address, v * advance, self.sum), self.kind, 4)
                for j in range(inputs):
                    self._add(place, of_group(f, self.kind, left, self.lanes, (inputs, outputs), j), right[j][v])

    def add_tap_groups(self, taps: Sequence[str], columns: str, align: int, inputs: int, outputs: int) -> None:
        """Add the products of one pixel, groups side by side in the lanes: each tap's inputs, times a vector for each
        column. Rows are (tap, input of a group).
        """
        f = self.f
        width = len(self.places[0])
        advance = self.lanes // outputs * inputs
        right = [f.load(f.at(columns, v * self.lanes, self.sum), self.kind, align) for v in range(width)]
        for t, address in enumerate(taps):
            for v in range(width):
                left = f.load(f.at(address, v * advance, self.sum), self.kind, 4)
                for j in range(inputs):
                    picked = of_group(f, self.kind, left, self.lanes, (inputs, outputs), j)
                    self._add(self.places[t * inputs + j][v], picked, right[v])


def of_group(f: Function, kind: str, value: str, lanes: int, groups: tuple[int, int], j: int) -> str:
    """For each lane the j-th input of its group. `groups` are the channels of one, (in, out)."""
    inputs, outputs = groups
    if inputs == outputs == 1:
        return value
    return shuffle(f, kind, value, value, [lane // outputs * inputs + j for lane in range(lanes)])


def addresses(f: Function, base: str, table: str, count: int, sum_: str) -> list[str]:
    """The addresses of pixels, from a table of their offsets in elements."""
    return [f.at(base, f.load(f.at(table, i, "i64"), "i64", 8), sum_) for i in range(count)]


def moved(f: Function, pointers: Sequence[str], offset: Value, sum_: str) -> list[str]:
    """The same addresses, so many elements further."""
    return [f.at(p, offset, sum_) for p in pointers]
