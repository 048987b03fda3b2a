"""Functions that do what tile instructions do, with a file of registers in memory: so plans for tiles run anywhere.

The file has eight tiles of 1024 bytes, 64 bytes each row, and then the 64 bytes of the configuration. Rows and bytes
that a register does not have are zeros, as in hardware. Instead of a fault, a multiplication of tiles that do not match
makes NaN of all sums.
"""

from __future__ import annotations

from ..ir.builder import Function, Module, Value

FILE = 8 * 1024 + 64  # bytes of the file of registers
ROW, TILE = 64, 1024
CONFIGURATION = 8 * TILE
MODE = 0x9FC0  # of arithmetic: to nearest, what is subnormal is zero, no exceptions

WORDS, FLOATS, HALVES = "<16 x i32>", "<16 x float>", "<16 x half>"


class Emulation:
    """The functions, by the names of the instructions. All take the address of the file first."""

    def __init__(self, m: Module, dtype: str, multiply: str) -> None:
        self.module, self.dtype = m, dtype
        clear = self._clear()
        self.functions = {
            "ldtilecfg": self._configure(),
            "tilerelease": self._release(),
            "tilezero": clear,
            "tileloadd64": self._load(clear),
            "tilestored64": self._store(),
            multiply: self._multiply(),
        }

    def _configure(self) -> Function:
        f = self.module.function("emulated_begin", ["p:file", "p:from"])
        file, source = f.args
        f.store(f.load(source, WORDS, 1), f.at(file, CONFIGURATION, "i8"), WORDS, 1)
        return f

    def _release(self) -> Function:
        f = self.module.function("emulated_end", ["p:file"])
        f.store("zeroinitializer", f.at(f.args[0], CONFIGURATION, "i8"), WORDS, 1)
        return f

    def _clear(self) -> Function:
        f = self.module.function("emulated_clear", ["p:file", "i:tile"])
        file, tile = f.args
        with f.loop(0, TILE // ROW) as row:
            f.store("zeroinitializer", _row(f, file, tile, row), WORDS, 1)
        return f

    def _load(self, clear: Function) -> Function:
        f = self.module.function("emulated_load", ["p:file", "i:tile", "p:from", "i:step"])
        file, tile, source, step = f.args
        f.call(clear, file, tile)
        rows, words = _shape(f, file, tile)
        name = "llvm.masked.load.v16i32.p0"
        self.module.declarations.add(f"declare {WORDS} @{name}(ptr, i32, <16 x i1>, {WORDS})")
        with f.loop(0, rows) as row:
            place = f.at(source, f.mul(row, step), "i8")
            mask = f"<16 x i1> {_mask(f, words)}"
            value = f.op(f"call {WORDS} @{name}(ptr {place}, i32 1, {mask}, {WORDS} zeroinitializer)")
            f.store(value, _row(f, file, tile, row), WORDS, 1)
        return f

    def _store(self) -> Function:
        f = self.module.function("emulated_store", ["p:file", "i:tile", "p:to", "i:step"])
        file, tile, to, step = f.args
        rows, words = _shape(f, file, tile)
        name = "llvm.masked.store.v16i32.p0"
        self.module.declarations.add(f"declare void @{name}({WORDS}, ptr, i32, <16 x i1>)")
        with f.loop(0, rows) as row:
            value = f.load(_row(f, file, tile, row), WORDS, 1)
            place = f.at(to, f.mul(row, step), "i8")
            f.do(f"call void @{name}({WORDS} {value}, ptr {place}, i32 1, <16 x i1> {_mask(f, words)})")
        return f

    def _multiply(self) -> Function:
        """For each row of sums: sums of the even products and of the odd ones, both added, then added to the row."""
        f = self.module.function("emulated_multiply", ["p:file", "i:sums", "i:left", "i:right"])
        file, sums, left, right = f.args
        mode = _Mode(f)
        mode.set(MODE)
        (rows, words), (left_rows, pairs), (right_rows, right_words) = (
            _shape(f, file, tile) for tile in (sums, left, right)
        )
        fits = f.both(f.test("eq", rows, left_rows), f.test("eq", words, right_words))
        fits = f.both(fits, f.test("eq", pairs, right_rows))
        branch = f.either(f.both(fits, f.test("ne", rows, 0)))
        with f.loop(0, rows) as row:
            even, odd = f.variable(FLOATS, "zeroinitializer"), f.variable(FLOATS, "zeroinitializer")
            with f.loop(0, pairs) as k:
                one = f.load(f.at(_row(f, file, left, row), k, "i32"), "i32", 1)
                first = f.op(f"insertelement {WORDS} poison, i32 {one}, i32 0")
                pair = f.op(f"shufflevector {WORDS} {first}, {WORDS} poison, {WORDS} zeroinitializer")
                many = f.load(_row(f, file, right, k), WORDS, 1)
                for total, a, b in zip((even, odd), self._two(f, pair), self._two(f, many), strict=True):
                    f.set(total, FLOATS, self._fma(f, a, b, f.get(total, FLOATS)))
            both = f.op(f"fadd {FLOATS} {f.get(even, FLOATS)}, {f.get(odd, FLOATS)}")
            place = _row(f, file, sums, row)
            f.store(f.op(f"fadd {FLOATS} {f.load(place, FLOATS, 1)}, {both}"), place, FLOATS, 1)
        f.otherwise(branch)
        with f.loop(0, TILE // ROW) as row:
            f.store("<" + ", ".join(["i32 -1"] * 16) + ">", _row(f, file, sums, row), WORDS, 1)
        f.join(branch)
        mode.put_back()
        return f

    def _two(self, f: Function, pairs: str) -> list[str]:
        """The even and the odd numbers of pairs, as f32."""
        sixteen = "<" + ", ".join(["i32 16"] * 16) + ">"
        if self.dtype == "bf16":
            upper = "<" + ", ".join(["i32 -65536"] * 16) + ">"
            both = [f.op(f"shl {WORDS} {pairs}, {sixteen}"), f.op(f"and {WORDS} {pairs}, {upper}")]
            return [f.op(f"bitcast {WORDS} {number} to {FLOATS}") for number in both]
        found = []
        for bits in (pairs, f.op(f"lshr {WORDS} {pairs}, {sixteen}")):
            shorts = f.op(f"trunc {WORDS} {bits} to <16 x i16>")
            found.append(f.op(f"fpext {HALVES} {f.op(f'bitcast <16 x i16> {shorts} to {HALVES}')} to {FLOATS}"))
        return found

    def _fma(self, f: Function, a: str, b: str, c: str) -> str:
        name = "llvm.fma.v16f32"
        self.module.declarations.add(f"declare {FLOATS} @{name}({FLOATS}, {FLOATS}, {FLOATS})")
        return f.op(f"call {FLOATS} @{name}({FLOATS} {a}, {FLOATS} {b}, {FLOATS} {c})")


class _Mode:
    """The mode of floating-point arithmetic, changed for a while."""

    def __init__(self, f: Function) -> None:
        self.f = f
        f.module.declarations |= {"declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)"}
        self.before, self.now = f.variable("i32", 0), f.variable("i32", 0)
        f.do(f"call void @llvm.x86.sse.stmxcsr(ptr {self.before})")

    def set(self, mode: int) -> None:
        self.f.set(self.now, "i32", mode)
        self.f.do(f"call void @llvm.x86.sse.ldmxcsr(ptr {self.now})")

    def put_back(self) -> None:
        self.f.do(f"call void @llvm.x86.sse.ldmxcsr(ptr {self.before})")


def _row(f: Function, file: str, tile: Value, row: Value) -> str:
    """Where a row of a tile is in the file."""
    return f.at(file, f.add(f.mul(tile, TILE), f.mul(row, ROW)), "i8")


def _shape(f: Function, file: str, tile: Value) -> tuple[str, str]:
    """Rows of a tile, and words of 32 bits in a row, as they are configured."""
    width = f.load(f.at(file, f.add(f.mul(tile, 2), CONFIGURATION + 16), "i8"), "i16", 1)
    rows = f.load(f.at(file, f.add(tile, CONFIGURATION + 48), "i8"), "i8", 1)
    words = f.op(f"lshr i16 {width}, 2")
    return f.op(f"zext i8 {rows} to i64"), f.op(f"zext i16 {words} to i64")


def _mask(f: Function, words: Value) -> str:
    """A mask of the first words of a row."""
    steps = "<" + ", ".join(f"i32 {i}" for i in range(16)) + ">"
    short = f.op(f"trunc i64 {words} to i32")
    first = f.op(f"insertelement {WORDS} poison, i32 {short}, i32 0")
    count = f.op(f"shufflevector {WORDS} {first}, {WORDS} poison, {WORDS} zeroinitializer")
    return f.op(f"icmp slt {WORDS} {steps}, {count}")
