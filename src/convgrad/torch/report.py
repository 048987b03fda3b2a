"""What `install()` took and what it passed on, with counts, times and reasons."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple


class Entry:
    """One kind of call: what it is, which back end computes it or why none of ours does, how often, and how long."""

    __slots__ = ("backend", "calls", "layer", "reason", "seconds")

    def __init__(self, layer: str, backend: str, reason: str, calls: int = 0, seconds: float = 0.0) -> None:
        self.layer, self.backend, self.reason, self.calls, self.seconds = layer, backend, reason, calls, seconds

    def count(self, begin: float) -> float:
        """Note a call that began at a time and has now ended; returns the time now.

        Two threads that count at once may lose a call: a lock would cost more than the count is worth.
        """
        now = perf_counter()
        self.calls += 1
        self.seconds += now - begin
        return now

    def row(self) -> Row:
        """The entry as a value."""
        return Row(self.layer, self.backend, self.reason, self.calls, self.seconds)


class Row(NamedTuple):
    """One kind of call: `backend` is empty where PyTorch computed, and `reason` says why."""

    layer: str
    backend: str
    reason: str
    calls: int
    seconds: float


class Report:
    """All kinds of calls so far; print it for a table. `rows` has the same as values."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], Entry] = {}

    def entry(self, layer: str, backend: str, reason: str = "") -> Entry:
        """The entry of a kind of call."""
        return self._entries.setdefault((layer, backend, reason), Entry(layer, backend, reason))

    @property
    def rows(self) -> list[Row]:
        """All kinds of calls that were made, those that took longest first."""
        made = [entry.row() for entry in list(self._entries.values()) if entry.calls]
        return sorted(made, key=lambda row: -row.seconds)

    @property
    def taken(self) -> int:
        """Gradients that were computed here."""
        return sum(row.calls for row in self.rows if row.backend)

    @property
    def passed(self) -> int:
        """Calls that were left to PyTorch."""
        return sum(row.calls for row in self.rows if not row.backend)

    def copy(self) -> Report:
        """The report as it is now."""
        new = Report()
        for key, entry in list(self._entries.items()):
            new._entries[key] = Entry(*entry.row())
        return new

    def clear(self) -> None:
        """Forget all counts. Entries stay, for whoever goes on counting."""
        for entry in list(self._entries.values()):
            entry.calls, entry.seconds = 0, 0.0

    def __str__(self) -> str:
        rows = self.rows
        if not rows:
            return "no convolution was computed since install()"
        width = min(72, max(len(row.layer) for row in rows))
        lines = [f"{'layer':{width}}  {'calls':>7} {'ms':>10}  computed by"]
        for row in rows:
            by = f"convgrad ({row.backend})" if row.backend else f"PyTorch: {row.reason}"
            lines.append(f"{row.layer:{width}}  {row.calls:7} {row.seconds * 1e3:10.1f}  {by}")
        ours = sum(row.seconds for row in rows if row.backend)
        theirs = sum(row.seconds for row in rows if not row.backend)
        lines.append(f"taken {self.taken} ({ours:.3f} s), passed on {self.passed} ({theirs:.3f} s)")
        return "\n".join(lines)
