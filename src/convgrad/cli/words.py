"""How words are read, whichever grammar they belong to: options with their values, and batch files.

Options apply to what follows them. At the end of a command line they would apply to nothing, and people put them there:
so they apply to all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..spec.check import meant
from ..spec.table import SPELLINGS

_IGNORED = """
    allow-enum-tags-only attr-scratchpad canonical cold-cache cpu-isa-hints ctx-exe ctx-init execution-mode fast-ref
    fix-times-per-prb global-impl impl max-ms-per-prb mem-check memory-kind mode-modifier num-streams perf-template
    repeats-per-prb skip-impl start stream-kind summary test-start verbose
"""
IGNORED = frozenset(_IGNORED.split())
"""Options of every driver of benchdnn that are understood and have no effect here."""


class UsageError(Exception):
    """Words that mean nothing; the exit code is 2."""


@dataclass(frozen=True)
class Option:
    """An option: its name, the form of its value, or none for a flag, and its help."""

    name: str
    form: str
    text: str
    multiple: bool = False  # takes alternatives, with commas between them


Options = Mapping[str, Option]


def by_name(*options: Option) -> dict[str, Option]:
    """Options in the order of the help."""
    return {option.name: option for option in options}


def hoisted(words: Iterable[str], options: Options, inputs: Iterable[str]) -> list[str]:
    """The words, each option in one with its value, and the options after the last input moved to the front.

    Inputs are words that are no options, and the options named here.
    """
    whole = joined(words, options)
    starts = tuple(f"--{name}=" for name in inputs)
    last = max((i for i, word in enumerate(whole) if not word.startswith("-") or word.startswith(starts)), default=-1)
    return whole[last + 1 :] + whole[: last + 1]


def joined(words: Iterable[str], options: Options) -> list[str]:
    """The words, each of these options in one with its value: `--dt f32` becomes `--dt=f32`."""
    names = [f"--{option.name}" for option in options.values() if option.form]
    whole: list[str] = []
    waiting = iter(words)
    for word in waiting:
        value = next(waiting, None) if word in names else None
        whole.append(word if value is None else f"{word}={value}")
    return whole


def split(words: Iterable[str], options: Options) -> tuple[dict[str, str], list[str]]:
    """What a command line says to these options, by their names, and all its other words in their order.

    A flag has the value `true`, and `-v1`, which every command takes, is `verbose`.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    for word in joined(words, options):
        if re.fullmatch(r"-v\d*", word):
            own["verbose"] = word.removeprefix("-v") or "1"
        elif word.startswith("--") and word[2:].partition("=")[0] in options:
            name, value = option_of(word, options)
            own[name] = value
        else:
            rest.append(word)
    return own, rest


def option_of(word: str, options: Options, others: Iterable[str] = ()) -> tuple[str, str]:
    """The name and the value of an option. `others` are further names that the command knows, to hint at."""
    name, equals, value = word.removeprefix("--").partition("=")
    if name not in options:
        known = [*others, *options]
        hint = meant(name, known).replace("'", "'--", 1) or f"there are {', '.join(f'--{o}' for o in known)}"
        if name == "threads":
            hint = "set the environment variable CONVGRAD_NUM_THREADS"
        raise UsageError(f"there is no option {word!r}; {hint}")
    form = options[name].form
    if form and not equals:
        raise UsageError(f"--{name} needs a value: --{name}={form}")
    if equals and not form:
        raise UsageError(f"{word!r}: --{name} takes no value")
    return name, value if form else "true"


def is_ignored(word: str, names: Iterable[str]) -> bool:
    """Whether a word is one of these options, or asks for words about progress, as `-v5` does in a batch file."""
    return word.removeprefix("--").partition("=")[0] in names or re.fullmatch(r"-v\d*", word) is not None


@contextmanager
def refusing(option: Option, value: str) -> Iterator[None]:
    """Tell of a value that means nothing, a `ValueError`, with its option and the form that it should have."""
    try:
        yield
    except ValueError as error:
        form = f"--{option.name}={option.form}"
        raise UsageError(f"--{option.name}={value}: {error}; the form is {form}") from None


# ---- values


def each(value: str) -> list[str]:
    """Alternatives, which have commas between them."""
    return [word for word in value.split(",") if word]


def count_of(word: str) -> int:
    """A number from 0."""
    if not word.isdecimal() or len(word) > 18:
        raise ValueError(f"{word!r} is not a number from 0")
    return int(word)


def one_of(word: str, choices: Iterable[str]) -> str:
    """A word of a list."""
    if word not in choices:
        ours = SPELLINGS.get(word.lower(), word).lower()
        hint = next((f"; {word!r} is {choice!r} here" for choice in choices if choice.lower() == ours), "")
        raise ValueError(f"{word!r} must be one of {', '.join(choices)}{hint}")
    return word


# ---- batch files


def located(name: str, folders: Iterable[Path], batches: Sequence[Path]) -> Path:
    """A file by its name, from given folders, or from the folders above the batch files that are being read."""
    around = (folder for batch in reversed(batches) for folder in batch.parents)
    for folder in (*folders, *around):
        if (folder / name).exists():
            return folder / name
    return Path(name)


def opened(name: str, folders: Iterable[Path], batches: Sequence[Path]) -> tuple[Path, list[str]]:
    """The path and the words of a batch file."""
    if name.endswith(".json"):
        raise UsageError(f"--batch={name}: a graph file is not a list of words; give its name alone to `convgrad run`")
    try:
        path = located(name, folders, batches).resolve()
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # The latter for a text, or a name, that no file can have.
        raise UsageError(f"--batch={name}: {getattr(error, 'strerror', None) or error}") from None
    if path in batches:
        raise UsageError(f"--batch={name}: the file includes itself")
    return path, words_of(text)


def words_of(text: str) -> list[str]:
    """The words of a batch file; one that begins with # makes the rest of its line a comment."""
    words = []
    for line in text.splitlines():
        for word in line.split():
            if word.startswith("#"):
                break
            words.append(word)
    return words
