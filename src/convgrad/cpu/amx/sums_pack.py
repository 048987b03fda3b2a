"""Boxes of x and y, packed as tiles of w read them: one side in rows of positions, the other in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod

from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.pieces import Pieces
from ..pack.box import PackBox, Packer, Pairing
from ..pack.rows import pack_box, zero
from .pair import end_rows, pair_y, transpose_x, transpose_y
from .pieces import split_rows, transpose_rows
from .records import TileSums
from .split import AHEAD
from .tiles import STEP

COPIES = (Packer.ROWS, Packer.COPY_ROWS, Packer.COPY_PIXELS)


@dataclass(frozen=True)
class Packers:
    """The functions that pack."""

    storage: str
    clear: Function
    pack_x: Function
    end_x: Function | None  # makes rows of what was packed, or ends rows that were packed as such; None: pairs are of x
    split_x: Function | None  # splits rows that were packed as such
    pack_y: Function | None  # None: positions are paired as they lie
    end_y: Function  # makes pairs, or rows, or ends rows


def packers(m: Module, plan: TileSums, moved: Elements, clear: Function) -> Packers:
    """Write the functions that pack: `moved` are elements as they are, and `clear` clears them."""
    box = plan.box
    wide = replace(moved, lanes=STEP, ahead=0 if plan.split.whole else AHEAD)  # whole lines are copied

    def pack(of: PackBox) -> Function:
        return pack_box(m, wide if of.packer in COPIES else moved, of, clear)

    return Packers(
        moved.storage, clear, pack(box.x_pack), *_end_x(m, plan, moved),
        None if box.y_pack is None else pack(box.y_pack), _end_y(m, plan, moved, clear),
    )  # fmt: skip


def _end_x(m: Module, plan: TileSums, moved: Elements) -> tuple[Function | None, Function | None]:
    """The functions that make of packed x what tiles read."""
    box, how = plan.box, plan.split
    if box.x_paired:
        return None, None
    if not box.row_packed:
        return transpose_x(m, box) if how.whole else transpose_rows(m, _pieces(plan, plan.row_piece), box), None
    last = None if how.whole else split_rows(m, replace(_pieces(plan, plan.row_piece), lanes=STEP), box)
    return end_rows(m, moved, box.row_pitch, len(box.runs) * box.run_entries, box.row_pitch), last


def _end_y(m: Module, plan: TileSums, moved: Elements, clear: Function) -> Function:
    """The function that does so for y."""
    box = plan.box
    if box.x_paired:
        return end_rows(m, moved, box.row_pitch, box.places, box.long_row) if box.row_packed else transpose_y(m, box)
    if plan.split.whole:
        return pair_y(m, moved, box, clear)
    pieces = replace(_pieces(plan, plan.pair_piece), ahead=AHEAD if box.y_pack is None else 0)
    return pair_y(m, pieces, box, zero(m, pieces, "zero_pieces"))


def _pieces(plan: TileSums, step: int) -> Pieces:
    """How numbers are split, whose pieces then lie a step apart."""
    sides, how = plan.sides, plan.split
    return Pieces(
        sides.dtype, plan.lanes, "bfloat", sides.converts_f16, plan.code.splits_bf16, 0, how.pieces, step, how.rounds
    )  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """A box while it is packed."""

    f: Function
    at: Mapping[str, str]  # buffers
    plan: TileSums
    packers: Packers
    runs: str  # the table of them
    start: list[Value]  # along each axis
    counts: list[Value]  # of positions

    def pack(self, tensors: tuple[str, str], channels: tuple[Value, Value]) -> None:
        """Both sides: the tensor of the rows and that of the columns, from the first channel on, and how many channels
        of each.
        """
        (row, column), (rows, columns) = tensors, channels
        if self.plan.box.x_paired:
            self._pair_x(column, columns)
            self._pack_rows_of_y(row, rows)
        else:
            self._pack_x(row, rows)
            self._pack_y(column, columns)

    def _pack_x(self, x: str, rows: Value) -> None:
        """Rows of a box of x: packed as such, or packed and transposed."""
        f, box, packers = self.f, self.plan.box, self.packers
        storage, runs = packers.storage, len(box.runs)
        if packers.end_x is None:
            raise ValueError("this plan has no rows of x")
        to = self.at["x" if box.row_packed and packers.split_x is None else "x_raw"]
        pitch = 1 if box.row_packed else box.x_pack.pitch
        with f.loop(0, runs) as run:
            corner = self._corner_of_run(run)
            f.call(packers.pack_x, x, f.at(to, f.mul(run, box.run_entries * pitch), storage), *corner, rows)
        if box.row_packed:
            f.call(packers.end_x, to, rows)
            if packers.split_x is not None:
                f.call(packers.split_x, to, self.at["x"], rows)
            return
        entries = runs * box.run_entries
        f.call(packers.clear, f.at(to, entries * pitch, storage), (box.row_pitch - entries) * pitch)
        f.call(packers.end_x, to, self.at["x"])

    def _corner_of_run(self, run: Value) -> list[Value]:
        """The coordinates of x where a run of a box begins."""
        f, box = self.f, self.plan.box
        table = f.at(self.runs, f.mul(run, len(self.start)), "i64")
        return [
            f.add(f.mul(s, a.in_stride), f.load(f.at(table, i, "i64"), "i64", 8))
            for i, (s, a) in enumerate(zip(self.start, box.axes, strict=True))
        ]

    def _pair_x(self, x: str, columns: Value) -> None:
        """Pairs of entries of a box of x, a block of channels after another, and zeros behind the last one."""
        f, box, packers, kind = self.f, self.plan.box, self.packers, self.plan.sum
        raw = [self.at["x_raw"]] if box.x_pack.pairing is Pairing.COPY else []
        with f.loop(0, columns, box.pair_block) as c:
            source = f.at(x, f.mul(c, box.x_pack.channel_step), packers.storage)
            to = f.at(self.at["x"], f.mul(c, box.pair_steps.channel), kind)
            channels = f.min(f.sub(columns, c), box.pair_block)
            with f.loop(0, len(box.runs)) as run:
                place = f.at(to, f.mul(run, box.run_entries * box.x_entry), kind)
                f.call(packers.pack_x, source, place, *self._corner_of_run(run), channels, *raw)
            beyond = 2 * (box.pairs - box.x_pairs) * box.pair_pitch
            f.call(packers.clear, f.at(to, box.x_pairs * box.pair_pitch, kind), beyond)

    def _pack_rows_of_y(self, y: str, rows: Value) -> None:
        """Rows of positions of a box of y, one long row after another."""
        f, box, packers = self.f, self.plan.box, self.packers
        storage = packers.storage
        if packers.pack_y is None:
            raise ValueError("rows of y are packed")
        with ExitStack() as stack:
            first = list(self.start)
            number: Value = 0
            for i in range(box.flat):
                q = stack.enter_context(f.loop(0, self.counts[i]))
                first[i] = f.add(self.start[i], q)
                number = f.add(number, f.mul(q, prod(box.sizes[i + 1 : box.flat])))
            to = f.at(self.at["y"], f.mul(number, box.y_row), storage)
            packed = to if box.row_packed else self.at["y_raw"]
            f.call(packers.pack_y, y, packed, *first, rows)
            f.call(packers.end_y, packed, rows if box.row_packed else to)

    def _pack_y(self, y: str, columns: Value) -> None:
        """Pairs of positions of a box of y."""
        f, box, packers = self.f, self.plan.box, self.packers
        if packers.pack_y is None:
            at = f.add(*(f.mul(s, step) for s, step in zip(self.start, box.y_steps, strict=True)))
            source = f.at(y, at, packers.storage)
        else:
            source = self.at["y_raw"]
            f.call(packers.pack_y, y, source, *self.start, columns)
        f.call(packers.end_y, source, self.at["y"], *self.counts, columns)
