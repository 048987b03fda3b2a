"""Layers for benchmarks on a GPU: real ones, of every class."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """A layer in PyTorch's words; every spatial axis has the same kernel, stride, padding and dilation."""

    name: str
    kind: str
    transposed: bool
    images: int
    channels: int  # of the input
    space: tuple[int, ...]
    filters: int  # channels of the output
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1


LAYERS = (
    Layer("resnet 1x1 64-256 56", "pointwise", False, 128, 64, (56, 56), 256, 1),
    Layer("resnet 1x1 1024-512 14", "pointwise", False, 128, 1024, (14, 14), 512, 1),
    Layer("resnet 3x3 64 56", "dense", False, 128, 64, (56, 56), 64, 3, 1, 1),
    Layer("resnet 3x3 128 28", "dense", False, 128, 128, (28, 28), 128, 3, 1, 1),
    Layer("resnet 3x3 256 14", "dense", False, 128, 256, (14, 14), 256, 3, 1, 1),
    Layer("resnet 3x3 512 7", "dense", False, 128, 512, (7, 7), 512, 3, 1, 1),
    Layer("resnet 3x3s2 128 56", "strided", False, 128, 128, (56, 56), 128, 3, 2, 1),
    Layer("resnet 1x1s2 512-1024 28", "strided", False, 128, 512, (28, 28), 1024, 1, 2),
    Layer("resnet 7x7s2 3-64 224", "stem", False, 64, 3, (224, 224), 64, 7, 2, 3),
    Layer("efficientnet 3x3s2 3-32 224", "stem", False, 128, 3, (224, 224), 32, 3, 2, 1),
    Layer("vit 16x16s16 3-768 224", "patches", False, 128, 3, (224, 224), 768, 16, 16),
    Layer("convnext 4x4s4 3-96 224", "patches", False, 128, 3, (224, 224), 96, 4, 4),
    Layer("convnext 2x2s2 192-384 28", "patches", False, 128, 192, (28, 28), 384, 2, 2),
    Layer("vae 3x3 512 64", "dense", False, 8, 512, (64, 64), 512, 3, 1, 1),
    Layer("vae 3x3 128 256", "dense", False, 8, 128, (256, 256), 128, 3, 1, 1),
    Layer("unet 3x3 320 64", "dense", False, 16, 320, (64, 64), 320, 3, 1, 1),
    Layer("deeplab 3x3d2 256 64", "dilated", False, 16, 256, (64, 64), 256, 3, 1, 2, 2),
    Layer("deeplab 3x3d12 512-256 33", "dilated", False, 16, 512, (33, 33), 256, 3, 1, 12, 12),
    Layer("mobilenet dw 3x3 192 56", "depthwise", False, 128, 192, (56, 56), 192, 3, 1, 1, 1, 192),
    Layer("efficientnet dw 5x5s2 240 28", "depthwise", False, 128, 240, (28, 28), 240, 5, 2, 2, 1, 240),
    Layer("convnext dw 7x7 96 56", "depthwise", False, 128, 96, (56, 56), 96, 7, 1, 3, 1, 96),
    Layer("mamba dw k4 4096 4096", "depthwise", False, 8, 4096, (4096,), 4096, 4, 1, 3, 1, 4096),
    Layer("resnext 3x3 128 56 g32", "grouped", False, 128, 128, (56, 56), 128, 3, 1, 1, 1, 32),
    Layer("regnet 3x3 368 14 g8", "grouped", False, 128, 368, (14, 14), 368, 3, 1, 1, 1, 8),
    Layer("wav2vec k128 768 499 g16", "grouped", False, 16, 768, (499,), 768, 128, 1, 64, 1, 16),
    Layer("audio k9 512 2048", "1D", False, 16, 512, (2048,), 512, 9, 1, 4),
    Layer("whisper k3 80-512 3000", "1D", False, 32, 80, (3000,), 512, 3, 1, 1),
    Layer("unet3d 3x3x3 32 64", "3D", False, 4, 32, (64, 64, 64), 32, 3, 1, 1),
    Layer("unet3d 3x3x3 128 32", "3D", False, 4, 128, (32, 32, 32), 128, 3, 1, 1),
    Layer("dcgan T4x4s2 512-256 16", "transposed", True, 128, 512, (16, 16), 256, 4, 2, 1),
    Layer("unet T2x2s2 128-64 128", "transposed", True, 16, 128, (128, 128), 64, 2, 2),
    Layer("vocoder T16s8 512-256 256", "transposed", True, 32, 512, (256,), 256, 16, 8, 4),
)
