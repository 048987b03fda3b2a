"""Notes on problems: a later process computes without planner and LLVM, and only by notes of the very same sources."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convgrad import store
from convgrad.cpu import kernel, target
from convgrad.cpu.compile import jit, recall
from convgrad.spec import Problem

PROBLEM = Problem.parse("x f32 n2 g1 cx16 cy32 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
DECLINED = Problem.parse("x f32 n1 g1 cx1 cy1 x2000x2000 w1x1 y4x4 s500x500 d1x1 p0x0")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache of its own, and notes as in a new process."""
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(recall, "BEGUN", recall.BEGUN + 1e9)  # A test run may be younger than a file just edited.
    recall._digest.cache_clear()
    kernel.find.cache_clear()
    yield tmp_path / "cache"
    recall._digest.cache_clear()
    kernel.find.cache_clear()


def find(problem=PROBLEM, team=2):
    kernel.find.cache_clear()
    return kernel.find(problem, target.current(), team)


def one_more(monkeypatch, folder):
    """An old source beside the real ones."""
    path = folder / "more.py"
    path.write_text("LANES = 17\n")
    os.utime(path, (1, 1))
    really = recall._sources()
    monkeypatch.setattr(recall, "_sources", lambda: [*really, str(path)])
    recall._digest.cache_clear()
    return path


def test_a_note_says_what_planning_said(monkeypatch):
    assert recall.recall(PROBLEM, target.current(), 2) is None
    first = find()
    again = find()
    assert again is not first
    assert again.note == first.note == recall.recall(PROBLEM, target.current(), 2)
    assert again.plan == first.plan
    assert find(team=1).note[2] == 1
    monkeypatch.setattr(kernel, "build", lambda *args: pytest.fail("planned again"))
    assert find().note == first.note
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        find(Problem.parse(str(PROBLEM).replace("n2", "n3")))


def test_reasons_are_kept_too(monkeypatch):
    refusal = find(DECLINED)
    assert "phases" in refusal.reason
    assert refusal.instead
    monkeypatch.setattr(kernel, "build", lambda *args: pytest.fail("planned again"))
    assert find(DECLINED) == refusal


@pytest.mark.parametrize("lost", ["note", "code", "both"])
def test_what_is_lost_is_made_again(place, lost):
    first = find()
    code = f"{first.note[0].hex()}.o"
    for file in place.glob("*.o"):
        is_code = file.name == code
        if lost == "both" or is_code == (lost == "code"):
            file.write_bytes(b"garbage" * 100)
    kernel.find.cache_clear()
    del first
    assert find().note[0].hex() + ".o" == code
    assert store.get(bytes.fromhex(code[:-2])) is not None
    assert recall.recall(PROBLEM, target.current(), 2) is not None


def test_other_sources_have_other_notes(monkeypatch, tmp_path):
    find()
    other = one_more(monkeypatch, tmp_path)
    assert recall.recall(PROBLEM, target.current(), 2) is None
    find()
    assert recall.recall(PROBLEM, target.current(), 2) is not None
    other.write_text("LANES = 18\n")
    os.utime(other, (1, 1))  # An edit need not show in a file's size or time.
    recall._digest.cache_clear()
    assert recall.recall(PROBLEM, target.current(), 2) is None


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of its own, as if this one were it."""
    copy = tmp_path / "convgrad"
    shutil.copytree(recall.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(recall, "PACKAGE", str(copy))
    yield copy
    recall._sources.cache_clear()


def digest():
    """The digest of the sources that a new process takes."""
    recall._sources.cache_clear()
    recall._digest.cache_clear()
    found = recall._digest()
    assert found is not None
    return found


@pytest.mark.parametrize("folder", ["", "plan", "new", "new/deeper/and deeper", "plan/deeper/and_deeper"])
def test_a_source_in_any_folder_is_counted(package, folder):
    seen = [digest()]
    assert digest() == seen[0]
    place = package / "cpu" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "more.py").write_text("LANES = 17\n")
    seen.append(digest())
    (place / "more.py").write_text("LANES = 18\n")
    seen.append(digest())
    (place / "more.py").rename(place / "less.py")
    seen.append(digest())
    (place / "next").mkdir()
    (place / "less.py").rename(place / "next" / "less.py")
    seen.append(digest())
    assert len(set(seen)) == 5
    (place / "next" / "less.py").unlink()
    (place / "__pycache__").mkdir()
    (place / "__pycache__" / "more.py").write_text("")
    (place / "notes.txt").write_text("not code")
    assert digest() == seen[0]


def imported(path, package):
    """The files of the package that a file imports, but for the engine's own, which all count."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            # A file that takes another one from the package itself, by its name, takes nothing else of it.
            package_itself = base == package and not node.module
            for place in (*([] if package_itself else [base]), *(base / alias.name for alias in node.names)):
                found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()}
    return {file for file in found if package / "cpu" not in file.parents}


def test_all_that_code_is_made_of_is_counted():
    """What plans and code depend on is imported, directly or not. The front door, refusals, errors, the store and
    the setting for its size, which is read in memory.py, and whose threads run it change no code.
    """
    package = Path(recall.PACKAGE)
    doors = [package / "cpu" / name for name in ("__init__.py", "backend.py")]
    inside = [path for path in (package / "cpu").rglob("*.py") if path not in doors]
    found, new = set(), {file for path in inside for file in imported(path, package)}
    while new:
        found |= new
        new = {file for path in new for file in imported(path, package)} - found
    others = {"backend.py", "errors.py", "memory.py", "host_team.py", "store.py"}
    assert {file.relative_to(package).as_posix() for file in found} - others == set(recall.OTHERS)


@pytest.mark.parametrize("name", recall.OTHERS)
def test_what_problems_are_made_of_is_counted(package, name):
    before = digest()
    with (package / name).open("a") as file:
        file.write("# More.\n")
    assert digest() != before


def test_sources_changed_meanwhile_make_no_notes(monkeypatch, tmp_path):
    edited = one_more(monkeypatch, tmp_path)
    assert recall.recall(PROBLEM, target.current(), 2) is None  # The digest is taken here, of the file as it was.
    os.utime(edited, (recall.BEGUN + 5, recall.BEGUN + 5))
    find()
    assert recall.recall(PROBLEM, target.current(), 2) is None
    recall._digest.cache_clear()
    assert recall._digest() is None
    edited.unlink()
    assert find() is not None


def test_another_llvm_has_other_notes(monkeypatch):
    find()
    assert recall.recall(PROBLEM, target.current(), 2) is not None
    monkeypatch.setattr(jit, "llvm_build", lambda: "another")
    assert recall.recall(PROBLEM, target.current(), 2) is None


def test_a_source_that_comes_with_an_old_time_is_noticed(monkeypatch, tmp_path):
    new = tmp_path / "new.py"
    monkeypatch.setattr(recall, "_sources", lambda: [str(new)])
    monkeypatch.setattr(recall, "BEGUN", time.time() + 60)
    new.write_text("A = 1\n")
    assert not recall._changed()
    monkeypatch.setattr(recall, "BEGUN", time.time())
    os.utime(new, (1, 1))
    assert recall._changed()


def test_without_a_cache_no_source_is_read(monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", "off")
    monkeypatch.setattr(recall, "_sources", lambda: pytest.fail("read"))
    assert recall.recall(PROBLEM, target.current(), 2) is None


ALONE = """
import sys
import numpy as np
import convgrad
if sys.argv[1] == "without":
    sys.modules["llvmlite.binding"] = None
    sys.modules["convgrad.cpu.plan"] = None
rng = np.random.default_rng(7)
x, w = (rng.integers(-3, 4, s).astype(np.float32) for s in ((2, 12, 12, 16), (3, 3, 16, 32)))
y = convgrad.convolution(x, w, strides=[1, 1], pads_begin=[1, 1], pads_end=[1, 1], dilations=[1, 1])
dx = convgrad.convolution_backward_data(y, w, x.shape, strides=[1, 1], pads_begin=[1, 1], pads_end=[1, 1],
                                        dilations=[1, 1])
print(y.sum(), np.abs(dx).sum(), "llvmlite" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="LLVM loads code here")
def test_a_later_process_needs_no_compiler(place):
    def run(*args):
        done = subprocess.run([sys.executable, "-c", ALONE, *args], capture_output=True, text=True)
        return done.stdout.split() or done.stderr

    assert "import of" in run("without")  # Nothing is kept yet.
    first = run("with")
    assert first[2] == "True"
    assert run("without") == [*first[:2], "False"]
