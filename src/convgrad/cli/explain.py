"""`convgrad explain`: what a problem comes to, how it is computed, and where the kernel lands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from textwrap import wrap
from typing import Any

from ..backend import Device
from ..errors import SpecError
from ..explanation import Case, computation, facts, of_problem, shapes, text, title
from ..graph.graphs import Graph
from ..spec import Problem
from ..spec.table import Op
from .picture import ASCII, UNICODE, Glyphs, picture
from .tasks import Entry, Settings, Task, tasks

ALL = Settings().directions


@dataclass(frozen=True)
class Group:
    """Cases that are told together: the directions of a descriptor, or an operation of a graph by its name.

    One without a case is an operation on a bias, which NumPy computes.
    """

    cases: tuple[Case, ...]
    name: str = ""
    op: Op | None = None


def told(groups: Sequence[Group], *, width: int, plain: bool, verbose: bool) -> Iterator[str]:
    """Lines for a person; what cases of one group share is said once."""
    glyphs = ASCII if plain else UNICODE
    for index, group in enumerate(groups):
        yield from ["", ""] if index else []
        yield from _group(group, width, glyphs, verbose)


def as_json(groups: Sequence[Group]) -> Iterator[str]:
    """A line of JSON for every case."""
    for group in groups:
        if group.op is not None:
            yield json.dumps({"name": group.name, "operation": group.op.kind, "engine": "numpy"})
        for case in group.cases:
            yield json.dumps({"name": group.name, **facts(case)})


def _group(group: Group, width: int, glyphs: Glyphs, verbose: bool) -> Iterator[str]:
    cases = group.cases
    if group.name:
        yield group.name
    if group.op is not None:
        yield from wrap(f"{group.op.kind}: {group.op.text} NumPy computes it.", width, subsequent_indent="  ")
        return
    first = cases[0]
    if len(cases) == 1:
        yield from text(first, width, verbose=verbose)
    else:
        yield from title(first, width)
        yield "The gradients follow; --dir=FWD_D shows the forward operation alone."
        yield ""
        yield from shapes(cases, width)
        for case in cases:
            yield ""
            yield from computation(case, width, verbose=verbose)
    yield ""
    yield from picture(first.problem, width=width, glyphs=glyphs, names=(first.names["x"], first.names["y"]))


def of_entry(entry: Entry) -> list[Group]:
    """The cases of a descriptor, its directions side by side, or that of a problem line."""
    found: dict[tuple[str, str, int], list[Case]] = {}
    for task in _tasks(entry):
        key = (task.fields.get("dt", ""), task.fields.get("tag", ""), task.problem.n)
        found.setdefault(key, []).append(_case(task, entry.text))
    return [Group(tuple(cases)) for cases in found.values()]


def on(device: Device, groups: Sequence[Group]) -> list[Group]:
    """The same cases as they would be computed on a device."""
    return [replace(group, cases=tuple(replace(case, device=device) for case in group.cases)) for group in groups]


def _tasks(entry: Entry) -> Iterator[Task]:
    """The tasks of an entry. If no direction was asked for, all that its element types allow."""
    if entry.settings.directions:
        yield from tasks(entry)
        return
    refused: SpecError | None = None
    count = 0
    for dtype in entry.settings.dtypes:
        for direction in ALL:
            settings = replace(entry.settings, directions=(direction,), dtypes=(dtype,))
            try:
                for task in tasks(replace(entry, settings=settings)):
                    count += 1
                    yield task
            except SpecError as error:
                if error.status != "invalid_data_type":
                    raise
                refused = error
            if " " in entry.text.strip():
                return
    if not count and refused:
        raise refused


def _case(task: Task, text: str) -> Case:
    if task.attributes is None:
        return of_problem(task.problem)
    # A descriptor tells at most the padding before each axis; what follows the first n is its name.
    attributes = {k: v for k, v in task.attributes.items() if k != "pads_end"}
    sizes = text.partition("n")[0]
    half = re.search(r"o[dhw]\d", sizes) is not None and not re.search(r"p[dhw]\d", sizes)
    return _of(task.op, task.problem, attributes, half)


def _of(op: Op, problem: Problem, attributes: Mapping[str, Any], half: bool = False) -> Case:
    """The case of an operation with attributes."""
    return Case(op, problem, attributes["data_format"], attributes["weights_format"], attributes, half)


def of_graph(graph: Graph) -> list[Group]:
    """The operations of a graph, each by its name."""
    found = []
    for step in graph.compile().steps:
        node = step.node
        if step.problem is None:
            found.append(Group((), node.label, node.row))
        else:
            found.append(Group((_of(node.row, step.problem, node.attrs),), node.label))
    return found


def explained(entries: Sequence[Entry], graphs: Sequence[Graph]) -> list[Group]:
    """All that was asked for."""
    return [*chain.from_iterable(map(of_graph, graphs)), *chain.from_iterable(map(of_entry, entries))]
