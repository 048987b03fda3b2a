"""Folding: where few channels are wanted, neighbouring results lie side by side in the lanes.

With three channels and sixteen lanes, five results fill a vector. They read the union of their inputs, so a lane has no
weight, that is zero, for a tap that its result does not use. What is left is a gather of fewer pixels with more
channels, whose results go through the output staging and are unfolded from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil, prod

from ...spec.problem import Ints
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.vectors import size_of
from ..plan.axes import Axis
from ..plan.bits import FOLD, FOLDED_WEIGHT
from .records import Fold, Gather, Layer


@dataclass(frozen=True)
class _Reads:
    """What neighbouring results along an axis read, each at a distance from where the first of them does."""

    taps: list[dict[int, int]]  # of each result: which tap reads at a distance
    unions: dict[int, list[int]]  # of the first so many results: all distances, evenly spaced


def fold(layer: Layer, room: int, most_taps: int, cost: Callable[[int], float]) -> tuple[Layer, Fold] | None:
    """The same sums with neighbouring results in the lanes, if that saves products in spite of those with zeros.

    There is room for so many results, and for the weights of so many taps. `cost` says what a row of the tile costs
    with so many channels.
    """
    units = [1 if layer.forward else a.stride for a in layer.axes]
    if any(a.k == 1 and unit > 1 for a, unit in zip(layer.axes, units, strict=True)):
        return None
    reads = [_reads(a, layer.forward, room, most_taps) for a in layer.axes]
    factors = _factors(layer, [r.unions for r in reads], room, most_taps, cost)
    if factors is None:
        return None
    unions = [r.unions[factor] for r, factor in zip(reads, factors, strict=True)]
    axes = [_folded(a, layer.forward, n, union) for a, n, union in zip(layer.axes, factors, unions, strict=True)]
    folded = Fold(
        factors,
        sizes=tuple(a.y if layer.forward else a.x for a in layer.axes),
        steps=tuple(a.y_step if layer.forward else a.x_step for a in layer.axes),
        channels=layer.cout,
        channel_step=layer.out_channel[1],
        table=_table(layer, factors, [r.taps for r in reads], unions),
    )
    # From here on it is computed as if results were y, whatever they are.
    return replace(layer, axes=tuple(axes), forward=True, cout=prod(factors) * layer.cout), folded


def _reads(a: Axis, forward: bool, room: int, most_taps: int) -> _Reads:
    """What results along an axis read, as many as there is room for."""
    unit = 1 if forward else a.stride
    taps = [_taps_of(a, forward, place) for place in range(room // unit * unit if a.k > 1 else 1)]
    unions: dict[int, list[int]] = {}
    found: set[int] = set()
    for factor, here in enumerate(taps, start=1):
        found.update(here)
        if len(found) > most_taps:
            break
        union = sorted(found)
        if factor % unit == 0 and len({high - low for low, high in pairwise(union)}) <= 1:
            unions[factor] = union
    return _Reads(taps, unions)


def _taps_of(a: Axis, forward: bool, place: int) -> dict[int, int]:
    """Where each tap of an axis reads, for the result at that place: {distance from the first result's input: tap}."""
    if forward:
        return {place * a.stride + k * a.dilation - a.pad: k for k in range(a.k)}
    found = {k: place + a.pad - k * a.dilation for k in range(a.k)}
    return {at // a.stride: k for k, at in found.items() if at % a.stride == 0}


def _factors(
    layer: Layer, unions: Sequence[dict[int, list[int]]], room: int, most_taps: int, cost: Callable[[int], float]
) -> Ints | None:
    """How many results along each axis go side by side at the least cost; None if that does not save enough."""
    wanted = [a.y if layer.forward else a.x for a in layer.axes]

    def taps(factors: Ints) -> int:
        return prod(len(union[f]) for union, f in zip(unions, factors, strict=True))

    def steps(factors: Ints) -> float:
        rounds = prod(ceil(n / f) for n, f in zip(wanted, factors, strict=True))  # some lanes may have no result there
        channels = prod(factors) * layer.cout
        packing = FOLDED_WEIGHT * channels  # once for all results
        return taps(factors) * (FOLD * cost(channels) * rounds + packing) / prod(wanted)

    fitting = [f for f in product(*unions) if prod(f) <= room and taps(f) <= most_taps]
    factors = min(fitting, key=steps, default=None)
    units = [1 if layer.forward else a.stride for a in layer.axes]
    plain = prod(a.k / unit for a, unit in zip(layer.axes, units, strict=True)) * cost(layer.cout)
    return None if factors is None or plain < steps(factors) else factors


def _folded(a: Axis, forward: bool, factor: int, union: list[int]) -> Axis:
    """The axis of so many results at a time: a result q stands for those from q*factor on.

    They read around q*factor*stride if results are y, around q*factor/stride if they are x.
    """
    gap = union[1] - union[0] if len(union) > 1 else 1
    sizes = (a.x, ceil(a.y / factor)) if forward else (a.y, ceil(a.x / factor))
    stride = factor * a.stride if forward else factor // a.stride
    in_step, out_step = (a.x_step, a.y_step) if forward else (a.y_step, a.x_step)
    return Axis(*sizes, len(union), stride, gap, -union[0], in_step, 0, out_step * factor)


def _table(layer: Layer, factors: Ints, taps: Sequence[list[dict[int, int]]], unions: Sequence[list[int]]) -> Ints:
    """Which weight each lane has for each tap: see `Fold`."""
    out_step = layer.w_strides[1]
    table: list[int] = []
    for where in product(*unions):
        for places in product(*map(range, factors)):
            mine = [there[place].get(at) for there, place, at in zip(taps, places, where, strict=True)]
            tap = None
            if None not in mine:
                tap = sum(k * a.w_step for k, a in zip(mine, layer.axes, strict=True) if k)
            table += [0 if tap is None else 2 * (tap + c * out_step) + 1 for c in range(layer.cout)]
    return tuple(table)


def unfold(m: Module, plan: Gather, fold: Fold, out: Results) -> Function:
    """A function that writes folded results: (staging, tensor, start and count of each axis)."""
    names = [f"i:{kind}{axis}" for kind in "sn" for axis in range(4)]
    f = m.function("unfold", ["p:from", "p:to", *names])
    staging, to, *numbers = f.args
    extents = [a.box for a in plan.cut.maps]
    with ExitStack() as stack:
        entry: Value = 0
        first: list[Value] = []
        for axis in range(4):
            e = stack.enter_context(f.loop(0, numbers[4 + axis]))
            entry = f.add(f.mul(entry, extents[axis]), e)
            first.append(f.mul(f.add(numbers[axis], e), fold.factors[axis]))
        source = f.at(staging, f.mul(entry, plan.block), plan.sum)
        base = f.at(to, f.add(*(f.mul(i, s) for i, s in zip(first, fold.steps, strict=True))), out.elements.storage)
        for i, places in enumerate(product(*map(range, fold.factors))):
            offset = sum(place * step for place, step in zip(places, fold.steps, strict=True))
            with f.when(_exists(f, fold, first, places)):
                for c in range(fold.channels):
                    lane = f.at(source, i * fold.channels + c, plan.sum)
                    place_at = f.at(base, offset + c * fold.channel_step, out.elements.storage)
                    value = f.load(lane, plan.sum, size_of(plan.sum))
                    out.store_one(f, value, place_at)
    return f


def _exists(f: Function, fold: Fold, first: Sequence[Value], places: Ints) -> str:
    """Whether the result at these places is one of the tensor: the last ones may be beyond its end."""
    inside = "true"
    for axis, place in enumerate(places):
        if place and fold.sizes[axis] % fold.factors[axis]:
            ok = f.test("slt", f.add(first[axis], place), fold.sizes[axis])
            inside = ok if inside == "true" else f.both(inside, ok)
    return inside
