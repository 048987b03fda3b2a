"""Where kernels are compiled and interpreted in these tests."""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

_KERNELS = ["test_interpreted.py", "test_rows.py", "test_offline.py", "test_hopper.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else _KERNELS


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function in a process whose kernels are interpreted; what it raises is raised here."""
    import interpreter

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreter.prepare) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()


@pytest.fixture(autouse=True, scope="session")
def _triton_cache(tmp_path_factory):
    """Triton's files of compiled kernels go with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
