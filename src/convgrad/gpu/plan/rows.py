"""Plans for depthwise layers and groups of few channels: programs that walk along rows (`kernels/rows.py`).

Where channels lie side by side, they are in the lanes of a warp; where pixels do, runs of a row are. Axes are named
depth, row and column: a layer in 1D whose channels lie side by side is walked along its only axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil, gcd, prod
from typing import NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem, Role
from ..target import Target
from .axes import is_wide, strides, three
from .cost import LAUNCH, finish_seconds
from .launches import finish, out_tensor, workspace_strides
from .records import PARTS, Constants, Launch, Plan, Values

TYPES = ("f32", "bf16", "f16")
MOST_TAPS = 64
"""Taps whose weights or sums a thread holds for each channel of a result."""

MOST_INSIDE = 144
"""The same for the channels of a group that are inside of a thread: nine taps of four by four channels."""

DOES = "products one by one along rows, what was read kept in registers"

NARROW = 16
"""Channels of a tile that is as narrow as pieces of memory; where it fits best, short rows are cut better, too."""

CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_PARTS = 512
STEPS = 3
"""What a program costs besides its walk, in steps of it."""

TILE = 0.4
"""The same of a tile of w, where a row has one tap and nothing is kept from step to step."""

MEMORY_SHARE = 0.87  # of the bandwidth, that copies reach
ISSUE_SHARE = 0.9

LATENCY = 0.45e-6
"""Seconds from the beginning of loads to the end of the step that they are for; shared by steps whose loads are on
their way together."""

ALONE = 1.3
"""Cycles of an instruction, if its warp is alone."""

WAITS = {"y": 0.65, "x": 0.65, "w": 1.65}
"""From which on memory is what a walk waits for: its time by that of instructions. Fewer of them were slower with loads
through shared memory, which take more instructions; most of all those of w, which loads two tensors."""

AHEAD = 3
"""Steps whose loads are on their way to registers, where memory is what a walk waits for."""

STAGES = {"y": 4, "x": 4, "w": 2}
"""Blocks of steps, of which all but one are on their way through shared memory."""

FEW_REGISTERS = 80
"""Of a thread: six programs of four warps run beside each other."""

REGISTERS = 1 << 16
"""Of a multiprocessor."""


class Way(NamedTuple):
    """How a problem is walked."""

    pixels: bool  # runs of pixels are in the lanes, not channels
    rows: int  # runs of a tile
    columns: int  # channels of a tile
    width: int  # columns of a run
    height: int  # steps of a chunk
    warps: int
    ahead: int
    unroll: int
    taps: int = 0  # rows of taps of a program, for w
    parts: int = 1
    inside: bool = False  # a thread has the channels of groups
    stages: int = 1  # of loads through shared memory, besides those ahead in registers


class Axis(NamedTuple):
    """One spatial axis."""

    x: int
    w: int
    y: int
    stride: int
    dilation: int
    pad: int


def plan(p: Problem, target: Target, asked: str = "default") -> Plan | str:
    """The plan for a problem, or why there is none."""
    if reason := hindrance(p):
        return reason
    seen_as = dict.fromkeys((stacked(p), p))  # mostly one and the same
    return min((settle(one, target, choose(one, target)) for one in seen_as), key=lambda plan: plan.seconds)


def hindrance(p: Problem) -> str:
    """Why a problem is not served."""
    if p.dtype not in TYPES:
        return "it is for f32, bf16 and f16"
    if not p.flops:
        return "there is nothing to sum"
    if p.cx * p.cy > (4 if p.g == 1 else 16):
        return "it is for groups of few channels"
    _, row, column = spatial(p)
    summed = p.cy if p.wanted == "x" else p.cx
    if _lie_differently(p):
        return "channels lie side by side in one tensor, pixels in the other"
    if not are_inside(p):
        if summed * (p.cx if p.wanted == "w" else 1) > 2 and not lie_in_space(p):
            return "channels of a group are not side by side"
        if p.wanted != "w" and prod(p.w) * summed > MOST_TAPS:
            return f"it is for at most {MOST_TAPS} taps"
    if column.w > 16 or column.stride > 4 or row.stride > 4:
        return "its rows would be too long"
    if p.wanted == "x" and row.stride > 1 and row.dilation > 1:
        return "it is not for strides and dilations together"
    return ""


def are_inside(p: Problem) -> bool:
    """Whether a thread has whole groups: their channels lie side by side, and so do groups."""
    if p.cx * p.cy == 1 or lie_in_space(p):
        return False
    for role, count in (("x", p.cx), ("y", p.cy)):
        of = p.strides(role)
        if count not in (1, 2, 4) or of[1] != count or (count > 1 and of[2] != 1):
            return False
    row, column = spatial(p)[1:]
    return column.w * p.cx * p.cy * (1 if p.wanted == "w" else row.w * spatial(p)[0].w) <= MOST_INSIDE


def lie_in_space(p: Problem) -> bool:
    """Whether pixels lie side by side, in both large tensors."""
    return all(_unit_column(p, role) for role in ("x", "y"))


def stacked(p: Problem) -> Problem:
    """A problem in 1D with its images as rows of one image, which a program walks along."""
    if p.rank > 1 or p.n == 1 or not lie_in_space(p):
        return p

    def of(role: Role) -> Ints:
        image, *channels, space = p.strides(role)
        return (0, *channels, image, space)

    w = (*p.w_strides[:3], 0, *p.w_strides[3:])
    size = replace(p, n=1, x=(p.n, *p.x), w=(1, *p.w), y=(p.n, *p.y), x_strides=of("x"), w_strides=w, y_strides=of("y"))
    return replace(size, stride=(1, *p.stride), dilation=(1, *p.dilation), pad=(0, *p.pad))


def _lie_differently(p: Problem) -> bool:
    """Whether channels lie side by side in one of the large tensors, and pixels in the other: one has no neighbours."""
    x, y = (strides(p, role) for role in ("x", "y"))
    return any(a[1] == 1 != a[5] and b[5] == 1 != b[1] for a, b in ((x, y), (y, x)))


def _unit_column(p: Problem, role: Role) -> bool:
    of, sizes = strides(p, role), three(p).sizes(role)
    return of[5] == 1 or (sizes[2] == 1 and of[1] != 1)


def order(p: Problem) -> Ints:
    """The spatial axes as depth, row and column."""
    return (0, 2, 1) if p.rank == 1 and not lie_in_space(p) else (0, 1, 2)


@lru_cache(maxsize=64)
def spatial(p: Problem) -> tuple[Axis, Axis, Axis]:
    """The axes of depth, row and column."""
    axes = three(p)
    found = []
    for at in order(p):
        axis = Axis(*(getattr(axes, name)[at] for name in Axis._fields))
        found.append(axis if axis.w > 1 else axis._replace(dilation=1))
    return found[0], found[1], found[2]


def arranged(p: Problem, of: Ints) -> Ints:
    """Strides whose spatial axes are depth, row and column."""
    return (*of[:3], *(of[3 + at] for at in order(p)))


class Walk(NamedTuple):
    """How rows of results go over rows of the input: the constants of `kernels/rows.py`."""

    live: int
    down: int
    up: int
    classes: int
    row: Ints
    extra: int
    taps: tuple[Ints, ...]
    results: int  # rows of a class


@lru_cache(maxsize=64)
def walk(p: Problem, taps: int = 0) -> Walk:
    """The walk of a problem; of w, with so many rows of taps at once."""
    row, back = spatial(p)[1], p.wanted == "x"
    kernel = taps or row.w
    if back and row.stride > 1:
        # The first row that has a part in the first result or, where no tap meets it, the last one before it.
        lead = min(-((kernel - 1 - row.pad) // row.stride), row.pad // row.stride)
        live = max(kernel, row.stride)
        extra = (row.stride - 1 + row.pad) // row.stride - lead
        met = tuple(e if e < kernel else -1 for e in range(live))
        results = ceil(row.x / row.stride)
        return Walk(live, 1, row.stride, 1, (0, lead, row.stride * lead - row.pad), extra, (met,), results)
    pad = (kernel - 1) * row.dilation - row.pad if back else row.pad
    step, live = row.stride, ceil(kernel / row.stride)
    rows = []
    for i in range(step):
        taps_met = (i + step * (live - 1 - e) for e in range(live))
        rows.append(tuple(-1 if k >= kernel else kernel - 1 - k if back else k for k in taps_met))
    results = ceil((row.x if back else row.y) / row.dilation)
    return Walk(live, step, 1, row.dilation, (step, -pad, 1 - live), live - 1, tuple(rows), results)


def along(p: Problem, axis: Axis) -> Ints:
    """How a position of the input follows from that of a result: its factor, the tap's, the start, the divisor."""
    if p.wanted == "x":
        return (1, -axis.dilation, axis.pad, axis.stride)
    return (axis.stride, axis.dilation, -axis.pad, 1)


def vector(p: Problem, role: Role, step: int, dtype: str) -> int:
    """Columns of a tensor that are read or written at once, where runs begin `step` apart."""
    of = arranged(p, strides(p, role))
    if of[5] != 1:
        return 1
    size, found = three(p).sizes(role)[order(p)[2]], 16 // DTYPES[dtype].size
    numbers = (size, step, *of[:5])
    while any(number % found for number in numbers):
        found //= 2
    return found


class Reads(NamedTuple):
    """What a run reads of a row: pieces by first column and size, and the column that each tap of a result meets."""

    origin: int  # columns from run to run
    pieces: tuple[Ints, ...]
    uses: tuple[Ints, ...]


def reads(p: Problem, width: int, each: int = 1) -> Reads:
    """The columns that a run of so many results needs, each of so many channels; for w, a run of y."""
    axis = spatial(p)[2]
    back = p.wanted == "x"
    table: list[list[int | None]] = []
    for i in range(width):
        line: list[int | None] = []
        for k in range(axis.w):
            at = i + axis.pad - k * axis.dilation
            if back:
                line.append(at // axis.stride if at % axis.stride == 0 else None)
            else:
                line.append(i * axis.stride + k * axis.dilation - axis.pad)
        table.append(line)
    origin = width // axis.stride if back else width * axis.stride
    most = vector(p, "y" if back else "x", origin, p.dtype) if each == 1 else 1
    needed = sorted({at for line in table for at in line if at is not None})
    pieces: list[tuple[int, int]] = []
    for block in dict.fromkeys(at // most for at in needed):
        inside = [at for at in needed if at // most == block]
        size = 1
        while inside[0] // size != inside[-1] // size:
            size *= 2
        pieces.append((inside[0] // size * size, size))
    columns = [first + i for first, size in pieces for i in range(size)]
    uses = tuple(tuple(-1 if at is None else columns.index(at) for at in line) for line in table)
    return Reads(origin, tuple((first, size * each) for first, size in pieces), uses)


def settle(p: Problem, target: Target, way: Way) -> Plan:
    """The plan that goes a way."""
    split = is_split(p, way)
    launch = _weights_launch(p, way) if p.wanted == "w" else _rows_launch(p, way)
    launches = (launch, *((finish(p, way.parts),) if split else ()))
    areas = ((PARTS, way.parts * p.size(p.wanted) * 4),) if split else ()
    time = seconds(p, target, way, pace_of(p, target, way))
    tile = (way.rows, way.columns, way.width, way.height)
    kernel = "rows_weights" if p.wanted == "w" else "rows"
    return Plan(kernel, DOES, launches, areas, time, (), "", tile, way.parts)


def is_split(p: Problem, way: Way) -> bool:
    """Whether sums are finished by another kernel; where results are added to what was there, they always are."""
    return p.wanted == "w" and (way.parts > 1 or p.accumulate)


def unit(of: Ints, pixels: bool) -> int:
    """The axis that is known to be contiguous."""
    for axis in (5, 1) if pixels else (1, 5):
        if of[axis] == 1:
            return axis
    return -1


class Ends(NamedTuple):
    """What a launch for y or x is told of its tensors."""

    tensors: tuple[tuple[str, str], ...]
    a: Ints  # strides of the input, and of the weights
    w: Ints
    summed: int  # channels of a group
    made: int
    flat: bool  # channels of the result follow each other over groups, too
    unit: int  # the axis of the result whose stride is 1, or -1
    values: Values


def ends(p: Problem, way: Way, width: int) -> Ends:
    """The tensors of a launch for y or x, in runs of so many columns."""
    given: Role = "x" if p.wanted == "y" else "y"
    summed, made = (p.cx, p.cy) if p.wanted == "y" else (p.cy, p.cx)
    a, out = (arranged(p, strides(p, role)) for role in (given, p.wanted))
    w = arranged(p, strides(p, "w"))
    if p.wanted == "y":
        w = (w[0], w[2], w[1], *w[3:])
    flat = made == 1 or (out[1] == made * out[2] and not way.inside)
    if made == 1:
        out = (out[0], out[1], out[1], *out[3:])
    sizes = sizes_of(p, p.wanted)
    values: Values = (
        ("a_strides", a),
        ("w_strides", w),
        ("out_strides", out),
        ("bias_stride", p.bias_stride or 0),
        ("a_sizes", sizes_of(p, given)),
        ("out_sizes", sizes),
        ("images", p.n),
        ("channels", across(p, way)),
        ("runs", ceil(sizes[2] / width)),
        ("chunks", ceil(walk(p).results / way.height)),
        ("height", way.height),
    )
    first = next((axis for axis in ((5, 2) if way.pixels else (2, 5)) if out[axis] == 1), -1)
    result = (p.wanted, p.out_dtype)
    tensors = ((given, p.dtype), ("w", p.dtype), result, ("bias", p.dtype) if p.bias_stride is not None else result)
    return Ends(tensors, a, w, summed, made, flat, first, values)


def over_rows(over: Walk) -> Constants:
    """How rows of the results go over rows of the input."""
    return (
        ("LIVE", over.live),
        ("DOWN", over.down),
        ("UP", over.up),
        ("CLASSES", over.classes),
        ("ROW", over.row),
        ("EXTRA", over.extra),
        ("ROW_TAPS", over.taps),
    )


def _rows_launch(p: Problem, way: Way) -> Launch:
    at = ends(p, way, way.width)
    read = reads(p, way.width, at.summed if way.inside else 1)
    constants: Constants = (
        ("KERNEL", tuple(axis.w for axis in spatial(p))),
        ("DEPTH", along(p, spatial(p)[0])),
        *over_rows(walk(p)),
        ("ORIGIN", read.origin),
        ("PIECES", read.pieces),
        ("USES", read.uses),
        ("SUMMED", at.summed),
        ("MADE", at.made),
        ("INSIDE", way.inside),
        ("FLAT", at.flat),
        ("A_UNIT", unit(at.a, way.pixels)),
        ("W_UNIT", 0 if at.w[0] == 1 else -1),
        ("OUT_UNIT", at.unit),
        ("WIDTH", way.width),
        ("OUT_VECTOR", vector(p, p.wanted, way.width, p.out_dtype) if way.pixels else 1),
        ("ROWS", way.rows),
        ("COLUMNS", way.columns),
        ("AHEAD", way.ahead),
        ("UNROLL", way.unroll),
        ("STAGES", way.stages),
        ("WIDE", is_wide(p)),
        ("BIAS", p.bias_stride is not None),
        ("ACCUMULATE", p.accumulate),
    )
    programs = ceil(lanes(p, way) / way.rows) * ceil(across(p, way) / way.columns)
    return Launch("rows", programs, at.tensors, at.values, constants, way.warps, 1)


def lanes(p: Problem, way: Way) -> int:
    """Runs of all images and chunks."""
    sizes, over = sizes_of(p, _walked(p)), walk(p, way.taps)
    return p.n * sizes[0] * over.classes * ceil(over.results / way.height) * ceil(sizes[2] / way.width)


def across(p: Problem, way: Way) -> int:
    """Channels of results, pairs of channels for w, or groups: what is in the lanes besides runs."""
    if way.inside:
        return p.g
    return p.g * (p.cy * p.cx if p.wanted == "w" else p.cy if p.wanted == "y" else p.cx)


def _walked(p: Problem) -> Role:
    """The tensor that runs are of."""
    return "y" if p.wanted == "w" else p.wanted


def sizes_of(p: Problem, role: Role) -> Ints:
    """Depth, rows and columns of a tensor."""
    sizes = three(p).sizes(role)
    return tuple(sizes[at] for at in order(p))


def weights_values(p: Problem, way: Way) -> Values:
    """The numbers of a kernel for w."""
    split, over, sizes = is_split(p, way), walk(p, way.taps), sizes_of(p, "y")
    return (
        ("x_strides", arranged(p, strides(p, "x"))),
        ("y_strides", arranged(p, strides(p, "y"))),
        ("out_strides", arranged(p, workspace_strides(p) if split else strides(p, "w"))),
        ("x_sizes", sizes_of(p, "x")),
        ("y_sizes", sizes),
        ("images", p.n),
        ("channels", across(p, way)),
        ("runs", ceil(sizes[2] / way.width)),
        ("chunks", ceil(over.results / way.height)),
        ("height", way.height),
        ("parts", way.parts),
        ("part_stride", p.size("w") if split else 0),
    )


def _weights_launch(p: Problem, way: Way) -> Launch:
    over, read = walk(p, way.taps), reads(p, way.width, p.cx if way.inside else 1)
    values = weights_values(p, way)
    x, y, out = (dict(values)[f"{name}_strides"] for name in ("x", "y", "out"))
    assert isinstance(x, tuple)
    assert isinstance(y, tuple)
    assert isinstance(out, tuple)
    step = vector(p, "y", way.width, p.dtype) if way.pixels else 1
    kernel = tuple(axis.w for axis in spatial(p))
    constants: Constants = (
        ("KERNEL", kernel),
        ("DEPTH", along(p, spatial(p)[0])),
        ("TAPS", way.taps),
        ("LIVE", over.live),
        ("DOWN", over.down),
        ("CLASSES", over.classes),
        ("ROW", over.row),
        ("ORIGIN", read.origin),
        ("PIECES", read.pieces),
        ("USES", read.uses),
        ("Y_PIECES", tuple((first, step * (p.cy if way.inside else 1)) for first in range(0, way.width, step))),
        ("X_CHANNELS", p.cx),
        ("Y_CHANNELS", p.cy),
        ("INSIDE", way.inside),
        ("X_UNIT", unit(x, way.pixels)),
        ("Y_UNIT", unit(y, way.pixels)),
        ("OUT_UNIT", 0 if out[0] == 1 else -1),
        ("WIDTH", way.width),
        ("ROWS", way.rows),
        ("COLUMNS", way.columns),
        ("AHEAD", way.ahead),
        ("UNROLL", way.unroll),
        ("STAGES", way.stages),
        ("JOINED", _power(kernel[2] * (p.cx * p.cy if way.inside else 1))),
        ("COLUMN", spatial(p)[2][3:]),
        ("WIDE", is_wide(p)),
    )
    programs = ceil(across(p, way) / way.columns) * ceil(kernel[1] / way.taps) * kernel[0] * way.parts
    tensors = (("x", p.dtype), ("y", p.dtype), out_tensor(p, is_split(p, way)))
    return Launch("rows_weights", programs, tensors, values, constants, way.warps, 1)


def _power(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def choose(p: Problem, target: Target) -> Way:
    """The way for a problem: its tile, and the chunks and parts that are expected to be quickest."""
    way = _in_chunks(p, target, _tile(p))
    other = _in_chunks(p, target, _streaming(p, target, way), way.height)
    return min((other, way), key=lambda one: seconds(p, target, one, pace_of(p, target, one)))


def _in_chunks(p: Problem, target: Target, way: Way, most: int = 0) -> Way:
    """The same way, in the chunks that are expected to be quickest; of so many steps at most."""
    results = walk(p, way.taps).results
    if way.pixels and way.ahead == AHEAD:
        # Rows are short in memory where pixels lie side by side: all of an image are read at about the same time.
        most = min(most, 2 * way.unroll + 1)
    least = ceil(results / most) if most else 1
    heights = {ceil(results / max(chunks, least)) for chunks in CHUNKS}
    ways = [way._replace(height=height) for height in sorted(heights, reverse=True)]
    return quickest(p, target, ways, pace_of(p, target, way))


def _streaming(p: Problem, target: Target, way: Way) -> Way:
    """The same way with loads begun several steps before, where memory is what it waits for."""
    over = walk(p, way.taps)
    if over.live == 1:
        # No row waits for another: for w, programs wait beside each other. A walk of one step has no next one.
        return way._replace(ahead=0) if way.pixels and (p.wanted == "w" or over.results == 1) else way
    busy = times(p, target, way, pace_of(p, target, way))
    # A step that takes several rows has loads enough on their way.
    if over.down > 1 or p.cx * p.cy > 1 or busy.memory < WAITS[p.wanted] * busy.issue:
        return way
    return _ahead(p, way) if way.pixels else _staged(p, target, way)


def _ahead(p: Problem, way: Way) -> Way:
    """The same way with more steps on their way to registers, of which runs of pixels leave enough.

    Their columns of 16 bits, at the sides of runs, could not go through shared memory by themselves. A turn of the loop
    has as many steps as there are rows that are kept: then nothing moves from register to register.
    """
    over = walk(p)
    ahead = way._replace(ahead=AHEAD, unroll=over.live)
    fits = over.live <= 4 and way.height + over.extra >= 2 * over.live and registers(p, ahead) <= FEW_REGISTERS
    return ahead if p.wanted != "w" and fits else way


def _staged(p: Problem, target: Target, way: Way) -> Way:
    """The same way with loads through shared memory: they take no registers, but have four bytes at least."""
    item = DTYPES[p.dtype].size
    if together(p, way) * item < 4:
        return way
    steps = 2 if p.wanted == "w" else 1
    if sizes_of(p, _walked(p))[2] == 1:
        steps = 4  # each reads little in one dimension: they wait together, and
        columns = 256 // item  # what is read lies in longer runs
        if p.wanted != "w" and across(p, way) % columns == 0:
            way = way._replace(rows=way.rows * way.columns // columns, columns=columns)
    if p.wanted == "w" and walk(p, way.taps).live - 1 > steps:
        return way  # rows of y that are kept beyond a turn of the loop, whose loads Triton would then not begin early
    for stages in range(STAGES[p.wanted], 1, -1):
        staged = way._replace(ahead=0, unroll=steps, stages=stages)
        if 3 * shared(p, staged) <= target.shared:
            return staged
    return way


def together(p: Problem, way: Way) -> int:
    """Channels that a thread reads at once, of those that lie side by side."""
    roles: tuple[Role, ...] = ("x", "y") if p.wanted == "w" else ("x",) if p.wanted == "y" else ("y",)
    numbers = [number for role in roles for number in strides(p, role) if number != 1]
    return gcd(way.rows * way.columns // (32 * way.warps), across(p, way), *numbers)


def shared(p: Problem, way: Way) -> int:
    """Bytes of shared memory of a program: what is on its way."""
    over, depth = walk(p, way.taps), spatial(p)[0]
    columns = over.down * sum(size for _, size in reads(p, way.width).pieces)
    columns = columns + way.width if p.wanted == "w" else columns * depth.w
    return (way.stages - 1) * way.unroll * columns * way.rows * way.columns * DTYPES[p.dtype].size


def quickest(p: Problem, target: Target, ways: Iterable[Way], pace: Pace) -> Way:
    """Of ways that differ in their chunks, the quickest; with as many parts as are best, for w."""
    found = []
    for way in ways:
        tiles = ceil(lanes(p, way) / way.rows)
        most = max(1, min(MOST_PARTS, p.bytes // 16 // (4 * p.size("w")))) if p.wanted == "w" else 1
        counts = {min(most, ceil(tiles / each)) for each in (*range(1, 17), 20, 24, 32, 48, 64, 128)}
        for parts in sorted(counts | {1}) if most > 1 else (1,):
            one = way._replace(parts=parts)
            found.append((seconds(p, target, one, pace), one))
    return min(found, key=lambda pair: pair[0])[1]


class Pace(NamedTuple):
    """What a step of a walk takes."""

    instructions: float  # of a warp
    at_once: int  # programs
    across: int  # programs beside each other, for channels and taps
    end: float  # what a program costs besides its walk, in steps
    latency: float = LATENCY  # seconds of a step if nothing else takes longer
    tile: float = STEPS  # what a tile of w costs besides its walk, in steps
    overlap: float = 1.5  # of memory, instructions and latency: the larger, the less each adds to the longest


class Times(NamedTuple):
    """Seconds that a way would take if nothing else took any."""

    memory: float
    issue: float
    waiting: float


def times(p: Problem, target: Target, way: Way, pace: Pace) -> Times:
    """What memory, instructions and latency of a way take."""
    tiles = ceil(lanes(p, way) / way.rows)
    steps = ceil((way.height + walk(p, way.taps).extra) / way.unroll) * way.unroll
    if p.wanted == "w":
        programs = pace.across * way.parts
        walked = ceil(tiles / way.parts) * (steps + pace.tile) + pace.end
        rounds = programs / pace.at_once + 0.5 if programs > pace.at_once else 1.0
    else:
        programs, walked = pace.across * tiles, steps + pace.end
        rounds = programs / pace.at_once + 1
    memory = p.bytes / (target.bandwidth * 1e9 * MEMORY_SHARE)
    issued = programs * way.warps * walked * pace.instructions
    issue = ISSUE_SHARE * issued / (4 * target.multiprocessors * target.clock * 1e9)
    return Times(memory, issue, rounds * walked * pace.latency)


def seconds(p: Problem, target: Target, way: Way, pace: Pace) -> float:
    """What a way is expected to take: memory, instructions and latency, which overlap in part.

    Fitted to 80 times of 20 layers on an H200, of which it was 17% away in the mean, and to 360 of other ways of four
    layers; of those that are chosen it is 7% away.
    """
    alone = times(p, target, way, pace)
    time = float(sum(one**pace.overlap for one in alone) ** (1 / pace.overlap)) + LAUNCH
    return time + (finish_seconds(target, p.size("w"), way.parts, p.dtype) if way.parts > 1 else 0.0)


def pace_of(p: Problem, target: Target, way: Way) -> Pace:
    """The pace of a tile: multiplications, conversions, and what loads and stores cost besides."""
    over, (depth, row, column) = walk(p, way.taps), spatial(p)
    elements = max(1, way.rows * way.columns // (32 * way.warps))
    pairs = p.cx * p.cy if way.inside else 1
    given, made = (p.cx, p.cy) if p.wanted != "x" else (p.cy, p.cx)
    pieces = reads(p, way.width, given if way.inside else 1).pieces
    summed = 1 if way.inside or p.wanted == "w" else given
    rows_read = over.down * summed * (1 if p.wanted == "w" else depth.w)
    read = rows_read * sum(size for _, size in pieces)
    tiles = ceil(across(p, way) / way.columns)
    if p.wanted == "w":
        products, written, end = way.taps * column.w * way.width, way.width, 0.6 * way.taps * column.w
        tiles *= ceil(row.w / way.taps) * depth.w
    else:
        products, written = prod(p.w) * summed * way.width, over.up * way.width
        products //= column.stride if over.up > 1 else 1
        end = 0.5 if over.results == 1 else 1 if way.pixels else STEPS
    count = elements * (products * pairs + read + written * (made if way.inside else 1))
    instructions = count + 5 * rows_read * len(pieces) + 2 * written + 30
    pace = Pace(instructions, resident(target, registers(p, way), way.warps, shared(p, way)), tiles, end)
    early = (way.stages - 1) * way.unroll if way.stages > 1 else way.ahead
    if early > 1:
        return pace._replace(latency=LATENCY / early + ALONE * instructions / (target.clock * 1e9), overlap=2)
    return pace._replace(tile=TILE, overlap=2) if p.wanted == "w" and over.live == 1 and not early else pace


def registers(p: Problem, way: Way) -> int:
    """What a thread is expected to need: sums, weights or a window, what is read and what is on its way."""
    column = spatial(p)[2]
    over, pairs = walk(p, way.taps), p.cx * p.cy if way.inside else 1
    elements = way.rows * way.columns // (32 * way.warps)
    given, made = (p.cx, p.cy) if p.wanted != "x" else (p.cy, p.cx)
    own = made if way.inside else 1
    read = sum(size for _, size in reads(p, way.width, given if way.inside else 1).pieces)
    if p.wanted == "w":
        kept = way.taps * column.w * pairs + over.live * way.width * own
        coming = over.down * read + way.width * own
    else:
        summed = given if not way.inside else 1
        kept = over.live * way.width * own + prod(p.w) * summed * pairs
        coming = over.down * read * summed * spatial(p)[0].w
    return elements * (kept + read + way.ahead * coming // 2) + (12 if way.pixels else 24)


def resident(target: Target, registers: int, warps: int, shared: int = 0) -> int:
    """Programs that run at once."""
    each = (REGISTERS // (32 * warps)) // max(32, ceil(min(registers, 255) / 8) * 8)
    return target.multiprocessors * max(1, min(each, 48 // warps, target.shared // max(shared, 1)))


def _tile(p: Problem) -> Way:
    """The tile of a problem, with one chunk."""
    column, row = spatial(p)[2], spatial(p)[1]
    pixels, inside = lie_in_space(p), are_inside(p)
    item, taps = DTYPES[p.dtype].size, row.w * column.w
    pairs = p.cx * p.cy if inside else 1
    rows_of_taps = 0
    if p.wanted == "w":
        rows_of_taps = row.w
        while rows_of_taps * column.w * pairs > (MOST_INSIDE if inside else MOST_TAPS):
            rows_of_taps = ceil(rows_of_taps / 2)
        taps = rows_of_taps * column.w
    each = 1 if pixels else 16 // item if taps * pairs <= 4 else 4 if taps * pairs <= 12 else 2 if pairs == 1 else 1
    size = sizes_of(p, _walked(p))[2]
    width = 16 // item if pixels else 2 if inside else 4
    while width >= 2 * size:
        width //= 2
    if p.wanted == "x":
        width = max(1, ceil(width / column.stride)) * column.stride
        if pixels and column.stride in (1, 2, 4):
            width = max(width, 8 // item * column.stride)
    half = width // 2
    if pixels and half >= 4 and half % column.stride == 0 and -size % width > max(-size % half, size // 10):
        width = half  # a tenth of all columns would lie beyond the end
    if pixels and row.w == 1 and p.wanted != "w":  # no walk: several loads of a thread are on their way together
        each = 2
    warps = 4
    elements = 32 * warps * each
    over, way = walk(p, rows_of_taps), Way(pixels, 1, 1, width, 1, warps, 1, 1, rows_of_taps, 1, inside)
    channels = across(p, way)
    columns = 1
    if not pixels:
        sizes = (64, 32, 128, NARROW) if p.wanted == "w" and item == 2 else (64, 32, 128)
        columns = 64 if inside else min(sizes, key=lambda c: ceil(channels / c) * c)
        if columns == NARROW and half > 0 and -size % width > max(-size % half, size // 10):
            way = way._replace(width=half)
        columns = max(min(columns, _power(channels)), 16 // item if each >= 16 // item else each)
    while elements // columns >= 2 * lanes(p, way) and columns < _power(channels):
        columns *= 2
    return way._replace(rows=max(1, elements // columns), columns=columns, height=over.results)
