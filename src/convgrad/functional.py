"""The operations as functions of arrays, with oneDNN's names: inputs in the documented order, attributes by keyword.

Each signature is the table's row in Python; what runs is `calls`, which reads the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from . import calls, repeats
from .backend import Device
from .errors import SpecError
from .libraries import torch as pytorch
from .spec import Problem
from .spec.check import other_inputs
from .spec.dialects import find
from .spec.docstring import with_parameters

Ints = int | Sequence[int]
Tensor = Any
"""A NumPy array, or a tensor of any library that speaks DLPack. Results come back in the library of the inputs."""

P = ParamSpec("P")
R = TypeVar("R")


def apply(kind: str, *inputs: Tensor, out: Tensor = None, **attributes: Any) -> Tensor:
    """Compute any operation by its documented name, new or old.

    Inputs come in the order of the documents, attributes by name::

        convgrad.apply("ConvTransposeBackwardData", diff_dst, weights, strides=[2, 2], pads_begin=[1, 1],
                       pads_end=[1, 1], dilations=[1, 1], data_format="NCX", weights_format="IOX")

    A shape may be both an input (the third one) and an attribute; the input goes first. `out` is an array for the
    result, of any strides.
    """
    try:
        meaning = find(kind)
    except SpecError as error:
        error.operation = "apply"
        raise
    return calls.compute(meaning, meaning.arrange(inputs), out, attributes)


def explain(problem: Problem | str, device: str = "cpu") -> str:
    """What a problem comes to, as text for a person: sizes, padding, work, who computes it on this machine, and how.

    A problem is written as a line: the wanted tensor (`y` forward, `x` the gradient of the data, `w` that of the
    weights), the element type and the sizes of y = conv(x, w). `convgrad explain` prints the same, with a picture, and
    takes descriptors and graph files, too::

        print(convgrad.explain("x f32 n8 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1"))

    `device` says where it would be computed: "cpu", "cuda" or "cuda:1".
    """
    from .explanation import of_problem, text

    if isinstance(problem, str):
        problem = Problem.parse(problem)
    if not isinstance(problem, Problem):
        raise SpecError(f"explain takes a problem or its text, got an object of type {type(problem).__name__}")
    return "\n".join(text(of_problem(problem, Device.parse(device))))


def operation(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a signature into a function: what it names is looked up in the table and computed there."""
    meaning = find(kind)
    names = meaning.inputs
    tensors = [arg.role != "shape" for arg in meaning.op.inputs]

    def decorate(signature: Callable[P, R]) -> Callable[P, R]:
        @wraps(signature)
        def function(*args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) in pytorch.GUARDED:
                result = repeats.again(kind, args, kwargs)
                if result is not None:
                    return result
            key, result = calls.known(kind, tensors, args, kwargs)
            if result is not None:
                return result
            if len(args) > len(names):
                raise meaning.retell(other_inputs(meaning.op, len(args), "attributes go by name"))
            inputs = [*args, *(kwargs.pop(name, None) for name in names[len(args) :])]
            for name in names:
                if name in kwargs:
                    raise meaning.retell(other_inputs(meaning.op, f"{name} twice"))
            out = kwargs.pop("out", None)
            return calls.compute(meaning, inputs, out, kwargs, key, advise=True)

        function.__signature__ = inspect.signature(signature)  # type: ignore[attr-defined]
        function.__doc__ = with_parameters(signature.__doc__ or "", meaning)
        return function

    return decorate


@operation("Convolution")
def convolution(
    src: Tensor,
    weights: Tensor,
    bias: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    weights_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """Slide the weights over src: dst = conv(src, weights) + bias.

    ::

        dst = convgrad.convolution(src, weights, strides=1, pads_begin=1, pads_end=1, dilations=1)
    """


@operation("ConvolutionBackwardData")
def convolution_backward_data(
    diff_dst: Tensor,
    weights: Tensor,
    dst_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    weights_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of Convolution with respect to src.

    Several sizes of src share one size of dst: `dst_shape`, the shape of diff_src, says which is meant. Without it (and
    without `out`) the size is strides * (n - 1) + kernel - pads + output_padding, an extension.

    ::

        diff_src = convgrad.convolution_backward_data(
            diff_dst, weights, src.shape, strides=2, pads_begin=1, pads_end=1, dilations=1)
    """


@operation("ConvolutionBackwardWeights")
def convolution_backward_weights(
    src: Tensor,
    diff_dst: Tensor,
    weights_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    weights_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of Convolution with respect to weights. `weights_shape` is the shape of diff_weights.

    ::

        diff_weights = convgrad.convolution_backward_weights(
            src, diff_dst, weights.shape, strides=2, pads_begin=1, pads_end=1, dilations=1)
    """


@operation("ConvTranspose")
def conv_transpose(
    src: Tensor,
    weights: Tensor,
    bias: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    weights_format: str = "XOI",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """Scatter src through the weights: the transpose of Convolution, plus bias.

    ::

        dst = convgrad.conv_transpose(src, weights, strides=2, pads_begin=1, pads_end=1, dilations=1, output_padding=1)
    """


@operation("ConvTransposeBackwardData")
def conv_transpose_backward_data(
    diff_dst: Tensor,
    weights: Tensor,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    weights_format: str = "XOI",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of ConvTranspose with respect to src.

    ::

        diff_src = convgrad.conv_transpose_backward_data(
            diff_dst, weights, strides=2, pads_begin=1, pads_end=1, dilations=1)
    """


@operation("ConvTransposeBackwardWeights")
def conv_transpose_backward_weights(
    src: Tensor,
    diff_dst: Tensor,
    weights_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    weights_format: str = "XOI",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of ConvTranspose with respect to weights. `weights_shape` is the shape of diff_weights.

    ::

        diff_weights = convgrad.conv_transpose_backward_weights(
            src, diff_dst, weights.shape, strides=2, pads_begin=1, pads_end=1, dilations=1)
    """


@operation("BiasAddBackward")
def bias_backward(
    diff_dst: Tensor,
    *,
    data_format: str = "NXC",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of Convolution and ConvTranspose with respect to bias: the sum of diff_dst over all but channels.

    ::

        diff_bias = convgrad.bias_backward(diff_dst)
    """
