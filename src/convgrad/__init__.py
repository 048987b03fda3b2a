"""Convolution, transposed convolution and their gradients, exactly as oneDNN Graph defines them."""

from typing import TYPE_CHECKING, Any

from . import compat
from .cpu.threads.count import get_num_threads, set_num_threads
from .errors import CompileError, ConvgradError, LayoutWarning, OutOfMemoryError, SpecError, UnsupportedError
from .functional import (
    apply,
    bias_backward,
    conv_transpose,
    conv_transpose_backward_data,
    conv_transpose_backward_weights,
    convolution,
    convolution_backward_data,
    convolution_backward_weights,
    explain,
)
from .precision import get_float32_precision, set_float32_precision

if TYPE_CHECKING:
    from . import graph, torch

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "ConvgradError",
    "LayoutWarning",
    "OutOfMemoryError",
    "SpecError",
    "UnsupportedError",
    "apply",
    "bias_backward",
    "compat",
    "conv_transpose",
    "conv_transpose_backward_data",
    "conv_transpose_backward_weights",
    "convolution",
    "convolution_backward_data",
    "convolution_backward_weights",
    "explain",
    "get_float32_precision",
    "get_num_threads",
    "graph",
    "set_float32_precision",
    "set_num_threads",
    "torch",
]


def __getattr__(name: str) -> Any:
    """`convgrad.graph` and `convgrad.torch`, imported when they are first used."""
    if name in ("graph", "torch"):
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
