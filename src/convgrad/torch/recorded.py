"""The plain functions on tensors that autograd or a trace watches: a call that was bound becomes one operator.

The operators know tensors in PyTorch's order only, x (n, g*cx, *X), w (g*cy, cx, *K) and y (n, g*cy, *Y); the caller's
formats are views of those, but for weights with their groups on the channels of x, of which a copy may be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import engine
from ..bias import Bound
from ..dtypes import DTYPES
from ..libraries import torch as library
from ..spec.bind import Binding, Description
from ..spec.problem import Ints, Problem, Role
from ..spec.table import DATA_AXES, Op
from ..tensors import other_dtype
from .operators import GIVEN, Call
from .plans import NAMES, name_of, strides_in

TYPES = {name: dtype for dtype, name in NAMES.items()}
"""PyTorch's element types by oneDNN's names."""


def check(value: Tensor, name: str) -> Tensor:
    """The tensor, if operators can take it; a mistake is told as it is of plain tensors."""
    places = {"meta", *(backend.device for backend in engine.BACKENDS)}
    if value.is_nested or value.is_quantized or value.layout is not torch.strided or value.device.type not in places:
        library.open(value, name)
    return value


def describe(tensor: Tensor, name: str) -> Description:
    """What `bind` needs to know. Sizes that a trace leaves open become those that it was begun with."""
    dtype = name_of(tensor.dtype)
    if dtype not in DTYPES:
        raise other_dtype(name, dtype)
    return Description(dtype, tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))


def compute(binding: Binding, tensors: Mapping[str, Tensor]) -> Tensor:
    """The result of a call."""
    problem, wanted = binding.problem, binding.problem.wanted
    letters = {role: binding.layout.axes(binding.op, role) for role in ("x", "w", "y")}
    first, second = (_ordered(tensors[role], role, letters[role], problem) for role in GIVEN[wanted])
    call = Call(
        first=first,
        second=second,
        bias=tensors.get("bias"),
        size=getattr(problem, wanted),
        stride=problem.stride,
        padding=problem.pad,
        dilation=problem.dilation,
        groups=problem.g,
        channels_last=_lies_last(binding, letters[wanted]),
        algorithm=problem.algorithm,
        dtype=TYPES[problem.out_dtype],
    )
    with _as_they_are(first):
        result = call.again(wanted)
    result = _in_format(result, binding, letters[wanted])
    return result if result.stride() == binding.strides else _laid_out(result, binding.strides)


def add_or_sum(op: Op, bound: Bound, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """An operation of a bias: sums are taken in the accumulator type, then rounded once. `out` is written to."""
    data = tensors[op.inputs[0].role]
    axis = 1 if DATA_AXES[bound.attributes["data_format"]] == "nck" else data.dim() - 1
    dtype = TYPES[bound.out_dtype]
    sums = torch.promote_types(data.dtype, torch.float32)
    if op.wanted == "bias":
        result = data.sum([a for a in range(data.dim()) if a != axis], dtype=sums)
    else:
        values = tensors["bias"].to(sums)
        result = data.to(sums) + values.reshape([-1 if a == axis else 1 for a in range(data.dim())])
    if out is None:
        return result.to(dtype)
    if bound.attributes.get("accumulate"):
        result = result + out
    return out.copy_(result)


def _as_they_are(tensor: Tensor) -> Any:
    """Where autocast leaves element types alone: a plain call says which ones it wants."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _order(axes: str, rank: int) -> list[int]:
    """Where the axes of a format are, in PyTorch's order: batch and channels, or y and x channels of weights, first."""
    spread = axes.index("k")
    letters = sorted(set(axes) - {"k"}, key="nycx".index)
    at = [axes.index(letter) + (rank - 1 if axes.index(letter) > spread else 0) for letter in letters]
    return [*at, *range(spread, spread + rank)]


def _ordered(tensor: Tensor, role: Role, axes: str, problem: Problem) -> Tensor:
    """A tensor in PyTorch's order."""
    turned = tensor.permute(_order(axes, problem.rank))
    if role == "w" and turned.shape[0] != problem.g * problem.cy:
        apart = turned.reshape(problem.cy, problem.g, problem.cx, *problem.w)
        return apart.movedim(1, 0).reshape(problem.g * problem.cy, problem.cx, *problem.w)
    return turned


def _in_format(result: Tensor, binding: Binding, axes: str) -> Tensor:
    """The inverse of `_ordered`, for the result."""
    problem, order = binding.problem, _order(axes, binding.problem.rank)
    if problem.wanted == "w" and binding.shape[order[0]] != result.shape[0]:
        apart = result.reshape(problem.g, problem.cy, problem.cx, *problem.w)
        result = apart.movedim(0, 1).reshape(problem.cy, problem.g * problem.cx, *problem.w)
    return result.permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _lies_last(binding: Binding, axes: str) -> bool:
    """Whether the result has its channels last in memory."""
    order = _order(axes, binding.problem.rank)
    shape, strides = (tuple(values[a] for a in order) for values in (binding.shape, binding.strides))
    return strides == strides_in(shape, True) and strides != strides_in(shape, False)


def _laid_out(tensor: Tensor, strides: Ints) -> Tensor:
    """A tensor with its axes in memory in the order of some strides."""
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return tensor.permute(order).contiguous().permute(_inverse(order))
