"""What was planned for calls of PyTorch's tensors, found again when a call of the same kind comes.

A kind is all that a plan depends on: shapes, strides, element types and devices of the tensors, the geometry, and the
setting. To make a key of it takes microseconds, so what PyTorch has to tell tensors apart is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import engine
from ..libraries.torch import guard
from ..precision import get_float32_precision, is_silent

MOST_PLANS = 4096  # are kept
ALIKE = 4  # kinds of calls that are told apart by asking each: those with two shapes in common

T = TypeVar("T")

_num_threads = torch.get_num_threads
_conv_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_allows_tf32: Any = getattr(torch._C, "_get_cudnn_allow_tf32", bool)


class Recent(NamedTuple, Generic[T]):
    """A kind of call."""

    are_alike: Callable[..., bool]  # whether tensors are of the kind
    how: Any
    setting: Hashable
    plan: T


class Memory(Generic[T]):
    """Plans by kinds of calls. All are dropped when they are too many: shapes that never come again have filled it."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, T] = {}
        self.recent: dict[Hashable, tuple[Recent[T], ...]] = {}

    def find(self, tensors: Sequence[Tensor], how: Any, setting: Hashable, make: Callable[[], T]) -> T:
        """The plan for tensors and a geometry `how`, of lists and values that are compared."""
        for recent in self.recent.get((tensors[0].shape, tensors[1].shape, len(tensors)), ()):
            are_alike, given, then, plan = recent
            if given == how and then == setting and are_alike(*tensors):
                return plan
        return self._look(tensors, how, setting, make)

    def _look(self, tensors: Sequence[Tensor], how: Any, setting: Hashable, make: Callable[[], T]) -> T:
        seen = tuple([(tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors])
        key = (seen, tuple([tuple(part) if isinstance(part, list) else part for part in how]), setting)
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
                self.recent.clear()
            plan = self.plans[key] = make()
        are_alike = guard(tensors)
        if are_alike is not None:
            # Lists are the caller's, who may change them.
            given = tuple([[*part] if isinstance(part, list) else part for part in how])
            kind = (tensors[0].shape, tensors[1].shape, len(tensors))
            recent = Recent(are_alike, given, setting, plan)
            self.recent[kind] = (recent, *self.recent.get(kind, ()))[:ALIKE]
        return plan


def float32_precision() -> str:
    """How products of f32 are taken on a GPU: as the user has said, else as PyTorch's own convolutions take them."""
    if not is_silent():
        return get_float32_precision()
    if _conv_precision is not None:
        # Of its settings, this is the one that counts for convolutions; the older one fails where they differ.
        return "tf32" if _conv_precision("cuda", "conv") == "tf32" else "default"
    return "tf32" if _allows_tf32() else "default"


def setting(device: str) -> Hashable:
    """What a plan depends on besides its tensors and the geometry, on a kind of device."""
    own = float32_precision() if device == "cuda" else _num_threads()
    return own, *engine.setting(device)
