"""Where kernels are compiled and interpreted in these tests."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

_KERNELS = ["test_interpreted.py", "test_rows.py", "test_offline.py", "test_hopper.py"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else _KERNELS


@pytest.fixture(scope="session")
def interpreted():
    """Calls a function in a process whose kernels are interpreted; what it raises is raised here."""
    import interpreter

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreter.prepare) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()


@pytest.fixture(autouse=True, scope="session")
def _triton_cache():
    """Triton's files of compiled kernels lie where the CPU's do: all processes of this run share them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", os.path.join(os.environ["CONVGRAD_CACHE_DIR"], "triton"))
        yield
