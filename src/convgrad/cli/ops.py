"""`convgrad ops`: the schema of the operations, from the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..spec.dialects import DIALECTS, Meaning
from ..spec.table import ALL_OPS, DTYPES, EXTENDED_DTYPES, MAX_NDIMS, REQUIRED, Attr, Op

ORIGINS = {"onednn": "", "document": "the documents only", "extension": "convgrad only"}


def listing(console: Console) -> None:
    """All operations: what each takes and gives, optional inputs in brackets."""
    for op in ALL_OPS.values():
        inputs = ", ".join(a.name if a.required else rf"\[{a.name}]" for a in op.inputs)
        console.print(f"[bold]{op.kind}[/bold]({inputs}) -> {op.output.name}")
        console.print(f"    {op.text}")


def show(meaning: Meaning, console: Console) -> None:
    """One operation: its tensors, attributes and types."""
    op, older = meaning.op, meaning.dialect.words if meaning.dialect else {}
    defaults = meaning.dialect.defaults if meaning.dialect else {}
    console.print(f"[bold]{meaning.name}[/bold]: {op.text}")
    if meaning.dialect:
        console.print(f"The older name of {op.kind}.")
    names = [d.kind for d in DIALECTS.values() if d.op == op.kind and not meaning.dialect]
    if names:
        console.print(f"Older name: {', '.join(names)}")
    tensors = _columns("", "tensor", "", "")
    for index, arg in enumerate(op.inputs):
        tensors.add_row(f"input {index}", older.get(arg.name, arg.name), "" if arg.required else "optional", arg.text)
    tensors.add_row("output 0", older.get(op.output.name, op.output.name), "", op.output.text)
    console.print(tensors)
    console.print(f"Element types: {', '.join(DTYPES)}; {', '.join(EXTENDED_DTYPES)} (convgrad only)\n")
    if {arg.role for arg in op.inputs} & {"x", "y"}:
        x, y = (older.get(op.arg(role).name, op.arg(role).name) for role in "xy")
        console.print(f"Below, x is {x} and y is {y}, as in y = conv(x, w).\n")
    table = _columns("attribute", "type", "default", "")
    for attr in op.attrs:
        choices = "".join(f"\n{value}: {text}" if text else f"\n{value}" for value, text in attr.choices.items())
        origin = f" ({ORIGINS[attr.origin]})" if attr.origin != "onednn" else ""
        name, kind = older.get(attr.name, attr.name), attr.type.replace("[", r"\[")
        table.add_row(name, kind, _default(attr, defaults), attr.text + origin + choices)
    console.print(table)


def _columns(*headings: str) -> Table:
    """A table whose last column alone is folded."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1])
    return table


def _default(attr: Attr, defaults: Mapping[str, Any]) -> str:
    if attr.name in defaults:
        return str(defaults[attr.name])
    if attr.default is REQUIRED:
        return "required"
    if attr.default == (0,) * MAX_NDIMS:
        return "none" if attr.per == "dimension" else "zeros"
    return str(attr.default) or "none"


def schema(op: Op) -> dict[str, Any]:
    """One operation for machines."""
    return {
        "kind": op.kind,
        "text": op.text,
        "inputs": [{"name": a.name, "required": a.required, "text": a.text} for a in op.inputs],
        "output": {"name": op.output.name, "text": op.output.text},
        "dtypes": list(DTYPES),
        "attributes": [
            {
                "name": a.name,
                "type": a.type,
                "required": a.default is REQUIRED,
                "default": None if a.default is REQUIRED else a.default,
                "choices": list(a.choices),
                "minimum": a.minimum,
                "origin": a.origin,
                "text": a.text,
            }
            for a in op.attrs
        ],
    }
