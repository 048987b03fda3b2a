"""Problems from words: benchdnn's descriptors with their options, and convgrad's own problem lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import DTYPES, Array
from ..errors import SpecError
from ..explanation import of_problem as of_line
from ..graph import memory
from ..spec import Problem, bind
from ..spec.check import meant
from ..spec.descriptors import DIRECTIONS, Descriptor
from ..spec.table import DTYPES as DOCUMENTED
from ..spec.table import EXTENDED_DTYPES, Op
from . import fill
from .driver import IGNORED, UsageError, hoisted, opened
from .report import ROWS
from .rows import widest

TAGS = {"ncx": "NCX", "abx": "NCX", "nxc": "NXC", "axb": "NXC", "any": "NCX"}
OPTIONS = {
    "dir": f"directions: {', '.join(DIRECTIONS)}",
    "dt": "element types: f32, bf16, f16, f64, or SRC:WEI:DST with a result of f32",
    "tag": "layouts: ncx (abx), nxc (axb)",
    "mb": "another batch size; 0 keeps it",
    "match": "only the problems that a regular expression finds",
    "batch": "read words from a file; # begins a comment",
}
_IGNORED = IGNORED | {"alg", "engine", "wtag", "stag", "dtag", "bia-dt", "skip", "inplace"}


@dataclass(frozen=True)
class Task:
    """One problem to compute: the line that names it, and the operation it is, if a descriptor told."""

    words: tuple[str, ...]  # what comes after `convgrad check` or `convgrad bench`
    op: Op
    problem: Problem
    attributes: dict[str, Any] | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by role, in the caller's order of axes
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return " ".join(self.fields.values())

    def line(self, command: str) -> str:
        """The command that repeats it."""
        return shlex.join(["convgrad", command, *self.words])


@dataclass(frozen=True)
class Settings:
    """What the words so far have set."""

    transposed: bool | None = None
    directions: tuple[str, ...] = ("FWD_D", "BWD_D", "BWD_W")
    dtypes: tuple[str, ...] = ("f32",)
    tags: tuple[str, ...] = ("ncx",)
    mb: tuple[int, ...] = (0,)
    match: str = ""


@dataclass(frozen=True)
class Entry:
    """A descriptor or problem line as written, and the settings that it was met with."""

    text: str
    settings: Settings
    where: str = ""  # the batch file that it stands in

    def read(self) -> Problem | Descriptor:
        """What the text describes."""
        if " " in self.text.strip():
            return Problem.parse(self.text)
        try:
            return Descriptor.parse(self.text, transposed=bool(self.settings.transposed))
        except SpecError as error:
            error.message = f"{self.where}: {error.message}" if self.where else error.message
            raise

    @property
    def count(self) -> int:
        """How many problems it comes to."""
        s = self.settings
        return 1 if " " in self.text.strip() else len(s.directions) * len(s.dtypes) * len(s.tags) * len(s.mb)

    @property
    def padding(self) -> str:
        """The padding after each axis, if the text has a size of the output that only uneven padding comes to."""
        with suppress(SpecError):
            found = self.read()
            return found.uneven if isinstance(found, Descriptor) else ""
        return ""


def widest_problem(entries: Sequence[Entry]) -> int:
    """The characters that the longest problem takes."""
    longest = 0
    for entry in entries[:ROWS]:
        with suppress(SpecError):  # It will be told as the outcome of the entry.
            found = entry.read()
            sizes = [found.with_mb(mb) for mb in entry.settings.mb] if isinstance(found, Descriptor) else [found]
            longest = max(longest, widest(map(str, sizes)))
    return longest


def of_settings(entries: Sequence[Entry], name: str) -> int:
    """The characters that the longest word of a setting takes."""
    return widest(word for entry in entries for word in getattr(entry.settings, name))


def parse(words: Iterable[str], start: Settings) -> list[Entry]:
    """The entries of a command line. Options apply to what follows them, and at its end to all of it."""
    return _read(hoisted(words, OPTIONS, ("batch",)), start, "", ())


def _read(words: list[str], settings: Settings, where: str, batches: tuple[Path, ...]) -> list[Entry]:
    entries: list[Entry] = []
    for word in words:
        if not word.startswith("-"):
            entries.append(Entry(word, settings, where))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if name in ("conv", "deconv"):
            settings = replace(settings, transposed=name == "deconv")
            continue
        if name == "reset":
            settings = Settings(transposed=settings.transposed)
            continue
        if name in _IGNORED or name.startswith("attr-") or re.fullmatch(r"-v\d+", word):
            continue
        if name not in OPTIONS:
            hint = meant(name, OPTIONS) or f"there are {', '.join('--' + o for o in OPTIONS)}, --conv and --deconv"
            raise UsageError(f"{word!r} is no option; {hint}")
        if not equals:
            raise UsageError(f"--{name} needs a value: {OPTIONS[name]}")
        if name == "batch":
            entries.extend(_batch(value, settings, batches))
            continue
        try:
            settings = _with(settings, name, value)
        except ValueError as error:
            raise UsageError(f"--{name}={value}: {error}") from None
    return entries


def _batch(name: str, settings: Settings, batches: tuple[Path, ...]) -> list[Entry]:
    path, words = opened(name, [Path()], batches)
    if settings.transposed is None and "deconv" in path.parts:
        settings = replace(settings, transposed=True)
    return _read(words, settings, path.name, (*batches, path))


def _with(settings: Settings, name: str, value: str) -> Settings:
    words = [word for word in value.split(",") if word]
    if name == "match":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return replace(settings, match=value)
    if not words:
        raise ValueError("needs a value")
    if name == "dir":
        _known(words, DIRECTIONS)
        return replace(settings, directions=tuple(words))
    if name == "tag":
        _known([w.lower() for w in words], TAGS)
        return replace(settings, tags=tuple(w.lower() for w in words))
    if name == "mb":
        if not all(w.isdecimal() and len(w) < 19 for w in words):
            raise ValueError("needs a number")
        return replace(settings, mb=tuple(map(int, words)))
    for word in words:
        parts = word.split(":")
        _known(parts, (*DOCUMENTED, *EXTENDED_DTYPES))
        if len(parts) not in (1, 3):
            raise ValueError(f"{word!r} is not of the form SRC:WEI:DST")
    return replace(settings, dtypes=tuple(words))


def _known(words: Iterable[str], choices: Iterable[str]) -> None:
    for word in words:
        if word not in choices:
            raise ValueError(f"{word!r} is none of {', '.join(choices)}")


def tasks(entry: Entry) -> Iterator[Task]:
    """The problems of an entry, one for every combination of its settings."""
    settings = entry.settings
    found = entry.read()
    if isinstance(found, Problem):
        yield of_problem(found)
        return
    if settings.match and not re.search(settings.match, entry.text):
        return
    for dtype, tag, direction, mb in product(settings.dtypes, settings.tags, settings.directions, settings.mb):
        yield of_descriptor(found.with_mb(mb), direction, dtype, tag)


def of_problem(problem: Problem) -> Task:
    """A problem line. Its integers are those of the operation that it would be without a word about transposition."""
    return Task((str(problem),), of_line(problem).op, problem, fields={"problem": str(problem)})


def of_descriptor(descriptor: Descriptor, direction: str, dtype: str, tag: str) -> Task:
    """The operation of a descriptor in one direction, type and layout."""
    types = dtype.split(":") * (3 if ":" not in dtype else 1)
    output = {"F": 2, "D": 0, "W": 1}[direction[0] if direction[0] == "F" else direction[4]]
    given = {t for i, t in enumerate(types) if i != output}
    if len(given) != 1:
        raise SpecError(f"--dt={dtype}: both inputs of {direction} must have one type", status="invalid_data_type")
    operation = descriptor.operation(direction, data_format=TAGS[tag], dtype=given.pop())
    attributes = dict(operation.attributes)
    if types[output] != operation.inputs[0].dtype:
        attributes["out_dtype"] = types[output]
    binding = bind(operation.op, operation.inputs, attributes)
    roles = [arg.role for arg in operation.op.inputs]
    shapes = {role: d.shape for role, d in zip(roles, operation.inputs, strict=False)}
    shapes[operation.op.wanted] = binding.shape
    text = str(descriptor)
    words = (
        *(("--deconv",) if descriptor.transposed else ()),
        f"--dir={direction}",
        f"--dt={dtype}",
        f"--tag={tag}",
        text,
    )
    fields = {"problem": text, "dir": direction, "dt": dtype, "tag": tag}
    if descriptor.uneven:
        fields["padding"] = descriptor.uneven
    return Task(words, operation.op, binding.problem, attributes, shapes, fields)


def arrays(task: Task) -> dict[str, Array]:
    """Filled arrays for the given tensors and a poisoned one for the wanted, by role."""
    problem = task.problem
    size = sum(problem.size(r) * (DTYPES[problem.dtype_of(r)].size + 16) for r in "xwy")
    memory.require(size, f"{problem} and its check")
    found = {role: _room(task, role) for role in "xwy"}
    recipes = fill.recipes(task.op, problem)
    for arg in task.op.inputs:
        if arg.role in problem.given:
            fill.fill(found[arg.role], recipes[arg.name], seed=ord(arg.role))
    if problem.bias_stride is not None:
        channels = problem.g * (problem.cx if problem.wanted == "x" else problem.cy)
        whole = np.empty(max(1, channels * abs(problem.bias_stride or 1)), DTYPES[problem.dtype].numpy)
        found["bias"] = whole[:: problem.bias_stride][:channels] if problem.bias_stride else np.broadcast_to(
            whole[:1], (channels,)
        )  # fmt: skip
        fill.fill(whole, fill.Recipe(fill.BIAS), seed=98)
    if problem.accumulate:
        fill.fill(found[problem.wanted], fill.Recipe(fill.BIAS), seed=97)
    else:
        fill.poison(found[problem.wanted])
    return found


def _room(task: Task, role: str) -> Array:
    """Memory for a tensor: in the caller's order of axes where there is one, else by the problem's strides."""
    problem = task.problem
    dtype = DTYPES[problem.dtype_of(role)].numpy
    if role in task.shapes:
        return np.empty(task.shapes[role], dtype)
    shape, strides = problem.shape(role), problem.strides(role)
    if not prod(shape):
        return np.empty(shape, dtype)
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    buffer = np.empty(1 + sum(map(abs, reach)), dtype)
    first = buffer[-sum(r for r in reach if r < 0) :]
    return np.lib.stride_tricks.as_strided(first, shape, [s * dtype.itemsize for s in strides])
