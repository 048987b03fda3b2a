"""Random layers with the arguments of PyTorch's functions, and PyTorch in float64 as their judge.

Values are small whole numbers, whose sums are exact in every element type: results are compared for equality.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import convgrad.torch

EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11, torch.float64: 2**53}
LAYOUTS = ("first", "last", "expanded", "sliced", "turned", "negated")


def whole(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape in memory of another kind; the same values, but for an expanded tensor."""
    order = (0, *range(2, tensor.dim()), 1)
    if layout == "last":
        return tensor.permute(order).contiguous().permute(sorted(range(tensor.dim()), key=order.__getitem__))
    if layout == "expanded" and len(tensor):
        return tensor[:1].expand(tensor.shape)
    if layout == "sliced":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "turned":
        return tensor.transpose(-1, 0).contiguous().transpose(-1, 0)
    if layout == "negated":
        return torch._neg_view(-tensor)
    return tensor


@dataclass
class Layer:
    """A call of a function."""

    name: str
    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor | None
    more: dict[str, Any]

    def run(self, ours: bool, dtype: torch.dtype | None = None, **options: Any) -> list[torch.Tensor]:
        """The result and the gradients of all inputs, for a gradient of whole numbers."""
        inputs = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (self.x, self.w, self.b) if t is not None]
        function = getattr(convgrad.torch if ours else F, self.name)
        y = function(*inputs, **self.more, **options)
        grad = whole(*y.shape, dtype=torch.int64, seed=1).sign().to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def draw(seed: int) -> Layer:
    """A layer of any kind."""
    rng = random.Random(seed)
    rank, transposed, groups = rng.choice([1, 2, 3]), rng.random() < 0.4, rng.choice([1, 1, 2, 3])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
    cin, cout, n = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), 0 if rng.random() < 0.05 else rng.randint(1, 3)
    kernel, stride, dilation, padding = (
        [rng.randint(least, most) for _ in range(rank)] for least, most in ((1, 3), (1, 3), (1, 2), (0, 2))
    )
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    least = [1 if transposed else max(1, s - 2 * p) for s, p in zip(span, padding, strict=True)]
    if transposed:
        padding = [min(p, (s - 1) // 2) for p, s in zip(padding, span, strict=True)]
    size = [rng.randint(few, 7) for few in least]
    x = whole(n, cin * groups, *size, dtype=dtype, seed=seed)
    w = whole(*((cin * groups, cout) if transposed else (cout * groups, cin)), *kernel, dtype=dtype, seed=seed + 1)
    b = whole(cout * groups, dtype=dtype, seed=seed + 2) if rng.random() < 0.5 else None
    more: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        more["output_padding"] = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    return Layer(name, laid(x, rng.choice(LAYOUTS)), laid(w, rng.choice(LAYOUTS[:1] * 3 + LAYOUTS)), b, more)
