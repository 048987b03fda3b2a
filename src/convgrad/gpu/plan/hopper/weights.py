"""w on Hopper: matrix products over boxes of pixels that the copy engine brings.

A candidate says how taps, channels and pixels are cut; a model of a multiprocessor picks one. See
`kernels/hopper/weights.py` for what the words mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, permutations
from math import ceil, gcd, prod
from typing import NamedTuple

from ....dtypes import DTYPES
from ....spec.problem import Ints, Problem, Role
from ...target import Target
from .. import choose
from ..axes import is_wide, strides, three
from ..patches import met
from ..records import PARTS, Constants, Descriptor, Launch, Plan, Values
from .parts import seconds as split_seconds
from .parts import splitting

_PARTS = {1: 1, 3: 2, 6: 3}

LAID = {"x": "x, laid anew", "y": "y, laid anew"}
"""The names of the areas for x and y in parts, or with taps as channels."""

MOST_FOLDED = 1024  # such channels
FEW = 32  # channels of x, below which its taps may be channels
PARTS_OF = {"bf16x6": (3, 6), "tf32": (2, 3)}
"""Into how many parts in bf16 a number of f32 is cut, and how many pairs of them count."""

MOST_WORKSPACE = 256 << 20
ALIGN = 16  # bytes
WHOLE = 64  # bytes of a pixel's taps in f32: with fewer at a time, a copy takes longer
STEPS = 8  # elements, from which the copy engine takes one, at most
LINE = 16  # pixels, at least, of a box whose pixels lie side by side
BOX = 256  # elements of an axis of a box, at most
REGISTERS = 192  # of a thread, for sums
REGISTERS_OF_PARTS = 160  # of numbers in three parts: what a box brings waits until it is added
SECOND_CACHE = 40 << 20  # bytes of tensors that stay in it
AGAIN = 3  # times that larger ones are read, where programs of different tiles are at different pixels
MOST_PARTS = 96  # of the units, where each has boxes of its own
CACHE_BYTES = 33  # of blocks that a multiprocessor gets in a cycle
RUN = 2.5  # cycles of a run of 128 bytes or fewer, of a box in parts
PIECE = 2.8  # cycles of a piece of a box, however few bytes it has
MOST_LOSS = 0.035  # of all programs, that may have nothing to do so that no tile ends within a run
STAGE = 24  # cycles of a stage besides
ARRIVES = 1500  # cycles until a box arrives
SHARED_BYTES = 128  # that shared memory moves in a cycle
IN_TF32 = 1.13  # times as many cycles as were fitted: the clock is lower under such loads
PROGRAM = 4e-6  # seconds before the first products
STORE = 40.0  # GB/s, at which a multiprocessor writes the sums of a tile
FINISH = 5e-6  # seconds of adding slots, besides their bytes
SLOT_SHARE = 1.6  # of the memory's rate, at which slots are written and read: they stay in the second cache


class Laying(NamedTuple):
    """A launch that lays a tensor anew, and the bytes that it writes."""

    launch: Launch
    size: int
    seconds: float = 0.0  # that it is expected to take

    @property
    def area(self) -> tuple[str, int]:
        """What it fills."""
        return self.launch.tensors[1][0], self.size


class Side(NamedTuple):
    """x or y as the kernel sees it."""

    tensor: str  # or an area
    channels: int  # of a group
    sizes: Ints  # of three axes
    strides: Ints  # of these and of n, in elements
    channel: int = 1  # from one channel to the next

    def ordered(self, order: Ints) -> Side:
        """The same with its axes in another order."""
        return self._replace(
            sizes=_ordered(self.sizes, order), strides=(*_ordered(self.strides, order), self.strides[3])
        )


class Taps(NamedTuple):
    """How y walks over x, by axis."""

    kernel: Ints
    stride: Ints
    dilation: Ints
    pad: Ints


class Result(NamedTuple):
    """How w is made of sums. Some taps of the problem may be channels of x to the kernel."""

    strides: Ints  # g, channels of y, channels of x, three axes
    channels: int  # of x, of a group
    kernel: Ints
    fold: Ints = (1, 1, 1)  # taps of each axis that are channels of x


class View(NamedTuple):
    """The problem as the kernel sees it. Axes are three, in any order."""

    x: Side
    y: Side
    images: int
    pairs: int  # of parts of numbers of f32
    item: int  # bytes of an element that is multiplied: 4 of tf32
    groups: int
    taps: Taps
    w: Result
    order: Ints = (0, 1, 2)  # of the problem's axes
    lines: str = ""  # of which tensors pixels of the last axis lie side by side, and channels apart: "y" or "xy"

    @property
    def parts(self) -> int:
        """Parts of a number."""
        return _PARTS[self.pairs]

    @property
    def bytes(self) -> int:
        """Bytes of x and y as the kernel reads them."""
        elements = sum(side.channels * prod(side.sizes) for side in (self.x, self.y))
        return elements * self.groups * self.images * self.parts * self.item

    def ordered(self, order: Ints) -> View:
        """The same with its axes in another order."""
        w = self.w
        strides = (*w.strides[:3], *_ordered(w.strides[3:], order))
        made = Result(strides, w.channels, _ordered(w.kernel, order), _ordered(w.fold, order))
        taps = Taps(*(_ordered(values, order) for values in self.taps))
        return self._replace(x=self.x.ordered(order), y=self.y.ordered(order), taps=taps, w=made, order=order)


def _ordered(values: Ints, order: Ints) -> Ints:
    return tuple(values[axis] for axis in order)


@dataclass(frozen=True)
class Cut:
    """A way to cut a view into tiles and boxes."""

    view: View
    box: Ints  # axis 0, axis 1, n, axis 2
    taps: int  # of a group, along axis 0
    step: int  # between taps of a group
    shift: int  # rows of a box between taps of a group
    units: int  # of a tile
    block: int  # channels of a unit
    columns: int  # channels of y that a group of warps multiplies
    split: int  # whether groups of warps share columns, then 2, or units
    joined: int  # groups of channels that are taken as one block of them
    skip: bool
    item: int  # bytes of an element

    @property
    def halo(self) -> int:
        """Rows of a box of x beyond those of y."""
        return (self.taps - 1) * self.shift

    @property
    def pixels(self) -> int:
        """Pixels of a box."""
        return prod(self.box)

    @property
    def sums(self) -> int:
        """Sums of 64 by the columns, of a tile."""
        return self.units * self.block // 64 * self.taps

    @property
    def rows(self) -> int:
        """Pixels of a box of x."""
        return self.pixels + self.halo * self.pixels // self.box[0]

    @property
    def room(self) -> int:
        """Pixels of shared memory for it: where units lie beside each other, they are a power of two apart."""
        return self.rows if self.block == 64 else 1 << (self.rows - 1).bit_length()

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        pixels = self.pixels * self.columns * self.split + self.room * self.block * self.units
        return pixels * self.item * self.view.parts

    @property
    def copied(self) -> int:
        """Bytes that are copied for it."""
        return self.stage - (self.room - self.rows) * self.block * self.units * self.item * self.view.parts

    @property
    def copied_runs(self) -> int:
        """Runs of 128 bytes or fewer that are copied for it."""
        per = 128 // self.item
        of_y, of_x = (ceil(channels / per) for channels in (self.columns, self.block))
        return (self.pixels * self.split * of_y + self.rows * self.units * of_x) * self.view.parts

    @property
    def products(self) -> int:
        """Sums of 64 by the columns of a group of warps that both groups take, the slower one twice."""
        return 2 * (self.sums if self.split == 2 else ceil(self.sums / 2))

    @property
    def pieces(self) -> int:
        """Pieces of shared memory's rows, of 128 bytes at most, that are copied for a stage."""
        y = self.columns * self.split * self.pixels // min(self.box[3], 64)
        if not self.view.lines:
            y = self.pixels * ceil(self.columns * self.split / 64)
        x = self.block * self.pixels // min(self.box[3], 64) if "x" in self.view.lines else self.rows
        return y + x * self.units

    @property
    def registers(self) -> int:
        """Of a thread, for sums."""
        # In bf16x6, what a box brings to a sum is added to it.
        return (self.products // 2 + (1 if self.view.pairs == 6 else 0)) * self.columns // 2

    @property
    def group_blocks(self) -> int:
        """Blocks of groups."""
        return ceil(self.view.groups / self.joined)

    @cached_property
    def blocks(self) -> int:
        """Blocks of channels of x in a block of groups."""
        return ceil(_width(self.view.x.channels * self.joined, self.group_blocks, self.item) / self.block)

    @cached_property
    def runs(self) -> int:
        """Runs of channels of y in a block of groups."""
        width = _width(self.view.y.channels * self.joined, self.group_blocks, self.item)
        return ceil(width / (self.columns * self.split))

    @property
    def all_units(self) -> int:
        """Units of a block of groups."""
        first = self.step * ceil(ceil(self.view.taps.kernel[0] / self.step) / self.taps)
        return first * self.view.taps.kernel[1] * self.view.taps.kernel[2] * self.blocks

    @property
    def unit_parts(self) -> int:
        """Tiles of a block of groups and a run of channels of y."""
        return ceil(self.all_units / self.units)

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.group_blocks * self.unit_parts * self.runs

    @cached_property
    def whole(self) -> int:
        """The length of the list for a block of groups."""
        if not self.skip:
            return self.unit_parts * self.runs * self._boxes([(0, size) for size in self.view.y.sizes])
        return self.runs * (self.starts[-1] + self._boxes(self._spans(self.unit_parts - 1)))

    @cached_property
    def starts(self) -> Ints:
        """Where the boxes of each part begin in the list of a run of columns, if they are not equally many."""
        if not self.skip:
            return (0, 0)
        return (0, *accumulate(self._boxes(self._spans(part)) for part in range(self.unit_parts - 1)))

    def _boxes(self, spans: list[tuple[int, int]]) -> int:
        counts = [ceil(max(0, end - begin) / size) for (begin, end), size in zip(spans, self.sides, strict=True)]
        return prod(counts) * ceil(self.view.images / self.box[2])

    @property
    def sides(self) -> Ints:
        """Pixels of a box along the three axes."""
        return (self.box[0], self.box[1], self.box[3])

    def _spans(self, part: int) -> list[tuple[int, int]]:
        """From where to where pixels of each axis meet x by any tap of a tile."""
        view = self.view
        spans = [(size, 0) for size in view.y.sizes]
        for unit in range(part * self.units, min((part + 1) * self.units, self.all_units)):
            group = unit // self.blocks
            k2 = group % view.taps.kernel[2]
            group //= view.taps.kernel[2]
            k1 = group % view.taps.kernel[1]
            group //= view.taps.kernel[1]
            k0 = group % self.step + group // self.step * self.step * self.taps
            last = min(k0 + self.step * (self.taps - 1), view.taps.kernel[0] - 1)
            reached = (self._reach(0, k0, last), self._reach(1, k1, k1), self._reach(2, k2, k2))
            spans = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(spans, reached, strict=True)]
        return spans

    def _reach(self, axis: int, first: int, last: int) -> tuple[int, int]:
        view = self.view
        stride, dilation, pad = view.taps.stride[axis], view.taps.dilation[axis], view.taps.pad[axis]
        start = ceil(max(0, pad - last * dilation) / stride)
        stop = ceil(max(0, view.x.sizes[axis] + pad - first * dilation) / stride)
        return start, min(stop, view.y.sizes[axis])

    @property
    def walk(self) -> Ints:
        """What the kernel calls WALK."""
        view = self.view
        taps = (*view.taps.kernel, *view.taps.stride, *view.taps.dilation, *view.taps.pad)
        return (*taps, *self.box, self.step, self.taps, self.units, int(self.skip), len(self.view.lines))


def _width(channels: int, blocks: int, item: int) -> int:
    """Channels of a block of groups, with those before it down to a multiple of 16 bytes."""
    per = ALIGN // item
    return channels + max(channels * block % per for block in range(min(blocks, per)))


def plan(p: Problem, target: Target, precision: str) -> Plan | str:
    """The plan for a problem, or why there is none."""
    if p.wanted != "w":
        return "it takes weight gradients"
    precision = "bf16x6" if precision == "default" else precision
    if p.dtype == "f32":
        p = met(p) if precision == "bf16x6" else p
        if precision not in PARTS_OF:
            return f"it takes f32 by {' and '.join(PARTS_OF)}"
    elif p.dtype not in ("bf16", "f16"):
        return "it takes f32, bf16 and f16"
    if p.bias_stride is not None:
        return "it adds no bias"
    if precision == "tf32" and p.dtype == "f32" and p.cx >= FEW and _lies_apart(p):
        return "channels do not lie side by side: with copies, products are quicker than those of parts"
    if not p.flops:
        return "there is no product"
    found = views(p, precision, target)
    return found if isinstance(found, str) else best_of(p, found, target, precision)


def best_of(
    p: Problem, found: list[tuple[View, tuple[Laying, ...]]], target: Target, precision: str = "default"
) -> Plan | str:
    """The plan by the best cut of these views."""
    best, time = None, 0.0
    for view, before in found:
        laid = sum(laying.seconds for laying in before)
        for cut in cuts(view, view.item, target):
            expected = seconds(p, cut, target)
            if expected and (best is None or expected + laid < time):
                best, time = (cut, before), expected + laid
    if best is None:
        return "no tile of it fits into shared memory, or its sums not into a workspace"
    if p.dtype == "f32" and precision == "bf16x6":
        plain = choose.plan(p, target, precision)
        if not isinstance(plain, str) and plain.seconds <= time:
            return f"in three parts it takes {time * 1e6:.0f} us, at once {plain.seconds * 1e6:.0f}"
    return settle(p, target, *best, time)


def settle(p: Problem, target: Target, cut: Cut, before: tuple[Laying, ...], time: float) -> Plan:
    """The plan of a cut."""
    programs = programs_of(p, cut, target)
    launches = (*(laying.launch for laying in before), _sums(p, target, cut, programs), _finish(p, cut, programs))
    areas = ((PARTS, slots(cut, programs) * _slot_bytes(cut)), *(laying.area for laying in before))
    taps = f", {cut.taps} taps from one box" if cut.taps > 1 else ""
    told = "x".join(map(str, cut.box))
    notes = [
        f"tiles of {cut.units} blocks of {cut.block} channels of x{taps}, by {cut.columns * cut.split} channels of y",
        f"boxes of {told} pixels (axis, axis, n, axis), {cut.whole * cut.group_blocks} of {cut.tiles} tiles, "
        f"cut evenly into {programs} programs" + ("; taps that meet padding alone are left out" if cut.skip else ""),
    ]
    if (many := prod(cut.view.w.fold)) > 1:
        notes.append(f"{many} taps of {p.cx} channels of x are laid side by side first")
    if cut.view.pairs > 1:
        notes.append(f"products of f32 as {cut.view.pairs} products of parts in bf16, all of a box together")
    size = (64 * cut.sums, cut.columns * cut.split, cut.pixels)
    does = "matrix products over boxes of pixels by warps with roles, slots of sums added in their order"
    precision = f"bf16x{cut.view.pairs}" if cut.view.pairs > 1 else "tf32" if cut.view.item == 4 else ""
    return Plan("weights_boxes", does, launches, areas, time, tuple(notes), precision, size, programs)


def is_plain(cut: Cut) -> bool:
    """Whether tiles of 16-bit numbers are equally long, and read the same tensors."""
    return cut.item == 2 and cut.view.pairs == 1 and not cut.skip and cut.view.groups == 1


def programs_of(p: Problem, cut: Cut, target: Target) -> int:
    """As many programs as multiprocessors or, where it pays, so many that each tile has equally many.

    These read the same pixels at the same time: what one of them brings into the second cache serves the others, too.
    """
    most = min(target.multiprocessors, cut.whole * cut.group_blocks)
    even = most // cut.tiles * cut.tiles
    if is_plain(cut):
        return even if even >= (1 - MOST_LOSS) * most else most
    if cut.skip or even in (0, most) or not _is_read_again(p, cut):
        return most
    return min(most, even, key=lambda programs: _seconds(p, cut, target, programs))


def _is_read_again(p: Problem, cut: Cut) -> bool:
    """Whether several tiles read what the second cache does not hold. In 16 bits that was not looked at."""
    return cut.item == 4 and p.bytes > SECOND_CACHE and cut.tiles > cut.group_blocks


def slots(cut: Cut, programs: int) -> int:
    """Every program has a slot for each tile that it meets."""
    return programs + cut.tiles


def _slot_bytes(cut: Cut) -> int:
    return cut.sums * 64 * cut.columns * cut.split * 4


def views(p: Problem, precision: str, target: Target) -> list[tuple[View, tuple[Laying, ...]]] | str:
    """How the kernel may see the problem, each way with what has to be launched first; or why it cannot."""
    axes = three(p)
    most = max(p.n * prod(axes.x), p.n * prod(axes.y), *(d * k for d, k in zip(axes.dilation, axes.w, strict=True)))
    if most >= 2**28:
        return "sizes go beyond 31 bits"
    if precision == "tf32" and p.dtype == "f32" and (in_tf32 := _in_tf32(p, target)):
        return in_tf32
    parts, pairs = PARTS_OF[precision] if p.dtype == "f32" else (1, 1)
    sides: dict[str, Side | str] = {}
    lines = ""
    before: list[Laying] = []
    for role, channels in (("x", p.cx), ("y", p.cy)):
        if parts > 1:
            splits = splitting(p, role, LAID[role], parts)
            before.append(Laying(splits.launch, splits.size, split_seconds(p, splits, target)))
            sides[role] = _laid(p, role, three(p).sizes(role), p.g * channels)._replace(channels=channels)
        else:
            sides[role] = _as_it_is(p, role, channels)
    x, y = sides["x"], sides["y"]
    if isinstance(y, str) and parts == 1 and not isinstance(found_y := in_lines(p, "y", p.cy), str):
        y, lines = found_y, "y"
    if isinstance(y, str):
        return y
    found: list[tuple[View, tuple[Laying, ...]]] = []
    direct = x if isinstance(x, str) else look(p, x, y, pairs)
    if not isinstance(direct, str):
        found.append((direct, tuple(before)))
    if _has_few(p) and (isinstance(direct, str) or prod(p.w) > 1):
        found += folded(p, y, pairs, tuple(before[-1:]), target)
    if lines:
        found = [(view._replace(lines=lines), laid) for view, laid in found if view.y.strides[2] == 1]
    return found or str(direct)


def _has_few(p: Problem) -> bool:
    """Whether taps may be channels: where x has few of them, or is no smaller with taps."""
    return p.g == 1 and (p.cx < FEW or prod(p.y) * prod(p.w) <= 2 * prod(p.x))


def _lies_apart(p: Problem) -> bool:
    """Whether channels of x or y do not lie side by side."""
    return any(p.strides(role)[2] != 1 for role, channels in (("x", p.cx), ("y", p.cy)) if channels > 1)


def in_lines(p: Problem, role: Role, channels: int) -> Side | str:
    """A tensor whose pixels lie side by side, as the copy engine takes it, or why it does not."""
    n, g, c, *of = strides(p, role)
    sizes, item = three(p).sizes(role), DTYPES[p.dtype].size
    if of[2] != 1 or (p.g > 1 and g != channels * c):
        return f"pixels of {role} do not lie side by side"
    channel = c if channels > 1 else g if p.g > 1 else max(n, 1)
    pairs = [*zip((*sizes[:2], p.n), (*of[:2], n), strict=True), (p.g * channels, channel)]
    if any(size > 1 and (step <= 0 or step * item % ALIGN) for size, step in pairs):
        return f"steps of {role} are no multiples of {ALIGN} bytes"
    # A stride that no element uses still has to be one that the copy engine takes.
    most = max([step for size, step in pairs if size > 1], default=ALIGN)
    made = tuple(step if size > 1 else most for size, step in pairs)
    return Side(role, channels, sizes, (*made[:2], 1, made[2]), made[3])


def _in_tf32(p: Problem, target: Target) -> list[tuple[View, tuple[Laying, ...]]]:
    """The problem with numbers of f32 where they lie, and with taps as channels; nothing if channels do not fit."""
    x, y = _as_it_is(p, "x", p.cx), _as_it_is(p, "y", p.cy)
    if isinstance(y, str):
        return []
    view = x if isinstance(x, str) else look(p, x, y, 1, 4)
    found: list[tuple[View, tuple[Laying, ...]]] = [] if isinstance(view, str) else [(view, ())]
    return found + folded(p, y, 1, (), target, 4) if _has_few(p) and (not found or prod(p.w) > 1) else found


def _as_it_is(p: Problem, role: str, channels: int) -> Side | str:
    """A tensor as the copy engine takes it, or why it does not."""
    n, g, c, *space = strides(p, role)
    if (channels > 1 and c != 1) or (p.g > 1 and g != channels):
        return f"channels of {role} do not lie side by side"
    sizes, item = three(p).sizes(role), DTYPES[p.dtype].size
    pairs = list(zip((*sizes, p.n), (*space, n), strict=True))
    if any(size > 1 and (step <= 0 or step * item % ALIGN) for size, step in pairs):
        return f"steps of {role} are no multiples of {ALIGN} bytes"
    # A stride that no element uses still has to be one that the copy engine takes.
    most = max([step for size, step in pairs if size > 1], default=ALIGN)
    return Side(role, channels, sizes, tuple(step if size > 1 else most for size, step in pairs))


def _laid(p: Problem, role: str, sizes: Ints, channels: int, item: int = 2) -> Side:
    """A tensor that is laid anew."""
    piece = (ALIGN if item == 2 else WHOLE) // item
    width = ceil(channels / piece) * piece
    steps = (sizes[1] * sizes[2] * width, sizes[2] * width, width, prod(sizes) * width)
    return Side(LAID[role], channels, sizes, steps)


def look(p: Problem, x: Side, y: Side, pairs: int, item: int = 2) -> View | str:
    """The problem as it is, or why the copy engine cannot read x."""
    axes = three(p)
    sizes, steps, stride = list(x.sizes), list(x.strides), list(axes.stride)
    for axis in range(3):
        if axes.y[axis] == 1:
            stride[axis] = 1
        elif stride[axis] > 1 and axes.w[axis] == 1 and axes.pad[axis] == 0:
            # There is one tap: what lies between its pixels is nobody's business.
            sizes[axis] = ceil(sizes[axis] / stride[axis])
            steps[axis] *= stride[axis]
            stride[axis] = 1
    taps = Taps(axes.w, tuple(stride), axes.dilation, axes.pad)
    seen = x._replace(sizes=tuple(sizes), strides=tuple(steps))
    view = View(seen, y, p.n, pairs, item, p.g, taps, Result(strides(p, "w"), p.cx, axes.w))
    for axis in range(3):
        view = _unfolded(view, axis)
    view = _merged(view)
    return view if max(view.taps.stride) <= STEPS else f"a stride is above {STEPS}"


def _unfolded(view: View, axis: int) -> View:
    """Where windows touch, windows and their elements are two axes, if one of the three is free for the elements."""
    taps = view.taps
    stride, touching = taps.stride[axis], (taps.stride[axis], 1, 0)
    free = [a for a in range(3) if (taps.kernel[a], view.x.sizes[a], view.y.sizes[a]) == (1, 1, 1)]
    touches = (taps.kernel[axis], taps.dilation[axis], taps.pad[axis]) == touching
    if stride == 1 or not touches or not free or view.y.sizes[axis] * stride > view.x.sizes[axis]:
        return view

    def moved(values: Ints, kept: int, other: int) -> Ints:
        return tuple(kept if a == axis else other if a == free[0] else value for a, value in enumerate(values))

    step, of_w = view.x.strides[axis], view.w.strides[3 + axis]
    w = (*view.w.strides[:3], *moved(view.w.strides[3:], 0, of_w))
    return view._replace(
        x=view.x._replace(
            sizes=moved(view.x.sizes, view.y.sizes[axis], stride),
            strides=(*moved(view.x.strides[:3], step * stride, step), view.x.strides[3]),
        ),
        taps=Taps(moved(taps.kernel, 1, stride), moved(taps.stride, 1, 1), taps.dilation, taps.pad),
        w=view.w._replace(strides=w, kernel=moved(view.w.kernel, 1, stride)),
    )


def _merged(view: View) -> View:
    """Axes that have one tap, and images, are one long axis where they lie in memory so: boxes of it waste nothing."""
    taps = view.taps
    single = [a for a in range(3) if (taps.kernel[a], taps.stride[a], taps.pad[a]) == (1, 1, 0)]
    single = [a for a in single if view.x.sizes[a] == view.y.sizes[a] > 1]
    sides = [[list(side.sizes), list(side.strides)] for side in (view.x, view.y)]
    for at, outer in enumerate(single):
        for inner in single[at + 1 :]:
            if all(steps[outer] == steps[inner] * sizes[inner] and sizes[outer] > 1 for sizes, steps in sides):
                for sizes, _ in sides:
                    sizes[inner], sizes[outer] = sizes[inner] * sizes[outer], 1
                break
    images = view.images
    for inner in single:
        if images > 1 and all(steps[3] == steps[inner] * sizes[inner] for sizes, steps in sides):
            for sizes, steps in sides:
                sizes[inner] *= images
                steps[3] *= images  # from part to part
            images = 1
    x, y = (
        side._replace(sizes=tuple(sizes), strides=tuple(steps))
        for side, (sizes, steps) in zip((view.x, view.y), sides, strict=True)
    )
    return view._replace(x=x, y=y, images=images)


def folded(
    p: Problem, y: Side, pairs: int, before: tuple[Laying, ...], target: Target, item: int = 2
) -> list[tuple[View, tuple[Laying, ...]]]:
    """The problem with taps as channels of x: all of them, or all but some along the first axis."""
    axes, first = three(p), 3 - p.rank
    rows = [axes.w[first]]
    if axes.dilation[first] == 1 and axes.stride[first] < axes.w[first]:
        rows.append(axes.stride[first])
    found = []
    for some in rows:
        left = ceil(axes.w[first] / some)
        fold = tuple(some if axis == first else many for axis, many in enumerate(axes.w))
        kernel = tuple(left if axis == first else 1 for axis in range(3))
        sizes = tuple(size + (left - 1 if axis == first else 0) for axis, size in enumerate(axes.y))
        x = _laid(p, "x", sizes, prod(fold) * p.cx, item)
        laying = _lay(p, x, fold, (_PARTS[pairs], item), target)
        taps = Taps(kernel, (1, 1, 1), (1, 1, 1), (0, 0, 0))
        view = _merged(View(x, y, p.n, pairs, item, 1, taps, Result(strides(p, "w"), p.cx, axes.w, fold)))
        fits = x.channels <= MOST_FOLDED and p.n * prod(sizes) < 2**27 and laying.size <= MOST_WORKSPACE
        if fits:
            found.append((view, (laying, *before)))
    return found


def lay_seconds(launch: Launch, sizes: tuple[int, int], target: Target) -> float:
    """The time that it takes to lay taps side by side, of so many bytes that are read and written."""
    parts: int = launch.constant("SPLIT")
    run: int = launch.constant("FOLD")[2] * launch.constant("CHANNELS")
    # Elements are read one by one where they do not come in pieces of 16 bytes.
    each = 8 if run % 8 == 0 and launch.constant("FLAT") else 30
    elements = sizes[1] / DTYPES[launch.tensors[1][1]].size
    instructions = elements * (each / parts + 4) / (128 * target.multiprocessors * target.clock * 1e9)
    return max(1.1 * sum(sizes) / (target.bandwidth * 1e9 * 0.8), instructions) + FINISH


def _lay(p: Problem, side: Side, fold: Ints, kind: tuple[int, int], target: Target) -> Laying:
    """x with taps as channels. `kind`: the parts of a number, and their bytes."""
    (parts, item), axes, of = kind, three(p), strides(p, "x")
    width = side.strides[2]
    # Pieces of a row that several programs wrote took more than twice as long.
    columns = min(64, 1 << (width - 1).bit_length())
    pixels = 2048 // columns
    step = of[2] if p.cx > 1 else 1
    channels = side.channels // prod(fold)
    flat = step == 1 and axes.dilation[2] == 1 and (axes.x[2] == 1 or of[5] == channels)
    values: Values = (
        ("x_strides", (of[0], step, *of[3:])),
        ("images", p.n),
    )
    constants: Constants = (
        ("X_SIZES", axes.x),
        ("OUT_SIZES", side.sizes),
        ("STEPS", axes.stride),
        ("SPREAD", axes.dilation),
        ("PADS", axes.pad),
        ("FOLD", fold),
        ("SPLIT", parts),
        ("CHANNELS", channels),
        ("WIDTH", width),
        ("FLAT", flat),
        ("PIXELS", pixels),
        ("COLUMNS", columns),
        ("WIDE", is_wide(p)),
    )
    size = p.n * prod(side.sizes) * width * parts * item
    count = ceil(p.n * prod(side.sizes) / pixels) * ceil(width / columns)
    dtype = "bf16" if p.dtype == "f32" and item == 2 else p.dtype
    launch = Launch("fold_taps", count, (("x", p.dtype), (LAID["x"], dtype)), values, constants, 4, 1, "hopper.weights")
    return Laying(launch, size, lay_seconds(launch, (p.size("x") * DTYPES[p.dtype].size, size), target))


def cuts(view: View, item: int, target: Target) -> Iterator[Cut]:
    """The ways to cut a view that are tried."""
    most = REGISTERS_OF_PARTS if view.pairs == 6 else REGISTERS
    orders = [order for order in permutations(range(3)) if order[1] < order[2]]
    if view.lines:
        orders = [order for order in orders if order[2] == 2]
    for order in orders:
        seen = view.ordered(order)
        for taps, step, shift in _groups_of_taps(seen):
            if taps == 1 and order != orders[0]:
                continue
            for skip in (False, True):
                # Boxes of what is left may begin anywhere, but lines at multiples of 16 bytes alone.
                if skip and (view.lines or (taps > 1 and seen.taps.kernel[1:] == (1, 1)) or not any(seen.taps.pad)):
                    continue
                for box in _boxes(seen, taps, shift, skip):
                    for units, block, columns, split, joined in _tiles(seen, taps, item):
                        cut = Cut(seen, box, taps, step, shift, units, block, columns, split, joined, skip, item)
                        if skip and not _is_worth_skipping(cut):
                            continue
                        if cut.registers <= most and _stages(cut, target) >= 2:
                            yield cut


def _is_worth_skipping(cut: Cut) -> bool:
    """Whether enough boxes lie in the padding for all taps of a tile."""
    return 1 < cut.unit_parts <= MOST_PARTS and cut.whole < 0.97 * replace(cut, skip=False).whole


def _groups_of_taps(view: View) -> Iterator[Ints]:
    """Taps that read one box along the first axis, how far they are apart, and by how many rows."""
    yield 1, 1, 0
    stride, dilation, kernel = view.taps.stride[0], view.taps.dilation[0], view.taps.kernel[0]
    step = stride // gcd(stride, dilation)
    shift = dilation * step // stride
    for taps in (2, 3, 4, 5):
        if (taps - 1) * step < kernel and (taps - 1) * shift <= 16:
            yield taps, step, shift


@lru_cache(maxsize=256)
def _four(pixels: int) -> tuple[Ints, ...]:
    """Four powers of two whose product is that."""
    bits = pixels.bit_length() - 1
    found = []
    for a in range(bits + 1):
        for b in range(bits + 1 - a):
            for c in range(bits + 1 - a - b):
                found.append((1 << a, 1 << b, 1 << c, 1 << (bits - a - b - c)))
    return tuple(found)


def _boxes(view: View, taps: int, shift: int, skip: bool) -> Iterator[Ints]:
    """The boxes that waste the fewest pixels, with the fewest rows of halo."""
    sizes = (view.y.sizes[0], view.y.sizes[1], view.images, view.y.sizes[2])
    stride = (view.taps.stride[0], view.taps.stride[1], 1, view.taps.stride[2])
    found = []
    for pixels in (64, 32) if view.item == 2 else (32,):
        for box in _four(pixels):
            if any(side * step > BOX for side, step in zip(box, stride, strict=True)):
                continue
            if view.lines and box[3] < LINE:
                continue  # a line fills 32 bytes of shared memory at least
            if taps > 1 and (pixels // box[0]) % 8:
                continue
            if view.pairs > 1 and view.images % box[2]:  # beyond its images, a part is followed by the next one
                continue
            if skip and taps == 1 and max(box[0], box[1], box[3]) > 8:
                continue
            covered = prod(ceil(size / side) * side for size, side in zip(sizes, box, strict=True))
            halo = 1 + 0.25 * (taps - 1) * shift / box[0]
            # Of boxes alike, the one whose pixels lie closest together.
            found.append((covered * halo * (1.06 if pixels == 32 and view.item == 2 else 1.0), -box[3], -box[1], box))
    found.sort()
    best = [box for *_, box in found[: 4 if view.lines else 2]]
    if view.parts > 1:  # boxes of all parts are large: half of one may be what fits into shared memory
        best += [box for *_, box in found if prod(box) == 32 and box not in best][:2]
    if skip and taps == 1 and not view.lines:
        single = (1, 1, 64 if view.item == 2 else 32, 1)
        best += [single] if single not in best and (view.pairs == 1 or view.images % 64 == 0) else []
    yield from best


def _tiles(view: View, taps: int, item: int) -> Iterator[Ints]:
    """Units, channels of a unit, columns, split, and groups of channels taken together."""
    joined = 1
    if view.groups > 1:
        while joined < view.groups:
            blocks = ceil(view.groups / (joined * 2))
            x_width = _width(view.x.channels * joined * 2, blocks, item)
            y_width = _width(view.y.channels * joined * 2, blocks, item)
            if max(x_width, y_width) > 64:
                break
            joined *= 2
    blocks = ceil(view.groups / joined)
    x_width = _width(view.x.channels * joined, blocks, item)
    y_width = _width(view.y.channels * joined, blocks, item)
    most = max(16, 1 << (y_width - 1).bit_length())
    for block in (64, 32, 16) if item == 2 else (64,) if "x" in view.lines else (32,):
        if item == 2 and block < 64 and (x_width > block or "x" in view.lines):
            continue
        beside = 64 // block
        for columns in (16, 32, 64, 128, 256):
            if columns > most or (item == 4 and columns > 128):
                continue
            for split in (1, 2):
                if split == 2 and columns * 2 > most:
                    continue
                for units in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14):
                    if units * taps < 2 and split == 1:
                        continue
                    if units * taps > 16:
                        continue
                    yield units * beside, block, columns, split, joined


def _stages(cut: Cut, target: Target) -> int:
    """Stages that shared memory holds."""
    return min(8, (target.shared - 1024) // cut.stage)


def seconds(p: Problem, cut: Cut, target: Target) -> float:
    """The time that a cut is expected to take; 0 if it cannot be taken."""
    programs = programs_of(p, cut, target)
    room = slots(cut, programs) * _slot_bytes(cut)
    if cut.whole * cut.group_blocks >= 2**31 or room > MOST_WORKSPACE:
        return 0.0
    return _seconds(p, cut, target, programs)


def _seconds(p: Problem, cut: Cut, target: Target, programs: int) -> float:
    """The same with so many programs."""
    total, apart = cut.whole * cut.group_blocks, cut.skip or programs % cut.tiles > 0 or cut.view.pairs > 1
    few = _stages(cut, target)
    stage = (_cycles_in_tf32(cut) if cut.item == 4 else _cycles(cut, target)) + STAGE
    if cut.view.parts > 1:  # others may take as long as all but one of the boxes are multiplied
        stage = max(stage, (_copies(cut) + ARRIVES) / (few - 1))
    else:
        stage *= 1.0 if few >= 4 else 1.03 if few == 3 else 1.5
    each = ceil(total / programs)
    met = min(each, 1 + cut.tiles / programs) if apart else 1
    found = each * stage / (target.clock * 1e9) + PROGRAM + met * _slot_bytes(cut) / (STORE * 1e9)
    given = p.bytes if cut.view.pairs == 1 else cut.view.bytes
    read = given * (AGAIN if apart and _is_read_again(p, cut) else 1)
    found = max(found, read / (target.bandwidth * 1e9 * 0.85) + PROGRAM)
    found += (0.08 if cut.item == 2 else 0.04) * total * cut.copied / (target.bandwidth * 1e9)
    if is_plain(cut) and apart:
        # Programs of several tiles do not read the same pixels at the same time: these come from memory again.
        memory = p.bytes / (target.bandwidth * 1e9)
        found += memory * min(1.0, 2 * memory / found)
    moved = 2 * (programs * met) * _slot_bytes(cut)
    return found + FINISH + moved / (target.bandwidth * 1e9 * SLOT_SHARE)


def _cycles(cut: Cut, target: Target) -> float:
    """What a stage of 16 bits takes a multiprocessor."""
    # A product of 64 by 16 by so many columns takes half as many cycles, and reads both operands from shared memory,
    # 128 bytes a cycle at best.
    one = max(cut.columns / 2, 16 + cut.columns / 3.7) * 4096 / target.matrix
    copies = _copies(cut)
    compute = cut.products * cut.pixels / 16 * one * 1.05 * cut.view.pairs
    stage = max(compute, copies) + 0.1 * min(compute, copies)
    return stage * (1.06 if cut.view.pairs == 6 else 1.0)


def _copies(cut: Cut) -> float:
    """The cycles that it takes to copy a stage of 16 bits."""
    copies = cut.copied / CACHE_BYTES
    if cut.view.lines:
        return max(copies, cut.pieces * PIECE)
    return max(copies, cut.copied_runs * RUN) if cut.view.parts > 1 else copies


def _cycles_in_tf32(cut: Cut) -> float:
    """What a stage in tf32 takes a multiprocessor: products, shared memory or, where these are little, waiting."""
    columns = cut.columns * cut.split
    products = cut.products * cut.pixels / 8 * cut.columns / 2
    # x is copied to shared memory and read from it for every product, y is copied, turned and read. Lines need no turn.
    lines = bool(cut.view.lines)
    moved = cut.copied / 2 + (cut.products * 64 + (0 if lines else 2 * columns)) * cut.pixels * cut.item
    shared = (moved / SHARED_BYTES + products / 2) * (1.15 if cut.taps > 1 else 1.0)
    waiting = cut.products / 2 * cut.pixels * 6
    turning = 0.0 if lines else 500 + 170 * columns / min(32, cut.columns)
    copies = _copies(cut) if lines else cut.copied / CACHE_BYTES
    # Where sums take most registers, what is uneven or leaves taps out has addresses that do not fit beside them.
    full = cut.registers > 160 and (cut.skip or (cut.split == 1 and cut.sums % 2 == 1))
    return max(1.1 * products, 1.08 * shared, waiting, turning, copies) * IN_TF32 * (1.2 if full else 1.0)


def _sums(p: Problem, target: Target, cut: Cut, programs: int) -> Launch:
    view, item = cut.view, cut.item
    kind = "bf16" if p.dtype == "f32" and item == 2 else p.dtype
    images = view.images * view.parts
    more = cut.halo & -cut.halo or 1
    y_shape = (*view.y.sizes[:2], images, view.y.sizes[2], view.groups * view.y.channels)
    y_strides = (*view.y.strides[:2], view.y.strides[3], view.y.strides[2], 1)
    y_block, y_swizzle = (*cut.box, cut.columns), min(128, cut.columns * item)
    x_shape = (*view.x.sizes[:2], images, view.x.sizes[2], view.groups * view.x.channels)
    x_strides = (*view.x.strides[:2], view.x.strides[3], view.x.strides[2], 1)
    steps = (*view.taps.stride[:2], 1, view.taps.stride[2], 1) if max(view.taps.stride) > 1 else ()
    x_block, halo_block = (*cut.box, cut.block), (more, *cut.box[1:], cut.block)
    x_swizzle = min(128, cut.block * item)
    if "y" in view.lines:
        y_shape, y_block = _turned(y_shape), _turned(y_block)
        y_strides, y_swizzle = (*y_strides[:3], view.y.channel, 1), cut.box[3] * item
    if "x" in view.lines:
        x_shape, x_block, halo_block = _turned(x_shape), _turned(x_block), _turned(halo_block)
        x_strides, x_swizzle = (*x_strides[:3], view.x.channel, 1), cut.box[3] * item
    descriptors = (
        Descriptor(view.y.tensor, kind, y_shape, y_strides, y_block, y_swizzle),
        Descriptor(view.x.tensor, kind, x_shape, x_strides, x_block, x_swizzle, steps=steps),
        Descriptor(view.x.tensor, kind, x_shape, x_strides, halo_block, x_swizzle, steps=steps),
    )
    values = _list(cut)
    constants: Constants = (
        ("WALK", cut.walk),
        ("BLOCK", cut.block),
        ("COLUMNS", cut.columns),
        ("SPLIT", cut.split),
        ("HALO", cut.halo),
        ("ROOM", cut.room),
        ("HALO_BOX", more),
        ("STAGES", _stages(cut, target)),
        ("PARTS", view.parts),
        ("REGISTERS", 216 if cut.registers <= 160 else 232),
        ("TF32", item == 4),
    )
    tensors = ((PARTS, "f32"),)
    return Launch("weights_boxes", programs, tensors, values, constants, 4, 1, "hopper.weights", descriptors)


def _turned(values: Ints) -> Ints:
    """Of a box or a tensor, what the copy engine is told where pixels lie innermost: they come after channels."""
    return (*values[:3], values[4], values[3])


def _list(cut: Cut) -> Values:
    """What both kernels are told of the list of tiles and boxes."""
    view = cut.view
    return (
        ("x_sizes", view.x.sizes),
        ("y_sizes", view.y.sizes),
        ("images", view.images),
        ("blocks", cut.blocks),
        ("units", cut.all_units),
        ("columns", cut.runs),
        ("whole", cut.whole),
        ("total", cut.whole * cut.group_blocks),
        ("x_group", view.x.channels * cut.joined),
        ("y_group", view.y.channels * cut.joined),
        ("starts", cut.starts),
    )


def _finish(p: Problem, cut: Cut, programs: int) -> Launch:
    view, columns = cut.view, cut.columns * cut.split
    per_tile = programs / cut.tiles + 1
    # Rows and lanes of a program, slots side by side and after each other, and warps: enough to be under way at once.
    shapes = (
        (64, (16, 16, 64, 1, 16)),
        (16, (16, 16, 32, 1, 8)),
        (8, (16, 16, 16, 1, 4)),
        (4, (32, 16, 1, 8, 4)),
        (0, (64, 32, 1, 4, 4)),
    )
    rows, lanes, beside, after, warps = next(shape for least, shape in shapes if per_tile > least)
    lanes = min(lanes, columns)
    of_w = view.w.strides
    unit = 2 if of_w[2] == 1 else 1 if of_w[1] == 1 else -1
    values: Values = (
        *_list(cut),
        ("runs", programs),
        ("groups", view.groups),
        ("x_channels", view.w.channels),
        ("y_channels", view.y.channels),
        ("kernel", view.w.kernel),
        ("out_strides", view.w.strides),
    )
    constants: Constants = (
        ("WALK", cut.walk),
        ("BLOCK", cut.block),
        ("COLUMNS", columns),
        ("FOLD", view.w.fold),
        ("GROUPED", view.groups > 1),
        ("ALIGN", ALIGN // cut.item),
        ("ROWS", rows),
        ("LANES", lanes),
        ("SLOTS", beside),
        ("MORE", after),
        ("UNIT", unit),
        ("LONG", cut.whole * cut.group_blocks * programs >= 2**31),
        ("WIDE", is_wide(p)),
        ("ACCUMULATE", p.accumulate),
    )
    count = cut.tiles * cut.sums * (64 // rows) * (columns // lanes)
    tensors = ((PARTS, "f32"), ("w", p.out_dtype))
    return Launch("finish_weights", count, tensors, values, constants, warps, 1, "hopper.weights", early=True)
