"""What passes between a call and what computes it, and what a back end and an array library must offer.

A new back end is a module with the members of `Backend`, and `engine.register` or a row in `engine`; a new array
library is one with the members of `Library`, and `libraries.register` or a row there. Two places know one by name:
`explanation` the CPU's back end, whose plans it tells; and `calls` PyTorch, whose autograd may look on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .dtypes import DTYPES
from .spec.problem import Ints, Problem


@dataclass(frozen=True)
class Device:
    """Where memory is, and where it is computed on."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


HOST = Device()


class Tensor(NamedTuple):
    """A tensor of any library. It takes a microsecond to make, so calls that are remembered do without it."""

    memory: Any  # what keeps the address good; on the host a NumPy view of the whole tensor
    address: int  # of the element at index 0 of every axis
    shape: Ints
    strides: Ints  # in bytes
    dtype: str  # oneDNN's name, or the library's for a type that no operation takes
    device: Device = HOST
    locked: str = ""  # what it is, if nobody may write to it
    copied: bool = False  # whether the memory is a copy, because the original cannot be read in place

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].size

    @property
    def bounds(self) -> Bounds:
        """Where the tensor begins and ends."""
        if 0 in self.shape:
            return self.address, self.address
        spans = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        back = sum([span for span in spans if span < 0])
        return self.address + back, self.address + sum(spans) - back + self.item


Bounds = tuple[int, int]
"""The first address of a tensor, and the first one behind it."""


def may_overlap(bounds: Bounds, others: Iterable[Bounds]) -> bool:
    """Whether a tensor may have a byte in common with one of some others."""
    low, high = bounds
    for begin, end in others:
        if low < end and begin < high:
            break
    else:
        return False
    return True


class Refusal(NamedTuple):
    """Why a back end does not take a problem."""

    backend: str
    reason: str
    instead: str = ""  # what would have it take the problem

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


class Estimate(NamedTuple):
    """What a problem is expected to take, to choose between back ends and between algorithms."""

    seconds: float
    bytes: int  # of workspace
    error: float = 1.0  # the largest error of a result, if the bound for direct sums is 1


class Plan(Protocol):
    """How a problem would be computed. Beyond this, plans are the back end's own affair; their `str` tells them."""

    @property
    def estimate(self) -> Estimate | None:
        """What the problem is expected to take; None if nobody knows."""


class Executable(Protocol):
    """A problem, ready to be computed, any number of times and from any number of threads at once."""

    def __call__(self, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
        """Write every element of the wanted tensor; the arguments are addresses.

        `context` is a CUDA stream, or how many threads the CPU may use, where 0 leaves it to the back end, plus
        `host_team.HOST_TEAM` or not.
        """


class Backend(Protocol):
    """What computes problems on one kind of device."""

    @property
    def name(self) -> str:
        """What it is called in reasons."""

    @property
    def device(self) -> str:
        """The kind of device that it computes on."""

    def setting(self) -> Hashable:
        """All that a choice depends on besides the problem and the device."""

    def load(self, problem: Problem, device: Device) -> Executable | Refusal:
        """A problem ready to be computed. A warm start finds it without a plan."""

    def plan(self, problem: Problem, device: Device) -> Plan | Refusal | None:
        """How a problem would be computed, for `explain`; None if there is nothing to plan."""

    def empty(self, shape: Ints, dtype: str, strides: Ints | None, like: Any) -> tuple[Any, int]:
        """Memory of a new tensor, its values not set, and its address; `Library.wrap` makes a tensor of it.

        Strides are in bytes, without gaps; None is the order of the shape. `like` is the caller's first tensor: on a
        device whose memory its library keeps, the new one is made by way of it.
        """

    def duplicate(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in memory of its own, with the same strides."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy values between tensors of one shape."""


class Library(Protocol):
    """An array library. It is never imported here: whoever has a value of it has done that."""

    @property
    def name(self) -> str:
        """What the library is called."""

    def owns(self, value: Any) -> bool:
        """Whether a value is an array of this library."""

    def keyed(self) -> tuple[type, ...]:
        """The exact types of values that `look` may be asked about."""

    def look(self, value: Any) -> tuple[Hashable, int] | None:
        """A key, and the address of the first element; None if a value must be opened to be known.

        The key has all that opening a value looks at: values with the same key differ in their address alone.
        """

    def is_writable(self, value: Any) -> bool:
        """Whether a result may be written to a value that `look` knows."""

    def open(self, value: Any, name: str) -> Tensor:
        """The tensor on the same memory; a value that is none we can use is a SpecError that calls it `name`."""

    def wrap(self, memory: Any, like: Any) -> Any:
        """New memory, from `Backend.empty`, as a tensor of the same kind as `like`."""

    def written(self, value: Any) -> None:
        """Take note that the memory of a value was written to."""

    def context(self, value: Any) -> int:
        """The `context` that a value is computed in: the current stream of its device, 0 or `host_team.HOST_TEAM`."""
