"""The paragraph on parameters in a function's docstring, from the rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent, wrap
from typing import Any

from .dialects import Meaning
from .table import MAX_NDIMS, REQUIRED, Attr

WIDTH = 100


def with_parameters(docstring: str, meaning: Meaning) -> str:
    """A docstring, and after it what each parameter means, which values it takes, and its default."""
    op = meaning.op
    defaults = meaning.dialect.defaults if meaning.dialect else {}
    rows = [(arg.name, arg.text if arg.required else f"{arg.text}; optional") for arg in op.inputs]
    given = {name for name, _ in rows}
    rows += [(attr.name, _attribute(attr, defaults)) for attr in op.attrs if attr.name not in given]
    rows.append(("out", "the array to write the result to, whatever its strides; by default a new one"))
    lines = ["", "Parameters:", ""]
    for name, text in rows:
        # In the caller's words, also where the text speaks of another tensor.
        lines += wrap(meaning.tell(f"{name}: {text}"), WIDTH, subsequent_indent="    ")
    roles = [f"{arg.role} is {meaning.tell(arg.name)}" for arg in (*op.inputs, op.output) if arg.role in ("x", "y")]
    lines += ["", f"In these texts {' and '.join(roles)}. See docs/ops.md." if roles else "See docs/ops.md.", ""]
    return docstring.rstrip() + "\n" + indent("\n".join(lines), "    ")


def _attribute(attr: Attr, defaults: Mapping[str, Any]) -> str:
    """What an attribute means, its values and its default."""
    text = attr.text
    if attr.per == "axis":
        text += "; a number, or one per spatial axis"
    if attr.choices:
        told = (f"{choice!r} {meaning}".strip() for choice, meaning in attr.choices.items())
        text += ": " + "; ".join(told)
    default = defaults.get(attr.name, attr.default)
    if default is REQUIRED:
        return f"{text}; required"
    if default in ("", (0,) * MAX_NDIMS):
        return f"{text}; optional"
    return f"{text}; default {default!r}"
