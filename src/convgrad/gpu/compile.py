"""A launch's kernel as Triton compiles it, for any GPU and with none at hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .plan.axes import LAST
from .plan.records import Launch
from .target import Target

MODULES = {
    "gather": "gather",
    "lanes": "lanes",
    "weights": "weights",
    "lanes_weights": "weights",
    "finish": "finish",
}
"""Where the kernels are, in `gpu.kernels`."""

ALIGNED = 16  # bytes, that the widest load of a thread takes

_TYPES = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "f64": "*fp64"}

# Of these numbers, code knows by which power of two they are divisible, so that it may load several elements at once.
_HINTED = {"strides", "channels", "summed", "made"}
_HINTED_IN_SPACE = {"sizes", "steps"}  # where neighbours in memory are neighbours in space


def function(name: str) -> Any:
    """A kernel by its name."""
    return getattr(import_module(f"{__package__}.kernels.{MODULES[name]}"), name)


def source(launch: Launch, aligned: bool) -> Any:
    """What Triton is given to compile. `aligned` says that all tensors begin at multiples of 16 bytes."""
    from triton.compiler import ASTSource

    kernel = function(launch.kernel)
    names = list(kernel.arg_names)
    expected = len(launch.tensors) + len(launch.values) + len(launch.constants)
    assert names[len(launch.tensors) :] == [name for name, _ in (*launch.values, *launch.constants)], launch.kernel
    assert len(names) == expected
    width = "i64" if launch.constant("WIDE") else "i32"
    signature: dict[str, Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for at, (_, dtype) in enumerate(launch.tensors):
        signature[names[at]] = _TYPES[dtype]
        if aligned:
            hints[(at,)] = [["tt.divisibility", ALIGNED]]
    in_space = any(name.endswith("_UNIT") and value == LAST for name, value in launch.constants)
    hinted = _HINTED | (_HINTED_IN_SPACE if in_space else set())
    for at, (name, value) in enumerate(launch.values, len(launch.tensors)):
        many = isinstance(value, tuple)
        signature[name] = (width,) * len(value) if isinstance(value, tuple) else width
        if name.split("_")[-1] in hinted:
            for entry, number in enumerate(value if isinstance(value, tuple) else (value,)):
                if (divisor := _divisor(number)) > 1:
                    hints[(at, entry) if many else (at,)] = [["tt.divisibility", divisor]]
    signature |= {name: "constexpr" for name, _ in launch.constants}
    constants = {(names.index(name),): value for name, value in launch.constants}
    return ASTSource(kernel, signature, constants, hints)


def build(launch: Launch, target: Target, aligned: bool) -> Any:
    """The compiled kernel. Triton keeps it on disk, for later processes."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source(launch, aligned), GPUTarget("cuda", target.capability, 32), options)


def _divisor(number: int) -> int:
    """The largest power of two that divides a number, up to 16."""
    return number & -number if number & 15 else ALIGNED
