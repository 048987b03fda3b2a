from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def soon() -> Iterator[None]:
    """A test that does not end is a failure."""

    def late(*_: object) -> None:
        raise AssertionError("this takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
