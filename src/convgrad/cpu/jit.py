"""From IR text to machine code that can be called: the only door to LLVM.

A module is known by its content: the text, the target, the versions of llvmlite and LLVM, and `PIPELINE`. The same
content is loaded once in a process, and compiled once on a machine as long as the cache on disk keeps it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from collections import deque
from functools import lru_cache
from itertools import count
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from ..errors import CompileError
from . import cache

# Part of every key: raise it when the passes, the options or the meaning of an object file here change.
PIPELINE = 1

# Every use of LLVM happens under this lock, so that a fork can wait until no thread is inside LLVM. It is reentrant
# because the handlers around a fork run in a thread that may hold it.
_lock = threading.RLock()
_loaded: weakref.WeakValueDictionary[bytes, Module] = weakref.WeakValueDictionary()
# Code whose Module is gone. A finalizer may run anywhere, even inside LLVM, so it only leaves its code here.
_dead: deque[Any] = deque()
_kept: list[Module] = []
_serial = count()


class Module:
    """Code in memory; its functions may be called for as long as this object lives."""

    __slots__ = ("__weakref__", "_code", "_found")

    def __init__(self, code: Any) -> None:
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
        try:
            features = llvm.get_host_cpu_features().flatten()
        except RuntimeError:
            features = ""  # LLVM cannot tell on some systems; the CPU's name then says what it can.
        return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


def load(ir: str, triple: str, cpu: str, features: str) -> Module:
    """Machine code for the IR, ready to be called: from memory, from disk, or compiled now."""
    key = _key(ir, triple, cpu, features)
    module = _loaded.get(key)
    if module is not None:
        return module
    with _lock:
        module = _loaded.get(key)
        if module is not None:
            return module
        if _arch(triple) != _arch(host()[0]):
            raise CompileError(f"code for {triple} cannot be loaded on {host()[0]}")
        _start()
        while _dead:
            _dead.popleft().close()
        content = cache.get(key)
        if content is None:
            content = _compile(ir, triple, cpu, features)
            cache.put(key, content)
        module = Module(_loader()(content))
        _loaded[key] = module
        return module


def assemble(ir: str, triple: str, cpu: str, features: str) -> str:
    """Assembly text for any target that LLVM knows; nothing is loaded."""
    with _lock:
        _start_all()
        machine = _machine(triple, cpu, features, jit=False)
        module = _optimized(ir, triple, machine)
        try:
            return str(machine.emit_assembly(module))
        except RuntimeError as error:
            raise CompileError(_first_lines("LLVM cannot emit assembly", error)) from None
        finally:
            module.close()
            machine.close()


def _key(ir: str, triple: str, cpu: str, features: str) -> bytes:
    """The content's digest. Each part is preceded by its length, so that no two contents run together."""
    digest = hashlib.sha256()
    for part in (_versions(), triple, cpu, features, ir):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


@lru_cache(maxsize=1)
def _versions() -> str:
    return f"{PIPELINE} {llvmlite.__version__} {llvm.llvm_version_info} {os.name}"


def _arch(triple: str) -> str:
    arch = triple.split("-", 1)[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)


@lru_cache(maxsize=1)
def _start() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=1)
def _start_all() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _machine(triple: str, cpu: str, features: str, *, jit: bool) -> Any:
    """A target machine; code to be loaded may lie far from what it calls, so it gets the large model."""
    try:
        target = llvm.Target.from_triple(triple)
        model = "jitdefault" if jit else "default"
        return target.create_target_machine(cpu=cpu, features=features, opt=2, codemodel=model, jit=jit)
    except RuntimeError as error:
        raise CompileError(_first_lines(f"LLVM has no target {triple!r}", error)) from None


def _optimized(ir: str, triple: str, machine: Any) -> Any:
    """The parsed module after the few passes that kernels need.

    Generated code is already scheduled and vectorized; what asks to be inlined must be, accumulators in memory must
    become registers (SROA) and chains of blocks be joined. A full pipeline takes more than twice the time and gives no
    faster code.
    """
    # A context of its own: names of types and constants of one kernel are not kept for the next.
    context = llvm.create_context()
    try:
        module = llvm.parse_assembly(ir, context)
    except RuntimeError as error:
        raise CompileError(_first_lines("LLVM cannot read the generated code", error)) from None
    try:
        module.triple = triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        module.close()
        raise CompileError(_first_lines("LLVM refuses the generated code", error)) from None
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
    for part in (passes, builder, options):
        part.close()
    return module


def _compile(ir: str, triple: str, cpu: str, features: str) -> bytes:
    """The object file of the IR."""
    machine = _machine(triple, cpu, features, jit=True)
    module = _optimized(ir, triple, machine)
    try:
        return bytes(machine.emit_object(module))
    except RuntimeError as error:
        raise CompileError(_first_lines("LLVM cannot compile the generated code", error)) from None
    finally:
        module.close()
        machine.close()


def _first_lines(what: str, error: Exception, lines: int = 4) -> str:
    text = [line for line in str(error).strip().splitlines() if line.strip()]
    return ": ".join((what, "\n".join(text[:lines])))


class _Linked:
    """Code loaded by ORC, which takes a fifth of MCJIT's time for one object and reports missing symbols."""

    def __init__(self, content: bytes) -> None:
        self._name = f"convgrad{next(_serial)}"
        library = llvm.JITLibraryBuilder().add_object_img(content).add_current_process()
        try:
            self._trackers = [library.link(_orc(), self._name)]
        except RuntimeError as error:
            raise CompileError(_first_lines("LLVM cannot load the compiled code", error)) from None

    def address(self, name: str) -> int:
        try:
            tracker = _orc().lookup(self._name, name)
        except RuntimeError as error:
            raise CompileError(_first_lines(f"LLVM finds no {name!r} in the compiled code", error)) from None
        self._trackers.append(tracker)
        return int(tracker[name])

    def close(self) -> None:
        while self._trackers:
            self._trackers.pop().close()


class _Engine:
    """Code loaded by MCJIT, the way that llvmlite supports everywhere."""

    def __init__(self, content: bytes) -> None:
        # The engine owns its target machine, and wants a module even where all code comes from an object file.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(*host(), jit=True))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(content))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        found = int(self._engine.get_function_address(name))
        if not found:
            raise CompileError(f"LLVM finds no {name!r} in the compiled code")
        return found

    def close(self) -> None:
        self._engine.close()


@lru_cache(maxsize=1)
def _orc() -> Any:
    return llvm.create_lljit_compiler(_machine(*host(), jit=True), suppress_errors=True)


@lru_cache(maxsize=1)
def _loader() -> type[_Linked] | type[_Engine]:
    """How code is loaded here: ORC where it is known to work, MCJIT elsewhere."""
    known = sys.platform == "linux" and _arch(host()[0]) == "x86_64" and hasattr(llvm, "create_lljit_compiler")
    return _Linked if known else _Engine


if hasattr(os, "register_at_fork"):
    # A child of a fork has only the forking thread: no other may be inside LLVM then, or its locks stay taken.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
