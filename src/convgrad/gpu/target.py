"""What a plan needs to know of a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import UnsupportedError

LEAST = 80  # the compute capability that Triton asks for, times ten


@dataclass(frozen=True)
class Target:
    """A GPU, as the model of cost sees it. Rates are those of its data sheet; what kernels reach is in plan/cost.py."""

    name: str
    capability: int  # compute capability times ten: 90 of 9.0
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may take
    clock: float  # GHz
    bandwidth: float  # of its memory, GB/s
    matrix: int  # multiplications and additions in bf16 per cycle and multiprocessor, by tensor cores
    vector: int  # the same in f32, by its plain units
    double: int  # the same in f64

    @property
    def arch(self) -> str:
        """The name by which NVIDIA's tools know it."""
        return f"sm_{self.capability}"


_KINDS = {
    # capability: shared, matrix, vector, double; from NVIDIA's data sheets and programming guide. Of kinds that are
    # sold with tensor cores of two speeds, the slower one.
    80: (166912, 2048, 128, 128),
    86: (101376, 512, 256, 4),
    87: (166912, 512, 256, 4),
    89: (101376, 512, 256, 4),
    90: (232448, 4096, 256, 256),
    100: (232448, 8192, 256, 128),
    103: (232448, 8192, 256, 4),
    120: (101376, 512, 256, 4),
}

KNOWN = {
    "sm_80": (108, 1.41, 2039.0),  # A100 80GB: multiprocessors, GHz, GB/s
    "sm_86": (84, 1.8, 768.0),  # A40
    "sm_89": (142, 2.5, 864.0),  # L40S
    "sm_90": (132, 1.75, 4800.0),  # H200
    "sm_100": (148, 1.85, 8000.0),  # B200
    "sm_120": (170, 2.4, 1792.0),  # RTX 5090
}
"""One GPU of each kind, for plans where there is none."""


def of_kind(name: str) -> Target:
    """The target that stands for a kind of GPU, such as `sm_90`."""
    if name not in KNOWN:
        raise UnsupportedError(f"no GPU is known by the name {name!r}; known are {', '.join(KNOWN)}")
    multiprocessors, clock, bandwidth = KNOWN[name]
    capability = int(name.removeprefix("sm_"))
    shared, matrix, vector, double = _KINDS[capability]
    return Target(name, capability, multiprocessors, shared, clock, bandwidth, matrix, vector, double)


@lru_cache(maxsize=64)
def current(index: int) -> Target:
    """The GPU of this machine with that number. Whoever has a tensor on it has imported PyTorch."""
    torch: Any = sys.modules["torch"]
    found = torch.cuda.get_device_properties(index)
    capability = 10 * found.major + found.minor
    # A kind that is newer than this table is taken for the newest one before it.
    kind = max([k for k in _KINDS if k <= capability], default=min(_KINDS))
    shared, matrix, vector, double = _KINDS[kind]
    guess = KNOWN.get(f"sm_{kind}", KNOWN["sm_80"])
    return Target(
        name=found.name,
        capability=capability,
        multiprocessors=found.multi_processor_count,
        shared=getattr(found, "shared_memory_per_block_optin", shared) or shared,
        clock=getattr(found, "clock_rate", 0) / 1e6 or guess[1],
        bandwidth=_bandwidth(found) or guess[2],
        matrix=matrix,
        vector=vector,
        double=double,
    )


def _bandwidth(found: Any) -> float:
    """GB/s by the clock and the width of the memory's bus; 0 where PyTorch does not tell."""
    clock, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return float(2 * clock * 1e3 * bits / 8 / 1e9)  # two transfers a cycle
