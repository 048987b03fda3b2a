"""Machine code of kernels is stored for later processes, which need no Triton for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from convgrad import store
from convgrad.gpu import recall
from convgrad.gpu.plan import choose
from convgrad.gpu.plan.records import Descriptor, Launch
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem

TARGET = of_kind("sm_90")
SEEN = Descriptor("x", "bf16", (64, 32), (32, 1), (16, 32))
STEP = Launch("gather", 7, (("y", "bf16"),), (("sizes", (3, 4)),), (("ROWS", 64),), 4, 3, "", (SEEN,))
META = {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [16, 32], "fp4_padded": False}
"""What Triton says of a descriptor."""


def compiled(**changes):
    """A kernel as Triton compiles it."""
    found = dict(
        name="gather_0d1", num_warps=12, shared=1 << 17, num_ctas=1, launch_cooperative_grid=False,
        global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=[META],
    ) | changes  # fmt: skip
    return SimpleNamespace(metadata=SimpleNamespace(**found), asm={"cubin": b"code\nof \0 a kernel"})


CODE = recall.Code("gather_0d1", 12, 1 << 17, (recall.Map(9, 2, (16, 32), 2),), b"code\nof \0 a kernel")


@pytest.fixture
def built(monkeypatch, tmp_path):
    """An empty store, and what is compiled."""
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("CONVGRAD_CACHE", raising=False)
    monkeypatch.setattr(recall, "version", lambda: "3.6.0")
    found = []
    monkeypatch.setattr(recall.compiler, "build", lambda *given: found.append(given) or compiled())
    return found


def test_code_is_compiled_once(built):
    for _ in range(3):
        assert recall.find(STEP, TARGET, True) == CODE
    assert recall.find(replace(STEP, programs=8), TARGET, True) == CODE, "the same for any number of programs"
    assert built == [(STEP, TARGET, True)]


def test_other_code_has_another_key(built, monkeypatch):
    def count():
        recall.find(STEP, TARGET, True)
        return len(built)

    recall.find(STEP, TARGET, True)
    recall.find(STEP, TARGET, False)
    recall.find(STEP, of_kind("sm_80"), True)
    recall.find(replace(STEP, constants=(("ROWS", 128),)), TARGET, True)
    assert len(built) == 4
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert count() == 4, "code is the same wherever Triton keeps it"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert count() == 5
    monkeypatch.setattr(recall, "version", lambda: "3.6.1")
    assert count() == 6
    monkeypatch.setattr(recall, "digest", lambda: "other sources")
    assert count() == count() - 1 == 7, "of sources that have changed since, nothing is stored"


def test_planners_and_kernels_are_in_the_digest(monkeypatch, tmp_path):
    names = {path.relative_to(path.parents[1]).as_posix() for path in recall._sources()}
    assert {"gpu/compile.py", "kernels/gather.py", "hopper/gather.py", "plan/registry.py", "spec/problem.py"} <= names
    file = tmp_path / "kernel.py"
    file.write_text("ROWS = 64\n")
    monkeypatch.setattr(recall, "_sources", lambda: iter([file]))
    before = recall._digest_now()
    file.write_text("ROWS = 65\n")
    assert recall._digest_now() != before
    file.unlink()
    assert recall._digest_now() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"tensordesc_meta": []},
        {"tensordesc_meta": [None]},
        {"tensordesc_meta": [META | {"fp4_padded": True}]},
    ],
)
def test_what_is_not_known_is_left_to_triton(built, monkeypatch, changes):
    kernel = compiled(**changes)
    monkeypatch.setattr(recall.compiler, "build", lambda *given: kernel)
    for _ in range(2):
        assert recall.find(STEP, TARGET, True) is kernel


def test_other_versions_of_triton_launch_their_kernels_themselves(built, monkeypatch):
    monkeypatch.setattr(recall, "version", lambda: "3.7.0")
    for _ in range(2):
        assert not isinstance(recall.find(STEP, TARGET, True), recall.Code)
    assert len(built) == 2


def test_without_a_store(built, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", "off")
    for _ in range(2):
        assert recall.find(STEP, TARGET, True) == CODE
    assert len(built) == 2
    assert store.folder() is None


def test_plans_are_made_once(built, monkeypatch):
    problem, made = Problem.parse("x f32 n1 g1 cx2 cy3 x4x4 w3x3 y4x4 s1x1 d1x1 p1x1"), []

    def plan(problem=problem, target=TARGET, how=("default", True)):
        return recall.plan(problem, target, how, lambda: made.append(how) or choose.plan(problem, target, how[0]))

    expected = choose.plan(problem, TARGET, "default")
    for _ in range(3):
        assert plan() == expected
    assert len(made) == 1
    plan(replace(problem, n=2))
    plan(target=replace(TARGET, multiprocessors=20))
    plan(how=("tf32", True))
    plan(how=("default", False))
    assert len(made) == 5
    for _ in range(2):
        assert recall.plan(replace(problem, n=3), TARGET, ("default", True), lambda: "it is refused") == "it is refused"


WARM = """
import sys
sys.path[:0] = sys.argv[1:]
import test_recall as test
from convgrad.gpu import recall
recall.compiler.build = None
assert recall.find(test.STEP, test.TARGET, True) == test.CODE
print({"triton", "torch"} & set(sys.modules))
"""


def test_stored_code_needs_no_triton(built, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("triton")
    if not recall.version().startswith(recall.KNOWN):
        pytest.skip("of another version of Triton nothing is stored")
    build = recall.compiler.build
    try:
        recall.compiler.build = lambda *given: compiled()
        recall.find(STEP, TARGET, True)
    finally:
        recall.compiler.build = build
    here = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", WARM, here], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
