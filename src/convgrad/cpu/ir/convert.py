"""Element types: loads convert a tensor's elements to accumulators, stores round them once, to nearest even.

In registers everything is the accumulator type, float or double. A tensor may lie at any address, so loads and stores
of it assume no alignment; our own buffers are aligned to a cache line. What is less than a vector takes a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..target import LINE
from .builder import Function, Value, float_text, vector
from .shuffle import interleave, shuffle
from .vectors import mangled, same, size_of, splat, splat_constant

_STORAGE = {"f32": "float", "bf16": "i16", "f16": "i16", "f64": "double"}


@dataclass(frozen=True)
class Elements:
    """The elements of one tensor: its dtype, and the vectors of accumulators ("float" or "double") that they become.

    `converts_f16`: the machine has instructions for f16; else integers do it. `rounds_bf16`: it has one that rounds to
    bf16, and subnormal numbers to zero, as its dot products do. With `sum` "i16", elements of 16 bits are copied as
    they are. `ahead`: so many bytes further on, memory is prefetched as vectors are loaded.
    """

    dtype: str
    lanes: int
    sum: str
    converts_f16: bool
    rounds_bf16: bool = False
    ahead: int = 0

    @property
    def storage(self) -> str:
        """The type of an element in memory."""
        return _STORAGE[self.dtype]

    @property
    def vector(self) -> str:
        """The type of a vector of accumulators."""
        return vector(self.lanes, self.sum)

    @property
    def bytes(self) -> int:
        """Bytes of a vector in memory."""
        return self.lanes * size_of(self.storage)

    @property
    def stream_align(self) -> int:
        """What an address must be a multiple of, to write vectors there past the caches."""
        return self.bytes * self._vectors_at_once

    @property
    def _vectors_at_once(self) -> int:
        """How many contiguous vectors one store writes."""
        return 2 if self.storage == "i16" else 1

    # Whole and partial vectors of a tensor.

    def mask(self, f: Function, count: Value) -> str:
        """A mask of the first `count` lanes."""
        return self._side_of(f, "slt", count)

    def window(self, f: Function, low: Value, high: Value) -> str | None:
        """A mask of the lanes from `low` to `high` - 1, both of which may lie outside; None if that is every lane."""
        if isinstance(low, int) and isinstance(high, int):
            there = [low <= i < high for i in range(self.lanes)]
            return None if all(there) else "<" + ", ".join(f"i1 {str(b).lower()}" for b in there) + ">"
        above, below = self._side_of(f, "sge", low), self._side_of(f, "slt", high)
        return f.op(f"and {vector(self.lanes, 'i1')} {above}, {below}")

    def _side_of(self, f: Function, relation: str, end: Value) -> str:
        """A mask of the lanes on one side of `end`, which may lie outside."""
        kind = "i64"
        if self.lanes > 16:  # lane numbers of 64 bits would fill many registers
            kind, end = "i16", f.op(f"trunc i64 {f.min(f.max(end, 0), self.lanes)} to i16")
        steps = "<" + ", ".join(f"{kind} {i}" for i in range(self.lanes)) + ">"
        return f.op(f"icmp {relation} {vector(self.lanes, kind)} {steps}, {splat(f, self.lanes, kind, end)}")

    def marked(self, f: Function, table: str) -> str:
        """A mask of the lanes whose entry of a table is not zero."""
        numbers = vector(self.lanes, "i64")
        return f.op(f"icmp ne {numbers} {f.load(table, numbers, 8)}, zeroinitializer")

    def load(self, f: Function, pointer: str, mask: str | None = None) -> str:
        """A vector of the tensor, widened. Lanes outside the mask become zeros, and their memory is not read."""
        kind = vector(self.lanes, self.storage)
        for byte in range(0, self.bytes if self.ahead else 0, LINE):
            f.prefetch(f.at(pointer, self.ahead + byte, "i8"))
        if mask is None:
            raw = f.load(pointer, kind, 1)
        else:
            name = f"llvm.masked.load.{mangled(self.lanes, self.storage)}.p0"
            bits = vector(self.lanes, "i1")
            f.module.declarations.add(f"declare {kind} @{name}(ptr, i32, {bits}, {kind})")
            raw = f.op(f"call {kind} @{name}(ptr {pointer}, i32 1, {bits} {mask}, {kind} zeroinitializer)")
        return self.widen(f, raw, self.lanes)

    def store(self, f: Function, value: str, pointer: str, mask: str | None = None, *, stream: bool = False) -> None:
        """Round a vector and write it to the tensor, but for the lanes outside the mask.

        To `stream` is to write past the caches: a whole vector, to an address that is a multiple of its size.
        """
        kind = vector(self.lanes, self.storage)
        raw = self._narrow(f, value, self.lanes)
        if mask is None:
            if stream:
                f.stream(raw, pointer, kind, self.bytes)
            else:
                f.store(raw, pointer, kind, 1)
            return
        name = f"llvm.masked.store.{mangled(self.lanes, self.storage)}.p0"
        bits = vector(self.lanes, "i1")
        f.module.declarations.add(f"declare void @{name}({kind}, ptr, i32, {bits})")
        f.do(f"call void @{name}({kind} {raw}, ptr {pointer}, i32 1, {bits} {mask})")

    def store_contiguous(self, f: Function, values: Sequence[str], pointer: str, *, stream: bool = False) -> None:
        """Round vectors and write them one after another. To stream, the address is a multiple of `stream_align`.

        Elements of 16 bits are written two vectors at a time: past the caches, only whole lines are quick.
        """
        for v in range(0, len(values), self._vectors_at_once):
            at = f.at(pointer, v * self.lanes, self.storage)
            if self._vectors_at_once == 1 or v + 1 == len(values):
                self.store(f, values[v], at, stream=stream)
                continue
            raw, kind = self.narrow_two(f, values[v], values[v + 1]), vector(2 * self.lanes, self.storage)
            if stream:
                f.stream(raw, at, kind, self.stream_align)
            else:
                f.store(raw, at, kind, 1)

    def load_one(self, f: Function, pointer: str) -> str:
        """One element of the tensor, widened."""
        raw = f.load(pointer, self.storage, 1)
        if self.storage == self.sum:
            return raw
        lone = f.op(f"insertelement <1 x {self.storage}> poison, {self.storage} {raw}, i32 0")
        return f.op(f"extractelement <1 x {self.sum}> {self.widen(f, lone, 1)}, i32 0")

    def put(self, f: Function, value: str, place: str) -> None:
        """Store a vector of accumulators in a buffer of ours."""
        f.store(value, place, self.vector, size_of(self.sum))

    def put_pairs(self, f: Function, one: str, two: str, place: str) -> None:
        """Store two vectors of accumulators there, in pairs."""
        f.store(interleave(f, self.vector, self.lanes, one, two), place, vector(2 * self.lanes, self.sum), 4)

    def put_one(self, f: Function, value: str, place: str) -> None:
        """Store one accumulator there."""
        f.store(value, place, self.sum, size_of(self.sum))

    def store_one(self, f: Function, value: str, pointer: str) -> None:
        """Round one element and write it."""
        if self.storage != self.sum:
            lone = f.op(f"insertelement <1 x {self.sum}> poison, {self.sum} {value}, i32 0")
            value = f.op(f"extractelement <1 x {self.storage}> {self._narrow(f, lone, 1)}, i32 0")
        f.store(value, pointer, self.storage, 1)

    # Conversions.

    def narrow_two(self, f: Function, low: str, high: str) -> str:
        """Two vectors of accumulators, rounded to one of elements."""
        if self._rounds_by_itself(self.lanes):
            name, rounded = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * self.lanes}", vector(2 * self.lanes, "bfloat")
            f.module.declarations.add(f"declare {rounded} @{name}({self.vector}, {self.vector})")
            both = f.op(f"call {rounded} @{name}({self.vector} {high}, {self.vector} {low})")
            return f.op(f"bitcast {rounded} {both} to {vector(2 * self.lanes, 'i16')}")
        kind = vector(self.lanes, self.storage)
        a, b = (self._narrow(f, value, self.lanes) for value in (low, high))
        return shuffle(f, kind, a, b, list(range(2 * self.lanes)))

    def widen(self, f: Function, raw: str, lanes: int) -> str:
        """Elements as they are in memory, made accumulators."""
        if self.storage == self.sum:
            return raw
        shorts, floats, words = (vector(lanes, type_) for type_ in ("i16", "float", "i32"))
        if self.dtype == "f16" and self.converts_f16:
            halves = f.op(f"bitcast {shorts} {raw} to {vector(lanes, 'half')}")
            return f.op(f"fpext {vector(lanes, 'half')} {halves} to {floats}")
        wide = f.op(f"zext {shorts} {raw} to {words}")
        if self.dtype == "bf16":
            return f.op(f"bitcast {words} {f.op(f'shl {words} {wide}, {same(lanes, 16)}')} to {floats}")
        return _f16_to_float(f, wide, lanes)

    def _narrow(self, f: Function, value: str, lanes: int) -> str:
        """Accumulators, rounded to elements as they are in memory."""
        if self.storage == self.sum:
            return value
        shorts, floats, words = (vector(lanes, type_) for type_ in ("i16", "float", "i32"))
        if self.dtype == "f16" and self.converts_f16:
            halves = f.op(f"fptrunc {floats} {value} to {vector(lanes, 'half')}")
            return f.op(f"bitcast {vector(lanes, 'half')} {halves} to {shorts}")
        if self._rounds_by_itself(lanes):
            name, rounded = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}", vector(lanes, "bfloat")
            f.module.declarations.add(f"declare {rounded} @{name}({floats})")
            return f.op(f"bitcast {rounded} {f.op(f'call {rounded} @{name}({floats} {value})')} to {shorts}")
        raw = f.op(f"bitcast {floats} {value} to {words}")
        number = _float_to_bf16(f, value, raw, lanes) if self.dtype == "bf16" else _float_to_f16(f, raw, lanes)
        return f.op(f"trunc {words} {number} to {shorts}")

    def _rounds_by_itself(self, lanes: int) -> bool:
        """Whether the machine has an instruction that rounds so many lanes to bf16."""
        return self.dtype == "bf16" and self.rounds_bf16 and lanes in (8, 16)


def _f16_to_float(f: Function, wide: str, lanes: int) -> str:
    """Floats of f16 bits, each in 32 bits: shift exponent and mantissa into place, then multiply by 2**112.

    That is exact, and right for subnormal numbers too.
    """
    floats, words = vector(lanes, "float"), vector(lanes, "i32")
    body = f.op(f"and {words} {wide}, {same(lanes, 0x7FFF)}")
    shifted = f.op(f"bitcast {words} {f.op(f'shl {words} {body}, {same(lanes, 13)}')} to {floats}")
    scale = splat_constant(lanes, "float", float_text(2.0**112, "float"))
    scaled = f.op(f"bitcast {floats} {f.op(f'fmul {floats} {shifted}, {scale}')} to {words}")
    special = f.op(f"icmp uge {words} {body}, {same(lanes, 0x7C00)}")
    infinite = f.op(f"or {words} {scaled}, {same(lanes, 0x7F800000)}")
    value = f.op(f"select {vector(lanes, 'i1')} {special}, {words} {infinite}, {words} {scaled}")
    sign = f.op(f"shl {words} {f.op(f'and {words} {wide}, {same(lanes, 0x8000)}')}, {same(lanes, 16)}")
    return f.op(f"bitcast {words} {f.op(f'or {words} {value}, {sign}')} to {floats}")


def _float_to_bf16(f: Function, value: str, raw: str, lanes: int) -> str:
    """The bf16 bits of floats, each in 32 bits: add half of the last place kept, less one, plus that place itself, so
    that ties go to even. `raw` has the bits of `value`.
    """
    words = vector(lanes, "i32")
    high = f.op(f"lshr {words} {raw}, {same(lanes, 16)}")
    odd = f.op(f"and {words} {high}, {same(lanes, 1)}")
    rounded = f.op(f"add {words} {f.op(f'add {words} {raw}, {odd}')}, {same(lanes, 0x7FFF)}")
    rounded = f.op(f"lshr {words} {rounded}, {same(lanes, 16)}")
    nan = f.op(f"fcmp uno {vector(lanes, 'float')} {value}, zeroinitializer")
    quiet = f.op(f"or {words} {high}, {same(lanes, 64)}")
    return f.op(f"select {vector(lanes, 'i1')} {nan}, {words} {quiet}, {words} {rounded}")


def _float_to_f16(f: Function, raw: str, lanes: int) -> str:
    """The f16 bits of floats' bits, each in 32 bits."""
    floats, words, bits = (vector(lanes, type_) for type_ in ("float", "i32", "i1"))
    sign = f.op(f"lshr {words} {f.op(f'and {words} {raw}, {same(lanes, -0x80000000)}')}, {same(lanes, 16)}")
    body = f.op(f"and {words} {raw}, {same(lanes, 0x7FFFFFFF)}")
    # Subnormal results: adding 0.5 makes the machine's own addition round at the right place.
    magnitude = f.op(f"bitcast {words} {body} to {floats}")
    half = splat_constant(lanes, "float", float_text(0.5, "float"))
    small = f.op(f"bitcast {floats} {f.op(f'fadd {floats} {magnitude}, {half}')} to {words}")
    small = f.op(f"sub {words} {small}, {same(lanes, 0x3F000000)}")
    # Normal results: change the exponent's bias and round with integers; what is too large becomes infinity by itself.
    odd = f.op(f"and {words} {f.op(f'lshr {words} {body}, {same(lanes, 13)}')}, {same(lanes, 1)}")
    large = f.op(f"add {words} {f.op(f'add {words} {body}, {odd}')}, {same(lanes, 0xFFF - (112 << 23))}")
    large = f.op(f"lshr {words} {large}, {same(lanes, 13)}")
    tiny = f.op(f"icmp ult {words} {body}, {same(lanes, 113 << 23)}")
    number = f.op(f"select {bits} {tiny}, {words} {small}, {words} {large}")
    big = f.op(f"icmp uge {words} {body}, {same(lanes, 143 << 23)}")
    number = f.op(f"select {bits} {big}, {words} {same(lanes, 0x7C00)}, {words} {number}")
    nan = f.op(f"icmp ugt {words} {body}, {same(lanes, 0x7F800000)}")
    number = f.op(f"select {bits} {nan}, {words} {same(lanes, 0x7E00)}, {words} {number}")
    return f.op(f"or {words} {number}, {sign}")
