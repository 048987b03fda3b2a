"""What a kernel may count on: vector width, registers and caches of the machine it is written for. A value, so that
tests can write code for one machine while running on another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import UnsupportedError

LINE = 64  # bytes of a cache line
HALVES = ("znver4",)  # CPUs with AVX-512 that compute 64 bytes in two steps of 32


@dataclass(frozen=True)
class Target:
    """A machine to write code for.

    `width` is the vector width in bytes and `registers` how many vectors fit at once. `halves` says that a vector of
    half the width takes half the time, so that a plan may use those; `narrow`, that these are such. `l1` and `l2` are
    the cache sizes that blocks are cut for: the same everywhere, because sums are cut by them too, so that machines
    with the same vectors and `halves` give the same bits. Results beyond `l3` are written past it. `tile`, if given,
    overrules the planner's (rows, vectors) of the register tile.
    """

    name: str
    triple: str
    cpu: str
    features: str
    width: int
    registers: int
    halves: bool = False
    narrow: bool = False
    l1: int = 32 * 1024
    l2: int = 1024 * 1024
    l3: int = 16 * 1024 * 1024
    tile: tuple[int, int] | None = None

    def lanes(self, size: int) -> int:
        """How many elements of so many bytes a vector holds."""
        return max(1, self.width // size)

    @property
    def full(self) -> bool:
        """Whether 64 bytes are computed in one step, two such vectors at a time: so many sums must be under way."""
        return self.width == LINE and self.registers >= 32 and not self.halves

    @property
    def narrows(self) -> bool:
        """Whether a plan may use vectors of half the width."""
        return self.halves and self.tile is None

    def halved(self) -> Target:
        """The same machine with vectors of half the width."""
        return replace(self, width=self.width // 2, halves=False, narrow=True)


def _level(features: frozenset[str], triple: str) -> tuple[str, int, int]:
    """The name, vector width in bytes and register count that a set of features gives."""
    if {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq"} <= features:
        return "avx512", 64, 32
    if {"+avx2", "+fma"} <= features:
        return "avx2", 32, 16
    if triple.startswith(("aarch64", "arm64")):
        return "neon", 16, 32
    return "baseline", 16, 16


@lru_cache(maxsize=1)
def native() -> Target:
    """The machine this runs on."""
    from .compile import jit

    triple, cpu, features = jit.host()
    name, width, registers = _level(frozenset(features.split(",")), triple)
    halves = name == "avx512" and cpu in HALVES
    return Target(name, triple, cpu, features, width, registers, halves, l3=_last_cache() or Target.l3)


def _last_cache() -> int:
    """Bytes of the last-level cache; 0 if the system does not say."""
    sizes = [0]
    for index in range(8):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size") as file:
                sizes.append(int(file.read().strip().removesuffix("K")) * 1024)
        except (OSError, ValueError):
            continue
    return max(sizes)


# Features that a narrower level on the same machine must do without.
_AVX2_OUT = "avx512"


def named(name: str) -> Target:
    """A level of this machine by name: native, avx512, avx2 or baseline. An unknown or missing one is an error."""
    host = native()
    if name in ("", "native", host.name):
        return host
    x86 = host.triple.startswith(("x86_64", "amd64"))
    features = [f for f in host.features.split(",") if f]
    if name == "avx2" and x86 and host.name == "avx512":
        fewer = [f"-{f[1:]}" if f[1:].startswith(_AVX2_OUT) else f for f in features]
        return replace(host, name="avx2", cpu="x86-64", features=",".join(fewer), width=32, registers=16, halves=False)
    if name == "baseline":
        fewer = [] if x86 else features
        cpu = "x86-64" if x86 else host.cpu
        return replace(host, name="baseline", cpu=cpu, features=",".join(fewer), width=16, registers=16, halves=False)
    raise UnsupportedError(
        f"CONVGRAD_TARGET={name!r} is not to be had here; this machine has native ({host.name}), "
        f"{'avx2, ' if host.name == 'avx512' else ''}baseline"
    )


def current() -> Target:
    """The target that kernels are written for: CONVGRAD_TARGET, else this machine."""
    return _named_cached(os.environ.get("CONVGRAD_TARGET", ""))


_named_cached = lru_cache(maxsize=8)(named)
