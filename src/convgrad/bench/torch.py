"""PyTorch on the same arrays: the calls that its autograd makes for a layer.

NCX tensors are contiguous ones, NXC tensors have the channels_last memory format, and weights follow the data, as in a
model moved with `model.to(memory_format=torch.channels_last)`. There is no such format in 1D: those tensors get a
second spatial axis of size 1, which is faster than leaving them transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

from .. import host, reference
from ..dtypes import Array
from ..spec import OPS, Problem, bind
from ..spec.problem import extent, window_sizes
from ..tensors import describe

Ints = tuple[int, ...]


@lru_cache(maxsize=1)
def _torch() -> Any:
    return import_module("torch")


def available() -> str | None:
    """Why PyTorch cannot be used here, or None if it can."""
    try:
        _torch()
    except ImportError as error:
        return f"{error}; pip install torch"
    return None


def version() -> str:
    """The version of PyTorch."""
    return str(_torch().__version__)


def set_threads(count: int) -> None:
    """Let PyTorch use that many threads."""
    _torch().set_num_threads(count)


def get_threads() -> int:
    """How many threads PyTorch uses."""
    return int(_torch().get_num_threads())


def refusal(kind: str, problem: Problem) -> str | None:
    """Why PyTorch has no call for a problem, or None if it has one."""
    if problem.accumulate:
        return "PyTorch has no gradient that adds to another"
    if problem.out_dtype != problem.dtype:
        return "PyTorch's result has the type of the inputs"
    if problem.bias_stride is not None and kind not in ("Convolution", "ConvTranspose"):
        return "a bias belongs to a forward operation"
    # PyTorch pads both ends alike. More or less at the end is no hindrance as long as the sizes come out the same,
    # for the padding at the end never meets a window of its own then.
    if OPS[kind].transposed:
        extra = output_padding(problem)
        if any(not 0 <= e < max(s, d) for e, s, d in zip(extra, problem.stride, problem.dilation, strict=True)):
            return f"PyTorch pads both ends alike, and would need an output_padding of {extra}"
        return None
    twice = tuple(2 * p for p in problem.pad)
    if window_sizes(problem.x, problem.w, problem.stride, problem.dilation, twice) != problem.y:
        return "PyTorch pads both ends alike"
    return None


def output_padding(problem: Problem) -> Ints:
    """What a transposed convolution with equal padding lacks to the size of x."""
    axes = zip(problem.x, problem.y, problem.w, problem.stride, problem.dilation, problem.pad, strict=True)
    return tuple(x - (s * (y - 1) + extent(w, d) - 2 * p) for x, y, w, s, d, p in axes)


class Compiled:
    """One operation on given arrays, converted to PyTorch's tensors once. Calling it computes a new tensor.

    Data are used where they lie if PyTorch can hold them so, and weights are laid out as PyTorch likes them.
    `ValueError` says why PyTorch has no such call; `refusal` tells it beforehand.
    """

    def __init__(self, kind: str, attrs: Mapping[str, Any], inputs: Sequence[Array]) -> None:
        torch = _torch()
        op = OPS[kind]
        given = {arg.role: array for arg, array in zip(op.inputs, inputs, strict=False)}
        described = [describe(host.tensor(given[a.role]), a.name) if a.role in given else None for a in op.inputs]
        binding = bind(op, described, attrs, infer_size=True)
        problem = binding.problem
        reason = refusal(kind, problem)
        if reason:
            raise ValueError(reason)
        last = attrs.get("data_format", "NXC") == "NXC"
        flat = last and problem.rank == 1
        tensors = {role: _operand(torch, problem, role, given.get(role), last) for role in ("x", "w", "y")}
        bias = _tensor(torch, given["bias"]) if "bias" in given else None
        stride, pad, dilation = problem.stride, problem.pad, problem.dilation
        extra = output_padding(problem) if op.transposed else (0,) * problem.rank
        if flat:
            stride, pad, dilation, extra = (1, *stride), (0, *pad), (1, *dilation), (0, *extra)
        geometry = (stride, pad, dilation, op.transposed, extra, problem.g)
        src, dst = ("y", "x") if op.transposed else ("x", "y")
        if op.wanted == dst:
            self._function = torch.ops.aten.convolution.default
            self._args: tuple[Any, ...] = (tensors[src], tensors["w"], bias, *geometry)
            self._pick: int | None = None
        else:
            mask = [op.wanted == src, op.wanted == "w", False]
            self._function = torch.ops.aten.convolution_backward.default
            self._args = (tensors[dst], tensors[src], tensors["w"], None, *geometry, mask)
            self._pick = mask.index(True)
        self.binding = binding

    def __call__(self) -> Any:
        """Compute, and return a new PyTorch tensor."""
        result = self._function(*self._args)
        return result if self._pick is None else result[self._pick]

    def array(self) -> Array:
        """Compute, and return the result as a NumPy array in the format of the operation."""
        torch = _torch()
        result = self().contiguous()
        if result.dtype is torch.bfloat16:
            found: Array = result.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            found = result.numpy()
        problem = self.binding.problem
        array = np.empty(self.binding.shape, found.dtype)
        view = reference.canonical(array, problem, problem.wanted)
        view[...] = found.reshape(problem.shape(problem.wanted))
        return array


def run(kind: str, attrs: Mapping[str, Any], inputs: Sequence[Array]) -> Array:
    """Compute one operation, and return the result in its format."""
    return Compiled(kind, attrs, inputs).array()


_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}


def _operand(torch: Any, problem: Problem, role: str, array: Array | None, last: bool) -> Any:
    """One of the three tensors, in the memory format of the data."""
    g, space = problem.g, problem.shape(role)[3:]
    if role == "w":
        shape: Ints = (g * problem.cy, problem.cx, *space)
    else:
        shape = (problem.n, g * (problem.cx if role == "x" else problem.cy), *space)
    if array is None:
        # A gradient takes the tensor that it belongs to as well, for its sizes and its memory format.
        tensor = torch.zeros(shape, dtype=getattr(torch, _NAMES[problem.dtype]))
    else:
        tensor = _tensor(torch, reference.canonical(array, problem, role).reshape(shape))
    if not last:
        return tensor.contiguous()
    if problem.rank == 1:
        tensor = tensor.unsqueeze(2)
    return tensor.contiguous(memory_format=torch.channels_last_3d if problem.rank == 3 else torch.channels_last)


def _tensor(torch: Any, array: Array) -> Any:
    """A PyTorch tensor, on the memory of an array unless its strides are such that PyTorch has none like it."""
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
