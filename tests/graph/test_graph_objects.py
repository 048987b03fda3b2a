"""The graph objects: what they hold, what they refuse, and a whole layer with its gradients."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import convgrad
from convgrad import graph as g
from convgrad.errors import OutOfMemoryError, SpecError, UnsupportedError
from convgrad.graph import Graph, LogicalTensor, Op, Partition, Tensor, compiled, verbose
from convgrad.tensors import overlaps

UNIT = {"strides": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1]}
FIRST = {**UNIT, "data_format": "NCX", "weights_format": "OIX"}


def refused(status: str, *words: str):
    """A SpecError with that status, whose message has those words."""
    return _Refused(status, words)


class _Refused:
    def __init__(self, status, words):
        self.status, self.words = status, words

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            pytest.fail(f"nothing raised, {self.status} expected")
        if not isinstance(error, convgrad.ConvgradError):
            return False
        assert error.status == self.status, error
        for word in self.words:
            assert word in str(error), (word, str(error))
        return True


def lt(id, shape, dtype="f32", **kwargs):
    return LogicalTensor(id, dtype, shape, **kwargs)


def forward(id=0, ids=(0, 1, 2), **attrs):
    src, weights, dst = ids
    return Op(
        id,
        "Convolution",
        [lt(src, (2, 3, 8, 8)), lt(weights, (4, 3, 3, 3))],
        [lt(dst, 4)],
        f"conv{id}",
        **{**FIRST, **attrs},
    )


# ---- logical tensors


def test_logical_tensor():
    tensor = lt(5, (2, 3, 4))
    assert (tensor.id, tensor.dtype, tensor.get_dims(), tensor.get_strides()) == (5, "f32", (2, 3, 4), (12, 4, 1))
    assert tensor.layout_type == "strided"
    assert tensor.property_type == "undef"
    assert tensor == lt(5, (2, 3, 4)) == LogicalTensor(np.int64(5), g.DataType.f32, np.array([2, 3, 4]))
    assert tensor.is_equal(lt(5, [2, 3, 4]))
    for other in (lt(6, (2, 3, 4)), lt(5, (2, 3, 5)), lt(5, (2, 3, 4), "bf16"), lt(5, (2, 3, 4), strides=(24, 8, 2))):
        assert tensor != other
    assert lt(5, (2, 3, 4), property_type="constant") != tensor
    assert hash(tensor) == hash(lt(5, (2, 3, 4)))


def test_unknown_sizes():
    assert lt(0, -1).ndims == -1
    assert lt(0, 4).get_dims() == (g.UNKNOWN_DIM,) * 4
    assert lt(0, (-1, 3, -7)).get_dims() == (g.UNKNOWN_DIM, 3, g.UNKNOWN_DIM)
    assert lt(0, ()).ndims == 0
    assert not lt(0, (1, -1)).is_known
    with refused("invalid_arguments", "number of dimensions"):
        lt(0, -1).get_dims()
    with refused("invalid_arguments", "its shape is not known"):
        lt(0, (1, -1)).get_strides()
    with refused("invalid_arguments", "its layout is any"):
        lt(0, (1, 2), layout_type="any").get_strides()
    with refused("invalid_arguments", "its layout is strided"):
        lt(0, (1, 2)).get_layout_id()
    assert lt(0, (1, 2), layout_id=7).get_layout_id() == 7


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (lt(0, ()), 4),
        (lt(0, (), "bf16"), 2),
        (lt(0, (3, 0, 5)), 0),
        (lt(0, (2, 3, 4)), 96),
        (lt(0, (2, 3, 4), "f16"), 48),
        (lt(0, (2, 3), strides=(100, 7)), 800),  # the upper estimate, not (1 * 100 + 2 * 7 + 1) * 4
        (lt(0, (1, 3), strides=(100, 1)), 12),  # the stride of an axis of size 1 does not count
        (lt(0, (3, 3), "u4"), 5),
        (lt(0, (2, 3), layout_type="any"), g.SIZE_MAX),
        (lt(0, (2, -1)), g.SIZE_MAX),
        (lt(0, -1), g.SIZE_MAX),
    ],
)
def test_memory_size(tensor, size):
    assert tensor.get_mem_size() == size


def test_logical_tensor_refusals():
    with refused("invalid_arguments", "12 dimensions", "13"):
        lt(0, (1,) * 13)
    with refused("invalid_arguments", "12 dimensions"):
        lt(0, 13)
    with refused("invalid_arguments", "did you mean 'bf16'"):
        lt(0, (1,), "bf61")
    with refused("invalid_arguments", "whole number from 0", "'a'"):
        lt("a", (1,))
    with refused("invalid_arguments", "2**64"):
        lt(2**64, (1,))
    with refused("invalid_arguments", "2**63"):
        lt(0, (2**63,))
    with refused("invalid_arguments", "dims"):
        lt(0, "123")
    with refused("invalid_arguments", "tensor 0: dims", "1.5"):
        lt(0, (1.5,))
    with refused("invalid_arguments", "2 values", "(1,)"):
        lt(0, (2, 3), strides=(1,))
    with refused("invalid_arguments", "from 0"):
        lt(0, (2, 3), strides=(-3, 1))
    with refused("invalid_arguments", "a known shape"):
        lt(0, (2, -1), strides=(3, 1))
    with refused("invalid_arguments", "layout_type='strided'"):
        lt(0, (2, 3), layout_type="any", strides=(3, 1))
    with refused("invalid_arguments", "host_scalar", "f32 of shape (2,)"):
        lt(0, (2,), property_type="host_scalar")
    with refused("invalid_arguments", "host_scalar"):
        lt(0, (), "bf16", property_type="host_scalar")
    assert lt(0, (), "s32", property_type="host_scalar").get_mem_size() == 4
    with refused("invalid_arguments", "layout_id"):
        lt(0, (1,), layout_type="opaque")


# ---- operations and graphs


def test_op():
    op = Op(7, "Convolution")
    assert op.name == "Convolution_7"
    op.add_input(lt(0, 4)).add_inputs([lt(1, 4), lt(2, 1)]).add_output(lt(3, 4))
    assert [t.id for t in op.inputs] == [0, 1, 2]
    op.set_attr("groups", 2).set_attr("groups", 3)
    assert op.attrs == {"groups": 3}
    with refused("invalid_arguments", "groups", "empty string"):
        op.set_attr("groups", "")
    with refused("invalid_arguments", "LogicalTensor", "ndarray"):
        op.add_input(np.zeros(3))
    with refused("invalid_arguments", "id of an operation"):
        Op(-1, "Convolution")


def test_add_op_fills_in_defaults():
    graph = Graph()
    assert graph.add_op(forward(strides=2, groups=[1, 7])) == g.Status.success
    (node,) = graph.ops
    assert dict(node.attrs) == {
        "strides": (2, 2),
        "pads_begin": (1, 1),
        "pads_end": (1, 1),
        "dilations": (1, 1),
        "auto_pad": "None",
        "groups": 1,
        "data_format": "NCX",
        "weights_format": "OIX",
    }


def test_add_op_refuses_by_the_table():
    graph = Graph()
    with refused("invalid_graph_op", "Convolution 'conv0'", "strides", "at least 1"):
        graph.add_op(forward(strides=[0, 1]))
    with refused("invalid_graph_op", "pads_begin is required"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4), lt(1, 4)], [lt(2, 4)], strides=[1]))
    with refused("invalid_graph_op", "did you mean 'weights_format'"):
        graph.add_op(forward(weight_format="OIX"))
    with refused("invalid_graph_op", "2 or 3 inputs", "got 1"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4)], [lt(2, 4)], **UNIT))
    with refused("invalid_graph_op", "weights", "dtype of src, f32", "bf16"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4), lt(1, 4, "bf16")], [lt(2, 4)], **UNIT))
    with refused("invalid_graph_op", "1 output, dst", "got 2"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4), lt(1, 4)], [lt(2, 4), lt(3, 4)], **UNIT))
    with refused("invalid_graph_op", "dst must be f32", "got f16"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4), lt(1, 4)], [lt(2, 4, "f16")], **UNIT))
    for wrong, near in (("Convolve", "Convolution"), ("ReLUBackwards", "ReLUBackward"), ("convolution", "Convolution")):
        with refused("invalid_graph_op", "is not an operation of oneDNN Graph", f"did you mean '{near}'"):
            graph.add_op(Op(0, wrong, [lt(0, 4), lt(1, 4)], [lt(2, 4)], **UNIT))
    for strange in ("ReLU", "MaxPoolBackward", "MaxPoolBackprop", "RMSNorm"):
        with refused("invalid_graph_op", f"{strange!r} is not an operation of this family"):
            graph.add_op(Op(0, strange, [lt(0, 4)], [lt(2, 4)]))
    with refused("invalid_arguments", "must be an Op"):
        graph.add_op(None)
    assert graph.ops == ()
    assert graph.add_op(forward(strides=[0, 1]), allow_exception=False) == g.Status.invalid_graph_op
    with refused("invalid_graph_op", "weights_shape must be a list of whole numbers (s32)", "got f32"):
        graph.add_op(Op(0, "ConvolutionBackwardWeights", [lt(0, 4), lt(1, 4), lt(2, 1)], [lt(3, 4)], "w", **UNIT))


def test_strict_refuses_what_onednn_refuses():
    transposed = [lt(0, (1, 2, 3, 3)), lt(1, (2, 2, 1, 1))]
    graph = Graph(strict=True)
    with refused("invalid_graph_op", "weights_format='XIO'", "refused by oneDNN"):
        graph.add_op(Op(0, "ConvTranspose", transposed, [lt(2, 4)], weights_format="XIO", **UNIT))
    with refused("invalid_graph_op", "output_padding", "refused by oneDNN"):
        graph.add_op(Op(0, "ConvTransposeBackwardData", transposed, [lt(2, 4)], output_padding=[0, 1], **UNIT))
    with refused("invalid_graph_op", "'ConvTransposeBackpropData'", "refused by oneDNN"):
        graph.add_op(Op(0, "ConvTransposeBackpropData", transposed, [lt(2, 4)], **UNIT))
    with refused("invalid_graph_op", "f64"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4, "f64"), lt(1, 4, "f64")], [lt(2, 4, "f64")], **UNIT))
    with refused("invalid_graph_op", "dst must be bf16, got f32"):
        graph.add_op(Op(0, "Convolution", [lt(0, 4, "bf16"), lt(1, 4, "bf16")], [lt(2, 4)], **UNIT))
    with refused("invalid_arguments", "same_rule", "strict"):
        Graph(strict=True, same_rule="documented")
    shape = Op(0, "ConvolutionBackwardData", [lt(0, 4), lt(1, 4), lt(2, 1, "s32")], [lt(3, 4)], **UNIT)
    graph.add_op(shape)
    graph.finalize()
    (partition,) = graph.get_partitions()
    assert not partition.is_supported()
    with refused("invalid_arguments", "not supported", "whose shape is an input"):
        partition.compile()


def test_same_rule_of_a_graph():
    """R3's printed rule puts the odd element on the other side."""
    y, w = np.arange(6.0, dtype=np.float32).reshape(1, 1, 6), np.array([1, 10, 100, 1000], np.float32).reshape(1, 1, 4)
    attrs = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1], "auto_pad": "same_upper"}
    attrs |= {"dst_shape": [1, 1, 6], "data_format": "NCX", "weights_format": "OIX"}
    op = Op(0, "ConvolutionBackwardData", [lt(0, y.shape), lt(1, w.shape)], [lt(2, 3)], **attrs)
    results = {}
    for rule in ("gradient", "documented"):
        graph = Graph(same_rule=rule)
        graph.add_op(op)
        results[rule] = graph.compile().execute(None, {0: y, 1: w})[2]
        direct = convgrad.convolution_backward_data(y, w, **attrs, same_rule=rule)
        np.testing.assert_array_equal(results[rule], direct)
    assert (results["gradient"] != results["documented"]).any()


def test_graph_life_cycle():
    graph = Graph()
    with refused("invalid_graph", "must have an operation"):
        graph.finalize()
    graph.add_op(forward())
    with refused("invalid_graph", "finalized first"):
        graph.get_partitions()
    graph.set_fpmath_mode("bf16", True)
    graph.finalize()
    assert graph.finalize() == g.Status.success
    assert graph.get_fpmath_mode() == ("bf16", True)
    with refused("invalid_graph", "add operations before"):
        graph.add_op(forward(1))
    with refused("invalid_graph", "set the mode before"):
        graph.set_fpmath_mode("strict")
    first, second = graph.get_partitions(), graph.get_partitions("debug")
    assert [p.get_ops() for p in first] == [p.get_ops() for p in second] == [[0]]
    assert first[0].get_id() != second[0].get_id()
    with refused("invalid_arguments", "policy", "fusion, debug"):
        graph.get_partitions("max")


def test_duplicate_ids_are_refused():
    """oneDNN ignores the second operation and reports success."""
    graph = Graph()
    graph.add_op(forward())
    with refused("invalid_graph_op", "id 0 of conv0", "another operation"):
        graph.add_op(forward())
    assert len(graph.ops) == 1


def test_one_id_is_one_tensor():
    graph = Graph()
    graph.add_op(forward())
    other = forward(1, (0, 1, 5))
    other.inputs[1] = lt(1, (4, 3, 1, 1))
    graph.add_op(other)
    with refused("invalid_graph", "tensor id 1 means two tensors", "4x3x3x3", "4x3x1x1"):
        graph.finalize()
    graph = Graph()
    graph.add_op(forward())
    graph.add_op(forward(1))
    with refused("invalid_graph", "tensor 2 is the output of both", "conv0", "conv1"):
        graph.finalize()


def test_cycles_are_refused():
    graph = Graph()
    square = {"data_format": "NCX", "weights_format": "OIX", **UNIT}
    for id, (a, b) in enumerate([(0, 2), (2, 3), (3, 0)]):
        graph.add_op(Op(id, "Convolution", [lt(a, (1, 2, 4, 4)), lt(9, (2, 2, 3, 3))], [lt(b, (1, 2, 4, 4))], **square))
    with refused("invalid_graph", "wait for each other", "Convolution_0, Convolution_1, Convolution_2"):
        graph.finalize()


def test_an_output_is_inferred_once():
    """Bound again with the size that was inferred, SAME would come to other padding, and that to another size."""
    x, w = np.ones((1, 2, 4), np.float32), np.ones((2, 3, 3), np.float32)
    attrs = {"strides": [2], "pads_begin": [0], "pads_end": [0], "dilations": [1], "auto_pad": "SAME_UPPER"}
    attrs |= {"output_padding": [1], "data_format": "NCX", "filter_format": "OIX"}
    expected = convgrad.compat.convolution_backprop_data(x, w, **attrs)
    graph = Graph()
    graph.add_op(Op(0, "ConvolutionBackpropData", [lt(0, x.shape), lt(1, w.shape)], [lt(2, -1)], **attrs))
    found = graph.compile().execute(None, {0: x, 1: w})[2]
    assert found.shape == (1, 3, 9)
    np.testing.assert_array_equal(found, expected)


def test_partition_queries():
    partition = Partition(forward(), "cpu")
    assert partition.get_ops() == [0]
    assert partition.get_ops_num() == 1
    assert partition.get_engine_kind() == "cpu"
    assert partition.is_supported()
    assert [t.id for t in partition.get_input_ports()] == [0, 1]
    assert [t.id for t in partition.get_output_ports()] == [2]
    elsewhere = Partition(forward(), "gpu")
    assert not elsewhere.is_supported()
    with refused("invalid_arguments", "gpu"):
        elsewhere.compile()


# ---- compile and execute


def test_compile_infers():
    partition = Partition(forward(strides=[2, 2]))
    done = partition.compile([lt(0, (2, 3, 8, 8)), lt(1, (4, 3, 3, 3)), lt(77, (1,))], [lt(2, -1, layout_type="any")])
    assert done.query_logical_tensor(2) == lt(2, (2, 4, 4, 4))
    assert done.get_inplace_ports() == []
    assert done.get_scratchpad_logical_tensor().get_mem_size() == 0
    assert done.problem.y == (4, 4)
    partial = partition.compile(None, [lt(2, (-1, 4, -1, 4))])
    assert partial.outputs[0].get_dims() == (2, 4, 4, 4)
    strided = partition.compile(None, [lt(2, (2, 4, 4, 4), strides=(64, 1, 16, 4))])
    assert strided.outputs[0].get_strides() == (64, 1, 16, 4)


def test_compile_refusals():
    partition = Partition(forward())
    src, weights = lt(0, (2, 3, 8, 8)), lt(1, (4, 3, 3, 3))
    with refused(
        "invalid_arguments", "inputs must include the tensor 1 (weights of Convolution 'conv0')", "got the id 0"
    ):
        partition.compile([src])
    with refused("invalid_arguments", "must be known when compiling", "src (tensor 0)", "2x3x?x8"):
        partition.compile([lt(0, (2, 3, -1, 8)), weights])
    with refused("invalid_arguments", "its layout"):
        partition.compile([lt(0, (2, 3, 8, 8), layout_type="undef"), weights])
    with refused("invalid_arguments", "weights (tensor 1)", "must be of f32, as in the graph", "bf16"):
        partition.compile([src, lt(1, (4, 3, 3, 3), "bf16")])
    with refused("invalid_arguments", "dst (tensor 2)", "f16"):
        partition.compile([src, weights], [lt(2, 4, "f16")])
    with refused("invalid_shape", "dst must have the shape (2, 4, 8, 8)", "(2, 4, '?', 9)"):
        partition.compile([src, weights], [lt(2, (2, 4, -1, 9))])
    with refused(
        "invalid_shape",
        "dst must have the shape (2, 4, 8, 8) in NCX, got (2, 4, 8, 9); it follows from src",
        "(8 + 1 + 1 - 3) // 1 + 1 = 8 on spatial axis 1",
    ):
        partition.compile([src, weights], [lt(2, (2, 4, 8, 9))])
    with refused("invalid_shape", "weights must be (*, 3, 3, 3)", "(4, 5, 3, 3)"):
        partition.compile([src, lt(1, (4, 5, 3, 3))])
    with refused("invalid_arguments", "two elements at one address"):
        partition.compile([src, weights], [lt(2, (2, 4, 8, 8), strides=(256, 64, 8, 0))])
    with refused("invalid_arguments", "two elements at one address"):
        partition.compile([src, weights], [lt(2, (2, 4, 8, 8), strides=(256, 64, 4, 1))])
    with refused("invalid_arguments", "have the tensor 0 once"):
        partition.compile([src, lt(0, (1, 3, 8, 8)), weights])
    with refused("invalid_arguments", "LogicalTensor"):
        partition.compile([src, None])
    with refused("invalid_arguments", "opaque"):
        partition.compile([src, weights], [lt(2, (2, 4, 8, 8), layout_id=4)])
    with refused(
        "invalid_shape", "dst_shape must be given, as an input, as an attribute or by the shape of the output"
    ):
        inputs = [lt(0, (2, 4, 8, 8)), weights]
        Partition(Op(0, "ConvolutionBackwardData", inputs, [lt(2, 4)], **FIRST)).compile()


def test_interleaved_strides_do_not_overlap():
    assert not overlaps((3, 2), (2, 3))
    assert overlaps((3, 3), (2, 2))
    assert overlaps((4, 2), (2, 4))
    assert not overlaps((5,), (1,))
    assert not overlaps((5, 1), (1, 0))
    assert not overlaps((0, 5), (0, 0))
    # Too many to look at one by one.
    assert overlaps((3 << 20, 2), (2, 3), most=1 << 20)


def test_execute_and_its_refusals():
    rng = np.random.default_rng(0)
    src, weights = (rng.integers(-4, 5, s).astype(np.float32) for s in ((2, 3, 8, 8), (4, 3, 3, 3)))
    expected = convgrad.convolution(src, weights, **FIRST)
    done = Partition(forward()).compile()
    stream = g.Stream(g.Engine())
    tensors = [Tensor(done.query_logical_tensor(i), g.Engine(), a) for i, a in enumerate((src, weights))]
    out = Tensor(done.query_logical_tensor(2), g.Engine())
    out.array[...] = np.nan
    assert done.execute(stream, tensors, [out]) == [out]
    np.testing.assert_array_equal(out.array, expected)
    np.testing.assert_array_equal(done.execute(None, [src, weights])[0].array, expected)
    np.testing.assert_array_equal(done.execute(stream, tensors[::-1])[0].array, expected)
    stream.wait()
    with refused("invalid_arguments", "inputs must include the tensor 1"):
        done.execute(stream, tensors[:1])
    with refused("invalid_arguments", "inputs must have the tensor 0 once"):
        done.execute(stream, [tensors[0], tensors[0]])
    other = Tensor(lt(0, (2, 3, 8, 8), strides=(192, 1, 24, 3)))
    with refused("invalid_arguments", "src (tensor 0)", "as compiled, f32 2x3x8x8, got f32 2x3x8x8 with strides"):
        done.execute(stream, [other, tensors[1]])
    with refused("invalid_arguments", "of strides (192, 64, 8, 1)"):
        done.execute(stream, [np.asfortranarray(src), weights])
    with refused("invalid_arguments", "must be a Tensor", "inputs[2]"):
        done.execute(stream, [src, weights, src])
    frozen = np.empty_like(expected)
    frozen.flags.writeable = False
    with refused("invalid_arguments", "dst must be writable"):
        done.execute(stream, [src, weights], [frozen])


def test_memory_of_tensors():
    tensor = Tensor(lt(0, (2, 3), strides=(1, 4)), None, np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(tensor.array, [[0, 4, 8], [1, 5, 9]])
    tensor.set_data_handle(np.zeros(40, np.uint8))
    assert tensor.array.shape == (2, 3)
    with refused("invalid_arguments", "a flat buffer of at least 40 bytes", "(9,)"):
        tensor.set_data_handle(np.zeros(9, np.float32))
    with refused("invalid_arguments", "float64"):
        Tensor(lt(0, (2, 3)), None, np.zeros((2, 3)))
    with refused("invalid_arguments", "only be read as a copy"):
        Tensor(lt(0, (2, 3)), None, torch._neg_view(torch.zeros(2, 3)))
    with refused("invalid_arguments", "has no memory"):
        Tensor(lt(0, -1)).array  # noqa: B018
    with refused("invalid_arguments", "NumPy array"):
        Tensor(lt(0, (2, 3)), None, 140736)
    assert Tensor(lt(0, (2, 3), "bf16"), None, torch.ones(2, 3, dtype=torch.bfloat16)).array.dtype == ml_dtypes.bfloat16
    scalar = Tensor.make_scalar_tensor(lt(0, (), "s32", property_type="host_scalar"), 5)
    assert scalar.array[()] == 5
    with refused("invalid_arguments", "host_scalar"):
        Tensor.make_scalar_tensor(lt(0, ()), 5)
    with pytest.raises(UnsupportedError, match="no engine gpu 0"):
        g.Engine("gpu")


def test_huge_tensors_are_refused_before_any_memory_is_taken():
    with pytest.raises(OutOfMemoryError, match=r"tensor 3, f32 1000000x1000000: needs 4 TB of memory"):
        Tensor(lt(3, (10**6, 10**6)))
    with pytest.raises(OutOfMemoryError, match=r"needs .* of memory"):
        Partition(forward()).compile([lt(0, (10**9, 3, 8, 8)), lt(1, (4, 3, 3, 3))], [lt(2, 4)])
    assert issubclass(OutOfMemoryError, MemoryError)
    assert OutOfMemoryError.status == "out_of_memory"


def test_an_output_on_the_memory_of_an_input():
    rng = np.random.default_rng(1)
    op = Op(0, "Convolution", [lt(0, (1, 2, 5)), lt(1, (2, 2, 3))], [lt(2, 3)], data_format="NCX", weights_format="OIX",
            strides=[1], pads_begin=[1], pads_end=[1], dilations=[1])  # fmt: skip
    src, weights = (rng.integers(-4, 5, s).astype(np.float32) for s in ((1, 2, 5), (2, 2, 3)))
    done = Partition(op).compile()
    expected = done.execute(None, [src, weights])[0].array
    done.execute(None, [src, weights], [src])
    np.testing.assert_array_equal(src, expected)


def test_shapes_at_run_time():
    rng = np.random.default_rng(2)
    diff, weights = (rng.integers(-4, 5, s).astype(np.float32) for s in ((1, 2, 5), (2, 2, 3)))
    attrs = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
    attrs |= {"weights_format": "OIX", "dst_shape": [7, 7, 7]}
    inputs = [lt(0, (1, 2, 5)), lt(1, (2, 2, 3)), lt(3, (1, 3), "s32")]
    op = Op(0, "ConvolutionBackwardData", inputs, [lt(2, -1)], **attrs)
    done = Partition(op).compile()
    assert not done.outputs[0].is_known
    assert done.problem is None
    for size in (9, 10):
        late = Tensor(done.outputs[0])
        shape = np.array([[1, 2, size]], np.int32)
        done.execute(None, [diff, weights, shape], [late])
        assert late.logical.get_dims() == (1, 2, size)
        expected = convgrad.apply("ConvolutionBackwardData", diff, weights, (1, 2, size), **attrs)
        np.testing.assert_array_equal(late.array, expected)
        np.testing.assert_array_equal(done.execute(None, [diff, weights, shape])[0].array, expected)
    with refused("invalid_shape", "diff_dst must be 6 on spatial axis 0"):
        done.execute(None, [diff, weights, np.array([[1, 2, 11]], np.int32)])
    known = Partition(op).compile(None, [lt(2, (1, 2, 9))])
    assert known.problem is not None
    known.execute(None, [diff, weights, np.array([[1, 2, 9]], np.int32)])
    with refused("invalid_shape", "diff_src must have the shape (1, 2, 10)", "(1, 2, 9)"):
        known.execute(None, [diff, weights, np.array([[1, 2, 10]], np.int32)])


def test_a_shape_at_run_time_in_the_middle_of_a_graph():
    rng = np.random.default_rng(3)
    attrs = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
    attrs |= {"weights_format": "OIX"}
    graph = Graph()
    inputs = [lt(0, (1, 2, 5)), lt(1, (2, 2, 3)), lt(3, (3,), "s32")]
    graph.add_op(Op(0, "ConvolutionBackwardData", inputs, [lt(2, -1)], **attrs))
    graph.add_op(Op(1, "Convolution", [lt(2, -1), lt(1, (2, 2, 3))], [lt(4, -1)], **attrs))
    done = graph.compile()
    diff, weights = (rng.integers(-4, 5, s).astype(np.float32) for s in ((1, 2, 5), (2, 2, 3)))
    for size in (9, 10):
        got = done.execute(None, {0: diff, 1: weights, 3: np.array([1, 2, size], np.int32)})
        inner = convgrad.convolution_backward_data(diff, weights, (1, 2, size), **attrs)
        np.testing.assert_array_equal(got[4], convgrad.convolution(inner, weights, **attrs))
        assert list(got) == [4]


def test_cache_and_its_capacity(monkeypatch):
    monkeypatch.setattr(compiled, "CACHE", cache := compiled.Cache(2))
    monkeypatch.setattr("convgrad.graph.graphs.CACHE", cache)
    partition = Partition(forward())
    first = partition.compile()
    assert partition.compile()._compiled is first._compiled
    assert Partition(forward()).compile()._compiled is first._compiled
    for batch in (3, 4):
        partition.compile([lt(0, (batch, 3, 8, 8)), lt(1, (4, 3, 3, 3))], [lt(2, 4)])
    assert len(cache) == 2
    assert partition.compile()._compiled is not first._compiled
    g.set_compiled_partition_cache_capacity(0)
    assert g.get_compiled_partition_cache_capacity() == 0
    assert len(cache) == 0
    assert partition.compile()._compiled is not partition.compile()._compiled
    with refused("invalid_arguments", "negative", "-1"):
        g.set_compiled_partition_cache_capacity(-1)
    assert compiled._capacity({"DNNL_GRAPH_COMPILED_PARTITION_CACHE_CAPACITY": "17"}) == 17
    assert compiled._capacity({}) == compiled._capacity({"DNNL_GRAPH_COMPILED_PARTITION_CACHE_CAPACITY": "x"}) == 1024


def test_edits_of_constants_are_always_seen():
    """oneDNN's constant cache goes by address and returns stale results."""
    done = Partition(forward()).compile([lt(0, (2, 3, 8, 8)), lt(1, (4, 3, 3, 3), property_type="constant")], None)
    src, weights = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32)
    before = done.execute(None, [src, weights])[0].array
    weights *= 2
    np.testing.assert_array_equal(done.execute(None, [src, weights])[0].array, 2 * before)
    assert g.get_constant_tensor_cache_capacity("cpu") == 0
    g.set_constant_tensor_cache_capacity("cpu", 0)
    with pytest.raises(UnsupportedError, match="edits in place are always seen"):
        g.set_constant_tensor_cache_capacity("cpu", 1024)


def test_execution_from_many_threads():
    rng = np.random.default_rng(4)
    done = Partition(forward()).compile()
    weights = rng.integers(-4, 5, (4, 3, 3, 3)).astype(np.float32)
    sources = [rng.integers(-4, 5, (2, 3, 8, 8)).astype(np.float32) for _ in range(8)]
    expected = [convgrad.convolution(src, weights, **FIRST) for src in sources]
    wrong = []

    def work(i):
        for _ in range(20):
            if (done.execute(None, [sources[i], weights])[0].array != expected[i]).any():
                wrong.append(i)

    with ThreadPoolExecutor(8) as crowd:
        list(crowd.map(work, range(8)))
    assert not wrong


def test_unknown_ids_are_refused():
    """oneDNN returns an empty tensor and reports success."""
    with refused("invalid_arguments", "id 9 is not among the tensors of the partition, the ids 0, 1 and 2"):
        Partition(forward()).compile().query_logical_tensor(9)


# ---- layers


def layer(transposed: bool, dtype: str = "f32", fuse: bool = True):
    """Forward with bias, and all gradients: src 0, weights 1, bias 2, dst 4; diff_dst 5 to 6, 7 and 8."""
    family = "ConvTranspose" if transposed else "Convolution"
    attrs = {"strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1], "data_format": "NCX"}
    attrs |= {"groups": 2, "weights_format": "IOX" if transposed else "OIX"}
    small, big = (2, 6, 5, 5), (2, 4, 9, 9)
    src, dst = (small, big) if transposed else (big, small)
    weights = (6, 2, 3, 3)
    graph = Graph()
    t = {
        0: lt(0, src, dtype),
        1: lt(1, weights, dtype),
        2: lt(2, dst[1:2], dtype),
        5: lt(5, dst, dtype),
    }
    graph.add_op(Op(3, "BiasAddBackward", [t[5]], [lt(8, 1, dtype)], "db", data_format="NCX"))
    graph.add_op(Op(1, family + "BackwardData", [t[5], t[1]], [lt(6, -1, dtype)], "dx",
                    **attrs, **({} if transposed else {"dst_shape": src})))  # fmt: skip
    graph.add_op(Op(2, family + "BackwardWeights", [t[0], t[5]], [lt(7, -1, dtype)], "dw", **attrs,
                    weights_shape=weights))  # fmt: skip
    graph.add_op(Op(5, "BiasAdd", [lt(3, -1, dtype), t[2]], [lt(4, -1, dtype)], "add", data_format="NCX"))
    graph.add_op(Op(0, family, [t[0], t[1]], [lt(3, -1, dtype)], "y", **attrs))
    return graph, {i: t[i].get_dims() for i in t}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("policy", ["fusion", "debug"])
def test_a_layer_with_its_gradients(transposed, policy):
    graph, shapes = layer(transposed)
    rng = np.random.default_rng(5)
    arrays = {i: rng.integers(-3, 4, s).astype(np.float32) for i, s in shapes.items()}
    done = graph.compile(policy=policy)
    names = [[node.name for node in p._nodes] for p in done.partitions]
    assert names == ([["db"], ["dx"], ["dw"], ["y", "add"]] if policy == "fusion" else
                     [["db"], ["dx"], ["dw"], ["y"], ["add"]])  # fmt: skip
    assert sorted(t.id for t in done.outputs) == [4, 6, 7, 8]
    got = done.execute(None, arrays)

    x, w, b = (torch.from_numpy(arrays[i].astype(np.float64)).requires_grad_() for i in (0, 1, 2))
    apply = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    y = apply(x, w, b, 2, 1, groups=2)
    y.backward(torch.from_numpy(arrays[5].astype(np.float64)))
    for id, expected in ((4, y.detach()), (6, x.grad), (7, w.grad), (8, b.grad)):
        np.testing.assert_array_equal(got[id], expected.numpy())
    places = {4: np.empty_like(got[4])}
    assert done.execute(None, arrays, places)[4] is places[4]
    with refused("invalid_arguments", "the tensor 5 (diff_dst of", "0, 1 and 2"):
        done.execute(None, {i: a for i, a in arrays.items() if i != 5})


def test_a_tensor_that_is_kept_is_not_fused_away():
    graph, _ = layer(False)
    with refused("invalid_arguments", "id 99"):
        graph.keep(99)
    graph.keep(3)
    graph.finalize()
    assert [p.get_ops() for p in graph.get_partitions()] == [[3], [1], [2], [0], [5]]
    assert 3 in [t.id for t in graph.output_ports]


def test_a_fused_bias_is_added_before_rounding():
    """256 + 1 is 256 in bf16, so two roundings lose the bias, and one keeps it."""
    graph = Graph()
    plain = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1], "data_format": "NCX"}
    graph.add_op(Op(0, "Convolution", [lt(0, (1, 2, 1), "bf16"), lt(1, (1, 2, 1), "bf16")], [lt(2, 3, "bf16")],
                    weights_format="OIX", **plain))  # fmt: skip
    graph.add_op(Op(1, "BiasAdd", [lt(2, 3, "bf16"), lt(3, (1,), "bf16")], [lt(4, 3, "bf16")], data_format="NCX"))
    src = np.array([256, 1], ml_dtypes.bfloat16).reshape(1, 2, 1)
    given = {0: src, 1: np.ones_like(src), 3: np.ones(1, ml_dtypes.bfloat16)}
    assert float(graph.compile().execute(None, given)[4].item()) == 258
    assert float(graph.compile(policy="debug").execute(None, given)[4].item()) == 256


def test_bias_operations():
    data = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    add = Partition(Op(0, "BiasAdd", [lt(0, (2, 3, 4)), lt(1, (4,))], [lt(2, -1)])).compile()
    bias = np.array([1, 10, 100, 1000], np.float32)
    np.testing.assert_array_equal(add.execute(None, [data, bias])[0].array, data + bias)
    assert add.get_inplace_ports() == [(0, 2)]
    inplace = data.copy()
    add.execute(None, [inplace, bias], [inplace])
    np.testing.assert_array_equal(inplace, data + bias)
    back = Partition(Op(0, "BiasAddBackward", [lt(0, (2, 3, 4))], [lt(1, -1)], data_format="NCX")).compile()
    np.testing.assert_array_equal(back.execute(None, [data])[0].array, data.sum((0, 2)))
    with refused("invalid_arguments", "bias must be a vector of 4 values", "(3,)"):
        Partition(Op(0, "BiasAdd", [lt(0, (2, 3, 4)), lt(1, (3,))], [lt(2, -1)])).compile()
    with refused("invalid_shape", "at least 2 dimensions", "(4,)"):
        Partition(Op(0, "BiasAddBackward", [lt(0, (4,))], [lt(1, -1)])).compile()
    with refused("invalid_graph_op", "strides is not an attribute"):
        Partition(Op(0, "BiasAddBackward", [lt(0, (4,))], [lt(1, -1)], strides=[1]))


@pytest.mark.parametrize("kind", ["BiasAddBackward", "Convolution"])
def test_accumulating_needs_a_place(kind):
    """Without one, the result would be added to whatever new memory holds."""
    plain = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1]} if kind == "Convolution" else {}
    shapes = [(1, 4, 2), (1, 2, 3)] if plain else [(1, 4, 3)]
    inputs = [lt(i, shape) for i, shape in enumerate(shapes)]
    step = Partition(Op(0, kind, inputs, [lt(9, -1)], accumulate=True, **plain)).compile()
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    with refused("invalid_arguments", "accumulate needs `out`"):
        step.execute(None, arrays)
    out = np.ones(step.outputs[0].shape, np.float32)
    step.execute(None, arrays, [out])
    assert set(out.ravel()) == {3 if plain else 5}


def test_sums_of_bias_gradients_may_stay_in_f32():
    ones = np.ones((1, 3001, 1), ml_dtypes.bfloat16)
    back = Partition(Op(0, "BiasAddBackward", [lt(0, ones.shape, "bf16")], [lt(1, 1, "f32")])).compile()
    assert back.execute(None, [ones])[0].array.tolist() == [3001]


def test_sums_of_bias_gradients_are_kept_in_f32():
    ones = np.ones((1, 1, 1000), ml_dtypes.bfloat16)
    back = Partition(Op(0, "BiasAddBackward", [lt(0, (1, 1, 1000), "bf16")], [lt(1, 1, "bf16")], data_format="NCX"))
    assert float(back.compile().execute(None, [ones])[0].array[0]) == 1000


def test_the_example_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "graph.md").read_text()
    first = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(first[1], names)
    assert {i: a.shape for i, a in names["results"].items()} == {
        3: (8, 56, 56, 64),
        4: (8, 56, 56, 64),
        5: (3, 3, 64, 64),
        6: (64,),
    }
    assert names["results"][6][0] == 8 * 56 * 56


# ---- logging and dumps


def test_verbose_lines_have_onednns_fields(caplog):
    op = Op(0, "ConvTransposeBackwardData", [lt(0, (1, 128, 16, 16)), lt(1, (32, 128, 3, 3))], [lt(2, 4)], "D",
            strides=[2, 2], pads_begin=[0, 0], pads_end=[41, 41], dilations=[1, 1], data_format="NCX",
            weights_format="IOX")  # fmt: skip
    with caplog.at_level(logging.INFO, "convgrad.graph"):
        g.set_compiled_partition_cache_capacity(0)
        done = Partition(op).compile()
        g.set_compiled_partition_cache_capacity(1024)
        Partition(op).compile()
        Partition(op).compile()
        done.execute(None, [np.zeros((1, 128, 16, 16), np.float32), np.zeros((32, 128, 3, 3), np.float32)])
    compiles = [r.getMessage() for r in caplog.records if r.name == "convgrad.graph.compile"]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "convgrad.graph.exec"]
    pattern = (
        r"onednn_verbose,v1,graph,exec,cpu,\d+,misc_post_ops,D,data:NCX filter:IOX ,"
        r"in0_f32:0:strided:undef:1x128x16x16:32768s256s16s1 in1_f32:1:strided:undef:32x128x3x3:1152s9s3s1 "
        r"out0_f32:2:strided:undef:1x32x28x28:25088s784s28s1,fpm:strict,scratchpad:0,convgrad,convgrad_backend,[\d.e-]+"
    )
    assert re.fullmatch(pattern, line)
    assert [c.split(",")[3] for c in compiles] == [
        "compile:cache_miss",
        "compile:cache_miss",
        "compile:compiled_partition_cache_hit",
    ]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("1", ["exec"]),
        ("2", ["compile", "exec"]),
        ("profile_exec", ["exec"]),
        ("profile_create", ["compile"]),
        ("all", ["check", "compile", "exec"]),
        ("all,filter=graph", ["check", "compile", "exec"]),
        ("all,filter=primitive", []),
        ("all,filter=(", []),
        ("none", []),
        ("nonsense", []),
    ],
)
def test_the_variable_chooses_the_lines(value, names):
    loggers = (verbose.CHECK, verbose.COMPILE, verbose.EXEC)
    before = list(verbose.ROOT.handlers)
    try:
        verbose.set_up({"ONEDNN_VERBOSE": value})
        assert sorted(lg.name.split(".")[-1] for lg in loggers if lg.level == logging.INFO) == names
        assert len(verbose.ROOT.handlers) == len(before) + bool(names)
    finally:
        verbose.ROOT.handlers[:] = before
        for logger in loggers:
            logger.setLevel(logging.NOTSET)


def test_dumps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("invalid_arguments", "graph and subgraph", "'graph,everything'"):
        g.set_dump_mode("graph,everything")
    g.set_dump_mode("graph,subgraph")
    try:
        graph, _ = layer(False)
        graph.compile()
    finally:
        g.set_dump_mode("")
    names = sorted(p.name for p in tmp_path.iterdir())
    assert f"graph-{graph.id}.json" in names
    assert f"graph-{graph.id}-partitioning.json" in names
    assert len(names) == 2 + 4
    for name in names:
        again = g.load(tmp_path / name)
        assert again.to_json()
    assert '"partition_id"' in (tmp_path / f"graph-{graph.id}-partitioning.json").read_text()
    fused = next(g.load(tmp_path / n) for n in names if '"add"' in (tmp_path / n).read_text() and n.count("-") == 2)
    assert fused.ops


def test_errors_survive_pickling_and_have_a_known_status():
    import pickle

    with pytest.raises(SpecError) as caught:
        Partition(forward(strides=[0, 1]))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert g.Status[again.status] == 8
