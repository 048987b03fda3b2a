"""The operations of a bias: sums in the accumulator type with one rounding, arrays of any kind, mistakes in layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import convgrad
from convgrad import SpecError

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def _data(dtype=np.float32, shape=(2, 3, 5, 4)):
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 4), (2, 3, 5, 4, 2), (1, 2, 1, 1, 3, 2)])
def test_values_at_any_strides(dtype, shape):
    data = _data(dtype, shape)
    channels = np.arange(shape[1]).astype(dtype)
    wide = data.astype(np.float64)
    sums = wide.sum(tuple(a for a in range(data.ndim) if a != 1))
    added = wide + channels.astype(np.float64).reshape(-1, *[1] * (data.ndim - 2))
    turned = np.moveaxis(data, 1, -1)
    for found, format in ((data, "NCX"), (turned, "NXC"), (data[::-1], "NCX"), (np.repeat(data, 2, 1)[:, ::2], "NCX")):
        result = convgrad.bias_backward(found, data_format=format)
        assert result.dtype == dtype
        assert np.array_equal(result.astype(np.float64), sums)
        assert np.array_equal(convgrad.apply("BiasAddBackward", found, data_format=format), result)
    assert np.array_equal(convgrad.bias_backward(turned), convgrad.bias_backward(turned, data_format="NXC"))
    assert np.array_equal(convgrad.apply("BiasAdd", data, channels, data_format="NCX").astype(np.float64), added)
    last = convgrad.apply("BiasAdd", turned, channels)
    assert np.array_equal(np.moveaxis(last, -1, 1).astype(np.float64), added)


def test_it_is_the_gradient_of_the_bias():
    x, w = (torch.from_numpy(a) for a in (_data(), _data(shape=(6, 3, 3, 3))))
    bias = torch.zeros(6, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, bias)
    diff_dst = torch.from_numpy(_data(shape=tuple(y.shape)))
    y.backward(diff_dst)
    assert torch.equal(convgrad.bias_backward(diff_dst, data_format="NCX"), bias.grad)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_one_rounding(dtype):
    ones = np.ones((1, 1, 3001), dtype)
    assert convgrad.bias_backward(ones, data_format="NCX")[0] == np.float32(3001).astype(dtype)
    wide = convgrad.bias_backward(ones, data_format="NCX", out_dtype="f32")
    assert (wide.dtype, wide[0]) == (np.float32, 3001)
    out = np.array([0.5], np.float32)
    assert convgrad.bias_backward(ones, data_format="NCX", out=out, accumulate=True) is out
    assert out[0] == 3001.5
    # 257 is 256 in bf16, but not here.
    added = convgrad.apply("BiasAdd", np.full((1, 1, 1), 256, dtype), ones[0, 0, :1], out_dtype="f32")
    assert added[0, 0, 0] == 257


def test_overflow_is_no_accident_to_warn_of():
    assert np.isinf(convgrad.bias_backward(np.full((9, 1), 6e4, np.float16))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_tensors_of_pytorch(dtype):
    data = torch.from_numpy(_data()).to(dtype).to(memory_format=torch.channels_last)
    result = convgrad.bias_backward(data, data_format="NCX")
    assert torch.equal(result, data.double().sum((0, 2, 3)).to(dtype))
    out = torch.zeros(6, dtype=dtype)[::2]
    assert convgrad.bias_backward(data, data_format="NCX", out=out) is out
    assert torch.equal(out, result)
    # Data keeps its order in memory.
    added = convgrad.apply("BiasAdd", data, torch.ones(3, dtype=dtype), data_format="NCX")
    assert added.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(SpecError) as caught:
        convgrad.bias_backward(data.requires_grad_(), data_format="NCX", out=out)
    assert caught.value.rule == "input_grad"


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    result = convgrad.bias_backward(jax.numpy.asarray(_data()), data_format="NCX")
    assert isinstance(result, jax.Array)
    assert np.array_equal(result, _data().sum((0, 2, 3)))
    with pytest.raises(SpecError, match="immutable"):
        convgrad.bias_backward(_data(), data_format="NCX", out=result)


def test_out_may_lie_on_the_data():
    data = _data()
    expected = convgrad.bias_backward(data, data_format="NCX")
    out = data[0, :, 0, 0]
    assert np.array_equal(convgrad.bias_backward(data, data_format="NCX", out=out), expected)
    data = _data()
    expected = data + 2
    convgrad.apply("BiasAdd", data, np.full(4, 2, np.float32), out=data)
    assert np.array_equal(data, expected)


def test_empty_tensors():
    assert convgrad.bias_backward(np.zeros((0, 4, 3), np.float32)).tolist() == [0, 0, 0]
    assert convgrad.bias_backward(np.zeros((2, 3, 0), np.float32), data_format="NCX").tolist() == [0, 0, 0]
    assert convgrad.bias_backward(np.zeros((2, 3, 0), np.float32)).shape == (0,)
    assert convgrad.apply("BiasAdd", np.zeros((2, 0, 3), np.float32), np.zeros(3, np.float32)).shape == (2, 0, 3)
    out = np.ones(3, np.float32)
    convgrad.bias_backward(np.zeros((0, 4, 3), np.float32), out=out, accumulate=True)
    assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: convgrad.bias_backward(x, out=np.zeros(3, np.float32)),
            "BiasAddBackward: out must have the shape (4,) of diff_bias for diff_dst (2, 3, 5, 4) in NXC, got (3,); "
            "these shapes fit data_format='NCX'",
        ),
        (
            lambda x: convgrad.apply("BiasAdd", x, np.zeros(3, np.float32)),
            "BiasAdd: bias must be a vector of 4 values, one per channel of src (2, 3, 5, 4) in NXC, got (3,); "
            "these shapes fit data_format='NCX'",
        ),
        (
            lambda x: convgrad.apply("BiasAdd", x, np.zeros(7, np.float32)),
            "BiasAdd: bias must be a vector of 4 values, one per channel of src (2, 3, 5, 4) in NXC, got (7,)",
        ),
        (
            lambda x: convgrad.bias_backward(x, data_format="NCHW"),
            "BiasAddBackward: data_format must be one of NXC, NCX, got 'NCHW'; 'NCHW' is 'NCX' here",
        ),
        (
            lambda x: convgrad.bias_backward(x, axis=1),
            "BiasAddBackward: axis is not an attribute of this operation; there are data_format, accumulate, out_dtype",
        ),
    ],
)
def test_messages_as_people_read_them(call, message):
    with pytest.raises(SpecError) as caught:
        call(_data())
    assert str(caught.value) == message
