"""A tile of y or x: sums over taps and channels in, in tile registers."""

from __future__ import annotations

from ..ir.builder import Function, Module
from ..plan.prefetch import Prefetch
from .emulation import Emulation
from .records import TileGather
from .tiles import Side, TileCode, add_products, each_sum


def tile_function(m: Module, plan: TileGather, emulated: Emulation | None, across: int) -> Function:
    """A function that sums a block of so many tiles side by side: (input, weights, sums, bias, taps, their number, what
    is prefetched, and a file of registers).
    """
    block, item = plan.tiles, plan.item
    fetched = ["p:base", "p:offsets"] if plan.prefetch else []
    file = ["p:file"] if emulated else []
    f = m.function(f"tile_{across}", ["p:left", "p:right", "p:to", "p:bias", "p:taps", "i:count", *fetched, *file])
    left, right, to, bias, taps, count, *rest = f.args
    code = TileCode(f, plan.split.dtype, emulated, rest[-1] if emulated else "")
    fetch = Lines(f, plan.prefetch, plan.fetched_lines, *rest[:2]) if plan.prefetch else None
    row = plan.block * item
    pairs = plan.sums.channels // 2

    def start(register: int, _: int, j: int) -> None:
        if plan.layer.bias is None:
            code.clear(register)
        else:
            code.load(register, f.at(bias, j * plan.lanes, plan.sum), 0)

    each_sum(block, across, start)
    with f.loop(0, count) as t:
        tap = f.at(taps, f.mul(t, 2), "i64")
        number, entry = (f.load(f.at(tap, i, "i64"), "i64", 8) for i in range(2))
        left_tap = f.at(left, entry, "i16")
        right_tap = f.at(right, f.mul(number, pairs * plan.lanes), plan.sum)
        with f.loop(0, pairs // block.pairs) as step:
            left_at = f.at(left_tap, f.mul(step, 2 * block.pairs), "i16")
            right_at = f.at(right_tap, f.mul(step, block.pairs * plan.lanes), plan.sum)
            if fetch is not None:
                fetch.step()
            add_products(code, block, across, *_factors(f, plan, (left_at, right_at)), plan.split.products)

    def keep(register: int, i: int, j: int) -> None:
        code.store(register, f.at(to, i * block.rows * plan.block + j * plan.lanes, plan.sum), row)

    each_sum(block, across, keep)
    return f


def _factors(f: Function, plan: TileGather, first: tuple[str, str]) -> tuple[Side, Side]:
    """The inputs and the weights of a step, given where the first ones are."""
    (left, right), pieces = first, plan.split.pieces
    row, piece = 2 * plan.positions.steps[-1], 2 * plan.positions.pitch // pieces
    right_piece = plan.panel // pieces
    return (
        Side(lambda i, n: f.at(left, i * plan.tiles.rows * row + n * piece, "i8"), row),
        Side(lambda j, n: f.at(right, j * plan.panel + n * right_piece, plan.sum), plan.lanes * plan.item),
    )


class Lines:
    """Prefetches one portion of lines, so many at each step."""

    def __init__(self, f: Function, prefetch: Prefetch, each: int, base: str, offsets: str) -> None:
        self.f, self.prefetch, self.each, self.base, self.offsets = f, prefetch, each, base, offsets
        self.position = f.variable("i64", 0)

    def step(self) -> None:
        """Prefetch the next lines; at the end the last one again."""
        f, last = self.f, self.prefetch.lines_per_call - 1
        index = f.get(self.position, "i64")
        f.set(self.position, "i64", f.add(index, self.each))
        for i in range(self.each):
            offset = f.load(f.at(self.offsets, f.min(f.add(index, i), last), "i64"), "i64", 8)
            f.prefetch(f.at(self.base, offset, "i8"))
