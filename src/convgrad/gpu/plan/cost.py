"""What a plan is expected to take, in cycles of a multiprocessor and seconds: a model, fitted to times on an H200.

A program's blocks take as long as their arithmetic, their loads or their instructions, whichever is longest, but no
less than loads take to arrive; what several programs of a multiprocessor do beside each other hides that. No plan is
quicker than memory. Tiles and parts are chosen by it. The bits of a sum depend on its parts, so they depend on the kind
of GPU, but never on anything that a run measures.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...dtypes import DTYPES
from ..target import Target

MATRIX_SHARE = 0.6  # of the tensor cores' rate, that products reach which nothing else holds up
VECTOR_SHARE = 0.5  # of the plain units' rate, where operands come from shared memory
BANDWIDTH_SHARE = 0.75
SPLIT_TIMES = {"gather": 1.35, "weights": 1.75}  # as long f32 in parts takes as this model says, on an H200
COPY_SHARE = 0.65  # of the memory's bandwidth, where neighbours change
CACHE_BYTES = 46  # that a multiprocessor gets from the second cache in a cycle: 64 at most
ISSUE = 1.8  # instructions of warps that a multiprocessor begins in a cycle, beside products: 4 at most
LATENCY = 930  # cycles of a block of the sum at least, where a program is alone
PROGRAM = 7100  # cycles of a program before and after its sum, where it is alone
REGISTERS = 65536  # of a multiprocessor
LAUNCH = 4e-6  # seconds that another kernel costs


class Work(NamedTuple):
    """What the programs of a launch do."""

    programs: int
    blocks: float  # of the sum, of a program
    flops: int  # of a block, with what is computed for nothing
    loads: float  # bytes of a block, from the caches
    instructions: float  # of a block, of all warps
    ends: float  # instructions of a program besides its blocks
    beside: int  # programs that a multiprocessor has at once
    bytes: int  # of the tensors


def rate(target: Target, dtype: str, precision: str) -> float:
    """Multiplications and additions in a cycle of a multiprocessor by matrix products."""
    if dtype == "f64":
        return target.double * MATRIX_SHARE if target.double > 16 else target.double
    if dtype != "f32":
        return target.matrix * MATRIX_SHARE
    if precision == "ieee":
        return target.vector * VECTOR_SHARE
    return target.matrix * MATRIX_SHARE / {"tf32": 2, "tf32x3": 6, "bf16x6": 6}[precision]


def fastest_precision(target: Target) -> str:
    """How products of f32 are taken when nobody says: as fast as can be with errors no larger than plain f32's.

    Both tf32x3 and bf16x6 qualify: errors of 2.4e-7 and 2.1e-7 were measured on an H200, where plain f32 had 1.1e-6,
    and bf16x6 was a fifth faster. Its products of integers below 2^16 are exact, too; those of tf32x3 are not.
    """
    plain, split = (rate(target, "f32", precision) for precision in ("ieee", "bf16x6"))
    return "bf16x6" if split > plain else "ieee"


def beside(target: Target, warps: int, shared: int, registers: int) -> int:
    """How many programs a multiprocessor has at once, whose threads have so many registers."""
    by_registers = REGISTERS // (32 * warps * (ceil(registers / 8) * 8))
    return max(1, min(target.shared // max(shared, 1), by_registers, 64 // warps))


def seconds(target: Target, work: Work, flop_rate: float) -> float:
    """The time of a launch."""
    block = max(work.flops / flop_rate, work.loads / CACHE_BYTES, work.instructions / ISSUE)
    each = ceil(work.programs / target.multiprocessors)
    busy = each * (work.blocks * block + work.ends / ISSUE)
    alone = ceil(each / work.beside) * (work.blocks * max(block, LATENCY) + PROGRAM)
    compute = max(busy, alone) / (target.clock * 1e9)
    return max(compute, work.bytes / (target.bandwidth * 1e9 * BANDWIDTH_SHARE)) + LAUNCH


def copy_seconds(target: Target, moved: int) -> float:
    """The time of a copy that reads and writes so many bytes together."""
    return moved / (target.bandwidth * 1e9 * COPY_SHARE) + LAUNCH


def finish_seconds(target: Target, elements: int, parts: int, dtype: str) -> float:
    """The time that it takes to write the parts of a sum and to add them."""
    item = 8 if dtype == "f64" else 4
    moved = elements * (2 * parts * item + DTYPES[dtype].size)
    return moved / (target.bandwidth * 1e9 * BANDWIDTH_SHARE) + LAUNCH
