"""Compiling and loading: what LLVM is asked for, what it answers, and when it is not asked at all."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading

import pytest

from convgrad import CompileError
from convgrad.cpu.compile import elf, jit, llvm
from convgrad.cpu.threads import team_ir

HOST = jit.host()
X86 = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(tmp_path / "cache"))


def constant(number):
    return f"define i64 @value() nounwind {{\n  ret i64 {number}\n}}\n"


def call(address):
    return ctypes.CFUNCTYPE(ctypes.c_int64)(address)()


def test_code_runs_and_calls_the_c_library():
    text = """
declare ptr @memset(ptr, i32, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @fill(ptr %to, ptr %from, i64 %n) nounwind {
  %r = call ptr @memset(ptr %from, i32 7, i64 %n)
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %n, i1 false)
  ret void
}
"""
    module = jit.load(text, *HOST)
    to, source = (ctypes.create_string_buffer(1000) for _ in range(2))
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    ctypes.CFUNCTYPE(None, *types)(module.address("fill"))(ctypes.addressof(to), ctypes.addressof(source), 999)
    assert to.raw == b"\x07" * 999 + b"\0"


@pytest.mark.parametrize("loader", [elf.Image, llvm.Engine] if sys.platform == "linux" else [llvm.Engine])
def test_each_way_to_load_works(loader):
    code = loader(jit._compile(constant(41) + constant(42).replace("@value", "@other"), *HOST))
    assert (call(code.address("value")), call(code.address("other"))) == (41, 42)
    with pytest.raises(CompileError, match="missing"):
        code.address("missing")
    code.close()


def test_same_content_is_loaded_once():
    first = jit.load(constant(1), *HOST)
    assert jit.load(constant(1), *HOST) is first
    assert jit.load(constant(2), *HOST) is not first
    # The target is part of the content.
    assert jit.load(constant(1), HOST[0], HOST[1], "") is not first or not HOST[2]
    assert call(first.address("value")) == 1


def test_content_cannot_run_together():
    assert jit.digest("a", "b", "c", "d") != jit.digest("", "ab", "c", "d") != jit.digest("a", "b", "cd", "")


def test_unused_code_is_unloaded_and_loaded_again_from_disk(monkeypatch):
    module = jit.load(constant(3), *HOST)
    code = module._code
    del module
    gc.collect()
    jit.load(constant(4), *HOST)
    assert code._address == 0 if isinstance(code, elf.Image) else True

    def refuse(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(jit, "_compile", refuse)
    assert call(jit.load(constant(3), *HOST).address("value")) == 3
    monkeypatch.setenv("CONVGRAD_CACHE", "off")
    gc.collect()
    with pytest.raises(AssertionError, match="compiled again"):
        jit.load(constant(3), *HOST)


def test_kept_code_stays():
    module = jit.load(constant(5), *HOST)
    code, address = module._code, module.address("value")
    module.keep()
    del module
    gc.collect()
    jit.load(constant(6), *HOST)
    assert call(address) == 5
    jit._kept.pop()
    assert code in jit._dead


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("define nonsense", "cannot read.*\n.*1:8"),
        ("define i32 @f() {\n  ret i64 0\n}", "cannot read"),
        # Parses, but a block uses a value that does not reach it.
        (
            "define i32 @f(i1 %c) {\n  br i1 %c, label %a, label %b\na:\n  %x = add i32 1, 1\n  br label %b\n"
            "b:\n  ret i32 %x\n}",
            "refuses.*\n?.*dominate",
        ),
    ],
)
def test_llvm_complaints_become_compile_errors(text, match):
    with pytest.raises(CompileError, match=match):
        jit.load(text, *HOST)


def test_long_complaints_are_cut():
    text = "define i32 @f(i1 %c) {\n  br i1 %c, label %a, label %b\na:\n"
    text += "".join(f"  %x{i} = add i32 1, 1\n" for i in range(50)) + "  br label %b\nb:\n"
    text += "".join(f"  %y{i} = add i32 %x{i}, 1\n" for i in range(50)) + "  ret i32 0\n}"
    with pytest.raises(CompileError) as error:
        jit.load(text, *HOST)
    assert len(str(error.value).splitlines()) <= 4


def test_missing_symbols_are_errors_and_not_crashes():
    if sys.platform != "linux" or "x86_64" not in HOST[0]:
        pytest.skip("LLVM ends the process here, and offers no other answer")
    text = "declare void @no_such_thing()\n" + constant(0).replace("ret", "call void @no_such_thing()\n  ret")
    with pytest.raises(CompileError, match="'no_such_thing', which this process does not have"):
        jit.load(text, *HOST)


def test_code_for_another_machine_is_not_loaded():
    other = ARM if "x86" in HOST[0] else X86
    with pytest.raises(CompileError, match=f"code for {other} cannot be loaded on {HOST[0]}"):
        jit.load(constant(1), other, "generic", "")
    with pytest.raises(CompileError, match="no target 'abacus'"):
        jit.assemble(constant(1), "abacus", "", "")


LOOP = """
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)

define internal <8 x float> @step(ptr %p, <8 x float> %s) alwaysinline nounwind {
  %v = load <8 x float>, ptr %p, align 4
  %r = call <8 x float> @llvm.fma.v8f32(<8 x float> %v, <8 x float> %v, <8 x float> %s)
  ret <8 x float> %r
}

define void @sum(ptr noalias %p, ptr noalias %out, i64 %n) nounwind {
entry:
  %acc = alloca <8 x float>, align 32
  store <8 x float> zeroinitializer, ptr %acc
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %q = getelementptr float, ptr %p, i64 %i
  %old = load <8 x float>, ptr %acc
  %new = call <8 x float> @step(ptr %q, <8 x float> %old)
  store <8 x float> %new, ptr %acc
  %next = add i64 %i, 8
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  %last = load <8 x float>, ptr %acc
  store <8 x float> %last, ptr %out, align 4
  ret void
}
"""


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "fma", "stack"),
    [
        (X86, "haswell", "", "vfmadd231ps\t%ymm", "rsp"),
        (X86, "skylake-avx512", "", "vfmadd231ps\t%ymm", "rsp"),
        (ARM, "generic", "+neon", "fmla\tv", "sp,"),
        ("arm64-apple-darwin", "apple-m1", "", "fmla.4s\tv", "sp,"),
    ],
)
def test_accumulators_live_in_registers_on_every_target(triple, cpu, features, fma, stack):
    text = jit.assemble(LOOP, triple, cpu, features)
    assert fma in text
    assert stack not in text
    assert "step" not in text
    # The loop is left as it is: no unrolling, no second copy.
    assert text.count("fma" if "x86" in triple else "fmla") == (1 if "x86" in triple else 2)


@pytest.mark.parametrize(
    "triple", [X86, ARM, "arm64-apple-darwin", "x86_64-pc-windows-msvc", "riscv64-unknown-linux-gnu"]
)
@pytest.mark.parametrize("futex", [True, False])
def test_team_assembles_for_every_system(triple, futex):
    text = jit.assemble(team_ir.source(triple, futex), triple, "", "")
    assert ("pthread_create" in text) == ("windows" not in triple)
    assert ("syscall" in text) == (futex and triple in (X86, ARM))
    assert ("pthread_cond_wait" in text) == ("windows" not in triple and "syscall" not in text)
    lent = jit.assemble(team_ir.source(triple, futex, openmp=True), triple, "", "")
    assert "pthread_create" not in lent
    assert ("part" in lent) == ("windows" not in triple)


def test_many_threads_compile_once(monkeypatch):
    compiled = []
    compile_now = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *args: compiled.append(args) or compile_now(*args))
    found: list[jit.Module] = []
    start = threading.Barrier(8)

    def work():
        start.wait()
        for number in range(10, 15):
            found.append(jit.load(constant(number), *HOST))

    team = [threading.Thread(target=work) for _ in range(8)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert len(compiled) == 5
    assert len(found) == 40
    assert len(set(map(id, found))) == 5


def script(text, *args, **environment):
    """Run a script in a process of its own, where it may crash, hang or fork without harm to the others."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_importing_loads_no_compiler():
    done = script(
        "import sys, convgrad, convgrad.cpu.threads.count as t\n"
        "t.set_num_threads(3); assert t.get_num_threads() == 3; print('llvmlite' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_of_a_fork_can_compile_while_the_parent_does():
    done = script(
        """
import ctypes, itertools, os, threading
from convgrad.cpu.compile import jit
host = jit.host()
text = "define i64 @value() nounwind {\\n  ret i64 %d\\n}\\n"
stop = False
def work():
    for number in itertools.count(1000):
        if stop: return
        jit.load(text % number, *host).address("value")
thread = threading.Thread(target=work); thread.start()
for number in range(20):
    child = os.fork()
    if child == 0:
        address = jit.load(text % number, *host).address("value")
        os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == number else 1)
    assert os.waitpid(child, 0)[1] == 0
stop = True; thread.join(); print("good")
""",
        CONVGRAD_CACHE="off",
    )
    assert done.stdout == "good\n", done.stderr
