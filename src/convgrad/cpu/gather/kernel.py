"""Code for a Gather plan: the loops over tasks, boxes of pixels, chunks of channels in, blocks of channels out, phases
and tiles. Each step inside them is a function of the module: see `_Functions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..emit.frame import Frame, items
from ..emit.prefetch import portion_of
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import size_of
from ..pack.rows import pack_box, zero
from ..pack.unpack import unpack
from ..pack.weights import block_lanes, pack_weights
from ..plan.records import busy_tiles
from .fold import unfold
from .pixels import PHASE, list_pixels, phase_numbers, phase_range
from .records import Gather, TaskOrder, WeightPacking
from .tile import Arguments, tile_function


def write(plan: Gather) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    functions = _functions(m, plan)
    kernel = _Kernel(plan, functions, Frame(m, plan.buffers, plan.sum))
    if plan.prefetch is not None:
        kernel.frame.list_lines(plan.prefetch)
    if plan.task.order is TaskOrder.CHANNEL:
        kernel.by_channels()
    else:
        kernel.pack_all_weights()
        kernel.by_boxes()
    return kernel.frame.end(stream=plan.output.stream)


# The functions that the loops call.


@dataclass(frozen=True)
class _Functions:
    """The steps inside the loops, and the tables that these read."""

    inputs: Elements
    results: Results
    tap_table: str
    phases: str
    pack_weights: Function
    pack_box: Function | None  # None: the input is read in place
    list_pixels: Function
    tiles: dict[int, tuple[Function, Function | None]]  # by rows: for whole blocks of channels, for a narrower last one
    finish: Function | None  # from the staging to the tensor


def _functions(m: Module, plan: Gather) -> _Functions:
    """Write the functions of a plan."""
    cut, (inputs, results) = plan.cut, _elements(plan)
    moved = replace(inputs, sum="i16") if plan.sums.pairs else inputs
    clear = zero(m, moved)
    tap_table = m.table("tap_table", [number for pair in cut.tap_table for number in pair])
    tap_offsets = m.table("tap_offsets", plan.weights.tap_offsets)
    phases = m.table("phases", phase_numbers(cut))
    return _Functions(
        inputs,
        results,
        tap_table,
        phases,
        pack_weights(m, plan.weights, tap_offsets),
        None if plan.pack is None else pack_box(m, moved, plan.pack, clear),
        list_pixels(m, plan, phases),
        {rows: _tiles(m, plan, results, rows) for rows in (cut.rows, cut.short_rows) if rows},
        _finish(m, plan, results),
    )


def _elements(plan: Gather) -> tuple[Elements, Results]:
    """How inputs are read and results are written."""
    layer = plan.layer
    inputs = Elements(layer.dtype, plan.lanes, plan.sum, layer.converts_f16)
    rounds = plan.sums.pairs and not layer.accumulate
    rounded = Elements(layer.out_dtype, plan.lanes, plan.sum, layer.converts_f16, rounds)
    return inputs, Results(rounded, layer.accumulate, plan.output.stream)


def _tiles(m: Module, plan: Gather, results: Results, rows: int) -> tuple[Function, Function | None]:
    """The tiles of so many rows."""
    last = plan.tile.last_vectors
    whole = tile_function(m, plan, results, rows, plan.vectors)
    return whole, tile_function(m, plan, results, rows, last) if last else None


def _finish(m: Module, plan: Gather, results: Results) -> Function | None:
    """The function that writes the staging of a box to the tensor."""
    if plan.tile.fold is not None:
        return unfold(m, plan, plan.tile.fold, results)
    return None if plan.staging is None else unpack(m, results, plan.staging)


# The loops.


class _Place(NamedTuple):
    """Where the loops are: a group, a block of its channels out, a chunk of its channels in, the start of a box."""

    group: Value
    block: Value
    chunk: Value
    start: list[Value]


class _Block(NamedTuple):
    """A block of channels of a box, and the memory that its tiles use."""

    place: _Place
    packed: str  # the input
    weights: str
    results: str  # the staging, or the tensor
    bias: str
    channels: Value  # in
    lanes: Value  # that are channels


class _Next(NamedTuple):
    """What is computed next, as far as it can be known: a group, a box by its numbers, and a chunk."""

    group: Value
    boxes: list[Value]
    chunk: Value


class _Kernel:
    """The kernel while its loops are written."""

    def __init__(self, plan: Gather, functions: _Functions, frame: Frame) -> None:
        self.plan, self.functions, self.frame = plan, functions, frame
        self.f, self.at = frame.f, frame.at
        self.source, self.result = (frame.tensors[role] for role in ("xy" if plan.layer.wanted == "y" else "yx"))

    # Weights.

    def pack_all_weights(self) -> None:
        """Pack all weights and biases: the threads together, or each thread for itself."""
        f, plan, blocks, chunks = self.f, self.plan, self.plan.tile.blocks, self.plan.sums.chunks
        alone = plan.task.weights is WeightPacking.THREAD_ALL
        portions = chunks * plan.weights.parts
        units = plan.layer.groups * blocks * portions
        counter = self.frame.counter("first")
        with f.loop(0, units) if alone else items(f, counter, units) as unit:
            self._pack_weights(*f.split(unit, [plan.layer.groups, blocks, portions]))
        if not alone:
            self.frame.barrier()

    def _pack_weights(self, group: Value, block: Value, portion: Value) -> None:
        """Pack the weights of a block of channels and a chunk, or a part of them; with the first of these, the bias."""
        f = self.f
        weights, bias = self._weights(group, block, f.div(portion, self.plan.weights.parts))
        f.call(self.functions.pack_weights, self.frame.tensors["w"], weights, group, block, portion)
        with f.when(f.test("eq", portion, 0)):
            self._pack_bias(bias, group, block)

    def _weights(self, group: Value, block: Value, chunk: Value) -> tuple[str, str]:
        """Where the packed weights and the bias of a block of channels are."""
        f, plan, sums = self.f, self.plan, self.plan.sums
        weights, biases = self.at["weights"], self.at["bias"]
        if plan.task.weights is WeightPacking.THREAD_BLOCK:
            return weights, biases
        step = f.div(f.mul(chunk, sums.chunk), sums.per_step)
        inner = f.mul(step, f.mul(block_lanes(f, plan.weights, block), plan.layer.taps))
        place = f.add(f.mul(group, plan.group_weights), f.mul(block, plan.panel), inner)
        bias = f.mul(f.add(f.mul(group, plan.tile.blocks), block), plan.block)
        return f.at(weights, place, plan.sum), f.at(biases, bias, plan.sum)

    def _pack_bias(self, to: str, group: Value, block: Value) -> None:
        """Widen the bias of one block; without a bias, zeros if the sum is taken in parts."""
        f, plan, layer, inputs = self.f, self.plan, self.plan.layer, self.functions.inputs
        if layer.bias is None and plan.sums.chunks == 1:
            return
        first = f.mul(block, plan.block)
        with f.loop(0, plan.block) as lane:
            value = "0.0"
            if layer.bias is not None:
                channel = f.min(f.add(first, lane), layer.cout - 1)
                if plan.tile.fold is not None:
                    channel = f.rem(channel, plan.tile.fold.channels)
                at = f.mul(f.add(f.mul(group, layer.cout), channel), layer.bias)
                value = inputs.load_one(f, f.at(self.frame.tensors["bias"], at, inputs.storage))
            f.store(value, f.at(to, lane, plan.sum), plan.sum, size_of(plan.sum))

    # Tasks that are boxes of pixels, each with all or a part of the channels.

    def by_boxes(self) -> None:
        """Tasks are boxes: of each group of a task and each chunk, the input, then one block of channels at a time."""
        f, plan = self.f, self.plan
        with self.frame.items("second", plan.tasks) as task:
            group_part, part, boxes = self._box_task(task)
            start = self._begin_box(boxes)
            first = f.mul(part, plan.task.blocks)
            last = f.min(f.add(first, plan.task.blocks), plan.tile.blocks)
            first_group = f.mul(group_part, plan.task.groups)
            last_group = f.min(f.add(first_group, plan.task.groups), plan.layer.groups)
            with f.loop(first_group, last_group) as group, f.loop(0, plan.sums.chunks) as chunk:
                packed = self._input(group, start, chunk)
                following = self._next_of_box(task, boxes, group, last_group, chunk)
                bases = self._prefetch_bases(following, _Place(group, first, chunk, start))
                with f.loop(first, last) as block:
                    kept = f.mul(block, plan.box_accumulators) if plan.sums.chunks > 1 else 0
                    place = _Place(group, block, chunk, start)
                    self._block(place, packed, kept, f.sub(block, first), bases)

    def _box_task(self, task: Value) -> tuple[Value, Value, list[Value]]:
        """Of a task: which part of the groups, which part of the channels, which box along each axis."""
        plan, counts = self.plan, [a.boxes for a in self.plan.cut.maps]
        if plan.task.order is TaskOrder.PART:
            group_part, part, *boxes = self.f.split(task, [plan.group_parts, plan.task.parts, *counts])
        else:
            group_part, *boxes, part = self.f.split(task, [plan.group_parts, *counts, plan.task.parts])
        return group_part, part, boxes

    def _next_of_box(self, task: Value, boxes: list[Value], group: Value, last_group: Value, chunk: Value) -> _Next:
        """What comes after a group and chunk of a box: the next chunk, or group, or else the task that follows."""
        f, plan, chunks = self.f, self.plan, self.plan.sums.chunks
        next_part, _, next_boxes = self._box_task(self.frame.following(task, plan.tasks))
        numbers: list[Value] = [f.mul(next_part, plan.task.groups), *next_boxes, 0]
        inner = [(plan.task.groups, group, f.sub(last_group, 1), [f.add(group, 1), *boxes, 0])]
        inner.append((chunks, chunk, chunks - 1, [group, *boxes, f.add(chunk, 1)]))
        for count, number, end, instead in inner:
            if count > 1:
                more = f.test("slt", number, end)
                numbers = [f.choose(more, a, b) for a, b in zip(instead, numbers, strict=True)]
        return _Next(numbers[0], numbers[1:-1], numbers[-1])

    # Tasks that are blocks of channels, each with all boxes.

    def by_channels(self) -> None:
        """Tasks are blocks of channels, a chunk after another: a thread packs the weights that it needs."""
        f, plan, cut = self.f, self.plan, self.plan.cut
        counts = [a.boxes for a in cut.maps]
        with self.frame.items("first", plan.tasks) as task:
            group, block = f.split(task, [plan.layer.groups, plan.tile.blocks])
            with f.loop(0, plan.sums.chunks) as chunk:
                self._pack_weights(group, block, chunk)
                next_weights = self._next_weights(task, chunk) if plan.weights_step else ""
                with f.loop(0, cut.boxes) as box:
                    start = self._begin_box(f.split(box, counts))
                    packed = self._input(group, start, chunk)
                    more = f.test("slt", box, cut.boxes - 1)
                    next_chunk = f.rem(f.add(chunk, 1), plan.sums.chunks)
                    boxes = f.split(f.choose(more, f.add(box, 1), 0), counts)
                    following = _Next(group, boxes, f.choose(more, chunk, next_chunk))
                    place = _Place(group, block, chunk, start)
                    bases = self._prefetch_bases(following, place)
                    if plan.weights_step:
                        bases.append(f.at(next_weights, f.mul(box, plan.weights_step), "i8"))
                    kept = f.mul(box, plan.box_accumulators) if plan.sums.chunks > 1 else 0
                    self._block(place, packed, kept, 0, bases)

    def _next_weights(self, task: Value, chunk: Value) -> str:
        """Where the weights are that are packed next: of the next chunk, or else of a task that may follow."""
        f, plan, sums = self.f, self.plan, self.plan.sums
        more = f.test("slt", chunk, sums.chunks - 1)
        following = f.choose(more, task, self.frame.following(task, plan.tasks))
        group, block = f.split(following, [plan.layer.groups, plan.tile.blocks])
        first = (group, f.mul(block, plan.block), f.choose(more, f.mul(f.add(chunk, 1), sums.chunk), 0))
        at = f.add(*(f.mul(n, s) for n, s in zip(first, plan.layer.w_strides, strict=True)))
        return f.at(self.frame.tensors["w"], at, self.functions.inputs.storage)

    # Boxes.

    def _begin_box(self, boxes: list[Value]) -> list[Value]:
        """Begin with a box: list its pixels; gives where it starts."""
        f = self.f
        start = [f.mul(b, a.box) for b, a in zip(boxes, self.plan.cut.maps, strict=True)]
        f.call(self.functions.list_pixels, self.at["pixels"], *start)
        return start

    def _input(self, group: Value, start: list[Value], chunk: Value) -> str:
        """The input of a box: packed, or where it lies."""
        f, plan, layer, cut = self.f, self.plan, self.plan.layer, self.plan.cut
        storage, pack_box = self.functions.inputs.storage, self.functions.pack_box
        channel = f.mul(chunk, plan.sums.chunk)
        origin = f.add(f.mul(group, layer.in_channel[0]), f.mul(channel, layer.in_channel[1]))
        if pack_box is None:
            steps = zip(start, cut.maps, cut.packs, strict=True)
            shift = [f.mul(f.mul(s, a.in_stride), p.stride) for s, a, p in steps]
            return f.at(self.source, f.add(origin, *shift), storage)
        corner = [f.add(f.mul(s, a.in_stride), a.low) for s, a in zip(start, cut.maps, strict=True)]
        if plan.tile.lane_groups is None:
            channels = f.min(f.sub(layer.cin, channel), plan.sums.chunk)
        else:
            channels = plan.source.channels or 0
        f.call(pack_box, f.at(self.source, origin, storage), self.at["packed"], *corner, channels)
        return self.at["packed"]

    def _prefetch_bases(self, following: _Next, place: _Place) -> list[str]:
        """What is prefetched, from its first element on: the input that comes next, and where results go."""
        f, plan, layer, cut = self.f, self.plan, self.plan.layer, self.plan.cut
        if plan.prefetch is None:
            return []
        channel = f.mul(following.chunk, plan.sums.chunk)
        at = f.add(f.mul(following.group, layer.in_channel[0]), f.mul(channel, layer.in_channel[1]))
        for box, axis_map, packed in zip(following.boxes, cut.maps, cut.packs, strict=True):
            first = f.add(f.mul(f.mul(box, axis_map.box), axis_map.in_stride), axis_map.low + min(packed.offsets))
            at = f.add(at, f.mul(first, packed.stride))
        bases = [f.at(self.source, at, self.functions.inputs.storage)]
        if plan.output.prefetch:
            corner = self._corner(place.start)
            channel_out = f.mul(place.block, plan.block * layer.out_channel[1])
            out_at = f.add(f.mul(place.group, layer.out_channel[0]), channel_out, *corner)
            bases.append(f.at(self.result, out_at, self.functions.results.elements.storage))
        return bases

    def _corner(self, start: list[Value]) -> list[Value]:
        """Elements along each axis to the first result of a box."""
        f = self.f
        return [f.mul(f.mul(s, a.out_stride), a.out_step) for s, a in zip(start, self.plan.cut.maps, strict=True)]

    # Blocks of channels.

    def _block(self, place: _Place, packed: str, kept: Value, index: Value, bases: list[str]) -> None:
        """One block of channels of a box: its tiles; after the last chunk, the results.

        `kept` is where its sums are in the staging; `index` counts the blocks of a box, for what is prefetched.
        """
        f, plan, layer = self.f, self.plan, self.plan.layer
        lanes = f.min(f.sub(layer.cout, f.mul(place.block, plan.block)), plan.block)
        channels = f.min(f.sub(plan.sums.channels, f.mul(place.chunk, plan.sums.chunk)), plan.sums.chunk)
        weights, bias = self._weights(place.group, place.block, place.chunk)
        out_channel = f.add(
            f.mul(place.group, layer.out_channel[0]), f.mul(f.mul(place.block, plan.block), layer.out_channel[1])
        )
        staging = f.at(self.at["staging"], kept, plan.sum)
        results = (
            staging if plan.output.staged else f.at(self.result, out_channel, self.functions.results.elements.storage)
        )
        groups = plan.tile.lane_groups
        if groups is not None:
            packed = f.at(packed, f.mul(place.block, plan.block // groups.outputs * groups.inputs), plan.sum)
        self._tiles(_Block(place, packed, weights, results, bias, channels, lanes), index, bases)
        self._finish(place, staging, out_channel, lanes)

    def _tiles(self, block: _Block, index: Value, bases: list[str]) -> None:
        """The tiles of a block of channels, phase by phase."""
        f, cut, functions = self.f, self.plan.cut, self.functions
        table = self.at["pixels"]
        with f.loop(0, len(cut.phases)) as phase:
            range_ = phase_range(f, cut, table, phase)
            first_pixel, whole, last_pixel = (f.load(f.at(range_, i, "i64"), "i64", 8) for i in range(3))
            row = f.at(functions.phases, f.mul(phase, PHASE), "i64")
            first, taps = (f.load(f.at(row, i, "i64"), "i64", 8) for i in range(2))
            phase_taps = f.at(functions.tap_table, f.mul(first, 2), "i64")
            for rows, (tile, last_tile) in functions.tiles.items():
                ends = (first_pixel, whole) if rows == cut.rows else (whole, last_pixel)
                with f.loop(*ends, rows) as pixel:
                    reads = f.at(table, pixel, "i64")
                    writes = f.at(table, f.add(pixel, cut.pixels), "i64")
                    fetched = self._fetched(index, pixel, bases)
                    arguments = Arguments(
                        block.packed, block.weights, phase_taps, taps, block.channels, reads, writes, block.results,
                        block.bias, block.place.chunk, block.lanes,
                    )  # fmt: skip
                    is_last = f.test("eq", block.place.block, self.plan.tile.blocks - 1)
                    f.call_either(is_last, last_tile, tile, *arguments, *fetched)

    def _fetched(self, index: Value, pixel: Value, bases: list[str]) -> tuple[str, ...]:
        """What a tile prefetches: a slice of it, by the number of the call."""
        f, plan = self.f, self.plan
        if plan.prefetch is None:
            return ()
        calls = busy_tiles(plan.cut.maps, plan.rows)
        call = f.add(f.mul(index, calls), f.div(pixel, plan.rows))
        return portion_of(f, plan.prefetch, self.at["lines"], call, bases)

    def _finish(self, place: _Place, staging: str, out_channel: Value, lanes: Value) -> None:
        """After the last chunk, write the staging of a box to the tensor."""
        f, plan, finish = self.f, self.plan, self.functions.finish
        if finish is None:
            return
        with f.when(f.test("eq", place.chunk, plan.sums.chunks - 1)):
            maps = zip(place.start, plan.cut.maps, strict=True)
            left = [f.min(f.sub(a.out, f.mul(s, a.out_stride)), a.box * a.out_stride) for s, a in maps]
            if plan.tile.fold is not None:
                f.call(finish, staging, self.result, *place.start, *left)
            else:
                corner = self._corner(place.start)
                to = f.at(self.result, f.add(out_channel, *corner), self.functions.results.elements.storage)
                f.call(finish, staging, to, *left, lanes)
