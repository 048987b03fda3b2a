"""Train a small network whose convolutions are convgrad's: PyTorch's autograd knows their gradients.

The first layer is a module; the second one calls a plain function, in a layout that PyTorch has no layers for.
"""

from __future__ import annotations

import torch

import convgrad
import convgrad.torch


class LastChannels(torch.nn.Module):
    """A convolution of images (batch, height, width, channels)."""

    def __init__(self, channels: int, results: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(3, 3, channels, results) / 6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The result, of half the size."""
        return convgrad.convolution(images, self.weights, strides=2, pads_begin=1, pads_end=1, dilations=1)


def check() -> None:
    """The gradients must be those of PyTorch's own convolution: whole numbers, so to the bit."""
    torch.manual_seed(0)
    inputs = [torch.randint(-3, 4, shape).float() for shape in ((2, 4, 9, 9), (6, 4, 3, 3), (6,))]
    ours, theirs = ([a.clone().requires_grad_() for a in inputs] for _ in range(2))
    convgrad.torch.conv2d(*ours, stride=2, padding=1).square().sum().backward()
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
    first, second = convgrad.torch.Conv2d(1, 4, 3, padding="same"), LastChannels(4, 8)
    head = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *head.parameters()], lr=0.2)
    losses = []
    for _ in range(steps):
        features = second(first(images).relu().movedim(1, -1)).relu().mean((1, 2))
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
