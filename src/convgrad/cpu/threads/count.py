"""How many threads a call may use: what the user says, else the CPUs that the process may run on."""

from __future__ import annotations

import os
import re
from operator import index
from typing import Any

from ...errors import SpecError

MOST_THREADS = 1024

_chosen: int | None = None  # by the user
_default = 0  # as found out, once


def set_num_threads(n: int) -> None:
    """Let every later call use up to n threads."""
    global _chosen
    _chosen = _count(n, "set_num_threads", "n")


def get_num_threads() -> int:
    """The number of threads that a call may use.

    It is the last set_num_threads(), else CONVGRAD_NUM_THREADS, else the number of CPUs this process may run on, by its
    affinity and its control group's quota.
    """
    global _default
    number = asked_num_threads() or _default
    if not number:
        number = _default = min(available(), MOST_THREADS)
    return number


def asked_num_threads() -> int:
    """The number of threads that the user has asked for, with set_num_threads() or CONVGRAD_NUM_THREADS; else 0."""
    global _chosen
    if _chosen is None:
        text = os.environ.get("CONVGRAD_NUM_THREADS", "").strip()
        value = int(text) if re.fullmatch("[0-9]{1,9}", text) else text
        _chosen = _count(value, "", "CONVGRAD_NUM_THREADS") if text else 0
    return _chosen


def _count(value: Any, operation: str, argument: str) -> int:
    """A number of threads, from a caller or from the environment."""
    try:
        number = index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= MOST_THREADS:
        raise SpecError(
            f"{argument} must be a whole number of threads from 1 to {MOST_THREADS}, got {value!r}",
            argument=argument,
            operation=operation,
        )
    return number


def available(root: str = "/") -> int:
    """The number of CPUs that this process may use: its affinity, bounded by its control group's quota."""
    try:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    except OSError:
        cpus = os.cpu_count() or 1
    return max(1, min([cpus, *_quotas(root)]))


def _quotas(root: str) -> list[int]:
    """The CPU limits, in whole CPUs, of this process's control groups (versions 1 and 2) and all groups above them."""
    try:
        lines = _text(root, "proc/self/cgroup").splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # The path may be the host's, which is not mounted here; the groups that can be seen from here still count.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in ("",) if not controllers else ("cpu", controllers):
            for depth in range(len(parts), -1, -1):
                found.append(_quota(os.path.join(root, "sys/fs/cgroup", mount, *parts[:depth])))
    return [quota for quota in found if quota is not None]


def _quota(group: str) -> int | None:
    """One control group's limit in whole CPUs, rounded down, since a group that is over its limit stands still."""
    try:
        try:
            quota, period = _text(group, "cpu.max").split()
        except FileNotFoundError:
            quota, period = _text(group, "cpu.cfs_quota_us"), _text(group, "cpu.cfs_period_us")
        return max(1, int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # No such file, or "max".


def _text(*path: str) -> str:
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()
