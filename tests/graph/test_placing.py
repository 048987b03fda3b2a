"""Memory of a whole graph's tensors: results that lie on what is still to be read, and on each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from convgrad.errors import SpecError
from convgrad.graph import Engine, Graph, LogicalTensor, Op, Partition, Tensor, from_json, load

UNIT = {"strides": [1], "pads_begin": [1], "pads_end": [1], "dilations": [1]}
DATA, WEIGHTS = (2, 6, 3), (3, 3, 3)


def lt(id, shape=DATA, **kwargs):
    return LogicalTensor(id, "f32", shape, **kwargs)


def siblings(**attrs):
    """Two convolutions of tensor 0, to 2 and 4; then 5, of 2, with the bias 6, which is fused to 7."""
    graph = Graph()
    graph.add_op(Op(0, "Convolution", [lt(0), lt(1, WEIGHTS)], [lt(2)], **UNIT, **attrs))
    graph.add_op(Op(1, "Convolution", [lt(0), lt(3, WEIGHTS)], [lt(4)], **UNIT, **attrs))
    graph.add_op(Op(2, "Convolution", [lt(2), lt(1, WEIGHTS)], [lt(5)], **UNIT))
    graph.add_op(Op(3, "BiasAdd", [lt(5), lt(6, (3,))], [lt(7)]))
    graph.keep(2)
    return graph


def values():
    rng = np.random.default_rng(3)
    shapes = {0: DATA, 1: WEIGHTS, 3: WEIGHTS, 6: (3,)}
    return {id: rng.integers(-3, 4, shape).astype(np.float32) for id, shape in shapes.items()}


@pytest.mark.parametrize("policy", ["fusion", "debug"])
def test_an_output_may_lie_on_any_input(policy):
    done = siblings().compile(policy=policy)
    expected = done.execute(None, values())
    for output, source in product((2, 4, 7), (0, 1, 3)):
        arrays = values()
        place = arrays[source]
        if place.size < expected[output].size:  # part of a larger array lies on the weights
            whole = np.zeros(expected[output].size, np.float32)
            whole[: place.size] = place.ravel()
            arrays[source] = whole[: place.size].reshape(place.shape)
            place = whole.reshape(expected[output].shape)
        got = done.execute(None, arrays, {output: place})
        for id in expected:
            np.testing.assert_array_equal(got[id], expected[id], f"{output} on {source}")
        assert got[output] is place


def test_a_result_that_is_added_to_waits_with_its_values():
    done = siblings(accumulate=True).compile()
    start = values()[0]
    expected = done.execute(None, values(), {2: start.copy(), 4: np.zeros_like(start)})
    arrays = values()
    got = done.execute(None, arrays, {2: arrays[0], 4: np.zeros_like(start)})
    for id in expected:
        np.testing.assert_array_equal(got[id], expected[id])


def test_tensors_of_other_libraries_are_told_that_they_were_written():
    arrays = {id: torch.from_numpy(a) for id, a in values().items()}
    expected = siblings().compile().execute(None, values())
    version = arrays[0]._version
    siblings().compile().execute(None, arrays, {2: arrays[0]})
    np.testing.assert_array_equal(arrays[0], expected[2])
    assert arrays[0]._version > version


def test_memory_that_must_not_be_written_to_is_refused_before():
    arrays = values()
    arrays[0].flags.writeable = False
    with pytest.raises(SpecError, match="dst must be writable"):
        siblings().compile().execute(None, arrays, {2: arrays[0]})


def test_outputs_must_lie_apart():
    done = siblings().compile()
    both = np.zeros((*DATA[:2], 6), np.float32)
    one = np.empty(DATA, np.float32)
    flat = np.empty(one.size + 9, np.float32)
    for first, second in ((one, one), (flat[:-9], flat[9:]), (Tensor(lt(4), None, one), one)):
        with pytest.raises(SpecError, match="tensor 7 of Convolution must not share memory with tensor 4 of"):
            done.execute(None, values(), {4: first, 7: second})
    # Those that interleave have no element in common.
    halves = [both[..., :3], both[..., 3:]]
    graph = Graph()
    for id, half in enumerate(halves):
        steps = tuple(s // 4 for s in half.strides)
        graph.add_op(Op(id, "Convolution", [lt(0), lt(1, WEIGHTS)], [lt(2 + id, strides=steps)], **UNIT))
    graph.compile().execute(None, values(), dict(zip((2, 3), halves, strict=True)))
    np.testing.assert_array_equal(*halves)
    assert both.any()


def test_lists_go_by_place():
    done = siblings().compile()
    expected = done.execute(None, values())
    assert [t.id for t in done.inputs] == [0, 1, 3, 6]
    made = [np.empty(DATA, np.float32) for _ in done.outputs]
    given = list(values().values())
    got = done.execute(None, [Tensor(lt(0), None, given[0]), *given[1:]], made)
    assert [got[t.id] is place for t, place in zip(done.outputs, made, strict=True)] == [True] * 3
    for id in expected:
        np.testing.assert_array_equal(got[id], expected[id])


def test_what_is_given_must_be_known():
    done = siblings().compile()
    with pytest.raises(SpecError, match=r"outputs: id 9 is not among what the graph computes, the ids 2, 4 and 7$"):
        done.execute(None, values(), {9: np.empty(DATA, np.float32)})
    with pytest.raises(SpecError, match=r"id 5 is not among .*; it is fused into another one; graph.keep\(id\)"):
        done.execute(None, values(), {5: np.empty(DATA, np.float32)})
    with pytest.raises(SpecError, match=r"inputs must include the tensor 1 \(weights of Convolution\), got the id 0"):
        done.execute(None, {0: values()[0], 1: None})
    with pytest.raises(SpecError, match=r"inputs must include the tensor 0 \(src of Convolution\), got none"):
        done.steps[0].execute(None, [None])
    for wrong in (values()[0], Tensor(lt(0)), 3, None):
        with pytest.raises(SpecError, match="inputs must be a list of Tensors or arrays, or a dictionary of them"):
            done.execute(None, wrong)
    with pytest.raises(SpecError, match="stream must be a Stream or None, got Engine"):
        done.execute(Engine(), values())


def test_single_things_are_no_lists():
    with pytest.raises(
        SpecError, match=r"the inputs of Convolution_0 must be a list .*; write \[tensor\] for a single"
    ):
        Op(0, "Convolution", lt(0), [lt(2)])
    with pytest.raises(SpecError, match="the outputs of Convolution_0 must be a list of LogicalTensors"):
        Op(0, "Convolution", [lt(0)], lt(2))
    partition = Partition(Op(0, "Convolution", [lt(0), lt(1, WEIGHTS)], [lt(2)], **UNIT))
    with pytest.raises(SpecError, match="engine must be an Engine"):
        partition.compile(None, None, "cpu")
    with pytest.raises(SpecError, match="outputs must be a list of LogicalTensors"):
        partition.compile(None, lt(2))
    with pytest.raises(SpecError, match="3 is not an operation of oneDNN Graph"):
        Op(0, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_json(None), "a graph must be given as a text in JSON, got NoneType$"),
        (lambda: from_json({"graph": []}), "got dict; json.dumps makes one of it$"),
        (lambda: load(None), "path must be the name of a file, got NoneType$"),
        (lambda: lt(0).replace(dtype="float32"), "; 'float32' is 'f32' here$"),
        (lambda: lt(0).replace(dtype=torch.bfloat16), "; that is 'bf16' here$"),
        (lambda: LogicalTensor(0, DATA, np.float32), "dtype comes before dims"),
        (
            lambda: from_json('{"graph":[{"id":0,"kind":"ReLU","inputs":[{"id":0,"dtype":"float16"}]}]}'),
            r"\$.graph\[0\].inputs\[0\].dtype: Invalid enum value 'float16', .*; 'float16' is 'f16' here$",
        ),
    ],
)
def test_mistakes_have_an_answer(make, message):
    with pytest.raises(SpecError, match=message):
        make()
