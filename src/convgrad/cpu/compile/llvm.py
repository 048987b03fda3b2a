"""LLVM through llvmlite: what it knows of this machine, the way from IR text to object files and assembly, its loader.

Only `jit` calls it, under a lock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from ...errors import CompileError

LEVEL = 2  # of 3: how much time is taken to choose instructions and registers


def version() -> str:
    """The versions of llvmlite and LLVM."""
    return f"{llvmlite.__version__} {llvm.llvm_version_info}"


def host() -> tuple[str, str, str]:
    """The triple, the CPU's name and the features of this machine, as LLVM spells them."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:
        features = ""  # LLVM cannot tell on some systems; then the CPU's name has to do.
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


def emit_object(ir: str, triple: str, cpu: str, features: str) -> bytes:
    """The object file of the IR, for this kind of machine."""
    _start()
    return bytes(_emit("object", ir, triple, cpu, features))


def emit_assembly(ir: str, triple: str, cpu: str, features: str) -> str:
    """Assembly text for any target that LLVM knows."""
    _start_all()
    return str(_emit("assembly", ir, triple, cpu, features))


def _emit(form: str, ir: str, triple: str, cpu: str, features: str) -> Any:
    """The IR as an object file, for the machine to run, or as assembly, for a person to read."""
    machine = _machine(triple, cpu, features, jit=form == "object")
    module = _optimized(ir, triple, machine)
    try:
        return machine.emit_object(module) if form == "object" else machine.emit_assembly(module)
    except RuntimeError as error:
        raise CompileError(_first_lines(f"LLVM cannot write {form} code", error)) from None
    finally:
        module.close()
        machine.close()


class Engine:
    """An object file loaded by LLVM, on any system. If it calls a function that does not exist, the process ends."""

    def __init__(self, content: bytes) -> None:
        _start()
        # The engine owns its target machine, and needs a module even though all code comes from an object file.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(*host(), jit=True))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(content))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        found = int(self._engine.get_function_address(name))
        if not found:
            raise CompileError(f"there is no {name!r} in the compiled code")
        return found

    def close(self) -> None:
        """Unload the code. The caller makes sure that nothing runs in it any more."""
        self._engine.close()


@lru_cache(maxsize=1)
def _start() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=1)
def _start_all() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _machine(triple: str, cpu: str, features: str, *, jit: bool) -> Any:
    """A target machine. Code that is loaded may be far from the functions it calls, so it gets the large code model."""
    try:
        target = llvm.Target.from_triple(triple)
        model = "jitdefault" if jit else "default"
        return target.create_target_machine(cpu=cpu, features=features, opt=LEVEL, codemodel=model, jit=jit)
    except RuntimeError as error:
        raise CompileError(_first_lines(f"LLVM has no target {triple!r}", error)) from None


def _optimized(ir: str, triple: str, machine: Any) -> Any:
    """The parsed module after the few passes that kernels need.

    Generated code is scheduled and vectorized already. What is left: inline the functions that say so, turn
    accumulators in memory into registers (SROA), and join chains of blocks. A full pipeline takes more than twice as
    long and gives no faster code (measured on Zen 4, run not kept).
    """
    # Each kernel has a context of its own, which does not keep the types and constants of earlier ones.
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


def _first_lines(what: str, error: Exception, lines: int = 4) -> str:
    text = [line for line in str(error).strip().splitlines() if line.strip()]
    return ": ".join((what, "\n".join(text[:lines])))
