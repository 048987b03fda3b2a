"""Numbers split into pieces of bf16, whose sum they are: for instructions that multiply nothing longer.

A number is rounded to eight bits, what remains is rounded again, and so on; every remainder is exact. An infinity or a
NaN must meet each number of the other tensor once, and whole: times the smaller pieces of that number, which may be
zero or of the other sign, it would be NaN. So there are two first pieces: one with infinities and NaN, and one with
zeros in their place, for the products with smaller pieces. Numbers that would be rounded to infinity are cut instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from .builder import Function, Value, vector
from .convert import Elements
from .shuffle import interleave
from .vectors import same

HALF, UPPER = 0x8000, -0x10000  # half of the last bit of a bf16, and its bits, in those of a float
INFINITE = 0x7F800000  # the first float that is not finite
ROUNDED_UP = 0x7F7F8000  # the first that would be rounded to infinity


@dataclass(frozen=True)
class Pieces(Elements):
    """Elements of f32 or f16 that are split as they are packed. Loaded, they are vectors of floats.

    `sum` is "bfloat", a piece; the pieces of a number lie `step` apart. They are `count`, of which two are first ones.
    """

    count: int = 2
    step: Value = 0

    def widen(self, f: Function, raw: str, lanes: int) -> str:
        """Elements as they are in memory, made floats; with `sum` as they are in memory, left alone."""
        return raw if self.sum == self.storage else self.plain.widen(f, raw, lanes)

    @property
    def plain(self) -> Elements:
        """The elements as floats."""
        return Elements(self.dtype, self.lanes, "float", self.converts_f16)

    def load_one(self, f: Function, pointer: str) -> str:
        """One element of the tensor, as a float."""
        return self.plain.load_one(f, pointer)

    def put(self, f: Function, value: str, place: str) -> None:
        """Store the pieces of a vector of floats, each a step beyond the one before."""
        for i, piece in enumerate(self._split(f, value, self.lanes)):
            f.store(piece, self._at(f, place, i), vector(self.lanes, "i16"), 2)

    def put_one(self, f: Function, value: str, place: str) -> None:
        """Store the pieces of one float."""
        lone = f.op(f"insertelement <1 x float> poison, float {value}, i32 0")
        for i, piece in enumerate(self._split(f, lone, 1)):
            f.store(f.op(f"extractelement <1 x i16> {piece}, i32 0"), self._at(f, place, i), "i16", 2)

    def put_pairs(self, f: Function, one: str, two: str, place: str) -> None:
        """Store the pieces of two vectors of floats, in pairs."""
        both = (self._split(f, value, self.lanes) for value in (one, two))
        for i, pair in enumerate(zip(*both, strict=True)):
            value = interleave(f, vector(self.lanes, "i16"), self.lanes, *pair)
            f.store(value, self._at(f, place, i), vector(2 * self.lanes, "i16"), 4)

    def _at(self, f: Function, place: str, piece: int) -> str:
        return f.at(place, f.mul(self.step, piece), "i16")

    def _split(self, f: Function, value: str, lanes: int) -> list[str]:
        """The pieces of a vector of floats, the largest first."""
        floats, words, choice = vector(lanes, "float"), vector(lanes, "i32"), f"select {vector(lanes, 'i1')}"
        bits = f.op(f"bitcast {floats} {value} to {words}")
        body = f.op(f"and {words} {bits}, {same(lanes, 0x7FFFFFFF)}")
        finite = f.op(f"icmp ult {words} {body}, {same(lanes, INFINITE)}")
        rounds = f.op(f"icmp ult {words} {body}, {same(lanes, ROUNDED_UP)}")
        half = f.op(f"{choice} {rounds}, {words} {same(lanes, HALF)}, {words} zeroinitializer")
        first = f.op(f"and {words} {f.op(f'add {words} {bits}, {half}')}, {same(lanes, UPPER)}")
        # Added to itself, an infinity stays, and a NaN has a bit in its upper half.
        special = f.op(f"bitcast {floats} {f.op(f'fadd {floats} {value}, {value}')} to {words}")
        found = [f.op(f"{choice} {finite}, {words} {first}, {words} {special}")]
        piece = f.op(f"{choice} {finite}, {words} {first}, {words} zeroinitializer")
        found.append(piece)
        left = f.op(f"{choice} {finite}, {floats} {value}, {floats} zeroinitializer")
        while len(found) < self.count:
            taken = f.op(f"bitcast {words} {piece} to {floats}")
            left = f.op(f"fsub {floats} {left}, {taken}")
            bits = f.op(f"bitcast {floats} {left} to {words}")
            piece = f.op(f"and {words} {f.op(f'add {words} {bits}, {same(lanes, HALF)}')}, {same(lanes, UPPER)}")
            found.append(piece)
        return [self._upper(f, piece, lanes) for piece in found]

    def _upper(self, f: Function, words: str, lanes: int) -> str:
        """The upper halves of words."""
        high = f.op(f"lshr {vector(lanes, 'i32')} {words}, {same(lanes, 16)}")
        return f.op(f"trunc {vector(lanes, 'i32')} {high} to {vector(lanes, 'i16')}")
