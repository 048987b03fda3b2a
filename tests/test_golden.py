"""Numbers and sizes that oneDNN's own unit tests expect."""

from __future__ import annotations

import numpy as np
import pytest

import convgrad
from convgrad.spec import OPS, Description, bind

CROSS = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], np.float32).reshape(1, 1, 3, 3)
PLAIN = dict(strides=(1, 1), pads_begin=(0, 0), pads_end=(0, 0), dilations=(1, 1), data_format="NCX")


def test_convolution_backward_data():
    diff_dst = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    diff_src = convgrad.convolution_backward_data(diff_dst, CROSS, (1, 1, 4, 4), **PLAIN, weights_format="OIX")
    assert diff_src.reshape(4, 4).tolist() == [[0, 1, 0, 1], [2, 3, 3, 3], [0, 3, 3, 1], [2, 3, 2, 3]]


def test_convolution():
    src = np.array([-3, -1.5, 2, 0.5, -0.5, -1, 1, 1.5, 2, 2.5, -1, 0, 3, -2, -1, 4], np.float32).reshape(1, 1, 4, 4)
    dst = convgrad.convolution(src, CROSS, **PLAIN, weights_format="OIX")
    assert dst.ravel().tolist() == [-1, 2.5, 5, 1.5]


def test_conv_transpose_with_groups():
    src = np.array([1, 2, 3, 4], np.float32).reshape(1, 4, 1, 1)
    weights = np.array([1, 0] * 8, np.float32).reshape(4, 4, 1, 1)
    dst = convgrad.conv_transpose(src, weights, **PLAIN, groups=2, weights_format="IOX")
    assert dst.ravel().tolist() == [3, 0, 3, 0, 7, 0, 7, 0]


def _bind(kind, *shapes, stride=1, pads=((), ()), dilation=1, **attributes):
    rank = len(shapes[0]) - 2
    given = {"strides": (stride,) * rank, "dilations": (dilation,) * rank if isinstance(dilation, int) else dilation}
    given |= {"pads_begin": pads[0], "pads_end": pads[1], **attributes}
    return bind(OPS[kind], [Description("f32", shape) for shape in shapes], given)


NCX = dict(data_format="NCX")


@pytest.mark.parametrize(
    ("auto_pad", "begin", "end", "size"), [("SAME_UPPER", 1, 2, 6), ("SAME_LOWER", 2, 1, 6), ("VALID", 0, 0, 3)]
)
def test_auto_pad(auto_pad, begin, end, size):
    pads = ((begin, begin), (end, end))
    found = _bind("Convolution", (1, 1, 6, 6), (1, 1, 4, 4), auto_pad=auto_pad, weights_format="OIX", **NCX)
    assert (found.pads_begin, found.pads_end, found.shape) == (*pads, (1, 1, size, size))
    found = _bind(
        "ConvTransposeBackwardData", (1, 1, 6, 6), (1, 1, 4, 4), auto_pad=auto_pad, weights_format="IOX", **NCX
    )
    assert (found.pads_begin, found.pads_end, found.shape) == (*pads, (1, 1, size, size))
    big = 9 if auto_pad == "VALID" else 6
    found = _bind(
        "ConvolutionBackwardData",
        (1, 1, 6, 6),
        (1, 1, 4, 4),
        auto_pad=auto_pad,
        weights_format="OIX",
        dst_shape=(1, 1, big, big),
        **NCX,
    )
    assert (found.pads_begin, found.pads_end, found.shape) == (*pads, (1, 1, big, big))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_is_never_negative(auto_pad):
    found = _bind("Convolution", (1, 1, 5), (1, 1, 1), stride=3, auto_pad=auto_pad, weights_format="OIX", **NCX)
    assert (found.pads_begin, found.pads_end, found.shape) == ((0,), (0,), (1, 1, 2))
    found = _bind("ConvTranspose", (1, 1, 3), (1, 1, 1), stride=2, auto_pad=auto_pad, weights_format="IOX", **NCX)
    assert (found.pads_begin, found.pads_end, found.shape) == ((0,), (0,), (1, 1, 5))


def test_same_padding_with_dilation():
    shapes = (1, 100, 100, 3), (7, 1, 3, 4)
    found = _bind("Convolution", *shapes, dilation=(2, 2), auto_pad="SAME_UPPER")
    assert (found.pads_begin, found.pads_end, found.shape) == ((6, 0), (6, 0), (1, 100, 100, 4))
    assert _bind("Convolution", *shapes, dilation=(2, 2), auto_pad="VALID").shape == (1, 88, 100, 4)


def test_conv_transpose_with_dilation():
    call = dict(dilation=2, weights_format="IOX", **NCX)
    assert _bind("ConvTranspose", (1, 1, 10), (1, 1, 4), pads=((1,), (2,)), **call).shape == (1, 1, 13)
    found = _bind("ConvTranspose", (1, 1, 10), (1, 1, 4), auto_pad="SAME_UPPER", **call)
    assert (found.pads_begin, found.pads_end, found.shape) == ((3,), (3,), (1, 1, 10))
    assert _bind("ConvTranspose", (1, 1, 10), (1, 1, 4), auto_pad="VALID", **call).shape == (1, 1, 16)


def test_older_spelling_of_conv_transpose_weights():
    kind, call = "ConvTransposeBackwardData", dict(weights_format="OIX", **NCX)
    assert _bind(kind, (256, 3, 227, 227), (3, 96, 11, 11), stride=4, **call).shape == (256, 96, 55, 55)
    pads = ((1, 1), (1, 1))
    found = _bind(kind, (256, 384, 13, 13), (192, 256, 3, 3), pads=pads, groups=2, **call)
    assert found.shape == (256, 256, 13, 13)


def test_weights_gradients_with_groups():
    call = dict(groups=2, weights_format="IOX", weights_shape=(4, 2, 3), **NCX)
    found = _bind("ConvTransposeBackwardWeights", (2, 4, 2), (2, 4, 2), pads=((1,), (1,)), **call)
    assert found.shape == (4, 2, 3)
    call = dict(groups=4, weights_format="OIX", weights_shape=(20, 4, 3, 3), **NCX)
    found = _bind("ConvolutionBackwardWeights", (2, 16, 5, 5), (2, 20, 5, 5), pads=((1, 1), (1, 1)), **call)
    assert found.shape == (20, 4, 3, 3)


def test_padding_far_beyond_the_kernel():
    # From oneDNN's deconv.json: the last rows of the small side touch nothing but padding, and are exact zeros.
    call = dict(strides=2, pads_begin=0, pads_end=41, dilations=1, data_format="NCX", weights_format="IOX")
    diff_dst, weights = np.ones((1, 2, 16, 16), np.float32), np.ones((3, 2, 3, 3), np.float32)
    diff_src = convgrad.conv_transpose_backward_data(diff_dst, weights, **call)
    assert diff_src.shape == (1, 3, 28, 28)
    assert diff_src[0, 0, 0, 0] == 18
    assert not diff_src[:, :, 8:].any()
    assert convgrad.conv_transpose(diff_src, weights, **call).shape == (1, 2, 16, 16)


def test_the_documented_rule_of_same_padding():
    # total = stride * (diff_dst - 1) + kernel - diff_src + output_padding; same_lower puts the smaller half first.
    shapes = (1, 1, 5), (1, 1, 4)
    call = dict(stride=2, weights_format="OIX", same_rule="documented", **NCX)
    for auto_pad, extra, pads in (
        ("same_lower", 0, ((1,), (2,))),
        ("same_upper", 0, ((2,), (1,))),
        ("same_lower", 1, ((2,), (2,))),
        ("same_upper", 1, ((2,), (2,))),
    ):
        found = _bind(
            "ConvolutionBackwardData", *shapes, auto_pad=auto_pad, dst_shape=(1, 1, 9), output_padding=(extra,), **call
        )
        assert (found.pads_begin, found.pads_end) == pads
        assert found.problem.pad == pads[0]
