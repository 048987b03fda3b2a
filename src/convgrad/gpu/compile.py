"""A launch's kernel as Triton compiles it, for any GPU and with none at hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..dtypes import DTYPES
from .plan.axes import LAST
from .plan.records import Descriptor, Launch
from .target import Target

ALIGNED = 16  # bytes, that the widest load of a thread takes

_TYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64"}

# Of these numbers, code knows by which power of two they are divisible, so that it may load several elements at once.
_HINTED = {"stride", "strides", "channels", "summed", "made"}
_HINTED_IN_SPACE = {"sizes", "steps"}  # where neighbours in memory are neighbours in space


def function(launch: Launch) -> Any:
    """The kernel of a launch."""
    return getattr(import_module(f"{__package__}.kernels.{launch.module or launch.kernel}"), launch.kernel)


def source(launch: Launch, aligned: bool) -> Any:
    """What Triton is given to compile. `aligned` says that all tensors begin at multiples of 16 bytes."""
    kernel = function(launch)
    names = list(kernel.arg_names)
    pointers = len(launch.descriptors)
    numbers = pointers + len(launch.tensors)
    told = [name for name, _ in (*launch.values, *launch.constants)]
    assert names[numbers:] == told, f"{launch.kernel} takes {names[numbers:]}, and gets {told}"
    width = "i64" if dict(launch.constants).get("WIDE") else "i32"
    signature: dict[str, Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for name, descriptor in zip(names, launch.descriptors, strict=False):
        signature[name] = _type(descriptor, kernel.is_gluon())
    for at, (_, dtype) in enumerate(launch.tensors, pointers):
        signature[names[at]] = f"*{_TYPES[dtype]}"
        if aligned:
            hints[(at,)] = [["tt.divisibility", ALIGNED]]
    in_space = any(name.endswith("_UNIT") and value == LAST for name, value in launch.constants)
    hinted = _HINTED | (_HINTED_IN_SPACE if in_space else set())
    for at, (name, value) in enumerate(launch.values, numbers):
        many = isinstance(value, tuple)
        signature[name] = (width,) * len(value) if isinstance(value, tuple) else width
        if name.split("_")[-1] in hinted:
            for entry, number in enumerate(value if isinstance(value, tuple) else (value,)):
                if (divisor := _divisor(number)) > 1:
                    hints[(at, entry) if many else (at,)] = [["tt.divisibility", divisor]]
    signature |= {name: "constexpr" for name, _ in launch.constants}
    constants = {(names.index(name),): value for name, value in launch.constants}
    return _source_type(kernel)(kernel, signature, constants, hints)


def _source_type(kernel: Any) -> Any:
    if kernel.is_gluon():
        return import_module("triton.experimental.gluon._runtime").GluonASTSource
    return import_module("triton.compiler").ASTSource


def _type(descriptor: Descriptor, gluon: bool) -> str:
    """The type of a descriptor. Kernels in Gluon are told how blocks lie in shared memory; others do not ask."""
    layout = ""
    if gluon:
        from triton.experimental.gluon.language import NVMMASharedLayout

        bits = 8 * DTYPES[descriptor.dtype].size
        rank = len(descriptor.block)
        layout = f",{NVMMASharedLayout(descriptor.swizzle, bits, rank, descriptor.transposed)!r}"
    return f"tensordesc<{_TYPES[descriptor.dtype]}{list(descriptor.block)}{layout}>"


def build(launch: Launch, target: Target, aligned: bool) -> Any:
    """The compiled kernel. Triton keeps it on disk, for later processes."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers:
        options["maxnreg"] = launch.registers
    if launch.early:
        options["launch_pdl"] = True
    return triton.compile(source(launch, aligned), GPUTarget("cuda", target.capability, 32), options)


def _divisor(number: int) -> int:
    """The largest power of two that divides a number, up to 16."""
    return number & -number if number & 15 else ALIGNED
