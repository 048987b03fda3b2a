"""Tables whose rows are printed one by one, while the later ones are still being computed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column: its heading, which is the name of a field too, and how many characters its cells need."""

    name: str
    width: int = 0
    right: bool = False  # numbers
    lead: bool = False  # may stand on a line of its own, above the rows that share it
    optional: bool = False  # may be left out
    quiet: bool = False  # has no heading, and cells only where there is something to say; the last column

    @property
    def room(self) -> int:
        """The characters that it takes."""
        return 0 if self.quiet else max(self.width, len(self.name))


def widest(texts: Iterable[str]) -> int:
    """The length of the longest text."""
    return max(map(len, texts), default=0)


class Rows:
    """Lines of a table. As the rows are not known yet, the widths are settled from what the columns expect.

    On a screen of `width` characters, where the table is wider: first the leading columns get lines of their own, then
    optional ones are left out, the last first, and at last the widest is shortened. The last column has the rest of the
    line and is folded between words. Without a width everything is one long line.
    """

    def __init__(self, columns: Sequence[Column], width: int | None = None) -> None:
        self.width = width
        self.leads: list[Column] = []
        self.columns = list(columns)
        if width is not None and self._total() > width:
            self.leads = [c for c in columns if c.lead]
            self.columns = [c for c in columns if not c.lead]
            while self._total() > width and (optional := [c for c in self.columns if c.optional]):
                self.columns.remove(optional[-1])
            while self._total() > width and (long := max(self.columns, key=lambda c: c.room)).room > len(long.name):
                self.columns[self.columns.index(long)] = replace(long, width=long.room - 1)
        self._above: tuple[str, ...] | None = None

    def _total(self) -> int:
        return sum(c.room for c in self.columns) + len(GAP) * (len(self.columns) - 1)

    def lines(self, fields: Mapping[str, Any]) -> list[str]:
        """The lines of a row, after the headings if it is the first."""
        found: list[str] = []
        if self._above is None:
            self._above = ()
            found += self._row({c.name: "" if c.quiet else c.name for c in self.columns})
        above = tuple(cell(fields.get(c.name)) for c in self.leads)
        if above != self._above:
            self._above = above
            found.append(shortened(GAP.join(above), self.width))
        return found + self._row(
            {c.name: _quiet(c, fields) if c.quiet else cell(fields.get(c.name)) for c in self.columns}
        )

    def _row(self, cells: Mapping[str, str]) -> list[str]:
        if not self.columns:
            return []
        *before, last = self.columns
        start = ""
        for column in before:
            text = cells[column.name]
            if self.width is not None:
                text = shortened(text, column.room)
            start += (text.rjust(column.room) if column.right else text.ljust(column.room)) + GAP
        text = cells[last.name].rjust(last.room) if last.right else cells[last.name]
        if self.width is None:
            return [(start + text).rstrip()]
        room = max(1, self.width - len(start))
        folded = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
        if last.right or not folded:
            folded = [text]
        lines = [shortened(line, room) for line in folded]
        return [((start if i == 0 else " " * len(start)) + line).rstrip() for i, line in enumerate(lines)]


def _quiet(column: Column, fields: Mapping[str, Any]) -> str:
    """A cell that says what it is, or nothing."""
    return f"{column.name}: {fields[column.name]}" if fields.get(column.name) else ""


def shortened(text: str, room: int | None) -> str:
    """A text that ends with … where it has no room."""
    return text if room is None or len(text) <= room else text[: room - 1] + "…"


def cell(value: Any) -> str:
    """A value as a row shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
