"""The grammar of benchdnn's graph driver: words become settings, settings become cases. `rewrite` does what they ask.

    --reset --in-shapes=0:1x14x14x128 --op-attrs=0:data_format:NXC*dst_shape:1x28x28x32 --dt=f32,bf16 --case=FILE

Options before a `--case` apply to it, and those at the end of a command line to all of it. Commas make alternatives,
and the alternatives of all options are multiplied; an empty one means "as in the file".
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..graph.kinds import DataType, FpMathMode
from ..spec.table import DTYPES, SAME_RULES
from . import words
from .words import Option, UsageError, count_of, each, one_of

MODES = {
    "L": "list the cases",
    "I": "compile them",
    "R": "run them",
    "C": "compare the results with the right ones",
    "B": "run them twice and compare the bits",
    "P": "time them",
    "F": "time them quickly",
}
Map = Mapping[int, str]

OPTIONS = words.by_name(
    Option("case", "FILE", "run the graph in a file, with the options so far"),
    Option("in-shapes", "ID:SHAPE[*STRIDES][+...]", "other shapes: 0:1x14x14x128, 0:8x3x5x5*acdb, 0:*acdb", True),
    Option("op-attrs", "ID:NAME:VALUE[*NAME:VALUE][+...]", "other attributes: 0:strides:2x2*groups:4", True),
    Option("dt", "TYPE or ID:TYPE[+...]", "another element type for all tensors, or for some", True),
    Option("mb", "N", "another batch size; 0 keeps it", True),
    Option("expected-n-partitions", "N", "how many partitions there must be; 0 for any number", True),
    Option("attr-fpmath", "MODE[:true|false]", "another mode of floating-point arithmetic", True),
    Option("op-kind", "ID:KIND[+...]", "another operation; for binary and eltwise operations only", True),
    Option("tensor-property", "ID:PROPERTY[+...]", "another property of tensors", True),
    Option("mode", "LETTERS", ", ".join(f"{k}: {v}" for k, v in MODES.items())),
    Option("batch", "FILE", "read words from a file; # begins a comment"),
    Option("engine", "KIND", "cpu"),
    Option("same-rule", "RULE", "the rule of SAME padding: " + ", ".join(SAME_RULES)),
    Option("strict", "", "refuse what oneDNN refuses"),
    Option("reset", "", "forget the options so far, except mode and engine"),
)
IGNORED = words.IGNORED | {"graph"}
MULTIPLIED = ("in_shapes", "op_attrs", "partitions", "fpmath", "op_kind", "dt", "mb", "tensor_property")
"""The settings that have alternatives, in the order in which benchdnn multiplies them."""


@dataclass(frozen=True)
class Settings:
    """What the words so far have set: for each option its alternatives."""

    in_shapes: tuple[Map, ...] = ({},)
    op_attrs: tuple[Map, ...] = ({},)
    dt: tuple[Any, ...] = ("",)  # a type for all, or a map
    mb: tuple[int, ...] = (0,)
    partitions: tuple[int | None, ...] = (None,)
    fpmath: tuple[str, ...] = ("",)
    op_kind: tuple[Map, ...] = ({},)
    tensor_property: tuple[Map, ...] = ({},)
    mode: str = "C"
    strict: bool = False
    same_rule: str = "gradient"

    def cases(self, path: Path, name: str, listed: bool) -> Iterator[Case]:
        """One case for every combination, in benchdnn's order."""
        for values in product(*(getattr(self, name) for name in MULTIPLIED)):
            changes = dict(zip(MULTIPLIED, values, strict=True))
            changes |= {"mode": self.mode, "strict": self.strict, "same_rule": self.same_rule}
            yield Case(path, name, **changes, listed=listed)


@dataclass(frozen=True)
class Case:
    """A file and what to change in it."""

    path: Path
    name: str
    in_shapes: Map = field(default_factory=dict)
    op_attrs: Map = field(default_factory=dict)
    dt: Any = ""
    mb: int = 0
    partitions: int | None = None  # one for a single operation, else any number
    fpmath: str = ""
    op_kind: Map = field(default_factory=dict)
    tensor_property: Map = field(default_factory=dict)
    mode: str = "C"
    strict: bool = False
    same_rule: str = "gradient"
    listed: bool = field(default=False, compare=False)  # in a batch file; else it was named on the command line

    @property
    def line(self) -> str:
        """The words that repeat this case."""
        by_id = {"in-shapes": self.in_shapes, "op-attrs": self.op_attrs, "op-kind": self.op_kind}
        by_id |= {"tensor-property": self.tensor_property}
        options = {
            "mode": self.mode if self.mode != "C" else "",
            "dt": self.dt if isinstance(self.dt, str) else _joined(self.dt),
            **{name: _joined(values) for name, values in by_id.items()},
            "mb": str(self.mb or ""),
            "attr-fpmath": self.fpmath,
            "expected-n-partitions": "" if self.partitions is None else str(self.partitions),
            "same-rule": self.same_rule if self.same_rule != "gradient" else "",
        }
        told = [f"--{name}={value}" for name, value in options.items() if value]
        strict = ["--strict"] if self.strict else []
        return shlex.join(["convgrad", "run", *told, *strict, f"--case={self.name}"])

    @property
    def rewrites(self) -> bool:
        """Whether shapes or types change, so that outputs must be inferred anew."""
        return bool(self.in_shapes or self.op_attrs or self.mb)


def _joined(values: Map) -> str:
    return "+".join(f"{key}:{value}" for key, value in values.items())


# ---- words


def parse(line: Iterable[str], others: Iterable[str] = (), folders: tuple[Path, ...] = (Path(),)) -> list[Case]:
    """The cases of a command line. `others` are further options of the command, to hint at."""
    reader = _Reader(folders, tuple(others))
    reader.read(words.hoisted(line, OPTIONS, ("case", "batch")))
    return reader.cases


class _Reader:
    """Settings as they change from word to word, and the cases so far."""

    def __init__(self, folders: tuple[Path, ...], others: tuple[str, ...]) -> None:
        self.settings = Settings()
        self.cases: list[Case] = []
        self.folders = folders
        self.others = others
        self.open: list[Path] = []  # batch files that are being read

    def read(self, line: Iterable[str]) -> None:
        """Take words one by one."""
        for word in line:
            if not word.startswith("-"):
                self.case(word)
            elif not words.is_ignored(word, IGNORED):
                name, value = words.option_of(word, OPTIONS, self.others)
                with words.refusing(OPTIONS[name], value):
                    self.take(name, value)

    def take(self, name: str, value: str) -> None:
        """Take one option."""
        if name == "case":
            self.case(value)
        elif name == "batch":
            self.batch(value)
        elif name == "reset":
            self.settings = Settings(mode=self.settings.mode)
        else:
            self.settings = replace(self.settings, **_setting(name, value, self.settings))

    def case(self, name: str) -> None:
        """Add the cases of a file. One that is not there is a case too: it will fail."""
        path = words.located(name, self.folders, self.open)
        self.cases.extend(self.settings.cases(path, name, listed=bool(self.open)))

    def batch(self, name: str) -> None:
        """Read the words of a file."""
        path, line = words.opened(name, self.folders, self.open)
        self.open.append(path)
        try:
            self.read(line)
        except UsageError as error:
            raise UsageError(f"{path.name}: {error}") from None
        self.open.pop()


def _setting(name: str, value: str, before: Settings) -> dict[str, Any]:
    """What an option sets; a value that means nothing is a `ValueError`."""
    if name == "mode":
        wrong = set(value.upper()) - set(MODES)
        if wrong or not value:
            raise ValueError(f"{''.join(sorted(wrong))!r} is not a mode; there are {', '.join(MODES)}")
        return {"mode": value.upper()}
    if name == "engine":
        if value.partition(":")[0] != "cpu":
            raise ValueError("graphs compute on cpu")
        return {}
    if name == "strict":
        return {"strict": True}
    if name == "same-rule":
        return {"same_rule": one_of(value, SAME_RULES)}
    if name == "dt":
        return {"dt": _types(value, before.dt)}
    if name == "mb":
        return {"mb": tuple(map(count_of, each(value))) or (0,)}
    if name == "expected-n-partitions":
        return {"partitions": tuple(map(count_of, each(value))) or (None,)}
    if name == "attr-fpmath":
        return {"fpmath": tuple(map(_fpmath, each(value))) or ("",)}
    return {name.replace("-", "_"): tuple(map(_map, value.split(",")))}


def _fpmath(word: str) -> str:
    mode, colon, flag = word.partition(":")
    if mode not in [str(m) for m in FpMathMode]:
        raise ValueError(f"{mode!r} is not a mode; there are {', '.join(map(str, FpMathMode))}")
    if colon and flag not in ("true", "false"):
        raise ValueError(f"{flag!r} is neither true nor false")
    return word


def _types(value: str, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Types for all tensors, or maps for some; one line cannot have both."""
    by_id = ":" in value
    if before != ("",) and by_id != any(isinstance(b, Mapping) for b in before):
        raise ValueError("types for all tensors and types by id cannot be mixed; put --reset between them")
    if by_id:
        maps = tuple(map(_map, value.split(",")))
        for word in (w for m in maps for w in m.values()):
            DataType.of(word, "--dt")
        return maps
    return tuple("" if word in ("", "undef") else one_of(word, DTYPES) for word in value.split(","))


def _map(text: str) -> Map:
    """ID:VALUE[+ID:VALUE], or nothing."""
    found: dict[int, str] = {}
    for entry in filter(None, text.split("+")):
        key, colon, value = entry.partition(":")
        if not colon or not value:
            raise ValueError(f"{entry!r} has no value after a colon")
        id = count_of(key)
        if id in found:
            raise ValueError(f"{id} is there twice")
        found[id] = value
    return found
