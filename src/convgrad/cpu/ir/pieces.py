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
from .shuffle import shuffle
from .vectors import same

HALF, UPPER = 0x8000, -0x10000  # half of the last bit of a bf16, and its bits, in those of a float
INFINITE = 0x7F800000  # the first float that is not finite
ROUNDED_UP = 0x7F7F8000  # the first that would be rounded to infinity


@dataclass(frozen=True)
class Pieces(Elements):
    """Elements of f32 or f16 that are split as they are packed. Loaded, they are vectors of floats.

    `sum` is "bfloat", a piece; the pieces of a number lie `step` apart. They are `count`, of which two are first ones.
    `rounds_bf16`: the machine has an instruction that makes bf16 of floats.
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
            f.store(self._upper(f, piece), self._at(f, place, i), vector(self.lanes, "i16"), 2)

    def put_one(self, f: Function, value: str, place: str) -> None:
        """Store the pieces of one float."""
        lone = f.op(f"insertelement <1 x float> poison, float {value}, i32 0")
        for i, piece in enumerate(self._split(f, lone, 1)):
            word = f.op(f"lshr i32 {f.op(f'extractelement <1 x i32> {piece}, i32 0')}, 16")
            f.store(f.op(f"trunc i32 {word} to i16"), self._at(f, place, i), "i16", 2)

    def put_pairs(self, f: Function, one: str, two: str, place: str) -> None:
        """Store the pieces of two vectors of floats, in pairs."""
        words = vector(self.lanes, "i32")
        both = (self._split(f, value, self.lanes) for value in (one, two))
        for i, (first, second) in enumerate(zip(*both, strict=True)):
            low = f.op(f"lshr {words} {first}, {same(self.lanes, 16)}")
            f.store(f.op(f"or {words} {low}, {second}"), self._at(f, place, i), words, 4)

    def _at(self, f: Function, place: str, piece: int) -> str:
        return f.at(place, f.mul(self.step, piece), "i16")

    def _split(self, f: Function, value: str, lanes: int) -> list[str]:
        """The pieces of a vector of floats, the largest first: each is the upper half of a word."""
        floats, words, choice = vector(lanes, "float"), vector(lanes, "i32"), f"select {vector(lanes, 'i1')}"
        bits = f.op(f"bitcast {floats} {value} to {words}")
        body = f.op(f"and {words} {bits}, {same(lanes, 0x7FFFFFFF)}")
        finite = f.op(f"icmp ult {words} {body}, {same(lanes, INFINITE)}")
        rounds = f.op(f"icmp ult {words} {body}, {same(lanes, ROUNDED_UP)}")
        half = f.op(f"{choice} {rounds}, {words} {same(lanes, HALF)}, {words} zeroinitializer")
        rounded = f.op(f"add {words} {bits}, {half}")
        # Added to itself, an infinity stays, and a NaN has a bit in its upper half.
        special = f.op(f"bitcast {floats} {f.op(f'fadd {floats} {value}, {value}')} to {words}")
        first = f.op(f"{choice} {finite}, {words} {rounded}, {words} {special}")
        first = f.op(f"and {words} {first}, {same(lanes, UPPER)}")
        piece = f.op(f"{choice} {finite}, {words} {first}, {words} zeroinitializer")
        found = [first, piece]
        left = f.op(f"{choice} {finite}, {floats} {value}, {floats} zeroinitializer")
        while len(found) < self.count:
            taken = f.op(f"bitcast {words} {piece} to {floats}")
            left = f.op(f"fsub {floats} {left}, {taken}")
            bits = f.op(f"bitcast {floats} {left} to {words}")
            piece = f.op(f"and {words} {f.op(f'add {words} {bits}, {same(lanes, HALF)}')}, {same(lanes, UPPER)}")
            found.append(piece)
        return found

    def _upper(self, f: Function, piece: str) -> str:
        """A vector of the upper halves of words."""
        lanes, words, halves = self.lanes, vector(self.lanes, "i32"), vector(self.lanes, "i16")
        if not self.rounds_bf16 or lanes not in (16, 32):
            return f.op(f"trunc {words} {f.op(f'lshr {words} {piece}, {same(lanes, 16)}')} to {halves}")
        # They are bf16 already, so that nothing is rounded: this instruction takes fewer steps than to shift them.
        floats, made, name = vector(lanes, "float"), vector(lanes, "bfloat"), "llvm.x86.avx512bf16.cvtne"
        value = f.op(f"bitcast {words} {piece} to {floats}")
        if lanes == 16:
            name += "ps2bf16.512"
            f.module.declarations.add(f"declare {made} @{name}({floats})")
            value = f.op(f"call {made} @{name}({floats} {value})")
        else:
            name += "2ps2bf16.512"
            f.module.declarations.add(f"declare {made} @{name}(<16 x float>, <16 x float>)")
            low, high = (shuffle(f, floats, value, value, list(range(i, i + 16))) for i in (0, 16))
            value = f.op(f"call {made} @{name}(<16 x float> {high}, <16 x float> {low})")
        return f.op(f"bitcast {made} {value} to {halves}")
