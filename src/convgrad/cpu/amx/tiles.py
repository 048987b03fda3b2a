"""Tile instructions: how registers are shared out among sums and factors, and the code that uses them.

A block is `down` by `across` tiles of sums, which stay in registers while products are added. The tiles on the left
hold rows of one factor, those on the right pairs of rows of the other: of the side of which there are fewer tiles all
are held, the others take turns in the registers that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...spec.problem import Ints
from ..ir.builder import Function, Module, Value
from .emulation import FILE, Emulation

REGISTERS = 8
ROWS, COLUMNS, PAIRS = 16, 16, 16  # of a tile at most: rows, sums in a row, pairs of factors in a row
TILE = 1024  # bytes of a tile
STEP = 2 * PAIRS  # factors that a step multiplies at most

INSTRUCTIONS = {"bf16": "tdpbf16ps", "f16": "tdpfp16ps"}


@dataclass(frozen=True)
class Block:
    """Tiles of sums that are in registers at once."""

    rows: int  # of a tile
    pairs: int  # of factors that a step multiplies
    down: int  # tiles below each other
    across: int  # tiles side by side

    @property
    def height(self) -> int:
        """Rows of all tiles."""
        return self.rows * self.down

    @property
    def width(self) -> int:
        """Sums in a row of all tiles."""
        return COLUMNS * self.across

    @property
    def left(self) -> Ints:
        """Registers of the factor in the rows."""
        first, spare = self.down * self.across, REGISTERS - self.down * self.across
        held = self.down if self.across > self.down else min(self.down, spare - self.across)
        return tuple(range(first, first + held))

    @property
    def right(self) -> Ints:
        """Registers of the factor in the columns."""
        first = self.down * self.across + len(self.left)
        return tuple(range(first, min(REGISTERS, first + self.across)))

    def configuration(self) -> Ints:
        """What the processor is told about its registers: 64 bytes, as words of 64 bits."""
        sums = [(self.rows, 4 * COLUMNS)] * (self.down * self.across)
        factors = [(self.rows, 4 * self.pairs)] * len(self.left) + [(self.pairs, 4 * COLUMNS)] * len(self.right)
        return configuration([*sums, *factors])


def configuration(registers: list[tuple[int, int]]) -> Ints:
    """The 64 bytes that describe (rows, bytes in a row) of each register, as words of 64 bits: of the first palette."""
    content = bytearray(64)
    content[0] = 1
    for i, (rows, width) in enumerate(registers):
        content[16 + 2 * i : 18 + 2 * i] = width.to_bytes(2, "little")
        content[48 + i] = rows
    return tuple(int.from_bytes(content[i : i + 8], "little") for i in range(0, 64, 8))


class TileCode:
    """Writes tile instructions into a function, or calls of functions that do the same with a file in memory."""

    def __init__(self, f: Function, dtype: str, emulation: Emulation | None, file: str) -> None:
        self.f, self.emulation, self.file = f, emulation, file
        self.instruction = INSTRUCTIONS[dtype]

    def begin(self, configuration: str) -> None:
        """Configure the registers of this thread."""
        self._do("ldtilecfg", f"ptr {configuration}", configuration)

    def end(self) -> None:
        """Give the registers back, so that the system need not save them any more."""
        self._do("tilerelease", "")

    def clear(self, register: int) -> None:
        """Fill a tile with zeros."""
        self._do("tilezero", f"i8 {register}", register)

    def load(self, register: int, place: str, step: Value) -> None:
        """Load the rows of a tile, so many bytes apart."""
        self._do("tileloadd64", f"i8 {register}, ptr {place}, i64 {step}", register, place, step)

    def store(self, register: int, place: str, step: Value) -> None:
        """Store them."""
        self._do("tilestored64", f"i8 {register}, ptr {place}, i64 {step}", register, place, step)

    def fetch(self, place: str, side: Side, rows: int) -> None:
        """Prefetch the rows of the tile behind one that a later step loads."""
        for row in range(rows):
            self.f.prefetch(self.f.at(place, self.f.add(self.f.mul(side.step, row), side.ahead), "i8"), near=True)

    def multiply(self, sums: int, left: int, right: int) -> None:
        """Add the products of two tiles to a tile of sums."""
        self._do(self.instruction, f"i8 {sums}, i8 {left}, i8 {right}", sums, left, right)

    def _do(self, name: str, text: str, *operands: Value) -> None:
        if self.emulation is not None:
            self.f.call(self.emulation.functions[name], self.file, *operands)
            return
        kinds = ", ".join(part.split()[0] for part in text.split(", ") if part)
        self.f.module.declarations.add(f"declare void @llvm.x86.{name}({kinds})")
        self.f.do(f"call void @llvm.x86.{name}({text})")


Place = Callable[[int, int], str]
"""The address of a tile: below the first one or beside it, by its number, and by the number of the piece."""


class Side(NamedTuple):
    """One factor of a step: where its tiles are, bytes between their rows, and how far behind them those are that a
    later step loads, which are prefetched into the first-level cache; 0: they are not.
    """

    place: Place
    step: Value
    ahead: int = 0


Products = tuple[tuple[int, int], ...]
"""The pieces that are multiplied, of a number on the left and of one on the right, in order."""


def add_products(
    code: TileCode, block: Block, across: int, left: Side, right: Side, products: Products = ((0, 0),)
) -> None:
    """Add the products of one step to the sums of a block, of so many tiles side by side."""

    def load(register: int, side: Side, factor: Factor, rows: int) -> None:
        place = side.place(*factor)
        code.load(register, place, side.step)
        if side.ahead:
            code.fetch(place, side, rows)

    for sums, one, other, loads in each_product(block, across, products):
        registers = block.left[one[0] % len(block.left)], block.right[other[0] % len(block.right)]
        if loads[0]:
            load(registers[0], left, one, block.rows)
        if loads[1]:
            load(registers[1], right, other, block.pairs)
        code.multiply(sums, *registers)


Factor = tuple[int, int]
"""A tile on one side, and the piece of its numbers."""


def each_product(
    block: Block, across: int, products: Products
) -> Iterator[tuple[int, Factor, Factor, tuple[bool, bool]]]:
    """The products of one step: the tile of sums, both factors, and which of these are not in their registers yet.

    Loads are not gathered at the beginning: products are taken as soon as their factors are there.
    """
    held: list[dict[int, Factor]] = [{}, {}]
    for pieces in products:
        by_rows = list(product(range(block.down), range(across)))
        for i, j in by_rows if block.across <= block.down else sorted(by_rows, key=lambda place: place[::-1]):
            factors = (i, pieces[0]), (j, pieces[1])
            registers = i % len(block.left), j % len(block.right)
            new = [kept.get(r) != factor for kept, r, factor in zip(held, registers, factors, strict=True)]
            for kept, r, factor in zip(held, registers, factors, strict=True):
                kept[r] = factor
            yield i * block.across + j, *factors, (new[0], new[1])


def loads(block: Block, products: Products) -> tuple[int, int]:
    """Tiles of each side that a step loads."""
    found = [new for *_, new in each_product(block, block.across, products)]
    return sum(new[0] for new in found), sum(new[1] for new in found)


def each_sum(block: Block, across: int, do: Callable[[int, int, int], None]) -> None:
    """Call `do` with the register of each tile of sums, and where it is: how many tiles down, how many across."""
    for i in range(block.down):
        for j in range(across):
            do(i * block.across + j, i, j)


def emulation(m: Module, dtype: str, wanted: bool) -> Emulation | None:
    """The functions that stand for tile instructions, if they are wanted."""
    return Emulation(m, dtype, INSTRUCTIONS[dtype]) if wanted else None


__all__ = [
    "COLUMNS", "FILE", "PAIRS", "ROWS", "STEP", "Block", "Side", "TileCode", "add_products", "each_sum", "emulation",
]  # fmt: skip
