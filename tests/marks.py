"""Marks of tests: `slow` is what `pytest -m "not slow"` leaves to `make test`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The quick values and the others as parameters of a test, slow for the others; tuples hold several parameters."""
    quick = dict.fromkeys(quick)
    return [value if value in quick else _slow(value) for value in dict.fromkeys([*values, *quick])]


def in_turn(values: Iterable[Any], always: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every value with what it always meets, one of which is quick, and with two of the others, which are slow. What is
    quick and the others are taken in turn.
    """
    pairs: list[Any] = []
    for i, value in enumerate(values):
        met = [(value, *partner) for partner in always]
        pairs += slow_but([met[i % len(met)]], met)
        turn = dict.fromkeys(others[(2 * i + j) % len(others)] for j in range(2))
        pairs += [_slow((value, *partner)) for partner in turn]
    return pairs


def _slow(value: Any) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return pytest.param(*parts, marks=pytest.mark.slow)
