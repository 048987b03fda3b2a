"""Whose threads compute: a caller whose library has started OpenMP's may have its calls run on those."""

from __future__ import annotations

import sys

HOST_TEAM = 1 << 16
"""Added to the `context` of a call on the CPU: have it run on the threads of the caller's OpenMP, if it has one."""

THREADS_OF: list[str] = []
"""Shared libraries of this process that compute with OpenMP; kernels may run on the threads of the first one's."""


def share_threads(library: str) -> None:
    """Name a shared library whose OpenMP is to run kernels too: its path, without the system's ending."""
    path = library + (".dylib" if sys.platform == "darwin" else ".so")
    if path not in THREADS_OF:
        THREADS_OF.append(path)
