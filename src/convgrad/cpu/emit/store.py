"""Stores of results: rounded, masked, streamed past the caches, or added to what the tensor holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.builder import Function, Value
from ..ir.convert import Elements


@dataclass(frozen=True)
class Results:
    """How results are written: as which elements, added to what is there if they `accumulate`, past the caches if they
    `stream`. They never do both.
    """

    elements: Elements
    accumulate: bool = False
    stream: bool = False

    def store(self, f: Function, value: str, place: str, mask: str | None = None) -> None:
        """Write a vector, through the caches."""
        if self.accumulate:
            value = self._added(f, value, place, mask)
        self.elements.store(f, value, place, mask)

    def store_one(self, f: Function, value: str, place: str) -> None:
        """Write one result."""
        n = self.elements
        if self.accumulate:
            value = f.op(f"fadd {n.sum} {value}, {n.load_one(f, place)}")
        n.store_one(f, value, place)

    def store_row(self, f: Function, values: Sequence[str], place: str, mask: str | None = None) -> None:
        """Write contiguous vectors, of which the last one has a mask."""
        n = self.elements
        if self.accumulate:
            values = [
                self._added(f, value, f.at(place, v * n.lanes, n.storage), mask if v == len(values) - 1 else None)
                for v, value in enumerate(values)
            ]
        whole = values if mask is None else values[:-1]
        n.store_contiguous(f, whole, place)
        if mask is not None:
            n.store(f, values[-1], f.at(place, len(whole) * n.lanes, n.storage), mask)

    def store_streamed(self, f: Function, value: str, place: str, left: Value) -> None:
        """Write a vector past the caches if it is whole and aligned, else the lanes that are left of it as usual."""
        n = self.elements
        branch = f.either(f.both(f.test("sge", left, n.lanes), f.aligned(place, n.bytes)))
        n.store(f, value, place, stream=True)
        f.otherwise(branch)
        n.store(f, value, place, n.mask(f, left))
        f.join(branch)

    def store_rows(self, f: Function, values: Sequence[Sequence[str]], places: Sequence[str], left: Value) -> None:
        """Write the rows of a tile, each of contiguous vectors that have `left` lanes in all.

        They are streamed if all rows are whole and aligned.
        """
        n, vectors = self.elements, range(len(values[0]))
        whole = f.test("eq", left, len(vectors) * n.lanes)
        for place in places if self.stream else ():
            whole = f.both(whole, f.aligned(place, n.stream_align))
        branch = f.either(whole)
        self._store_rows(f, values, places, [None] * len(vectors))
        f.otherwise(branch)
        self._store_rows(f, values, places, [n.mask(f, f.sub(left, v * n.lanes)) for v in vectors])
        f.join(branch)

    def _store_rows(
        self, f: Function, values: Sequence[Sequence[str]], places: Sequence[str], masks: Sequence[str | None]
    ) -> None:
        """Write rows with a mask for each vector, or with none for all."""
        n, vectors = self.elements, range(len(masks))
        at = [[f.at(place, v * n.lanes, n.storage) for v in vectors] for place in places]
        if self.accumulate:
            # All is read before any is written: a tile may have the same row twice.
            values = [
                [self._added(f, row[v], addresses[v], masks[v]) for v in vectors]
                for row, addresses in zip(values, at, strict=True)
            ]
        for row, addresses in zip(values, at, strict=True):
            if masks[0] is None:
                n.store_contiguous(f, row, addresses[0], stream=self.stream)
                continue
            for v in vectors:
                n.store(f, row[v], addresses[v], masks[v])

    def _added(self, f: Function, value: str, place: str, mask: str | None) -> str:
        """A vector plus what is there."""
        n = self.elements
        return f.op(f"fadd {n.vector} {value}, {n.load(f, place, mask)}")
