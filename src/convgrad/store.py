"""The store of compiled code on disk: a cache of object files, found by a hash, shared by one user's processes.

Machine code is loaded from here, so no file is trusted blindly. It counts only if its folder and the file itself belong
to this user, nobody else may write them, and a checksum over key and content is right. Any other file is treated as
missing, and is replaced when the code has been compiled again. The store never raises: if its folder cannot be used,
nothing is stored, and a user who named that folder is warned.

CONVGRAD_CACHE=off turns it off, CONVGRAD_CACHE_DIR moves it, CONVGRAD_CACHE_SIZE bounds it ("64M", "1G", bytes).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .memory import size_setting, warn_of_setting

# A file is MAGIC, the key (32 bytes), the SHA-256 of magic, key and content (32 bytes), then the content.
MAGIC = b"convgrad object 1\n"
KEY = 32
HEADER = len(MAGIC) + KEY + 32
LARGEST = 64 << 20
OURS = re.compile(r"[0-9a-f]{64}\.o")
TEMPORARY = re.compile(r"[0-9a-f]{16}\.tmp")
TALLY = re.compile(r"tally-[0-9]+")

DEFAULT_SIZE = 256 << 20
# The disk gives out space in blocks, which matters for files of a few kilobytes.
BLOCK = 4096

# A file's time is its last use to within an hour, so that most hits write nothing.
HOUR = 3600.0

# Windows has no owners in this sense, and keeps LOCALAPPDATA private by itself; it cannot open folders either.
POSIX = os.name == "posix"
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
COUNT = READ | os.O_WRONLY | os.O_CREAT | os.O_APPEND

NAMED = "CONVGRAD_CACHE_DIR"
ADVICE = (
    "Code is generated anew in every process; name a folder that you own and that others may not write to, or set "
    "CONVGRAD_CACHE=off"
)

_said: set[str] = set()


def get(key: bytes) -> bytes | None:
    """The content stored for the key, if it is there and can be trusted."""
    try:
        path = folder()
        if path is None:
            return None
        with _Folder(path) as place:
            return place.read(key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _say(f"cannot read the object cache: {_reason(error)}")
        return None


def put(key: bytes, content: bytes) -> None:
    """Store the content for the key, if that is possible.

    What could not be read is compiled and put, so it is enough to warn here.
    """
    path = None
    try:
        path, limit, size = folder(), _limit(), HEADER + len(content)
        if path is None or size > min(limit, LARGEST):
            return
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _Folder(path) as place:
            place.write(key, content)
            if place.grown(size, limit):
                place.trim(limit)
    except (OSError, ValueError) as error:
        reason = _reason(error, path)
        if os.environ.get(NAMED, ""):
            warn_of_setting(NAMED, f"cannot be used: {reason}. {ADVICE}")
        else:
            _say(f"cannot write the object cache: {reason}")


def folder() -> Path | None:
    """Where the files are, or None if the store is turned off or has no place."""
    word = os.environ.get("CONVGRAD_CACHE", "").strip().lower()
    if word in ("off", "0", "no", "false"):
        return None
    if word not in ("", "on", "1", "yes", "true"):
        warn_of_setting("CONVGRAD_CACHE", "must be on or off; the cache stays on")
    named = os.environ.get(NAMED, "")
    if named:
        return Path(os.path.abspath(os.path.expanduser(named)))
    if sys.platform == "win32":
        parent = os.environ.get("LOCALAPPDATA", "")
    elif sys.platform == "darwin":
        parent = os.path.expanduser("~/Library/Caches")
    else:
        # A relative XDG_CACHE_HOME is invalid and to be ignored, as its specification says.
        parent = os.environ.get("XDG_CACHE_HOME", "")
        parent = parent if os.path.isabs(parent) else os.path.expanduser("~/.cache")
    # Without a home "~" stays as it is.
    return Path(parent, "convgrad") if os.path.isabs(parent) else None


class _Folder:
    """An open folder that belongs to this user. Files are opened relative to it, so that nobody can swap the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd: int | None = None
        if POSIX:
            self.fd = os.open(path, READ | os.O_DIRECTORY)
            try:
                _check(os.fstat(self.fd), stat.S_ISDIR)
            except BaseException:
                os.close(self.fd)
                raise

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error: object) -> None:
        if self.fd is not None:
            os.close(self.fd)

    def read(self, key: bytes) -> bytes | None:
        """The content of the key's file. All checks are of the open file, and come before its bytes are used."""
        fd = self._open(key.hex() + ".o", READ)
        with open(fd, "rb", buffering=0) as file:
            facts = os.fstat(fd)
            _check(facts, stat.S_ISREG)
            if not HEADER <= facts.st_size <= LARGEST:
                return None
            data = file.read(facts.st_size)
            content = data[HEADER:]
            if len(data) != facts.st_size or data[:HEADER] != _header(key, content):
                return None
            if time.time() - facts.st_mtime > HOUR and os.utime in os.supports_fd:
                with suppress(OSError):  # Where nothing can be written, it may still be read.
                    os.utime(fd)
            return content

    def write(self, key: bytes, content: bytes) -> None:
        """Write the key's file in one step: a reader sees the old file, the new file or none, never a part of one."""
        temporary = os.urandom(8).hex() + ".tmp"
        fd = self._open(temporary, WRITE)
        try:
            with open(fd, "wb", buffering=0) as file:
                rest = memoryview(_header(key, content) + content)
                while rest:
                    rest = rest[file.write(rest) :]
            if self.fd is None:
                os.replace(self.path / temporary, self.path / (key.hex() + ".o"))
            else:
                os.replace(temporary, key.hex() + ".o", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self._remove(temporary)
            raise

    def grown(self, size: int, limit: int) -> bool:
        """Count what was stored, and say whether it is time to trim.

        Trimming looks at every file, which takes long if there are thousands. So it is due only when all processes
        together have stored another sixteenth of the limit. It frees an eighth, so the folder is always within the
        limit. The count is the length of a file, one byte for each block; the limit is in its name, so that a new limit
        begins with a trim.
        """
        blocks = -(-size // BLOCK)
        try:
            with open(self._open(f"tally-{limit}", COUNT), "ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                file.write(b"." * blocks)
                full = before == 0 or (before + blocks) * BLOCK > limit // 16
                if full:
                    file.truncate(1)
                return full
        except OSError:
            return True  # Nothing can be counted: trim every time.

    def trim(self, limit: int) -> None:
        """Remove files, those not used for the longest time first, until an eighth of the limit is free."""
        files = []
        with os.scandir(self.path if self.fd is None else self.fd) as entries:
            for entry in entries:
                if OURS.fullmatch(entry.name) or TEMPORARY.fullmatch(entry.name):
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # Another process trims too.
                    size = max(facts.st_size, getattr(facts, "st_blocks", 0) * 512)
                    files.append((facts.st_mtime, size, entry.name))
                elif TALLY.fullmatch(entry.name) and entry.name != f"tally-{limit}":
                    self._remove(entry.name)
        total = sum(size for _, size, _ in files)
        for used, size, name in sorted(files):
            # A temporary file this old was left behind by a process that died.
            abandoned = name.endswith(".tmp") and time.time() - used > HOUR
            if total > limit - limit // 8 or abandoned:
                self._remove(name)
                total -= size

    def _open(self, name: str, flags: int) -> int:
        if self.fd is None:
            return os.open(self.path / name, flags, 0o600)
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def _remove(self, name: str) -> None:
        try:
            if self.fd is None:
                os.unlink(self.path / name)
            else:
                os.unlink(name, dir_fd=self.fd)
        except OSError:
            pass  # It is gone already, or cannot be removed; it does no harm.


def _header(key: bytes, content: bytes) -> bytes:
    start = MAGIC + key
    return start + hashlib.sha256(start + content).digest()


def _check(facts: os.stat_result, kind: Callable[[int], bool]) -> None:
    """Refuse what is not of this kind, not this user's own, or open to changes by others."""
    if not kind(facts.st_mode):
        raise PermissionError(0, "it is not a plain file in a plain folder")
    if POSIX and facts.st_uid != os.geteuid():
        raise PermissionError(0, "it belongs to another user")
    if POSIX and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "others may write it")


def _limit() -> int:
    """The most bytes that the store may take."""
    return size_setting("CONVGRAD_CACHE_SIZE", DEFAULT_SIZE)


def _reason(error: Exception, path: Path | None = None) -> str:
    """Why the folder cannot be read or written, in a few words; of a path, whatever else than a folder it leads to."""
    with suppress(OSError, ValueError):
        if path is not None and path.is_symlink():
            return "it is a symbolic link, which could be turned elsewhere; name the folder that it leads to"
        if path is not None and path.exists() and not path.is_dir():
            return "it is not a folder"
    return getattr(error, "strerror", None) or str(error)


def _say(text: str) -> None:
    """Log one line for a user who wonders why nothing is cached; the same problem is logged once."""
    if text not in _said:
        import logging  # Imported here, because it takes time and most processes have nothing to log.

        _said.add(text)
        logging.getLogger(__name__).debug(text)
