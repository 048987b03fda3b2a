"""Copies of inputs that begin inside of lines of memory: tiles would read two lines for each row."""

from __future__ import annotations

from dataclasses import replace

from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.loops import each_vector
from .records import TileGather
from .tiles import STEP

UNROLL = 8  # vectors that are written out without a loop


def copy_positions(m: Module, n: Elements, plan: TileGather) -> Function:
    """A function that copies the channels of positions, as far apart as they were: (from, to, positions)."""
    f = m.function("copy_positions", ["p:from", "p:to", "i:count"])
    source, to, count = f.args
    wide = replace(n, lanes=STEP)
    with f.loop(0, count) as i:
        at = f.mul(i, plan.positions.steps[-1])
        here, there = f.at(source, at, n.storage), f.at(to, at, n.storage)

        def move(c: Value, mask: str | None, here: str = here, there: str = there) -> None:
            wide.store(f, wide.load(f, f.at(here, c, n.storage), mask), f.at(there, c, n.storage), mask)

        each_vector(f, wide, plan.layer.cin, UNROLL, move)
    return f
