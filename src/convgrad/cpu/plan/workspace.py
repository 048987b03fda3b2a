"""The workspace: memory that a kernel needs besides its tensors, as buffers with names.

First come the buffers that all threads share, then those of each thread. `emit/frame.py` gives kernels their addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ...dtypes import DTYPES
from ...spec.problem import Problem
from .bits import BEYOND, PER_THREAD

if TYPE_CHECKING:
    from .records import Made

LINE = 16  # elements: a buffer is as many as a multiple of it, so that the next begins with a line of memory


class Buffer(NamedTuple):
    """Memory for so many accumulators: once for all threads, or for each of them."""

    name: str
    elements: int
    per_thread: bool


def shared(name: str, elements: int) -> Buffer:
    """A buffer for all threads."""
    return Buffer(name, _whole(elements), per_thread=False)


def per_thread(name: str, elements: int) -> Buffer:
    """A buffer that each thread has of its own."""
    return Buffer(name, _whole(elements), per_thread=True)


def elements(buffers: Iterable[Buffer], *, per_thread: bool) -> int:
    """Elements of the buffers that are shared, or that each thread has."""
    return sum(buffer.elements for buffer in buffers if buffer.per_thread == per_thread)


def _whole(elements: int) -> int:
    return -(-elements // LINE) * LINE


def bound(problem: Problem) -> int:
    """Bytes that all threads together may take, beyond PER_THREAD for each."""
    item = DTYPES[problem.dtype].accumulator.itemsize
    return 4 * item * max(problem.size(role) for role in ("x", "w", "y")) + BEYOND


def exceeds(plan: Made, bound: int) -> bool:
    """Whether the workspace is too large even for one thread, or if all of them packed what each packs for itself."""
    return max(plan.shared_if_packed_for_all, plan.shared + plan.own_bytes - PER_THREAD) > bound


def threads(plan: Made, bound: int) -> int | None:
    """For how many threads there is room; None if for any number."""
    more = plan.own_bytes - PER_THREAD
    return (bound - plan.shared) // more if more > 0 else None
