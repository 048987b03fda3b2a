"""Memory of large results that are gone, kept for the next ones.

The C library hands a large block back to the system at once, and the system then clears every page of the next one
before it is written: for a layer that does little else than read and write, a third of the time. A training loop asks
for the same sizes again and again.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from .errors import warn

LINE = 64
LARGE = 16 << 20  # smaller blocks are kept by the C library
KEEP = 256 << 20
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

Block = np.ndarray[Any, np.dtype[np.uint8]]

# Changed in one step under the GIL, so neither threads nor a fork need a lock here.
_kept: dict[int, Block] = {}


_said: set[str] = set()  # settings that were warned of


def limit() -> int:
    """Bytes that may be kept: CONVGRAD_KEEP_MEMORY, else 256 MiB."""
    return size_setting("CONVGRAD_KEEP_MEMORY", KEEP)


def size_setting(name: str, default: int) -> int:
    """The bytes that an environment variable asks for, as 1000, 64K, 2M or 1G; the default where it is not set."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)(i?b)?", text.lower())
    if match is None:
        warn_of_setting(name, f"must be a number of bytes, such as 67108864 or 64M; {default >> 20}M is used")
        return default
    return int(match[1]) * UNITS[match[2]]


def warn_of_setting(name: str, what: str) -> None:
    """Warn, once, of an environment variable whose value means nothing."""
    text = f"{name}={os.environ.get(name, '')} {what}"
    if text not in _said:
        _said.add(text)
        warn(text, UserWarning)


def lend(size: int) -> tuple[Block, int, int]:
    """A block of bytes that are not set, where in it so many begin at a cache line, and their address.

    A large block comes back when the last array on it is gone.
    """
    block: Block = np.empty(size + LINE, np.uint8) if size < LARGE else np.asarray(Lease(_take(size + LINE)))
    address: int = block.__array_interface__["data"][0]
    start = -address % LINE
    return block, start, address + start


def release() -> None:
    """Give what is kept back to the system."""
    _kept.clear()


def _take(size: int) -> Block:
    """A kept block that fits and wastes little, or a new one."""
    limit()  # A setting that means nothing is warned of here; where arrays end, a warning could not be an error.
    for key, block in list(_kept.items()):
        if size <= block.nbytes <= size + size // 8 and _kept.pop(key, None) is not None:
            return block
    return np.empty(size, np.uint8)


def _keep(block: Block) -> None:
    """Keep a block whose arrays are gone; the oldest go if there are too many bytes."""
    _kept[id(block)] = block
    blocks = list(_kept.items())
    total = sum(b.nbytes for _, b in blocks)
    for oldest, b in blocks:
        if total <= limit():
            break
        total -= b.nbytes
        _kept.pop(oldest, None)


def in_units(count: int) -> str:
    """A number of bytes for people."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


class Lease:
    """A block in use. NumPy asks for its interface, and the arrays made of it keep it alive."""

    __slots__ = ("__array_interface__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _keep(self.block)
