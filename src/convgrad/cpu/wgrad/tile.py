"""The register tiles of a weight gradient: functions that add a box's products to the sums of one tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ..emit.prefetch import Fetch, prefetch_contiguous
from ..emit.tile import Accumulators
from ..ir.builder import Function, Module, Value
from ..ir.vectors import align_of
from ..plan.records import LaneGroups
from .records import Mode, WeightGradient
from .sides import results

_COUNTS = ("i:n0", "i:n1", "i:n2", "i:n3")
_ZERO = "zeroinitializer"


def tiles(m: Module, plan: WeightGradient, entries: str) -> tuple[Function, Function | None]:
    """The functions that add a box's products to one tile: of a block of lanes, and of the last one if it is narrower.

    `entries` is a table of where the taps lie in x.
    """
    if plan.roles.lane_groups is not None:
        return group_tile(m, plan, plan.roles.lane_groups, entries), None
    last = plan.last_vectors
    return tile(m, "tile", plan, plan.vectors), tile(m, "tile_tail", plan, last) if last else None


def tile(m: Module, name: str, plan: WeightGradient, vectors: int) -> Function:
    """A function that adds a box's products to one tile of so many vectors, for one tap.

    It takes both sides, the sums, whether they begin, and the pixels along each axis. If pairs are ragged, also which
    ends are odd; if it writes whole sums itself, where to, how many lanes, and whether they are whole; and what it
    prefetches.
    """
    ends = ["i:low", "i:high"] if plan.ragged else []
    direct = ["p:to", "i:left", "i:complete"] if plan.output.direct else []
    f = m.function(name, ["p:rows", "p:lanes", "p:sums", "i:fresh", *_COUNTS, *ends, *direct, *_fetch(plan)])
    rows, lanes, sums, fresh, *rest = f.args
    counts, rest = rest[:4], rest[4:]
    odd, rest = rest[: len(ends)], rest[len(ends) :]
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *rest[-2:])
    destination = _Destination(f, plan, rest) if direct else None
    if destination is not None and plan.output.prefetch:
        destination.prefetch(vectors)
    accumulators = _begin(f, plan, vectors, sums, fresh)
    products = _Products(f, plan, accumulators, (rows, lanes), counts)
    products.add(fetch)
    if plan.ragged:
        # A pixel outside x is paired with data: zero times an infinity is NaN. Then once more, without it.
        with f.when(accumulators.may_be_nan()):
            accumulators.set([[_ZERO] * vectors] * plan.rows)
            _go_on(f, plan, accumulators, sums, fresh)
            products.add_inside(odd)
    if destination is None:
        _end(f, plan, accumulators, sums)
        return f
    branch = f.either(f.test("ne", destination.complete, 0))
    results(plan).store_rows(f, accumulators.values(), destination.rows, destination.left)
    f.otherwise(branch)
    _end(f, plan, accumulators, sums)
    f.join(branch)
    return f


def group_tile(m: Module, plan: WeightGradient, groups: LaneGroups, entries: str) -> Function:
    """The same with groups side by side in the lanes: rows are taps, and channels of x within a group.

    It takes x, y, the sums, whether they begin, the first tap, the pixels along each axis, and what it prefetches. Taps
    beyond the last repeat it.
    """
    f = m.function("tile", ["p:x", "p:y", "p:sums", "i:fresh", "i:tap", *_COUNTS, *_fetch(plan)])
    x, y, sums, fresh, tap, *rest = f.args
    counts = rest[:4]
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *rest[4:])
    accumulators = _begin(f, plan, plan.vectors, sums, fresh)
    last, taps = len(plan.taps.weights) - 1, plan.parts.tap_step
    shifted = []
    for i in range(taps):
        entry = f.load(f.at(entries, f.min(f.add(tap, i), last), "i64"), "i64", 8)
        shifted.append(f.at(x, entry, plan.sum))
    operands = [(address, plan.x.steps, plan.sum) for address in shifted] + [(y, plan.y.steps, plan.sum)]
    with _pixels(f, plan, counts, operands) as (here, _):
        if fetch is not None:
            fetch.step()
        accumulators.add_tap_groups(here[:-1], here[-1], _align(plan), *groups)
    _end(f, plan, accumulators, sums)
    return f


def _fetch(plan: WeightGradient) -> tuple[str, ...]:
    """Arguments of a tile that prefetches."""
    return () if plan.prefetch is None else ("p:base", "p:offsets")


class _Destination:
    """Where a tile writes whole sums itself: its rows in w, the lanes that are left, and whether sums are whole."""

    def __init__(self, f: Function, plan: WeightGradient, arguments: Sequence[str]) -> None:
        to, self.left, self.complete, *_ = arguments
        n = results(plan).elements
        self.f, self.bytes = f, n.bytes
        self.rows = [f.at(to, r * plan.output.strides[1], n.storage) for r in range(plan.rows)]

    def prefetch(self, vectors: int) -> None:
        """Prefetch the rows, if they are about to be written."""
        with self.f.when(self.f.test("ne", self.complete, 0)):
            for row in self.rows:
                prefetch_contiguous(self.f, row, vectors * self.bytes)


class _Products:
    """The products of a box for one tap: addresses of the sides in rows and in lanes, and pixels along each axis."""

    def __init__(
        self, f: Function, plan: WeightGradient, tile: Accumulators, addresses: tuple[str, str], counts: Sequence[Value]
    ) -> None:
        self.f, self.plan, self.tile, self.counts = f, plan, tile, counts
        row_side, lane_side = plan.sides
        (rows, lanes) = addresses
        self.operands = [(rows, row_side.steps, plan.row_unit), (lanes, lane_side.steps, plan.sum)]
        self.offsets = [r * row_side.row_step for r in range(plan.rows)]
        self.align = plan.item if lane_side.mode is Mode.IN_PLACE else _align(plan)

    def add(self, fetch: Fetch | None) -> None:
        """Add all of them, and prefetch meanwhile."""
        with _pixels(self.f, self.plan, self.counts, self.operands) as ((a, b), _):
            if fetch is not None:
                fetch.step()
            add = self.tile.add_pairs if self.plan.roles.pairs else self.tile.add_broadcast
            add(self._rows(a), b, self.align)

    def add_inside(self, odd: Sequence[Value]) -> None:
        """Add those of pixels inside x alone: of the first and the last pair of a row, one may be outside."""
        f = self.f
        with _pixels(f, self.plan, self.counts, self.operands) as ((a, b), i):
            first = f.both(f.test("eq", i, 0), f.test("ne", odd[0], 0))
            last = f.both(f.test("eq", i, f.sub(self.counts[3], 1)), f.test("ne", odd[1], 0))
            second = f.op(f"select i1 {first}, i32 -65536, i32 -1")
            keep = f.op(f"select i1 {last}, i32 65535, i32 -1")
            self.tile.add_pairs(self._rows(a), b, self.align, f.op(f"and i32 {second}, {keep}"))

    def _rows(self, a: str) -> list[str]:
        return [self.f.at(a, offset, self.plan.row_unit) for offset in self.offsets]


Operand = tuple[str, Sequence[int], str]
"""An address, elements between neighbouring pixels along each axis, and their type."""


@contextmanager
def _pixels(
    f: Function, plan: WeightGradient, counts: Sequence[Value], operands: Sequence[Operand]
) -> Iterator[tuple[list[str], Value]]:
    """Step through the pixels of a box, in order; gives the addresses at each, and its place along the last axis."""
    with ExitStack() as stack:
        now = [address for address, _, _ in operands]
        i: Value = 0
        for axis, count in enumerate(counts):
            i = 0
            if plan.boxes.box[axis] > 1 or not plan.always_inside(axis):
                i = stack.enter_context(f.loop(0, count))
                now = [f.at(p, f.mul(i, s[axis]), unit) for p, (_, s, unit) in zip(now, operands, strict=True)]
        yield now, i


# The sums, between boxes.


def _begin(f: Function, plan: WeightGradient, vectors: int, sums: str, fresh: Value) -> Accumulators:
    """A tile with the sums so far; `fresh` is 1 for the first box, whose sums begin at zero."""
    tile = Accumulators(f, [[_ZERO] * vectors for _ in range(plan.rows)], plan.lanes, plan.sum)
    _go_on(f, plan, tile, sums, fresh)
    return tile


def _go_on(f: Function, plan: WeightGradient, tile: Accumulators, sums: str, fresh: Value) -> None:
    """Fill a tile of zeros with the sums so far."""
    with f.when(f.test("eq", fresh, 0)):
        for r, row in enumerate(tile.places):
            for v, place in enumerate(row):
                at = f.at(sums, r * plan.block + v * plan.lanes, plan.sum)
                f.set(place, tile.kind, f.load(at, tile.kind, _align(plan)))


def _end(f: Function, plan: WeightGradient, tile: Accumulators, sums: str) -> None:
    """Keep the sums of a tile."""
    for r, row in enumerate(tile.values()):
        for v, value in enumerate(row):
            f.store(value, f.at(sums, r * plan.block + v * plan.lanes, plan.sum), tile.kind, _align(plan))


def _align(plan: WeightGradient) -> int:
    """What addresses of sums, and of packed vectors, are multiples of."""
    return align_of(plan.lanes, plan.sum)
