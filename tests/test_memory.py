"""Memory of large results is used again, and never while an array on it lives."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from convgrad import OutOfMemoryError, host, memory

SHAPE = (memory.LARGE // 4000 + 10, 1000)


def new_array(shape: tuple[int, ...]) -> np.ndarray:
    array, address = host.empty(shape, "f32")
    assert address == array.ctypes.data
    return array


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    memory.release()
    yield
    memory.release()


def test_memory_comes_back() -> None:
    array = new_array(SHAPE)
    address = array.ctypes.data
    assert address % memory.LINE == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
    del array
    assert len(memory._kept) == 1
    assert new_array((SHAPE[0] - 1, SHAPE[1])).ctypes.data == address
    assert new_array((SHAPE[0] // 2, SHAPE[1])).ctypes.data != address, "half of it would be wasted"


def test_a_block_is_lent_once() -> None:
    new_array(SHAPE)
    assert len(memory._kept) == 1
    first, second = new_array(SHAPE), new_array(SHAPE)
    assert not memory._kept
    assert not np.shares_memory(first, second)


VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "itself": lambda a: a,
    "a slice": lambda a: a[1:3, ::2],
    "turned": lambda a: a.T,
    "another shape": lambda a: a.reshape(-1),
    "another type": lambda a: a.view(np.uint8),
    "a view of a view": lambda a: a[5:].reshape(-1)[3:].T,
    "a memoryview": memoryview,
    "DLPack": np.from_dlpack,
    "a buffer": lambda a: np.frombuffer(a, np.uint8),
    "strides": lambda a: np.lib.stride_tricks.as_strided(a, (3,), (4,)),
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "ctypes": np.ctypeslib.as_ctypes,
    "PyTorch": torch.from_numpy,
    "a part in PyTorch": lambda a: torch.from_dlpack(a)[3:].T,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_what_still_looks_at_it_keeps_it(kind: str) -> None:
    array = new_array(SHAPE)
    view = VIEWS[kind](array)
    del array
    gc.collect()
    assert not memory._kept
    del view
    gc.collect()
    assert len(memory._kept) == 1


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [new_array((SHAPE[0] + 100 * i, SHAPE[1])) for i in range(30)]
    newest = arrays[-1].ctypes.data
    while arrays:
        arrays.pop(0)
    kept = sum(block.nbytes for block in memory._kept.values())
    assert memory.KEEP // 2 < kept <= memory.KEEP
    assert new_array((SHAPE[0] + 2900, SHAPE[1])).ctypes.data == newest
    monkeypatch.setenv("CONVGRAD_KEEP_MEMORY", "0")
    new_array(SHAPE)
    assert not memory._kept
    monkeypatch.setenv("CONVGRAD_KEEP_MEMORY", "1G")
    assert memory.limit() == 1 << 30


@pytest.mark.parametrize("value", ["much", "-1"])
def test_a_bound_that_means_nothing_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CONVGRAD_KEEP_MEMORY", value)
    monkeypatch.setattr(memory, "_said", set())
    with pytest.warns(UserWarning, match=f"CONVGRAD_KEEP_MEMORY={value} must be a number of bytes") as caught:
        _ = [new_array(SHAPE) for _ in range(2)]
    assert len(caught) == 1
    assert memory.limit() == memory.KEEP


def test_small_results_are_left_to_numpy() -> None:
    new_array((1000, 1000))
    assert not memory._kept


def test_too_much_is_an_error_of_ours() -> None:
    with pytest.raises(OutOfMemoryError):
        new_array((2**50,))


def test_threads_never_share_a_block() -> None:
    failures = []
    together = threading.Barrier(4)

    def work(number: int) -> None:
        for turn in range(20):
            array = new_array(SHAPE)
            array[::100] = number * 100 + turn
            held = array[::100]
            del array
            together.wait()  # All have written before one looks, and all look before one lets go.
            if not (held == number * 100 + turn).all():
                failures.append((number, turn))
            together.wait()

    with ThreadPoolExecutor(4) as crowd:
        list(crowd.map(work, range(4)))
    assert not failures


def test_nothing_is_said_at_exit() -> None:
    code = "from convgrad.host import empty\nkept = empty((8000, 1000), 'f32')[0]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
