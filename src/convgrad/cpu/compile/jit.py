"""From IR text to machine code that can be called. Code that any process has compiled before is loaded without LLVM.

The key of a module is a hash of its text, the target, the build of LLVM and `PIPELINE`. Code with the same key is
loaded once in a process, and compiled once on a machine for as long as `store` keeps it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from collections import deque
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import store
from ...errors import CompileError
from . import elf

# Part of every key. Raise it when the passes or the options in `llvm` change, or what an object file here means.
PIPELINE = 1
# A library of llvmlite larger than this contains LLVM. A smaller one uses LLVM from a library of its own, which may be
# replaced without a change of llvmlite.
WHOLE = 16 << 20

# Every use of LLVM happens under this lock, so that a fork can wait until no thread is inside LLVM. It is reentrant
# because the handlers around a fork run in a thread that may hold it.
_lock = threading.RLock()
_loaded: weakref.WeakValueDictionary[bytes, Module] = weakref.WeakValueDictionary()
# Code whose Module is gone, to be unloaded later. A finalizer may run anywhere, even inside LLVM, so it only puts the
# code here.
_dead: deque[Any] = deque()
_kept: list[Module] = []


class Module:
    """Code in memory; its functions may be called for as long as this object lives."""

    __slots__ = ("__weakref__", "_code", "_found", "key")

    def __init__(self, key: bytes, code: Any) -> None:
        self.key = key
        self._code = code
        self._found: dict[str, int] = {}

    def address(self, name: str) -> int:
        """The address of a function."""
        found = self._found.get(name)
        if found is None:
            with _lock:
                found = self._found[name] = self._code.address(name)
        return found

    def keep(self) -> None:
        """Never unload this code."""
        _kept.append(self)

    def __del__(self, dead: deque[Any] = _dead) -> None:
        # At interpreter exit nothing is unmapped: another thread may still be running this code.
        dead.append(self._code)


@lru_cache(maxsize=1)
def host() -> tuple[str, str, str]:
    """The triple, the CPU's name and the features of this machine, as LLVM spells them."""
    with _lock:
        facts = _processor()
        key = digest("host", llvm_build(), facts) if facts else None
        known = store.get(key) if key else None
        if known is not None:
            triple, cpu, features = known.decode().split("\n")
            return triple, cpu, features
        from . import llvm

        found = llvm.host()
        if key:
            store.put(key, "\n".join(found).encode())
        return found


def load(ir: str, triple: str, cpu: str, features: str) -> Module:
    """Machine code for the IR, ready to be called: from memory, from disk, or compiled now."""
    key = digest(llvm_build(), triple, cpu, features, ir)
    with _lock:
        if _arch(triple) != _arch(host()[0]):
            raise CompileError(f"code for {triple} cannot be loaded on {host()[0]}")
        module = stored(key)
        if module is None:
            content = _compile(ir, triple, cpu, features)
            store.put(key, content)
            module = _placed(key, content)
        return module


def stored(key: bytes) -> Module | None:
    """The code of a key if it was compiled before: from memory or from disk."""
    with _lock:
        module = _loaded.get(key)
        if module is None:
            content = store.get(key)
            module = None if content is None else _placed(key, content)
        return module


def assemble(ir: str, triple: str, cpu: str, features: str) -> str:
    """Assembly text for any target that LLVM knows; nothing is loaded."""
    from . import llvm

    with _lock:
        return llvm.emit_assembly(ir, triple, cpu, features)


def digest(*parts: str) -> bytes:
    """The key of some parts: their hash. Each part comes after its length, so that ("ab", "c") is not ("a", "bc")."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.digest()


def _compile(ir: str, triple: str, cpu: str, features: str) -> bytes:
    from . import llvm

    return llvm.emit_object(ir, triple, cpu, features)


def _placed(key: bytes, content: bytes) -> Module:
    """Load an object file, and note its module under the key."""
    while _dead:
        _dead.popleft().close()
    module = _loaded[key] = Module(key, _code(content))
    return module


def _code(content: bytes) -> Any:
    """Load an object file, with our own loader if it can: LLVM takes 60 ms only to be imported (see elf.py)."""
    if sys.platform == "linux":
        try:
            return elf.Image(content)
        except elf.Unknown:
            pass
    from . import llvm

    return llvm.Engine(content)


@lru_cache(maxsize=1)
def llvm_build() -> str:
    """What tells one build of LLVM from another, found without importing it."""
    spec = find_spec("llvmlite")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    try:
        if folder is not None:
            library = next(f for f in folder.joinpath("binding").iterdir() if f.stem in ("libllvmlite", "llvmlite"))
            version, size = folder.joinpath("_version.py").read_text(), library.stat().st_size
            if size > WHOLE:
                return f"{PIPELINE} {os.name} {version} {size}"
    except (OSError, StopIteration):
        pass  # llvmlite is packaged in some other way.
    from . import llvm

    return f"{PIPELINE} {os.name} {llvm.version()}"


def _processor() -> str:
    """What the system says of this processor; nothing if that is too little to recognise it later."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    try:
        # One read is enough: the file describes every processor, and the system takes some time for each.
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(8192).decode(errors="replace")
    except OSError:
        return ""
    first = dict(line.split("\t", 1) for line in text.split("\n\n")[0].splitlines() if "\t" in line)
    # The release counts, because an older system may not know all features of the processor.
    return "\n".join([os.uname().release, *(first[n].strip() for n in wanted)]) if set(wanted) <= set(first) else ""


def _arch(triple: str) -> str:
    arch = triple.split("-", 1)[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)


if hasattr(os, "register_at_fork"):
    # A child of a fork has only the thread that forked. If another were inside LLVM then, its locks would stay taken.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
