"""Memory that ends at unmapped pages: a byte read or written outside faults, and so does a byte written to an input."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from convgrad.cpu import kernel
from convgrad.cpu.amx.records import TileGather, TileSums
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.plan.workspace import Buffer
from convgrad.cpu.wgrad.records import WeightGradient

PAGE = mmap.PAGESIZE
NONE, READ, READ_WRITE = 0, 1, 3
_libc: Any = None
if os.name == "posix":
    _libc = ctypes.CDLL(None, use_errno=True)
    _address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _libc.mmap.restype = _address
    _libc.mmap.argtypes = [_address, _size, _int, _int, _int, ctypes.c_long]
    _libc.munmap.argtypes = [_address, _size]
    _libc.mprotect.argtypes = [_address, _size, _int]


class Guarded:
    """Memory of `size` bytes, with an unmapped page before it and one after it, `gap` bytes from it on one side.

    `bytes` is the memory asked for, `room` all that is mapped around it. Only POSIX systems have the unmapped pages.
    """

    def __init__(self, size: int, *, at_end: bool, gap: int = 0) -> None:
        self.mapped = -(-max(size + gap, 1) // PAGE) * PAGE
        self.length = self.mapped + 2 * PAGE
        if _libc is None:
            self.memory = np.zeros(self.length + PAGE, np.uint8)
            self.base = -(-self.memory.ctypes.data // PAGE) * PAGE
        else:
            self.base = _libc.mmap(None, self.length, NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            if self.base in (None, ctypes.c_void_p(-1).value):
                raise MemoryError("mmap")
        self.protect(READ_WRITE)
        self.address = self.base + PAGE + (self.mapped - size - gap if at_end else gap)
        self.bytes = _array(self.address, size)
        self.room = _array(self.base + PAGE, self.mapped)

    def protect(self, access: int) -> None:
        """Allow reading, or reading and writing."""
        if _libc is not None and _libc.mprotect(self.base + PAGE, self.mapped, access):
            raise MemoryError("mprotect")

    def close(self) -> None:
        """Give the memory back; who still looks at it faults."""
        if _libc is not None:
            _libc.munmap(self.base, self.length)


def _array(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class Workspace:
    """What `kernel` takes for a call: exactly as large as the plan says, full of NaNs, between unmapped pages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = Guarded(size, at_end=True)
        self.address = self.memory.address
        self.memory.bytes[...] = 0xFF  # a NaN in every type
        self.args = (ctypes.c_void_p * 5)(0, 0, 0, 0, self.address)
        self.args_at = ctypes.addressof(self.args)
        if self.address % 64:
            raise AssertionError(f"a workspace of {size} bytes is no whole number of cache lines")


@contextmanager
def poisoned_workspace(look: Callable[[Workspace], None] = lambda _: None) -> Iterator[None]:
    """Calls get a `Workspace` of their own; `look` sees it after the call."""
    take, give = kernel._take, kernel._give

    def release(space: Workspace) -> None:
        try:
            look(space)
        finally:
            space.memory.close()

    kernel._take, kernel._give = Workspace, release  # type: ignore[assignment]
    try:
        yield
    finally:
        kernel._take, kernel._give = take, give


GAP = 1024  # elements between two buffers of a workspace, in plans with gaps


@contextmanager
def gaps_between_buffers() -> Iterator[None]:
    """Plans keep the buffers of their workspace apart, so that a write beyond one can be seen by `check_gaps`."""
    plain = {kind: kind.buffers for kind in (Gather, WeightGradient, TileGather, TileSums)}

    def spread(kind: type) -> property:
        def buffers(self: Gather | WeightGradient) -> tuple[Buffer, ...]:
            return tuple(b for buffer in plain[kind].fget(self) for b in (buffer, Buffer("~", GAP, buffer.per_thread)))

        return property(buffers)

    for kind in plain:
        kind.buffers = spread(kind)  # type: ignore[assignment]
    try:
        yield
    finally:
        for kind, buffers in plain.items():
            kind.buffers = buffers  # type: ignore[assignment]


def check_gaps(plan: Gather | WeightGradient, space: Workspace) -> None:
    """Nothing may have been written between the buffers."""
    item = 4 if plan.sum == "float" else 8
    at = 0
    shared = [buffer for buffer in plan.buffers if not buffer.per_thread]
    own = [buffer for buffer in plan.buffers if buffer.per_thread]
    before = ""
    for name, size, _ in shared + own * plan.threads:
        if name == "~" and not (space.memory.bytes[at : at + size * item] == 0xFF).all():
            raise AssertionError(f"written beyond the buffer {before!r} of the workspace")
        before = name
        at += size * item
