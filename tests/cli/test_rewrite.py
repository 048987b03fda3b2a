"""What a case changes in a graph file, and what is inferred from that."""

from __future__ import annotations

import pytest

from convgrad.cli.driver import Case
from convgrad.cli.rewrite import rewrite
from convgrad.errors import SpecError
from convgrad.graph import read_file


def rewritten(folder, file, **changes):
    path = folder / "op" / "f32" / file
    return rewrite(read_file(path), Case(path, file, **changes))


def tensors(document):
    return {t.id: t for op in document.ops for t in (*op.inputs, *op.outputs)}


def test_an_untouched_file_stays_as_it_is(folder):
    document = rewritten(folder, "conv_2d.json")
    assert tensors(document) == tensors(read_file(folder / "op" / "f32" / "conv_2d.json"))


def test_layouts_of_outputs(folder):
    """A new layout of the first input is that of the output; else the output keeps the order of its axes."""
    assert tensors(rewritten(folder, "conv_2d.json", mb=3))[2].strides == (1568, 1, 112, 8)
    assert tensors(rewritten(folder, "conv_2d.json", mb=3))[2].shape == (3, 8, 14, 14)
    assert tensors(rewritten(folder, "conv_2d.json", in_shapes={0: "*dcba"}))[2].strides == (1, 2, 16, 224)
    shaped = tensors(rewritten(folder, "conv_2d.json", in_shapes={0: "1x16x5x6"}))
    assert (shaped[0].strides, shaped[2].strides) == ((480, 30, 6, 1), (240, 30, 6, 1))
    asked = tensors(rewritten(folder, "conv_2d.json", in_shapes={2: "*acdb", 0: "1x16x5x6"}))
    assert (asked[2].shape, asked[2].strides) == ((1, 8, 5, 6), (240, 1, 48, 8))
    gaps = tensors(rewritten(folder, "conv_2d.json", in_shapes={0: "*6272x1x448x32"}))
    assert (gaps[0].strides, gaps[2].strides) == ((6272, 1, 448, 32), (1568, 196, 14, 1))


def test_shapes_of_gradients_follow_the_attribute_or_else_the_file(folder):
    changed = rewritten(folder, "conv_bwd_d_2d.json", op_attrs={0: "dst_shape:1x8x27x28"})
    assert tensors(changed)[2].shape == (1, 8, 27, 28)
    unset = rewritten(folder, "conv_bwd_d_2d.json", op_attrs={0: "dst_shape:undef*strides:2x2"})
    assert tensors(unset)[2].shape == (1, 8, 28, 28)
    with pytest.raises(SpecError, match="dst_shape must have the batch size of diff_dst, 2"):
        rewritten(folder, "conv_bwd_d_2d.json", in_shapes={0: "2x32x14x14"})


def test_types_and_properties(folder):
    changed = tensors(rewritten(folder, "conv_bwd_d_2d.json", dt="f16", tensor_property={0: "variable"}))
    assert {str(t.dtype) for t in changed.values()} == {"f16"}
    assert (str(changed[0].property_type), str(changed[1].property_type)) == ("variable", "constant")
    document = rewritten(folder, "conv_2d.json", fpmath="bf16:true")
    assert (document.fpmath_mode, document.apply_to_int) == ("bf16", True)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("conv_2d.json", {"in_shapes": {7: "1"}}, "7 is not an input or output of the graph, only the ids 0, 1 and 2"),
        ("conv_2d.json", {"in_shapes": {0: "1x2*"}}, "nothing after its *"),
        ("conv_2d.json", {"in_shapes": {0: "1y2"}}, "not of the form"),
        ("conv_2d.json", {"in_shapes": {0: "*abca"}}, "each of abcd once"),
        ("conv_2d.json", {"in_shapes": {0: "*abc"}}, "each of abcd once"),
        ("conv_2d.json", {"in_shapes": {0: "1x16x4x4*1x2"}}, "strides must be 4 values"),
        ("conv_2d.json", {"op_attrs": {3: "strides:1x1"}}, "there is no operation 3, only the id 0"),
        ("conv_2d.json", {"op_attrs": {0: "strides"}}, "not of the form NAME:VALUE"),
        ("conv_2d.json", {"op_attrs": {0: "strides:axb"}}, "numbers like 2x2"),
        ("conv_2d.json", {"op_attrs": {0: "groups:x"}}, "a number, got 'x'"),
        ("conv_2d.json", {"op_attrs": {0: "stride:1x1"}}, "did you mean 'strides'"),
        ("conv_2d.json", {"dt": {5: "f32"}}, "there is no tensor 5"),
        ("conv_2d.json", {"tensor_property": {5: "undef"}}, "there is no tensor 5"),
        ("conv_2d.json", {"tensor_property": {0: "stable"}}, "undef, variable, constant, host_scalar"),
        ("conv_2d.json", {"op_kind": {0: "ReLU"}}, "only binary and eltwise"),
        ("conv_2d.json", {"in_shapes": {0: "1x3x4x4"}}, "weights must be (*, 3, 1, 1)"),
        ("conv_2d.json", {"in_shapes": {0: "-"}}, "3, 4 or 5 dimensions"),
        ("conv_bwd_d_2d.json", {"mb": 2}, "--mb: the dst_shape of CONV_0 would not follow"),
        ("conv_bwd_w_2d.json", {"mb": 2}, "--mb: the weights_shape of CONV_0 would not follow"),
        ("deconv_bwd_w.json", {"mb": 2}, "--mb: the weights_shape of DECONV_0 would not follow"),
    ],
)
def test_changes_that_are_refused(folder, file, changes, message):
    with pytest.raises(SpecError) as caught:
        rewritten(folder, file, **changes)
    assert message in str(caught.value)
