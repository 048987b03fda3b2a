"""The functions say what the table says: names, order and defaults."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import convgrad
from convgrad import SpecError, compat
from convgrad.spec import ALL_OPS
from convgrad.spec.dialects import DIALECTS
from convgrad.spec.table import MAX_NDIMS, REQUIRED

FUNCTIONS = [(getattr(convgrad, op.function), op, None) for op in ALL_OPS.values() if op.function]
FUNCTIONS += [(getattr(compat, dialect.function), dialect.row, dialect) for dialect in DIALECTS.values()]


@pytest.mark.parametrize(("function", "op", "dialect"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_signature(function, op, dialect):
    words = dialect.words if dialect else {}
    parameters = inspect.signature(function).parameters
    inputs = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in inputs] == [words.get(a.name, a.name) for a in op.inputs]
    assert [p.default for p in inputs] == [
        p.empty if a.required else None for a, p in zip(op.inputs, inputs, strict=True)
    ]
    options = {p.name: p for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert len(inputs) + len(options) == len(parameters)
    # A shape is an input of the function, `out` is an array and so not in the table, and output_padding stands
    # beside the sizes.
    apart = {op.shape_source, "output_padding"}
    assert [name for name in options if name not in ("out", "output_padding")] == [
        words.get(a.name, a.name) for a in op.attrs if a.name not in apart
    ]
    assert ("output_padding" in options) == (op.attr("output_padding") is not None)
    assert options["out"].default is None
    for attr in op.attrs:
        if attr.name == op.shape_source:
            continue
        default = options[words.get(attr.name, attr.name)].default
        expected = dialect.defaults.get(attr.name, attr.default) if dialect else attr.default
        if expected is REQUIRED:
            assert default is inspect.Parameter.empty
        elif expected in ("", (0,) * MAX_NDIMS):
            assert default is None
        elif attr.any_case:
            assert default.lower() == expected.lower()
        else:
            assert default == expected


@pytest.mark.parametrize(("function", "op", "dialect"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_docstring_and_name(function, op, dialect):
    assert function.__name__ == (dialect.function if dialect else op.function)
    text = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert f"\n{name}: " in text, name
    assert "docs/ops.md" in text


def test_mistakes_in_the_form_of_a_call_are_spec_errors():
    src, weights = np.zeros((1, 4, 2), np.float32), np.zeros((3, 2, 2), np.float32)
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1)
    assert convgrad.convolution(weights=weights, src=src, **call).shape == (1, 2, 2)
    for args, kwargs, part in (
        ((src, weights, None, 1), call, "takes 2 or 3 inputs (src, weights, [bias]), got 4; attributes go by name"),
        ((src,), {**call, "src": src}, "got src twice"),
        ((src,), call, "takes 2 or 3 inputs (src, weights, [bias]), got 1; missing: weights"),
        ((None, weights), call, "got 1; missing: src"),
        ((), call, "got 0; missing: src, weights"),
        ((src, weights), {}, "strides is required"),
        ((src, weights), {**call, "stride": 1}, "did you mean 'strides'?"),
    ):
        with pytest.raises(SpecError, match="Convolution") as caught:
            convgrad.convolution(*args, **kwargs)
        assert part in str(caught.value)


def test_mistakes_in_the_form_of_a_call_with_one_input():
    assert convgrad.bias_backward(diff_dst=np.ones((1, 4, 2), np.float32)).shape == (2,)
    for args, part in (
        ((), "takes 1 input (diff_dst), got 0"),
        ((1, 2), "takes 1 input (diff_dst), got 2; attributes go by name"),
    ):
        with pytest.raises(SpecError) as caught:
            convgrad.bias_backward(*args)
        assert part in str(caught.value)


def test_older_attribute_beside_its_newer_name():
    delta, weights = np.zeros((1, 4, 2), np.float32), np.zeros((3, 2, 2), np.float32)
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1)
    with pytest.raises(SpecError, match="got 1; missing: filter"):
        compat.conv_transpose_backprop_data(delta, **call)
    with pytest.raises(SpecError, match="which is given too"):
        compat.conv_transpose_backprop_data(delta, weights, filter_format="XIO", weights_format="XOI", **call)
    # Either name alone will do.
    for name in ("filter_format", "weights_format"):
        assert compat.conv_transpose_backprop_data(delta, weights, **{name: "XOI"}, **call).shape == (1, 2, 2)


def test_newer_names_of_older_inputs():
    delta, weights = np.zeros((1, 4, 2), np.float32), np.zeros((3, 2, 2), np.float32)
    call = dict(strides=1, pads_begin=0, pads_end=0, dilations=1)
    with pytest.raises(SpecError) as caught:
        compat.conv_transpose_backprop_data(delta, weights=weights, **call)
    assert str(caught.value) == (
        "ConvTransposeBackpropData: weights is not an attribute of this operation; did you mean 'filter'?"
    )


def test_older_errors_use_the_older_words():
    delta, weights = np.zeros((1, 4, 2), np.float32), np.zeros((3, 3, 3), np.float32)
    with pytest.raises(SpecError) as caught:
        compat.conv_transpose_backprop_data(delta, weights, strides=1, pads_begin=0, pads_end=0, dilations=1)
    assert str(caught.value) == (
        "ConvTransposeBackpropData: filter must be (3, *, 2) in XIO with groups=1, so that it fits output_delta "
        "(1, 4, 2) in NXC, got (3, 3, 3)"
    )


def test_explain_takes_problems_only():
    with pytest.raises(SpecError, match="explain takes a problem or its text, got an object of type ndarray"):
        convgrad.explain(np.zeros(3))
