"""The operators on tensors that several processes share: how PyTorch's DTensor may cut them.

A convolution can be cut along its images, the channels of x or the channels of y, as a product of matrices can along
its three axes. Every process computes with its own part: tensors that have the axis are cut there, inputs that have not
are needed whole, and a result that has not is a sum over all processes. With several groups, channels can be cut
between groups only, and each process then has its share of the groups.

PyTorch learns this as soon as `torch.distributed.tensor` is imported, which takes longer than all of this package and
is left to those who need it.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..spec.problem import Role

LIBRARY = "torch.distributed.tensor"

IMAGES: dict[Role, int] = {"x": 0, "y": 0}
INPUTS: dict[Role, int] = {"x": 1, "w": 1}
OUTPUTS: dict[Role, int] = {"w": 0, "y": 1}
GROUPS: dict[Role, int] = {"x": 1, "w": 0, "y": 1}
"""At which axis each tensor has the images, the channels of x and of y, and all channels, which groups divide."""


def cuts(groups: int, processes: int) -> list[Mapping[Role, int]]:
    """The ways to cut a convolution, and none: for each the axis of every tensor that has it."""
    if groups == 1:
        return [{}, IMAGES, OUTPUTS, INPUTS]
    # Where the groups do not come out even, a process would have part of one.
    return [{}, IMAGES, GROUPS] if groups % processes == 0 and _may_change_groups() else [{}, IMAGES]


def placements(wanted: Role, given: Sequence[Role], biased: bool | None, cut: Mapping[Role, int]) -> tuple[Any, ...]:
    """What DTensor calls a cut: the placement of the result, and those of the tensors that it is computed from."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def of(role: Role) -> Any:
        return Shard(cut[role]) if role in cut else Replicate()

    out = Partial() if cut and wanted not in cut else of(wanted)
    inputs = [of(role) for role in given]
    if biased is not None:
        # It is added to the channels of the result. To a sum over processes, each of them adds its part.
        channels = Shard(0) if cut.get(wanted) == 1 else Replicate()
        inputs.append(None if not biased else out if out.is_partial() else channels)
    return out, inputs


def whole(gradient: Tensor) -> Tensor:
    """A gradient without cuts through spatial axes, whatever the layer behind has made of it."""
    if type(gradient) is Tensor or LIBRARY not in sys.modules:
        return gradient
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor) or not any(map(_is_spatial, gradient.placements)):
        return gradient
    kept = [Replicate() if _is_spatial(placement) else placement for placement in gradient.placements]
    put_together: Tensor = gradient.redistribute(placements=kept)
    return put_together


def _is_spatial(placement: Any) -> bool:
    return getattr(placement, "dim", 0) >= 2


def _propagator() -> Any:
    """Where DTensor keeps its rules."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def _may_change_groups() -> bool:
    """Whether DTensor lets a rule change a number that is passed on to every process; versions before 2.13 do not."""
    return hasattr(_propagator(), "op_to_scalar_shape_adjuster")


def _rule(wanted: Role, given: Sequence[Role], name: str) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The rule of an operator, as `register_sharding` takes it."""

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        first, second, *rest = args
        biased = None if wanted == "w" else rest.pop(0) is not None
        refuse_spatial(name, {given[0]: first, given[1]: second})
        groups = rest[4]
        numbers = [None] * len(rest)
        found = (placements(wanted, given, biased, cut) for cut in cuts(groups, first.mesh.size()))
        return [([out], [*inputs, *numbers]) for out, inputs in found]

    return rule


def _into_rule(x: Any, y: Any, into: Any, *numbers: Any) -> list[tuple[list[Any], list[Any]]]:
    """The rule of what adds to a tensor: this one cannot be cut anew, so the others are, as it asks."""
    refuse_spatial("convolution_weights_into", {"x": x, "y": y, "w": into})
    found = (placements("w", ("x", "y"), None, cut) for cut in cuts(numbers[4], x.mesh.size()))
    fit = [[*inputs, out, *[None] * len(numbers)] for out, inputs in found if {out} == {*into.placements}]
    if not fit:
        raise UnsupportedError(
            f"convolution_weights_into: nothing can be added to weights placed as {tuple(into.placements)}; take "
            "Replicate(), Partial() or a shard of one axis of channels, the same for all axes of the mesh"
        )
    return [([], inputs) for inputs in fit]


def refuse_spatial(name: str, tensors: Mapping[Role, Any]) -> None:
    """Refuse tensors that are cut through height or width: neighbours would have to exchange the edges."""
    for role, tensor in tensors.items():
        for placement in tensor.placements:
            if _is_spatial(placement):
                raise UnsupportedError(
                    f"{name}: {role} is sharded over axis {placement.dim}, which is spatial, and processes do not "
                    "exchange the edges of their parts; redistribute it to Shard(0), Shard(1) or Replicate() first"
                )


def _share_groups(at: int) -> Callable[[list[Any], Any], Any]:
    """What gives each process its share of the groups, where channels are cut between them; `at` is their argument."""

    def adjust(inputs: list[Any], schema: Any) -> Any:
        args = list(schema.args_schema)
        spec = inputs[0]  # x or y, whose channels are cut only so where there are several groups
        if args[at] > 1:
            sizes = (spec.mesh.size(i) for i, p in enumerate(spec.placements) if getattr(p, "dim", None) == 1)
            args[at] //= math.prod(sizes)
        return type(schema)(schema.op, tuple(args), schema.kwargs_schema)

    return adjust


def register() -> None:
    """Tell DTensor how the operators may be cut."""
    from torch.distributed.tensor.experimental import register_sharding

    from .operators import GIVEN, OPERATORS

    propagator = _propagator()
    known = propagator.op_to_schema_info
    rules = [(name, _rule(wanted, GIVEN[wanted], name)) for wanted, name in OPERATORS.items()]
    for name, rule in (*rules, ("convolution_weights_into", _into_rule)):
        operator = getattr(torch.ops.convgrad, name).default
        register_sharding(operator)(rule)
        # What it remembers of a call must depend on all numbers. Left to itself, it would take those from the first
        # single one on, and two calls that differ only in their stride would pass for the same.
        known[operator] = dataclasses.replace(known[operator], static_argnum=2, needs_pytree=False)
        if _may_change_groups():
            arguments = [argument.name for argument in operator._schema.arguments]
            propagator.op_to_scalar_shape_adjuster[operator] = _share_groups(arguments.index("groups"))


class _Importing(importlib.abc.MetaPathFinder):
    """Sees to it that something is done when a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then, self.asks = name, then, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module, whoever else finds it, with one more thing to be done."""
        if name != self.name or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then()

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _try() -> None:
    """Register the rules. Where DTensor is not as it was, it goes on without them and refuses the operators itself."""
    try:
        register()
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(f"convgrad's operators cannot be sharded by PyTorch {torch.__version__}: {error}", stacklevel=2)


def when_needed() -> None:
    """Register the rules now if DTensor has been imported, else as soon as it is."""
    if LIBRARY in sys.modules:
        _try()
    else:
        sys.meta_path.insert(0, _Importing(LIBRARY, _try))
