"""Random problems for the engine, at the level of `Problem`: geometry, strides, dtypes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convgrad import reference
from convgrad.cpu import kernel
from convgrad.cpu.plan import Declined
from convgrad.cpu.target import Target
from convgrad.dtypes import DTYPES
from convgrad.spec.problem import Problem, dense_strides, settle, window_sizes

from .guard import Guarded

DTYPE_NAMES = ("f32", "bf16", "f16", "f64")


def draw(rng: np.random.Generator, size: int = 12) -> Problem:
    """A problem of a few thousand to a few million products."""
    rank = int(rng.integers(1, 4))

    def ints(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high + 1, rank))

    while True:
        w = ints(1, (7, 4, 3)[rank - 1])
        stride, dilation = ints(1, 3), ints(1, 3)
        pad = tuple(int(rng.integers(0, 2 * k + 1)) if rng.random() < 0.7 else int(rng.integers(0, 9)) for k in w)
        x = ints(1, (4 * size, size, size // 2)[rank - 1])
        pads = tuple(p + int(rng.integers(0, 2 * k + 1)) for p, k in zip(pad, w, strict=True))
        y = window_sizes(x, w, stride, dilation, pads)
        if min(y) >= 1:
            break
    g = int(rng.choice([1, 1, 2, 3, 8, 16, 33]))
    most = 40 if g <= 2 else 9 if g <= 8 else 3
    cx, cy = (int(v) for v in rng.integers(1, most + 1, 2))
    if g > 2 and rng.random() < 0.6:
        cx = cy = int(rng.choice([1, 1, 2, 4]))
    n = int(rng.integers(1, 4))
    dtype = str(rng.choice(DTYPE_NAMES))
    out = "f32" if dtype in ("bf16", "f16") and rng.random() < 0.3 else dtype
    wanted = str(rng.choice(["x", "w", "y"]))
    p = Problem(
        wanted, dtype, out, n, g, cx, cy, x, w, y, stride, dilation, pad, (), (), (),
        bias_stride=int(rng.integers(1, 3)) if wanted != "w" and rng.random() < 0.3 else None,
        accumulate=bool(rng.random() < 0.25),
    )  # fmt: skip
    return replace(p, **{f"{role}_strides": _strides(rng, p, role) for role in ("x", "w", "y")})


def _strides(rng: np.random.Generator, p: Problem, role: str) -> tuple[int, ...]:
    """Strides of one tensor: the usual layouts, any permutation, gaps, backwards, and for inputs broadcast axes."""
    shape = p.shape(role)
    axes = list(range(len(shape)))
    space = axes[3:]
    usual = [axes, [0, *space, 1, 2]] if role != "w" else [axes, [*space, 2, 0, 1]]
    kind = rng.random()
    if kind < 0.7:
        order = usual[int(rng.integers(0, 2))]
    else:
        order = [int(a) for a in rng.permutation(axes)]
    padded = list(shape)
    if kind > 0.85:
        padded = [s + int(rng.integers(0, 3)) for s in shape]
    strides = list(dense_strides(tuple(padded), tuple(order)))
    # The group axis must be a whole number of channels away, as every bound problem has it.
    if role != "w":
        strides[1] = strides[2] * shape[2] if order.index(1) + 1 == order.index(2) else strides[1]
        if order.index(1) + 1 != order.index(2) or padded[2] != shape[2]:
            return settle(shape, dense_strides(shape, tuple(usual[int(rng.integers(0, 2))])))
    if kind > 0.9:
        strides = [-s if rng.random() < 0.3 and i != 1 and i != 2 else s for i, s in enumerate(strides)]
    if kind > 0.95 and role != p.wanted:
        axis = int(rng.choice([0, *space]))
        strides[axis] = 0
    return settle(shape, tuple(strides))


class Memory:
    """The tensors of a problem, each in memory that ends at an unmapped page."""

    def __init__(self, p: Problem, rng: np.random.Generator) -> None:
        self.p = p
        self.held: list[Guarded] = []
        self.address: dict[str, int] = {}
        self.view: dict[str, np.ndarray] = {}
        for role in ("x", "w", "y"):
            self.address[role], self.view[role] = self._tensor(role, rng)
        self.bias = 0
        self.bias_view = None
        if p.bias_stride is not None:
            count = p.g * (p.cy if p.wanted == "y" else p.cx)
            memory = self._memory(((count - 1) * p.bias_stride + 1) * DTYPES[p.dtype].size, rng)
            values = memory.bytes.view(DTYPES[p.dtype].numpy)
            values[...] = rng.integers(-4, 5, values.size).astype(values.dtype)
            self.bias, self.bias_view = memory.address, values[:: p.bias_stride].reshape(p.g, -1)

    def _memory(self, size: int, rng: np.random.Generator) -> Guarded:
        memory = Guarded(size, at_end=bool(rng.random() < 0.6))
        self.held.append(memory)
        return memory

    def _tensor(self, role: str, rng: np.random.Generator) -> tuple[int, np.ndarray]:
        p = self.p
        dtype = DTYPES[p.dtype_of(role)].numpy
        shape, strides = p.shape(role), p.strides(role)
        low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        memory = self._memory((high - low + 1) * dtype.itemsize, rng)
        flat = memory.bytes.view(dtype)
        top = 2 if p.dtype != "f64" and p.dtype != "f32" else 5
        flat[...] = rng.integers(-top, top + 1, flat.size).astype(dtype)
        view = np.lib.stride_tricks.as_strided(
            flat[-low:] if low else flat, shape, [s * dtype.itemsize for s in strides], writeable=True
        )
        return memory.address - low * dtype.itemsize, view

    def close(self) -> None:
        self.view.clear()
        self.bias_view = None
        for memory in self.held:
            memory.close()


def check(p: Problem, target: Target, teams: tuple[int, ...], seed: int) -> str:
    """Compute on each number of threads into poisoned memory; must equal the reference bit for bit. "" or what failed."""
    memory = Memory(p, np.random.default_rng(seed))
    try:
        given: dict[str, np.ndarray] = {role: memory.view[role] for role in p.given}
        if memory.bias_view is not None:
            given["bias"] = memory.bias_view
        place = memory.view[p.wanted]
        before = place.copy()
        expected = np.asarray(reference.compute(p, given, before.copy() if p.accumulate else None))
        whole = memory.held[("x", "w", "y").index(p.wanted)].bytes
        whole_before = whole.copy()
        for team in teams:
            found = kernel.find(p, target, team)
            if isinstance(found, Declined):
                return f"declined: {found.reason}"
            whole[...] = whole_before
            if not p.accumulate:
                place[...] = np.nan
            gaps = whole.copy()
            found(memory.address["x"], memory.address["w"], memory.address["y"], memory.bias)
            bits = np.dtype(f"u{place.dtype.itemsize}")
            if not np.array_equal(place.copy().view(bits), expected.copy().view(bits)):
                wrong = np.argwhere(place.copy().view(bits) != expected.copy().view(bits))
                zeros = np.asarray(place, np.float64) == np.asarray(expected, np.float64)
                if not zeros.all():
                    return f"{target.name} on {team} threads: {len(wrong)} of {place.size} differ, first at {wrong[0].tolist()}"
            # Nothing between the elements may change.
            result = place.copy()
            place[...] = before if p.accumulate else np.asarray(np.nan).astype(place.dtype)
            if not np.array_equal(whole, gaps):
                return f"{target.name} on {team} threads: wrote between the elements"
            place[...] = result
        return ""
    finally:
        memory.close()
