"""The peers compute what convgrad computes, on integers exactly, so that a comparison of speed compares equals."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

import convgrad
from convgrad.bench import onednn
from convgrad.bench import torch as pytorch
from convgrad.dtypes import DTYPES
from convgrad.spec import OPS, Problem

needs_torch = pytest.mark.skipif(pytorch.available() is not None, reason="PyTorch is not installed")
needs_onednn = pytest.mark.skipif(onednn.available() is not None, reason="oneDNN is not installed")

RANKS = {  # spatial sizes of x, kernel, stride, padding; sizes that every axis shows its own mistake with
    1: ((11,), (3,), (2,), (1,)),
    2: ((9, 8), (3, 2), (2, 1), (1, 0)),
    3: ((5, 6, 7), (2, 3, 1), (1, 2, 2), (1, 1, 0)),
}


def call(kind, rank, layout, groups=1, dilation=1, dtype="f32", batch=2, cx=6, cy=4):
    """Attributes and inputs of an operation on small integers, and convgrad's result."""
    op = OPS[kind]
    x, k, s, p = RANKS[rank]
    d = (dilation,) * rank
    span = [(a - 1) * b + 1 for a, b in zip(k, d, strict=True)]
    y = [(n + 2 * b - e) // t + 1 for n, b, e, t in zip(x, p, span, s, strict=True)]
    if layout == "NCX":
        shapes = {"x": (batch, cx, *x), "y": (batch, cy, *y), "w": (cy, cx // groups, *k)}
    else:
        shapes = {"x": (batch, *x, cx), "y": (batch, *y, cy), "w": (*k, cx // groups, cy)}
    formats = {(False, "NCX"): "OIX", (False, "NXC"): "XIO", (True, "NCX"): "IOX", (True, "NXC"): "XOI"}
    attrs = {
        "strides": list(s),
        "pads_begin": list(p),
        "pads_end": list(p),
        "dilations": list(d),
        "groups": groups,
        "data_format": layout,
        "weights_format": formats[op.transposed, layout],
    }
    if op.shape_source:
        attrs[op.shape_source] = list(shapes[op.wanted])
    if op.transposed and op.wanted == "x":
        attrs["output_padding"] = [
            n - (t * (m - 1) + e - 2 * b) for n, m, t, e, b in zip(x, y, s, span, p, strict=True)
        ]
    random = np.random.default_rng(rank)
    inputs = [random.integers(-3, 4, shapes[a.role]).astype(DTYPES[dtype].numpy) for a in op.inputs if a.role in shapes]
    return attrs, inputs, convgrad.apply(kind, *inputs, **attrs)


@needs_torch
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize(("groups", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_pytorch_agrees(kind, rank, layout, groups, dilation):
    attrs, inputs, expected = call(kind, rank, layout, groups, dilation)
    found = pytorch.run(kind, attrs, inputs)
    np.testing.assert_array_equal(found, expected)


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_pytorch_takes_every_type(dtype, layout):
    attrs, inputs, expected = call("ConvolutionBackwardData", 2, layout, dtype=dtype)
    found = pytorch.run("ConvolutionBackwardData", attrs, inputs)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@needs_torch
@pytest.mark.parametrize("kind", ["Convolution", "ConvTranspose"])
def test_pytorch_adds_a_bias(kind):
    attrs, inputs, expected = call(kind, 2, "NXC")
    bias = np.arange(expected.shape[-1], dtype=np.float32)
    np.testing.assert_array_equal(pytorch.run(kind, attrs, [*inputs, bias]), expected + bias)


@needs_torch
def test_pytorch_reads_data_in_place():
    """Data must not be copied for PyTorch, or it would run on other memory than convgrad does."""
    attrs, inputs, expected = call("ConvolutionBackwardWeights", 2, "NXC")
    compiled = pytorch.Compiled("ConvolutionBackwardWeights", attrs, inputs)
    inputs[0] *= 2
    np.testing.assert_array_equal(compiled.array(), 2 * expected)


@needs_torch
def test_pytorch_keeps_the_memory_format():
    import torch

    for layout, expected in (("NCX", torch.contiguous_format), ("NXC", torch.channels_last)):
        attrs, inputs, _ = call("ConvolutionBackwardData", 2, layout)
        result = pytorch.Compiled("ConvolutionBackwardData", attrs, inputs)()
        assert result.is_contiguous(memory_format=expected), layout


@needs_torch
@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("x f32 n1 g1 cx2 cy2 x8 w3 y8 s1 d1 p1", False),
        # 7 + 0 + 1 - 3 and 7 + 0 + 0 - 3 both give 3 windows at stride 2: the sizes come out the same.
        ("x f32 n1 g1 cx2 cy2 x7 w3 y3 s2 d1 p0", False),
        ("x f32 n1 g1 cx2 cy2 x8 w2 y8 s1 d1 p1", True),
        ("x f32 n1 g1 cx2 cy2 x8 w3 y8 s1 d1 p1 accumulate", True),
        ("x bf16 n1 g1 cx2 cy2 x8 w3 y8 s1 d1 p1 out:f32", True),
    ],
)
def test_pytorch_refuses_what_it_has_no_call_for(text, refused):
    reason = pytorch.refusal("ConvolutionBackwardData", Problem.parse(text))
    assert (reason is not None) == refused, reason


@needs_torch
def test_pytorch_refuses_uneven_padding_with_a_reason():
    diff_dst, weights = np.ones((1, 2, 8), np.float32), np.ones((2, 2, 2), np.float32)
    attrs = {"strides": [1], "pads_begin": [1], "pads_end": [0], "dilations": [1], "data_format": "NCX"}
    attrs |= {"weights_format": "OIX", "dst_shape": [1, 2, 8]}
    with pytest.raises(ValueError, match="both ends alike"):
        pytorch.Compiled("ConvolutionBackwardData", attrs, [diff_dst, weights])


@needs_onednn
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_onednn_agrees(kind, rank, layout):
    attrs, inputs, expected = call(kind, rank, layout)
    found = onednn.run(kind, attrs, inputs, expected.shape)
    np.testing.assert_array_equal(found, expected)


@needs_onednn
def test_onednn_takes_strides():
    attrs, (diff_dst, weights), expected = call("ConvolutionBackwardData", 2, "NCX")
    turned = np.asfortranarray(diff_dst)
    found = onednn.run("ConvolutionBackwardData", attrs, [turned, weights], expected.shape)
    np.testing.assert_array_equal(found, expected)


@needs_onednn
def test_onednn_refusal_has_a_status():
    attrs, inputs, expected = call("ConvolutionBackwardData", 2, "NCX")
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("ConvolutionBackwardData", {**attrs, "data_format": "CNX"}, inputs, expected.shape)
    assert caught.value.status == "invalid_graph_op"
    assert caught.value.step == "dnnl_graph_add_op"
    with pytest.raises(onednn.OneDNNError, match="invalid_data_type"):
        onednn.run("ConvolutionBackwardData", attrs, [a.astype(np.float64) for a in inputs], expected.shape)
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("ConvolutionBackwardData", {**attrs, "padding": [1]}, inputs, expected.shape)
    assert caught.value.status == "invalid_graph_op"


@needs_onednn
def test_onednn_survives_f16():
    """On a CPU without f16 arithmetic the library would end the process; here that is an error like any other."""
    attrs, inputs, expected = call("ConvolutionBackwardData", 2, "NCX", dtype="f16")
    if onednn._library().lib.dnnl_get_effective_cpu_isa() & onednn._FP16_ISA:
        np.testing.assert_array_equal(onednn.run("ConvolutionBackwardData", attrs, inputs, expected.shape), expected)
        return
    with pytest.raises(onednn.OneDNNError, match="no native f16"):
        onednn.run("ConvolutionBackwardData", attrs, inputs, expected.shape)


@needs_onednn
def test_onednn_releases_what_it_makes(monkeypatch):
    library = onednn._library()
    made, destroyed = [], []
    call_through = onednn._Library.call

    def count(self, function, *args, **kwargs):
        call_through(self, function, *args, **kwargs)
        if function.endswith("_create"):
            made.append(function.removesuffix("_create"))
        elif function.endswith("_get_partitions"):
            made.append("dnnl_graph_partition")
        elif function.endswith("_destroy"):
            destroyed.append(function.removesuffix("_destroy"))

    monkeypatch.setattr(onednn._Library, "call", count)
    attrs, inputs, expected = call("ConvolutionBackwardData", 2, "NCX")
    compiled = onednn.Compiled("ConvolutionBackwardData", attrs, inputs, np.empty_like(expected))
    assert sorted(destroyed) == ["dnnl_graph_graph", "dnnl_graph_op", "dnnl_graph_partition"]
    np.testing.assert_array_equal(compiled(), expected)
    del compiled
    gc.collect()
    assert library.engine
    assert sorted(made) == sorted(destroyed)
    assert made.count("dnnl_graph_tensor") == 3


@pytest.mark.parametrize("peer", [pytest.param(pytorch, marks=needs_torch), pytest.param(onednn, marks=needs_onednn)])
def test_threads_can_be_set(peer):
    before = peer.get_threads()
    try:
        for count in (1, 2):
            peer.set_threads(count)
            assert peer.get_threads() == count
    finally:
        peer.set_threads(before)


def test_importing_the_peers_loads_nothing():
    code = (
        "import sys; from convgrad.bench import onednn, torch\n"
        "print('torch' in sys.modules, onednn._library.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0"]
