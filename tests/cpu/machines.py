"""Machines that are the same wherever the tests run: nothing here is asked of the one at hand."""

from __future__ import annotations

from dataclasses import replace

from convgrad.cpu.target import Target, Tiles

X86 = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"
FEATURES = "+avx2,+fma,+f16c"
WIDE = FEATURES + ",+avx512f,+avx512bw,+avx512vl,+avx512dq"

AVX512 = Target("avx512", X86, "x86-64", WIDE, 64, 32)
AVX512_PAIRS = replace(AVX512, features=WIDE + ",+avx512bf16")
HALVES = replace(AVX512_PAIRS, double_pumped=True)
AVX2 = Target("avx2", X86, "x86-64", FEATURES, 32, 16)
BASELINE = Target("baseline", X86, "x86-64", "", 16, 16)
NEON = Target("neon", ARM, "generic", "+neon", 16, 32)

# Made-up ones ask for what no real one does: vectors of 3, tiles that no planner would choose, and caches so small that
# every problem is cut into chunks, boxes, parts and slices, and written past the caches.
SMALL = {"l1": 2048, "l2": 20000, "l3": 4000}
MACHINES = {
    "avx512": AVX512_PAIRS,
    "avx512 without pairs": AVX512,
    "halves": HALVES,
    "avx2": AVX2,
    "baseline": BASELINE,
    "neon": NEON,
    "avx512 in small caches": replace(AVX512_PAIRS, **SMALL),
    "halves in small caches": replace(HALVES, **SMALL),
    "avx2 in small caches": replace(AVX2, **SMALL),
    "vector of 3": replace(AVX512, width=12, tile=(5, 7)),
    "vector of 3 in small caches": replace(AVX512, name="made up", width=12, tile=(2, 3), **SMALL),
    "tile 3x2 in small caches": replace(AVX512_PAIRS, tile=(3, 2), **SMALL),
}

# Intel's servers, which multiply pairs of bf16 more slowly than f32, without their tile registers and with them.
INTEL_FEATURES = WIDE + ",+avx512bf16,+avx512fp16,+amx-tile,+amx-bf16"
SAPPHIRE_RAPIDS = replace(AVX512, cpu="sapphirerapids", features=INTEL_FEATURES, own_l2=2 << 20)
EMULATED = Tiles(("bf16", "f16"), emulated=True)
INTEL = {
    "sapphirerapids": SAPPHIRE_RAPIDS,
    "sapphirerapids, tiles": replace(SAPPHIRE_RAPIDS, name="amx", tiles=Tiles(("bf16",))),
    "graniterapids, tiles": replace(
        SAPPHIRE_RAPIDS, name="amx", cpu="graniterapids", features=INTEL_FEATURES + ",+amx-fp16",
        tiles=Tiles(("bf16", "f16")),
    ),
    "tiles, emulated": replace(AVX512_PAIRS, name="amx", tiles=EMULATED),
    "tiles, emulated, in small caches": replace(AVX512_PAIRS, name="amx", tiles=EMULATED, own_l2=20000, **SMALL),
}  # fmt: skip
