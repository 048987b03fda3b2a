"""Marks of tests: `slow` is what `pytest -m "not slow"` leaves to `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, which is slow but for the quick ones; tuples hold several parameters."""
    quick = set(quick)
    return [value if value in quick else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return pytest.param(*parts, marks=pytest.mark.slow)
