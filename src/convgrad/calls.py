"""A call, from the caller's values to the result.

A call that comes again is known by its key (`known`). Any other is opened, bound and given to a back end (`compute`).
Graphs and the command, whose problems are bound already, begin with `run`: there a result may share memory with inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import bias, engine, host, libraries, repeats
from .advice import advice, is_doubtful
from .backend import Bounds, Library, Tensor, may_overlap
from .dtypes import DTYPES
from .engine import Choice
from .errors import LayoutWarning, OutOfMemoryError, SpecError, UnsupportedError, warn
from .libraries import KEYED, on_host, open_shape, open_tensor
from .libraries import torch as pytorch
from .spec import Problem, bind
from .spec.bind import Binding, Description, layouts_that_fit
from .spec.check import check_names, other_inputs
from .spec.dialects import Meaning
from .spec.problem import Ints, dense_strides
from .spec.table import BIAS_OPS, Op
from .tensors import check_out, check_writable, describe, one_device, whole_strides

T = TypeVar("T")

INT = frozenset([int])
PLAIN = frozenset([int, str, bool, type(None)])
MOST_CALLS = 1024  # are remembered


class Call(NamedTuple):
    """What a call came to: all that is left to do is to compute it, now and whenever its key comes again."""

    problem: Problem
    choice: Choice
    shape: Ints
    dtype: str
    strides: Ints | None  # of a new result, in bytes; None for the order of its shape
    order: Ints  # which input is x, which w, which y and which the bias; -1 for the result, -2 for none
    near: tuple[Bounds, ...]  # for each input: how far behind it `out` may begin and share memory, both ends excluded
    advice: str  # what to warn of

    def again(self, places: list[int], first: Any, out: Any = None) -> Any:
        """The result for values at other addresses, in the library of the first input, or written to `out`.

        None if `out` may share memory with an input: that takes a copy, see `run`.
        """
        library = KEYED.get(type(first)) or _library(first)
        _, (backend, execute, _), shape, dtype, strides, order, *_ = self
        if out is None:
            memory, at = backend.empty(shape, dtype, strides, first)
            places += (0, at)
        else:
            at = places[-1]
            for place, (begin, end) in zip(places, self.near, strict=False):
                if begin < at - place < end:
                    return None
        x, w, y, bias = order
        execute(places[x], places[w], places[y], places[bias], library.context(first))
        if out is None:
            return library.wrap(memory, first)
        _library(out).written(out)
        return out

    def way(self) -> repeats.Way:
        """How it is computed from tensors of PyTorch, and for them."""
        backend, execute, _ = self.choice

        def empty(first: Any) -> tuple[Any, int]:
            memory, at = backend.empty(self.shape, self.dtype, self.strides, first)
            return pytorch.wrap(memory, first), at

        return repeats.Way(execute, empty, self.order, self.near)


KNOWN: dict[Any, Call] = {}
"""Calls by their keys."""


def known(name: str, tensors: Sequence[bool], inputs: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Any, Any]:
    """The key of a call, if it has one, and its result if the key is known; None for what there is not.

    What the arguments are says `look`.
    """
    seen = look(name, tensors, inputs, attributes) if len(inputs) <= len(tensors) else None
    if seen is None:
        return None, None
    key, places = seen
    call = KNOWN.get(key)
    if call is None:
        return key, None
    if call.advice:
        warn(call.advice, LayoutWarning)
    elif type(inputs[0]) in pytorch.GUARDED:
        repeats.remember(name, inputs, attributes, call.choice.backend.device, call.way())
    try:
        return key, call.again(places, inputs[0], attributes.get("out"))
    except OutOfMemoryError as error:
        raise error.within(name) from None


def look(
    name: str, tensors: Sequence[bool], inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[Any, list[int]] | None:
    """All that binding looks at, as a key, and the addresses; None if a value must be opened to be known.

    `tensors` says which inputs are tensors; a shape counts by its values. `out` is among the attributes. What is
    looked at here has left the caches after a large problem, and to fetch it takes longer than to look: keep it small.
    """
    parts: list[Any] = [name, *engine.setting()]
    places: list[int] = []
    for tensor, value in zip(tensors, inputs, strict=False):
        library = KEYED.get(type(value)) if tensor else None
        if library is not None:
            seen = library.look(value)
            if seen is None:
                return None
            part, place = seen
            parts.append(part)
            places.append(place)
            continue
        if isinstance(value, tuple) and INT.issuperset(map(type, value)):
            value = tuple(value)
        elif value is not None:
            return None
        parts.append(value)
        places.append(0)
    for word, value in attributes.items():
        kind = type(value)
        if kind is tuple or kind is list:
            if not INT.issuperset(map(type, value)):
                return None
            value = tuple(value)
        elif kind not in PLAIN:
            library = KEYED.get(kind) if word == "out" else None
            seen = library.look(value) if library is not None and library.is_writable(value) else None
            if seen is None:
                return None
            value = seen[0]
            places += (0, seen[1])
        parts += (word, kind, value)  # True and 1 are told apart
    return tuple(parts), places


def compute(
    meaning: Meaning,
    inputs: Sequence[Any],
    out: Any,
    attributes: Mapping[str, Any],
    key: Any = None,
    advise: bool = False,
) -> Any:
    """The result of an operation; any mistake is reported in the caller's words.

    `key` is that of the values as they are, if they have one. With `advise`, the caller is warned of a doubtful layout.
    """
    try:
        return _compute(meaning, inputs, out, attributes, key, advise)
    except SpecError as error:
        raise meaning.retell(error) from None
    except (OutOfMemoryError, UnsupportedError) as error:
        raise error.within(meaning.name) from None


def _compute(
    meaning: Meaning, inputs: Sequence[Any], out: Any, attributes: Mapping[str, Any], key: Any, advise: bool
) -> Any:
    op = meaning.op
    if key is None and out is None and _is_recorded(op, inputs):
        return _record(meaning, inputs, attributes, advise)
    tensors, shape = _open(meaning, inputs, attributes, _open_whole)
    out_tensor = None if out is None else open_tensor(out, "out")
    if op.kind in BIAS_OPS:
        return _add_or_sum(op, inputs[0], tensors, out_tensor, out, attributes)
    place = None if out_tensor is None else _whole_strided(out_tensor, "out")
    opened = [*tensors.values(), *([] if place is None else [place])]
    if key is None or any(tensor.copied for tensor in opened):
        key = _key_of_opened(meaning, tensors, shape, place, attributes)
    call = KNOWN.get(key)
    if call is None:
        call = _bind(meaning, tensors, shape, place, attributes)
        if out_tensor is not None:
            check_out(out_tensor)
        if key is not None:
            if len(KNOWN) >= MOST_CALLS:
                KNOWN.clear()
            KNOWN[key] = call
    elif out_tensor is not None and place is not out_tensor:
        check_out(out_tensor)
    elif out_tensor is not None:
        check_writable(out_tensor.locked)
    if advise and call.advice:
        warn(call.advice, LayoutWarning)
    places = [tensors[arg.role].address if arg.role in tensors else 0 for arg in op.inputs]
    if out_tensor is None or place is None:
        return call.again(places, inputs[0])
    run(call.problem, call.choice, tensors, place, _library(inputs[0]).context(inputs[0]))
    if place is not out_tensor:  # a copy by `_whole_strided`, on the host
        host.copy(place, out_tensor)
    _library(out).written(out)
    return out


def run(problem: Problem, choice: Choice, tensors: Mapping[str, Tensor], out: Tensor, context: int = 0) -> None:
    """Compute the wanted tensor into `out`, which may share memory with the inputs: then by way of a copy."""
    shared = may_overlap(out.bounds, [tensor.bounds for tensor in tensors.values()])
    place = choice.backend.duplicate(out) if shared else out
    choice.execute(*addresses(problem, tensors, place), context)
    if place is not out:
        choice.backend.copy(place, out)


def addresses(problem: Problem, tensors: Mapping[str, Tensor], out: Tensor) -> tuple[int, int, int, int]:
    """What a back end is told of the tensors: where x, w, y and the bias are."""
    at = {role: tensor.address for role, tensor in tensors.items()}
    at[problem.wanted] = out.address
    return at["x"], at["w"], at["y"], at.get("bias", 0)


def _key_of_opened(
    meaning: Meaning,
    tensors: Mapping[str, Tensor],
    shape: Ints | None,
    out: Tensor | None,
    attributes: Mapping[str, Any],
) -> Any:
    """The key of a call by the memory that its values were opened to."""
    memory = {role: tensor.memory for role, tensor in tensors.items()}
    values = [shape if arg.role == "shape" else memory.get(arg.role) for arg in meaning.op.inputs]
    more = {} if out is None else {"out": out.memory}
    seen = look(meaning.name, [arg.role in tensors for arg in meaning.op.inputs], values, {**attributes, **more})
    return seen and seen[0]


def _is_recorded(op: Op, inputs: Sequence[Any]) -> bool:
    """Whether PyTorch's autograd, or a trace of it, looks on: then a call becomes one of its operators."""
    return pytorch.are_recorded([value for arg, value in zip(op.inputs, inputs, strict=False) if arg.role != "shape"])


def _record(meaning: Meaning, inputs: Sequence[Any], attributes: Mapping[str, Any], advise: bool) -> Any:
    """The result of a call of PyTorch's tensors by an operator, whose gradients PyTorch knows."""
    from .torch import recorded  # loads PyTorch, which is loaded where its tensors are

    op = meaning.op
    tensors, shape = _open(meaning, inputs, attributes, recorded.check)
    described = [recorded.describe(tensors[arg.role], arg.name) if arg.role in tensors else None for arg in op.inputs]
    if op.kind in BIAS_OPS:
        return recorded.add_or_sum(op, bias.bind(op, described, attributes), tensors)
    binding, told = _bound(meaning, described, shape, None, attributes)
    if advise and told:
        warn(told, LayoutWarning)
    return recorded.compute(binding, tensors)


def _open_whole(value: Any, name: str) -> Tensor:
    """A value as a tensor whose strides are whole elements."""
    return _whole_strided(open_tensor(value, name), name)


def _open(
    meaning: Meaning, inputs: Sequence[Any], attributes: Mapping[str, Any], open: Callable[[Any, str], T]
) -> tuple[dict[str, T], Ints | None]:
    """The inputs as tensors by their roles, and the value of the shape input."""
    op = meaning.op
    tensors: dict[str, T] = {}
    shape: Ints | None = None
    count = 0
    for arg, value in zip(op.inputs, inputs, strict=False):
        if value is None:
            continue
        count += 1
        if arg.role == "shape":
            shape = open_shape(value, arg.name)
        else:
            tensors[arg.role] = open(value, arg.name)
    if count < op.required_inputs or len(inputs) > len(op.inputs):
        check_names(op, meaning.attributes(attributes))
        if count >= op.required_inputs:
            raise other_inputs(op, len(inputs), "attributes go by name")
        asked = zip_longest(op.inputs, inputs[: len(op.inputs)])
        missing = ", ".join(arg.name for arg, value in asked if arg.required and value is None)
        raise other_inputs(op, count, f"missing: {missing}")
    return tensors, shape


def _whole_strided(tensor: Tensor, name: str) -> Tensor:
    """The tensor, or a copy if its strides are not whole elements, as those of NumPy's structured arrays may be."""
    return tensor if whole_strides(tensor) else host.tensor(np.array(on_host(tensor, name)), copied=True)


def _bind(
    meaning: Meaning,
    tensors: Mapping[str, Tensor],
    shape: Ints | None,
    out: Tensor | None,
    attributes: Mapping[str, Any],
) -> Call:
    """Bind a call, and find who computes it."""
    op = meaning.op
    inputs = [describe(tensors[arg.role], arg.name) if arg.role in tensors else None for arg in op.inputs]
    binding, told = _bound(meaning, inputs, shape, None if out is None else describe(out, "out"), attributes)
    problem = binding.problem
    places = {arg.role: i for i, arg in enumerate(op.inputs)} | {problem.wanted: -1}
    order = tuple(places.get(role, -2) for role in ("x", "w", "y", "bias"))
    in_order = [tensors.get(arg.role) for arg in op.inputs] + [out]
    *extents, (low, high) = ((0, 0) if t is None else t._replace(address=0).bounds for t in in_order)
    near = tuple((begin - high, end - low) for begin, end in extents)
    item = DTYPES[problem.out_dtype].size
    plain = binding.strides == dense_strides(binding.shape)
    strides = None if plain else tuple(s * item for s in binding.strides)
    named = {arg.name: tensors[arg.role] for arg in op.inputs if arg.role in tensors} | ({"out": out} if out else {})
    choice = engine.choose(problem, one_device(named))
    return Call(problem, choice, binding.shape, problem.out_dtype, strides, order, near, told)


def _bound(
    meaning: Meaning,
    inputs: Sequence[Description | None],
    shape: Ints | None,
    out: Description | None,
    attributes: Mapping[str, Any],
) -> tuple[Binding, str]:
    """What a call comes to, and what to warn of."""
    exact = meaning.attributes(attributes)
    asked: dict[str, Any] = {
        "shape": shape,
        "out": out,
        "infer_size": True,
        "spatial_shape": meaning.dialect is not None and meaning.dialect.spatial_shape,
    }
    binding = bind(meaning.op, inputs, exact, **asked, follow=True)
    told = ""
    if not meaning.says(attributes, "weights_format") and is_doubtful(binding):
        others = layouts_that_fit(meaning.op, inputs, exact, **asked)
        told = advice(meaning, binding, [other for other in others if other.layout.data == binding.layout.data])
    return binding, told


def _add_or_sum(
    op: Op,
    first: Any,
    tensors: Mapping[str, Tensor],
    out_tensor: Tensor | None,
    out: Any,
    attributes: Mapping[str, Any],
) -> Any:
    """An operation of a bias, which NumPy or, on a GPU, PyTorch computes: into the memory of `out`, or a new array."""
    inputs = [describe(tensors[arg.role], arg.name) for arg in op.inputs]
    bound = bias.bind(op, inputs, attributes, None if out_tensor is None else describe(out_tensor, "out"))
    if out_tensor is not None:
        check_out(out_tensor)
    named = {arg.name: tensors[arg.role] for arg in op.inputs} | ({"out": out_tensor} if out_tensor else {})
    if one_device(named).kind == "cuda":
        from .torch import recorded

        memory = {role: tensor.memory for role, tensor in tensors.items()}
        result = recorded.add_or_sum(op, bound, memory, None if out_tensor is None else out_tensor.memory)
        if out_tensor is None:
            return _library(first).wrap(result, first)
        _library(out).written(out)
        return out
    arrays = [on_host(tensors[arg.role], arg.name) for arg in op.inputs]
    if out_tensor is not None:
        bias.compute(op, bound.attributes, bound.dtype, arrays, on_host(out_tensor, "out"))
        _library(out).written(out)
        return out
    # Data keeps its order in memory.
    like = np.empty_like(arrays[0], DTYPES[bound.out_dtype].numpy) if bound.shape == arrays[0].shape else None
    place, _ = host.empty(bound.shape, bound.out_dtype, None if like is None else like.strides)
    bias.compute(op, bound.attributes, bound.dtype, arrays, place)
    return _library(first).wrap(place, first)


def _library(value: Any) -> Library:
    """The library of a value that was opened."""
    library = libraries.find(value)
    assert library is not None
    return library
