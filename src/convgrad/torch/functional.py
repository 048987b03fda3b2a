"""Convolutions with the signatures of `torch.nn.functional`: differentiable to any order, in any memory format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OutOfMemoryError, SpecError, UnsupportedError
from ..libraries import weight_of
from ..spec.check import broken, values
from ..spec.problem import extent, window_sizes
from .operators import Call, Options

Ints = int | Sequence[int]

_jit: Any = torch.jit  # has no types


def _per_axis(name: str, value: Ints, rank: int, least: int) -> tuple[int, ...]:
    """A value for every spatial axis; one value serves all."""
    if isinstance(value, (int, torch.SymInt)):
        found: tuple[int, ...] = (value,) * rank
    elif isinstance(value, (tuple, list)):
        found = tuple(value) * rank if len(value) == 1 else tuple(value)
    else:
        raise broken("attribute_type", name, value, expected=f"a whole number, or {values(rank)}")
    if len(found) != rank:
        raise broken("axis_values", name, value, expected=values(rank), first="a", shape=f"{rank}D convolution")
    for number in found:
        if not isinstance(number, (int, torch.SymInt)):
            raise broken("attribute_type", name, value, expected=f"a whole number, or {values(rank)}")
        if isinstance(number, int) and number < least:
            raise broken("attribute_minimum", name, value, minimum=least)
    return found


def _batch(name: str, tensor: Tensor, weight: Tensor, rank: int) -> tuple[Tensor, bool]:
    """A batch of data, and whether it was given as one."""
    for what, given in ((name, tensor), ("weight", weight)):
        if not isinstance(given, Tensor):
            hint = weight_of(given, what)
            raise broken("attribute_type", what, f"a {type(given).__name__}", hint=hint, expected="a tensor")
    shape, whole = tuple(weight.shape), rank + 2
    if len(shape) != whole:
        raise broken("same_rank", "weight", shape, expected=whole, first="a", shape=f"{rank}D weight")
    if tensor.dim() not in (rank + 1, rank + 2):
        dims = f"{whole} (or, of one image, {rank + 1})"
        raise broken("same_rank", name, tuple(tensor.shape), expected=dims, first="weight", shape=shape)
    one = tensor.dim() == rank + 1
    return (tensor.unsqueeze(0) if one else tensor), one


def _run(wanted: str, call: Call, one: bool, options: Options) -> Tensor:
    call = call._replace(algorithm=options.algorithm, wide_weights=options.wide_weights)
    out = call.adding(wanted) if options.accumulate else call.again(wanted)
    return out.squeeze(0) if one else out


def _lies(rank: int) -> bool | None:
    """Whether results have their channels last in memory: as the inputs lie, but PyTorch has no such format in 1D."""
    return False if rank == 1 else None


def _conv(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    options: Options,
) -> Tensor:
    x, one = _batch("input", input, weight, rank)
    steps, holes = _per_axis("stride", stride, rank, 1), _per_axis("dilation", dilation, rank, 1)
    kernel = tuple(weight.shape[2:])
    if isinstance(padding, str):
        front, both = _named(padding, kernel, steps, holes)
    else:
        front = _per_axis("padding", padding, rank, 0)
        both = tuple(2 * pad for pad in front)
    size = window_sizes(tuple(x.shape[2:]), kernel, steps, holes, both)
    for axis, found in enumerate(size):
        if isinstance(found, int) and found < 0:
            has = f"{x.shape[2 + axis]} + {both[axis]}"
            span = extent(kernel[axis], holes[axis])
            raise broken("kernel_fits", "input", expected=span, size=has, axis=axis, layout="NCX")
    call = Call(x, weight, bias, size, steps, front, holes, groups, _lies(rank))
    return _run("y", call, one, options)


def _named(padding: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[Any, Any]:
    """The padding in front, and that of both ends, of "same" and "valid". Of an odd sum, the end has more."""
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding != "same":
        raise broken("attribute_choice", "padding", repr(padding), expected="a whole number, a list, 'same' or 'valid'")
    if any(step != 1 for step in stride):
        raise broken("attribute_type", "stride", tuple(stride), expected="1, because padding is 'same'")
    both = tuple((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
    return tuple(total // 2 for total in both), both


def _conv_transpose(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
    options: Options,
) -> Tensor:
    y, one = _batch("input", input, weight, rank)
    steps, holes = _per_axis("stride", stride, rank, 1), _per_axis("dilation", dilation, rank, 1)
    front, extra = _per_axis("padding", padding, rank, 0), _per_axis("output_padding", output_padding, rank, 0)
    kernel = tuple(weight.shape[2:])
    size = []
    for axis, (n, k, s, p, d, more) in enumerate(zip(y.shape[2:], kernel, steps, front, holes, extra, strict=True)):
        if isinstance(more, int) and more >= max(s, d):
            raise broken("output_padding_stride", "output_padding", extra, strides=f"{steps} or dilations {holes}")
        size.append((n - 1) * s - 2 * p + extent(k, d) + more)
        if isinstance(size[-1], int) and size[-1] < 1:
            formula = f"({n} - 1) * {s} - 2 * {p} + {extent(k, d)} + {more} = {size[-1]}"
            raise broken("output_size", "padding", axis=axis, formula=formula, layout="NCX")
    call = Call(y, weight, bias, size, steps, front, holes, groups, _lies(rank))
    return _run("x", call, one, options)


def _stock(name: str, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """PyTorch's own function."""
    *how, options = rest
    if options.wide_weights:
        weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    result: Tensor = getattr(torch.nn.functional, name)(input, weight, bias, *how)
    return result


_WORDS = {"y": "input", "x": "input", "w": "weight", "size": "output size"}


def _told(name: str, function: Callable[..., Tensor], rank: int, *args: Any) -> Tensor:
    """The result, or a mistake in the caller's words.

    Our operators are told the size of their result, which `torch.jit.trace` would take for a constant: what it records
    are PyTorch's own.
    """
    if _jit.is_tracing():
        return _stock(name, *args)
    try:
        return function(rank, *args)
    except (OutOfMemoryError, UnsupportedError) as error:
        raise error.within(name) from None
    except SpecError as error:
        if not error.operation:
            if error.rule == "same_dtype" and (hint := _wider(*args[:2])):
                error.message += hint
            for_data = "x" if "transpose" not in name else "y"
            words = _WORDS | {"y" if for_data == "x" else "x": "output", for_data: "input"}
            error.message = re.sub(r"\b\w+\b", lambda m: words.get(m[0], m[0]), error.message)
            if "transpose" in name:
                error.message = error.message.replace(" in OIX", " in IOX")
            error.argument = words.get(error.argument, error.argument)
            error.operation = name
        raise


def _wider(input: Tensor, weight: Tensor) -> str:
    """What to do about weights that are wider than the data."""
    if input.dtype in (torch.bfloat16, torch.float16) and weight.dtype is torch.float32:
        return "; pass wide_weights=True, or use torch.autocast"
    return ""


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv1d`; see `conv2d` for the options."""
    rest = (stride, padding, dilation, groups, Options(algorithm, wide_weights, accumulate))
    return _told("conv1d", _conv, 1, input, weight, bias, *rest)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv2d`, computed by convgrad in both directions.

    `algorithm` says how sums are taken. With `wide_weights`, weight and bias may be float32 while input is bfloat16 or
    float16: they are rounded to its type as they are used, and their gradients are the float32 sums, not rounded.
    With `accumulate`, `backward()` adds the gradient of weight to `weight.grad` as it is computed, where that is
    possible (see docs/torch.md) and something is there to be added to.
    """
    rest = (stride, padding, dilation, groups, Options(algorithm, wide_weights, accumulate))
    return _told("conv2d", _conv, 2, input, weight, bias, *rest)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv3d`; see `conv2d` for the options."""
    rest = (stride, padding, dilation, groups, Options(algorithm, wide_weights, accumulate))
    return _told("conv3d", _conv, 3, input, weight, bias, *rest)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose1d`; see `conv2d` for the options."""
    rest = (stride, padding, output_padding, groups, dilation, Options(algorithm, wide_weights, accumulate))
    return _told("conv_transpose1d", _conv_transpose, 1, input, weight, bias, *rest)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose2d`; see `conv2d` for the options."""
    rest = (stride, padding, output_padding, groups, dilation, Options(algorithm, wide_weights, accumulate))
    return _told("conv_transpose2d", _conv_transpose, 2, input, weight, bias, *rest)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """As `torch.nn.functional.conv_transpose3d`; see `conv2d` for the options."""
    rest = (stride, padding, output_padding, groups, dilation, Options(algorithm, wide_weights, accumulate))
    return _told("conv_transpose3d", _conv_transpose, 3, input, weight, bias, *rest)
