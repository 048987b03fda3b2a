"""What happened to each case: rows as they are finished or lines of JSON, a progress bar, a summary, the exit code."""

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
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from .rows import Column, Rows, shortened

T = TypeVar("T")

ROWS = 60
"""So many cases are shown row by row; of more, only those that did not pass."""


BAR = 56
"""The characters that the bar and its numbers take."""


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
RESULT = Column("result", max(len(state) for state in GOOD))
"""The column of the states; rows show good ones only."""
_COLORS = {State.passed: "green", State.mistrusted: "yellow", State.done: "green", State.not_ours: "dim"}


@dataclass(frozen=True)
class Outcome:
    """One case: the line that repeats it, how it ended, and what else there is to say."""

    line: str
    state: State
    detail: str = ""
    seconds: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)  # columns, by heading


@dataclass(frozen=True)
class Step:
    """What a case does next: its step `index` of `total`."""

    text: str
    index: int = 0
    total: int = 1


@dataclass
class Report:
    """Shows what the work on cases comes to, as it is done.

    `intro` is said before the first case, `outro` in the summary.
    """

    json: bool = False
    verbose: int = 0
    columns: Sequence[Column] = ()
    intro: str = ""
    outro: str = ""
    out: Console = field(default_factory=lambda: console())
    err: Console = field(default_factory=lambda: console(stderr=True))
    outcomes: list[Outcome] = field(default_factory=list)

    def each(self, cases: Sequence[T], work: Callable[[T], Iterable[Outcome | Step]]) -> int:
        """Do the work of every case, and return the exit code."""
        began = perf_counter()
        interrupted = False
        self._rows = Rows(self.columns, self.out.width if self.out.is_terminal else None)
        self._few = len(cases) <= ROWS
        if self.intro and not self.json:
            self._say(self.intro)
        # Where rows and the bar share a terminal, they must share the console too, which keeps them apart.
        screen = self.out if self.out.is_terminal else self.err
        bar = progress(screen)
        try:
            with bar:
                task = bar.add_task("starting", total=len(cases))
                finished, planned = 0, len(cases)  # steps; a case has one until it says otherwise
                for case in cases:
                    total = 1
                    try:
                        for found in work(case):
                            if isinstance(found, Outcome):
                                self._take(found)
                                continue
                            planned, total = planned + found.total - total, found.total
                            at = finished + found.index
                            text = shortened(found.text, max(8, screen.width - BAR))
                            bar.update(task, completed=at, total=planned, description=text)
                    except Exception as error:  # One case's accident must not hide what the others come to.
                        self._take(crash(case, error))
                        if self.verbose:
                            self.err.print_exception()
                    finished += total
                    bar.update(task, completed=finished, total=planned)
        except KeyboardInterrupt:
            interrupted = True
        self._finish(perf_counter() - began, interrupted, len(cases))
        if interrupted:
            return 130
        if self.outcomes and all(o.state == State.not_ours for o in self.outcomes):
            print("convgrad: nothing here is of this family; `convgrad ops` lists what is", file=sys.stderr)
            return 2
        if not self.outcomes:  # No problem has a name that --match finds.
            return 2
        return 0 if all(o.state in GOOD for o in self.outcomes) else 1

    def _take(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        color = _COLORS.get(outcome.state, "bold red")
        if self.json:
            record: dict[str, Any] = {"case": outcome.line, "state": str(outcome.state), "detail": outcome.detail}
            record |= {"seconds": round(outcome.seconds, 6), **outcome.fields}
            self._line(json.dumps(record))
        elif outcome.state not in GOOD:
            self._say(Text(f"{outcome.state}: ", color) + Text(outcome.detail))
            self._line(f"  repeat: {outcome.line}")
        elif self._few or self.verbose:
            for line in self._rows.lines({RESULT.name: str(outcome.state), **outcome.fields}):
                text = Text(line)
                text.highlight_words([str(outcome.state)], color)
                self.out.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something after all else, to people."""
        if not self.json:
            self._say(text)

    def _line(self, text: str) -> None:
        """Print a line that is to be copied, or read by a program: it is not folded."""
        self.out.print(Text(text), soft_wrap=True)

    def _say(self, text: str | Text) -> None:
        """Print a sentence, folded between words on a terminal."""
        self.out.print(Text(text) if isinstance(text, str) else text, soft_wrap=not self.out.is_terminal)

    def _counts(self) -> str:
        counts = Counter(o.state for o in self.outcomes)
        return ", ".join(f"{counts[state]} {state}" for state in State if counts[state]) or "nothing to do"

    def _finish(self, seconds: float, interrupted: bool, total: int) -> None:
        counts = Counter(str(o.state) for o in self.outcomes)
        if self.json:
            summary = {"total": len(self.outcomes), "seconds": round(seconds, 3), "interrupted": interrupted}
            self._line(json.dumps({"summary": summary | dict(counts)}))
            return
        stopped = f"interrupted, {len(self.outcomes)} of {total} done: " if interrupted else ""
        told = any(o.state in (State.passed, State.mistrusted, State.done) for o in self.outcomes)
        self._say(f"{stopped}{self._counts()} in {seconds:.1f} s" + (f"; {self.outro}" if self.outro and told else ""))


class Clock(ProgressColumn):
    """The time that has passed, and that which the rest will take as far as is known: `0:19 so far, 0:16 left`."""

    def render(self, task: Task) -> Text:
        """The text."""
        text = f"{minutes(task.elapsed or 0)} so far"
        return Text(text if task.time_remaining is None else f"{text}, {minutes(task.time_remaining)} left")


def minutes(seconds: float) -> str:
    """A time as 0:19, or 1:02:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def progress(screen: Console) -> Progress:
    """A bar on a terminal, nothing elsewhere. It moves by itself, so that waiting does not look like an end."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        BarColumn(bar_width=12),
        Clock(),
        TextColumn("{task.description}", markup=False),
        console=screen,
        transient=True,
        # Often enough to look alive, and too seldom to disturb what is being timed.
        refresh_per_second=4,
        disable=not screen.is_terminal,
    )


def crash(case: object, error: Exception) -> Outcome:
    """The outcome of a case that ended in an exception that should not be."""
    line = str(getattr(case, "line", None) or getattr(case, "text", case))
    return Outcome(line, State.crashed, f"{type(error).__name__}: {error}; -v1 shows where. Please report this")
