"""BiasAdd and BiasAddBackward, which are no convolutions: bound by their rows, and computed in NumPy.

    BiasAdd:          dst[n, c, ...] = src[n, c, ...] + bias[c]
    BiasAddBackward:  diff_bias[c] = Σ diff_dst[n, c, ...]

Sums are taken in the accumulator type, then rounded once. Both take data of any rank from 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .dtypes import DTYPES, Array
from .spec.bind import Description, result_dtype
from .spec.check import broken, check_attributes, check_dtypes, check_input_count
from .spec.problem import Ints
from .spec.table import DATA_AXES, Op


class Bound(NamedTuple):
    """What a call comes to: exact attributes, the element type of the inputs, shape and element type of the result."""

    attributes: Mapping[str, Any]
    dtype: str
    shape: Ints
    out_dtype: str


def bind(
    op: Op, inputs: Sequence[Description | None], attributes: Mapping[str, Any], out: Description | None = None
) -> Bound:
    """Check one operation against its tensors. `out` describes the result where it is known."""
    check_input_count(op, sum(description is not None for description in inputs))
    dtype = check_dtypes(op, [d.dtype if d else None for d in inputs])
    attrs = check_attributes(op, attributes)
    out_dtype = result_dtype(op, dtype, attrs["out_dtype"], out)
    if attrs["accumulate"] and out is None:
        raise broken("accumulate_out", "accumulate")
    shape = infer(op, inputs, attrs)
    if out is not None and out.shape != shape:
        data = inputs[0]
        hint = _other(op, data.shape, attrs, out.shape) if data else ""
        source = f"{op.output.name} for {_told(op, data, attrs)}"
        raise broken("shapes_agree", "out", out.shape, expected=shape, source=source, hint=hint)
    return Bound(attrs, dtype, shape, out_dtype)


def infer(op: Op, inputs: Sequence[Description | None], attrs: Mapping[str, Any]) -> Ints:
    """The shape of the result."""
    data = inputs[0]
    if data is None or len(data.shape) < 2:
        raise broken("bias_rank", op.inputs[0].name, data and data.shape)
    channels = data.shape[_channel_axis(len(data.shape), attrs["data_format"])]
    if op.wanted == "bias":
        return (channels,)
    bias = inputs[1]
    if bias is None or bias.shape != (channels,):
        hint = _other(op, data.shape, attrs, bias.shape) if bias else ""
        told = f"channel of {_told(op, data, attrs)}"
        raise broken("bias_length", "bias", bias and bias.shape, expected=channels, first=told, hint=hint)
    return data.shape


def compute(op: Op, attrs: Mapping[str, Any], dtype: str, inputs: Sequence[Array], out: Array) -> None:
    """Compute into `out`, which may lie on the data itself."""
    sums = DTYPES[dtype].accumulator
    data = inputs[0]
    axis = _channel_axis(data.ndim, attrs["data_format"])
    others = tuple(a for a in range(data.ndim) if a != axis)
    # Overflow to infinity is what rounding to a narrow type means; it is no accident to warn of.
    with np.errstate(over="ignore", invalid="ignore"):
        if op.wanted == "bias":
            result = data.sum(axis=others, dtype=sums)
        else:
            result = data.astype(sums) + np.expand_dims(inputs[1].astype(sums), others)
        if attrs.get("accumulate"):
            result += out
        out[...] = result


def _channel_axis(ndims: int, data_format: str) -> int:
    return 1 if DATA_AXES[data_format] == "nck" else ndims - 1


def _told(op: Op, data: Description | None, attrs: Mapping[str, Any]) -> str:
    """The data in a message: `diff_dst (8, 32, 32, 3) in NXC`."""
    return f"{op.inputs[0].name} {data and data.shape} in {attrs['data_format']}"


def _other(op: Op, data: Ints, attrs: Mapping[str, Any], bias: Ints) -> str:
    """A hint at the other order of the axes, if a bias of that shape fits it."""
    fits = [f for f in DATA_AXES if f != attrs["data_format"] and bias == (data[_channel_axis(len(data), f)],)]
    return f"these shapes fit data_format={fits[0]!r}" if fits else ""
