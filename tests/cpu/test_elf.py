"""Object files placed in memory by our own loader: what it takes, what it leaves to LLVM, how memory is protected."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from convgrad import CompileError
from convgrad.cpu.compile import elf, jit, llvm

HOST = jit.host()
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "x86_64" not in HOST[0], reason="the loader is for Linux on x86-64"
)

# A constant, data that begins with a value, data that begins with zeros, tables of addresses, a call of a function here
# and of one elsewhere.
TEXT = """
@constant = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40], align 64
@given = internal global i64 5
@zeros = internal global [5000 x i64] zeroinitializer, align 128
@table = internal constant [2 x ptr] [ptr @double, ptr @triple]

declare i64 @strlen(ptr)

define internal i64 @double(i64 %x) noinline nounwind {
  %r = mul i64 %x, 2
  ret i64 %r
}

define internal i64 @triple(i64 %x) noinline nounwind {
  %r = mul i64 %x, 3
  ret i64 %r
}

define i64 @constant_at(i64 %i) nounwind {
  %p = getelementptr [4 x i64], ptr @constant, i64 0, i64 %i
  %r = load i64, ptr %p
  ret i64 %r
}

define i64 @count(i64 %i) nounwind {
  %p = getelementptr [5000 x i64], ptr @zeros, i64 0, i64 %i
  %old = load volatile i64, ptr %p
  %one = add i64 %old, 1
  store volatile i64 %one, ptr %p
  %given = load volatile i64, ptr @given
  %sum = add i64 %given, %one
  store volatile i64 %sum, ptr @given
  ret i64 %sum
}

define i64 @through_table(i64 %i, i64 %x) nounwind {
  %p = getelementptr [2 x ptr], ptr @table, i64 0, i64 %i
  %f = load volatile ptr, ptr %p
  %r = call i64 %f(i64 %x)
  ret i64 %r
}

define i64 @length(ptr %text) nounwind {
  %r = call i64 @strlen(ptr %text)
  ret i64 %r
}

define ptr @place_of_zeros() nounwind {
  ret ptr @zeros
}
"""


def function(image, name, *types):
    return ctypes.CFUNCTYPE(ctypes.c_int64, *types)(image.address(name))


@pytest.fixture
def image():
    made = elf.Image(llvm.emit_object(TEXT, *HOST))
    yield made
    made.close()


def test_data_constants_and_calls(image):
    word = ctypes.c_int64
    assert [function(image, "constant_at", word)(i) for i in range(4)] == [10, 20, 30, 40]
    count = function(image, "count", word)
    assert [count(0), count(4999), count(4999)] == [6, 7, 9]
    assert [function(image, "through_table", word, word)(i, 7) for i in range(2)] == [14, 21]
    assert function(image, "length", ctypes.c_char_p)(b"twelve bytes") == 12
    assert function(image, "place_of_zeros")() % 128 == 0
    with pytest.raises(CompileError, match="there is no 'double'"):
        image.address("double")  # It is internal.


def test_images_have_data_of_their_own(image):
    other = elf.Image(llvm.emit_object(TEXT, *HOST))
    word = ctypes.c_int64
    assert [function(i, "count", word)(1) for i in (image, other, image)] == [6, 6, 8]
    other.close()


def test_no_memory_is_written_and_run(image):
    begin = image._address
    rights = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, right, *_ = line.split()
        low, high = (int(n, 16) for n in span.split("-"))
        if low < begin + image._size and begin < high:
            rights.append(right)
    assert "r-xp" in rights
    assert "r--p" in rights
    assert "rw-p" in rights
    assert not any("w" in right and "x" in right for right in rights)


def test_memory_is_given_back():
    def mapped():
        return sum(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line
        )

    content = llvm.emit_object(TEXT, *HOST)
    elf.Image(content).close()
    before = mapped()
    for _ in range(2000):
        elf.Image(content).close()
    assert mapped() - before < 10_000  # KiB; an image that stays takes 52, all of them 100 MiB


def test_what_is_unknown_is_left_to_llvm():
    # Code that lies near what it uses has relocations of other kinds.
    machine = llvm._machine(*HOST, jit=False)
    module = llvm._optimized(TEXT, HOST[0], machine)
    content = bytes(machine.emit_object(module))
    with pytest.raises(elf.Unknown, match="relocation"):
        elf.Image(content)
    with pytest.raises(elf.Unknown, match="no object file"):
        elf.Image(b"\x7fELF" + bytes(200))
    constant = "define i64 @value() nounwind {\n  ret i64 43\n}\n"
    machine = llvm._machine("i386-unknown-linux-gnu", "", "", jit=False) if _has("i386-unknown-linux-gnu") else None
    if machine is not None:
        module = llvm._optimized(constant, "i386-unknown-linux-gnu", machine)
        with pytest.raises(elf.Unknown, match="no object file for x86-64"):
            elf.Image(bytes(machine.emit_object(module)))


def _has(triple):
    llvm._start_all()
    try:
        llvm._machine(triple, "", "", jit=False).close()
    except CompileError:
        return False
    return True


def test_llvm_loads_what_the_loader_refuses(monkeypatch, tmp_path):
    def refuse(content):
        raise elf.Unknown("refused")

    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(elf, "Image", refuse)
    module = jit.load("define i64 @value() nounwind {\n  ret i64 44\n}\n", *HOST)
    assert isinstance(module._code, llvm.Engine)
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(module.address("value"))() == 44


def test_a_file_cut_short_is_refused():
    content = llvm.emit_object(TEXT, *HOST)
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(elf.Unknown):
            elf.Image(content[:length])


def test_memory_that_may_not_run_is_an_error(monkeypatch):
    class Strict:
        """A system that forbids new code."""

        def __getattr__(self, name):
            return (lambda *args: -1) if name == "mprotect" else getattr(system, name)

    system = elf._system()
    content = llvm.emit_object(TEXT, *HOST)
    monkeypatch.setattr(elf, "_system", lambda: Strict())
    with pytest.raises(CompileError, match="no code that runs"):
        elf.Image(content)


STRICT = """
import ctypes
import numpy as np
import convgrad
deny_write_execute = 65
if ctypes.CDLL(None).prctl(deny_write_execute, 1, 0, 0, 0):
    print("cannot")
else:
    try:
        convgrad.convolution(np.ones((1, 8, 8, 16), np.float32), np.ones((3, 3, 16, 16), np.float32), strides=[1, 1],
                             pads_begin=[0, 0], pads_end=[0, 0], dilations=[1, 1])
    except convgrad.CompileError as error:
        print("told:", error)
"""


def test_a_process_that_may_make_no_code_is_told():
    done = subprocess.run([sys.executable, "-c", STRICT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout == "cannot\n":
        pytest.skip("this system knows no such rule")
    assert "told: the system lets this process make no code that runs" in done.stdout
