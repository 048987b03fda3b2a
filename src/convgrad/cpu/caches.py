"""The sizes of the caches of this machine: as the system lists them, as the C library knows them, or by the CPU's name.

Sandboxes often hide the list. The C library asks the processor itself (CPUID), which some of them still let through.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

FOLDER = "/sys/devices/system/cpu/cpu0/cache"
SYSCONF = 188, 191, 194  # the GNU C library's _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE

KIB, MIB = 1 << 10, 1 << 20
BY_NAME = {
    "skylake-avx512": (32 * KIB, MIB, 0),
    "cascadelake": (32 * KIB, MIB, 0),
    "cooperlake": (32 * KIB, MIB, 0),
    "icelake-server": (48 * KIB, 5 * MIB // 4, 0),
    "sapphirerapids": (48 * KIB, 2 * MIB, 0),
    "emeraldrapids": (48 * KIB, 2 * MIB, 0),
    "graniterapids": (48 * KIB, 2 * MIB, 0),
    "graniterapids-d": (48 * KIB, 2 * MIB, 0),
    "znver3": (32 * KIB, MIB // 2, 0),
    "znver4": (32 * KIB, MIB, 0),
    "znver5": (48 * KIB, MIB, 0),
}
"""Of LLVM's names of CPUs: bytes of the data caches of the first and second level. How large the last-level cache is
does not follow from the name.
"""

Sizes = tuple[int, int, int]
"""Bytes of the data caches of the first and second level and of the last level; 0 where nobody says."""


def sizes(cpu: str, folder: str = FOLDER) -> Sizes:
    """The sizes for the machine at hand, whose name in LLVM is given: each from the first source that knows it."""
    first, second, last = (
        next((size for size in known if size), 0)
        for known in zip(_listed(folder), _library(cpu), BY_NAME.get(cpu, (0, 0, 0)), strict=True)
    )
    return first, second, last


def _listed(folder: str) -> Sizes:
    """As the system lists them. The last level is whichever is largest."""
    found = {1: 0, 2: 0}
    last = 0
    for index in range(8):
        try:
            level, kind, size = (_text(f"{folder}/index{index}/{name}") for name in ("level", "type", "size"))
            number = int(size.removesuffix("K")) * KIB
        except (OSError, ValueError):
            continue
        last = max(last, number)
        if kind != "Instruction" and level in ("1", "2"):
            found[int(level)] = number
    return found[1], found[2], last


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _library(cpu: str) -> Sizes:
    """As the GNU C library says, by asking the processor; other libraries do not know these questions.

    On AMD's processors it adds up all caches of the last level, of which a core uses but one: that is left open.
    """
    if sys.platform != "linux":
        return 0, 0, 0
    try:
        library: Any = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError):
        return 0, 0, 0
    library.sysconf.restype = ctypes.c_long
    first, second, third = (max(0, int(library.sysconf(number))) for number in SYSCONF)
    return first, second, 0 if cpu.startswith("znver") else third or second
