"""`convgrad check`: problems computed on integers and compared to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from .. import calls, engine, host, reference
from ..errors import ConvgradError
from . import fill
from .report import RESULT, ROWS, Outcome, State, Step
from .rows import Column, widest
from .tasks import Entry, Task, arrays, attempts, of_settings, widest_problem


def columns(entries: Sequence[Entry]) -> list[Column]:
    """The columns for problems, as wide as they ask for."""
    odd = [text for entry in entries[:ROWS] if (text := entry.padding)]
    told = [
        Column("dir", of_settings(entries, "directions")),
        Column("dt", max(4, of_settings(entries, "dtypes"))),
        Column("tag", 3),
    ]
    return [
        RESULT,
        *([] if all(entry.is_line for entry in entries) else told),
        *([Column("padding", widest(odd))] if odd else []),
        Column("problem", widest_problem(entries), lead=True),
    ]


def check_entry(entry: Entry, chosen: str = "cpu") -> Iterator[Outcome | Step]:
    """Check every problem of an entry."""
    options = [] if chosen == "cpu" else [f"--engine={chosen}"]
    for index, task in enumerate(attempts(entry, "check", *options)):
        if isinstance(task, Outcome):
            yield task
            continue
        yield Step(f"checking {task.title}", index, entry.count)
        yield check_task(task, chosen)


def check_task(task: Task, chosen: str = "cpu") -> Outcome:
    """Compute one problem and compare."""
    began = perf_counter()
    line = task.line("check", *([] if chosen == "cpu" else [f"--engine={chosen}"]))
    try:
        given = arrays(task)
        out = given.pop(task.problem.wanted)
        prior = None
        if task.problem.accumulate:
            prior = np.array(reference.canonical(out, task.problem, task.problem.wanted))
        choice = engine.choose(task.problem, only="reference" if chosen == "reference" else "")
        calls.run(task.problem, choice, host.tensors(given), host.tensor(out))
        verdict = fill.check(task.op, task.problem, given, out, prior)
    except ConvgradError as error:
        return Outcome(line, State.refused, f"{error} ({error.status})", 0.0, task.fields)
    state = State.passed if verdict.trusted else State.mistrusted
    if not verdict.passed:
        state = State.failed
    return Outcome(line, state, str(verdict), perf_counter() - began, task.fields)
