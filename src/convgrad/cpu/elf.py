"""Object files made callable: the ELF files that LLVM writes for x86-64, placed in memory without LLVM.

Kernels are small and ask for little: sections, one kind of relocation, a few functions of the C library. What asks for
more is refused, and LLVM loads it.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from struct import Struct
from struct import error as TooShort
from typing import Any

from ..errors import CompileError

HEADER = Struct("<16sHHIQQQIHHHHHH")
SECTION = Struct("<IIQQQQIIQQ")
SYMBOL = Struct("<IBBHQQ")
RELOCATION = Struct("<QQq")
MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
OBJECT, X86_64 = 1, 62

SYMBOLS, RELOCATIONS, NOTHING_STORED, PLAIN_RELOCATIONS = 2, 4, 8, 9  # kinds of sections
WRITABLE, LOADED, EXECUTABLE, THREAD_LOCAL = 1, 2, 4, 0x400  # flags of sections
UNDEFINED, LOCAL = 0, 0  # where a symbol lies, and how it binds
ABSOLUTE = 1  # the relocation that stores an address of 64 bits

READ, WRITE, RUN = 1, 2, 4
PRIVATE, ANONYMOUS = 2, 32


class Unknown(Exception):
    """A file that is not for this loader."""


class Image:
    """The code of an object file in memory of its own: code that runs, constants to read, and data."""

    __slots__ = ("_address", "_found", "_size")

    def __init__(self, content: bytes) -> None:
        self._found: dict[str, int] = {}
        self._address = 0
        self._size = 0
        try:
            self._load(content)
        except (TooShort, LookupError, ValueError, OverflowError, MemoryError):
            raise Unknown("it is damaged") from None

    def address(self, name: str) -> int:
        """The address of a function."""
        try:
            return self._found[name]
        except KeyError:
            raise CompileError(f"there is no {name!r} in the compiled code") from None

    def close(self) -> None:
        """Give the memory back; nothing may run in it any more."""
        if self._address:
            _system().munmap(self._address, self._size)
            self._address = 0

    def _load(self, content: bytes) -> None:
        magic, kind, machine, _, _, _, at, _, _, _, _, each, count, _ = HEADER.unpack_from(content)
        if not magic.startswith(MAGIC) or (kind, machine, each) != (OBJECT, X86_64, SECTION.size):
            raise Unknown("it is no object file for x86-64")
        sections = [SECTION.unpack_from(content, at + i * each) for i in range(count)]
        page = os.sysconf("SC_PAGESIZE")
        # What runs comes first, then what is only read, then what is written, each on pages of its own.
        places: dict[int, int] = {}
        ends = []
        end = 0
        for wanted in (EXECUTABLE, 0, WRITABLE):
            for i, (_, _, flags, _, _, size, _, _, align, _) in enumerate(sections):
                if flags & LOADED and flags & (EXECUTABLE | WRITABLE) == wanted:
                    places[i] = end = -(-end // max(align, 1)) * max(align, 1)
                    end += size
            end = -(-end // page) * page
            ends.append(end)
        for i, (_, _, flags, _, _, _, _, _, align, _) in enumerate(sections):
            if flags & LOADED and (i not in places or flags & THREAD_LOCAL or align > page):
                raise Unknown("a section is of no known kind")

        image = bytearray(end)
        for i, place in places.items():
            _, kind, _, _, offset, size, *_ = sections[i]
            if kind != NOTHING_STORED:
                if offset + size > len(content):
                    raise Unknown("it is damaged")
                image[place : place + size] = content[offset : offset + size]
        self._size = end
        self._address = base = _map(end)
        try:
            symbols: list[int] = []
            for _, kind, _, _, offset, size, link, *_ in sections:
                if kind == SYMBOLS:
                    names = sections[link][4]
                    for name, info, _, section, value, _ in SYMBOL.iter_unpack(content[offset : offset + size]):
                        symbols.append(base + places[section] + value if section in places else 0)
                        if info >> 4 == LOCAL and not name:
                            continue
                        text = content[names + name : content.index(0, names + name)].decode()
                        if section == UNDEFINED:
                            symbols[-1] = _outside(text)
                        elif section in places and info >> 4 != LOCAL:
                            self._found[text] = symbols[-1]
            for _, kind, _, _, offset, size, _, into, *_ in sections:
                if kind == PLAIN_RELOCATIONS and into in places:
                    raise Unknown("a relocation is of no known kind")
                if kind != RELOCATIONS or into not in places:
                    continue
                for at, info, addend in RELOCATION.iter_unpack(content[offset : offset + size]):
                    to = symbols[info >> 32]
                    if info & 0xFFFFFFFF != ABSOLUTE or not to:
                        raise Unknown("a relocation is of no known kind")
                    place = places[into] + at
                    image[place : place + 8] = (to + addend & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
            ctypes.memmove(base, bytes(image), end)
            for low, high, allowed in ((0, ends[0], READ | RUN), (ends[0], ends[1], READ)):
                if high > low and _system().mprotect(base + low, high - low, allowed):
                    # LLVM would not notice, and its code not run.
                    reason = os.strerror(ctypes.get_errno())
                    raise CompileError(f"the system lets this process make no code that runs: {reason}")
        except BaseException:
            self.close()
            raise


def _map(size: int) -> int:
    """New memory that can be written."""
    address = _system().mmap(None, size, READ | WRITE, PRIVATE | ANONYMOUS, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise CompileError(f"the system gives no memory for code: {os.strerror(ctypes.get_errno())}")
    return int(address)


def _outside(name: str) -> int:
    """The address of a function of this process."""
    try:
        function = getattr(_system(), name)
    except AttributeError:
        raise CompileError(f"the compiled code calls {name!r}, which this process does not have") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def _system() -> Any:
    """The functions of this process, those that are called from here with their types."""
    process = ctypes.CDLL(None, use_errno=True)
    address, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    process.mmap.restype = address
    process.mmap.argtypes = (address, size, word, word, word, ctypes.c_int64)
    process.mprotect.argtypes = (address, size, word)
    process.munmap.argtypes = (address, size)
    return process
