"""Graph files for the tests of the command, small ones like those of oneDNN's repository, and lines that use them."""

from __future__ import annotations

import json

from convgrad.graph import Graph, LogicalTensor, Op


def lt(id, shape, **more):
    return LogicalTensor(id, "f32", shape, **more)


def write(path, *ops):
    graph = Graph()
    for op in ops:
        graph.add_op(op)
    graph.finalize()
    path.write_text(graph.to_json())


FIRST = {"dilations": [1, 1], "auto_pad": "None", "groups": 1, "data_format": "NCX"}
NONE = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0]}
TWO = {"strides": [2, 2], "pads_begin": [0, 0], "pads_end": [0, 0]}


def write_all(root):
    """The files, in folders like those of oneDNN's repository, and the batch files with their lines."""
    cases = root / "op" / "f32"
    cases.mkdir(parents=True)
    write(
        cases / "conv_2d.json",
        Op(0, "Convolution", [lt(0, (2, 16, 14, 14), strides=(3136, 1, 224, 16)), lt(1, (8, 16, 1, 1))],
           [lt(2, (2, 8, 14, 14), strides=(1568, 1, 112, 8))], "CONV_0", weights_format="OIX", **NONE, **FIRST),
    )  # fmt: skip
    write(
        cases / "conv_bias_2d.json",
        Op(0, "Convolution", [lt(0, (1, 4, 6, 6)), lt(1, (8, 4, 3, 3)), lt(3, (8,))], [lt(2, (1, 8, 4, 4))], "CONV_0",
           weights_format="OIX", **NONE, **FIRST),
    )  # fmt: skip
    write(
        cases / "conv_bwd_d_2d.json",
        Op(0, "ConvolutionBackwardData", [lt(0, (1, 32, 14, 14)), lt(1, (32, 8, 1, 1), property_type="constant")],
           [lt(2, (1, 8, 28, 28))], "CONV_0", weights_format="OIX", dst_shape=[1, 8, 28, 28], **TWO, **FIRST),
    )  # fmt: skip
    write(
        cases / "conv_bwd_w_2d.json",
        Op(0, "ConvolutionBackwardWeights", [lt(0, (1, 8, 28, 28)), lt(1, (1, 32, 14, 14))], [lt(2, (32, 8, 1, 1))],
           "CONV_0", weights_format="OIX", weights_shape=[32, 8, 1, 1], **TWO, **FIRST),
    )  # fmt: skip
    deconv = {"strides": [2, 2], "pads_begin": [0, 0], "pads_end": [41, 41], **FIRST, "weights_format": "IOX"}
    write(
        cases / "deconv.json",
        Op(
            0,
            "ConvTranspose",
            [lt(0, (1, 8, 28, 28)), lt(1, (8, 16, 3, 3))],
            [lt(2, (1, 16, 16, 16))],
            "DECONV_0",
            **deconv,
        ),
    )
    write(
        cases / "deconv_bwd_d.json",
        Op(0, "ConvTransposeBackwardData", [lt(0, (1, 16, 16, 16)), lt(1, (8, 16, 3, 3))], [lt(2, (1, 8, 28, 28))],
           "DECONV_0", **deconv),
    )  # fmt: skip
    write(
        cases / "deconv_bwd_w.json",
        Op(0, "ConvTransposeBackwardWeights", [lt(0, (1, 8, 28, 28)), lt(1, (1, 16, 16, 16))], [lt(2, (8, 16, 3, 3))],
           "DECONV_0", weights_shape=[8, 16, 3, 3], **deconv),
    )  # fmt: skip
    tensor = {"dtype": "f32", "shape": [2, 3], "stride": [3, 1], "layout_type": "strided", "property_type": "undef"}
    add = {"id": 0, "name": "ADD_0", "kind": "Add", "attrs": {"auto_broadcast": {"type": "string", "value": "numpy"}}}
    add |= {"inputs": [{"id": 0, **tensor}, {"id": 1, **tensor}], "outputs": [{"id": 2, **tensor}]}
    (cases / "add.json").write_text(json.dumps({"version": "3.0.0", "graph": [add]}))
    (root / "op" / "harness_all").write_text(LINES)
    (root / "test_all").write_text("# everything\n--reset --batch=op/harness_all\n")


# Every line is a sentence of the grammar.
LINES = """
# 2 as in the file, in all element types
--reset --dt=f32,bf16,f16 --case=op/f32/conv_2d.json
--reset --dt=f32,bf16,f16 --case=op/f32/conv_bias_2d.json
--reset --dt=f32,bf16,f16 --case=op/f32/conv_bwd_d_2d.json
--reset --dt=f32,bf16,f16 --case=op/f32/conv_bwd_w_2d.json
--reset --dt=f32,bf16,f16 --case=op/f32/deconv.json
--reset --dt=f32,bf16,f16 --case=op/f32/deconv_bwd_d.json
--reset --dt=f32,bf16,f16 --case=op/f32/deconv_bwd_w.json
--reset --dt=0:bf16+1:bf16+2:bf16,0:f16+1:f16+2:f16 --case=op/f32/conv_2d.json
--reset --dt=undef --case=op/f32/conv_2d.json
# shapes alone, shapes with tags, strides alone, tags alone
--reset --in-shapes=0:1x16x9x9+1:4x16x3x3 --case=op/f32/conv_2d.json
--reset --in-shapes=0:1x16x9x9*acdb+1:4x16x3x3*cdba,0:1x16x9x9*1296x81x9x1 --case=op/f32/conv_2d.json
--reset --in-shapes=0:*dcba,0:dcba,0:*abcd+1:*acdb,0:*6272x1x448x32 --case=op/f32/conv_2d.json
--reset --in-shapes=2:*dcba,2:2x8x14x14*1600x200x14x1 --case=op/f32/conv_2d.json
# 1D and 3D
--reset --in-shapes=0:2x16x9+1:4x16x3 --op-attrs=0:strides:2*pads_begin:1*pads_end:1*dilations:1 --case=op/f32/conv_2d.json
--reset --in-shapes=0:1x4x5x6x7+1:8x4x3x3x3 --op-attrs=0:strides:1x1x1*pads_begin:1x1x1*pads_end:1x1x1*dilations:2x1x1 --case=op/f32/conv_bias_2d.json
--reset --in-shapes=0:1x4x5x6x7+1:4x6x3x2x1 --op-attrs=0:strides:1x2x1*pads_begin:1x0x0*pads_end:1x0x0*dilations:1x1x2*output_padding:0x1x0 --case=op/f32/deconv.json
# padding
--reset --op-attrs=,0:auto_pad:SAME_UPPER,0:auto_pad:SAME_LOWER,0:auto_pad:VALID --case=op/f32/conv_bias_2d.json
--reset --in-shapes=0:1x4x28x28 --op-attrs=0:auto_pad:SAME_LOWER*weights_shape:32x4x3x3 --in-shapes=1:1x32x14x14 --in-shapes=0:1x4x28x28+1:1x32x14x14 --case=op/f32/conv_bwd_w_2d.json
--reset --op-attrs=0:auto_pad:SAME_UPPER,0:auto_pad:VALID --case=op/f32/deconv.json
--reset --in-shapes=0:1x16x57x57 --op-attrs=0:pads_end:0x0 --case=op/f32/deconv_bwd_d.json
--reset --in-shapes=0:1x16x56x56 --op-attrs=0:auto_pad:SAME_UPPER --case=op/f32/deconv_bwd_d.json
--reset --in-shapes=1:1x16x56x56 --op-attrs=0:auto_pad:SAME_LOWER --case=op/f32/deconv_bwd_w.json
# formats
--reset --in-shapes=0:1x14x14x32 --op-attrs=0:data_format:NXC*dst_shape:1x28x28x8 --case=op/f32/conv_bwd_d_2d.json
--reset --in-shapes=0:1x14x14x32+1:1x1x8x32 --op-attrs=0:data_format:NXC*weights_format:XIO*dst_shape:1x28x28x8 --case=op/f32/conv_bwd_d_2d.json
--reset --in-shapes=0:1x28x28x8+1:1x14x14x32 --op-attrs=0:data_format:NXC*weights_format:XIO*weights_shape:1x1x8x32 --case=op/f32/conv_bwd_w_2d.json
--reset --in-shapes=0:1x16x16x16+1:3x3x16x8 --op-attrs=0:data_format:NXC*weights_format:XOI --case=op/f32/deconv_bwd_d.json
--reset --in-shapes=0:1x28x28x8+1:3x3x16x8 --op-attrs=0:data_format:NXC*weights_format:XOI --case=op/f32/deconv.json
# groups, also depthwise
--reset --in-shapes=0:2x16x5x5+1:20x4x3x3 --op-attrs=0:groups:4*pads_begin:1x1*pads_end:1x1 --case=op/f32/conv_2d.json
--reset --in-shapes=0:2x20x5x5+1:20x4x3x3 --op-attrs=0:groups:4*strides:1x1*pads_begin:1x1*pads_end:1x1*dst_shape:2x16x5x5 --case=op/f32/conv_bwd_d_2d.json
--reset --in-shapes=0:2x16x5x5+1:2x20x5x5 --op-attrs=0:groups:4*strides:1x1*pads_begin:1x1*pads_end:1x1*weights_shape:20x4x3x3 --case=op/f32/conv_bwd_w_2d.json
--reset --in-shapes=0:2x16x5x5x5+1:20x4x3x3x3,0:2x16x5x5x5+1:16x1x3x3x3 --op-attrs=0:groups:4*strides:1x1x1*pads_begin:1x1x1*pads_end:1x1x1*dilations:1x1x1 --expected-n-partitions=1 --in-shapes=0:2x16x5x5x5+1:20x4x3x3x3 --case=op/f32/deconv_bwd_d.json
--reset --in-shapes=0:2x16x5x5x5+1:16x1x3x3x3 --op-attrs=0:groups:16*strides:1x1x1*pads_begin:1x1x1*pads_end:1x1x1*dilations:1x1x1 --case=op/f32/deconv_bwd_d.json
--reset --in-shapes=0:2x4x2+1:2x4x2 --op-attrs=0:groups:2*strides:1*pads_begin:1*pads_end:1*dilations:1*weights_shape:4x2x3 --case=op/f32/deconv_bwd_w.json
# the batch, and what has no effect on numbers
--reset --mb=0,1,3 --case=op/f32/conv_2d.json
--reset --mb=2 --in-shapes=0:1x16x9x9*acdb --case=op/f32/conv_2d.json
--reset --mb=2 --case=op/f32/deconv_bwd_d.json
--reset --op-attrs=0:output_padding:2x2 --case=op/f32/conv_bwd_d_2d.json
--reset --attr-fpmath=strict:false,bf16,tf32:true --case=op/f32/conv_2d.json
--reset --tensor-property=1:constant,1:undef+0:variable --case=op/f32/conv_2d.json
--reset --expected-n-partitions=0 --case=op/f32/conv_2d.json
--reset --op-attrs=0:weights_format:undef*data_format:undef --in-shapes=0:1x9x9x16+1:3x3x16x4 --case=op/f32/conv_2d.json
# empty and tiny
--reset --in-shapes=0:0x16x9x9 --case=op/f32/conv_2d.json
--reset --in-shapes=0:0x8x28x28+1:0x32x14x14 --case=op/f32/conv_bwd_w_2d.json
--reset --in-shapes=0:1x1x1x1+1:1x1x1x1 --case=op/f32/conv_2d.json
# not ours
--reset --case=op/f32/add.json
--mode=C --engine=cpu -v1 --graph --reset --mode-modifier=M --perf-template=x --in-shapes=0:4x3 --case=op/f32/add.json
"""  # noqa: E501
