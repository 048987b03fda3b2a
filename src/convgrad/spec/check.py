"""Checks of an operation by itself, before any shape is known: the count and types of inputs, and the attributes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from ..errors import SpecError
from .table import (
    ALL_OPS,
    DTYPES,
    EXPLAINED,
    EXTENDED_DTYPES,
    MAX_NDIMS,
    RENAMED,
    REQUIRED,
    RULES,
    SPELLINGS,
    Attr,
    Op,
    Rule,
)

DEVICES = "memory of the CPU or of an NVIDIA GPU"
"""Where tensors may lie."""

S64 = range(-(2**63), 2**63)


def broken(rule: str, argument: str, got: object = None, *, hint: str = "", **facts: object) -> SpecError:
    """The error for a broken rule of the table. The operation's name is added at the edge."""
    return breach(RULES[rule], argument, got, hint=hint, **facts)


def breach(rule: Rule, argument: str, got: object = None, *, hint: str = "", **facts: object) -> SpecError:
    """The error for a broken rule: what, rule, got, and what to do."""
    message = f"{argument} {rule.text.format(**facts)}"
    if got is not None:
        message += f", got {got if isinstance(got, str) else shown(got)}"
    if hint:
        message += f"; {hint}"
    return SpecError(message, status=rule.status, rule=rule.name, argument=argument)


def shown(value: object) -> str:
    """A value as a message shows it: not too long, and whatever its own code does."""
    try:
        text = repr(value)
    except Exception:  # of somebody else's class, or an integer of more digits than Python prints
        text = f"one of type {type(value).__name__}"
    if "\n" in text and isinstance(getattr(value, "shape", None), tuple):
        text = f"an array of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    return text if len(text) <= 200 else f"{text[:200]}..."


def meant(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint at the name that a person may have meant."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, 1, cutoff) if isinstance(word, str) else []
    return f"did you mean {names[close[0]]!r}?" if close else ""


def lookup(kind: object) -> Op:
    """The row of an operation."""
    op = ALL_OPS.get(kind) if isinstance(kind, str) else None
    if op is None:
        raise broken("known_operation", shown(kind), hint=_nearest(kind, ALL_OPS))
    return op


def values(count: int, one: str = "value") -> str:
    """A count of things in words."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def check_input_count(op: Op, count: int) -> None:
    """The number of inputs."""
    if not op.required_inputs <= count <= len(op.inputs):
        raise other_inputs(op, count)


def other_inputs(op: Op, got: object, hint: str = "") -> SpecError:
    """The error for inputs that are too many or too few."""
    least, most = op.required_inputs, len(op.inputs)
    expected = values(most, "input") if least == most else f"{least} or {values(most, 'input')}"
    return broken("input_count", "the operation", got, hint=hint, expected=expected, names=_inputs(op))


def check_dtypes(op: Op, dtypes: Sequence[str | None], *, strict: bool = False) -> str:
    """The element types of the tensors among the inputs; the first one fixes the others. Returns it."""
    known = DTYPES if strict else (*DTYPES, *EXTENDED_DTYPES)
    first = ""
    for arg, dtype in zip(op.inputs, dtypes, strict=False):
        if arg.role == "shape" or dtype is None:
            continue
        if dtype not in known:
            raise broken("input_dtype", arg.name, dtype, expected=", ".join(known))
        if first and dtype != first:
            raise broken("same_dtype", arg.name, dtype, first=op.inputs[0].name, expected=first)
        first = dtype
    return first


def check_names(op: Op, given: Mapping[str, Any]) -> None:
    """The names of the attributes; words of other libraries are answered with ours."""
    known = [a.name for a in op.attrs]
    strange = [name for name in given if name not in known]
    if not strange:
        return
    hint = _answer(op, strange[0], known)
    if len(strange) > 1:
        ours = [_in_our_words(name, given[name], known) for name in strange]
        hint = f"write {', '.join(ours)}" if all(ours) else f"{hint.rstrip('?')}; nor {_is_or_are(strange[1:])}"
    raise broken("known_attribute", strange[0], hint=hint)


def _answer(op: Op, name: str, known: Sequence[str]) -> str:
    """What to write instead of a word that is not an attribute here."""
    if RENAMED.get(name) in known:
        return f"did you mean {RENAMED[name]!r}?"
    if any(name == arg.name for arg in op.inputs):
        name = "inputs"
    if name in EXPLAINED:
        shape = f"given as {op.shape_source}" if op.shape_source else "computed from the others"
        return EXPLAINED[name].format(inputs=_inputs(op), shape=shape)
    return _nearest(name, known)


def _in_our_words(name: str, value: Any, known: Sequence[str]) -> str:
    """An attribute of another library as it is written here; nothing where that is not known."""
    if RENAMED.get(name) in known:
        return f"{RENAMED[name]}={shown(value)}"
    if name in ("padding", "pad", "pads") and "pads_begin" in known:
        if isinstance(value, str) and SPELLINGS.get(value.lower(), value.upper()) in ("SAME_UPPER", "VALID"):
            return f"auto_pad={SPELLINGS.get(value.lower(), value.upper())!r}, pads_begin=0, pads_end=0"
        if isinstance(value, int) or (isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value)):
            return f"pads_begin={value}, pads_end={value}"
    return ""


def _is_or_are(names: Sequence[str]) -> str:
    """A list of names before its verb."""
    return f"{'is' if len(names) == 1 else 'are'} {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """A list in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _nearest(word: object, known: Iterable[str]) -> str:
    """The name that a person may have meant, or all there are."""
    return meant(word, known) or f"there are {', '.join(known)}"


def _inputs(op: Op) -> str:
    """The inputs of an operation in their order, those in brackets that may be left out."""
    return ", ".join(a.name if a.required else f"[{a.name}]" for a in op.inputs)


def check_attributes(
    op: Op, given: Mapping[str, Any], *, allow_empty: bool = False, strict: bool = False
) -> dict[str, Any]:
    """The attributes as exact values, defaults filled in. Lists are tuples; a scalar for a list stays a scalar.

    `allow_empty` lets a shape hold zeros, for operations on empty tensors. `strict` refuses what oneDNN refuses.
    """
    check_names(op, given)
    _check_required(op, given)
    checked: dict[str, Any] = {}
    for attr in op.attrs:
        if attr.name in given and given[attr.name] is not None:
            checked[attr.name] = _exact(attr, given[attr.name], allow_empty, strict)
        else:
            checked[attr.name] = attr.default
    return checked


def _check_required(op: Op, given: Mapping[str, Any]) -> None:
    """The attributes without a default must all be there. The first one that is not names the others."""
    missing = [a.name for a in op.attrs if a.default is REQUIRED and given.get(a.name) is None]
    if not missing:
        return
    first, others = missing[0], missing[1:]
    rule, hints = RULES["required_attribute"], []
    auto = given.get("auto_pad")
    if first.startswith("pads") and isinstance(auto, str) and auto.lower() != "none":
        rule = replace(rule, text=f"{rule.text}, also with auto_pad, which ignores it")
        zeros = [name for name in missing if name.startswith("pads")]
        hints.append(f"pass {', '.join(f'{name}=0' for name in zeros)}")
        others = [name for name in others if name not in zeros]
    if others:
        hints.append(f"so {_is_or_are(others)}")
    attr = op.attr(first)
    raise breach(rule, first, hint="; ".join(hints) or f"it is the {attr.text if attr else ''}")


def _exact(attr: Attr, value: Any, allow_empty: bool, strict: bool) -> Any:
    """One attribute's value in its exact type."""
    if strict and attr.origin != "onednn":
        raise broken("strict", attr.name)
    if attr.type == "string":
        return _choice(attr, value, strict)
    if attr.type == "bool":
        if not isinstance(value, bool):
            raise broken("attribute_type", attr.name, shown(value), expected="True or False")
        return value
    if attr.type == "s64":
        return _at_least(attr, _whole(attr, value, "a whole number (s64)"), attr.minimum, value)
    expected = "a list of whole numbers (s64)"
    if attr.per == "axis":
        expected += ", or one for every axis"
    if getattr(value, "ndim", None) != 0 and hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping)):
        numbers = tuple(_whole(attr, v, expected, value) for v in value)
    elif attr.per == "axis":
        return _at_least(attr, _whole(attr, value, expected), attr.minimum, value)
    else:
        raise broken("attribute_type", attr.name, shown(value), expected=expected)
    if len(numbers) == MAX_NDIMS and not any(numbers) and attr.default is not REQUIRED:
        return attr.default  # how oneDNN writes an unset list
    minimum = 0 if attr.per == "dimension" and allow_empty else attr.minimum
    for number in numbers:
        _at_least(attr, number, minimum, numbers)
    return numbers


def _whole(attr: Attr, value: Any, expected: str, whole: Any = None) -> int:
    """A Python integer in the range of s64."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number not in S64:
        got = value if whole is None else whole
        hint = EXPLAINED["padding"] if isinstance(got, str) and got.lower() in ("same", "valid") else _pairs(attr, got)
        raise broken("attribute_type", attr.name, shown(got), hint=hint, expected=expected) from None
    return number


def _pairs(attr: Attr, value: Any) -> str:
    """How pads are written that came as pairs of before and after."""
    if attr.name.startswith("pads") and isinstance(value, (tuple, list)):
        with suppress(TypeError, ValueError):
            begin, end = zip(*((index(a), index(b)) for a, b in value), strict=True)
            return f"write pads_begin={begin}, pads_end={end}"
    return ""


def _at_least(attr: Attr, number: int, minimum: int | None, got: Any) -> int:
    """The number, if it is not too small."""
    if minimum is not None and number < minimum:
        raise broken("attribute_minimum", attr.name, got, minimum=minimum)
    return number


def dtype_word(value: Any) -> Any:
    """The name of an element type that came as NumPy's, PyTorch's or JAX's object; other values as they are."""
    if isinstance(value, str):
        return value
    with suppress(TypeError, ValueError, AttributeError):
        name = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else np.dtype(value).name
        return SPELLINGS.get(name, value)
    return value


def _choice(attr: Attr, value: Any, strict: bool) -> str:
    """The canonical spelling of a string attribute."""
    expected = ", ".join(attr.choices)
    if attr.name == "out_dtype":
        value = dtype_word(value)
    if not isinstance(value, str):
        raise broken("attribute_type", attr.name, shown(value), expected=f"a string: {expected}")
    found = {c.lower(): c for c in attr.choices}.get(value.lower(), "") if attr.any_case else value
    if found not in attr.choices:
        meanings = ", ".join(f"{choice}: {text}" for choice, text in attr.choices.items() if text)
        ours = SPELLINGS.get(value.lower())
        # Formats are words of three letters: two in common say little.
        hint = f"{value!r} is {ours!r} here" if ours in attr.choices else meant(value, attr.choices, 0.7) or meanings
        raise broken("attribute_choice", attr.name, shown(value), hint=hint, expected=expected)
    if strict and found in attr.beyond:
        raise broken("strict", f"{attr.name}={value!r}")
    return found
