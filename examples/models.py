"""Six small networks in plain PyTorch, and data to train them on; `train.py` trains them.

Each is a known network with fewer layers: shapes of layers are those of the network, on smaller images. Nothing here
knows convgrad. Data are made, not downloaded: gratings whose direction is the class, discs and balls to be outlined,
sounds whose interval is the class, all under noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """ResNet's basic block (He et al. 2015)."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Identity()
        if (before, stride) != (after, 1):
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet(width: int, classes: int) -> nn.Module:
    """ResNet-18 without its last stage: a strided 7x7 stem, basic blocks of 3x3, strides with 1x1 beside them."""
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Residual(width, width),
        Residual(width, width),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 2 * width),
        Residual(2 * width, 4 * width, 2),
        Residual(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """The result."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt's block (Liu et al. 2022): depthwise 7x7, then a perceptron for each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(width: int, classes: int) -> nn.Module:
    """ConvNeXt with three stages: a 4x4 stem, depthwise 7x7, and 2x2 with stride 2 between the stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width), ConvNext(width), ConvNext(width)]
    for channels in (width, 2 * width):
        layers += [ChannelNorm(channels), nn.Conv2d(channels, 2 * channels, 2, 2)]
        layers += [ConvNext(2 * channels), ConvNext(2 * channels)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


class Inverted(nn.Module):
    """MobileNetV2's block (Sandler et al. 2018): 1x1 to six times the channels, depthwise 3x3, 1x1 back."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = 6 * before
        self.adds = (before, stride) == (after, 1)
        self.layers = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        y = self.layers(x)
        return x + y if self.adds else y


def mobilenet(width: int, classes: int) -> nn.Module:
    """MobileNetV2's first stages: 1x1 and depthwise 3x3, with strides 1 and 2."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(),
        Inverted(width, width, 1),
        Inverted(width, 3 * width // 2, 2),
        Inverted(3 * width // 2, 3 * width // 2, 1),
        Inverted(3 * width // 2, 2 * width, 2),
        Inverted(2 * width, 2 * width, 1),
        Inverted(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def twice(rank: int, before: int, after: int) -> nn.Module:
    """U-Net's pair of convolutions, in two or three dimensions, with InstanceNorm as nnU-Net has it."""
    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if rank == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    return nn.Sequential(
        conv(before, after, 3, padding=1, bias=False),
        norm(after, affine=True),
        nn.ReLU(),
        conv(after, after, 3, padding=1, bias=False),
        norm(after, affine=True),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015; in 3D Çiçek et al. 2016): down to a quarter, up by transposed convolutions."""

    def __init__(self, rank: int, width: int, classes: int) -> None:
        super().__init__()
        self.rank = rank
        transposed, conv = (nn.ConvTranspose2d, nn.Conv2d) if rank == 2 else (nn.ConvTranspose3d, nn.Conv3d)
        self.down1 = twice(rank, 1, width)
        self.down2 = twice(rank, width, 2 * width)
        self.bottom = twice(rank, 2 * width, 4 * width)
        self.up2 = transposed(4 * width, 2 * width, 2, 2)
        self.join2 = twice(rank, 4 * width, 2 * width)
        self.up1 = transposed(2 * width, width, 2, 2)
        self.join1 = twice(rank, 2 * width, width)
        self.head = conv(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A score for each class, at every pixel."""
        pool = F.max_pool2d if self.rank == 2 else F.max_pool3d
        first = self.down1(x)
        second = self.down2(pool(first, 2))
        bottom = self.bottom(pool(second, 2))
        second = self.join2(torch.cat([self.up2(bottom), second], 1))
        return self.head(self.join1(torch.cat([self.up1(second), first], 1)))


class Dilated(nn.Module):
    """A residual unit of audio codecs (SoundStream, Zeghidour et al. 2021): a dilated kernel of 7, then 1."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.wide = nn.Conv1d(channels, channels, 7, padding=3 * dilation, dilation=dilation)
        self.narrow = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The unit's result."""
        return x + self.narrow(F.elu(self.wide(F.elu(x))))


def audio(width: int, classes: int) -> nn.Module:
    """SoundStream's encoder: dilations of 1, 3 and 9, then a convolution with stride 2, 4 and 4."""
    layers: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
    channels = width
    for stride in (2, 4, 4):
        layers += [Dilated(channels, dilation) for dilation in (1, 3, 9)]
        layers += [nn.ELU(), nn.Conv1d(channels, 2 * channels, 2 * stride, stride, stride // 2)]
        channels *= 2
    return nn.Sequential(*layers, nn.ELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, classes))


Batch = tuple[Tensor, Tensor]


def gratings(batch: int, size: int, classes: int, random: torch.Generator) -> Batch:
    """Images of parallel waves in three colours; the direction of the waves is the class."""
    labels = torch.randint(classes, (batch,), generator=random)
    angle = labels * (math.pi / classes)
    phase = 2 * math.pi * torch.rand(batch, 3, generator=random)
    at = torch.linspace(0, 12, size)
    along = angle.cos()[:, None, None] * at + angle.sin()[:, None, None] * at[:, None]  # (batch, size, size)
    images = torch.sin(2 * along[:, None] + phase[:, :, None, None])
    return images + 0.5 * torch.randn(images.shape, generator=random), labels


def balls(rank: int, batch: int, size: int, classes: int, random: torch.Generator) -> Batch:
    """Noisy pictures of one disc or ball each; the class of a pixel is whether it is inside."""
    at = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(*(at,) * rank, indexing="ij"))  # (rank, *size)
    ones = (1,) * rank
    centre = torch.rand(batch, rank, generator=random).sub(0.5).reshape(batch, rank, *ones)
    radius = torch.rand(batch, generator=random).mul(0.3).add(0.3).reshape(batch, *ones)
    labels = ((grid - centre).square().sum(1).sqrt() < radius).long() % classes  # (batch, *size)
    images = labels[:, None].float()
    return images + 0.5 * torch.randn(images.shape, generator=random), labels


def sounds(batch: int, size: int, classes: int, random: torch.Generator) -> Batch:
    """Two tones at a time; the interval between them is the class."""
    labels = torch.randint(classes, (batch,), generator=random)
    low = 0.02 + 0.02 * torch.rand(batch, 1, generator=random)
    high = low * 2 ** ((labels[:, None] + 1) / classes)
    at = 2 * math.pi * torch.arange(size)
    waves = torch.sin(low * at) + torch.sin(high * at)
    return (waves + 0.3 * torch.randn(waves.shape, generator=random))[:, None], labels


@dataclass(frozen=True)
class Model:
    """A network, its data, how large both are, and how fast it learns. `small` is (batch, size, width) of a test."""

    name: str
    about: str
    rank: int
    make: Callable[[int, int], nn.Module]
    data: Callable[[int, int, int, torch.Generator], Batch]
    batch: int
    size: int
    width: int
    classes: int
    rate: float
    small: tuple[int, int, int]


def unet2d(width: int, classes: int) -> nn.Module:
    """U-Net for images."""
    return UNet(2, width, classes)


def unet3d(width: int, classes: int) -> nn.Module:
    """U-Net for volumes."""
    return UNet(3, width, classes)


MODELS = (
    Model("resnet", "3x3, strides, a 7x7 stem", 2, resnet, gratings, 8, 112, 64, 10, 0.005, (2, 32, 8)),
    Model("convnext", "depthwise 7x7", 2, convnext, gratings, 8, 128, 64, 10, 0.01, (2, 32, 8)),
    Model("mobilenet", "1x1, depthwise 3x3", 2, mobilenet, gratings, 16, 112, 16, 10, 0.005, (2, 32, 8)),
    Model("unet", "3x3, transposed 2x2", 2, unet2d, partial(balls, 2), 8, 64, 32, 2, 0.05, (2, 16, 4)),
    Model("unet3d", "3x3x3, transposed 2x2x2", 3, unet3d, partial(balls, 3), 1, 32, 16, 2, 0.05, (1, 8, 4)),
    Model("audio", "1D: dilated, strided", 1, audio, sounds, 8, 4096, 32, 8, 0.05, (2, 256, 4)),
)
