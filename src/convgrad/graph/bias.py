"""BiasAdd and BiasAddBackward: rows like those of the table, so that a layer's whole backward pass fits in one graph.

    BiasAdd:          dst[n, c, ...] = src[n, c, ...] + bias[c]
    BiasAddBackward:  diff_bias[c] = Σ diff_dst[n, c, ...]

Sums are taken in the accumulator type, then rounded once. Both take data of any rank from 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import DTYPES
from ..errors import SpecError
from ..spec.bind import Description
from ..spec.check import broken, meant, shown
from ..spec.dialects import DIALECTS, Meaning
from ..spec.dialects import find as find_in_family
from ..spec.problem import Ints
from ..spec.table import OPS, Arg, Op
from .kinds import KINDS, PREVIEW_KINDS, refuse

Array = np.ndarray[Any, np.dtype[Any]]

_data_format = next(attr for attr in OPS["Convolution"].attrs if attr.name == "data_format")

BIAS_OPS: dict[str, Op] = {
    op.kind: op
    for op in (
        Op(
            "BiasAdd",
            "bias_add",
            "Add one value per channel.",
            (Arg("src", "data", "input data"), Arg("bias", "bias", "one value per channel")),
            Arg("dst", "sum", "result"),
            (_data_format,),
            transposed=False,
        ),
        Op(
            "BiasAddBackward",
            "bias_add_backward",
            "The gradient of BiasAdd, and of the bias of Convolution and ConvTranspose.",
            (Arg("diff_dst", "data", "gradient with respect to dst"),),
            Arg("diff_bias", "bias", "gradient with respect to the bias"),
            (_data_format,),
            transposed=False,
        ),
    )
}


def find(kind: object) -> Meaning:
    """The operation of a name that a graph may hold. The rule of the error tells a strange name from a wrong one."""
    if isinstance(kind, str):
        if kind in BIAS_OPS:
            return Meaning(kind, BIAS_OPS[kind])
        name = kind.removesuffix("-1")
        if name not in {*OPS, *DIALECTS}:
            if name in KINDS | PREVIEW_KINDS:
                raise broken("known_operation", shown(kind))
            raise refuse("known_kind", shown(kind), hint=meant(kind, [*OPS, *DIALECTS, *sorted(KINDS)]))
    return find_in_family(kind)


def is_ours(kind: str) -> bool:
    """Whether a kind of operation is of this family. One that oneDNN Graph does not have at all is an error."""
    try:
        find(kind)
    except SpecError as error:
        if error.rule != "known_operation":
            raise
        return False
    return True


def infer(op: Op, inputs: Sequence[Description | None], attrs: Mapping[str, Any]) -> Ints:
    """The shape of the result."""
    data = inputs[0]
    name = op.inputs[0].name
    if data is None or len(data.shape) < 2:
        got = data and data.shape
        raise SpecError(
            f"{name} must have at least 2 dimensions, got {got}",
            status="invalid_shape",
            rule="data_rank",
            argument=name,
        )
    channels = data.shape[_channel_axis(len(data.shape), attrs)]
    if op.kind == "BiasAddBackward":
        return (channels,)
    bias = inputs[1]
    if bias is None or bias.shape != (channels,):
        raise broken(
            "bias_length", "bias", bias and bias.shape, expected=channels, first=f"channel of {name} {data.shape}"
        )
    return data.shape


def compute(op: Op, attrs: Mapping[str, Any], dtype: str, inputs: Sequence[Array], out: Array) -> None:
    """Compute into `out`, which may be the array of the data itself."""
    sums = DTYPES[dtype].accumulator
    data = inputs[0]
    axis = _channel_axis(data.ndim, attrs)
    # Overflow to infinity is what rounding to a narrow type means; it is no accident to warn of.
    with np.errstate(over="ignore", invalid="ignore"):
        if op.kind == "BiasAddBackward":
            others = tuple(a for a in range(data.ndim) if a != axis)
            out[...] = data.sum(axis=others, dtype=sums)
        else:
            bias = inputs[1].astype(sums).reshape([-1 if a == axis else 1 for a in range(data.ndim)])
            out[...] = data.astype(sums) + bias


def _channel_axis(ndims: int, attrs: Mapping[str, Any]) -> int:
    return 1 if attrs["data_format"] == "NCX" else ndims - 1
