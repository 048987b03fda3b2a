"""Numbers split into pieces of bf16, whose sum they are: for instructions that multiply nothing longer.

A number is rounded to eight bits, what remains is rounded again, and so on; every remainder is exact. Of an infinity,
of NaN, and of what is rounded to infinity the pieces add up to NaN: whatever is summed of their products is NaN, too,
and has to be summed again otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from .builder import Function, Value, vector
from .convert import Elements
from .shuffle import shuffle
from .vectors import same

HALF, UPPER = 0x8000, -0x10000  # half of the last bit of a bf16, and its bits, in those of a float


@dataclass(frozen=True)
class Pieces(Elements):
    """Elements of f32 or f16 that are split as they are packed. Loaded, they are vectors of floats.

    `sum` is "bfloat", a piece; the pieces of a number are so many, `step` apart. The last one is rounded if more than
    eight bits are left: `rounds`. `rounds_bf16`: the machine has an instruction that makes bf16 of floats.
    """

    count: int = 2
    step: Value = 0
    rounds: bool = False

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
        floats, words, upper = vector(lanes, "float"), vector(lanes, "i32"), same(lanes, UPPER)
        found: list[str] = []
        while True:
            bits = f.op(f"bitcast {floats} {value} to {words}")
            rounded = f.op(f"add {words} {bits}, {same(lanes, HALF)}")
            if len(found) < self.count - 1:
                found.append(f.op(f"and {words} {rounded}, {upper}"))
                value = f.op(f"fsub {floats} {value}, {f.op(f'bitcast {words} {found[-1]} to {floats}')}")
                continue
            if self.rounds:  # but no NaN: its bits might become those of a number
                number = f.op(f"fcmp ord {floats} {value}, zeroinitializer")
                bits = f.op(f"select {vector(lanes, 'i1')} {number}, {words} {rounded}, {words} {bits}")
            return [*found, f.op(f"and {words} {bits}, {upper}")]

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
