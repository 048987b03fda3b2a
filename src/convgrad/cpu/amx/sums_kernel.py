"""The kernel of w on tile registers: loops over tasks, boxes of positions, blocks of channels and taps.

A task sums one part of w over the boxes of one slice. If there are several slices, their sums are then added, in order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, prod

from ..emit.frame import Frame
from ..emit.nan_repair import NanRepair
from ..emit.slices import add_slices
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..pack.rows import zero
from ..pack.unpack import unpack
from ..plan.records import TapRanges
from .emulation import Emulation
from .pair import each_long_row
from .records import TileSums
from .sums_pack import Packers, Packing, packers
from .tiles import STEP, Side, TileCode, add_products, each_sum, emulation

PIECE = 16  # rows of sums that are added and written at a time, where sums are [row][tap][column]


@dataclass(frozen=True)
class _Functions:
    """The steps inside the loops, and the tables that these read."""

    inputs: Elements
    results: Results
    emulation: Emulation | None
    packers: Packers
    tile: Function
    last_tile: Function | None
    finish: Function
    repair: NanRepair | None
    tables: dict[str, str]


def write(plan: TileSums) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    kernel = _Kernel(plan, _functions(m, plan), Frame(m, plan.buffers, plan.sum))
    kernel.code.begin(kernel.functions.tables["registers"])
    with kernel.frame.items("first", plan.tasks) as task:
        kernel.sum_task(task)
    kernel.code.end()
    if plan.parts.slices > 1:
        kernel.frame.barrier()
        with kernel.frame.items("second", plan.units * kernel.pieces) as item:
            kernel.add_slices(*kernel.f.split(item, [plan.units, kernel.pieces]))
    return kernel.frame.end()


def _functions(m: Module, plan: TileSums) -> _Functions:
    """Write the functions of a plan."""
    across = ceil(plan.parts.columns / plan.lanes) % plan.vectors
    inputs, results = _elements(plan)
    moved = replace(inputs, sum=inputs.storage)
    clear = zero(m, moved)
    emulated = emulation(m, plan.split.dtype, plan.code.emulated)
    return _Functions(
        inputs, results, emulated, packers(m, plan, moved, clear), _tile(m, plan, emulated, plan.vectors),
        _tile(m, plan, emulated, across) if across else None, unpack(m, results, plan.staging),
        _repair(m, plan, inputs) if plan.repairs else None,
        _tables(m, plan),
    )  # fmt: skip


def _tables(m: Module, plan: TileSums) -> dict[str, str]:
    """What the loops look up."""
    box = plan.box
    values = {
        "registers": plan.tiles.configuration(),
        "entries": [entry * box.x_entry for entry in box.entries],
        "runs": [start for run in box.runs for start in run],
        "weights": plan.weights,
    }
    if plan.repairs and box.x_paired:
        values["starts"] = plan.ranges.starts
    return {name: m.table(name, content) for name, content in values.items()}


def _elements(plan: TileSums) -> tuple[Elements, Results]:
    """How x and y are read and w is written."""
    sides = plan.sides
    inputs = Elements(sides.dtype, plan.lanes, plan.sum, sides.converts_f16)
    rounds = plan.code.rounds_bf16 and not sides.accumulate
    return inputs, Results(replace(inputs, dtype=sides.out_dtype, rounds_bf16=rounds), sides.accumulate)


def _repair(m: Module, plan: TileSums, inputs: Elements) -> NanRepair:
    """Code that sums again what is NaN: lanes are channels of the columns, all with the same channel of the rows.

    If these are of y, it is told that each tap begins at the first x: `_repair_sums` adds where it does.
    """
    ranges, step = plan.ranges, plan.sides.column_channel[1]
    if plan.box.x_paired:
        ranges = TapRanges((0,) * len(ranges.starts), ranges.valid, ranges.y_steps, ranges.x_steps)
    vectors = step == 1 and plan.sides.channels[1] % plan.lanes == 0
    return NanRepair(m, ranges, inputs, (1, plan.lanes), (1 if vectors else 0, step), 0)


def _tile(m: Module, plan: TileSums, emulated: Emulation | None, across: int) -> Function:
    """A function that adds the products of a box to a block of so many tiles side by side, for one tap: (rows, pairs,
    sums, whether they begin, long rows along each axis, steps of one, and a file of registers).
    """
    block, box, item = plan.tiles, plan.box, plan.item
    counts = [f"i:n{i}" for i in range(box.flat)]
    file = ["p:file"] if emulated else []
    f = m.function(f"tile_{across}", ["p:rows", "p:pairs", "p:sums", "i:fresh", *counts, "i:steps", *file])
    rows, pairs, sums, fresh, *rest = f.args
    code = TileCode(f, plan.split.dtype, emulated, rest[-1])
    row = plan.row_step * item

    def place(i: int, j: int) -> str:
        return f.at(sums, i * block.rows * plan.row_step + j * plan.lanes, plan.sum)

    branch = f.either(f.test("ne", fresh, 0))
    each_sum(block, across, lambda register, i, j: code.clear(register))
    f.otherwise(branch)
    each_sum(block, across, lambda register, i, j: code.load(register, place(i, j), row))
    f.join(branch)
    with ExitStack() as stack:
        entry, long_row = each_long_row(f, box, rest[: box.flat], stack)
        of_x, of_y = (entry, box.x_entry), (long_row, box.y_row)
        of_rows, of_pairs = (of_y, of_x) if box.x_paired else (of_x, of_y)
        left_row = f.at(rows, f.mul(*of_rows), "i16")
        right_row = f.at(pairs, f.mul(*of_pairs), plan.sum)
        step = stack.enter_context(f.loop(0, rest[box.flat]))
        left = f.at(left_row, f.mul(step, STEP), "i16")
        right = f.at(right_row, f.mul(step, box.pair_steps.step), plan.sum)
        add_products(code, block, across, *_factors(f, plan, left, right), plan.split.products)
    each_sum(block, across, lambda register, i, j: code.store(register, place(i, j), row))
    return f


def _factors(f: Function, plan: TileSums, left: str, right: str) -> tuple[Side, Side]:
    """Rows and pairs of a step, given where the first ones are. Those of the next step are prefetched if the plan says
    so.
    """
    pitch, pairs = plan.box.row_pitch, plan.box.pair_steps
    line = pairs.pair * plan.item
    ahead = (2 * STEP, pairs.step * plan.item) if plan.fetched_step else (0, 0)
    return (
        Side(lambda i, n: f.at(left, i * plan.tiles.rows * pitch + n * plan.row_piece, "i16"), 2 * pitch, ahead[0]),
        Side(lambda j, n: f.at(right, j * pairs.beside + n * plan.pair_piece // 2, plan.sum), line, ahead[1]),
    )


@dataclass(frozen=True)
class _Place:
    """What a task sums: its group, and the first channels in rows and in columns, and how many of each there are."""

    group: Value
    row: Value
    column: Value
    rows: Value
    columns: Value


class _Kernel:
    """The kernel while its loops are written."""

    def __init__(self, plan: TileSums, functions: _Functions, frame: Frame) -> None:
        self.plan, self.functions, self.frame = plan, functions, frame
        self.f, self.at = frame.f, frame.at
        self.file = [self.at["registers"]] if functions.emulation else []
        self.code = TileCode(self.f, plan.split.dtype, functions.emulation, "".join(self.file))

    @property
    def pieces(self) -> int:
        """Pieces in which the sums of a part are added and written."""
        return ceil(self.plan.parts.rows / PIECE) if self.plan.parts.taps_inside else len(self.plan.weights)

    def _place(self, unit: Value) -> _Place:
        f, parts, sides = self.f, self.plan.parts, self.plan.sides
        group, row_part, column_part = f.split(unit, [sides.groups, parts.row_parts, parts.column_parts])
        row, column = f.mul(row_part, parts.rows), f.mul(column_part, parts.columns)
        rows, columns = f.min(f.sub(sides.channels[0], row), parts.rows), f.sub(sides.channels[1], column)
        return _Place(group, row, column, rows, f.min(columns, parts.columns))

    # Sums.

    def sum_task(self, task: Value) -> None:
        """Sum over the boxes of a slice; if it is the only one, write the sums."""
        f, plan, box, slices = self.f, self.plan, self.plan.box, self.plan.parts.slices
        unit, part = f.split(task, [plan.units, slices])
        here = self._place(unit)
        sums = self.at["accumulators"]
        if slices > 1:
            sums = f.at(self.at["sums"], f.mul(task, plan.part_sums), plan.sum)
        first, last = (f.div(f.mul(p, box.number), slices) for p in (part, f.add(part, 1)))
        with f.loop(first, last) as number:
            boxes = f.split(number, [a.boxes for a in box.axes])
            start = [f.mul(b, a.box) for b, a in zip(boxes, box.axes, strict=True)]
            counts = [f.min(f.sub(a.out, s), a.box) for s, a in zip(start, box.axes, strict=True)]
            corner, functions = self._corner(here), self.functions
            packing = Packing(f, self.at, plan, functions.packers, functions.tables["runs"], start, counts)
            packing.pack(corner, (here.rows, here.columns))
            self._sum_box(sums, f.choose(f.test("eq", number, first), 1, 0), counts)
        if slices == 1:
            with f.loop(0, self.pieces) as piece:
                self._write(here, sums, piece)

    def _corner(self, here: _Place) -> tuple[str, str]:
        """Where the first channels of a part are, in the tensor of the rows and in that of the columns."""
        f, sides, storage = self.f, self.plan.sides, self.functions.inputs.storage
        places = []
        rows, columns = "yx" if sides.swapped else "xy"
        for name, first, step in ((rows, here.row, sides.row_channel), (columns, here.column, sides.column_channel)):
            at = f.add(f.mul(here.group, step[0]), f.mul(first, step[1]))
            places.append(f.at(self.frame.tensors[name], at, storage))
        return places[0], places[1]

    def _sum_box(self, sums: str, fresh: Value, counts: list[Value]) -> None:
        """Add the products of a box to all sums of a part: block by block, tap by tap."""
        f, plan, box = self.f, self.plan, self.plan.box
        flat, extents, blocks = box.flat, box.extents, ceil(plan.parts.columns / plan.block)
        row = f.add(1, *(f.mul(f.sub(counts[i], 1), prod(extents[i + 1 :])) for i in range(flat, len(counts))))
        steps = f.div(f.add(row, STEP - 1), STEP)
        with (
            f.loop(0, blocks) as column,
            f.loop(0, plan.row_room, plan.rows) as r,
            f.loop(0, len(plan.weights)) as tap,
        ):
            entry = f.load(f.at(self.functions.tables["entries"], tap, "i64"), "i64", 8)
            of_x, of_y = (self.at["x"], entry), (self.at["y"], 0)
            (rows, row_start), (pairs, pair_start) = (of_y, of_x) if box.x_paired else (of_x, of_y)
            left = f.at(rows, f.add(f.mul(r, box.row_pitch), row_start), "i16")
            first = f.mul(column, plan.block)
            right = f.at(pairs, f.add(f.mul(first, box.pair_steps.channel), pair_start), plan.sum)
            to = f.at(sums, f.add(f.mul(tap, plan.tap_step), f.mul(r, plan.row_step), first), plan.sum)
            is_last = f.test("eq", column, blocks - 1)
            tile, last = self.functions.tile, self.functions.last_tile
            f.call_either(is_last, last, tile, left, right, to, fresh, *counts[:flat], steps, *self.file)

    # Results.

    def add_slices(self, unit: Value, piece: Value) -> None:
        """Add the sums of all slices for one piece of a part, in order, and write them."""
        f, plan = self.f, self.plan
        sums = f.at(self.at["sums"], f.mul(unit, plan.parts.slices * plan.part_sums), plan.sum)
        size = PIECE * plan.row_step if plan.parts.taps_inside else plan.tap_step
        with f.loop(0, f.min(size, f.sub(plan.part_sums, f.mul(piece, size))), plan.lanes) as i:
            at = f.add(f.mul(piece, size), i)
            add_slices(f, self.functions.inputs, sums, at, plan.parts.slices, plan.part_sums)
        self._write(self._place(unit), sums, piece)

    def _write(self, here: _Place, sums: str, piece: Value) -> None:
        """Write a piece of the sums of a part: some rows of all taps, or all rows of a tap."""
        f, plan, sides = self.f, self.plan, self.plan.sides
        group, row_step, column_step = sides.w_channel
        at = f.add(f.mul(here.group, group), f.mul(here.row, row_step), f.mul(here.column, column_step))
        if plan.parts.taps_inside:
            first = f.mul(piece, PIECE)
            rows = f.min(f.sub(here.rows, first), PIECE)
            source = f.at(sums, f.mul(first, plan.row_step), plan.sum)
            at = f.add(at, f.mul(first, row_step))
            taps: tuple[Value, int] = (0, len(plan.weights))
            counts = [1, 1, rows, len(plan.weights)]
        else:
            first, rows = 0, here.rows
            source = f.at(sums, f.mul(piece, plan.tap_step), plan.sum)
            at = f.add(at, f.load(f.at(self.functions.tables["weights"], piece, "i64"), "i64", 8))
            taps, counts = (piece, 1), [1, 1, 1, rows]
        with f.when(f.test("sgt", rows, 0)):
            if self.functions.repair is not None:
                self._repair_sums(here, source, (first, rows), taps)
            to = f.at(self.frame.tensors["w"], at, self.functions.results.elements.storage)
            f.call(self.functions.finish, source, to, *counts, here.columns)

    def _repair_sums(self, here: _Place, source: str, rows: tuple[Value, Value], taps: tuple[Value, int]) -> None:
        """Sum again what is NaN of some rows and taps, each the first and how many."""
        f, plan, repair, storage = self.f, self.plan, self.functions.repair, self.functions.inputs.storage
        if repair is None:
            raise ValueError("nothing of this plan is to be repaired")
        row, column = self._corner(here)
        with f.loop(0, rows[1]) as r, f.loop(0, taps[1]) as t, f.loop(0, here.columns, plan.lanes) as c:
            place = f.at(source, f.add(f.mul(r, plan.row_step), f.mul(t, plan.tap_step), c), plan.sum)
            row_at = f.at(row, f.mul(f.add(rows[0], r), plan.sides.row_channel[1]), storage)
            column_at = f.at(column, f.mul(c, plan.sides.column_channel[1]), storage)
            left, tap = f.min(f.sub(here.columns, c), plan.lanes), f.add(taps[0], t)
            if plan.box.x_paired:
                start = f.load(f.at(self.functions.tables["starts"], tap, "i64"), "i64", 8)
                column_at = f.at(column_at, start, storage)
            repair.repair(f, row_at, column_at, tap, place, left)
