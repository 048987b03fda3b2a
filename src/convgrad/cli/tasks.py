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
from ..errors import ConvgradError, SpecError
from ..explanation import of_problem as of_line
from ..graph import memory
from ..spec import Problem, bind
from ..spec.descriptors import DIRECTIONS, Descriptor
from ..spec.table import DTYPES as DOCUMENTED
from ..spec.table import EXTENDED_DTYPES, Op
from . import fill, words
from .report import ROWS, Outcome, State
from .rows import widest
from .words import Option, count_of, each, one_of

TAGS = {"ncx": "NCX", "abx": "NCX", "nxc": "NXC", "axb": "NXC", "any": "NCX"}
_DIRECTIONS = ", ".join(f"{name} ({text.partition(';')[0]})" for name, text in DIRECTIONS.items())
OPTIONS = words.by_name(
    Option("conv", "", "descriptors are convolutions (the default)"),
    Option("deconv", "", "descriptors are transposed convolutions"),
    Option("dir", "DIRECTION", f"{_DIRECTIONS}; by default FWD_D,BWD_D,BWD_W", True),
    Option("dt", "TYPE", "element types: f32 (the default), bf16, f16, f64, or SRC:WEI:DST with a result of f32", True),
    Option("tag", "TAG", "layouts: ncx, channels first (the default), or nxc, channels last", True),
    Option("mb", "N", "another batch size; 0 keeps that of the descriptor, which is 2 if it has none", True),
    Option("match", "REGEX", "only the problems that a regular expression finds"),
    Option("batch", "FILE", "read words from a file; # begins a comment"),
    Option("reset", "", "forget the options so far, except --conv and --deconv"),
)
FIELDS = {"dir": "directions", "dt": "dtypes", "tag": "tags", "mb": "mb", "match": "match"}
"""The options that descriptors alone obey, and the settings that they change."""

IGNORED = words.IGNORED | {"alg", "engine", "wtag", "stag", "dtag", "bia-dt", "skip", "inplace"}


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

    def line(self, command: str, *options: str) -> str:
        """The command that repeats it."""
        return repeated(command, *options, *self.words)


def repeated(*words: str) -> str:
    """A command line of ours, to be copied."""
    return shlex.join(["convgrad", *words])


@dataclass(frozen=True)
class Settings:
    """What the words so far have set."""

    transposed: bool | None = None
    directions: tuple[str, ...] = ("FWD_D", "BWD_D", "BWD_W")
    dtypes: tuple[str, ...] = ("f32",)
    tags: tuple[str, ...] = ("ncx",)
    mb: tuple[int, ...] = (0,)
    match: str = ""

    def changes(self, start: Settings) -> list[str]:
        """The options that made these settings from others."""
        sizes = [(name, field) for name, field in FIELDS.items() if name != "match"]
        found = [f"--{name}" for name, field in sizes if getattr(self, field) != getattr(start, field)]
        return [*found, *(["--deconv"] if self.transposed and not start.transposed else [])]


@dataclass(frozen=True)
class Entry:
    """A descriptor or problem line as written, and the settings that it was met with."""

    text: str
    settings: Settings
    where: str = ""  # the batch file that it stands in

    @property
    def is_line(self) -> bool:
        """Whether the text is a problem line; else it is a descriptor."""
        return " " in self.text.strip()

    @property
    def matches(self) -> bool:
        """Whether --match finds it."""
        return not self.settings.match or re.search(self.settings.match, self.text) is not None

    def read(self) -> Problem | Descriptor:
        """What the text describes."""
        if self.is_line:
            return _line(self.text)
        try:
            return Descriptor.parse(self.text, transposed=bool(self.settings.transposed))
        except SpecError as error:
            error.message = f"{self.where}: {error.message}" if self.where else error.message
            raise

    @property
    def count(self) -> int:
        """How many problems it comes to."""
        s = self.settings
        return 1 if self.is_line else len(s.directions) * len(s.dtypes) * len(s.tags) * len(s.mb)

    @property
    def padding(self) -> str:
        """The padding on both sides, if the text has a size of the output that only uneven padding comes to."""
        with suppress(SpecError):
            return self.read().uneven
        return ""


def _line(text: str) -> Problem:
    """A problem line, or what to do with words that are a descriptor in pieces."""
    try:
        return Problem.parse(text)
    except SpecError:
        whole, found = "".join(text.split()), None
        with suppress(SpecError):
            found = Descriptor.parse(whole)
        if found is None:
            raise
        raise SpecError(f"a descriptor has no spaces: {whole}", argument=text) from None


def joined(texts: Sequence[str], place: int) -> str:
    """The descriptor that a word and its neighbours come to when they are one word, if they do."""
    for first in range(place, -1, -1):
        for last in range(len(texts), max(place, first + 1), -1):
            with suppress(SpecError):
                return str(Descriptor.parse("".join(texts[first:last])) and "".join(texts[first:last]))
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


def parse(line: Iterable[str], start: Settings, others: Iterable[str] = ()) -> list[Entry]:
    """The entries of a command line. `others` are further options of the command, to hint at."""
    return _read(words.hoisted(line, OPTIONS, ("batch",)), start, (), tuple(others))


def _read(line: Iterable[str], settings: Settings, batches: tuple[Path, ...], others: tuple[str, ...]) -> list[Entry]:
    """The entries of words, which begin with these settings and stand in the last of these batch files, if any."""
    where = batches[-1].name if batches else ""
    entries: list[Entry] = []
    for word in line:
        if not word.startswith("-"):
            entries.append(Entry(word, settings, where))
        elif not words.is_ignored(word, IGNORED) and not word.startswith("--attr-"):
            name, value = words.option_of(word, OPTIONS, others)
            if name == "batch":
                path, inner = words.opened(value, [Path()], batches)
                told = settings.transposed is not None or "deconv" not in path.parts
                first = settings if told else replace(settings, transposed=True)
                entries.extend(_read(inner, first, (*batches, path), others))
                continue
            with words.refusing(OPTIONS[name], value):
                settings = _with(settings, name, value)
    return entries


def _with(settings: Settings, name: str, value: str) -> Settings:
    """The settings after an option; a value that means nothing is a `ValueError`."""
    if name in ("conv", "deconv"):
        return replace(settings, transposed=name == "deconv")
    if name == "reset":
        return Settings(transposed=settings.transposed)
    if name == "match":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return replace(settings, match=value)
    found = each(value)
    if not found:
        raise ValueError("needs a value")
    if name == "dir":
        return replace(settings, directions=tuple(one_of(word, DIRECTIONS) for word in found))
    if name == "tag":
        return replace(settings, tags=tuple(one_of(word.lower(), TAGS) for word in found))
    if name == "mb":
        return replace(settings, mb=tuple(map(count_of, found)))
    return replace(settings, dtypes=tuple(map(_dtypes, found)))


def _dtypes(word: str) -> str:
    """One type, or three with colons between them."""
    parts = [one_of(part, (*DOCUMENTED, *EXTENDED_DTYPES)) for part in word.split(":")]
    if len(parts) not in (1, 3):
        raise ValueError(f"{word!r} is not of the form SRC:WEI:DST")
    return word


def tasks(entry: Entry) -> Iterator[Task]:
    """The problems of an entry, one for every combination of its settings."""
    found = entry.read()
    if isinstance(found, Problem):
        yield of_problem(found)
        return
    for combination in _combinations(entry, found):
        yield of_descriptor(*combination)


def attempts(entry: Entry, command: str, *options: str) -> Iterator[Task | Outcome]:
    """The same for a command: what is refused is an outcome, and what comes after it is tried all the same."""
    try:
        found = entry.read()
    except ConvgradError as error:
        deconv = ["--deconv"] if entry.settings.transposed else []
        yield Outcome(repeated(command, *deconv, entry.text), State.refused, f"{error} ({error.status})")
        return
    if isinstance(found, Problem):
        yield of_problem(found)
        return
    for combination in _combinations(entry, found):
        try:
            task = of_descriptor(*combination)
        except ConvgradError as error:
            line = repeated(command, *options, *_words(*combination))
            yield Outcome(line, State.refused, f"{error} ({error.status})", fields=_fields(*combination))
            continue
        yield task


def _combinations(entry: Entry, found: Descriptor) -> Iterator[tuple[Descriptor, str, str, str]]:
    """The descriptor of an entry in every direction, type and layout that was asked for."""
    settings = entry.settings
    if entry.matches:
        for dtype, tag, direction, mb in product(settings.dtypes, settings.tags, settings.directions, settings.mb):
            yield found.with_mb(mb), direction, dtype, tag


def of_problem(problem: Problem) -> Task:
    """A problem line. Its integers are those of the operation that it would be without a word about transposition."""
    fields = {"problem": str(problem)} | ({"padding": problem.uneven} if problem.uneven else {})
    return Task((str(problem),), of_line(problem).op, problem, fields=fields)


def of_descriptor(descriptor: Descriptor, direction: str, dtype: str, tag: str) -> Task:
    """The operation of a descriptor in one direction, type and layout."""
    types = dtype.split(":") * (3 if ":" not in dtype else 1)
    output = {"F": 2, "D": 0, "W": 1}[direction[0] if direction[0] == "F" else direction[4]]
    given = {t for i, t in enumerate(types) if i != output}
    if len(given) != 1:
        raise _mixed(direction, types, output)
    operation = descriptor.operation(direction, data_format=TAGS[tag], dtype=given.pop())
    attributes = dict(operation.attributes)
    if types[output] != operation.inputs[0].dtype:
        attributes["out_dtype"] = types[output]
    binding = bind(operation.op, operation.inputs, attributes)
    roles = [arg.role for arg in operation.op.inputs]
    shapes = {role: d.shape for role, d in zip(roles, operation.inputs, strict=False)}
    shapes[operation.op.wanted] = binding.shape
    line, fields = _words(descriptor, direction, dtype, tag), _fields(descriptor, direction, dtype, tag)
    return Task(line, operation.op, binding.problem, attributes, shapes, fields)


def _words(descriptor: Descriptor, direction: str, dtype: str, tag: str) -> tuple[str, ...]:
    """What comes after the command for one problem of a descriptor."""
    deconv = ["--deconv"] if descriptor.transposed else []
    return (*deconv, f"--dir={direction}", f"--dt={dtype}", f"--tag={tag}", str(descriptor))


def _fields(descriptor: Descriptor, direction: str, dtype: str, tag: str) -> dict[str, Any]:
    """The columns of one problem of a descriptor."""
    fields = {"problem": str(descriptor), "dir": direction, "dt": dtype, "tag": tag}
    return fields | ({"padding": descriptor.uneven} if descriptor.uneven else {})


def _mixed(direction: str, types: Sequence[str], output: int) -> SpecError:
    """The error for inputs of two types, with the words for the result of f32 that was probably meant."""
    names = [name for i, name in enumerate(("SRC", "WEI", "DST")) if i != output]
    narrow = [t for t in types if t in ("bf16", "f16")]
    meant = [*narrow[:1] * 3]
    hint = ""
    if narrow:
        meant[output] = "f32"
        hint = f"; for a result of f32 write {':'.join(meant)}"
    what = f"--dt={':'.join(types)}: both inputs of {direction}, {' and '.join(names)}, must have one type"
    return SpecError(what + hint, status="invalid_data_type")


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
