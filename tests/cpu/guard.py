"""Arrays that end at unmapped pages: a byte read or written outside faults."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NONE, READ_WRITE, PRIVATE_ANONYMOUS = 0, 3, 0x22


class Guarded:
    """Memory of `size` bytes, with an unmapped page right before it or right after it."""

    def __init__(self, size: int, *, at_end: bool) -> None:
        room = -(-max(size, 1) // PAGE) * PAGE
        self.length = room + 2 * PAGE
        self.base = _libc.mmap(None, self.length, NONE, PRIVATE_ANONYMOUS, -1, 0)
        if self.base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError("mmap")
        if _libc.mprotect(self.base + PAGE, room, READ_WRITE):
            raise MemoryError("mprotect")
        self.address = self.base + PAGE + (room - size if at_end else 0)
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self.address), np.uint8)

    def close(self) -> None:
        _libc.munmap(self.base, self.length)
