"""Random problems for the engine, at the level of `Problem`: geometry, strides, dtypes. And the checker of a kernel.

Values are small integers, whose sums are exact in any order, so a result must equal the reference bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from unittest import mock

import numpy as np

from convgrad import reference
from convgrad.backend import Refusal
from convgrad.cpu import kernel
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.kernel import Kernel
from convgrad.cpu.plan import registry
from convgrad.cpu.target import Target, Tiles, named, native
from convgrad.cpu.wgrad.records import WeightGradient
from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem, dense_strides, settle, window_sizes
from translation import quick_code

from .guard import READ, READ_WRITE, Guarded, Workspace, check_gaps, gaps_between_buffers, poisoned_workspace

DTYPE_NAMES = ("f32", "bf16", "f16", "f64")
MOST = {"small": 2e7, "large": 4e8}  # floating-point operations


def targets() -> dict[str, Target]:
    """Machines to write code for, all of which run here. On some, a plan may use vectors of half the width.

    Tile registers are emulated: only tests/cpu/hardware.py uses those of the machine.

    Made-up ones have a vector of 3 (1 of f64), tiles that no planner would choose, and caches so small that every
    problem is cut into chunks, boxes, parts and slices, asks for boxes ahead and writes its results past the caches.
    """
    host = native().without_tiles()
    x86 = host.triple.startswith("x86_64")
    small = {"l1": 2048, "l2": 20000, "l3": 4000}
    found = {
        "native": host,
        "baseline": named("baseline"),
        "native in small caches": replace(host, **small),
        "halves": replace(host, double_pumped=True),
        "halves in small caches": replace(host, double_pumped=True, **small),
        "without halves": replace(host, double_pumped=False),
        "vector of 3": replace(host, width=12, tile=(5, 7)),
        "vector of 3 in small caches": replace(host, name="made up", width=12, tile=(2, 3), **small),
        "tile 3x2 in small caches": replace(host, tile=(3, 2), **small),
    }
    if x86 and host.name == "avx512":
        fewer = ",".join("-avx512bf16" if f == "+avx512bf16" else f for f in host.features.split(","))
        found["without pairs"] = replace(host, features=fewer)
        found["without pairs in small caches"] = replace(host, features=fewer, **small)
        found["avx2"] = named("avx2")
        found["avx2 in small caches"] = replace(named("avx2"), **small)
        tiles = Tiles(("bf16", "f16"), emulated=True)
        found["tiles"] = replace(host, name="amx", tiles=tiles)
        found["tiles in small caches"] = replace(host, name="amx", tiles=tiles, own_l2=20000, **small)
    return found


def invented(seed: int) -> Target:
    """A machine that nobody has built: any width, any tile, any caches."""
    rng = np.random.default_rng([seed, 1])

    def whole(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    base = list(targets().values())[whole(0, len(targets()) - 1)]
    width = 4 * whole(1, 16) if rng.random() < 0.7 else base.width
    tile = (whole(1, 9), whole(1, 4)) if rng.random() < 0.7 else None
    caches = {"l1": int(256 * 2 ** rng.uniform(0, 8)), "l2": int(2048 * 2 ** rng.uniform(0, 10))}
    caches["l3"] = int(caches["l2"] * 2 ** rng.uniform(-4, 4))
    name, halves = base.name if whole(0, 1) else "made up", bool(whole(0, 1))
    return replace(base, name=name, width=width, double_pumped=halves, tile=tile, **caches)


def draw(rng: np.random.Generator, size: str = "small") -> Problem:
    """A problem of a few to a few million products; a large one is cut into pieces on any machine."""
    while True:
        p = _draw_large(rng) if size == "large" else _draw(rng)
        elements = sum(p.size(role) for role in ("x", "w", "y"))
        if p.flops <= MOST[size] and elements <= 3e6 and prod(p.w) <= 2000:
            break
    if p.x_strides:
        return p
    return replace(p, **{f"{role}_strides": _strides(rng, p, role) for role in ("x", "w", "y")})


def numbered(seed: int) -> Problem:
    """The problem with a number; every fiftieth is a large one."""
    return draw(np.random.default_rng(seed), "large" if seed % 50 == 49 else "small")


def _draw(rng: np.random.Generator) -> Problem:
    kind = rng.random()
    if kind < 0.08:
        return _draw_pixels(rng, 3000)
    if kind < 0.16:
        return _draw_points(rng)
    if kind < 0.26:
        return _draw_rows(rng)
    if kind < 0.32:
        return _draw_stems(rng)
    if kind < 0.38:
        return _draw_images(rng)
    rank = int(rng.integers(1, 4))
    if rng.random() < 0.4:
        axes = [_usual_axis(rng, rank) for _ in range(rank)]
    else:
        axes = [_odd_axis(rng, rank) for _ in range(rank)]
    g, cx, cy = _channels(rng)
    return _problem(rng, axes, int(rng.choice([1, 1, 2, 3])), g, cx, cy)


def _draw_pixels(rng: np.random.Generator, most: int) -> Problem:
    """Many pixels and few weights, whose gradient is summed in slices."""
    rank = int(rng.integers(1, 3))
    axes = []
    for _ in range(rank):
        k = int(rng.integers(1, 4))
        x = int(rng.integers(most // 4, most)) if rank == 1 else int(rng.integers(most**0.5 / 2, most**0.5))
        axes.append(_axis(rng, x, k, int(rng.choice([1, 1, 2])), 1, int(rng.integers(0, k + 1)), 0))
    g = int(rng.choice([1, 1, 3, 20]))
    cx, cy = (int(v) for v in rng.integers(1, 20 if g == 1 else 3, 2))
    return _problem(rng, axes, int(rng.integers(1, 4)), g, cx, cy)


def _draw_points(rng: np.random.Generator) -> Problem:
    """A kernel of 1 over many pixels, which go to the lanes if they lie together."""
    sizes = (
        [int(rng.choice([64, 96, 100, 128, 200, 256, 400]))] if rng.random() < 0.5 else [8, int(rng.integers(8, 40))]
    )
    axes: list[Numbers] = [(size, 1, size, 1, 1, 0) for size in sizes]
    cx, cy = (int(v) for v in rng.choice(EDGES, 2)) if rng.random() < 0.5 else (int(v) for v in rng.integers(1, 300, 2))
    return _problem(rng, axes, int(rng.integers(1, 4)), 1, cx, cy)


def _draw_rows(rng: np.random.Generator) -> Problem:
    """Rows longer than a vector, with few channels or each channel on its own: stems and depthwise layers."""
    rank = int(rng.integers(1, 4))
    axes = []
    for axis in range(rank):
        k, s, d = int(rng.integers(1, 6)), int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 1, 1, 2]))
        x = int(rng.integers(16, 70) if axis == rank - 1 else rng.integers(1, 12))
        axes.append(_axis(rng, x, k, s, d, int(rng.integers(0, k + 1)), int(rng.integers(0, k + 1))))
    g, cx, cy = 1, int(rng.integers(1, 25)), int(rng.choice(EDGES))
    if rng.random() < 0.4:
        g, cx, cy = int(rng.integers(2, 40)), 1, 1
    elif rng.random() < 0.3:
        cx, cy = cy, cx
    return _problem(rng, axes, int(rng.integers(1, 5)), g, cx, cy)


def _draw_stems(rng: np.random.Generator) -> Problem:
    """So few channels on a side that neighbouring results share a vector."""
    rank = int(rng.integers(1, 4))
    axes = []
    for _ in range(rank):
        k, s, d = int(rng.integers(1, 8)), int(rng.choice([1, 1, 2, 3, 4])), int(rng.choice([1, 1, 1, 2, 3]))
        x = int(rng.integers(*((20, 200), (8, 40), (4, 16))[rank - 1]))
        axes.append(_axis(rng, x, k, s, d, int(rng.integers(0, k + 1)), int(rng.integers(0, k + 1))))
    few, more = int(rng.integers(1, 9)), int(rng.choice([1, 3, 8, 17, 40]))
    cx, cy = (few, more) if rng.random() < 0.5 else (more, few)
    return _problem(rng, axes, int(rng.integers(1, 3)), 1, cx, cy)


def _draw_images(rng: np.random.Generator) -> Problem:
    """Pairs of images whose rows hold few pairs of pixels, or odd ones, mostly in bf16 and channels first."""
    rank = int(rng.integers(1, 3))
    axes = []
    for _ in range(rank):
        k, s, d = int(rng.integers(1, 6)), int(rng.choice([1, 1, 1, 2, 3])), int(rng.choice([1, 1, 2, 5]))
        x = int(rng.integers(1, 40 if rank == 1 else 18))
        axes.append(_axis(rng, x, k, s, d, int(rng.integers(0, k + 1)), int(rng.integers(0, k + 1))))
    cx, cy = (int(v) for v in rng.choice(EDGES, 2))
    p = _problem(rng, axes, int(rng.choice([2, 2, 4, 6, 3])), int(rng.choice([1, 1, 2])), cx, cy)
    if rng.random() < 0.7:
        p = replace(p, wanted="w", dtype="bf16", out_dtype=str(rng.choice(["bf16", "bf16", "f32"])), bias_stride=None)
    if rng.random() < 0.3:
        return p
    strides = {f"{role}_strides": settle(p.shape(role), dense_strides(p.shape(role))) for role in ("x", "w", "y")}
    return replace(p, **strides)


def _draw_large(rng: np.random.Generator) -> Problem:
    if rng.random() < 0.3:
        return _draw_pixels(rng, 40000)
    rank = int(rng.integers(1, 4))
    axes = []
    for _ in range(rank):
        k, s, d = int(rng.choice([1, 3, 3, 5])), int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2]))
        x = int(rng.integers(*((40, 3000), (7, 60), (5, 16))[rank - 1]))
        axes.append(_axis(rng, x, k, s, d, int(rng.integers(0, k + 1)), int(rng.integers(0, k + 1))))
    if rng.random() < 0.7:
        g, (cx, cy) = 1, (int(v) for v in rng.choice([3, 16, 64, 130, 193, 256, 321, 513], 2))
    else:
        g = int(rng.choice([4, 32, 100]))
        cx = cy = int(rng.choice([1, 2, 4, 8, 24]))
    return _problem(rng, axes, int(rng.integers(1, 5)), g, cx, cy)


Numbers = tuple[int, int, int, int, int, int]  # of an axis: x, w, y, stride, dilation, pad


def _axis(rng: np.random.Generator, x: int, k: int, stride: int, dilation: int, pad: int, end: int) -> Numbers:
    """An axis with so much padding at the end; more of it where the kernel does not fit."""
    (y,) = window_sizes((x,), (k,), (stride,), (dilation,), (pad + end,))
    return x, k, max(y, 1 + int(rng.integers(0, 3))), stride, dilation, pad


def _usual_axis(rng: np.random.Generator, rank: int) -> Numbers:
    k, stride, dilation = (int(rng.integers(1, most + 1)) for most in ((7, 4, 3)[rank - 1], 3, 3))
    x = int(rng.integers(1, (48, 12, 6)[rank - 1] + 1))
    pad, end = (int(v) for v in rng.integers(0, 2 * k + 1, 2))
    return _axis(rng, x, k, stride, dilation, pad, end)


ODD = (
    *("point", "point", "same", "one", "far pad", "far stride", "far dilation", "unreached", "unmet", "wide kernel"),
    *("long", "huge stride", "ahead"),
)


def _odd_axis(rng: np.random.Generator, rank: int) -> Numbers:
    """An axis with something about it."""

    def whole(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    x, k = whole(1, (40, 14, 7)[rank - 1]), whole(1, (7, 4, 3)[rank - 1])
    kind = ODD[int(rng.integers(0, len(ODD)))]
    if kind == "point":  # nothing tells it from its neighbours
        return _axis(rng, x, 1, 1, whole(1, 3), 0, 0)
    if kind == "same":
        k |= 1
        return _axis(rng, x, k, 1, 1, k // 2, k // 2)
    if kind == "one":
        return _axis(rng, 1, whole(1, 3), whole(1, 2), whole(1, 2), whole(0, 2), whole(0, 2))
    if kind == "far pad":
        return _axis(rng, x, k, whole(1, 3), whole(1, 2), k + whole(0, 12), whole(0, 12))
    if kind == "far stride":
        return _axis(rng, x, k, k + whole(1, 9), whole(1, 2), whole(0, k + 3), whole(0, k))
    if kind == "far dilation":
        dilation = x + whole(0, 2 * x)
        return _axis(rng, x, max(2, k), whole(1, 2), dilation, whole(0, k * dilation), whole(0, k * dilation))
    if kind == "unreached":  # x goes on beyond the last window
        _, _, y, *rest = _axis(rng, x + 4, k, whole(1, 4), whole(1, 2), whole(0, 3), 0)
        return x + 4 + whole(0, 20), k, whole(1, y), *rest
    if kind == "unmet":  # every window lies in the padding, or nearly
        return x, k, whole(1, 3), 1, 1, (k - 1) + whole(0, 2) + 3, *()
    if kind == "wide kernel":
        x = whole(1, 4)
        return _axis(rng, x, x + whole(1, 8), whole(1, 3), whole(1, 2), whole(0, 6), whole(0, 6))
    if kind == "long" and rank == 1:
        return _axis(rng, whole(200, 3000), whole(1, 9), whole(1, 3), whole(1, 40), whole(0, 9), whole(0, 9))
    if kind == "huge stride":
        return _axis(rng, whole(1, 90), k, whole(10, 80), whole(1, 3), whole(0, 30), whole(0, 30))
    # "ahead": the first window begins inside x
    return _axis(rng, x + 5, k, whole(1, 2), 1, -whole(1, 4), whole(0, 5))


TILE_EDGES = [16, 17, 20, 24, 31, 32, 33, 40, 48, 49, 63, 64, 65, 80, 96, 129]


def draw_tiled(seed: int) -> Problem:
    """A problem for tile registers: 16-bit numbers, channels around whole tiles."""
    rng = np.random.default_rng([seed, 7])
    while True:
        rank = int(rng.integers(1, 4))
        axes = [_usual_axis(rng, rank) if rng.random() < 0.5 else _odd_axis(rng, rank) for _ in range(rank)]
        cx, cy = (int(c) for c in rng.choice(TILE_EDGES, 2))
        p = _problem(rng, axes, int(rng.integers(1, 4)), int(rng.choice([1, 1, 1, 2, 3])), cx, cy)
        dtype = str(rng.choice(["bf16", "f16"]))
        p = replace(p, dtype=dtype, out_dtype="f32" if rng.random() < 0.3 else dtype)
        elements = sum(p.size(role) for role in ("x", "w", "y"))
        if p.flops <= MOST["small"] and elements <= 1e6 and prod(p.w) <= 500 and p.size("y"):
            break
    return replace(p, **{f"{role}_strides": _strides(rng, p, role) for role in ("x", "w", "y")})


# One below, at and one above the lanes of every type and machine, and blocks of several vectors with one more.
EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 129]


def _channels(rng: np.random.Generator) -> tuple[int, int, int]:
    """Groups, and the channels of one in x and in y."""
    kind = rng.random()
    if kind < 0.35:
        cx, cy = (int(v) for v in rng.choice(EDGES, 2))
        return int(rng.choice([1, 1, 1, 2, 3])), cx, cy
    if kind < 0.5:
        cx, cy = (int(v) for v in rng.integers(1, 41, 2))
        return int(rng.choice([1, 2])), cx, cy
    g = int(rng.choice([2, 3, 5, 8, 15, 16, 17, 33, 64]))
    if kind < 0.8:
        c = int(rng.choice([1, 1, 1, 2, 4, 8]))
        return g, c, c
    cx, cy = (int(v) for v in rng.integers(1, 10 if g <= 8 else 5, 2))
    return g, cx, cy


def _problem(rng: np.random.Generator, axes: Sequence[Numbers], n: int, g: int, cx: int, cy: int) -> Problem:
    dtype = str(rng.choice(DTYPE_NAMES))
    out = "f32" if dtype in ("bf16", "f16") and rng.random() < 0.3 else dtype
    wanted = str(rng.choice(["x", "w", "y"]))
    bias = int(rng.choice([1, 1, 1, 2, -1, 0])) if wanted != "w" and rng.random() < 0.3 else None
    sizes = tuple(zip(*axes, strict=True))
    return Problem(wanted, dtype, out, n, g, cx, cy, *sizes, (), (), (), bias, bool(rng.random() < 0.25))


def _strides(rng: np.random.Generator, p: Problem, role: str) -> tuple[int, ...]:
    """Strides of one tensor: the usual layouts, any permutation, gaps, backwards; for inputs axes on each other, too.

    Groups and channels of x and y are one axis of the caller's array: a group is all its channels away from the next.
    Weights of old documents put the group on either channel, so there the three are on their own.
    """
    shape = p.shape(role)
    merged = shape if role == "w" else (shape[0], shape[1] * shape[2], *shape[3:])
    axes = list(range(len(merged)))
    if role == "w":
        space = axes[3:]
        # OIX and XIO, the same with the group on the other channel, and both turned around.
        usual = [axes, [*space, 2, 0, 1], [1, 0, 2, *space], [*space, 1, 0, 2], [2, 0, 1, *space], [*space, 0, 1, 2]]
        usual = usual[: int(rng.choice([2, 2, 6]))]
    else:
        usual = [axes, [0, *axes[2:], 1]]
    kind = rng.random()
    order = usual[int(rng.integers(0, len(usual)))]
    if kind > 0.7:
        order = [int(a) for a in rng.permutation(axes)]
    room = [s + int(rng.integers(0, 3)) for s in merged] if kind > 0.85 or 0.6 < kind < 0.7 else merged
    strides = list(dense_strides(tuple(room), tuple(order)))
    if kind > 0.9:
        strides = [-s if rng.random() < 0.3 else s for s in strides]
    if kind > 0.95 and role != p.wanted:
        one, other = (int(v) for v in rng.integers(0, len(strides), 2))
        strides[one] = strides[other] if kind > 0.975 else 0
    if role != "w":
        strides[1:2] = [strides[1] * shape[2], strides[1]]
    return settle(shape, tuple(strides))


class Memory:
    """The tensors of a problem, each in memory that begins or ends at an unmapped page. Inputs cannot be written to."""

    def __init__(self, p: Problem, rng: np.random.Generator) -> None:
        self.p = p
        self.held: dict[str, Guarded] = {}
        self.address: dict[str, int] = {}
        self.view: dict[str, np.ndarray] = {}
        for role in ("x", "w", "y"):
            self._place(role, p.dtype_of(role), p.shape(role), p.strides(role), rng)
        if p.bias_stride is None:
            self.address["bias"] = 0
        else:
            count = p.g * (p.cy if p.wanted == "y" else p.cx)
            self._place("bias", p.dtype, (count,), (p.bias_stride,), rng)
        for role, memory in self.held.items():
            if role != p.wanted:
                memory.protect(READ)

    @property
    def given(self) -> dict[str, np.ndarray]:
        """What the reference takes."""
        given = {role: self.view[role] for role in self.p.given}
        if "bias" in self.view:
            given["bias"] = self.view["bias"].reshape(self.p.g, -1)
        return given

    def _place(
        self, name: str, dtype_name: str, shape: tuple[int, ...], strides: tuple[int, ...], rng: np.random.Generator
    ) -> None:
        dtype = DTYPES[dtype_name].numpy
        low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        # Some arrays do not even lie at whole elements; the unmapped page is then a byte away.
        gap = int(rng.integers(1, dtype.itemsize)) if rng.random() < 0.05 else 0
        memory = Guarded((high - low + 1) * dtype.itemsize, at_end=bool(rng.random() < 0.6), gap=gap)
        self.held[name] = memory
        flat = memory.bytes.view(dtype)
        top = 5 if self.p.dtype in ("f32", "f64") else 2
        flat[...] = rng.integers(-top, top + 1, flat.size).astype(dtype)
        self.view[name] = np.lib.stride_tricks.as_strided(
            flat[-low:], shape, [s * dtype.itemsize for s in strides], writeable=True
        )
        self.address[name] = memory.address - low * dtype.itemsize

    def close(self) -> None:
        self.view.clear()
        for memory in self.held.values():
            memory.protect(READ_WRITE)
            memory.close()


@contextmanager
def however_small() -> Iterator[None]:
    """Plans are for as many threads as are asked for, however little there is to do."""
    with mock.patch.object(registry, "ALONE", 0):
        yield


USERS_CODE = "CONVGRAD_TEST_USERS_CODE"
"""If the environment has it, all problems have the code that users get."""


def built(p: Problem, target: Target, threads: int, *, quickly: bool = False) -> Kernel | Refusal:
    """The kernel for a machine, planned and written anew, since the plans of tests are not the usual ones.

    Code for machines that there are is what users get, or is translated `quickly`; that for machines that nobody has
    must say what it should.
    """
    if target in _real() and not quickly:
        return kernel.build(p, target, threads)
    with quick_code():
        return kernel.build(p, target, threads)


@cache
def _real() -> list[Target]:
    names = ("native", "halves", "without halves", "avx2")
    return [target for name, target in targets().items() if name in names]


def check(p: Problem, target: Target, teams: Sequence[int], seed: int, gaps: bool = False) -> str:
    """Compute on each number of threads, however small the problem, into poisoned memory: must equal the reference.

    Anything else raises; the answer is why the engine declined the problem, or nothing. With `gaps` the buffers of the
    workspace are kept apart, and writes beyond them raise too. Of four problems, three have code that is
    translated quickly, unless a campaign is on: it is what was written that is asked about, and translating takes most
    of the time.
    """
    if Problem.parse(str(p)) != p:
        raise AssertionError(f"the problem's text reads back as {Problem.parse(str(p))}")
    memory = Memory(p, np.random.default_rng(seed))
    with ExitStack() as stack:
        stack.callback(memory.close)
        stack.enter_context(however_small())
        if gaps:
            stack.enter_context(gaps_between_buffers())
        return _check(p, memory, target, teams, gaps, quickly=seed % 4 > 0 and USERS_CODE not in os.environ)


def _check(p: Problem, memory: Memory, target: Target, teams: Sequence[int], gaps: bool, *, quickly: bool) -> str:
    place, room = memory.view[p.wanted], memory.held[p.wanted].room
    before = place.copy()
    expected = np.asarray(reference.compute(p, memory.given, before.copy() if p.accumulate else None))
    nothing = before if p.accumulate else np.full_like(before, np.nan)
    first: np.ndarray | None = None
    for team in teams:
        found = built(p, target, team, quickly=quickly)
        if isinstance(found, Refusal):
            return found.reason
        place[...] = nothing
        around = room.copy()
        seen: list[Workspace] = []
        with poisoned_workspace(lambda space, made=found.plan, seen=seen: _look(made, space, gaps, seen)):
            found(*(memory.address[name] for name in ("x", "w", "y", "bias")))
        if not seen:
            raise AssertionError("the kernel has taken some other workspace than the poisoned one")
        result = place.copy()
        wrong = np.argwhere(result.astype(np.float64) != expected.astype(np.float64))
        if len(wrong):
            at = tuple(wrong[0])
            raise AssertionError(
                f"on {team} threads {len(wrong)} of {result.size} differ, first at {[int(i) for i in at]}: "
                f"{result[at]} instead of {expected[at]}"
            )
        if first is not None and first.tobytes() != result.tobytes():
            raise AssertionError(f"other bits on {team} threads than on {teams[0]}")
        first = result
        # Between the elements, and around them, nothing may change.
        place[...] = nothing
        if not np.array_equal(room, around):
            raise AssertionError(f"on {team} threads something was written between or around the elements")
    return ""


def _look(made: Gather | WeightGradient, space: Workspace, gaps: bool, seen: list[Workspace]) -> None:
    seen.append(space)
    if made.workspace != space.size:
        raise AssertionError(f"a workspace of {space.size} bytes for a plan of {made.workspace}")
    if gaps:
        check_gaps(made, space)
