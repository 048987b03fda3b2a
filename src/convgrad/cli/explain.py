"""`convgrad explain`: what a problem comes to, how it is computed, and where the kernel lands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import engine
from ..dtypes import DTYPES
from ..graph.graphs import Graph
from ..graph.memory import in_units
from ..spec import Problem
from ..spec.table import Op
from .picture import ASCII, UNICODE, picture
from .tasks import Entry, Task, tasks


def explain(entry: Entry, *, width: int, plain: bool) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Facts and lines for every problem of an entry."""
    for task in tasks(entry):
        yield facts(task.op, task.problem), lines(task, width, plain)


def of_graph(graph: Graph, *, width: int, plain: bool) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Facts and lines for every operation of a graph."""
    for step in graph.compile().steps:
        if step.problem is None:
            continue
        node = step.node
        shapes = {arg.role: t.get_dims() for arg, t in zip(node.row.inputs, step.inputs, strict=False)}
        shapes[node.row.wanted] = step.outputs[0].get_dims()
        task = Task((), node.row, step.problem, dict(node.attrs), shapes)
        yield facts(node.row, step.problem), [f"{node.name}", *lines(task, width, plain)]


def lines(task: Task, width: int, plain: bool) -> list[str]:
    """A problem told to a person."""
    problem, op = task.problem, task.op
    names = {"x": op.arg("x").name, "w": op.arg("w").name, "y": op.arg("y").name}
    found = [f"{op.kind}: {op.text}"]
    for role, name in names.items():
        shape = "x".join(map(str, task.shapes.get(role, problem.shape(role))))
        wanted = ", the result" if role == problem.wanted else ""
        size = problem.size(role) * DTYPES[problem.dtype_of(role)].size
        found.append(f"  {role}  {name:<12} {problem.dtype_of(role)} {shape}, {in_units(size)}{wanted}")
    if task.attributes:
        shown = {k: v for k, v in task.attributes.items() if k != op.shape_source}
        found.append("  " + " ".join(f"{k}={_value(v)}" for k, v in shown.items()))
    found.append("")
    found += engine.explain(problem)
    intensity = problem.flops / max(1, problem.bytes)
    found += [f"{intensity:.1f} FLOP per byte of the three tensors", ""]
    return found + picture(problem, width=width, glyphs=ASCII if plain else UNICODE)


def _value(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def facts(op: Op, problem: Problem) -> dict[str, Any]:
    """The same for machines."""
    return {
        "operation": op.kind,
        "problem": str(problem),
        "shapes": {role: list(problem.shape(role)) for role in "xwy"},
        "flops": problem.flops,
        "bytes": problem.bytes,
        "plan": engine.explain(problem),
    }
