"""Random calls of every operation through a graph, its file and back, bit for bit as PyTorch computes them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import problems
from convgrad.dtypes import name_of
from convgrad.errors import SpecError
from convgrad.graph import Graph, LogicalTensor, Op, Tensor, from_json, writer
from convgrad.libraries import find, open_array, open_shape
from convgrad.spec.problem import settle


def check_some(chunk, count):
    rng = np.random.default_rng([5, chunk])
    for number in range(count):
        case = problems.draw(rng)
        problems.check(case, lambda *args, c=case, n=number, **kwargs: through_a_graph(c, n, *args, **kwargs))


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("chunk", range(4))
def test_random_calls(chunk):
    check_some(chunk, 90)


def test_random_calls_by_the_engine_that_users_get():
    check_some(4, 30)


@pytest.mark.parametrize("chunk", range(2))
def test_what_is_written_for_onednn_computes_the_same(chunk):
    """The canonical form has other words for some weights, and they are views of the same memory."""
    rng = np.random.default_rng([6, chunk])
    swapped = 0
    for _ in range(60):
        case = problems.draw(rng)
        if case.out is not None or case.expected.dtype == np.float64 or "out_dtype" in case.attributes:
            continue
        graph, arrays = build(case, case.kind, case.inputs, None, case.attributes)
        by_input = any(a.dtype == np.int32 for a in arrays.values())
        if "groups as documented" in case.notes and not by_input:
            with pytest.raises(SpecError, match="documented layout of groups cannot be said in oneDNN's format"):
                graph.to_json()
            continue
        if by_input:
            continue  # oneDNN runs no such operation
        text = graph.to_json()
        again = from_json(text, strict=True)
        assert again.to_json() == text
        assert json.loads(text)["graph"][0]["kind"] in ("Convolution", "ConvTranspose") or "Backward" in text
        # Only weights are turned, and turning them twice is turning them back.
        turns = writer._swaps(graph.ops)
        swapped += len(turns)
        moved = {id: array.transpose(turns[id]) if id in turns else array for id, array in arrays.items()}
        result = again.compile().execute(None, moved)[9]
        result = result.transpose(turns[9]) if 9 in turns else result
        np.testing.assert_array_equal(result, case.expected, err_msg=f"problems.replay({case.seed})")
    assert swapped


def build(case, kind, inputs, out, attributes):
    """The graph of one call, and its arrays by tensor id."""
    arrays = {}
    for index, value in enumerate(inputs):
        if not hasattr(value, "dtype") or "int" in str(value.dtype):
            arrays[index] = np.array(open_shape(value, "shape"), np.int32)
            continue
        array = open_array(value, "input")
        used = [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
        # A graph's tensors run forwards, in whole elements.
        if any(s < 0 or s % array.itemsize for s in used):
            array = np.ascontiguousarray(array)
        arrays[index] = array
    given = [describe(i, a) for i, a in arrays.items()]
    output = LogicalTensor(9, "undef" if out is None else name_of(out.dtype), -1)
    if out is not None:
        output = describe(9, out)
    elif "out_dtype" in attributes:
        output = output.replace(dtype=attributes["out_dtype"])
    shapes = {"dst_shape", "weights_shape", "output_shape", "filter_shape"} & set(attributes)
    if (
        out is None
        and len(inputs) == 2
        and not shapes
        and kind in ("ConvolutionBackwardData", "ConvolutionBackwardWeights")
    ):
        output = output.replace(dims=case.expected.shape)
    graph = Graph()
    graph.add_op(Op(3, kind, given, [output], "name", **attributes))
    graph.finalize()
    return graph, arrays


def describe(id: int, array: np.ndarray) -> LogicalTensor:
    steps = settle(array.shape, tuple(s // array.itemsize for s in array.strides))
    dtype = "s32" if array.dtype == np.int32 else name_of(array.dtype)
    return LogicalTensor(id, dtype, array.shape, strides=[max(s, 0) for s in steps] if array.size else None)


def through_a_graph(case, number, kind, *inputs, out=None, **attributes):
    """The call of a case as a graph, written to a file and read again, with and without memory for the result."""
    target = None if out is None else open_array(out, "out")
    place = target
    if target is not None and any(
        s < 0 or s % target.itemsize for s, n in zip(target.strides, target.shape, strict=True) if n > 1
    ):
        place = np.ascontiguousarray(target)
    graph, arrays = build(case, kind, inputs, place, attributes)
    text = graph.to_json(onednn=False)
    again = from_json(text)
    assert again.to_json(onednn=False) == text
    assert [n.key for n in again.ops] == [n.key for n in graph.ops] or kind.endswith("-1")
    assert again.tensors == graph.tensors
    partition = again.get_partitions("fusion" if number % 2 else "debug")[0]
    compiled = partition.compile()
    # Tensors are found by id, whatever their order.
    given = [Tensor(compiled.query_logical_tensor(id), None, array) for id, array in reversed(arrays.items())]
    if place is not None:
        compiled.execute(None, given, [place])
        if place is not target:
            target[...] = place
        return out
    if number % 3 and not compiled.outputs[0].is_known:
        late = Tensor(compiled.outputs[0])
        compiled.execute(None, given, [late])
        return find(inputs[0]).wrap(late.array, inputs[0])
    return find(inputs[0]).wrap(compiled.execute(None, given)[0].array, inputs[0])
