"""The back ends, which of them computes a problem, and why."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from . import numpy_backend
from .backend import HOST, Backend, Device, Executable, Plan, Refusal
from .cpu import backend as cpu
from .errors import UnsupportedError
from .gpu import backend as gpu
from .spec import Problem

BACKENDS: list[Backend] = [cpu, numpy_backend, gpu]
"""In the order in which they are asked."""


class Choice(NamedTuple):
    """The back end that computes a problem, what it has made of it, and why those before it did not take it."""

    backend: Backend
    execute: Executable
    refusals: tuple[Refusal, ...]


class Planned(NamedTuple):
    """How a problem would be computed: the back end, its plan, and why those before it do not take it."""

    backend: Backend
    plan: Plan | None
    refusals: tuple[Refusal, ...]


MEMORIES: list[dict[Any, Any]] = []
"""What others remember of choices by less than `setting`."""


def register(backend: Backend) -> None:
    """Add a back end; it is asked before all others for its kind of device."""
    BACKENDS.insert(0, backend)
    for memory in MEMORIES:
        memory.clear()


def setting(device: str = "") -> list[Hashable]:
    """All that a choice depends on besides the problem and the device, if it is made for one kind of these."""
    return [backend.setting() for backend in BACKENDS if not device or backend.device == device]


def choose(problem: Problem, device: Device = HOST, only: str = "") -> Choice:
    """The first back end that takes a problem, ready to compute it; or the one that `only` names."""
    refusals: list[Refusal] = []
    for backend in _on(device):
        if only in ("", backend.name):
            found = backend.load(problem, device)
            if not isinstance(found, Refusal):
                return Choice(backend, found, tuple(refusals))
            refusals.append(found)
    raise _refused(refusals, device)


def explain(problem: Problem, device: Device = HOST) -> Planned:
    """How a problem is computed with the present setting."""
    refusals: list[Refusal] = []
    for backend in _on(device):
        found = backend.plan(problem, device)
        if not isinstance(found, Refusal):
            return Planned(backend, found, tuple(refusals))
        refusals.append(found)
    raise _refused(refusals, device)


def _on(device: Device) -> list[Backend]:
    return [backend for backend in BACKENDS if backend.device == device.kind]


def _refused(refusals: list[Refusal], device: Device) -> UnsupportedError:
    """The error with every back end's reason, that of the first one first: it is the one to do something about."""
    others = [Refusal(b.name, f"computes on {b.device}, not on {device}") for b in BACKENDS if b.device != device.kind]
    if not refusals:
        return UnsupportedError(
            f"no back end takes this problem: {'; '.join(map(str, others))}; move the tensors there"
        )
    first, rest = refusals[0], [*refusals[1:], *others]
    return UnsupportedError(
        f"{first.reason} ({first.backend}); no other back end takes it: {'; '.join(map(str, rest))}"
    )
