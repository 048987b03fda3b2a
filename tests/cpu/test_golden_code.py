"""The code that is written is the code that was written: a change of it is made on purpose, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from convgrad.cpu import kernel
from convgrad.spec.problem import Problem
from marks import slow_but

from . import golden
from .test_engine import PATHS

# Everything that is told from something else by its name: values, blocks, constants, functions, metadata.
CODE = """
@taps = private unnamed_addr constant [2 x i64] [i64 0, i64 16], align 64
declare i64 @llvm.smin.i64(i64, i64)
define internal void @pack(ptr %from, ptr %to) nounwind noinline "frame-pointer"="none" {
entry:
  %v1 = load i64, ptr %from, align 8
  %v2 = call i64 @llvm.smin.i64(i64 %v1, i64 16)
  store i64 %v2, ptr %to, align 8, !nontemporal !0
  ret void
}
define void @kernel(ptr %args) nounwind {
entry:
  br label %pre1
  pre1:
  %v1 = phi i64 [ 0, %entry ], [ %v2, %pre1 ]
  %v2 = add nsw i64 %v1, 1
  call void @pack(ptr @taps, ptr %args)
  %v3 = icmp slt i64 %v2, 16
  br i1 %v3, label %pre1, label %end1
  end1:
  ret void
}
!0 = !{i32 1}
"""


@pytest.mark.parametrize("part", slow_but(golden.SAMPLE[:1], golden.SAMPLE))
def test_the_code_is_as_it_was(part: int) -> None:
    looked_at, found = golden.check([part])
    assert looked_at > 25
    assert not found, golden.report(looked_at, found)


@pytest.mark.slow
def test_the_golden_problems_walk_every_path() -> None:
    left = dict(PATHS)
    for team in (1, 8):
        for subject in golden.named().values():
            for machine in subject.machines:
                plan = subject.plan(machine, team)
                left = {name: path for name, path in left.items() if not path(plan)}
                if not left:
                    return
    raise AssertionError(f"no problem of golden.txt goes by {', '.join(left)}")


@pytest.mark.parametrize(
    ("old", "new"),
    [("%v", "%value."), ("%v", "%args"), ("%from", '%"a; b"'), ("pre1", "loop"), ("end1", "done"), ("entry", "begin"),
     ("@taps", "@offsets"), ("@pack", "@copy"), ("@kernel", "@run"), ("!0", "!7"), ("\n", " ; a comment\n"),
     ("\n  ", "\n"), ("\n", "\n\n")],
)  # fmt: skip
def test_names_do_not_count(old: str, new: str) -> None:
    assert old in CODE
    assert golden.normalised(CODE.replace(old, new)) == golden.normalised(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("i64 16]", "i64 17]"), ("i64 16)", "i64 15)"), ("smin", "smax"), ("align 8", "align 4"),
     (", !nontemporal !0", ""),
     ("noinline", "alwaysinline"), ("internal ", ""), ("private", "internal"), ("nsw ", ""), ("slt", "ult"),
     ("ptr %from, align", "ptr %to, align"), ("[ 0, %entry ], [ %v2, %pre1 ]", "[ %v2, %pre1 ], [ 0, %entry ]"),
     ("label %pre1, label %end1", "label %end1, label %pre1"), ("ptr @taps, ptr %args", "ptr %args, ptr @taps"),
     ("add nsw i64 %v1, 1", "add nsw i64 %v2, 1"), ("i32 1", "i32 2"), ('"none"', '"all"'),
     ("i64 %v1, 1\n", "i64 %v1, 1\n  fence acquire\n")],
)  # fmt: skip
def test_everything_else_counts(old: str, new: str) -> None:
    assert old in CODE
    assert golden.normalised(CODE.replace(old, new)) != golden.normalised(CODE)


def test_the_normalised_code_is_still_code() -> None:
    assert golden.normalised(golden.normalised(CODE)) == golden.normalised(CODE)
    lines = golden.normalised(CODE).splitlines()
    assert lines[2:5] == [
        'define internal void @1(ptr %0, ptr %1) nounwind noinline "frame-pointer"="none" {', "%2:",
        "%3 = load i64, ptr %0, align 8",
    ]  # fmt: skip
    assert len(lines) == len(CODE.strip().splitlines())


@pytest.mark.parametrize("team", [1, 8])
def test_neither_llvm_nor_a_cache_is_asked(team: int) -> None:
    code = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from convgrad import store; store.folder = store.get = store.put = None\n"
        f"from cpu import golden; print(golden.show('depthwise', 'halves', {team}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(golden.ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == golden.show("depthwise", "halves", team)


P = Problem.parse("x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1")


def test_a_workspace_that_shrinks_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is in the code."""
    subject = golden.Subject(P, ("avx2",))
    before = golden.result(subject, "avx2")
    make_plan = kernel.make_plan
    monkeypatch.setattr(kernel, "make_plan", lambda *args: replace(make_plan(*args), threads=1))
    after = golden.result(subject, "avx2")
    assert [what for what, _ in golden.differences(before, after)] == ["workspace", "threads"]
    assert before.split()[0] == after.split()[0]
    monkeypatch.undo()
    assert golden.result(subject, "avx2") == before


def test_a_report_says_what_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(golden.differences("0a 64/1; 128/2; 192/3; 1b 512/8", "0a 64/1; 256/2; 192/3; 2c 512/7")) == [
        ("workspace", "workspace 128 is now 256 (on 2 threads)"),
        ("code", "code 1b is now 2c (on 8 threads)"),
        ("threads", "threads 8 is now 7 (on 8 threads)"),
    ]
    assert list(golden.differences("declined: far", "0a 64/1; 64/1; 64/1; 64/1")) == [
        ("reason", "reason declined: far is now planned (on 1 threads)")
    ]
    kept, lines = golden.read()
    assert kept["depthwise"].problem == golden.named()["depthwise"].problem
    case = ("depthwise", "avx2")
    monkeypatch.setattr(golden, "PARTS", 1)
    monkeypatch.setattr(golden, "named", lambda: {"depthwise": golden.Subject(kept["depthwise"].problem, ("avx2",))})
    monkeypatch.setattr(golden, "read", lambda: ({"depthwise": kept["depthwise"]}, {case: "0 1/1; 2/2; 3/3; 4/4"}))
    looked_at, found = golden.check([0])
    text = golden.report(looked_at, found)
    assert "1 cases differ from golden.txt, of 1 looked at" in text
    assert "code: 1 cases, 1 problems (avx2 1)" in text
    assert f"is now {lines[case].split()[0]} (on 1 threads)" in text
    assert "--show 'depthwise' 'avx2'" in text
    assert "--renew" in text
