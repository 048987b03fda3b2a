"""Packers: which one takes a box, and that each of them makes of it what its description says."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest

from convgrad.cpu.compile import jit
from convgrad.cpu.emit.frame import Frame
from convgrad.cpu.emit.store import Results
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.ir.convert import Elements
from convgrad.cpu.pack.box import PackBox, Packer, Pairing, packer
from convgrad.cpu.pack.rows import pack_box, zero
from convgrad.cpu.pack.unpack import Staging, unpack, unpacker
from convgrad.cpu.plan.records import Packed
from convgrad.cpu.plan.workspace import Buffer
from convgrad.cpu.threads import team

HOST = jit.host()
LANES = 4
IMAGES, HEIGHT, WIDTH = 2, 5, 10
ROWS, COLUMNS = 4, 14  # of the box, which begins a row above the image, and is wider
FLOATS = Elements("f32", LANES, "float", False)
BOX = PackBox("pack", (), 1, 0)  # the rest is filled in
WORDS = Elements("bf16", LANES, "i16", False)  # copied as they are


@dataclass(frozen=True)
class Case:
    """A box of an image, and the packer that it is meant for."""

    packer: Packer
    channels: int
    layout: str  # of the image: "chw" or "hwc"
    first: int = -2  # the column that the box begins with
    step: int = 1  # columns between pixels
    known: bool = True
    pitch: int = 0  # if it is not the channels, up to a vector
    columns: int = COLUMNS
    elements: Elements = FLOATS
    description: PackBox = BOX
    asked: str = ""  # of the planner: "row_packed" or "interleave"

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements between channels, rows and columns."""
        c = self.channels
        return (1, WIDTH * c, c) if self.layout == "hwc" else (HEIGHT * WIDTH, WIDTH, 1)

    @property
    def box(self) -> PackBox:
        """The description, filled in."""
        channel, row, column = self.strides
        one = Packed(1, 0, 1)
        axes = (one, one, Packed(HEIGHT, row, ROWS), Packed(WIDTH, column, self.columns, self.step))
        pitch = self.pitch or -(-self.channels // LANES) * LANES
        known = self.channels if self.known else None
        box = replace(self.description, axes=axes, channel_step=channel, pitch=pitch, channels=known)
        return replace(box, packer=packer(box, LANES, **({self.asked: True} if self.asked else {})))


PAIRS = {"elements": WORDS, "first": 0}
CASES = {
    "rows without a gap": Case(Packer.COPY_ROWS, 8, "hwc"),
    "pixels of three and a zero": Case(
        Packer.COPY_ZERO, 3, "hwc", pitch=4, elements=WORDS, description=replace(BOX, zero_rest=True)
    ),
    "pixels": Case(Packer.COPY_PIXELS, 7, "hwc", known=False),
    "pixels, every other": Case(Packer.COPY_PIXELS, 8, "hwc", step=2),
    "few channels": Case(Packer.INTERLEAVE, 3, "chw", pitch=3, asked="interleave"),
    "squares": Case(Packer.TRANSPOSE, 8, "chw"),
    "squares, the last one short": Case(Packer.TRANSPOSE, 7, "chw", known=False),
    "squares of every third pixel": Case(Packer.TRANSPOSE, 6, "chw", step=3, known=False),
    "pixels too far from each other": Case(Packer.ELEMENTS, 5, "chw", step=5),
    "pairs of two images": Case(
        Packer.TRANSPOSE_IMAGES, 6, "chw", elements=WORDS, known=False,
        description=replace(BOX, pairing=Pairing.IMAGES, image_step=6 * HEIGHT * WIDTH),
    ),
    "pairs of two images, one by one": Case(
        Packer.ELEMENTS, 6, "chw", elements=WORDS, step=5,
        description=replace(BOX, pairing=Pairing.IMAGES, image_step=6 * HEIGHT * WIDTH),
    ),
    "pairs of channels": Case(
        Packer.PAIR_CHANNELS, 7, "hwc", elements=WORDS,
        description=replace(BOX, pairing=Pairing.CHANNELS, pair=(1, 2)),
    ),
    "pairs of channels without a gap": Case(
        Packer.PAIR_CHANNELS, 8, "hwc", elements=WORDS,
        description=replace(BOX, pairing=Pairing.CHANNELS, pair=(1, 1)),
    ),
    "pairs of pixels": Case(
        Packer.PAIR_PIXELS, 6, "chw", known=False, **PAIRS,
        description=replace(BOX, pairing=Pairing.PIXELS, pair=(1, 2)),
    ),
    "pairs by a copy": Case(
        Packer.TRANSPOSE, 6, "chw", known=False, elements=WORDS,
        description=replace(BOX, pairing=Pairing.COPY, pair=(1, 2)),
    ),
    "row-packed": Case(Packer.ROWS, 5, "chw", pitch=ROWS * COLUMNS, asked="row_packed"),
    "row-packed, every other": Case(
        Packer.ROWS, 5, "chw", step=2, pitch=ROWS * COLUMNS, asked="row_packed"
    ),
    "row-packed, of two images": Case(
        Packer.ROWS, 5, "chw", pitch=2 * ROWS * COLUMNS, elements=replace(WORDS, lanes=2 * LANES),
        asked="row_packed", description=replace(BOX, pairing=Pairing.IMAGES, image_step=5 * HEIGHT * WIDTH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_a_box_is_packed_as_it_is_described(title: str) -> None:
    case = CASES[title]
    box = case.box
    assert box.packer is case.packer
    words = case.elements is not FLOATS
    kind = np.uint16 if words else np.float32
    image = np.arange(1, IMAGES * case.channels * HEIGHT * WIDTH + 1, dtype=kind)
    room = 4 * box.pixels * box.entry_pitch + 4096  # elements, and what may be written beyond the end
    m = Module()
    clear = zero(m, case.elements)
    packing = pack_box(m, case.elements, box, clear)
    frame = Frame(m, [Buffer("packed", room, False), Buffer("raw", room, False)], "float")
    raw = [frame.at["raw"]] if box.pairing is Pairing.COPY else []
    start = (0, 0, -1, case.first, case.channels)
    frame.f.call(packing, frame.tensors["x"], frame.at["packed"], *start, *raw)
    memory = np.full(2 * room, np.nan, np.float32)
    run(frame.end(), x=image, workspace=memory)
    assert np.array_equal(packed(case, memory.view(kind)), expected(case, image))


def packed(case: Case, memory: np.ndarray) -> np.ndarray:
    """What was written, as (channels, rows, entries, members)."""
    box, members = case.box, 1 if case.elements is FLOATS or case.packer is Packer.COPY_ZERO else 2
    if box.packer is Packer.ROWS:
        members = len(box.members)
        found = memory[: case.channels * box.pitch].reshape(case.channels, ROWS, -1, members)
        return found
    entries = case.columns // box.pair[1]
    found = memory[: ROWS * entries * box.pitch * members].reshape(ROWS, entries, box.pitch, members)
    if case.packer in (Packer.COPY_ZERO, Packer.INTERLEAVE):
        assert not found[:, :, case.channels :].any()
    return found[:, :, : case.channels].transpose(2, 0, 1, 3)


def expected(case: Case, image: np.ndarray) -> np.ndarray:
    """The same, by looking at each pixel."""
    box, n = case.box, case.channels
    images = image.reshape(IMAGES, *((HEIGHT, WIDTH, n) if case.layout == "hwc" else (n, HEIGHT, WIDTH)))
    if case.layout == "hwc":
        images = images.transpose(0, 3, 1, 2)

    def pixel(image_: int, row: int, column: int) -> np.ndarray:
        y, x = row - 1, case.first + column * case.step
        inside = 0 <= y < HEIGHT and 0 <= x < WIDTH
        return np.asarray(images[image_, :, y, x]) if inside else np.zeros(n, image.dtype)

    distance, step = box.pair
    if box.pairing is Pairing.NONE:
        places = [[(0, e)] for e in range(case.columns)]
    elif box.pairing is Pairing.IMAGES:
        places = [[(0, e), (1, e)] for e in range(case.columns)]
    else:
        places = [[(0, e * step), (0, e * step + distance)] for e in range(case.columns // step)]
    rows = [[[pixel(i, row, column) for i, column in entry] for entry in places] for row in range(ROWS)]
    return np.array(rows).transpose(3, 0, 1, 2)


def test_all_packers_are_tried() -> None:
    assert {case.packer for case in CASES.values()} == set(Packer)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("layout", "lanes"), [("chw", 4), ("chw", 3), ("hwc", 4)])
def test_staged_sums_are_written_where_they_belong(layout: str, lanes: int, accumulate: bool) -> None:
    channels, height, width, pitch = 7, 3, 10, 12
    steps = (0, 0, width, 1) if layout == "chw" else (0, 0, width * channels, channels)
    step = height * width if layout == "chw" else 1
    m = Module()
    way = unpacker(step, steps[-1], lanes)
    staging = Staging(way, (1, 1, height, width), steps, step, pitch, one_row=False, round_first=False, whole=False)
    writing = unpack(m, Results(Elements("f32", lanes, "float", False), accumulate), staging)
    frame = Frame(m, [], "float")
    frame.f.call(writing, frame.tensors["x"], frame.tensors["y"], 1, 1, height, width, channels)
    sums = np.arange(height * width * pitch + 1000, dtype=np.float32)
    result = np.full((channels, height, width), 0.5 if accumulate else np.nan, np.float32)
    found = np.ascontiguousarray(result if layout == "chw" else result.transpose(1, 2, 0))
    run(frame.end(), x=sums, y=found)
    wanted = sums[: height * width * pitch].reshape(height, width, pitch)[:, :, :channels]
    wanted = wanted + 0.5 if accumulate else wanted
    assert np.array_equal(found, wanted.transpose(2, 0, 1) if layout == "chw" else wanted)


def test_rows_that_a_tile_has_twice_are_added_once() -> None:
    """All is read before any is written."""
    m = Module()
    frame = Frame(m, [], "float")
    f, n = frame.f, Elements("f32", LANES, "float", False)
    place = frame.tensors["y"]
    value = f.load(frame.tensors["x"], n.vector, 4)
    Results(n, accumulate=True).store_rows(f, [[value], [value]], [place, place], LANES)
    x, y = np.full(LANES, 2, np.float32), np.full(LANES, 5, np.float32)
    run(frame.end(), x=x, y=y)
    assert list(y) == [7] * LANES


def run(text: str, **tensors: np.ndarray) -> None:
    """Run a kernel on one thread."""
    addresses = [tensors[name].ctypes.data if name in tensors else 0 for name in ("x", "w", "y", "bias", "workspace")]
    arguments = (ctypes.c_int64 * 5)(*addresses)
    module = jit.load(text, *HOST)
    team.run(module.address("kernel"), ctypes.addressof(arguments), 1)
