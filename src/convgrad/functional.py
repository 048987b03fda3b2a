"""The operations as functions of arrays, with oneDNN's names: inputs in the documented order, attributes by keyword.

Each signature is the table's row in Python; what runs is `apply`, which reads the row.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar

import numpy as np

from . import bias, engine
from .dtypes import DTYPES, Array
from .errors import LayoutWarning, SpecError
from .spec import Problem, bind
from .spec.bind import Binding, layouts_that_fit
from .spec.check import check_names, other_inputs
from .spec.dialects import Meaning, find
from .spec.docstring import with_parameters
from .spec.problem import dense_strides
from .spec.table import BIAS_OPS, Op
from .tensors import (
    check_out,
    describe,
    give_back,
    new_array,
    open_array,
    open_shape,
    tell_owner,
    whole_strides,
)

Ints = int | Sequence[int]
Tensor = Any
"""A NumPy array, or a CPU tensor of any library that speaks DLPack. Results come back in the library of the inputs."""

INT = frozenset([int])
PLAIN = frozenset([int, str, bool, type(None)])

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
    return _compute(meaning, meaning.arrange(inputs), out, attributes)


def explain(problem: Problem | str) -> str:
    """What a problem comes to, as text for a person: sizes, padding, work, who computes it on this machine, and how.

    A problem is written as a line: the wanted tensor (`y` forward, `x` the gradient of the data, `w` that of the
    weights), the element type and the sizes of y = conv(x, w). `convgrad explain` prints the same, with a picture, and
    takes descriptors and graph files, too::

        print(convgrad.explain("x f32 n8 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1"))
    """
    from .explanation import of_problem, text

    if isinstance(problem, str):
        problem = Problem.parse(problem)
    if not isinstance(problem, Problem):
        raise SpecError(f"explain takes a problem or its text, got an object of type {type(problem).__name__}")
    return "\n".join(text(of_problem(problem)))


def _compute(
    meaning: Meaning,
    inputs: Sequence[Tensor],
    out: Tensor,
    attributes: Mapping[str, Any],
    key: Any = None,
    advise: bool = False,
) -> Tensor:
    """Compute, and report any mistake in the caller's words. `key` is what a plain call is remembered by.

    `advise` has doubtful layouts warned of.
    """
    try:
        return _bind_and_run(meaning, inputs, out, attributes, key, advise)
    except SpecError as error:
        raise meaning.retell(error) from None


def _bind_and_run(
    meaning: Meaning, inputs: Sequence[Tensor], out: Tensor, attributes: Mapping[str, Any], key: Any, advise: bool
) -> Tensor:
    arrays: dict[str, Array] = {}
    shape: tuple[int, ...] | None = None
    count = 0
    for arg, value in zip(meaning.op.inputs, inputs, strict=False):
        if value is None:
            continue
        count += 1
        if arg.role == "shape":
            shape = open_shape(value, arg.name)
        else:
            arrays[arg.role] = open_array(value, arg.name)
    least = meaning.op.required_inputs
    if count < least or len(inputs) > len(meaning.op.inputs):
        check_names(meaning.op, meaning.attributes(attributes))
        if count >= least:
            raise other_inputs(meaning.op, len(inputs), "attributes go by name")
        given = zip_longest(meaning.op.inputs, inputs[: len(meaning.op.inputs)])
        missing = ", ".join(arg.name for arg, value in given if arg.required and value is None)
        raise other_inputs(meaning.op, count, f"missing: {missing}")
    target = None if out is None else open_array(out, "out")
    if meaning.op.kind in BIAS_OPS:
        place = _add_or_sum(meaning.op, arrays, target, out, attributes)
        return give_back(place, inputs[0]) if target is None else out
    key = key or _key(meaning, arrays, shape, target, attributes)
    known = _known.get(key) if key is not None else None
    if known is None:
        known = _prepare(meaning, arrays, shape, target, attributes)
        if key is not None:
            if len(_known) >= 1024:
                _known.clear()
            _known[key] = known
    if advise and known.advice:
        _warn(known.advice)
    if target is None:
        result, _ = new_array(known.shape, known.problem.out_dtype, known.strides)
        engine.run(known.problem, _whole(arrays) if known.uneven else arrays, result, known.kernel)
        return give_back(result, inputs[0])
    check_out(target, out)
    place = target
    if known.uneven:
        arrays, place = _whole(arrays), np.array(target)
    elif any(np.may_share_memory(target, a) for a in arrays.values()):
        arrays = {role: a.copy() if np.may_share_memory(target, a) else a for role, a in arrays.items()}
        known = _prepare(meaning, arrays, shape, target, attributes)
    engine.run(known.problem, arrays, place, known.kernel)
    if place is not target:
        target[...] = place
    tell_owner(out)
    return out


def _add_or_sum(
    op: Op, arrays: Mapping[str, Array], target: Array | None, out: Tensor, attributes: Mapping[str, Any]
) -> Array:
    """An operation of a bias, computed into `target`, the memory of `out`, or into a new array."""
    inputs = [describe(arrays[arg.role], arg.name) if arg.role in arrays else None for arg in op.inputs]
    bound = bias.bind(op, inputs, attributes, None if target is None else describe(target, "out"))
    if target is None:
        # Data keeps its order in memory.
        data = arrays[op.inputs[0].role]
        like = np.empty_like(data, DTYPES[bound.out_dtype].numpy) if bound.shape == data.shape else None
        place, _ = new_array(bound.shape, bound.out_dtype, None if like is None else like.strides)
    else:
        check_out(target, out)
        place = target
    bias.compute(op, bound.attributes, bound.dtype, [arrays[arg.role] for arg in op.inputs], place)
    if target is not None:
        tell_owner(out)
    return place


@dataclass(frozen=True)
class _Known:
    """What an earlier call with the same descriptions came to."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # of a new result, in bytes; None for the order of its shape
    problem: Problem
    kernel: Any
    uneven: bool  # strides that are no whole elements: work on copies
    order: tuple[int, ...]  # which input is x, which w, which y and which the bias; -1 for the result, -2 for none
    advice: str  # what to warn of

    def again(self, inputs: Sequence[Array]) -> Array:
        """The result for other arrays of the same descriptions, by the kernel."""
        if self.advice:
            _warn(self.advice)
        result, at = new_array(self.shape, self.problem.out_dtype, self.strides)
        places = [*(a.__array_interface__["data"][0] if type(a) is np.ndarray else 0 for a in inputs), 0, at]
        x, w, y, bias = self.order
        self.kernel(places[x], places[w], places[y], places[bias])
        return result


_known: dict[Any, _Known] = {}


def _prepare(
    meaning: Meaning,
    arrays: dict[str, Array],
    shape: tuple[int, ...] | None,
    target: Array | None,
    attributes: Mapping[str, Any],
) -> _Known:
    """Bind a call and find its kernel."""
    op = meaning.op
    uneven = not all(map(whole_strides, arrays.values())) or (target is not None and not whole_strides(target))
    if uneven:
        arrays, target = _whole(arrays), None if target is None else np.array(target)
    inputs = [describe(arrays[a.role], a.name) if a.role in arrays else None for a in op.inputs]
    exact = meaning.attributes(attributes)
    call: dict[str, Any] = {
        "shape": shape,
        "out": None if target is None else describe(target, "out"),
        "infer_size": True,
        "spatial_shape": meaning.dialect is not None and meaning.dialect.spatial_shape,
    }
    binding = bind(op, inputs, exact, **call, follow=True)
    problem = binding.problem
    places = {arg.role: i for i, arg in enumerate(op.inputs)} | {problem.wanted: -1}
    order = tuple(places.get(role, -2) for role in ("x", "w", "y", "bias"))
    item = DTYPES[problem.out_dtype].size
    plain = binding.strides == dense_strides(binding.shape)
    strides = None if plain else tuple(s * item for s in binding.strides)
    advice = ""
    if not meaning.says(attributes, "weights_format") and _doubtful(binding):
        others = layouts_that_fit(op, inputs, exact, **call)
        advice = _advice(meaning, binding, [other for other in others if other.layout.data == binding.layout.data])
    return _Known(binding.shape, strides, problem, engine.find(problem), uneven, order, advice)


def _doubtful(binding: Binding) -> bool:
    """Whether the default format of the weights may not be what was meant: other axes than in the data come first, or
    the kernel is not square.
    """
    return not binding.layout.agrees(binding.op) or len(set(binding.problem.w)) > 1


def _advice(meaning: Meaning, binding: Binding, others: Sequence[Binding]) -> str:
    """What to tell about a format of weights that nobody asked for, or nothing.

    The text is the same for all shapes: a place in a program is warned of once.
    """
    op, layout = meaning.op, binding.layout
    attr = op.attr("weights_format")
    assert attr is not None
    told = {choice: f"{choice}, {text}" for choice, text in attr.choices.items()}
    text = f"weights_format was not given and defaults to {told[layout.weights]}, "
    if layout.agrees(op):
        meant = [other for other in others if len(set(other.problem.w)) == 1 < other.problem.w[0]]
        if not meant:
            return ""
        text += "so the kernel is not square. "
    else:
        meant = [other for other in others if other.layout.agrees(op)]
        order = "first" if layout.axes(op, "x").endswith("k") else "last"
        text += f"although data_format={layout.data!r} puts the channels {order}. "
    if meant:
        format = meant[0].layout.weights
        text += f"The shape of weights fits {told[format]}, too. Pass weights_format={format!r} if you mean that, or "
        text += f"weights_format={layout.weights!r} to keep the default without this warning."
    else:
        text += f"The shapes suggest that this is meant. Pass weights_format={layout.weights!r} to say so."
    return f"{meaning.name}: {meaning.tell(text)}"


def _warn(advice: str) -> None:
    """Warn at the line that called convgrad."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(advice, LayoutWarning, stacklevel=level)


_HERE = os.path.dirname(__file__) + os.sep


def _whole(arrays: dict[str, Array]) -> dict[str, Array]:
    """Copies of the arrays, with strides of whole elements."""
    return {role: np.array(a) for role, a in arrays.items()}


def _key(
    meaning: Meaning,
    arrays: dict[str, Array],
    shape: tuple[int, ...] | None,
    target: Array | None,
    attributes: Mapping[str, Any],
) -> Any:
    """Everything that binding looks at, as a key; None where an attribute is not of a plain type."""
    plain = _plain(attributes)
    if plain is None:
        return None
    tensors = [(role, a.shape, a.strides, a.dtype) for role, a in arrays.items()]
    out = None if target is None else (target.shape, target.strides, target.dtype)
    return (meaning.name, shape, out, *engine.setting(), *plain, *tensors)


def _plain_key(kind: str, tensors: Sequence[bool], inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """As `_key`, of a call with NumPy arrays by position and no `out`; None for other calls.

    `tensors` says which inputs are any; of a shape the values count.
    What is touched here is fetched from memory anew after each large problem, which takes longer than the work itself.
    """
    key: list[Any] = [kind, *engine.setting()]
    for tensor, value in zip(tensors, inputs, strict=False):
        if tensor and type(value) is np.ndarray:
            key += (value.shape, value.strides, value.dtype)
        elif value is None or (type(value) is tuple and INT.issuperset(map(type, value))):
            key.append(value)
        else:
            return None
    plain = _plain(attributes)
    return None if plain is None else (*key, *plain)


def _plain(attributes: Mapping[str, Any]) -> list[Any] | None:
    """Attributes as parts of a key, True and 1 told apart; None where one is not of a plain type."""
    parts: list[Any] = []
    for name, value in attributes.items():
        kind = type(value)
        if kind is tuple or kind is list:
            if not INT.issuperset(map(type, value)):
                return None
            value = tuple(value)
        elif kind not in PLAIN:
            return None
        parts += (name, kind, value)
    return parts


def operation(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a signature into a function: what it names is looked up in the table and computed there."""
    meaning = find(kind)
    names = meaning.inputs
    tensors = [arg.role != "shape" for arg in meaning.op.inputs]

    def decorate(signature: Callable[P, R]) -> Callable[P, R]:
        @wraps(signature)
        def function(*args: Any, **kwargs: Any) -> Any:
            key = _plain_key(kind, tensors, args, kwargs) if len(args) <= len(tensors) else None
            known = _known.get(key)
            if known is not None and known.kernel is not None and not known.uneven:
                return known.again(args)
            if len(args) > len(names):
                raise meaning.retell(other_inputs(meaning.op, len(args), "attributes go by name"))
            inputs = [*args, *(kwargs.pop(name, None) for name in names[len(args) :])]
            for name in names:
                if name in kwargs:
                    raise meaning.retell(other_inputs(meaning.op, f"{name} twice"))
            out = kwargs.pop("out", None)
            return _compute(meaning, inputs, out, kwargs, key, advise=True)

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
