"""Convolutions for PyTorch: functions, modules, and `install()`, which has every model's gradients computed here."""

from . import sharding
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .routing import install, installed, report, uninstall

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "install",
    "installed",
    "report",
    "uninstall",
]

sharding.when_needed()
