"""What happened to each case: rows for people or lines of JSON, a progress bar, a summary and the exit code."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

ROWS = 60
"""So many cases are shown row by row; of more, only those that did not pass."""


def console(*, stderr: bool = False) -> Console:
    """Where to print. A file or a pipe has no width of its own: rows are not folded to that of a small screen."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else 160)


class State(str, Enum):
    """How a case ended. The last three count against a run."""

    passed = "passed"
    mistrusted = "mistrusted"  # right, but mostly zeros
    done = "done"  # listed, compiled or run without a comparison, as the mode asks
    not_ours = "not ours"  # operations outside of this family
    failed = "failed"
    refused = "refused"  # by the specification, or for want of memory
    crashed = "crashed"  # an exception that should not be

    def __str__(self) -> str:
        return str(self.value)


GOOD = (State.passed, State.mistrusted, State.done, State.not_ours)
_COLORS = {State.passed: "green", State.mistrusted: "yellow", State.done: "green", State.not_ours: "dim"}


@dataclass(frozen=True)
class Outcome:
    """One case: the line that repeats it, how it ended, and what else there is to say."""

    line: str
    state: State
    detail: str = ""
    seconds: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)  # more columns, by heading


@dataclass
class Report:
    """Collects outcomes and shows them."""

    json: bool = False
    verbose: int = 0
    columns: Sequence[str] = ()
    out: Console = field(default_factory=lambda: console())
    err: Console = field(default_factory=lambda: console(stderr=True))
    outcomes: list[Outcome] = field(default_factory=list)

    def each(self, cases: Sequence[T], work: Callable[[T], Iterable[Outcome]]) -> int:
        """Do the work of every case, and return the exit code."""
        began = perf_counter()
        interrupted = False
        bar = Progress(
            TextColumn("{task.completed} of {task.total}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.err,
            transient=True,
            disable=self.json or len(cases) < 2 or not sys.stderr.isatty(),
        )
        few = len(cases) <= ROWS
        try:
            with bar:
                task = bar.add_task("", total=len(cases))
                for case in cases:
                    try:
                        for outcome in work(case):
                            self._take(outcome, few)
                    except Exception as error:  # One case's accident must not hide what the others come to.
                        self._take(crash(case, error), few)
                        if self.verbose:
                            self.err.print_exception()
                    bar.update(task, advance=1, description=self._counts())
        except KeyboardInterrupt:
            interrupted = True
        self._finish(perf_counter() - began, interrupted, len(cases), few)
        if interrupted:
            return 130
        return 0 if all(o.state in GOOD for o in self.outcomes) else 1

    def _take(self, outcome: Outcome, few: bool) -> None:
        self.outcomes.append(outcome)
        if self.json:
            record: dict[str, Any] = {"case": outcome.line, "state": str(outcome.state), "detail": outcome.detail}
            record |= {"seconds": round(outcome.seconds, 6), **outcome.fields}
            print(json.dumps(record), flush=True)
        elif outcome.state not in GOOD or (self.verbose and not few):
            self.out.print(Text(f"{outcome.state}: ", _COLORS.get(outcome.state, "bold red")) + Text(outcome.detail))
            self.out.print(Text(f"  repeat: {outcome.line}"))

    def _counts(self) -> str:
        counts = Counter(o.state for o in self.outcomes)
        return ", ".join(f"{counts[state]} {state}" for state in State if counts[state]) or "nothing to do"

    def _finish(self, seconds: float, interrupted: bool, total: int, few: bool) -> None:
        counts = Counter(str(o.state) for o in self.outcomes)
        if self.json:
            summary = {"total": len(self.outcomes), "seconds": round(seconds, 3), "interrupted": interrupted}
            print(json.dumps({"summary": summary | dict(counts)}), flush=True)
            return
        if self.outcomes and few and any(o.fields for o in self.outcomes):
            self.out.print(self._table())
        stopped = f"interrupted, {len(self.outcomes)} of {total} done: " if interrupted else ""
        self.out.print(f"{stopped}{self._counts()} in {seconds:.1f} s")

    def _table(self) -> Table:
        found = dict.fromkeys(name for o in self.outcomes for name in o.fields)
        names = [*(n for n in self.columns if n in found), *(n for n in found if n not in self.columns)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        numbers = {n for n in names if all(isinstance(o.fields.get(n, 0), (int, float)) for o in self.outcomes)}
        for name in names:
            table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
        table.add_column("")
        for o in self.outcomes:
            cells = [_cell(o.fields.get(name)) for name in names]
            table.add_row(*cells, Text(str(o.state), _COLORS.get(o.state, "bold red")))
        return table


def crash(case: object, error: Exception) -> Outcome:
    """The outcome of a case that ended in an exception that should not be."""
    line = str(getattr(case, "line", None) or getattr(case, "text", case))
    return Outcome(line, State.crashed, f"{type(error).__name__}: {error}; -v1 shows where. Please report this")


def _cell(value: Any) -> Text:
    if value is None:
        return Text("-", "dim")
    if isinstance(value, float):
        return Text(f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}")
    return Text(str(value))
