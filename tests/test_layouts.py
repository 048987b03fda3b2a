"""Layouts that were forgotten or mixed up: what is warned of, what errors suggest, and how results lie in memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import convgrad
from convgrad import LayoutWarning, SpecError, compat
from convgrad.spec import OPS

CALL = dict(strides=1, pads_begin=1, pads_end=1, dilations=1)
FIRST = dict(data_format="NCX", weights_format="OIX")


def _ones(*shape):
    return np.ones(shape, np.float32)


SRC = _ones(1, 4, 4, 1)


# ---- warnings


def test_pytorch_weights_without_their_format_are_warned_of():
    x, w = _ones(8, 3, 32, 32), _ones(16, 3, 3, 3)
    with pytest.warns(LayoutWarning) as caught:
        y = convgrad.convolution(x, w, data_format="NCX", **CALL)
    assert y.shape == (8, 3, 19, 32)  # the documented default stays
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "Convolution: weights_format was not given and defaults to XIO, (spatial, in/groups, out), although "
        "data_format='NCX' puts the channels first. The shape of weights fits OIX, (out, in/groups, spatial), too. "
        "Pass weights_format='OIX' if you mean that, or weights_format='XIO' to keep the default without this warning."
    )


def test_every_function_warns_and_apply_does_not():
    sizes = {"x": (2, 4, 4, 4), "w": (4, 4, 4, 4), "y": (2, 4, 5, 5)}
    call = dict(CALL, pads_begin=2, pads_end=2, data_format="NCX")
    for op in OPS.values():
        inputs = [_ones(*sizes[a.role]) for a in op.inputs if a.role in sizes]
        if op.shape_source:
            inputs.append(sizes[op.wanted])
        with pytest.warns(LayoutWarning, match=f"^{op.kind}: weights_format was not given"):
            getattr(convgrad, op.function)(*inputs, **call)
        convgrad.apply(op.kind, *inputs, **call)
    delta, filter = _ones(2, 4, 4, 4), _ones(4, 4, 4, 4)
    with pytest.warns(LayoutWarning, match=r"filter_format was not given .* Pass filter_format='IOX'"):
        compat.conv_transpose_backprop_data(delta, filter, **call)


@pytest.mark.parametrize("given", [dict(weights_format="XIO"), dict(weights_format="OIX")])
def test_a_format_that_was_given_is_not_warned_of(given):
    convgrad.convolution(_ones(8, 3, 32, 32), _ones(16, 3, 3, 3), data_format="NCX", **given, **CALL)
    compat.convolution_backprop_data(
        _ones(8, 3, 32, 32), _ones(3, 3, 3, 3), data_format="NCX", filter_format=given["weights_format"], **CALL
    )


def test_a_place_is_warned_of_once_and_every_time_if_asked():
    def call(n):
        return convgrad.convolution(_ones(n, 3, 20, 20), _ones(16, 3, 3, 3), data_format="NCX", **CALL)

    for action, count in (("default", 1), ("always", 4)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for n in (1, 1, 2, 2):  # a repeated call takes a shorter way through the code
                call(n)
        assert len(caught) == count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LayoutWarning):
            call(1)


def test_weights_that_fit_no_format_of_the_family():
    with pytest.warns(LayoutWarning, match=r"The shapes suggest that this is meant. Pass weights_format='XIO'"):
        convgrad.convolution(_ones(1, 5, 8, 8), _ones(3, 3, 5, 2), data_format="NCX", **CALL)


def test_square_kernels_of_pytorch_beside_channels_last_data():
    x = _ones(8, 32, 32, 3)
    with pytest.warns(LayoutWarning, match=r"so the kernel is not square. The shape of weights fits OIX"):
        convgrad.convolution(x, _ones(16, 3, 3, 3), **CALL)
    # What people write on purpose is left alone.
    for shape in ((3, 3, 3, 16), (7, 1, 3, 16), (3, 3, 3, 1), (1, 7, 3, 3), (3, 3, 3, 3)):
        convgrad.convolution(x, _ones(*shape), strides=1, pads_begin=3, pads_end=3, dilations=1)
    convgrad.convolution(_ones(2, 9, 9, 1), _ones(5, 1, 1, 1), **CALL)
    convgrad.convolution(_ones(2, 9, 3), _ones(16, 3, 5), **dict(CALL, pads_begin=8))


# ---- errors


@pytest.mark.parametrize(
    ("function", "inputs", "attributes", "parts"),
    [
        (
            convgrad.convolution,
            [_ones(8, 3, 32, 32), _ones(16, 3, 3, 3)],
            {},
            ["(16, 3, 32, *) in XIO", "src (8, 3, 32, 32) in NXC", "fit data_format='NCX' with weights_format='OIX'"],
        ),
        (
            convgrad.convolution,
            [_ones(8, 32, 32, 3), _ones(16, 3, 3, 3)],
            FIRST,
            ["(*, 32, 3, 3) in OIX", "fit data_format='NXC' with weights_format='OIX'"],
        ),
        (
            convgrad.convolution_backward_data,
            [_ones(8, 16, 32, 32), _ones(3, 3, 3, 16), (8, 3, 32, 32)],
            {},
            [
                "(3, 3, *, 32) in XIO",
                "diff_dst (8, 16, 32, 32) in NXC",
                "fit data_format='NCX' with weights_format='XIO'",
            ],
        ),
        (
            convgrad.convolution_backward_weights,
            [_ones(8, 3, 32, 32), _ones(8, 16, 32, 32), (16, 3, 3, 3)],
            dict(weights_format="OIX"),
            ["(32, 32, 3, 3) in OIX", "in NXC", "fit data_format='NCX' with weights_format='OIX'"],
        ),
        (
            convgrad.conv_transpose,
            [_ones(8, 16, 32, 32), _ones(16, 3, 3, 3)],
            {},
            ["(16, 3, *, 32) in XOI", "fit data_format='NCX' with weights_format='IOX'"],
        ),
        # Few channels: the right kernel is larger than the one that was read.
        (
            convgrad.convolution,
            [_ones(1, 2, 8, 8), _ones(2, 2, 3, 3)],
            {},
            ["fit data_format='NCX' with weights_format='OIX'"],
        ),
        (
            convgrad.convolution,
            [_ones(2, 4, 9, 9), _ones(4, 1, 3, 3)],
            dict(groups=4, data_format="NCX"),
            ["fit data_format='NCX' with weights_format='OIX'"],
        ),
        (
            convgrad.conv_transpose,
            [_ones(2, 4, 9, 9), _ones(4, 2, 3, 3)],
            dict(groups=2, data_format="NCX"),
            ["fit data_format='NCX' with weights_format='IOX'"],
        ),
        # Small numbers divide many sizes: with groups, layouts that nobody has are not suggested.
        (
            convgrad.convolution,
            [_ones(2, 8, 8, 4), _ones(3, 3, 4, 6)],
            dict(groups=2),
            ["(3, 3, 2, *) in XIO", "; 4 channels in 2 groups are 2 in each; these shapes fit groups=1$"],
        ),
        # Nothing is suggested where nothing fits, or only a kernel that nobody means.
        (
            convgrad.convolution,
            [_ones(8, 3, 32, 32), _ones(16, 5, 3, 3)],
            FIRST,
            ["(*, 3, 3, 3) in OIX", "got (16, 5, 3, 3)$"],
        ),
        (
            convgrad.convolution_backward_data,
            [_ones(8, 28, 28, 16), _ones(3, 3, 8, 16), (8, 58, 56, 8)],
            dict(strides=2),
            ["on spatial axis 0 of NXC", "for diff_src (dst_shape) of 58, got 28; diff_src may be 55 or 56 there$"],
        ),
        (
            convgrad.convolution,
            [_ones(8, 32, 32, 3), _ones(3, 3, 3, 16), _ones(3)],
            {},
            [r"weights (3, 3, 3, 16) in XIO, got (3,)$"],
        ),
        (convgrad.convolution, [_ones(8, 9, 9, 4), _ones(3, 3, 2, 4)], dict(groups=3), ["src (8, 9, 9, 4) in NXC"]),
    ],
)
def test_errors_name_the_layout_and_the_one_that_fits(function, inputs, attributes, parts):
    with pytest.raises(SpecError) as caught:
        function(*inputs, **{**CALL, **attributes})
    for part in parts:
        text = str(caught.value)
        assert text.endswith(part[:-1]) if part.endswith("$") else part in text, text


# ---- words of other libraries


@pytest.mark.parametrize(
    ("attributes", "part"),
    [
        (dict(padding=1), "pads_begin and pads_end, or chosen by auto_pad='SAME_UPPER' or 'VALID' with pads_begin=0"),
        (dict(pads=[1, 1, 1, 1]), "pads_begin and pads_end"),
        (dict(stride=1), "did you mean 'strides'?"),
        (dict(stride=2, padding=1), "write strides=2, pads_begin=1, pads_end=1"),
        (dict(padding="same", dilation=(2, 2)), "auto_pad='SAME_UPPER', pads_begin=0, pads_end=0, dilations=(2, 2)"),
        (dict(stride=2, kernel_size=3), "did you mean 'strides'; nor is kernel_size"),
        (dict(pads_begin=((1, 2), (3, 4))), "write pads_begin=(1, 3), pads_end=(2, 4)"),
        (dict(pads_begin=(1, 2, 3, 4)), "write pads_begin=(1, 2), pads_end=(3, 4) if these are both, as in ONNX"),
        (dict(strides=(1, 2, 2, 1)), "batch and channels have none here: strides=(2, 2)"),
        (dict(strides=(1, 1, 2, 2)), "batch and channels have none here: strides=(2, 2)"),
        (dict(lhs_dilation=2), "flips the kernel"),
        (dict(filter_format="HWIO"), "did you mean 'weights_format'?"),
        (dict(out_shape=(1, 4, 4, 1)), "the shape of the result is computed from the others"),
        (dict(activation="relu"), "apply it to the result"),
        (dict(window_strides=(1, 1)), "did you mean 'strides'?"),
        (dict(dilation=1), "did you mean 'dilations'?"),
        (dict(rhs_dilation=(1, 1)), "did you mean 'dilations'?"),
        (dict(feature_group_count=1), "did you mean 'groups'?"),
        (dict(kernel_size=3), "read from the shapes"),
        (dict(dim=2), "1D, 2D or 3D is read from the shapes"),
        (dict(layout="NHWC"), "data_format and weights_format"),
        (dict(dimension_numbers=("NHWC", "HWIO", "NHWC")), "data_format and weights_format"),
        (dict(input=_ones(1, 4, 4, 1)), "the inputs are src, weights, [bias]"),
        (dict(strides="same"), "auto_pad='SAME_UPPER' or 'VALID'"),
        (dict(pads_begin="valid"), "auto_pad='SAME_UPPER' or 'VALID'"),
        (dict(auto_pad="same"), "None, SAME_UPPER, SAME_LOWER, VALID, got 'same'; 'same' is 'SAME_UPPER' here"),
        (dict(data_format="NHWC"), "one of NXC, NCX, got 'NHWC'; 'NHWC' is 'NXC' here"),
        (dict(data_format="nchw"), "'nchw' is 'NCX' here"),
        (dict(data_format="ncx"), "did you mean 'NCX'?"),
        (dict(auto_pad="SAME"), "'SAME' is 'SAME_UPPER' here"),
        (dict(auto_pad="NOTSET"), "'NOTSET' is 'None' here"),
        (dict(output_size=(4, 4)), "output_padding adds to them"),
        (dict(data_format="channels_first"), "'channels_first' is 'NCX' here"),
        (dict(out_dtype="float32"), "one of f32, bf16, f16, f64, got 'float32'; 'float32' is 'f32' here"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
@pytest.mark.parametrize("function", [convgrad.convolution, convgrad.conv_transpose])
def test_words_of_other_libraries_are_answered_with_ours(function, attributes, part):
    with pytest.raises(SpecError) as caught:
        function(_ones(1, 4, 4, 1), _ones(3, 3, 1, 1), **{**CALL, **attributes})
    assert part in str(caught.value)
    assert caught.value.argument == next(iter(attributes))


DEPTHWISE = "they look like TensorFlow's depthwise weights: pass "


@pytest.mark.parametrize("each", [1, 2])
def test_depthwise_weights_of_tensorflow(each):
    """Its definition: y[..., c * each + q] = sum of x[..., c] * w[..., c, q]. What the errors say gives that."""
    rng = np.random.default_rng(each)
    src, weights = rng.integers(-3, 4, (2, 5, 4, 3)), rng.integers(-3, 4, (2, 2, 3, each))
    wanted = np.zeros((2, 4, 3, 3 * each), np.float32)
    for row, column, c, q in np.ndindex(*weights.shape):
        wanted[..., c * each + q] += src[:, row : row + 4, column : column + 3, c] * weights[row, column, c, q]
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1)
    x, w = src.astype(np.float32), weights.astype(np.float32)
    merged = (2, 2, 1, 3 * each)
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(x, w, groups=3, **call)
    assert str(caught.value).endswith(f"; {DEPTHWISE}them reshaped to {merged}")
    np.testing.assert_array_equal(convgrad.convolution(x, w.reshape(merged), groups=3, **call), wanted)
    for groups, more in ((1, ", and groups=3"), (3, "")) if each > 1 else ((3, ""),):
        with pytest.raises(SpecError) as caught:
            convgrad.convolution_backward_data(wanted, w, x.shape, groups=groups, **call)
        assert str(caught.value).endswith(f"; {DEPTHWISE}them reshaped to {merged}{more}")
    with pytest.raises(SpecError) as caught:
        convgrad.convolution_backward_weights(x, wanted, w.shape, groups=3, **call)
    assert str(caught.value).endswith(f"; {DEPTHWISE}weights_shape={merged} and reshape the result")


def test_other_weights_are_not_taken_for_tensorflows():
    call = dict(CALL, groups=3)
    for shape, formats in (((3, 3, 4, 2), {}), ((6, 3, 3, 3), dict(weights_format="OIX")), ((3, 3, 3, 2, 1), {})):
        with pytest.raises(SpecError) as caught:
            convgrad.convolution(_ones(1, 5, 5, 3), _ones(*shape), **call, **formats)
        assert "TensorFlow" not in str(caught.value)


def test_formats_of_the_same_letters_are_not_taken_for_each_other():
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(_ones(1, 4, 4, 1), _ones(3, 3, 1, 1), weights_format="IOX", **CALL)
    assert str(caught.value) == (
        "Convolution: weights_format must be one of XIO, OIX, got 'IOX'; XIO: (spatial, in/groups, out), "
        "OIX: (out, in/groups, spatial)"
    )


@pytest.mark.parametrize(
    ("function", "inputs", "attributes", "hint"),
    [
        (convgrad.convolution, [_ones(1, 9, 9, 8), _ones(3, 3, 1, 8)], {}, "these shapes fit groups=8"),
        (convgrad.convolution, [_ones(3, 3, 3, 16), _ones(1, 9, 9, 3)], {}, "src and weights look exchanged"),
        (convgrad.convolution, [_ones(32, 32), _ones(3, 3, 1, 4)], {}, "a single grey image is src[None, :, :, None]"),
        (convgrad.convolution, [_ones(32, 32), _ones(4, 1, 3, 3)], FIRST, "a single grey image is src[None, None]"),
    ],
)
def test_what_was_probably_meant(function, inputs, attributes, hint):
    with pytest.raises(SpecError) as caught:
        function(*inputs, **{**CALL, **attributes})
    assert str(caught.value).endswith(f"; {hint}"), caught.value


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), torch.float32, "f32"])
def test_element_types_of_other_libraries(dtype):
    src, weights = _ones(1, 4, 4, 1), _ones(3, 3, 1, 1)
    half = [a.astype(np.float16) for a in (src, weights)]
    assert convgrad.convolution(*half, **CALL, out_dtype=dtype).dtype == np.float32
    with pytest.raises(SpecError, match="out_dtype must be a string: f32, bf16, f16, f64, got"):
        convgrad.convolution(*half, **CALL, out_dtype=np.int32)


@pytest.mark.parametrize(
    ("function", "inputs", "order"),
    [
        (
            "convolution_backward_weights",
            [_ones(1, 4, 4, 1), (3, 3, 1, 1), _ones(1, 4, 4, 1)],
            "src, diff_dst, weights",
        ),
        ("convolution_backward_data", [(1, 4, 4, 1), _ones(3, 3, 1, 1), SRC], "diff_dst, weights, dst"),
    ],
)
def test_the_order_of_inputs_is_told_to_those_who_come_from_pytorch(function, inputs, order):
    with pytest.raises(SpecError) as caught:
        getattr(convgrad, function)(*inputs, **CALL)
    assert str(caught.value).endswith(f"got an object of type tuple; the order is {function}({order}_shape)")


def test_inputs_of_apply_by_name():
    with pytest.raises(
        SpecError, match=r"src is not an attribute of this operation; the inputs are src, weights, \[bias\]"
    ):
        convgrad.apply("Convolution", src=_ones(1, 4, 4, 1), weights=_ones(3, 3, 1, 1), **CALL)


def test_data_without_a_batch():
    with pytest.raises(SpecError, match=r"got \(6, 3, 3, 3\); a batch of one is src\[None\]"):
        convgrad.convolution(_ones(3, 8, 8), _ones(6, 3, 3, 3), **FIRST, **CALL)


def test_inputs_by_the_names_of_other_libraries():
    with pytest.raises(
        SpecError, match=r"input is not an attribute of this operation; the inputs are src, weights, \[bias\]"
    ):
        convgrad.convolution(input=_ones(1, 4, 4, 1), weight=_ones(3, 3, 1, 1), **CALL)


# ---- memory


def _order(strides):
    """The axes from the outermost to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", OPS)
def test_results_follow_the_memory_of_the_first_input(kind, rank):
    op = OPS[kind]
    rng = np.random.default_rng(0)
    sizes = {"x": (2, 6, *(7, 8, 9)[:rank]), "w": (8, 3, *(3, 2, 3)[:rank]), "y": (2, 8, *(5, 7, 7)[:rank])}
    last = (0, *range(2, rank + 2), 1)  # channels last, as the order of axes in memory
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1, groups=2)
    weights = ("IOX", "XOI") if op.transposed else ("OIX", "XIO")
    if op.shape_source:
        call[op.shape_source] = sizes[op.wanted]
    inputs = [rng.integers(-3, 4, sizes[a.role]).astype(np.float32) for a in op.inputs if a.role in sizes]
    plain = convgrad.apply(kind, *inputs, data_format="NCX", weights_format=weights[0], **call)
    assert plain.flags.c_contiguous
    # Channels last in memory, channels first by name.
    turned = [_lay(a, last) for a in inputs]
    assert not turned[0].flags.c_contiguous
    found = convgrad.apply(kind, *turned, data_format="NCX", weights_format=weights[0], **call)
    assert np.array_equal(found, plain)
    assert _order(found.strides) == last
    assert found.nbytes == plain.nbytes == np.ptp(_places(found)) + 4  # without gaps
    tensor = convgrad.apply(kind, *map(torch.from_numpy, turned), data_format="NCX", weights_format=weights[0], **call)
    if rank > 1:
        format = torch.channels_last if rank == 2 else torch.channels_last_3d
        assert tensor.is_contiguous(memory_format=format)
        assert tensor.stride() == torch.empty(tensor.shape, memory_format=format).stride()
    # The reverse: channels last by name, on memory of channels first.
    by_name = {"x": last, "y": last, "w": (*range(2, rank + 2), 1, 0)}
    views = [a.transpose(by_name[arg.role]) for a, arg in zip(inputs, op.inputs, strict=False)]
    if op.shape_source:
        call[op.shape_source] = tuple(sizes[op.wanted][i] for i in by_name[op.wanted])
    found = convgrad.apply(kind, *views, data_format="NXC", weights_format=weights[1], **call)
    back = np.argsort(by_name[op.wanted])
    assert found.transpose(back).flags.c_contiguous
    assert np.array_equal(found.transpose(back), plain)


def _lay(array, order):
    """The same array, its axes in memory in that order."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def _places(array):
    return sum(np.ix_(*(np.arange(n) * s for n, s in zip(array.shape, array.strides, strict=True))))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 1, 4, 4), (16, 1, 4, 1)),  # one channel
        ((2, 3, 1, 1), (3, 1, 3, 3)),  # one pixel
        ((2, 3, 4, 4), (0, 0, 0, 0)),  # one value
        ((2, 3, 4, 4), (16, 0, 4, 1)),  # the same values in every channel
        ((2, 3, 4, 4), (48, 4, 12, 1)),  # channels between the rows
        ((2, 3, 4, 4), (48, 16, 1, 4)),  # images on their side
    ],
)
def test_memory_that_is_neither_way_gives_plain_results(shape, strides):
    line = np.arange(200, dtype=np.float32)
    x = np.lib.stride_tricks.as_strided(line, shape, [4 * s for s in strides])
    y = convgrad.convolution(x, _ones(5, shape[1], 3, 3), **FIRST, **CALL)
    assert y.flags.c_contiguous
    assert np.array_equal(y, convgrad.convolution(x.copy(), _ones(5, shape[1], 3, 3), **FIRST, **CALL))


def test_a_part_of_channels_last_memory_counts_as_such():
    whole = torch.ones(2, 8, 9, 9).to(memory_format=torch.channels_last)
    y = convgrad.convolution(whole[:, ::2, 1:, ::2], torch.ones(6, 4, 3, 3), **FIRST, **CALL)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_out_decides_for_itself():
    x = torch.ones(2, 4, 9, 9).to(memory_format=torch.channels_last)
    out = torch.empty(2, 6, 9, 9)
    assert convgrad.convolution(x, torch.ones(6, 4, 3, 3), out=out, **FIRST, **CALL) is out
    assert out.is_contiguous()


def test_jax_transposed_convolutions_are_reproduced_as_the_readme_says():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 7, 6, 4), (3, 2, 4, 5)))
    strides, dilations, pads = (2, 1), (1, 2), ((1, 1), (0, 2))
    expected = jax.lax.conv_transpose(
        x, w, strides, pads, rhs_dilation=dilations, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    begin, end = (
        tuple(d * (k - 1) - pad[i] for d, k, pad in zip(dilations, w.shape[:2], pads, strict=True)) for i in (0, 1)
    )
    how = dict(strides=strides, dilations=dilations, pads_begin=begin, pads_end=end, weights_format="XIO")
    np.testing.assert_array_equal(convgrad.conv_transpose(x, w[::-1, ::-1], **how), expected)
