"""The machine that code is written for: vector width, registers, caches, and how fast it computes.

`native` reads the facts of the machine at hand: features and CPU from LLVM, caches from the system (see caches.py). A
target is a plain value, so tests write code for one machine while they run on another. What planners make of these
facts (tile shapes, costs) is in plan/tuning.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import UnsupportedError
from . import caches

LINE = 64  # bytes of a cache line
DOUBLE_PUMPED = ("znver4",)  # LLVM's names of CPUs with AVX-512 that compute 64 bytes in two steps of 32
TILE_FEATURES = {"bf16": "+amx-bf16", "f16": "+amx-fp16"}  # what multiplies tiles of a type; all need "+amx-tile"


@dataclass(frozen=True)
class Tiles:
    """Whether a machine multiplies matrices of 16 by 16 numbers in tile registers (Intel's AMX), and of which types."""

    dtypes: tuple[str, ...] = ()
    emulated: bool = False  # plain code does what the instructions do: tests run plans for tiles on any machine
    refused: str = ""  # why the system does not let this process use them

    def multiply(self, dtype: str) -> bool:
        """Whether numbers of a type can be multiplied so."""
        return dtype in self.dtypes and not self.refused


@dataclass(frozen=True)
class Target:
    """A machine to write code for.

    How the machine computes vectors:

    ==============  ============================================================  ==================================
    `double_pumped` AVX-512 in two steps of 32 bytes: a vector of half the width  AMD Zen 4
                    takes half the time
    `half_width`    the same machine, but this target has vectors of 32 bytes:    AMD Zen 4, where a plan chose so
                    see `at_half_width`
    `two_per_cycle` AVX-512 in one step, two vectors in each cycle: more sums     AMD Zen 5, Intel servers; assumed of
                    must be under way at a time                                   every other CPU with AVX-512
    none of them    vectors of 16 or 32 bytes                                     AVX2, SSE, NEON
    ==============  ============================================================  ==================================

    `l1` and `l2` are the cache sizes that blocks are cut for. They are the same everywhere, because they also cut sums:
    so machines with the same vectors and `double_pumped` give the same bits. `own_l2` is what the machine really has:
    it may cut only what does not change the order of a sum.
    """

    name: str
    triple: str
    cpu: str
    features: str
    width: int  # of a vector, in bytes
    registers: int  # vectors that they hold
    double_pumped: bool = False
    half_width: bool = False
    l1: int = 32 * 1024
    l2: int = 1024 * 1024
    l3: int = 16 * 1024 * 1024  # results that are larger are written past it
    tile: tuple[int, int] | None = None  # (rows, vectors) of the register tile, in place of the planner's choice
    tiles: Tiles = Tiles()
    own_l2: int = 0  # bytes of the second-level cache of a core; 0: as `l2` says

    def lanes(self, size: int) -> int:
        """How many elements of so many bytes a vector holds."""
        return max(1, self.width // size)

    @property
    def two_per_cycle(self) -> bool:
        """Whether two vectors of 64 bytes are computed in each cycle."""
        return self.width == LINE and self.registers >= 32 and not self.double_pumped

    @property
    def may_halve_width(self) -> bool:
        """Whether a plan may use vectors of half the width."""
        return self.double_pumped and self.tile is None

    def without_tiles(self) -> Target:
        """The same machine, whose tile registers are left alone."""
        return replace(self, name="avx512", tiles=Tiles()) if self.name == "amx" else self

    def at_half_width(self) -> Target:
        """The same machine with vectors of half the width."""
        return replace(self, width=self.width // 2, double_pumped=False, half_width=True)


def _level(features: frozenset[str], triple: str) -> tuple[str, int, int]:
    """The name, vector width in bytes and number of registers of a machine with these features."""
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
    double_pumped = name == "avx512" and cpu in DOUBLE_PUMPED
    tiles = Tiles(tile_types(features) if name == "avx512" else ())
    _, l2, l3 = caches.sizes(cpu)
    return Target(
        "amx" if tiles.dtypes else name, triple, cpu, features, width, registers, double_pumped, l3=l3 or Target.l3,
        tiles=tiles, own_l2=l2,
    )  # fmt: skip


def tile_types(features: str) -> tuple[str, ...]:
    """The types of which a machine with these features multiplies tiles."""
    found = features.split(",")
    return tuple(dtype for dtype, needed in TILE_FEATURES.items() if {"+amx-tile", needed} <= set(found))


def named(name: str) -> Target:
    """The machine at hand, or another level: native, amx, avx512, avx2, baseline. A level that it lacks is an error.

    `native` is the highest one that it has.
    """
    host = native()
    if name in ("", "native", host.name):
        return host
    plain = host.without_tiles()
    if name == plain.name:
        return plain
    x86 = host.triple.startswith(("x86_64", "amd64"))
    features = [f for f in host.features.split(",") if f]
    # A lower level has one step of computing, whatever the machine.
    level = replace(plain, name=name, cpu="x86-64" if x86 else host.cpu, double_pumped=False)
    if name == "avx2" and x86 and plain.name == "avx512":
        without = [f"-{f[1:]}" if f[1:].startswith("avx512") else f for f in features]
        return replace(level, features=",".join(without), width=32, registers=16)
    if name == "baseline":
        return replace(level, features="" if x86 else ",".join(features), width=16, registers=16)
    raise UnsupportedError(
        f"CONVGRAD_TARGET={name!r} is not available; this machine has native ({host.name}), "
        f"{'avx512, ' if host != plain else ''}{'avx2, ' if plain.name == 'avx512' else ''}baseline"
    )


def current() -> Target:
    """The target that kernels are written for: CONVGRAD_TARGET, else this machine."""
    return _named_cached(os.environ.get("CONVGRAD_TARGET", ""))


_named_cached = lru_cache(maxsize=8)(named)
