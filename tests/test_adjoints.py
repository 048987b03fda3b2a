"""The gradients belong to their forward operations: exact identities that need no judge at all.

Σ conv(x, w) · y  =  Σ x · data(y, w)  =  Σ w · weights(x, y)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import convgrad

pytestmark = pytest.mark.usefixtures("all_by_reference")

DTYPES = st.sampled_from(["float32", "float64"])


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of x, w and y that belong together, and the attributes that say so."""
    rank = draw(st.integers(1, 3))
    most = {1: 20, 2: 8, 3: 5}[rank]
    axes = []
    for _ in range(rank):
        k, s, d = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
        span = (k - 1) * d + 1
        x, begin = draw(st.integers(0, most)), draw(st.integers(0, 7))
        end = max(0, span - x - begin) + draw(st.integers(0, 7))
        axes.append((x, k, (x + begin + end - span) // s + 1, s, d, begin, end, (x + begin + end - span) % s))
    x, k, y, s, d, begin, end, extra = zip(*axes, strict=True)
    n, g = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    cx, cy = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return {
        "x": (n, g * cx, *x),
        "w": (g * cy, cx, *k),
        "y": (n, g * cy, *y),
        "call": dict(strides=s, pads_begin=begin, pads_end=end, dilations=d, groups=g, data_format="NCX"),
        "extra": extra,
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


PADDED = {
    "x": (1, 1, 1),
    "w": (1, 1, 3),
    "y": (1, 1, 100),
    "call": dict(strides=1, pads_begin=100, pads_end=1, dilations=1, groups=1, data_format="NCX"),
    "extra": (0,),
    "seed": 0,
}


def _tensors(geometry: dict[str, Any], dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(geometry["seed"])
    return tuple(rng.integers(-3, 4, geometry[role]).astype(dtype) for role in "xwy")


def _dot(a: np.ndarray, b: np.ndarray) -> int:
    """A sum of products of integers, exactly."""
    assert np.array_equal(a, np.trunc(a))
    return int((a.astype(np.int64) * b.astype(np.int64)).sum())


@given(geometries(), DTYPES)
@example(PADDED, "float32")
def test_convolution(geometry, dtype):
    x, w, y = _tensors(geometry, dtype)
    call = {**geometry["call"], "weights_format": "OIX"}
    forward = _dot(convgrad.convolution(x, w, **call), y)
    assert forward == _dot(x, convgrad.convolution_backward_data(y, w, x.shape, **call))
    assert forward == _dot(w, convgrad.convolution_backward_weights(x, y, w.shape, **call))


@given(geometries(), DTYPES)
@example(PADDED, "float32")
def test_conv_transpose(geometry, dtype):
    x, w, y = _tensors(geometry, dtype)
    call = {**geometry["call"], "weights_format": "IOX", "output_padding": geometry["extra"]}
    forward = _dot(convgrad.conv_transpose(y, w, **call), x)
    assert forward == _dot(y, convgrad.conv_transpose_backward_data(x, w, **call))
    assert forward == _dot(w, convgrad.conv_transpose_backward_weights(y, x, w.shape, **call))


@given(geometries(), st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
def test_auto_padding(geometry, auto_pad):
    """With auto_pad, gradients find the same padding as their forward operation by themselves."""
    x, w, _ = _tensors(geometry, "float64")
    call = {**geometry["call"], "weights_format": "OIX", "auto_pad": auto_pad}
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], call["dilations"], strict=True)]
    if any(n < (1 if auto_pad != "VALID" else e) for n, e in zip(x.shape[2:], spans, strict=True)):
        x = np.ones((*x.shape[:2], *(n + e for n, e in zip(x.shape[2:], spans, strict=True))))
    dst = convgrad.convolution(x, w, **call)
    if auto_pad != "VALID":
        assert dst.shape[2:] == tuple(-(-n // s) for n, s in zip(x.shape[2:], call["strides"], strict=True))
    y = np.random.default_rng(1).integers(-3, 4, dst.shape).astype(x.dtype)
    forward = _dot(dst, y)
    assert forward == _dot(x, convgrad.convolution_backward_data(y, w, x.shape, **call))
    assert forward == _dot(w, convgrad.convolution_backward_weights(x, y, w.shape, **call))
    # The same three tensors the other way round.
    call |= {"weights_format": "IOX"}
    dst = convgrad.conv_transpose(y, w, **call)
    x = np.random.default_rng(2).integers(-3, 4, dst.shape).astype(y.dtype)
    forward = _dot(dst, x)
    assert forward == _dot(y, convgrad.conv_transpose_backward_data(x, w, **call))
    assert forward == _dot(w, convgrad.conv_transpose_backward_weights(y, x, w.shape, **call))


@given(geometries())
def test_one_geometry_six_operations(geometry):
    """The operations are three in pairs: what the one calls a gradient, the other calls its result."""
    x, w, y = _tensors(geometry, "float32")
    conv = {**geometry["call"], "weights_format": "OIX"}
    transpose = {**geometry["call"], "weights_format": "IOX"}
    assert np.array_equal(convgrad.convolution(x, w, **conv), convgrad.conv_transpose_backward_data(x, w, **transpose))
    assert np.array_equal(
        convgrad.convolution_backward_data(y, w, x.shape, **conv),
        convgrad.conv_transpose(y, w, **transpose, output_padding=geometry["extra"]),
    )
    assert np.array_equal(
        convgrad.convolution_backward_weights(x, y, w.shape, **conv),
        convgrad.conv_transpose_backward_weights(y, x, w.shape, **transpose),
    )
