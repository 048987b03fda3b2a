"""What problems came to, kept on disk beside their code: a process that finds its problem here needs no planner, no IR
and no LLVM.

A note counts for the very sources that wrote it, which are part of its key. A process whose sources have changed since
it began does not know by which of them it works, and keeps no notes.
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import sha256

from ...spec.problem import Problem
from .. import BEGUN
from ..target import Target
from . import cache, jit

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# What a plan and its code are made by, besides the files of this folder and of all folders beside it.
OTHERS = ("dtypes.py", "spec/problem.py", "spec/table.py")


# The key of a kernel's code, its workspace in bytes and its threads; or the reason why there is no kernel.
Note = tuple[bytes, int, int] | str


def recall(problem: Problem, target: Target, team: int) -> Note | None:
    """The note on a problem, if one was kept."""
    key = _key(problem, target, team)
    content = None if key is None else cache.get(key)
    if content is None:
        return None
    text = content.decode()
    if text.startswith("no: "):
        return text.removeprefix("no: ")
    code, workspace, threads = text.split()
    return bytes.fromhex(code), int(workspace), int(threads)


def keep(problem: Problem, target: Target, team: int, note: Note) -> None:
    """Keep a note for later processes."""
    key = _key(problem, target, team)
    if key is not None and not _changed():
        text = f"no: {note}" if isinstance(note, str) else f"{note[0].hex()} {note[1]} {note[2]}"
        cache.put(key, text.encode())


def _key(problem: Problem, target: Target, team: int) -> bytes | None:
    sources = None if cache.folder() is None else _digest()
    if sources is None:
        return None
    return jit.digest("note", jit.build(), sources, repr(problem), repr(target), str(team))


@lru_cache(maxsize=1)
def _digest() -> str | None:
    """The digest of the sources; None where there are none to read, or none that can be relied on."""
    total = sha256()
    try:
        for path in _sources():
            # Calls of the system and nothing else: all files together are a part of what a first call waits for.
            file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            try:
                facts = os.fstat(file)
                content = os.read(file, facts.st_size + 1)
            finally:
                os.close(file)
            if _new(facts) or len(content) != facts.st_size:
                return None
            total.update(f"{path.removeprefix(PACKAGE)} {len(content)}\n".encode() + content)
    except OSError:
        return None
    return total.hexdigest()


def _changed() -> bool:
    """Whether a source may be newer than what this process has imported of it."""
    try:
        return any(_new(os.stat(path)) for path in _sources())
    except OSError:
        return True


def _new(facts: os.stat_result) -> bool:
    # A file may come with an old time of its content, but not of its place. Times are coarse, and some files are read
    # before this package.
    return max(facts.st_mtime, facts.st_ctime) >= BEGUN - 2


@lru_cache(maxsize=1)
def _sources() -> list[str]:
    found = [os.path.join(PACKAGE, name) for name in OTHERS]
    folders = [os.path.join(PACKAGE, "cpu")]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    found.append(entry.path)
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return sorted(found)
