"""Permission to use tile registers: Linux gives it to a process that asks, because threads that use them cost memory.

It is asked for once, when a plan first wants tiles. It holds for all threads of the process, those that exist and those
to come, and for the child of a fork, whose tile registers are empty; a new program has to ask again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..target import Target

ARCH_PRCTL = 158  # the system call on x86-64
GET_PERMISSION, REQUEST_PERMISSION = 0x1022, 0x1023
TILE_DATA = 18  # the number of this part of a thread's state


def allowed(target: Target) -> Target:
    """A target with tiles; with the reason, if the system does not let this process use them."""
    reason = "" if target.tiles.emulated else refusal()
    return replace(target, tiles=replace(target.tiles, refused=reason)) if reason else target


@lru_cache(maxsize=1)
def refusal() -> str:
    """Why this process may not use tile registers; nothing if it may."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "amd64"):
        return "tile registers are only asked for on Linux and x86-64"
    number = ask()
    if not number:
        return ""
    if number == errno.ENOSPC:
        return "a thread has too small a stack for signals to have its tile registers saved there"
    return f"the system does not let this process use tile registers: {os.strerror(number)}"


def ask() -> int:
    """Ask for permission; gives 0, or the number of the error."""
    call: Any = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(ARCH_PRCTL), ctypes.c_long(REQUEST_PERMISSION), ctypes.c_long(TILE_DATA)):
        return ctypes.get_errno() or errno.EPERM
    # A sandbox may answer without having done anything: then the parts that are permitted do not have tiles among them.
    permitted = ctypes.c_uint64(0)
    asked = call(ctypes.c_long(ARCH_PRCTL), ctypes.c_long(GET_PERMISSION), ctypes.byref(permitted))
    return errno.EPERM if asked == 0 and not permitted.value >> TILE_DATA & 1 else 0
