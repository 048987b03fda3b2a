"""What earlier processes found for a problem: a note on disk says which code it has, so that a process which finds the
note needs no planner, no IR and no LLVM (a warm start).

The key of a note contains a digest of the sources that plan and write code, so a note is used only by the very same
sources. If a source file changes while a process runs, that process cannot know which version it has imported, and
writes no notes.
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import sha256

from ... import store
from ...backend import Refusal
from ...spec.problem import Problem
from .. import BEGUN
from ..target import Target
from . import jit

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# Plans and code depend on every file below cpu/, and on these. A test compares them with what is imported there.
OTHERS = ("dtypes.py", "spec/problem.py", "spec/table.py")

Note = tuple[bytes, int, int] | Refusal
"""The key of a kernel's code, its workspace in bytes and its threads; or why there is no kernel."""


def recall(problem: Problem, target: Target, num_threads: int) -> Note | None:
    """The note on a problem, if there is one."""
    key = _key(problem, target, num_threads)
    content = None if key is None else store.get(key)
    if content is None:
        return None
    text = content.decode()
    if text.startswith("no\n"):
        return Refusal(*text.split("\n")[1:])
    code, workspace, threads = text.split()
    return bytes.fromhex(code), int(workspace), int(threads)


def keep(problem: Problem, target: Target, num_threads: int, note: Note) -> None:
    """Write a note for later processes."""
    key = _key(problem, target, num_threads)
    if key is not None and not _changed():
        text = "\n".join(("no", *note)) if isinstance(note, Refusal) else f"{note[0].hex()} {note[1]} {note[2]}"
        store.put(key, text.encode())


def _key(problem: Problem, target: Target, num_threads: int) -> bytes | None:
    sources = None if store.folder() is None else _digest()
    if sources is None:
        return None
    return jit.digest("note", jit.llvm_build(), sources, repr(problem), repr(target), str(num_threads))


@lru_cache(maxsize=1)
def _digest() -> str | None:
    """The digest of the sources; None if they cannot be read, or may differ from what this process has imported."""
    total = sha256()
    try:
        for path in _sources():
            # Plain system calls, because a first call waits until all files have been read.
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
    """Whether a source may have changed after this process imported it."""
    try:
        return any(_new(os.stat(path)) for path in _sources())
    except OSError:
        return True


def _new(facts: os.stat_result) -> bool:
    # A file that was copied may keep an old mtime, but its ctime is new. Two seconds are for coarse clocks, and for
    # files that were imported before this package.
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
