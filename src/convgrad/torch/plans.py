"""What computes a convolution or one of its gradients on PyTorch's tensors: planned once, and kept by a key.

PyTorch's convolutions and transposed convolutions are one geometry here, y = conv(x, w), of which one tensor is wanted:
x is (n, g*cx, *X), w is (g*cy, cx, *K) and y is (n, g*cy, *Y), in any strides. The key of a call is all that a plan
depends on: shapes, strides and element types, the geometry, and how many threads there are. A repeated call looks its
plan up, makes memory for the result, and hands addresses over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .. import engine
from ..backend import Device, Executable
from ..cpu.threads.count import get_num_threads
from ..errors import OutOfMemoryError, SpecError
from ..gpu import backend as gpu
from ..libraries import torch as library
from ..memory import in_units
from ..precision import following
from ..spec.check import broken, values
from ..spec.problem import Ints, Problem, Role, dense_strides, settle
from ..spec.table import ALGORITHMS
from .memory import Memory, float32_precision, setting

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
"""The element types that are computed, by oneDNN's names."""

library.keyed()  # says whose threads compute


class Geometry(NamedTuple):
    """How x, w and y belong together, but for their sizes: a value for every spatial axis, and the groups."""

    stride: Ints
    padding: Ints  # in front of x; what is behind it follows from the sizes
    dilation: Ints
    groups: int


class Result(NamedTuple):
    """What a result is like in memory; `accumulate` says that it is added to what is there."""

    shape: Ints
    strides: Ints  # in elements
    dtype: torch.dtype
    accumulate: bool = False


def _empty(shape: Ints, strides: Ints, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# What Inductor's code calls: it takes half the time, because it has fewer kinds of arguments to tell apart.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_on_cpu: Callable[[Ints, Ints, torch.dtype], Tensor] = getattr(_guards, "_empty_strided_cpu", _empty)


class Step(NamedTuple):
    """One result, and what computes it."""

    execute: Executable
    backend: str
    problem: Problem
    result: Result
    context: int  # what `execute` is told of threads; for a GPU, `context` is asked at each call

    def run(self, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        """Write to the wanted tensor, which is one of the three."""
        at = 0 if bias is None else bias.data_ptr()
        self.execute(x.data_ptr(), w.data_ptr(), y.data_ptr(), at, self.context or library.context(x))

    def new(self, like: Tensor) -> Tensor:
        """Memory for the result on the device of a tensor, its values not set."""
        shape, strides, dtype, _ = self.result
        size = prod(shape) * dtype.itemsize
        try:
            if like.is_cpu:
                return _empty_on_cpu(shape, strides, dtype)
            quick = gpu.quick_empty(like.get_device()) if like.is_cuda else None
            if quick is not None:
                made: Tensor = quick(shape, strides, dtype)
                return made
            return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
        except RuntimeError as error:
            if "alloc" not in str(error):
                raise
            raise OutOfMemoryError(f"no memory for a result of shape {shape} in {dtype}, {in_units(size)}") from None


_steps: Memory[Step] = Memory()


def compute(
    wanted: Role,
    tensors: Mapping[Role, Tensor],
    bias: Tensor | None,
    result: Result,
    geometry: Geometry,
    algorithm: str = "direct",
) -> Tensor:
    """The wanted tensor, from the two others and a bias for its channels."""
    step = step_for(wanted, tensors, bias, result, geometry, algorithm)
    first = next(iter(tensors.values()))
    out = step.new(first)
    x, w, y = (tensors.get(role, out) for role in ("x", "w", "y"))
    step.run(x, w, y, bias)
    return out


def step_for(
    wanted: Role,
    tensors: Mapping[Role, Tensor],
    bias: Tensor | None,
    result: Result,
    geometry: Geometry,
    algorithm: str = "direct",
) -> Step:
    """The step of a call, made now or remembered. A mistake of the caller is a SpecError."""
    given = [*tensors.values()] if bias is None else [*tensors.values(), bias]
    how = (wanted, *tensors, *result, *geometry, algorithm)
    return _steps.find(
        given,
        how,
        setting("cpu" if given[0].is_cpu else given[0].device.type),
        lambda: make_step(wanted, tensors, bias, result, geometry, algorithm),
    )


def make_step(
    wanted: Role,
    tensors: Mapping[Role, Tensor],
    bias: Tensor | None,
    result: Result,
    geometry: Geometry,
    algorithm: str = "direct",
) -> Step:
    """The step of a call, planned anew."""
    problem = describe(wanted, tensors, bias, result, geometry, algorithm)
    return load(problem, result, next(iter(tensors.values())))


def load(problem: Problem, result: Result, first: Tensor) -> Step:
    """The step of a problem, ready to be computed where a tensor is."""
    with following(float32_precision()):
        choice = engine.choose(problem, Device(first.device.type, first.device.index or 0))
    # PyTorch's own threads compute: no more than it may use itself, and no more than are asked of us.
    threads = min(torch.get_num_threads(), get_num_threads())
    context = library.context(first) + threads if first.device.type == "cpu" else 0
    return Step(choice.execute, choice.backend.name, problem, result, context)


def other_device(first: Tensor, other: Tensor) -> SpecError:
    """The error for tensors that are not all in one place."""
    return SpecError(f"all tensors must be on {first.device}, as the first one is, got one on {other.device}")


def describe(
    wanted: Role,
    tensors: Mapping[Role, Tensor],
    bias: Tensor | None,
    result: Result,
    geometry: Geometry,
    algorithm: str = "direct",
) -> Problem:
    """The problem that a call comes to; any mistake is a SpecError.

    Any sizes of the three tensors make a problem, because x counts as zero outside of its range.
    """
    first, *others = [*tensors.values(), *([] if bias is None else [bias])]
    for other in others:
        if other.device != first.device:
            raise other_device(first, other)
    shapes = {role: tuple(tensor.shape) for role, tensor in tensors.items()} | {wanted: tuple(result.shape)}
    dtype = _check_dtypes(tensors, bias, result.dtype)
    check_shapes(wanted, shapes, None if bias is None else tuple(bias.shape), geometry)
    if algorithm not in ALGORITHMS:
        raise broken("attribute_choice", "algorithm", algorithm, expected=", ".join(ALGORITHMS))
    g, x, w, y = geometry.groups, shapes["x"], shapes["w"], shapes["y"]
    n, cx, cy = x[0], w[1], w[0] // g
    strides = {role: tensor.stride() for role, tensor in tensors.items()} | {wanted: tuple(result.strides)}
    of_x, of_w, of_y = strides["x"], strides["w"], strides["y"]
    return Problem(
        wanted=wanted,
        dtype=dtype,
        out_dtype=name_of(result.dtype),
        n=n,
        g=g,
        cx=cx,
        cy=cy,
        x=x[2:],
        w=w[2:],
        y=y[2:],
        stride=geometry.stride,
        dilation=geometry.dilation,
        pad=geometry.padding,
        x_strides=settle((n, g, cx, *x[2:]), (of_x[0], of_x[1] * cx, *of_x[1:])),
        w_strides=settle((g, cy, *w[1:]), (of_w[0] * cy, *of_w)),
        y_strides=settle((n, g, cy, *y[2:]), (of_y[0], of_y[1] * cy, *of_y[1:])),
        bias_stride=None if bias is None else bias.stride()[0],
        accumulate=result.accumulate,
        algorithm=algorithm,
    )


def _check_dtypes(tensors: Mapping[Role, Tensor], bias: Tensor | None, asked: torch.dtype) -> str:
    """The element type of the inputs, which is one of those that are computed, and the same for all."""
    (first, tensor), *others = [*tensors.items(), *([] if bias is None else [("bias", bias)])]
    if tensor.dtype not in NAMES:
        raise broken("input_dtype", first, name_of(tensor.dtype), expected=", ".join(map(str, NAMES)))
    for name, other in others:
        if other.dtype != tensor.dtype:
            raise broken("same_dtype", name, str(other.dtype), first=first, expected=tensor.dtype)
    if asked not in (tensor.dtype, torch.float32) or (tensor.dtype is torch.float64 and asked is not tensor.dtype):
        raise broken("output_dtype", "dtype", str(asked), expected=f"{tensor.dtype} or torch.float32")
    return NAMES[tensor.dtype]


def check_shapes(wanted: Role, shapes: Mapping[Role, Sequence[int]], bias: Ints | None, geometry: Geometry) -> None:
    """Whether shapes, one of which is that of the wanted tensor, and the geometry belong together."""
    first = next(role for role in shapes if role != wanted)
    rank = len(shapes[first]) - 2
    if not 1 <= rank <= 3:
        raise broken("data_rank", first, tuple(shapes[first]))
    stride, padding, dilation, groups = geometry
    for name, least, per_axis in (("stride", 1, stride), ("padding", 0, padding), ("dilation", 1, dilation)):
        if len(per_axis) != rank:
            raise broken("axis_values", name, per_axis, expected=values(rank), first=first, shape=shapes[first])
        if min(per_axis) < least:
            raise broken("attribute_minimum", name, per_axis, minimum=least)
    if groups < 1:
        raise broken("attribute_minimum", "groups", groups, minimum=1)
    for role, shape in shapes.items():
        if len(shape) != rank + 2:
            name = role if role != wanted else "size"
            got = tuple(shape) if role != wanted else tuple(shape[2:])
            raise broken("same_rank", name, got, expected=rank + 2, first=first, shape=tuple(shapes[first]))
    x, w, y = (tuple(shapes[role]) for role in ("x", "w", "y"))
    for name, shape, channels in (("w", w, w[0]), ("x", x, x[1]), ("y", y, y[1])):
        if channels % groups:
            raise broken("groups_divide", "groups", f"{channels} and {groups}", tensor=name, shape=shape, layout="NCX")
    if x[0] != y[0]:
        raise broken("same_batch", "y", y, first="x", expected=x[0], layout="NCX")
    if (w[0], w[1] * groups) != (y[1], x[1]):
        both = f"x {x} and y {y}" if wanted == "w" else f"{first} {tuple(shapes[first])}"
        fits = y[1] if wanted != "y" else "*", x[1] // groups if wanted != "x" else "*", *w[2:]
        expected = f"({', '.join(map(str, fits))})"
        raise broken("weights_channels", "w", w, expected=expected, layout="OIX", groups=groups, first=both)
    if min(w[2:]) < 1:
        raise broken("weights_empty", "w", w, why="a kernel has an element at least")
    if min(*x, *w, *y) < 0:
        raise broken("shape_sign", "size", tuple(shapes[wanted][2:]))
    if bias is not None and bias != (shapes[wanted][1],):
        raise broken("bias_length", "bias", bias, expected=shapes[wanted][1], first="channel of the result")


def name_of(dtype: torch.dtype) -> str:
    """The name of an element type; one that we do not compute has PyTorch's."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def strides_in(shape: Sequence[int], channels_last: bool) -> Ints:
    """The strides of a tensor without gaps, channels last or first, in elements."""
    axes = range(len(shape))
    return dense_strides(tuple(shape), (0, *axes[2:], 1) if channels_last else tuple(axes))


def lies_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory with its channels last, as PyTorch tells it from strides, in any rank."""
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) < 3 or not strides[1] or 0 in shape:
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(shape[axis], 1)
    return True
