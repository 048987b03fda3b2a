"""Register tiles of a gather: so many pixels times so many vectors of channels out, summed over taps and channels in.

A tile begins with the bias, or with the sums of the chunks before; adds the products of each tap of its phase; and
writes the sums to the output staging, or rounded to the tensor. Inputs are broadcast to all lanes, singly or in pairs,
in a loop over the channels in or written out without one; or each lane picks the inputs of its own group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..emit.prefetch import Fetch
from ..emit.store import Results
from ..emit.tile import Accumulators, addresses, moved
from ..ir.builder import Function, Module, Value
from ..ir.vectors import align_of
from ..plan.records import LaneGroups
from .records import Fold, Gather


class Arguments(NamedTuple):
    """What the function of a tile takes, but for what it prefetches."""

    packed: str  # the input: a packed box, or where it lies in place
    weights: str  # packed, of this block of channels and chunk
    tap_table: str  # of this phase: which tap, elements into the packed box
    taps: Value  # how many
    channels: Value  # in
    reads: str  # of each pixel: elements into the packed box
    writes: str  # of each pixel: elements into the results
    results: str  # the staging, or the tensor
    bias: str
    chunk: Value
    lanes: Value  # of this block that are channels


NAMES = [
    "p:packed", "p:weights", "p:tap_table", "i:taps", "i:channels", "p:reads", "p:writes", "p:results", "p:bias",
    "i:chunk", "i:lanes",
]  # fmt: skip
PREFETCH = ["p:base", "p:offsets"]


def tile_function(m: Module, plan: Gather, out: Results, rows: int, vectors: int) -> Function:
    """A function that computes one tile of so many pixels and vectors: see `Arguments`.

    Assumes: weights are packed [tap][step over the channels][lane] and aligned; no input is outside the packed box.
    """
    last = "_last" if vectors < plan.vectors else ""
    f = m.function(f"tile{rows}{last}", [*NAMES, *(PREFETCH if plan.prefetch else [])])
    arguments = Arguments(*f.args[: len(NAMES)])
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *f.args[len(NAMES) :])
    inputs = _inputs(f, plan, arguments, rows)
    sums = Accumulators(f, [["zeroinitializer"] * vectors for _ in range(rows)], plan.lanes, plan.sum)
    tile = _Tile(f, plan, arguments, out, inputs, sums, vectors)
    _begin(tile)
    _add_taps(tile, fetch)
    if plan.tile.fold is not None:
        _repair(m, tile, plan.tile.fold)
    _write(tile)
    return f


@dataclass(frozen=True)
class _Tile:
    """A tile while it is written."""

    f: Function
    plan: Gather
    arguments: Arguments
    out: Results
    inputs: list[str]  # where the input of each pixel begins
    sums: Accumulators
    vectors: int

    @property
    def align(self) -> int:
        """What the addresses of our own vectors are a multiple of."""
        return align_of(self.plan.lanes, self.plan.sum)

    @property
    def row_lanes(self) -> int:
        """Lanes of a row."""
        return self.vectors * self.plan.lanes

    def vector(self, start: str, v: int) -> str:
        """The address of a vector in a run of them."""
        return self.f.at(start, v * self.plan.lanes, self.plan.sum)

    def results(self, unit: str) -> list[str]:
        """Where the results of each pixel begin."""
        return addresses(self.f, self.arguments.results, self.arguments.writes, len(self.inputs), unit)


def _inputs(f: Function, plan: Gather, arguments: Arguments, rows: int) -> list[str]:
    """Where the input of each pixel begins: one address serves them all if they are evenly spaced."""
    unit = plan.source.unit
    if not plan.cut.evenly_spaced:
        return addresses(f, arguments.packed, arguments.reads, rows, unit)
    first = f.at(arguments.packed, f.load(arguments.reads, "i64", 8), unit)
    return [f.at(first, r * plan.input_step, unit) for r in range(rows)]


# Before the products.


def _begin(tile: _Tile) -> None:
    """Set the sums to the bias, or to those of the chunks before."""
    f, plan, arguments, rows = tile.f, tile.plan, tile.arguments, len(tile.inputs)
    chunks = plan.sums.chunks
    if plan.layer.bias is None and chunks == 1:
        tile.sums.set([["zeroinitializer"] * tile.vectors] * rows)
        return
    branch = f.either(f.test("eq", arguments.chunk, 0)) if chunks > 1 else None
    tile.sums.set([_load(tile, arguments.bias)] * rows)
    if branch is not None:
        f.otherwise(branch)
        tile.sums.set([_load(tile, at) for at in tile.results(plan.sum)])
        f.join(branch)


def _load(tile: _Tile, start: str) -> list[str]:
    """A row of accumulators."""
    return [tile.f.load(tile.vector(start, v), tile.out.elements.vector, tile.align) for v in range(tile.vectors)]


# Products.


def _add_taps(tile: _Tile, fetch: Fetch | None, masks: str = "") -> None:
    """Add the products of all taps of the phase; with masks, a table by (tap, lane), only in lanes with that tap."""
    f, plan, arguments = tile.f, tile.plan, tile.arguments
    with f.loop(0, arguments.taps) as tap:
        row = f.at(arguments.tap_table, f.mul(tap, 2), "i64")
        number, entry = (f.load(f.at(row, i, "i64"), "i64", 8) for i in range(2))
        inputs = moved(f, tile.inputs, entry, plan.source.unit)
        if plan.tile.lane_groups is not None:
            _add_groups(tile, plan.tile.lane_groups, number, inputs, fetch)
            return
        steps = f.div(arguments.channels, plan.sums.per_step)
        panel = f.at(arguments.weights, f.mul(f.mul(number, steps), tile.row_lanes), plan.sum)
        if masks:
            marks = [
                f.at(masks, f.add(f.mul(number, tile.row_lanes), v * plan.lanes), "i64") for v in range(tile.vectors)
            ]
            tile.sums.masks = [tile.out.elements.marked(f, at) for at in marks]
        add = _adder(tile, inputs, panel)
        if plan.cut.unrolled:
            _add_unrolled(tile, add, fetch)
        else:
            _add_loop(tile, steps, add, fetch)


def _adder(tile: _Tile, inputs: list[str], panel: str) -> Callable[[Value], None]:
    """What adds the products of one step over the channels in: of a broadcast input, or of a pair of them."""
    f, width, unit = tile.f, tile.plan.sums.per_step, tile.plan.source.unit
    products = tile.sums.add_pairs if tile.plan.sums.pairs else tile.sums.add_broadcast

    def add(step: Value) -> None:
        here = moved(f, inputs, f.mul(step, width), unit)
        products(here, f.at(panel, f.mul(step, tile.row_lanes), tile.plan.sum), tile.align)

    return add


def _add_loop(tile: _Tile, steps: Value, add: Callable[[Value], None], fetch: Fetch | None) -> None:
    """A loop over the channels in."""
    with tile.f.loop(0, steps) as step:
        if fetch is not None:
            fetch.step()
        add(step)


def _add_unrolled(tile: _Tile, add: Callable[[Value], None], fetch: Fetch | None) -> None:
    """All channels in, one after another, without a loop."""
    sums, taps = tile.plan.sums, tile.plan.layer.taps
    for step in range(sums.channels // sums.per_step):
        if fetch is not None and step < fetch.prefetch.steps_needed(taps):
            fetch.step()
        add(step)


def _add_groups(tile: _Tile, groups: LaneGroups, tap: Value, inputs: list[str], fetch: Fetch | None) -> None:
    """Groups side by side in the lanes: each lane picks the inputs of its own group."""
    f = tile.f
    if fetch is not None:
        fetch.step()
    weights = f.at(tile.arguments.weights, f.mul(tap, groups.inputs * tile.row_lanes), tile.plan.sum)
    tile.sums.add_lane_groups(inputs, weights, tile.align, *groups)


# After the products.


def _repair(m: Module, tile: _Tile, fold: Fold) -> None:
    """Where neighbouring results are side by side, a zero that stands for no weight makes NaN of an infinity: then sum
    once more, each tap only in the lanes that have it.
    """
    f, lanes = tile.f, tile.plan.layer.cout
    beyond = [0] * (tile.row_lanes - lanes)
    codes = [fold.table[i : i + lanes] for i in range(0, len(fold.table), lanes)]
    with f.when(tile.sums.may_be_nan()):
        _begin(tile)
        masks = m.table(f"{f.name}_masks", [code for tap in codes for code in (*tap, *beyond)])
        _add_taps(tile, None, masks)
        tile.sums.masks = []


def _write(tile: _Tile) -> None:
    """Write the sums to the staging, or rounded to the tensor."""
    f, sums, elements = tile.f, tile.sums.values(), tile.out.elements
    if not tile.plan.output.staged:
        tile.out.store_rows(f, sums, tile.results(elements.storage), tile.arguments.lanes)
        return
    for row, start in zip(sums, tile.results(elements.sum), strict=True):
        for v, value in enumerate(row):
            f.store(value, tile.vector(start, v), elements.vector, tile.align)
