"""Which gradients `install()` takes: what is expected to be no slower than PyTorch's own kernel, or everything.

PyTorch's kernels are measured, not modelled: a rule names a kind of layer on which they were the quicker ones, by more
than two runs of the same differ. `benchmarks/routed.py` prints a table of both, and marks what should have a rule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from ..backend import Device
from ..cpu import backend as cpu
from ..dtypes import DTYPES
from ..gpu import backend as gpu
from ..spec.problem import Problem
from .memory import float32_precision

POLICIES = ("fast", "all")

MANY = 1 << 30


class Rule(NamedTuple):
    """A kind of layer that is left to PyTorch. Pairs are the least and the most; channels are those of a group."""

    what: str
    wanted: str  # of y = conv(x, w), the tensors that are computed
    dtype: str
    last: tuple[bool, ...] = (True, False)  # whether channels are last in memory
    groups: tuple[int, int] = (1, MANY)
    cx: tuple[int, int] = (1, MANY)
    cy: tuple[int, int] = (1, MANY)
    taps: tuple[int, int] = (1, MANY)
    dilation: tuple[int, int] = (1, MANY)
    stride: tuple[int, int] = (1, MANY)
    rank: tuple[int, int] = (1, 3)
    uneven: bool = False  # only where the images of a channel, one after another, do not begin at multiples of 16 bytes

    def fits(self, p: Problem) -> bool:
        """Whether a problem is of this kind."""
        of_data = p.y_strides if p.wanted != "y" else p.x_strides
        channels = of_data[2] if (p.cy if p.wanted != "y" else p.cx) > 1 else of_data[1]
        return (
            p.wanted in self.wanted
            and p.dtype == self.dtype
            and (channels == 1) in self.last
            and self.groups[0] <= p.g <= self.groups[1]
            and self.cx[0] <= p.cx <= self.cx[1]
            and self.cy[0] <= p.cy <= self.cy[1]
            and self.taps[0] <= prod(p.w) <= self.taps[1]
            and self.dilation[0] <= max(p.dilation) <= self.dilation[1]
            and self.stride[0] <= max(p.stride) <= self.stride[1]
            and self.rank[0] <= p.rank <= self.rank[1]
            and not (self.uneven and prod(p.x) * DTYPES[p.dtype].size % 16 == 0)
        )


LAST = (True,)

# Measured on an AMD EPYC (Zen 5), 2 threads, PyTorch 2.13. PyTorch's time over ours is behind each.
RULES = (
    Rule("groups of 8 channels in bfloat16", "xy", "bf16", LAST, (2, MANY), (8, 8), (8, 8)),  # 0.78, 0.80
    Rule("groups of 16 channels in float32", "xy", "f32", groups=(2, MANY), cx=(9, 16), cy=(9, 16)),  # 0.89 to 0.96
    Rule("a dilated kernel in float32", "xy", "f32", LAST, cx=(32, MANY), cy=(32, MANY), dilation=(2, MANY)),  # 0.93
    Rule("a dilated kernel in bfloat16", "xy", "bf16", LAST, cx=(257, MANY), dilation=(2, MANY)),  # 0.95
    Rule("weights of up to 4 channels by 32", "w", "f32", LAST, cx=(1, 4), cy=(2, 32), taps=(1, 9)),  # 0.63 to 0.84
    Rule("weights of up to 4 channels by 16", "w", "f32", cx=(1, 4), cy=(2, 16), taps=(1, 9)),  # 0.76
    Rule("weights of up to 4 channels by 16", "w", "bf16", LAST, cx=(1, 4), cy=(2, 16), taps=(1, 9)),  # 0.77
    Rule("a depthwise forward pass in bfloat16", "y", "bf16", LAST, (2, MANY), (1, 1), (1, 1)),  # 0.85 to 0.90
)

# Of layers that tile registers multiply here, too. Measured on an Intel Emerald Rapids, 1 to 16 threads, PyTorch 2.11.
TILE_RULES = (
    Rule("a kernel of many taps in bfloat16", "xy", "bf16", LAST, cx=(16, MANY), cy=(16, MANY), taps=(27, MANY)),  # 0.8
)

TILES = 16  # channels from which PyTorch's AMX kernels are far ahead of those that multiply vectors: 3 to 16 times


FIRST = (False,)

# Measured on an H200 with cold caches, PyTorch 2.11 and cuDNN 9.19, which tried all ways. `benchmarks/gpu_policy.py`
# compares rules with what `benchmarks/gpu.py` has measured. Of transposed layers, y is the gradient of data.
IN_16_BITS = (
    Rule("weights of a kernel of 1", "w", "bf16", LAST, (1, 1), (512, MANY), (512, MANY), (1, 1)),  # 0.74, 0.87
    Rule("strided weights", "w", "bf16", LAST, (1, 1), (64, MANY), (64, MANY), (9, 9), stride=(2, 2)),  # 0.88
)
GPU_RULES: dict[str, tuple[Rule, ...]] = {
    "bf16": IN_16_BITS,
    # Our kernels are those of bf16; of cuDNN's, one is quicker.
    "f16": (
        *IN_16_BITS,
        Rule("strided depthwise weights", "w", "bf16", LAST, (2, MANY), (1, 1), (1, 1), stride=(2, 2)),  # 0.85
    ),
    "tf32": (
        Rule("a kernel of 1, few channels", "xy", "f32", LAST, (1, 1), (1, 256), (1, 256), (1, 1)),  # 0.92, 0.98
        Rule("a transposed kernel of 2x2", "y", "f32", LAST, (1, 1), taps=(4, 4), stride=(2, 2)),  # 0.85 to 0.91
        # 0.34 and 0.36 of larger images, when they were copied, as these are
        Rule("a kernel of 1, few channels", "xyw", "f32", FIRST, (1, 1), (1, 256), (1, 256), (1, 1), uneven=True),
        # 0.96; along two axes 1.11
        Rule("a long 1D kernel", "xy", "f32", FIRST, (1, 1), (32, MANY), taps=(10, MANY), stride=(2, 8), rank=(1, 1)),
    ),
    "default": (
        Rule("weights of up to 4 channels", "w", "f32", FIRST, (1, 1), (1, 4), taps=(2, 9)),  # 0.74
        # 0.83 and 0.88; channels last 0.92
        Rule(
            "weights of many channels",
            "w",
            "f32",
            FIRST,
            (1, 1),
            (257, MANY),
            (257, MANY),
            (9, 9),
            (1, 1),
            (1, 1),
            (2, 2),
        ),
        Rule(
            "weights of many channels", "w", "f32", LAST, (1, 1), (257, 511), (257, 511), (9, 9), (1, 1), (1, 1), (2, 2)
        ),
    ),
}

PAYS = 50e-6  # seconds that a gradient takes a GPU at least, from which a call of its own is worth it

MEASURED = 90  # the compute capability, times ten, of the GPU that rules are for


def hindrance(p: Problem, device: Device, policy: str, forward: bool = False) -> str:
    """Why a result that could be computed on a device is left to PyTorch; nothing if it is taken."""
    if policy == "all":
        return ""
    if device.kind == "cuda":
        capability = gpu.machine(device).capability
        if capability != MEASURED:
            kind = f"{capability // 10}.{capability % 10}"
            return f'GPUs of compute capability {kind} have not been measured; the policy "all" takes all that they can'
        return on_gpu(p, float32_precision(), forward)
    if p.dtype == "bf16" and min(p.cx, p.cy) >= TILES and _has_tiles() and not _in_tiles(p):
        return "PyTorch multiplies bfloat16 by AMX tiles on this CPU, and is expected to be quicker"
    for rule in (*RULES, *(TILE_RULES if _has_tiles() else ())):
        if rule.fits(p):
            return f"{rule.what}: PyTorch is expected to be quicker"
    return ""


def too_little(p: Problem, device: Device, policy: str) -> str:
    """Why a gradient is left to PyTorch if its kernel is called for the other one; nothing if it is taken all the same.

    A call more takes the host some 20 us, and small layers on a GPU wait for the host.
    """
    if policy == "all" or device.kind != "cuda":
        return ""
    target = gpu.machine(device)
    rate = target.matrix * target.multiprocessors * target.clock
    if max(p.flops / rate, p.bytes / target.bandwidth) / 1e9 >= PAYS:
        return ""
    return "a call for so little takes the host longer than it saves, as PyTorch computes the other gradient anyway"


def on_gpu(p: Problem, precision: str, forward: bool) -> str:
    """The same on a GPU of the kind that was measured; `precision` says how products of f32 are taken."""
    if forward:
        return "forward passes on GPUs have not been measured"
    word = precision if p.dtype == "f32" else p.dtype
    if word not in GPU_RULES:
        return f"products in {word} have not been measured on GPUs"
    p = replace(p, dtype="bf16") if p.dtype == "f16" else p
    for rule in GPU_RULES[word]:
        if rule.fits(p):
            return f"{rule.what}: PyTorch is expected to be quicker"
    return ""


def _in_tiles(p: Problem) -> bool:
    """Whether tiles multiply a problem of bfloat16 here, too: they are used, and steps divide its channels well."""
    if not cpu.machine().tiles.multiply("bf16"):
        return False
    from ..cpu.amx.gather_plan import pairs_of_step

    return p.wanted == "w" or pairs_of_step(p.cy if p.wanted == "x" else p.cx) > 0


@lru_cache(maxsize=1)
def _has_tiles() -> bool:
    """Whether PyTorch uses AMX on this machine."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
