"""Train a small network with convgrad's gradients, through `torch.autograd.Function`.

convgrad computes outside of PyTorch's autograd and refuses tensors that require grad. A Function is where the two meet:
within it grad mode is off.
"""

from __future__ import annotations

from typing import Any

import torch

import convgrad

CALL: dict[str, Any] = dict(strides=2, pads_begin=1, pads_end=1, dilations=1, data_format="NCX", weights_format="OIX")


class Conv(torch.autograd.Function):
    """A convolution whose forward and gradients are convgrad's."""

    @staticmethod
    def forward(ctx: Any, src: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The result, and what the gradients need."""
        ctx.save_for_backward(src, weights)
        return convgrad.convolution(src, weights, bias, **CALL)

    @staticmethod
    def backward(ctx: Any, diff_dst: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs; that of the data only where it is asked for."""
        src, weights = ctx.saved_tensors
        diff_src = None
        if ctx.needs_input_grad[0]:
            diff_src = convgrad.convolution_backward_data(diff_dst, weights, tuple(src.shape), **CALL)
        diff_weights = convgrad.convolution_backward_weights(src, diff_dst, tuple(weights.shape), **CALL)
        return diff_src, diff_weights, convgrad.bias_backward(diff_dst, data_format="NCX")


def check() -> None:
    """The gradients must be those of PyTorch's own convolution: whole numbers, so to the bit."""
    torch.manual_seed(0)
    inputs = [torch.randint(-3, 4, shape).float() for shape in ((2, 4, 9, 9), (6, 4, 3, 3), (6,))]
    ours, theirs = ([a.clone().requires_grad_() for a in inputs] for _ in range(2))
    Conv.apply(*ours).square().sum().backward()
    torch.nn.functional.conv2d(*theirs, stride=2, padding=1).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def train(steps: int = 60) -> tuple[float, float]:
    """Learn to tell horizontal from vertical stripes; the loss before and after."""
    torch.manual_seed(0)
    images = torch.zeros(32, 1, 16, 16)
    images[:16, :, ::2] = 1
    images[16:, :, :, ::2] = 1
    images += 0.1 * torch.randn_like(images)
    labels = torch.arange(32) // 16
    weights, bias = torch.randn(4, 1, 3, 3).div(3).requires_grad_(), torch.zeros(4, requires_grad=True)
    head = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([weights, bias, *head.parameters()], lr=0.5)
    losses = []
    for _ in range(steps):
        features = Conv.apply(images, weights, bias).relu().mean((2, 3))
        loss = torch.nn.functional.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    check()
    before, after = train()
    print(f"gradients equal PyTorch's; loss {before:.3f} before, {after:.3f} after 60 steps")
    assert after < before / 4
