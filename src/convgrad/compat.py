"""The older names of the operations, as functions: what the oneDNN Graph preview called them.

They compute what their successors in `convgrad` do, in the older words: `filter_format` for weights_format (XIO by
default, for the transposed ones too), `output_delta` for diff_dst, `filter` for weights.
"""

from __future__ import annotations

from .functional import Ints, Tensor, operation

__all__ = [
    "conv_transpose_backprop_data",
    "conv_transpose_backprop_filters",
    "convolution_backprop_data",
    "convolution_backprop_filters",
]


@operation("ConvolutionBackpropData")
def convolution_backprop_data(
    output_delta: Tensor,
    filter: Tensor,
    output_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    filter_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of Convolution with respect to its input. `output_shape` may be whole or spatial only."""


@operation("ConvolutionBackpropFilters")
def convolution_backprop_filters(
    input_forward: Tensor,
    output_delta: Tensor,
    filter_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    filter_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of Convolution with respect to its filter."""


@operation("ConvTransposeBackpropData")
def conv_transpose_backprop_data(
    output_delta: Tensor,
    filter: Tensor,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    filter_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of ConvTranspose with respect to its input (ConvTransposeBackpropData-1)."""


@operation("ConvTransposeBackpropFilters")
def conv_transpose_backprop_filters(
    input_forward: Tensor,
    output_delta: Tensor,
    filter_shape: Tensor = None,
    *,
    strides: Ints,
    pads_begin: Ints,
    pads_end: Ints,
    dilations: Ints,
    auto_pad: str = "none",
    groups: int = 1,
    data_format: str = "NXC",
    output_padding: Ints | None = None,
    filter_format: str = "XIO",
    same_rule: str = "gradient",
    algorithm: str = "direct",
    out: Tensor = None,
    accumulate: bool = False,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of ConvTranspose with respect to its filter."""
