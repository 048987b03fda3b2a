"""Gradients of weights that are added to `weight.grad` as they are computed, without a tensor of their own.

What PyTorch does after a backward pass, `weight.grad += gradient`, is then part of the kernel. That is possible where
nothing else looks at the gradient before it is added; everywhere else it goes PyTorch's way, with the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec.problem import Role
from ..tensors import overlaps

PLAIN = frozenset([Tensor, torch.nn.Parameter])
"""Types of tensors that have memory of their own, and no rules of their own."""

are_functions_transformed = torch._C._are_functorch_transforms_active

# Whether a running backward() reaches a node; PyTorch's own hooks on several gradients ask the same.
_will_reach = getattr(torch._C, "_will_engine_execute_node", None)


_forward_ad: Any = torch.autograd.forward_ad


def has_level() -> bool:
    """Whether this is inside of forward-mode differentiation, so that tensors may carry tangents."""
    return bool(_forward_ad._current_level >= 0)


def moves() -> bool:
    """Whether tangents count here: they do not in what PyTorch differentiates by a rule."""
    return bool(_forward_ad._current_level >= 0) and torch._C._is_fwd_grad_enabled()


def is_transformed() -> bool:
    """Whether torch.func transforms what is called, or it may carry tangents of forward-mode differentiation."""
    return are_functions_transformed() or has_level()


def may_add(data: Tensor, weight: Tensor, wide: bool) -> bool:
    """Whether a call could add the gradient of its weight: a parameter itself, in plain PyTorch.

    Autocast puts a rounded copy in the place of a parameter, unless that may be wider than the data.
    """
    return (
        not torch.compiler.is_compiling()
        and _will_reach is not None
        and type(weight) in PLAIN
        and type(data) in PLAIN
        and weight.is_leaf
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not is_transformed()
        and (wide or not torch.is_autocast_enabled(data.device.type))
    )


def added(weight: Tensor, tensors: Mapping[Role, Tensor], like: tuple[Any, ...], call: Any) -> bool:
    """Add the gradient of a weight to the one it has; False where that must be left to PyTorch.

    True also if the backward pass does not want the gradient: `torch.autograd.grad` may ask for others.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight._backward_hooks:
        return False  # the gradient is differentiated itself, is traced, or somebody wants to see it
    try:
        node = torch.autograd.graph.get_gradient_edge(weight).node
        if _will_reach is None or not _will_reach(node):
            return _will_reach is not None
    except RuntimeError:
        return False  # torch.autograd.grad asks for this very gradient
    x, y, into = tensors["x"], tensors["y"], weight.grad
    if into is None or not _takes_sums(into, x, y):
        return False
    size, *_ = like
    geometry = (size, call.stride, call.padding, call.dilation, call.groups)
    torch.ops.convgrad.convolution_weights_into(x, y, into, *geometry, call.algorithm)
    return True


def _takes_sums(into: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether a gradient that is there can be added to in place, from plain tensors of one type."""
    return (
        all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in (into, x, y))
        and x.dtype is y.dtype
        and into.dtype in (x.dtype, torch.float32)
        and not (into.requires_grad or into.is_inference() or into.is_neg())
        and into.device == x.device
        and not overlaps(into.shape, into.stride())
    )
