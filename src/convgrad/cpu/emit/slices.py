"""Slices: parts of a sum that threads compute alone. They are added in order, so that the bits are always the same."""

from __future__ import annotations

from ..ir.builder import Function, Value
from ..ir.convert import Elements
from ..ir.vectors import size_of


def add_slices(f: Function, n: Elements, sums: str, index: Value, slices: int, step: int) -> None:
    """Add the other slices to a vector of the first, `index` elements into it; slices are `step` elements apart."""
    total = f.load(f.at(sums, index, n.sum), n.vector, size_of(n.sum))
    for i in range(1, slices):
        more = f.load(f.at(sums, f.add(index, i * step), n.sum), n.vector, size_of(n.sum))
        total = f.op(f"fadd {n.vector} {total}, {more}")
    f.store(total, f.at(sums, index, n.sum), n.vector, size_of(n.sum))
