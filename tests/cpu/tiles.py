"""A model of tile registers (Intel's AMX) in NumPy: what each instruction does, and the faults that hardware raises.

From Intel's description: TDPBF16PS and TDPFP16PS sum the even products and the odd products of a row apart, each by
fused multiplications and additions, then add both sums, then add that to the tile. They round to nearest, ties to even.
What is subnormal in f32 counts as zero, of inputs and of results; numbers of f16 are exact.
"""

from __future__ import annotations

import re

import numpy as np

REGISTERS, ROWS, BYTES = 8, 16, 64
SMALLEST = 2.0**-126  # of normal f32


class Fault(Exception):
    """What hardware would raise."""


class Model:
    """Tile registers. They begin without a configuration."""

    def __init__(self) -> None:
        self.configured = False
        self.shapes = [(0, 0)] * REGISTERS
        self.data = np.zeros((REGISTERS, ROWS, BYTES), np.uint8)

    def ldtilecfg(self, content: bytes) -> None:
        """Take a configuration; palette 0 is none."""
        if len(content) != BYTES:
            raise Fault("a configuration has 64 bytes")
        widths = [int.from_bytes(content[16 + 2 * i : 18 + 2 * i], "little") for i in range(16)]
        rows = list(content[48:64])
        if content[0] == 0:
            self.tilerelease()
            return
        if content[0] != 1:
            raise Fault(f"palette {content[0]}")
        if any(content[2:16]) or any(widths[REGISTERS:]) or any(rows[REGISTERS:]):
            raise Fault("a reserved byte is not zero")
        for width, height in zip(widths, rows, strict=True):
            if width > BYTES or height > ROWS or (width == 0) != (height == 0):
                raise Fault(f"a tile of {height} rows of {width} bytes")
        if content[1] >= ROWS:
            raise Fault(f"start_row {content[1]}")
        self.configured = True
        self.shapes = list(zip(rows[:REGISTERS], widths[:REGISTERS], strict=True))
        self.data[...] = 0

    def sttilecfg(self) -> bytes:
        """The configuration; zeros if there is none."""
        content = bytearray(BYTES)
        if self.configured:
            content[0] = 1
            for i, (rows, width) in enumerate(self.shapes):
                content[16 + 2 * i : 18 + 2 * i] = width.to_bytes(2, "little")
                content[48 + i] = rows
        return bytes(content)

    def tilerelease(self) -> None:
        """No configuration, and empty registers."""
        self.__init__()  # type: ignore[misc]

    def tilezero(self, tile: int) -> None:
        self._shape(tile)
        self.data[tile] = 0

    def tileloadd(self, tile: int, rows: list[bytes]) -> None:
        """Load rows, of which as many bytes are taken as the tile has."""
        height, width = self._shape(tile)
        self.data[tile] = 0
        for r in range(height):
            self.data[tile, r, :width] = np.frombuffer(rows[r][:width], np.uint8)

    def tilestored(self, tile: int) -> list[bytes]:
        height, width = self._shape(tile)
        return [self.data[tile, r, :width].tobytes() for r in range(height)]

    def tdpbf16ps(self, sums: int, left: int, right: int) -> None:
        def wide(raw: np.ndarray) -> np.ndarray:
            return _flushed((raw.astype(np.uint32) << 16).view(np.float32))

        self._multiply(sums, left, right, wide)

    def tdpfp16ps(self, sums: int, left: int, right: int) -> None:
        self._multiply(sums, left, right, lambda raw: raw.view(np.float16).astype(np.float32))

    def _shape(self, tile: int) -> tuple[int, int]:
        if not self.configured:
            raise Fault("no configuration")
        if not 0 <= tile < REGISTERS or self.shapes[tile][0] == 0:
            raise Fault(f"there is no tile {tile}")
        return self.shapes[tile]

    def check(self, sums: int, left: int, right: int) -> None:
        """Whether three tiles can be multiplied."""
        (rows, width), (left_rows, left_width), (right_rows, right_width) = map(self._shape, (sums, left, right))
        if len({sums, left, right}) < 3:
            raise Fault("a tile plays two parts")
        if width % 4 or left_width % 4 or right_width % 4:
            raise Fault("rows are not of whole numbers")
        if rows != left_rows or width != right_width or left_width != 4 * right_rows:
            raise Fault(f"tiles of shapes {self.shapes[sums]}, {self.shapes[left]}, {self.shapes[right]}")

    def _multiply(self, sums: int, left: int, right: int, wide) -> None:
        self.check(sums, left, right)
        (rows, width), (pairs, _) = self.shapes[sums], self.shapes[right]
        a = wide(self.data[left, :rows].copy().view(np.uint16)).reshape(rows, -1, 2)
        b = wide(self.data[right, :pairs].copy().view(np.uint16)).reshape(pairs, -1, 2)
        total = np.zeros((rows, BYTES // 4, 2), np.float32)
        with np.errstate(all="ignore"):
            for k in range(pairs):
                total = fma(a[:, k, None, :], b[None, k], total)
            place = self.data[sums, :rows].copy().view(np.float32)
            both = _flushed(total[..., 0] + total[..., 1])
            found = _flushed(_flushed(place) + both)
        found[:, width // 4 :] = 0
        self.data[sums] = 0
        self.data[sums, :rows] = found.view(np.uint8)


def _flushed(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers made zeros of the same sign."""
    return np.where(np.abs(values) < SMALLEST, np.copysign(np.float32(0), values), values).astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b + c in f32, rounded once, results below the normal numbers made zeros.

    The product is exact in f64. The sum is rounded to odd there: a last bit that says whether anything was lost makes
    the second rounding that of the exact sum.
    """
    product, other = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + other
    part = total - product
    lost = (product - (total - part)) + (other - part)
    bits = total.view(np.int64)
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (lost != 0)
    odd = np.where(inexact & (bits % 2 == 0), bits + toward, bits).view(np.float64)
    # Small results are rounded as if there were no smallest exponent, and then looked at.
    small = np.abs(odd) < 2.0**-60
    scaled = np.where(small, odd * 2.0**100, odd).astype(np.float32)
    normal = np.where(small, scaled * np.float32(2.0**-100), scaled).astype(np.float32)
    tiny = small & (np.abs(scaled).astype(np.float64) < SMALLEST * 2.0**100)
    return np.where(tiny, np.copysign(np.float32(0), odd), normal).astype(np.float32)


CALL = re.compile(r"call void @llvm\.x86\.(tilezero|tileloadd64|tilestored64|tdpbf16ps|tdpfp16ps)\((.*)\)")
FUNCTION = re.compile(r"^define .*?@(\w+)\(.*?^}", re.MULTILINE | re.DOTALL)


def registers_used(code: str, configuration: bytes) -> dict[str, int]:
    """Of each function of a module with tile instructions, how many it has; a `Fault` if one of them would fault."""
    found = {}
    for function in FUNCTION.finditer(code):
        calls = CALL.findall(function[0])
        model = Model()
        model.ldtilecfg(configuration)
        for name, operands in calls:
            numbers = [int(n) for n in re.findall(r"\bi8 (\d+)", operands)]
            if name.startswith("tdp"):
                model.check(*numbers)
            else:
                model._shape(*numbers)
        if calls:
            found[function[1]] = len(calls)
    return found
