"""The kernel of y or x on tile registers: weights are packed by all threads, then each takes boxes of positions.

Of a box the inputs are packed, run by run, or read where they lie. Then for one block of channels after another, tiles
sum all positions of a phase into the staging, from where they are written to the tensor: rounded, transposed or added.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, prod

from ..emit.frame import Frame, items
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.pieces import Pieces
from ..ir.vectors import size_of
from ..pack.box import Packer
from ..pack.rows import pack_box, zero
from ..pack.unpack import unpack
from ..pack.weights import pack_weights
from .emulation import Emulation
from .pieces import split_weights
from .records import TileGather
from .tiles import STEP, TileCode, add_products, each_sum, emulation

PHASE = 6  # numbers of a phase in the table of phases: first tap, taps, and the residue along each axis


@dataclass(frozen=True)
class _Functions:
    """The steps inside the loops, and the tables that these read."""

    inputs: Elements
    results: Results
    emulation: Emulation | None
    pack_weights: Function
    split_weights: Function | None  # None: they are packed as tiles read them
    pack: Function | None  # None: inputs are read where they lie
    tile: Function
    last_tile: Function | None  # for a last block of fewer channels
    finish: Function
    configuration: str
    taps: str
    phases: str
    runs: str


def write(plan: TileGather) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    kernel = _Kernel(plan, _functions(m, plan), Frame(m, plan.buffers, plan.sum))
    kernel.pack_all_weights()
    kernel.code.begin(kernel.functions.configuration)
    kernel.sum_boxes()
    kernel.code.end()
    return kernel.frame.end()


def _functions(m: Module, plan: TileGather) -> _Functions:
    """Write the functions of a plan."""
    positions, box = plan.positions, plan.pack
    inputs, results = _elements(plan)
    moved = replace(inputs, sum="i16") if plan.split.whole else _pieces(plan)
    emulated = emulation(m, plan.split.dtype, plan.code.emulated)
    clear = zero(m, moved)
    return _Functions(
        inputs, results, emulated,
        pack_weights(m, plan.weights, m.table("tap_offsets", plan.weights.tap_offsets)),
        None if plan.split.whole else split_weights(m, plan.weights, replace(_pieces(plan), lanes=plan.lanes)),
        None if box is None else pack_box(m, moved, box, clear),
        _tile(m, plan, emulated, plan.vectors),
        _tile(m, plan, emulated, plan.tile.last_vectors) if plan.tile.last_vectors else None,
        unpack(m, results, plan.staging),
        m.table("registers", plan.tiles.configuration()),
        m.table("taps", [number for tap in positions.taps for number in tap]),
        m.table("phases", [n for p in positions.phases for n in (p.first, p.count, *p.residues)]),
        m.table("runs", [start for run in positions.runs for start in run]),
    )  # fmt: skip


def _elements(plan: TileGather) -> tuple[Elements, Results]:
    """How inputs are read and results are written."""
    layer = plan.layer
    inputs = Elements(layer.dtype, plan.lanes, plan.sum, layer.converts_f16)
    rounds = plan.code.rounds_bf16 and not layer.accumulate
    return inputs, Results(replace(inputs, dtype=layer.out_dtype, rounds_bf16=rounds), layer.accumulate)


def _pieces(plan: TileGather) -> Pieces:
    """How inputs are split as they are packed: by as many lanes at a time as their packer can."""
    layer, box = plan.layer, plan.pack
    if box is None:
        raise ValueError("inputs that are read in place cannot be split")
    copied = box.packer is Packer.COPY_PIXELS and box.pitch % STEP == 0
    lanes, step = STEP if copied else plan.lanes, box.pitch
    return Pieces(layer.dtype, lanes, "bfloat", layer.converts_f16, False, plan.split.pieces, step)


def _tile(m: Module, plan: TileGather, emulated: Emulation | None, across: int) -> Function:
    """A function that sums a block of so many tiles side by side: (input, weights, sums, bias, taps, their number, and
    a file of registers).
    """
    block, item = plan.tiles, plan.item
    file = ["p:file"] if emulated else []
    f = m.function(f"tile_{across}", ["p:left", "p:right", "p:to", "p:bias", "p:taps", "i:count", *file])
    left, right, to, bias, taps, count, *rest = f.args
    code = TileCode(f, plan.split.dtype, emulated, rest[0] if rest else "")
    row, right_row = plan.block * item, across * plan.lanes
    pairs = plan.sums.channels // 2
    left_piece, right_piece = plan.positions.pitch // plan.split.pieces, plan.layer.taps * pairs * right_row

    def start(register: int, _: int, j: int) -> None:
        if plan.layer.bias is None:
            code.clear(register)
        else:
            code.load(register, f.at(bias, j * plan.lanes, plan.sum), 0)

    each_sum(block, across, start)
    left_row = 2 * plan.positions.steps[-1]
    with f.loop(0, count) as t:
        tap = f.at(taps, f.mul(t, 2), "i64")
        number, entry = (f.load(f.at(tap, i, "i64"), "i64", 8) for i in range(2))
        left_tap = f.at(left, entry, "i16")
        right_tap = f.at(right, f.mul(number, pairs * right_row), plan.sum)
        with f.loop(0, pairs // block.pairs) as step:
            left_at = f.at(left_tap, f.mul(step, 2 * block.pairs), "i16")
            right_at = f.at(right_tap, f.mul(step, block.pairs * right_row), plan.sum)
            add_products(
                code, block, across,
                (lambda i, n, at=left_at: f.at(at, i * block.rows * left_row + 2 * n * left_piece, "i8"), left_row),  # type: ignore[misc]
                (lambda j, n, at=right_at: f.at(at, j * plan.lanes + n * right_piece, plan.sum), right_row * item),  # type: ignore[misc]
                plan.split.products,
            )  # fmt: skip

    def keep(register: int, i: int, j: int) -> None:
        code.store(register, f.at(to, i * block.rows * plan.block + j * plan.lanes, plan.sum), row)

    each_sum(block, across, keep)
    return f


class _Kernel:
    """The kernel while its loops are written."""

    def __init__(self, plan: TileGather, functions: _Functions, frame: Frame) -> None:
        self.plan, self.functions, self.frame = plan, functions, frame
        self.f, self.at = frame.f, frame.at
        self.source, self.result = (frame.tensors[role] for role in ("xy" if plan.layer.wanted == "y" else "yx"))
        self.file = [self.at["registers"]] if functions.emulation else []
        self.code = TileCode(self.f, plan.split.dtype, functions.emulation, "".join(self.file))

    # Weights.

    def pack_all_weights(self) -> None:
        """Pack all weights and biases, by all threads together."""
        f, plan, blocks = self.f, self.plan, self.plan.tile.blocks
        units = plan.layer.groups * blocks
        with items(f, self.frame.counter("first"), units) as unit:
            group, block = f.split(unit, [plan.layer.groups, blocks])
            self._pack_panel(group, block)
            if plan.layer.bias is not None:
                self._pack_bias(f.at(self.at["bias"], f.mul(unit, plan.block), plan.sum), group, block)
        self.frame.barrier()

    def _pack_panel(self, group: Value, block: Value) -> None:
        """Pack the weights of a block of channels; those that are split some channels in at a time."""
        f, weights, functions, source = self.f, self.plan.weights, self.functions, self.frame.tensors["w"]
        to = self._weights(group, block)
        if functions.split_weights is None:
            f.call(functions.pack_weights, source, to, group, block, 0)
            return
        with f.loop(0, ceil(weights.channels / weights.chunk)) as chunk:
            f.call(functions.pack_weights, source, self.at["raw_weights"], group, block, chunk)
            f.call(functions.split_weights, self.at["raw_weights"], to, block, chunk)

    def _weights(self, group: Value, block: Value) -> str:
        """Where the packed weights of a block of channels are."""
        f, plan = self.f, self.plan
        place = f.add(f.mul(group, plan.group_weights), f.mul(block, plan.panel))
        return f.at(self.at["weights"], place, plan.sum)

    def _pack_bias(self, to: str, group: Value, block: Value) -> None:
        """Widen the bias of one block; that of the last channel for places beyond it."""
        f, plan, layer, inputs = self.f, self.plan, self.plan.layer, self.functions.inputs
        with f.loop(0, plan.block) as lane:
            channel = f.min(f.add(f.mul(block, plan.block), lane), layer.cout - 1)
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
            with f.loop(first, last) as block, f.loop(0, len(plan.positions.phases)) as phase:
                self._sum_phase((group, block, phase), start, source)

    def _input(self, group: Value, start: list[Value]) -> str:
        """The input of a box: packed, run by run, or where it lies."""
        f, plan, layer, functions = self.f, self.plan, self.plan.layer, self.functions
        positions, storage = plan.positions, functions.inputs.storage
        origin = f.at(self.source, f.mul(group, layer.in_channel[0]), storage)
        if functions.pack is None:
            return f.at(
                origin, f.add(*(f.mul(s, step) for s, step in zip(start, positions.steps, strict=True))), storage
            )
        with f.loop(0, len(positions.runs)) as run:
            row = f.at(functions.runs, f.mul(run, len(start)), "i64")
            corner = [
                f.add(f.mul(s, a.in_stride), f.load(f.at(row, i, "i64"), "i64", 8))
                for i, (s, a) in enumerate(zip(start, positions.axes, strict=True))
            ]
            to = f.at(self.at["packed"], f.mul(run, positions.run_entries * positions.pitch), "i16")
            f.call(functions.pack, origin, to, *corner, layer.cin)
        return self.at["packed"]

    def _sum_phase(self, place: tuple[Value, Value, Value], start: list[Value], source: str) -> None:
        """The results of a phase that are in a box, for one block of channels, if there are any."""
        f, axes = self.f, self.plan.positions.axes
        group, block, phase = place
        numbers = f.at(self.functions.phases, f.mul(phase, PHASE), "i64")
        first, count, *residues = (f.load(f.at(numbers, i, "i64"), "i64", 8) for i in range(PHASE))
        there, counts = "true", list[Value]()
        for a, residue, s in zip(axes, residues, start, strict=True):
            results = f.div(f.add(f.sub(a.out + a.out_stride - 1, residue)), a.out_stride)
            counts.append(f.min(f.sub(results, s), a.box))
            there = f.both(there, f.test("sgt", counts[-1], 0))
        with f.when(there):
            taps = f.at(self.functions.taps, f.mul(first, 2), "i64")
            self._tiles((group, block), source, counts, (taps, count))
            self._finish((group, block), [*zip(start, residues, strict=True)], counts)

    def _tiles(self, place: tuple[Value, Value], source: str, counts: list[Value], taps: tuple[str, Value]) -> None:
        """Sum all positions: one long row after another, a block of tiles at a time."""
        f, plan, positions = self.f, self.plan, self.plan.positions
        group, block = place
        unit = f.add(f.mul(group, plan.tile.blocks), block)
        weights = self._weights(group, block)
        bias = f.at(self.at["bias"], f.mul(unit, plan.block), plan.sum) if plan.layer.bias is not None else "null"
        flat, extents = positions.flat, positions.extents
        with ExitStack() as stack:
            read: Value = 0
            written: Value = 0
            for i in range(flat):
                q = stack.enter_context(f.loop(0, counts[i]))
                read = f.add(read, f.mul(q, positions.steps[i]))
                written = f.add(written, f.mul(q, prod(extents[i + 1 :])))
            row = f.add(1, *(f.mul(f.sub(counts[i], 1), prod(extents[i + 1 :])) for i in range(flat, len(counts))))
            m: Value = stack.enter_context(f.loop(0, row, plan.rows))
            if positions.in_place:
                m = f.min(m, f.sub(row, plan.rows))  # nothing lies beyond the last position: some are summed again
            left = f.at(source, f.add(read, f.mul(m, positions.steps[-1])), "i16")
            to = f.at(self.at["staging"], f.mul(f.add(written, m), plan.block), plan.sum)
            is_last = f.test("eq", block, plan.tile.blocks - 1)
            tile, last = self.functions.tile, self.functions.last_tile
            f.call_either(is_last, last, tile, left, weights, to, bias, *taps, *self.file)

    def _finish(self, place: tuple[Value, Value], start: list[tuple[Value, Value]], counts: list[Value]) -> None:
        """Write the staging to the tensor. `start` is where the box begins along each axis, and the phase's residue."""
        f, plan, layer = self.f, self.plan, self.plan.layer
        group, block = place
        channel = f.mul(block, plan.block)
        at = f.add(f.mul(group, layer.out_channel[0]), f.mul(channel, layer.out_channel[1]))
        for (s, residue), a in zip(start, plan.positions.axes, strict=True):
            at = f.add(at, f.mul(f.add(f.mul(s, a.out_stride), residue), a.out_step))
        to = f.at(self.result, at, self.functions.results.elements.storage)
        f.call(self.functions.finish, self.at["staging"], to, *counts, f.min(f.sub(layer.cout, channel), plan.block))
