"""Calls that come again with other tensors of PyTorch, recognized without a key of all that they are.

To look at shapes, strides, types and devices of tensors, and to make a key of them, takes longer than many kernels.
PyTorch has a faster way to tell whether tensors are like those of another call, which it made for torch.compile.
Attributes are compared by identity: numbers, words and tuples of a program are the same objects from call to call.
Whatever is not found here, such as a call with lists, is looked up by its key (`calls.known`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from . import engine
from .backend import Bounds, Executable
from .errors import OutOfMemoryError
from .libraries import torch as pytorch
from .spec.problem import Ints

MOST = 1024  # kinds of calls are remembered
ALIKE = 4  # calls of a kind, which differ in their other tensors
INT = frozenset([int])
CONSTANT = frozenset([int, str, bool, type(None), tuple])
"""Types of attributes that stay what they are; in a call with a key, tuples are of numbers alone."""


class Way(NamedTuple):
    """How a call is computed."""

    execute: Executable
    empty: Callable[[Any], tuple[Any, int]]  # new memory for a result on the device of a tensor
    order: Ints  # which input is x, which w, which y and which the bias; -1 for the result, -2 for none
    near: tuple[Bounds, ...]  # for each input: how far behind it `out` may begin and share memory, ends excluded


class Repeat(NamedTuple):
    """A call that may come again."""

    are_alike: Callable[..., bool]  # whether tensors are as they were then, but for their addresses
    words: tuple[str, ...]
    values: tuple[Any, ...]  # of the attributes; kept, so that nothing else can be where they are
    shape: Any  # the third input, if that is one
    asks: bool  # whether a tensor requires grad, which counts where autograd looks on
    device: str  # the kind of it
    setting: list[Hashable]
    way: Way


REPEATS: dict[Any, tuple[Repeat, ...]] = {}
"""By the operation, how many tensors there are, the shape of the second one and the identity of all attributes."""

engine.MEMORIES.append(REPEATS)


def again(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call whose first argument is a tensor of PyTorch, if it is recognized; else None."""
    if len(args) < 2 or pytorch.is_watched():
        return None
    out = kwargs.pop("out", None)  # the one attribute that may differ
    result = _again(name, args, kwargs, out)
    if result is None and out is not None:
        kwargs["out"] = out
    return result


def _again(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    try:
        found = REPEATS.get((name, len(args), out is None, args[1].shape, *map(id, kwargs.values())))
        if found is None:
            return None
        for repeat in found:
            are_alike, words, _, shape, asks, device, setting, way = repeat
            if shape is None:
                tensors = args if out is None else (*args, out)
            elif args[-1] == shape and INT.issuperset(map(type, args[-1])):
                tensors = args[:2] if out is None else (*args[:2], out)
            else:
                continue
            if are_alike(*tensors) and tuple(kwargs) == words and engine.setting(device) == setting:
                break
        else:
            return None
        places = [tensor.data_ptr() for tensor in tensors]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # Something that is no tensor, or one without memory: whoever opens it says why.
    if 0 in places or (asks and pytorch.is_grad_enabled()):
        return None
    try:
        return _compute(way, places, args[0], out)
    except OutOfMemoryError as error:
        raise error.within(name) from None


def _compute(way: Way, places: list[int], first: Any, out: Any) -> Any:
    """The result, from tensors at some addresses, of which the last is that of `out`; None where this needs a copy."""
    execute, empty, (x, w, y, bias), near = way
    result = out
    if out is None:
        result, at = empty(first)
        places += (0, at)
    else:
        at = places[-1]
        for place, (begin, end) in zip(places, near, strict=False):
            if begin < at - place < end:
                return None
        if out.is_inference():
            return None
        places.insert(-1, 0)
    execute(places[x], places[w], places[y], places[bias], pytorch.context(first))
    if out is not None:
        pytorch.count_change(out)
    return result


def remember(name: str, args: Sequence[Any], attributes: Mapping[str, Any], device: str, way: Way) -> None:
    """Have a call recognized that came again, if it can be. `out` is among the attributes."""
    kwargs = dict(attributes)
    out = kwargs.pop("out", None)
    if len(args) < 2 or not CONSTANT.issuperset(map(type, kwargs.values())):
        return
    shape = args[2] if len(args) > 2 and isinstance(args[2], tuple) else None
    tensors = [*(args if shape is None else args[:2]), *([] if out is None else [out])]
    are_alike = pytorch.guard(tensors)
    if are_alike is None:
        return
    asks = any(tensor.requires_grad for tensor in tensors)
    way = way._replace(near=way.near[: len(tensors) - (out is not None)])
    setting = engine.setting(device)
    if len(REPEATS) >= MOST:
        REPEATS.clear()
    key = (name, len(args), out is None, args[1].shape, *map(id, kwargs.values()))
    repeat = Repeat(are_alike, tuple(kwargs), tuple(kwargs.values()), shape, asks, device, setting, way)
    REPEATS[key] = (repeat, *REPEATS.get(key, ()))[:ALIKE]
