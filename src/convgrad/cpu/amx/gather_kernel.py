"""The kernel of y or x on tile registers: weights are packed by all threads, then each takes boxes of positions.

Of a box the inputs are packed, run by run, or read where they lie. Then tiles sum the positions of a phase. Where
channels are contiguous in the tensor, sums leave the staging tile by tile, while they are in the first-level cache:
several blocks of channels of some positions come before the next positions, so that whole lines are written. Elsewhere
the staging holds all positions of a block of channels, until they are transposed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ..emit.frame import Frame, items
from ..emit.prefetch import portion_of
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.pieces import Pieces
from ..ir.vectors import size_of
from ..pack.rows import pack_box, zero
from ..pack.unpack import unpack
from ..pack.weights import pack_weights
from .emulation import Emulation
from .gather_tile import tile_function
from .pieces import split_weights
from .places import list_places, write_tile
from .records import TileGather
from .repair import reads, repair_tile
from .split import AHEAD
from .tiles import STEP, TileCode, emulation

PHASE = 6  # numbers of a phase in the table of phases: first tap, taps, and the residue along each axis


@dataclass(frozen=True)
class _Functions:
    """The steps inside the loops, and the tables that these read."""

    inputs: Elements
    results: Results
    emulation: Emulation | None
    pack_weights: Function
    split: _Split | None
    pack: Function | None  # None: inputs are read where they lie
    tile: Function
    last_tile: Function | None  # for a last block of fewer channels
    finish: Function
    last_finish: Function | None
    list_places: Function | None  # None: the places of a long row are evenly spaced in the tensor
    tables: dict[str, str]


class _Split(NamedTuple):
    """What numbers need that are split."""

    weights: Function  # splits them
    repair: Function  # sums again what has become NaN
    reads: str  # a table: what each tap reads


def write(plan: TileGather) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    kernel = _Kernel(plan, _functions(m, plan), Frame(m, plan.buffers, plan.sum))
    if plan.prefetch is not None:
        kernel.frame.list_lines(plan.prefetch)
    kernel.pack_all_weights()
    kernel.code.begin(kernel.functions.tables["registers"])
    kernel.sum_boxes()
    kernel.code.end()
    return kernel.frame.end()


def _functions(m: Module, plan: TileGather) -> _Functions:
    """Write the functions of a plan."""
    positions, (inputs, results) = plan.positions, _elements(plan)
    emulated = emulation(m, plan.split.dtype, plan.code.emulated)
    return _Functions(
        inputs, results, emulated,
        pack_weights(m, plan.weights, m.table("tap_offsets", plan.weights.tap_offsets)),
        _split(m, plan, inputs),
        _pack(m, plan, replace(inputs, sum="i16") if plan.split.whole else _pieces(plan)),
        tile_function(m, plan, emulated, plan.vectors),
        tile_function(m, plan, emulated, plan.tile.last_vectors) if plan.tile.last_vectors else None,
        *_finish(m, plan, results),
        list_places(m, plan),
        {
            "registers": m.table("registers", plan.tiles.configuration()),
            "taps": m.table("taps", [number for tap in positions.taps for number in tap]),
            "phases": m.table("phases", [n for p in positions.phases for n in (p.first, p.count, *p.residues)]),
            "runs": m.table("runs", [start for run in positions.runs for start in run]),
        },
    )  # fmt: skip


def _split(m: Module, plan: TileGather, inputs: Elements) -> _Split | None:
    """What splits weights, and what repairs sums."""
    if plan.split.whole:
        return None
    weights = split_weights(m, plan.weights, _pieces(plan))
    return _Split(weights, repair_tile(m, plan, inputs), m.table("reads", reads(plan)))


def _pack(m: Module, plan: TileGather, moved: Elements) -> Function | None:
    """What packs a box of the input."""
    if plan.pack is None:
        return None
    copied = replace(moved, lanes=STEP) if plan.copies_lines else moved
    return pack_box(m, copied, plan.pack, zero(m, moved))


def _finish(m: Module, plan: TileGather, results: Results) -> tuple[Function, Function | None]:
    """What writes sums to the tensor, and the same for a last block of channels that is not full."""
    if plan.staging is not None:
        return unpack(m, results, plan.staging), None
    left = plan.layer.cout - (plan.tile.blocks - 1) * plan.block
    last = None if left == plan.block else write_tile(m, plan, results, left)
    return write_tile(m, plan, results, plan.block), last


def _elements(plan: TileGather) -> tuple[Elements, Results]:
    """How inputs are read and results are written."""
    layer = plan.layer
    inputs = Elements(layer.dtype, plan.lanes, plan.sum, layer.converts_f16)
    rounds = plan.code.rounds_bf16 and not layer.accumulate
    return inputs, Results(replace(inputs, dtype=layer.out_dtype, rounds_bf16=rounds), layer.accumulate)


def _pieces(plan: TileGather) -> Pieces:
    """How numbers are split as they are packed."""
    layer, how = plan.layer, plan.split
    step = plan.positions.pitch // how.pieces
    return Pieces(
        layer.dtype, plan.lanes, "bfloat", layer.converts_f16, plan.code.splits_bf16, AHEAD, how.pieces, step,
        how.rounds,
    )  # fmt: skip


@dataclass(frozen=True)
class _Input:
    """The input of a box."""

    source: str  # packed, or where it lies
    start: list[Value]  # of the box along each axis
    following: str  # where the input of the next box begins


@dataclass(frozen=True)
class _Phase:
    """The results of a phase that are in a box."""

    group: Value
    first: Value  # of its rows in the table of taps
    box: _Input
    result: str  # where the first one is
    counts: list[Value]  # along each axis
    taps: tuple[str, Value]  # in the table, and how many


class _Kernel:
    """The kernel while its loops are written."""

    def __init__(self, plan: TileGather, functions: _Functions, frame: Frame) -> None:
        self.plan, self.functions, self.frame = plan, functions, frame
        self.f, self.at = frame.f, frame.at
        self.call = self.f.variable("i64", 0) if plan.prefetch else ""  # the number of the next call of a tile
        self.source, self.result = (frame.tensors[role] for role in ("xy" if plan.layer.wanted == "y" else "yx"))
        self.file = [self.at["registers"]] if functions.emulation else []
        self.code = TileCode(self.f, plan.split.dtype, functions.emulation, "".join(self.file))

    # Weights.

    def pack_all_weights(self) -> None:
        """Pack all weights and biases, by all threads together: one column of tiles after another, or parts of them."""
        f, plan, columns, parts = self.f, self.plan, self.plan.columns, self.plan.weight_parts
        with items(f, self.frame.counter("first"), plan.layer.groups * columns * parts) as item:
            group, column, part = f.split(item, [plan.layer.groups, columns, parts])
            self._pack_panel(group, column, part)
            if plan.layer.bias is not None:
                with f.when(f.test("eq", part, 0)):
                    self._pack_bias(group, column)
        self.frame.barrier()

    def _pack_panel(self, group: Value, column: Value, part: Value) -> None:
        """Pack a part of the weights of a column of tiles; to be split, they are packed as they are before."""
        f, functions, source, to = self.f, self.functions, self.frame.tensors["w"], self._weights(group, column)
        if functions.split is None:
            f.call(functions.pack_weights, source, to, group, column, part)
            return
        f.call(functions.pack_weights, source, self.at["raw_weights"], group, column, part)
        f.call(functions.split.weights, self.at["raw_weights"], to, column, part)

    def _weights(self, group: Value, column: Value) -> str:
        """Where the packed weights of a column of tiles are."""
        f, plan = self.f, self.plan
        return f.at(self.at["weights"], f.mul(f.add(f.mul(group, plan.columns), column), plan.panel), plan.sum)

    def _bias(self, group: Value, column: Value) -> str:
        """Where the packed bias of a column of tiles is."""
        f, plan = self.f, self.plan
        return f.at(self.at["bias"], f.mul(f.add(f.mul(group, plan.columns), column), plan.lanes), plan.sum)

    def _pack_bias(self, group: Value, column: Value) -> None:
        """Widen the bias of one column; that of the last channel for places beyond it."""
        f, plan, layer, inputs = self.f, self.plan, self.plan.layer, self.functions.inputs
        to = self._bias(group, column)
        with f.loop(0, plan.lanes) as lane:
            channel = f.min(f.add(f.mul(column, plan.lanes), lane), layer.cout - 1)
            at = f.mul(f.add(f.mul(group, layer.cout), channel), layer.bias or 0)
            value = inputs.load_one(f, f.at(self.frame.tensors["bias"], at, inputs.storage))
            f.store(value, f.at(to, lane, plan.sum), plan.sum, size_of(plan.sum))

    # Boxes.

    def sum_boxes(self) -> None:
        """Tasks are boxes, each with all or a part of the channels."""
        f, plan, axes = self.f, self.plan, self.plan.positions.axes
        with self.frame.items("second", plan.tasks) as task:
            group, *boxes, part = f.split(task, [plan.layer.groups, *(a.boxes for a in axes), plan.parts.parts])
            start = [f.mul(b, a.box) for b, a in zip(boxes, axes, strict=True)]
            source = self._input(group, start)
            first = f.mul(part, plan.parts.blocks)
            last = f.min(f.add(first, plan.parts.blocks), plan.tile.blocks)
            following = self._following(task)
            with f.loop(0, len(plan.positions.phases)) as phase:
                self._sum_phase(group, (first, last), phase, _Input(source, start, following))

    def _following(self, task: Value) -> str:
        """Where the input of the next task begins, which is prefetched while this one is computed."""
        f, plan, axes = self.f, self.plan, self.plan.positions.axes
        if plan.prefetch is None:
            return ""
        f.set(self.call, "i64", 0)
        task = self.frame.following(task, plan.tasks)
        group, *boxes, _ = f.split(task, [plan.layer.groups, *(a.boxes for a in axes), plan.parts.parts])
        at = f.mul(group, plan.layer.in_channel[0])
        for box, a in zip(boxes, axes, strict=True):
            at = f.add(at, f.mul(f.add(f.mul(box, a.box * a.in_stride), min(a.runs)), a.pack.stride))
        return f.at(self.source, at, self.functions.inputs.storage)

    def _input(self, group: Value, start: list[Value]) -> str:
        """The input of a box: packed, run by run, or where it lies."""
        f, plan, layer, functions = self.f, self.plan, self.plan.layer, self.functions
        positions, storage = plan.positions, functions.inputs.storage
        origin = f.at(self.source, f.mul(group, layer.in_channel[0]), storage)
        if functions.pack is None:
            shift = f.add(*(f.mul(s, step) for s, step in zip(start, positions.steps, strict=True)))
            return f.at(origin, shift, storage)
        with f.loop(0, len(positions.runs)) as run:
            row = f.at(functions.tables["runs"], f.mul(run, len(start)), "i64")
            corner = [
                f.add(f.mul(s, a.in_stride), f.load(f.at(row, i, "i64"), "i64", 8))
                for i, (s, a) in enumerate(zip(start, positions.axes, strict=True))
            ]
            to = f.at(self.at["packed"], f.mul(run, positions.run_entries * positions.pitch), "i16")
            f.call(functions.pack, origin, to, *corner, layer.cin)
        return self.at["packed"]

    def _sum_phase(self, group: Value, blocks: tuple[Value, Value], phase: Value, box: _Input) -> None:
        """The results of a phase that are in a box, if there are any, for the blocks of channels of a part."""
        f, axes, start = self.f, self.plan.positions.axes, box.start
        numbers = f.at(self.functions.tables["phases"], f.mul(phase, PHASE), "i64")
        first, count, *residues = (f.load(f.at(numbers, i, "i64"), "i64", 8) for i in range(PHASE))
        there, counts = "true", list[Value]()
        for a, residue, s in zip(axes, residues, start, strict=True):
            results = f.div(f.add(f.sub(a.out + a.out_stride - 1, residue)), a.out_stride)
            counts.append(f.min(f.sub(results, s), a.box))
            there = f.both(there, f.test("sgt", counts[-1], 0))
        with f.when(there):
            taps = (f.at(self.functions.tables["taps"], f.mul(first, 2), "i64"), count)
            if self.functions.list_places is not None:
                f.call(self.functions.list_places, self.at["places"], *counts)
            corner = f.mul(group, self.plan.layer.out_channel[0])
            for s, residue, a in zip(start, residues, axes, strict=True):
                corner = f.add(corner, f.mul(f.add(f.mul(s, a.out_stride), residue), a.out_step))
            result = f.at(self.result, corner, self.functions.results.elements.storage)
            with f.loop(*blocks, self.plan.parts.together) as block:
                several = (block, f.min(f.add(block, self.plan.parts.together), blocks[1]))
                self._sum_blocks(_Phase(group, first, box, result, counts, taps), several)

    def _sum_blocks(self, phase: _Phase, blocks: tuple[Value, Value]) -> None:
        """Some blocks of channels: one long row after another, a tile's rows at a time, and of these every block."""
        f, plan, positions, counts = self.f, self.plan, self.plan.positions, phase.counts
        flat, extents = positions.flat, positions.extents
        with ExitStack() as stack:
            read: Value = 0
            written: Value = 0
            result: Value = 0
            start = list(phase.box.start)
            for i in range(flat):
                q = stack.enter_context(f.loop(0, counts[i]))
                start[i] = f.add(start[i], q) if self.functions.split else q
                read = f.add(read, f.mul(q, positions.steps[i]))
                written = f.add(written, f.mul(q, prod(extents[i + 1 :])))
                result = f.add(result, f.mul(q, plan.out_steps[i]))
            row = f.add(1, *(f.mul(f.sub(counts[i], 1), prod(extents[i + 1 :])) for i in range(flat, len(counts))))
            first: Value = stack.enter_context(f.loop(0, row, plan.rows))
            # In place nothing lies beyond the last position: some are summed again.
            m = f.min(first, f.sub(row, plan.rows)) if positions.in_place else first
            left = f.at(phase.box.source, f.add(read, f.mul(m, positions.steps[-1])), "i16")
            block = stack.enter_context(f.loop(*blocks))
            to = self.at["staging"]
            if plan.staging is not None:
                to = f.at(to, f.mul(f.add(written, m), plan.block), plan.sum)
            self._tile(phase, block, left, to)
            if self.functions.split is not None:
                self._repair(self.functions.split, phase, block, to, [m, *start, *counts])
            if plan.staging is None:
                self._write_tile(phase, block, (result, first, f.sub(row, first)), f.sub(first, m))
        if plan.staging is not None:
            to = self._result(phase, blocks[0], 0)
            channels = f.min(f.sub(plan.layer.cout, f.mul(blocks[0], plan.block)), plan.block)
            f.call(self.functions.finish, self.at["staging"], to, *counts, channels)

    def _tile(self, phase: _Phase, block: Value, left: str, to: str) -> None:
        """Sum the positions of a tile for one block of channels."""
        f, plan = self.f, self.plan
        column = f.mul(block, plan.vectors)
        weights = self._weights(phase.group, column)
        bias = self._bias(phase.group, column) if plan.layer.bias is not None else "null"
        tile, last = self.functions.tile, self.functions.last_tile
        is_last = f.test("eq", block, plan.tile.blocks - 1)
        fetched: tuple[str, ...] = ()
        if plan.prefetch is not None:
            call = f.get(self.call, "i64")
            f.set(self.call, "i64", f.add(call, 1))
            fetched = portion_of(f, plan.prefetch, self.at["lines"], call, [phase.box.following])
        f.call_either(is_last, last, tile, left, weights, to, bias, *phase.taps, *fetched, *self.file)

    def _repair(self, split: _Split, phase: _Phase, block: Value, sums: str, place: list[Value]) -> None:
        """Sum again what has become NaN in a tile."""
        f, plan, layer, storage = self.f, self.plan, self.plan.layer, self.functions.inputs.storage
        channel = f.mul(block, plan.block)
        source = f.at(self.source, f.mul(phase.group, layer.in_channel[0]), storage)
        at = f.add(f.mul(phase.group, layer.w_strides[0]), f.mul(channel, layer.w_strides[1]))
        weights = f.at(self.frame.tensors["w"], at, storage)
        table = f.at(split.reads, f.mul(phase.first, 1 + len(phase.counts)), "i64")
        channels = f.min(f.sub(layer.cout, channel), plan.block)
        bias = self._bias(phase.group, f.mul(block, plan.vectors))
        f.call(split.repair, sums, source, weights, bias, table, phase.taps[1], channels, *place)

    def _write_tile(self, phase: _Phase, block: Value, row: tuple[Value, Value, Value], skipped: Value) -> None:
        """Write the sums of a tile, but for those skipped, which were written before. Of the long row: where it is in
        the tensor, the first place, and how many places are left.
        """
        f, plan, functions = self.f, self.plan, self.functions
        at, first, left = row
        source = f.at(self.at["staging"], f.mul(skipped, plan.block), plan.sum)
        channels = f.min(f.sub(plan.layer.cout, f.mul(block, plan.block)), plan.block)
        is_last = f.test("eq", block, plan.tile.blocks - 1)
        if functions.list_places is not None:
            places = f.at(self.at["places"], first, "i64")
            to = self._result(phase, block, at)
            f.call_either(is_last, functions.last_finish, functions.finish, source, to, places, plan.rows, channels)
            return
        to = self._result(phase, block, f.add(at, f.mul(first, plan.out_steps[-1])))
        count = f.min(left, plan.rows)
        f.call_either(is_last, functions.last_finish, functions.finish, source, to, "null", count, channels)

    def _result(self, phase: _Phase, block: Value, at: Value) -> str:
        """Where the results of a block of channels are, so many elements behind the first of the box."""
        f, plan = self.f, self.plan
        channel = f.mul(f.mul(block, plan.block), plan.layer.out_channel[1])
        return f.at(phase.result, f.add(at, channel), self.functions.results.elements.storage)
