"""How well LLVM translates what the engine has written, where a test does not ask how fast it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from convgrad.cpu.compile import jit


@contextmanager
def quick_code() -> Iterator[None]:
    """Instructions and registers are not chosen well, but in a third of the time; the code does what it says.

    It is told apart from the code that users get, in memory and on disk.
    """
    from convgrad.cpu.compile import llvm

    with mock.patch.object(llvm, "LEVEL", 0), mock.patch.object(jit, "llvm_build", lambda: "quick"):  # noqa: PT008
        yield
