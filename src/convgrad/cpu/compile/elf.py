"""A loader for object files: puts the ELF files that LLVM writes for Linux on x86-64 into memory, without LLVM.

Why not let LLVM load them? To import LLVM takes longer than everything else in the first call of a process whose code
is on disk. When this loader and the notes of `recall` were added, such a call went from 60 to 7 ms (measured on Zen 4,
run not kept; today's numbers are in docs/settings.md).

A loader is a small thing here because kernels need little: sections, one kind of relocation and a few functions of the
C library. A file that needs more raises `Unknown`, and `jit` has LLVM load it.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from struct import Struct
from struct import error as TooShort
from typing import Any, NamedTuple

from ...errors import CompileError

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
    """A file that this loader cannot load, although it may be sound: LLVM is to load it."""


class Image:
    """An object file in memory of its own: code that can run, constants that can be read, data that can be written."""

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
        """Free the memory. The caller makes sure that nothing runs in it any more."""
        if self._address:
            _system().munmap(self._address, self._size)
            self._address = 0

    def _load(self, content: bytes) -> None:
        sections = _sections(content)
        places, ends = _laid_out(sections)
        self._size = ends[-1]
        self._address = _map(self._size)
        try:
            addresses = self._symbols(content, sections, places)
            image = _linked(content, sections, places, addresses, self._size)
            ctypes.memmove(self._address, image, self._size)
            self._protect(*ends[:2])
        except BaseException:
            self.close()
            raise

    def _symbols(self, content: bytes, sections: list[_Section], places: dict[int, int]) -> list[int]:
        """The address of each symbol, 0 if it has none; symbols that are not local are noted by name."""
        addresses = []
        for table in (s for s in sections if s.kind == SYMBOLS):
            names = sections[table.link].offset
            for name, info, _, section, value, _ in SYMBOL.iter_unpack(table.of(content)):
                text = content[names + name : content.index(0, names + name)].decode()
                address = 0
                if section in places:
                    address = self._address + places[section] + value
                elif section == UNDEFINED and text:
                    address = _outside(text)
                addresses.append(address)
                if section in places and info >> 4 != LOCAL:
                    self._found[text] = address
        return addresses

    def _protect(self, code: int, constants: int) -> None:
        """Make the bytes before `code` executable, and those from there to `constants` read-only."""
        for low, high, allowed in ((0, code, READ | RUN), (code, constants, READ)):
            if high > low and _system().mprotect(self._address + low, high - low, allowed):
                # LLVM would not report this, and a call of its code would crash.
                reason = os.strerror(ctypes.get_errno())
                raise CompileError(f"the system lets this process make no code that runs: {reason}")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    each: int

    def of(self, content: bytes) -> bytes:
        """Its bytes in the file."""
        if self.offset + self.size > len(content):
            raise Unknown("it is damaged")
        return content[self.offset : self.offset + self.size]


def _sections(content: bytes) -> list[_Section]:
    magic, kind, machine, _, _, _, at, _, _, _, _, each, count, _ = HEADER.unpack_from(content)
    if not magic.startswith(MAGIC) or (kind, machine, each) != (OBJECT, X86_64, SECTION.size):
        raise Unknown("it is no object file for x86-64")
    return [_Section(*SECTION.unpack_from(content, at + i * each)) for i in range(count)]


def _laid_out(sections: list[_Section]) -> tuple[dict[int, int], list[int]]:
    """Offsets of the sections that are loaded, by number; and where the code, the constants and the data end.

    They come in this order, each on pages of its own, because the system protects whole pages.
    """
    page = os.sysconf("SC_PAGESIZE")
    places: dict[int, int] = {}
    ends = []
    end = 0
    for wanted in (EXECUTABLE, 0, WRITABLE):
        for i, s in enumerate(sections):
            if s.flags & LOADED and s.flags & (EXECUTABLE | WRITABLE) == wanted:
                places[i] = end = -(-end // max(s.align, 1)) * max(s.align, 1)
                end += s.size
        end = -(-end // page) * page
        ends.append(end)
    for i, s in enumerate(sections):
        if s.flags & LOADED and (i not in places or s.flags & THREAD_LOCAL or s.align > page):
            raise Unknown("a section is of no known kind")
    return places, ends


def _linked(content: bytes, sections: list[_Section], places: dict[int, int], addresses: list[int], size: int) -> bytes:
    """The bytes to put in memory: the sections, with the relocations filled in."""
    image = bytearray(size)
    for i, place in places.items():
        if sections[i].kind != NOTHING_STORED:
            image[place : place + sections[i].size] = sections[i].of(content)
    for table in sections:
        if table.info not in places or table.kind not in (RELOCATIONS, PLAIN_RELOCATIONS):
            continue
        if table.kind == PLAIN_RELOCATIONS:
            raise Unknown("a relocation is of no known kind")
        for at, info, addend in RELOCATION.iter_unpack(table.of(content)):
            to = addresses[info >> 32]
            if info & 0xFFFFFFFF != ABSOLUTE or not to or at + 8 > sections[table.info].size:
                raise Unknown("a relocation is of no known kind")
            place = places[table.info] + at
            image[place : place + 8] = (to + addend & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    return bytes(image)


def _map(size: int) -> int:
    """New memory that can be written, but not executed."""
    address = _system().mmap(None, size, READ | WRITE, PRIVATE | ANONYMOUS, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise CompileError(f"the system gives no memory for code: {os.strerror(ctypes.get_errno())}")
    return int(address)


def _outside(name: str) -> int:
    """The address of a function of the C library, or of another library in this process."""
    try:
        function = getattr(_system(), name)
    except AttributeError:
        raise CompileError(f"the compiled code calls {name!r}, which this process does not have") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def _system() -> Any:
    """All functions of this process, with the types of the three that are called here."""
    process = ctypes.CDLL(None, use_errno=True)
    address, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    process.mmap.restype = address
    process.mmap.argtypes = (address, size, word, word, word, ctypes.c_int64)
    process.mprotect.argtypes = (address, size, word)
    process.munmap.argtypes = (address, size)
    return process
