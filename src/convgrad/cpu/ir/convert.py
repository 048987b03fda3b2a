"""Elements in memory and in registers: loads that widen, stores that round once to nearest even, masks for the rest.

In registers everything is the accumulator type, float or double. Tensors may lie at any address, so their accesses
claim no alignment; buffers of our own are aligned to a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .builder import Function, Value, float_text, vector

_STORAGE = {"f32": "float", "bf16": "i16", "f16": "i16", "f64": "double"}
_SIZES = {"float": 4, "double": 8, "i16": 2}


def size_of(type_: str) -> int:
    """Bytes of an element in a buffer."""
    return _SIZES[type_]


@dataclass(frozen=True)
class Numbers:
    """Vectors of so many lanes of an accumulator type ("float" or "double"), for one dtype of a tensor.

    `half` says that the machine converts f16 by itself; otherwise it is done with integers. `dots` says that it rounds
    to bf16 by itself, subnormal numbers to zero, as its dot products leave them. With `sum` "i16" elements of 16 bits
    are moved as they are.
    """

    dtype: str
    lanes: int
    sum: str
    half: bool
    dots: bool = False

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
    def run_align(self) -> int:
        """What the address of a run of vectors must be a multiple of, to be written past the caches."""
        return self.bytes * self._together

    @property
    def _together(self) -> int:
        """How many vectors of a run are written at a time."""
        return 2 if self.storage == "i16" else 1

    def zero(self) -> str:
        """A vector of zeros."""
        return "zeroinitializer"

    # Whole and partial vectors of a tensor.

    def mask(self, f: Function, count: Value) -> str:
        """A mask of the first `count` lanes."""
        return self._beside(f, "slt", count)

    def window(self, f: Function, low: Value, high: Value) -> str | None:
        """A mask of the lanes from `low` up to `high`, which may lie anywhere; None for all of them."""
        if isinstance(low, int) and isinstance(high, int):
            there = [low <= i < high for i in range(self.lanes)]
            return None if all(there) else "<" + ", ".join(f"i1 {str(b).lower()}" for b in there) + ">"
        above, below = self._beside(f, "sge", low), self._beside(f, "slt", high)
        return f.op(f"and {vector(self.lanes, 'i1')} {above}, {below}")

    def _beside(self, f: Function, relation: str, end: Value) -> str:
        """A mask of the lanes on one side of an end, which may lie anywhere."""
        kind = "i64"
        if self.lanes > 16:  # many vectors, if lanes were counted in so many bits
            kind, end = "i16", f.op(f"trunc i64 {f.min(f.max(end, 0), self.lanes)} to i16")
        steps = "<" + ", ".join(f"{kind} {i}" for i in range(self.lanes)) + ">"
        return f.op(f"icmp {relation} {vector(self.lanes, kind)} {steps}, {splat(f, self.lanes, kind, end)}")

    def marked(self, f: Function, table: str) -> str:
        """A mask of the lanes whose number in a table is not zero."""
        numbers = vector(self.lanes, "i64")
        return f.op(f"icmp ne {numbers} {f.load(table, numbers, 8)}, zeroinitializer")

    def load(self, f: Function, pointer: str, mask: str | None = None) -> str:
        """A vector of the tensor, widened. Lanes outside the mask are zeros, and their memory is not touched."""
        kind = vector(self.lanes, self.storage)
        if mask is None:
            raw = f.load(pointer, kind, 1)
        else:
            name = f"llvm.masked.load.{_mangled(self.lanes, self.storage)}.p0"
            bits = vector(self.lanes, "i1")
            f.module.declarations.add(f"declare {kind} @{name}(ptr, i32, {bits}, {kind})")
            raw = f.op(f"call {kind} @{name}(ptr {pointer}, i32 1, {bits} {mask}, {kind} zeroinitializer)")
        return self.widen(f, raw, self.lanes)

    def store(self, f: Function, value: str, pointer: str, mask: str | None = None, *, stream: bool = False) -> None:
        """Round a vector and write it to the tensor; lanes outside the mask are not touched.

        To stream, past the caches, whole vectors must lie at multiples of their size.
        """
        kind = vector(self.lanes, self.storage)
        raw = self._narrow(f, value, self.lanes)
        if mask is None:
            if stream:
                f.stream(raw, pointer, kind, self.bytes)
            else:
                f.store(raw, pointer, kind, 1)
            return
        name = f"llvm.masked.store.{_mangled(self.lanes, self.storage)}.p0"
        bits = vector(self.lanes, "i1")
        f.module.declarations.add(f"declare void @{name}({kind}, ptr, i32, {bits})")
        f.do(f"call void @{name}({kind} {raw}, ptr {pointer}, i32 1, {bits} {mask})")

    def store_run(self, f: Function, values: Sequence[str], pointer: str, *, stream: bool = False) -> None:
        """Round vectors and write them one after another. To stream, they must lie at a multiple of `run_align`.

        Narrow elements are written two vectors at a time: past the caches only whole lines are quick.
        """
        for v in range(0, len(values), self._together):
            at = f.at(pointer, v * self.lanes, self.storage)
            if self._together == 1 or v + 1 == len(values):
                self.store(f, values[v], at, stream=stream)
                continue
            raw, kind = self.narrow_two(f, values[v], values[v + 1]), vector(2 * self.lanes, self.storage)
            if stream:
                f.stream(raw, at, kind, self.run_align)
            else:
                f.store(raw, at, kind, 1)

    def load_one(self, f: Function, pointer: str) -> str:
        """One element of the tensor, widened."""
        raw = f.load(pointer, self.storage, 1)
        if self.storage == self.sum:
            return raw
        lone = f.op(f"insertelement <1 x {self.storage}> poison, {self.storage} {raw}, i32 0")
        return f.op(f"extractelement <1 x {self.sum}> {self.widen(f, lone, 1)}, i32 0")

    def store_one(self, f: Function, value: str, pointer: str) -> None:
        """Round one element and write it."""
        if self.storage != self.sum:
            lone = f.op(f"insertelement <1 x {self.sum}> poison, {self.sum} {value}, i32 0")
            value = f.op(f"extractelement <1 x {self.storage}> {self._narrow(f, lone, 1)}, i32 0")
        f.store(value, pointer, self.storage, 1)

    # Conversions.

    def narrow_two(self, f: Function, low: str, high: str) -> str:
        """Two vectors of accumulators rounded to one of elements."""
        if self.dtype == "bf16" and self.dots and self.lanes in (8, 16):
            name, rounded = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * self.lanes}", vector(2 * self.lanes, "bfloat")
            f.module.declarations.add(f"declare {rounded} @{name}({self.vector}, {self.vector})")
            both = f.op(f"call {rounded} @{name}({self.vector} {high}, {self.vector} {low})")
            return f.op(f"bitcast {rounded} {both} to {vector(2 * self.lanes, 'i16')}")
        kind = vector(self.lanes, self.storage)
        a, b = (self._narrow(f, value, self.lanes) for value in (low, high))
        return shuffle(f, kind, a, b, list(range(2 * self.lanes)))

    def widen(self, f: Function, raw: str, lanes: int) -> str:
        """Elements as they lie in memory, made accumulators."""
        if self.storage == self.sum:
            return raw
        floats, words = vector(lanes, "float"), vector(lanes, "i32")
        if self.dtype == "f16" and self.half:
            halves = f.op(f"bitcast {vector(lanes, 'i16')} {raw} to {vector(lanes, 'half')}")
            return f.op(f"fpext {vector(lanes, 'half')} {halves} to {floats}")
        wide = f.op(f"zext {vector(lanes, 'i16')} {raw} to {words}")
        if self.dtype == "bf16":
            return f.op(f"bitcast {words} {f.op(f'shl {words} {wide}, {same(lanes, 16)}')} to {floats}")
        # Shift exponent and mantissa into place and rescale by 2**112, which is exact and mends subnormals too.
        body = f.op(f"and {words} {wide}, {same(lanes, 0x7FFF)}")
        moved = f.op(f"bitcast {words} {f.op(f'shl {words} {body}, {same(lanes, 13)}')} to {floats}")
        scale = splat_constant(lanes, "float", float_text(2.0**112, "float"))
        scaled = f.op(f"bitcast {floats} {f.op(f'fmul {floats} {moved}, {scale}')} to {words}")
        special = f.op(f"icmp uge {words} {body}, {same(lanes, 0x7C00)}")
        infinite = f.op(f"or {words} {scaled}, {same(lanes, 0x7F800000)}")
        value = f.op(f"select {vector(lanes, 'i1')} {special}, {words} {infinite}, {words} {scaled}")
        sign = f.op(f"shl {words} {f.op(f'and {words} {wide}, {same(lanes, 0x8000)}')}, {same(lanes, 16)}")
        return f.op(f"bitcast {words} {f.op(f'or {words} {value}, {sign}')} to {floats}")

    def _narrow(self, f: Function, value: str, lanes: int) -> str:
        if self.storage == self.sum:
            return value
        floats, words, bits = vector(lanes, "float"), vector(lanes, "i32"), vector(lanes, "i1")
        shorts = vector(lanes, "i16")
        if self.dtype == "f16" and self.half:
            halves = f.op(f"fptrunc {floats} {value} to {vector(lanes, 'half')}")
            return f.op(f"bitcast {vector(lanes, 'half')} {halves} to {shorts}")
        if self.dtype == "bf16" and self.dots and lanes in (8, 16):
            name, rounded = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}", vector(lanes, "bfloat")
            f.module.declarations.add(f"declare {rounded} @{name}({floats})")
            return f.op(f"bitcast {rounded} {f.op(f'call {rounded} @{name}({floats} {value})')} to {shorts}")
        raw = f.op(f"bitcast {floats} {value} to {words}")
        if self.dtype == "bf16":
            # Half of the last place kept, less one, plus that place itself: ties go to even.
            high = f.op(f"lshr {words} {raw}, {same(lanes, 16)}")
            odd = f.op(f"and {words} {high}, {same(lanes, 1)}")
            rounded = f.op(f"add {words} {f.op(f'add {words} {raw}, {odd}')}, {same(lanes, 0x7FFF)}")
            rounded = f.op(f"lshr {words} {rounded}, {same(lanes, 16)}")
            nan = f.op(f"fcmp uno {floats} {value}, zeroinitializer")
            quiet = f.op(f"or {words} {high}, {same(lanes, 64)}")
            chosen = f.op(f"select {bits} {nan}, {words} {quiet}, {words} {rounded}")
            return f.op(f"trunc {words} {chosen} to {shorts}")
        sign = f.op(f"lshr {words} {f.op(f'and {words} {raw}, {same(lanes, -0x80000000)}')}, {same(lanes, 16)}")
        body = f.op(f"and {words} {raw}, {same(lanes, 0x7FFFFFFF)}")
        # Subnormal results: adding 0.5 makes the float adder round at the right place.
        magnitude = f.op(f"bitcast {words} {body} to {floats}")
        half = splat_constant(lanes, "float", float_text(0.5, "float"))
        small = f.op(f"bitcast {floats} {f.op(f'fadd {floats} {magnitude}, {half}')} to {words}")
        small = f.op(f"sub {words} {small}, {same(lanes, 0x3F000000)}")
        # Normal results: rebias the exponent and round with integers; what overflows becomes infinity by itself.
        odd = f.op(f"and {words} {f.op(f'lshr {words} {body}, {same(lanes, 13)}')}, {same(lanes, 1)}")
        large = f.op(f"add {words} {f.op(f'add {words} {body}, {odd}')}, {same(lanes, 0xFFF - (112 << 23))}")
        large = f.op(f"lshr {words} {large}, {same(lanes, 13)}")
        tiny = f.op(f"icmp ult {words} {body}, {same(lanes, 113 << 23)}")
        number = f.op(f"select {bits} {tiny}, {words} {small}, {words} {large}")
        big = f.op(f"icmp uge {words} {body}, {same(lanes, 143 << 23)}")
        number = f.op(f"select {bits} {big}, {words} {same(lanes, 0x7C00)}, {words} {number}")
        nan = f.op(f"icmp ugt {words} {body}, {same(lanes, 0x7F800000)}")
        number = f.op(f"select {bits} {nan}, {words} {same(lanes, 0x7E00)}, {words} {number}")
        return f.op(f"trunc {words} {f.op(f'or {words} {number}, {sign}')} to {shorts}")


def same(lanes: int, value: int) -> str:
    """A constant vector of one i32."""
    return "<" + ", ".join([f"i32 {value}"] * lanes) + ">"


def splat_constant(lanes: int, type_: str, value: str) -> str:
    """A constant vector of one value."""
    return "<" + ", ".join([f"{type_} {value}"] * lanes) + ">"


def splat(f: Function, lanes: int, type_: str, value: Value) -> str:
    """A vector with one value in every lane."""
    if isinstance(value, int):
        return splat_constant(lanes, type_, str(value))
    kind = vector(lanes, type_)
    first = f.op(f"insertelement {kind} poison, {type_} {value}, i32 0")
    return f.op(f"shufflevector {kind} {first}, {kind} poison, <{lanes} x i32> zeroinitializer")


def fma(f: Function, a: str, b: str, c: str, lanes: int, type_: str) -> str:
    """a * b + c, with one rounding where the machine has it."""
    kind, name = vector(lanes, type_), f"llvm.fmuladd.{_mangled(lanes, type_)}"
    f.module.declarations.add(f"declare {kind} @{name}({kind}, {kind}, {kind})")
    return f.op(f"call {kind} @{name}({kind} {a}, {kind} {b}, {kind} {c})")


def any_lane(f: Function, lanes: int, bits: str) -> str:
    """Whether one bit of a vector is set."""
    kind, name = vector(lanes, "i1"), f"llvm.vector.reduce.or.v{lanes}i1"
    f.module.declarations.add(f"declare i1 @{name}({kind})")
    return f.op(f"call i1 @{name}({kind} {bits})")


def transpose(f: Function, rows: list[str], lanes: int, type_: str) -> list[str]:
    """Vectors of so many lanes, turned: for each element of a row a vector with that of each row.

    A row has as many elements as there are vectors, a power of two. With more lanes a vector holds several rows, one
    after another; `row_order` says which.
    """
    kind, many = vector(lanes, type_), len(rows)
    size = piece(many, type_)
    # First within pieces; then groups of vectors, whose blocks have the same elements, exchange pieces two by two.
    groups = [[_interleaved(f, rows[i : i + size], lanes, type_)] for i in range(0, many, size)]
    part = many
    while len(groups) > 1:
        halves = [[i for i in range(2 * lanes) if i % part // (part // 2) == half] for half in range(2)]
        groups = [
            [[shuffle(f, kind, *two, order) for two in zip(*both, strict=True)] for both in pairs for order in halves]
            for pairs in (list(zip(a, b, strict=True)) for a, b in zip(groups[::2], groups[1::2], strict=True))
        ]
        part //= 2
    return [turned for block in groups[0] for turned in block]


def row_order(many: int, parts: int, type_: str) -> list[list[int]]:
    """Which rows the vectors for `transpose` hold, if there are so many vectors with so many rows each."""
    size = piece(many, type_)
    return [[(i // size * parts + part) * size + i % size for part in range(parts)] for i in range(many)]


def piece(lanes: int, type_: str) -> int:
    """Elements of a row that are turned together: those of 16 bytes, within which shuffles are quick."""
    return min(16 // size_of(type_), lanes)


def turn_pieces(f: Function, rows: list[str], type_: str) -> list[str]:
    """Pieces of rows, turned: for each element of a piece a vector with that of each row. Rows are a power of two.

    Of a square in memory that is quicker than `transpose`: pieces find their places while they are read, and half of
    the shuffles are left.
    """
    lanes = len(rows)
    size = piece(lanes, type_)
    # Side by side come the pieces of rows that are `size` apart.
    columns = [rows[i::size] for i in range(size)]
    width = size
    while width < lanes:
        kind, order = vector(width, type_), list(range(2 * width))
        columns = [[shuffle(f, kind, a, b, order) for a, b in zip(c[::2], c[1::2], strict=True)] for c in columns]
        width *= 2
    return _interleaved(f, [column[0] for column in columns], lanes, type_)


def _interleaved(f: Function, rows: list[str], lanes: int, type_: str) -> list[str]:
    """Rows turned within pieces of as many elements: interleaving those of each half with those of the other, as often
    as halves can be halved.
    """
    kind, size = vector(lanes, type_), len(rows)
    low = [at + i // 2 + lanes * (i % 2) for at in range(0, lanes, size) for i in range(size)]
    high = [i + size // 2 for i in low]
    for _ in range(size.bit_length() - 1):
        pairs = list(zip(rows[: size // 2], rows[size // 2 :], strict=True))
        rows = [shuffle(f, kind, a, b, order) for a, b in pairs for order in (low, high)]
    return rows


def shuffle(f: Function, kind: str, a: str, b: str, order: list[int]) -> str:
    """Lanes of two vectors in a given order."""
    picks = ", ".join(f"i32 {i}" for i in order)
    return f.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(order)} x i32> <{picks}>")


def interleave(f: Function, kind: str, lanes: int, a: str, b: str) -> str:
    """Lanes of two vectors by turns, in one of twice the length."""
    return shuffle(f, kind, a, b, [i // 2 + lanes * (i % 2) for i in range(2 * lanes)])


def _mangled(lanes: int, type_: str) -> str:
    return f"v{lanes}" + {"float": "f32", "double": "f64"}.get(type_, type_)
