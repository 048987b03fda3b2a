"""Code for a Gather plan: y and x, each output pixel gathering over taps and channels."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, product

from ..emit.frame import Frame, buffers, items
from ..emit.prefetch import Fetch, slice_of
from ..emit.store import Results
from ..emit.tile import Tile, addresses, moved
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.loops import each_piece
from ..ir.shuffle import interleave, piece, transpose_pieces
from ..ir.vectors import size_of
from ..pack.box import PackBox, transposable
from ..pack.rows import pack_box, zero
from ..pack.unpack import Staging, unpack
from ..plan.records import Gather, busy_tiles, entry_steps
from ..target import LINE

PHASE = 14  # numbers of a phase in its table: first tap, taps, and per axis residue, start and stop


def write(plan: Gather) -> str:
    """The IR of a kernel for this plan."""
    if plan.fold is not None and plan.blocks > 1:
        raise ValueError("folded results must be in one block of channels")
    return _Kernel(plan).text


class _Kernel:
    """The kernel of a plan while it is written: its parts as functions, then the loops over them."""

    def __init__(self, plan: Gather) -> None:
        self.plan = plan
        m = self.module = Module()
        self.given = given = Elements(plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
        dots = plan.pairs and not plan.accumulate
        self.result = Elements(plan.out_dtype, plan.lanes, plan.sum, plan.converts_f16, dots)
        moved_as = Elements(plan.dtype, plan.lanes, "i16", plan.converts_f16) if plan.pairs else given
        clear = zero(m, moved_as)
        self.tap_table = m.table("tap_table", [number for pair in plan.tap_table for number in pair])
        tap_weights = m.table("tap_weights", plan.taps)
        numbers = [n for p in plan.phases for n in (p.first, p.count, *p.residues, *p.starts, *p.stops)]
        self.phases = m.table("phases", numbers)
        self.pack_weights = _pack_weights(m, plan, given, tap_weights)
        self.pack_box = None
        if not plan.in_place:
            known = plan.chunk if plan.given % plan.chunk == 0 else None
            if plan.share is not None:
                known = plan.cout // plan.share[1] * plan.share[0]
            elif plan.chunks == 1:
                known = plan.given
            # The last channel of an odd number is paired with a weight of zero: zero times an infinity would be NaN.
            odd = plan.given < plan.cin
            step, woven = plan.in_channel[1], plan.woven
            box = PackBox("pack", plan.packs, step, plan.pitch, known, zero_rest=odd, interleave=woven)
            self.pack_box = pack_box(m, moved_as, box, clear)
        self.tabulate = _tabulate(m, plan, self.phases)
        self.tiles = {rows: _tiles(m, plan, self.result, rows) for rows in (plan.rows, plan.short) if rows}
        self.finish = _unfold(m, plan, self.result) if plan.fold else None
        if plan.staged and plan.fold is None:
            steps = [w.out_step for w in plan.maps]
            whole = plan.cout % plan.lanes == 0
            staging = Staging(
                plan.region, tuple(steps), plan.out_channel[1], plan.block, plan.one_row, plan.twice, whole
            )
            self.finish = unpack(m, Results(self.result, plan.accumulate, plan.stream), staging)

        self.frame = frame = Frame(m, buffers(plan.sizes), plan.sum)
        self.f, self.pointers, self.at = frame.f, frame.tensors, frame.at
        self.source, self.target = (self.pointers[role] for role in ("xy" if plan.wanted == "y" else "yx"))
        if plan.prefetch is not None:
            frame.list_lines(plan.prefetch)
        if plan.own:
            self._by_blocks()
        else:
            self._pack_all()
            if not plan.copies:
                frame.barrier()
            self._by_boxes()
        self.text = frame.end(stream=plan.stream)

    def _pack_all(self) -> None:
        """The weights, and the bias, in the order in which the tiles read them."""
        f, plan = self.f, self.plan
        units = plan.groups * plan.blocks * plan.chunks
        counter = self.frame.counter("first")
        with f.loop(0, units) if plan.copies else items(f, counter, units) as unit:
            group, block, chunk = f.split(unit, [plan.groups, plan.blocks, plan.chunks])
            weights, bias = self._weights(group, block, chunk)
            f.call(self.pack_weights, self.pointers["w"], weights, group, block, chunk)
            with f.when(f.test("eq", chunk, 0)):
                _pack_bias(f, plan, self.given, self.pointers["bias"], bias, group, block)

    def _weights(self, group: Value, block: Value, chunk: Value) -> tuple[str, str]:
        """Where the packed weights and the bias of a block of channels lie."""
        f, plan = self.f, self.plan
        weights, biases = (self.at[name] for name in ("weights", "bias"))
        if plan.own:
            return weights, biases
        step = f.div(f.mul(chunk, plan.chunk), plan.width)
        inner = f.mul(step, f.mul(_width(f, plan, block), len(plan.taps)))
        place = f.add(f.mul(group, plan.panels), f.mul(block, plan.panel), inner)
        bias = f.mul(f.add(f.mul(group, plan.blocks), block), plan.block)
        return f.at(weights, place, plan.sum), f.at(biases, bias, plan.sum)

    def _by_boxes(self) -> None:
        """Boxes of pixels, each with all or a part of the channels."""
        f, plan = self.f, self.plan
        counts = [w.boxes for w in plan.maps]

        def decode(task: Value) -> tuple[Value, Value, list[Value]]:
            if plan.parts_first:
                run, part, *boxes = f.split(task, [plan.runs, plan.block_groups, *counts])
            else:
                run, *boxes, part = f.split(task, [plan.runs, *counts, plan.block_groups])
            return run, part, boxes

        with self.frame.items("second", plan.tasks) as task:
            run, part, boxes = decode(task)
            start = self._begin(boxes)
            share = -(-plan.blocks // plan.block_groups)
            first = f.mul(part, share)
            last = f.min(f.add(first, share), plan.blocks)
            first_group = f.mul(run, plan.run)
            last_group = f.min(f.add(first_group, plan.run), plan.groups)
            with f.loop(first_group, last_group) as group, f.loop(0, plan.chunks) as chunk:
                band = self._band(group, start, chunk)
                # What comes next: the next chunk, or group, or else the task that follows.
                next_run, _, next_boxes = decode(self.frame.following(task, plan.tasks))
                coming: list[Value] = [f.mul(next_run, plan.run), *next_boxes, 0]
                inner = [(plan.run, group, f.sub(last_group, 1), [f.add(group, 1), *boxes, 0])]
                inner.append((plan.chunks, chunk, plan.chunks - 1, [group, *boxes, f.add(chunk, 1)]))
                for count, number, end, instead in inner:
                    if count > 1:
                        more = f.test("slt", number, end)
                        coming = [f.choose(more, a, b) for a, b in zip(instead, coming, strict=True)]
                bases = self._bases(coming, group, start, first)
                with f.loop(first, last) as block:
                    place = f.mul(block, plan.stage) if plan.chunks > 1 else 0
                    self._block(group, block, chunk, start, band, place, f.sub(block, first), bases)

    def _by_blocks(self) -> None:
        """Blocks of channels, each with all boxes, a chunk after another: a thread packs the weights that it needs."""
        f, plan = self.f, self.plan
        with self.frame.items("first", plan.tasks) as task:
            group, block = f.split(task, [plan.groups, plan.blocks])
            with f.loop(0, plan.chunks) as chunk:
                weights, bias = self._weights(group, block, chunk)
                f.call(self.pack_weights, self.pointers["w"], weights, group, block, chunk)
                with f.when(f.test("eq", chunk, 0)):
                    _pack_bias(f, plan, self.given, self.pointers["bias"], bias, group, block)
                next_weights = self._next_weights(task, chunk) if plan.weights_apart else ""
                with f.loop(0, plan.boxes) as box:
                    counts = [w.boxes for w in plan.maps]
                    start = self._begin(f.split(box, counts))
                    band = self._band(group, start, chunk)
                    more = f.test("slt", box, plan.boxes - 1)
                    next_chunk = f.rem(f.add(chunk, 1), plan.chunks)
                    following = f.split(f.choose(more, f.add(box, 1), 0), counts)
                    bases = self._bases([group, *following, f.choose(more, chunk, next_chunk)], group, start, block)
                    if plan.weights_apart:
                        bases.append(f.at(next_weights, f.mul(box, plan.weights_apart), "i8"))
                    place = f.mul(box, plan.stage) if plan.chunks > 1 else 0
                    self._block(group, block, chunk, start, band, place, 0, bases)

    def _next_weights(self, task: Value, chunk: Value) -> str:
        """Where the weights lie that are packed next: of the next chunk, or else of a task that may follow."""
        f, plan = self.f, self.plan
        more = f.test("slt", chunk, plan.chunks - 1)
        following = f.choose(more, task, self.frame.following(task, plan.tasks))
        group, block = f.split(following, [plan.groups, plan.blocks])
        first = (group, f.mul(block, plan.block), f.choose(more, f.mul(f.add(chunk, 1), plan.chunk), 0))
        at = f.add(*(f.mul(n, s) for n, s in zip(first, plan.w_strides, strict=True)))
        return f.at(self.pointers["w"], at, self.given.storage)

    def _begin(self, boxes: list[Value]) -> list[Value]:
        """Begin with a box: where it starts, its pixels listed."""
        f, plan = self.f, self.plan
        start = [f.mul(b, w.box) for b, w in zip(boxes, plan.maps, strict=True)]
        f.call(self.tabulate, self.at["table"], *start)
        return start

    def _band(self, group: Value, start: list[Value], chunk: Value) -> str:
        """The input of a box: packed, or where it lies."""
        f, plan = self.f, self.plan
        channel = f.mul(chunk, plan.chunk)
        origin = f.add(f.mul(group, plan.in_channel[0]), f.mul(channel, plan.in_channel[1]))
        if self.pack_box is None:
            steps = zip(start, plan.maps, plan.packs, strict=True)
            shift = [f.mul(f.mul(s, w.in_stride), p.stride) for s, w, p in steps]
            return f.at(self.source, f.add(origin, *shift), self.given.storage)
        corner = [f.add(f.mul(s, w.in_stride), w.low) for s, w in zip(start, plan.maps, strict=True)]
        if plan.share is None:
            channels = f.min(f.sub(plan.given, channel), plan.chunk)
        else:
            channels = plan.share[0] * (plan.cout // plan.share[1])
        f.call(self.pack_box, f.at(self.source, origin, self.given.storage), self.at["band"], *corner, channels)
        return self.at["band"]

    def _bases(self, coming: list[Value], group: Value, start: list[Value], block: Value) -> list[str]:
        """What is prefetched: where the input that comes next begins, (group, boxes, chunk), and the results."""
        f, plan = self.f, self.plan
        if plan.prefetch is None:
            return []
        next_group, *boxes, chunk = coming
        channel = f.mul(chunk, plan.chunk)
        at = f.add(f.mul(next_group, plan.in_channel[0]), f.mul(channel, plan.in_channel[1]))
        for box, axis_map, packed in zip(boxes, plan.maps, plan.packs, strict=True):
            first = f.add(f.mul(f.mul(box, axis_map.box), axis_map.in_stride), axis_map.low + min(packed.offsets))
            at = f.add(at, f.mul(first, packed.stride))
        bases = [f.at(self.source, at, self.given.storage)]
        if not plan.stream and plan.fold is None:
            corner = [f.mul(f.mul(s, w.out_stride), w.out_step) for s, w in zip(start, plan.maps, strict=True)]
            channel_out = f.mul(block, plan.block * plan.out_channel[1])
            out_at = f.add(f.mul(group, plan.out_channel[0]), channel_out, *corner)
            bases.append(f.at(self.target, out_at, self.result.storage))
        return bases

    def _block(
        self, group: Value, block: Value, chunk: Value, start: list[Value], band: str, stage_at: Value, index: Value,
        bases: list[str],
    ) -> None:  # fmt: skip
        """One block of channels of a box: its tiles, phase by phase; after the last chunk, the results.

        `index` counts the blocks of a box, for what is prefetched.
        """
        f, plan, at = self.f, self.plan, self.at
        lanes = f.min(f.sub(plan.cout, f.mul(block, plan.block)), plan.block)
        count = f.min(f.sub(plan.cin, f.mul(chunk, plan.chunk)), plan.chunk)
        weights, bias = self._weights(group, block, chunk)
        out_channel = f.add(f.mul(group, plan.out_channel[0]), f.mul(f.mul(block, plan.block), plan.out_channel[1]))
        stage = f.at(at["stage"], stage_at, plan.sum)
        place = stage if plan.staged else f.at(self.target, out_channel, self.result.storage)
        if plan.share is not None:
            band = f.at(band, f.mul(block, plan.block // plan.share[1] * plan.share[0]), plan.sum)
        tables = at["table"]
        with f.loop(0, len(plan.phases)) as phase:
            range_ = f.at(tables, f.add(f.mul(phase, 3), 2 * plan.pixels), "i64")
            first_pixel, whole, last_pixel = (f.load(f.at(range_, i, "i64"), "i64", 8) for i in range(3))
            row = f.at(self.phases, f.mul(phase, PHASE), "i64")
            first, taps = (f.load(f.at(row, i, "i64"), "i64", 8) for i in range(2))
            mine = f.at(self.tap_table, f.mul(first, 2), "i64")
            for rows, (work, tail) in self.tiles.items():
                ends = (first_pixel, whole) if rows == plan.rows else (whole, last_pixel)
                with f.loop(*ends, rows) as pixel:
                    here = f.at(tables, pixel, "i64")
                    there = f.at(tables, f.add(pixel, plan.pixels), "i64")
                    fetched: tuple[str, ...] = ()
                    if plan.prefetch is not None:
                        each = busy_tiles(plan.maps, plan.rows)
                        call = f.add(f.mul(index, each), f.div(pixel, plan.rows))
                        fetched = slice_of(f, plan.prefetch, at["lines"], call, bases)
                    arguments = (band, weights, mine, taps, count, here, there, place, bias, chunk, lanes)
                    f.call_either(f.test("eq", block, plan.blocks - 1), tail, work, *arguments, *fetched)
        if self.finish is None:
            return
        with f.when(f.test("eq", chunk, plan.chunks - 1)):
            maps = list(zip(start, plan.maps, strict=True))
            left = [f.min(f.sub(w.out, f.mul(s, w.out_stride)), w.box * w.out_stride) for s, w in maps]
            if plan.fold is not None:
                f.call(self.finish, stage, self.target, *start, *left)
            else:
                corner = [f.mul(f.mul(s, w.out_stride), w.out_step) for s, w in maps]
                to = f.at(self.target, f.add(out_channel, *corner), self.result.storage)
                f.call(self.finish, stage, to, *left, lanes)


def _width(f: Function, plan: Gather, block: Value) -> Value:
    """Lanes of a block of channels in the packed weights."""
    if not plan.tail:
        return plan.block
    return f.choose(f.test("eq", block, plan.blocks - 1), plan.tail * plan.lanes, plan.block)


def _tabulate(m: Module, plan: Gather, phases: str) -> Function:
    """A function that lists the pixels of a box, phase by phase: (table, start of each axis).

    First where each reads in the band, then where it writes, then of each phase: its first pixel, where its short tile
    begins and its end. What is left of a phase's last tile repeats its last pixel: it computes and writes the same
    values again.
    """
    f = m.function("tabulate", ["p:table", "i:s0", "i:s1", "i:s2", "i:s3"])
    table, *start = f.args
    if plan.in_place:
        read = [w.packed_stride * p.stride for w, p in zip(plan.maps, plan.packs, strict=True)]
    else:
        steps = entry_steps(plan.packs)
        read = [w.packed_stride * s * plan.pitch for w, s in zip(plan.maps, steps, strict=True)]
    write = [w.out_step for w in plan.maps]
    origin: Value = 0
    if plan.staged:
        write = [plan.block] * 4
        for i in (2, 1, 0):
            write[i] = write[i + 1] * plan.maps[i + 1].box * plan.maps[i + 1].out_stride
    else:
        for axis_map, s in zip(plan.maps, start, strict=True):
            origin = f.add(origin, f.mul(f.mul(s, axis_map.out_stride), axis_map.out_step))
    position = f.variable("i64", 0)
    with f.loop(0, len(plan.phases)) as phase:
        row = f.at(phases, f.add(f.mul(phase, PHASE), 2), "i64")
        residues, starts, stops = (
            [f.load(f.at(row, 4 * part + axis, "i64"), "i64", 8) for axis in range(4)] for part in range(3)
        )
        first = origin
        low: list[Value] = []
        high: list[Value] = []
        for axis, axis_map in enumerate(plan.maps):
            first = f.add(first, f.mul(residues[axis], write[axis]))
            low.append(f.max(f.sub(starts[axis], start[axis]), 0))
            high.append(f.min(f.sub(stops[axis], start[axis]), axis_map.box))
        begin = f.get(position, "i64")
        with ExitStack() as stack:
            reading: Value = 0
            writing: Value = first
            for axis, axis_map in enumerate(plan.maps):
                q = stack.enter_context(f.loop(low[axis], high[axis]))
                reading = f.add(reading, f.mul(q, read[axis]))
                writing = f.add(writing, f.mul(q, write[axis] * axis_map.out_stride))
            index = f.get(position, "i64")
            f.store(reading, f.at(table, index, "i64"), "i64", 8)
            f.store(writing, f.at(table, f.add(index, plan.pixels), "i64"), "i64", 8)
            f.set(position, "i64", f.add(index, 1))
        total = f.get(position, "i64")
        count = f.sub(total, begin)
        # The last tile is a short one if that holds what is left; and then it is none if nothing is.
        whole = f.mul(f.div(f.add(count, plan.rows - 1 - plan.short), plan.rows), plan.rows)
        size = f.choose(f.test("slt", whole, count), f.add(whole, plan.short), whole)
        whole, end = f.add(begin, whole), f.add(begin, size)
        range_ = f.at(table, f.add(f.mul(phase, 3), 2 * plan.pixels), "i64")
        for i, number in enumerate((begin, whole, end)):
            f.store(number, f.at(range_, i, "i64"), "i64", 8)
        with f.loop(total, end) as spare:
            last = f.sub(total, 1)
            for part in (0, plan.pixels):
                value = f.load(f.at(table, f.add(last, part), "i64"), "i64", 8)
                f.store(value, f.at(table, f.add(spare, part), "i64"), "i64", 8)
        f.set(position, "i64", end)
    return f


def _tiles(m: Module, plan: Gather, out: Elements, rows: int) -> tuple[Function, Function | None]:
    """The functions of tiles of a height: for whole blocks of channels, and for a last one that is narrower."""
    work = _tile(m, f"tile{rows}", plan, out, rows, plan.vectors)
    return work, _tile(m, f"tile{rows}_tail", plan, out, rows, plan.tail) if plan.tail else None


def _tile(m: Module, name: str, plan: Gather, out: Elements, height: int, vectors: int) -> Function:
    """A function that computes one tile of so many pixels and vectors of channels.

    (band, weights, taps that are met, how many, channels, reads, writes, place of the results, bias, chunk, lanes).
    Assumes: weights are packed (tap, channel, lanes) and aligned; the band needs no bounds.
    """
    names = ["p:band", "p:weights", "p:tap_table", "i:taps", "i:channels", "p:reads", "p:writes", "p:place", "p:bias"]
    names += ["i:chunk", "i:lanes", *(["p:base", "p:offsets"] if plan.prefetch else [])]
    f = m.function(name, names)
    band, weights, tap_table, taps, channels, reads, writes, place, bias, chunk, lanes, *fetched = f.args
    fetch = None if plan.prefetch is None else Fetch(f, plan.prefetch, *fetched)
    item = size_of(plan.sum)
    align = min(LINE, item * plan.lanes & -(item * plan.lanes))
    out_type = plan.sum if plan.staged else out.storage
    if plan.even:
        first = f.at(band, f.load(reads, "i64", 8), plan.unit)
        rows = [f.at(first, r * plan.step, plan.unit) for r in range(height)]
    else:
        rows = addresses(f, band, reads, height, plan.unit)
    columns = range(vectors)

    def from_bias() -> list[str]:
        return [f.load(f.at(bias, v * plan.lanes, plan.sum), out.vector, align) for v in columns]

    tile = Tile(f, [["zeroinitializer"] * vectors for _ in range(height)], plan.lanes, plan.sum)
    width = vectors * plan.lanes

    def begin() -> None:
        if plan.bias is None and plan.chunks == 1:
            tile.set([["zeroinitializer"] * vectors] * height)
            return
        branch = f.either(f.test("eq", chunk, 0)) if plan.chunks > 1 else None
        tile.set([from_bias()] * height)
        if branch is not None:
            f.otherwise(branch)
            so_far = addresses(f, place, writes, height, plan.sum)
            tile.set(
                [[f.load(f.at(at, v * plan.lanes, plan.sum), out.vector, align) for v in columns] for at in so_far]
            )
            f.join(branch)

    def run(fetch: Fetch | None, masks: str) -> None:
        with f.loop(0, taps) as tap:
            tap_row = f.at(tap_table, f.mul(tap, 2), "i64")
            number, entry = (f.load(f.at(tap_row, i, "i64"), "i64", 8) for i in range(2))
            here = moved(f, rows, entry, plan.unit)
            if plan.share is not None:
                inputs, outputs = plan.share
                if fetch is not None:
                    fetch.step()
                tile.add_lane_groups(
                    here, f.at(weights, f.mul(number, inputs * width), plan.sum), align, inputs, outputs
                )
                return
            count = f.div(channels, plan.width)
            panel = f.at(weights, f.mul(f.mul(number, count), width), plan.sum)
            add = tile.add_pairs if plan.pairs else tile.add_broadcast
            marks = [f.at(masks, f.add(f.mul(number, width), v * plan.lanes), "i64") for v in columns] if masks else []
            tile.masks = [out.marked(f, at) for at in marks]

            def step(c: Value) -> None:
                add(moved(f, here, f.mul(c, plan.width), plan.unit), f.at(panel, f.mul(c, width), plan.sum), align)

            if plan.unrolled:
                for c in range(plan.cin // plan.width):
                    if fetch is not None and c < fetch.prefetch.steps_needed(len(plan.taps)):
                        fetch.step()
                    step(c)
                return
            with f.loop(0, count) as each:
                if fetch is not None:
                    fetch.step()
                step(each)

    begin()
    run(fetch, "")
    if plan.fold is not None:
        # A zero that stands for no weight makes NaN of an infinity: then once more, with the lanes that have the tap.
        each = plan.cout
        padded = [
            code
            for i in range(0, len(plan.fold.table), each)
            for code in (*plan.fold.table[i : i + each], *[0] * (width - each))
        ]
        with f.when(tile.may_be_nan()):
            begin()
            run(None, m.table(f"{name}_masks", padded))
            tile.masks = []
    values_ = tile.values()
    places = addresses(f, place, writes, height, out_type)
    if plan.staged:
        for row, address in zip(values_, places, strict=True):
            for v, value in enumerate(row):
                f.store(value, f.at(address, v * plan.lanes, plan.sum), out.vector, align)
        return f
    Results(out, plan.accumulate, plan.stream).store_rows(f, values_, places, lanes)
    return f


def _pack_weights(m: Module, plan: Gather, n: Elements, tap_weights: str) -> Function:
    """A function that packs the weights of one block of channels, for a chunk: (weights, panel, group, block, chunk).

    The panel is [tap][step over the channels in][block]; a step is a channel, or a pair of them. Lanes beyond the last
    channel hold anything.
    """
    f = m.function("pack_weights", ["p:from", "p:to", "i:group", "i:block", "i:chunk"])
    source, panel, group, block, chunk = f.args
    group_step, out_step, in_step = plan.w_strides
    base = f.at(source, f.mul(group, group_step), n.storage)
    first = f.mul(block, plan.block)
    width = _width(f, plan, block)
    last = f.sub(f.sub(plan.cout, 1), first)
    square = transposable(plan.lanes) and plan.share is None and plan.fold is None
    square = square and plan.given == plan.cin
    folded = "" if plan.fold is None else m.table("folded", plan.fold.table)
    turn = _turn_weights(m, plan, n) if square and in_step == 1 and plan.cin > 1 else None
    rows = square and out_step == 1 and plan.cout > 1
    together = len(plan.taps) > 1 and plan.taps == tuple(range(len(plan.taps)))

    channel = f.mul(chunk, plan.chunk)
    count = f.div(f.min(f.sub(plan.cin, channel), plan.chunk), plan.width)
    if square and turn is None and not rows and together:
        taps = _turn_taps(m, plan, n)

        def turn_one(lane: Value, c: Value) -> None:
            inner = f.add(channel, f.mul(c, plan.width))
            corner = f.add(f.mul(f.add(first, f.min(lane, last)), out_step), f.mul(inner, in_step))
            place = f.at(panel, f.add(f.mul(c, width), lane), plan.sum)
            f.call(taps, f.at(base, corner, n.storage), place, f.max(f.sub(last, lane), 0), f.mul(count, width))

        # In the order in which weights lie.
        if out_step > in_step:
            with f.loop(0, width, plan.lanes) as lane, f.loop(0, count) as c:
                turn_one(lane, c)
        else:
            with f.loop(0, count) as c, f.loop(0, width, plan.lanes) as lane:
                turn_one(lane, c)
        return f
    if turn is None and not rows:
        with f.loop(0, count) as c, f.loop(0, len(plan.taps)) as tap:
            offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
            row = f.at(panel, f.mul(f.add(f.mul(tap, count), c), width), plan.sum)
            inner = f.add(channel, f.mul(c, plan.width))
            at = f.at(base, f.add(offset, f.mul(inner, in_step)), n.storage)
            own = "" if plan.fold is None else f.at(folded, f.mul(tap, plan.cout), "i64")
            _scatter_weights(f, plan, n, at, row, first, last, width, inner, own)
        return f
    with f.loop(0, len(plan.taps)) as tap:
        offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
        tap_panel = f.at(panel, f.mul(f.mul(tap, count), width), plan.sum)
        if turn is not None:
            with f.loop(0, width, plan.lanes) as lane, f.loop(0, count, plan.lanes) as c:
                # Lanes wholly beyond the last channel repeat it.
                inner = f.add(channel, f.mul(c, plan.width))
                corner = f.add(f.mul(f.add(first, f.min(lane, last)), out_step), offset, inner)
                place = f.at(tap_panel, f.add(f.mul(c, width), lane), plan.sum)
                left = f.max(f.sub(last, lane), 0)
                there = f.min(f.sub(count, c), plan.lanes)
                f.call(turn, f.at(base, corner, n.storage), place, left, there, width)
        else:
            with f.loop(0, count) as c:
                inner = f.add(channel, f.mul(c, plan.width))
                at = f.at(base, f.add(offset, first, f.mul(inner, in_step)), n.storage)
                _copy_weights(f, plan, n, at, f.at(tap_panel, f.mul(c, width), plan.sum), last, width)
    return f


def _scatter_weights(
    f: Function, plan: Gather, n: Elements, source: str, row: str, first: Value, last: Value, width: Value,
    inner: Value, folded: str,
) -> None:  # fmt: skip
    """One step of a panel from weights that lie anyhow, an element at a time; `inner` is its first channel in."""
    group_step, out_step, in_step = plan.w_strides
    n = Elements(plan.dtype, plan.lanes, plan.unit, plan.converts_f16)
    nothing = "0" if n.sum == "i16" else "0.0"
    with f.loop(0, width) as lane:
        channel = f.add(first, f.min(lane, last))
        at: Value = f.mul(channel, out_step)
        if plan.share is not None:
            group, own = f.split(channel, [0, plan.share[1]])
            at = f.add(f.mul(group, group_step), f.mul(own, out_step))
        there = ""
        if folded:
            coded = f.load(f.at(folded, channel, "i64"), "i64", 8)
            there, at = f.test("ne", coded, 0), f.op(f"ashr i64 {coded}, 1")
        for j in range(plan.width):
            step: Value = j * in_step
            ok = there
            if j and plan.given < plan.cin:
                # The last channel of an odd number is paired with nothing.
                more = f.test("slt", f.add(inner, j), plan.given)
                step = f.choose(more, step, 0)
                ok = f.both(ok, more) if ok else more
            value = n.load_one(f, f.at(source, f.add(at, step), n.storage))
            if ok:
                value = f.op(f"select i1 {ok}, {n.sum} {value}, {n.sum} {nothing}")
            place = f.at(row, f.add(f.mul(lane, plan.width), j), n.sum)
            f.store(value, place, n.sum, size_of(n.sum))


def _copy_weights(f: Function, plan: Gather, n: Elements, source: str, row: str, last: Value, width: Value) -> None:
    """One step of a panel from weights whose wanted channels lie together."""
    whole = plan.cout % plan.lanes == 0
    with f.loop(0, width, plan.lanes) as lane:
        mask = None if whole else n.mask(f, f.sub(f.add(last, 1), lane))
        place = f.at(row, lane, plan.sum)
        if not plan.pairs:
            value = n.load(f, f.at(source, lane, n.storage), mask)
            f.store(value, place, n.vector, size_of(plan.sum))
        else:
            raw = Elements(plan.dtype, plan.lanes, "i16", plan.converts_f16)
            two = [raw.load(f, f.at(source, f.add(lane, j * plan.w_strides[2]), "i16"), mask) for j in range(2)]
            f.store(interleave(f, raw.vector, plan.lanes, *two), place, f"<{2 * plan.lanes} x i16>", 4)


def _turn_weights(m: Module, plan: Gather, n: Elements) -> Function:
    """A function that turns a square of weights whose channels in lie together: lanes by them become them by lanes.

    (tensor, panel, channels out left, how many channels in are there, elements between them in the panel). A pair of
    them turns as one number of 32 bits.
    """
    f = m.function("turn_weights", ["p:from", "p:to", "i:left", "i:count", "i:step"])
    source, to, left, count, step = f.args
    unit = Elements("f32" if plan.pairs else plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
    few = replace(unit, lanes=piece(plan.lanes, unit.storage), sum=unit.storage)
    out = [f.mul(f.min(left, i), plan.w_strides[1]) for i in range(plan.lanes)]
    # Squares lie far apart: the one of the next channels out is asked for meanwhile.
    # What is read is asked for at its end: it may begin in a line that is there already.
    further = plan.width * plan.lanes - 1 + plan.lanes * plan.w_strides[1]
    for at in out:
        f.prefetch(f.at(source, f.add(at, further), n.storage))

    def turn(first: Value, there: Value) -> None:
        """Turn so many channels in, no more than a few."""
        mask = few.window(f, 0, there)
        rows = [few.load(f, f.at(source, f.add(at, f.mul(first, plan.width)), n.storage), mask) for at in out]
        for i, row in enumerate(transpose_pieces(f, rows, unit.storage)):
            with nullcontext() if there == few.lanes else f.when(f.test("slt", i, there)):
                place = f.at(to, f.mul(step, f.add(first, i)), plan.sum)
                f.store(unit.widen(f, row, plan.lanes), place, n.vector, size_of(plan.sum))

    each_piece(f, count, few.lanes, turn)
    return f


def _turn_taps(m: Module, plan: Gather, n: Elements) -> Function:
    """A function that turns the weights of a step over channels in, whose taps lie together: lanes by taps become taps
    by lanes.

    (tensor, panel, channels out left, elements between taps in the panel).
    """
    f = m.function("turn_taps", ["p:from", "p:to", "i:left", "i:step"])
    source, to, left, step = f.args
    taps, (_, out_step, in_step) = len(plan.taps), plan.w_strides
    unit = Elements(plan.dtype, plan.lanes, plan.unit, plan.converts_f16)
    few = replace(unit, lanes=piece(plan.lanes, unit.storage), sum=unit.storage)
    there = plan.cout % plan.lanes == 0  # then all channels out are
    out = [f.mul(i if there else f.min(left, i), out_step) for i in range(plan.lanes)]
    members = [[f.add(at, j * in_step) for at in out] for j in range(plan.width)]
    # The next step is asked for meanwhile, at its end: it may begin in a line that is there already.
    for at in chain(*members):
        f.prefetch(f.at(source, f.add(at, plan.width * in_step + min(taps, plan.lanes) - 1), n.storage))

    def turn(first: Value, count: Value) -> None:
        """Turn so many taps of a piece."""
        mask = few.window(f, 0, count)
        turned = []
        for member in members:
            rows = [few.load(f, f.at(source, f.add(at, first), n.storage), mask) for at in member]
            turned.append(
                [unit.widen(f, row, plan.lanes) for row in transpose_pieces(f, rows, unit.storage)[: int(count)]]
            )
        for i, values in enumerate(zip(*turned, strict=True)):
            place = f.at(to, f.mul(f.add(first, i), step), plan.sum)
            if len(values) == 2:
                both = interleave(f, unit.vector, plan.lanes, *values)
                f.store(both, place, f"<{2 * plan.lanes} x i16>", 4)
            else:
                f.store(values[0], place, n.vector, size_of(plan.sum))

    each_piece(f, taps, few.lanes, turn)
    return f


def _unfold(m: Module, plan: Gather, n: Elements) -> Function:
    """A function that writes folded results: (stage, tensor, start and count of each axis)."""
    fold = plan.fold
    if fold is None:
        raise ValueError("this plan does not fold")
    names = [f"i:{kind}{axis}" for kind in "sn" for axis in range(4)]
    f = m.function("unfold", ["p:from", "p:to", *names])
    stage, to, *numbers = f.args
    extents = [w.box for w in plan.maps]
    with ExitStack() as stack:
        entry: Value = 0
        first: list[Value] = []
        for axis in range(4):
            e = stack.enter_context(f.loop(0, numbers[4 + axis]))
            entry = f.add(f.mul(entry, extents[axis]), e)
            first.append(f.mul(f.add(numbers[axis], e), fold.factors[axis]))
        source = f.at(stage, f.mul(entry, plan.block), plan.sum)
        base = f.at(to, f.add(*(f.mul(i, s) for i, s in zip(first, fold.steps, strict=True))), n.storage)
        for i, places in enumerate(product(*map(range, fold.factors))):
            inside = "true"
            for axis, place in enumerate(places):
                if place and fold.sizes[axis] % fold.factors[axis]:
                    ok = f.test("slt", f.add(first[axis], place), fold.sizes[axis])
                    inside = ok if inside == "true" else f.both(inside, ok)
            offset = sum(place * step for place, step in zip(places, fold.steps, strict=True))
            with f.when(inside):
                for c in range(fold.channels):
                    lane = f.at(source, i * fold.channels + c, plan.sum)
                    place_at = f.at(base, offset + c * fold.channel_step, n.storage)
                    value = f.load(lane, plan.sum, size_of(plan.sum))
                    Results(n, plan.accumulate).store_one(f, value, place_at)
    return f


def _pack_bias(f: Function, plan: Gather, n: Elements, bias: str, to: str, group: Value, block: Value) -> None:
    """Widen the bias of one block; without a bias, zeros if the sum is taken in parts."""
    if plan.bias is None and plan.chunks == 1:
        return
    first = f.mul(block, plan.block)
    with f.loop(0, plan.block) as lane:
        value = "0.0"
        if plan.bias is not None:
            channel = f.min(f.add(first, lane), plan.cout - 1)
            if plan.fold is not None:
                channel = f.rem(channel, plan.fold.channels)
            at = f.mul(f.add(f.mul(group, plan.cout), channel), plan.bias)
            value = n.load_one(f, f.at(bias, at, n.storage))
        f.store(value, f.at(to, lane, plan.sum), plan.sum, size_of(plan.sum))
