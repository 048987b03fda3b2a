"""Settings of the whole suite."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from types import SimpleNamespace

import hypothesis
import pytest

# NumPy multiplies small matrices here, and OpenBLAS would have other threads spin beside every one. It reads this when
# NumPy is imported, in processes that tests start, too.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Tests start many processes, which need not compile every source anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples every time, so that a red test is red again; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure(config):
    """A code cache that begins empty, shared by all processes of this run; nobody's own is read or written."""
    if not hasattr(config, "workerinput"):  # a worker of xdist has the variable from the process that started it
        folder = os.environ["CONVGRAD_CACHE_DIR"] = tempfile.mkdtemp(prefix="convgrad-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    """What libraries and earlier files have made stays out of the garbage collections of this one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _translation(request):
    """The engine's own tests compile the code that users get, and so do those that time it. Others only need code that
    does the same, as do those of emulated tile registers, whose code no user gets.
    """
    from translation import quick_code

    timed_or_of_the_engine = request.path.parent.name in ("bench", "cpu")
    emulated = request.path.name in ("test_amx.py", "test_pieces.py")
    with contextlib.nullcontext() if timed_or_of_the_engine and not emulated else quick_code():
        yield


@pytest.fixture
def quickly():
    """Code that does what it should, in this test."""
    from translation import quick_code

    with quick_code():
        yield


@pytest.fixture
def measured_briefly(monkeypatch):
    """What a machine can do at most is measured, but not for as long as numbers that one would show need; and it is
    taken to be at rest.
    """
    from convgrad.bench import timing

    measure = timing.measure_machine
    monkeypatch.setattr(timing.Probe, "of", lambda threads: SimpleNamespace(steady=lambda: True))
    monkeypatch.setattr(timing, "measure_machine", lambda threads, seconds=2.0: measure(threads, seconds / 20))


# Only tests that need PyTorch wait for it, so `problems` is imported below.


@pytest.fixture
def by_reference():
    """The reference engine computes, in this test."""
    from problems import reference_engine

    with reference_engine():
        yield


@pytest.fixture(scope="module")
def all_by_reference():
    """The reference engine computes, in all tests of the file."""
    from problems import reference_engine

    with reference_engine():
        yield


def pytest_collection_finish():
    """What imports have left lives as long as the process: garbage collection need not look at it again and again."""
    gc.collect()
    gc.freeze()
