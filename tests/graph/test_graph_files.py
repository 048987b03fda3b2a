"""oneDNN's JSON: every version is read, the canonical form is written, and nothing in a file can do harm."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad.bench import onednn
from convgrad.errors import ConvgradError, SpecError
from convgrad.graph import UNKNOWN_DIM, Graph, LogicalTensor, Op, from_json, load, read, reader

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "graph"
EXAMPLES = Path(__file__).parents[2] / "examples"


def tensor(id, shape, **more):
    strides = np.cumprod([1, *reversed(shape[1:])])[::-1].tolist() if shape and min(shape) >= 0 else []
    given = {"id": id, "dtype": "f32", "shape": list(shape), "stride": strides}
    return {**given, "layout_type": "strided", "property_type": "undef", **more}


def attributes(**values):
    types = {str: "string", list: "s64[]", int: "s64", bool: "bool", float: "f32"}
    return {name: {"type": types[type(value)], "value": value} for name, value in values.items()}


def document(**more):
    op = {
        "id": 0,
        "name": "D",
        "kind": "ConvTransposeBackwardData",
        "attrs": attributes(
            strides=[2, 2], pads_begin=[0, 0], pads_end=[41, 41], dilations=[1, 1], groups=1, data_format="NCX",
            weights_format="IOX", auto_pad="None",
        ),
        "inputs": [tensor(0, (1, 4, 16, 16)), tensor(1, (3, 4, 3, 3))],
        "outputs": [tensor(2, (1, 3, 28, 28))],
    }  # fmt: skip
    root = {
        "version": "3.8.0",
        "engine_kind": "cpu",
        "fpmath_mode": "strict",
        "fpmath_mode_apply_to_int": "false",
        "input_ports": [0, 1],
        "output_ports": [2],
        "graph": [op],
    }
    root.update({k: v for k, v in more.items() if k in root})
    op.update({k: v for k, v in more.items() if k not in root})
    return root


def text(**more):
    return json.dumps(document(**more))


# ---- reading and writing


def test_canonical_text_comes_back_to_the_letter():
    graph = from_json(text())
    written = graph.to_json()
    assert from_json(written).to_json() == written
    assert json.loads(written) == document()
    # oneDNN's reader needs the type before the value, and knows these fields in this order.
    first = written.index
    assert (
        first('"version"') < first('"engine_kind"') < first('"fpmath_mode"') < first('"input_ports"') < first('"graph"')
    )
    assert first('"type"') < first('"value"')
    assert list(json.loads(written)["graph"][0]) == ["id", "name", "kind", "attrs", "inputs", "outputs"]
    keys = ["id", "dtype", "shape", "stride", "layout_type", "property_type"]
    assert list(json.loads(written)["graph"][0]["inputs"][0]) == keys


def test_every_attribute_is_written():
    graph = Graph()
    graph.add_op(
        Op(0, "ConvolutionBackwardData", [LogicalTensor(0, "f32", 4), LogicalTensor(1, "f32", 4)],
           [LogicalTensor(2, "f32", -1, "any")], strides=[1, 1], pads_begin=[], pads_end=[], dilations=[1, 1])
    )  # fmt: skip
    op = json.loads(graph.to_json())["graph"][0]
    assert len(op["attrs"]) == 10
    assert op["attrs"]["output_padding"] == {"type": "s64[]", "value": [0] * 12}
    assert op["attrs"]["dst_shape"] == {"type": "s64[]", "value": [0] * 12}
    assert op["attrs"]["pads_begin"] == {"type": "s64[]", "value": [0, 0]}
    assert op["attrs"]["auto_pad"] == {"type": "string", "value": "None"}
    assert op["inputs"][0]["shape"] == [UNKNOWN_DIM] * 4
    assert op["inputs"][0]["stride"] == [UNKNOWN_DIM]
    assert op["outputs"][0]["shape"] == [UNKNOWN_DIM]
    assert op["outputs"][0]["layout_type"] == "any"
    assert from_json(graph.to_json()).tensors == graph.tensors


def test_attributes_of_the_other_operations_are_as_many_as_onednn_asserts():
    counts = {"ConvolutionBackwardWeights": 9, "ConvTransposeBackwardData": 8, "ConvTransposeBackwardWeights": 9}
    for kind, count in counts.items():
        graph = Graph(strict=True)
        unit = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1]}
        graph.add_op(Op(0, kind, [LogicalTensor(i, "bf16", 3) for i in (0, 1)], [LogicalTensor(2, "bf16", 3)], **unit))
        assert len(json.loads(graph.to_json())["graph"][0]["attrs"]) == count


def test_liberal_reading():
    root = document()
    root["unknown"] = {"deep": [1, {"er": None}]}
    op = root["graph"][0]
    op["more"] = 1
    op["attrs"] |= attributes(op_depth=3, matched=True, partition_id="4", backend="dnnl_backend")
    op["attrs"]["auto_pad"]["value"] = "NONE"
    op["attrs"]["strides"] = {"value": [2, 2], "type": "s64[]"}
    op["attrs"]["groups"]["value"] = [1]
    op["inputs"][0]["extra"] = "x"
    op["inputs"][0]["layout_type"] = "undef"
    op["inputs"][1]["layout_type"] = "opaque"
    for key in ("input_ports", "output_ports", "fpmath_mode_apply_to_int", "version"):
        del root[key]
    assert json.loads(from_json(json.dumps(root)).to_json()) == document()
    del op["name"]
    assert from_json("\ufeff" + json.dumps(root)).ops[0].name == "ConvTransposeBackwardData_0"
    del op["inputs"][0]["stride"], op["inputs"][0]["layout_type"]
    assert from_json(json.dumps(root)).ops[0].inputs[0].strides == (1024, 256, 16, 1)


def test_unset_shapes_and_paddings_are_twelve_zeros():
    graph = load_kind("ConvolutionBackwardData", dst_shape=[0] * 12, output_padding=[0] * 12)
    assert graph.compile().outputs[0].get_dims() == (1, 3, 28, 28)
    graph = load_kind("ConvolutionBackwardData", dst_shape=[1, 3, 28, 28], output_padding=[1, 1, *[0] * 10])
    assert graph.compile().outputs[0].get_dims() == (1, 3, 28, 28)


def load_kind(kind, **attrs):
    root = document(kind=kind)
    op = root["graph"][0]
    op["attrs"] |= attributes(weights_format="OIX", pads_end=[1, 1], **attrs)
    op["inputs"] = [tensor(0, (1, 4, 14, 14)), tensor(1, (4, 3, 3, 3))]
    op["outputs"] = [tensor(2, (1, 3, 28, 28))]
    if kind == "ConvolutionBackwardWeights":
        op["inputs"], op["outputs"] = [tensor(0, (1, 4, 14, 14)), tensor(1, (1, 4, 7, 7))], [tensor(2, (4, 4, 1, 1))]
    return from_json(json.dumps(root))


def test_preview_spellings():
    root = document(version="0.7.0", kind="ConvTransposeBackpropData")
    op = root["graph"][0]
    del op["attrs"]["weights_format"]
    op["attrs"] |= attributes(filter_format="OIX")
    op["inputs"][1] = tensor(1, (4, 3, 3, 3))  # (out, in, X)
    op["outputs"][0] = tensor(2, (-1,))
    graph = from_json(json.dumps(root))
    assert graph.ops[0].row.kind == "ConvTransposeBackwardData"
    assert graph.ops[0].output.ndims == -1
    assert graph.compile().outputs[0].get_dims() == (1, 3, 28, 28)
    written = json.loads(graph.to_json())["graph"][0]
    assert written["kind"] == "ConvTransposeBackwardData"
    assert written["attrs"]["weights_format"]["value"] == "IOX"
    assert written["inputs"][1]["shape"] == [3, 4, 3, 3]
    assert written["inputs"][1]["stride"] == [9, 27, 3, 1]  # the same memory
    older = json.loads(graph.to_json(onednn=False))["graph"][0]
    assert (older["kind"], older["attrs"]["filter_format"]["value"]) == ("ConvTransposeBackpropData", "OIX")
    assert older["inputs"][1]["shape"] == [4, 3, 3, 3]


def test_what_onednn_has_no_words_for():
    graph = Graph()
    unit = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1]}
    tensors = [LogicalTensor(i, "f64", 3) for i in range(3)]
    graph.add_op(Op(0, "Convolution", tensors[:2], tensors[2:], **unit))
    with pytest.raises(SpecError, match="dtype f64 cannot be said in oneDNN's format"):
        graph.to_json()
    assert from_json(graph.to_json(onednn=False)).tensors == graph.tensors
    graph = Graph()
    tensors = [LogicalTensor(i, "f32", 3) for i in range(3)]
    graph.add_op(Op(0, "Convolution", tensors[:2], tensors[2:], accumulate=True, **unit))
    with pytest.raises(SpecError, match="accumulate=True cannot be said"):
        graph.to_json()
    assert from_json(graph.to_json(onednn=False)).ops[0].attrs["accumulate"] is True


@pytest.mark.parametrize("path", sorted([*CORPUS.glob("*.json"), *EXAMPLES.glob("*.json")]), ids=lambda p: p.name)
def test_real_files(path):
    graph = load(path)
    written = graph.to_json()
    assert from_json(written).to_json() == written
    original = json.loads(path.read_text())
    assert json.loads(written)["graph"] == original["graph"]
    assert all(t.is_known for t in graph.compile().outputs)


# ---- real oneDNN


@pytest.mark.skipif(onednn.available() is not None, reason=str(onednn.available()))
@pytest.mark.parametrize("path", sorted([*CORPUS.glob("*.json"), *EXAMPLES.glob("*.json")]), ids=lambda p: p.name)
def test_the_numbers_are_those_of_real_onednn(path):
    """Each operation of a file through oneDNN's own C API: integers, so that both sums are exact."""
    graph = load(path)
    rng = np.random.default_rng(0)
    arrays = {t.id: rng.integers(-2, 3, t.get_dims()).astype(np.float32) for t in graph.input_ports}
    got = graph.compile(policy="debug").execute(None, arrays)
    compared = 0
    for op in json.loads(graph.to_json())["graph"]:
        ids = [t["id"] for t in op["inputs"]]
        if op["kind"] not in onednn.KINDS or not set(ids) <= set(arrays) or op["outputs"][0]["id"] not in got:
            continue
        attrs = {name: attr["value"] for name, attr in op["attrs"].items()}
        result = got[op["outputs"][0]["id"]]
        theirs = onednn.run(op["kind"], attrs, [arrays[i] for i in ids], result.shape)
        np.testing.assert_array_equal(result, theirs)
        compared += 1
    assert compared


def test_graphs_need_no_reader():
    """Building a graph needs no package that the core does not have; reading a file says what it needs."""
    code = (
        "import sys; sys.modules['msgspec'] = None\n"
        "from convgrad.graph import *\n"
        "import convgrad.graph as g\n"
        "assert Graph and 'convgrad.graph.reader' not in sys.modules\n"
        "try: g.load('x')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "reading graph files needs msgspec: pip install msgspec", done.stderr


# ---- files that are wrong


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["not JSON"]),
        ("[]", ["this is not a oneDNN graph file: Expected `object`, got `array`"]),
        ("{}", ["this is not a oneDNN graph file: Object missing required field `graph`"]),
        ('{"graph": []}', ["$.graph", "length >= 1"]),
        ('{"graph": [1]}', ["$.graph[0]", "Expected `object`"]),
        ('{"graph":\n[{"id": 0,\n "kind": nan}]}', ["line 3 column", "not JSON"]),
        ('{"graph": [{"id": 0, "kind": "Convolution", "inputs": [{"id": 1}]}]}', ["$.graph[0].inputs[0]", "`dtype`"]),
        (text()[:-9], ["not JSON"]),
        (text(kind="Convolution", id=-1), ["$.graph[0].id"]),
        (text(engine_kind="tpu"), ["$.engine_kind", "'tpu'"]),
        (text(name=5), ["$.graph[0].name"]),
        (text().replace("2, 2]", "2, 1e999]", 1), ["out of range"]),
        (text().replace("2, 2]", "2, 2.5]", 1), ["$.graph[0].attrs.strides.value[1]", "Expected `int`, got `float`"]),
        (text().replace("2, 2]", f"2, {2**63}]", 1), ["$.graph[0].attrs.strides.value[1]"]),
        (text().replace('"s64[]"', '"s65[]"', 1), ["$.graph[0].attrs.strides.type", "'s65[]'"]),
        (text().replace('"f32"', '"f23"', 1), ["$.graph[0].inputs[0].dtype", "'f23', must be one of undef, f16"]),
        (text().replace("[1024, 256, 16, 1]", "[1024, 256, 16]", 1), ["$.graph[0].inputs[0]", "strides must be 4"]),
        (text().replace("[1024, 256, 16, 1]", "[1024, 256, -16, 1]", 1), ["$.graph[0].inputs[0]", "from 0"]),
        (text().replace("[1, 4, 16, 16]", str([1] * 13), 1), ["$.graph[0].inputs[0].shape", "length <= 12"]),
        (text().replace('"groups"', '"strides"', 1), ["$.graph[0].attrs", "'strides' twice"]),
        (text().replace('"version"', '"graph"', 1), ["graph"]),
        (text().replace("[2, 2]", "NaN", 1), ["line 1 column", "not JSON"]),
        (text().replace("[2, 2]", "[2, 2], ", 1), ["line 1 column", "not JSON"]),
        (b"\xff\xfe" + text().encode(), ["not JSON"]),
        (text().replace("CPU", "cpu").encode().replace(b'"D"', b'"\xff"'), ["UTF-8"]),
        ('{"graph": ' + "[" * 200_000, ["$.graph[0]", "Expected `object`"]),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", ["nested too deeply"]),
        ('{"x": ' + '{"a":' * 100_000, ["nested too deeply"]),
        ('{"x": [' + "[]," * 300_000 + "[]]}", ["too many values"]),
        (b" " * (reader.MAX_BYTES + 1), ["at most 16 MiB"]),
        ('{"graph": [{"id": ' + "9" * 5000 + "}]}", ["$.graph[0].id"]),
    ],
    ids=range(31),
)
def test_a_wrong_file_is_told_in_one_message_with_the_place(content, words):
    began = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        read(content, source="some.json")
    assert time.perf_counter() - began < 1
    message = str(caught.value)
    assert message.startswith("some.json: ")
    assert len(message) < 400
    for word in words:
        assert word in message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        load(tmp_path / "nothing.json")
    with pytest.raises(SpecError, match="directory"):
        load(tmp_path)


def test_cycles_and_huge_shapes_in_files():
    ring = document()
    for i in range(3):
        op = json.loads(json.dumps(ring["graph"][0]))
        op.update(id=i, name=f"op{i}", inputs=[tensor(10 + i, (1, 1, 1, 1)), tensor(1, (1, 1, 1, 1))])
        op["outputs"] = [tensor(10 + (i + 1) % 3, (1, 1, 1, 1))]
        ring["graph"].append(op)
    del ring["graph"][0]
    with pytest.raises(SpecError, match="op0, op1, op2 wait for each other"):
        from_json(json.dumps(ring))
    huge = document()
    huge["graph"][0]["inputs"] = [tensor(0, (2**31, 4, 16, 16)), tensor(1, (3, 4, 3, 3))]
    huge["graph"][0]["outputs"] = [tensor(2, (-1,))]
    with pytest.raises(ConvgradError, match=r"needs .* of memory"):
        from_json(json.dumps(huge)).compile()


# ---- fuzzing


def survive(content: str | bytes) -> str:
    """Take a file as far as it goes; only convgrad's own exceptions may come out. Returns how far that was."""
    stage = "refused"
    try:
        graph = from_json(content)
        stage = "read"
        written = graph.to_json(onednn=False)
        assert from_json(written).to_json(onednn=False) == written
        graph.compile()
        return "compiled"
    except ConvgradError:
        return stage


SEEDS = [
    text(),
    text(kind="ConvTransposeBackpropData").replace('"weights_format"', '"filter_format"'),
    load_kind("ConvolutionBackwardWeights", weights_shape=[4, 4, 1, 1]).to_json(onednn=False),
    load_kind("ConvolutionBackwardData", dst_shape=[1, 3, 28, 28]).to_json(),
    '{"graph":[{"id":0,"kind":"BiasAdd","attrs":{},"inputs":[{"id":0,"dtype":"f32","shape":[2,3,4]},'
    '{"id":1,"dtype":"f32","shape":[4]}],"outputs":[{"id":2,"dtype":"f32"}]}]}',
]
WORDS = ["-1", *"0123456789", "13", "28", "41", "1e400", "-0.5", "NaN", "null", "true", "[]", "{}", "[[]]"]
WORDS += [str(UNKNOWN_DIM), str(2**63 - 1), "9" * 19, "9" * 30, '""', '"f16"', '"\\ud800"', '"Convolution"', '"NXC"']


def mutate(rng: random.Random, content: str) -> str | bytes:
    """A text with a few things changed: values, keys, characters, pieces swapped or doubled."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        values = [m.span() for m in re.finditer(r'"[^"]*"|-?\d+|[\[\]{}:,]', content)]
        start, stop = rng.choice(values)
        way = rng.random()
        numbers = [span for span in values if content[span[0]].isdigit()]
        if numbers and rng.random() < 0.5:
            start, stop = rng.choice(numbers)
            way = 0
        if way < 0.4:
            content = content[:start] + rng.choice(WORDS) + content[stop:]
        elif way < 0.6:
            a, b = rng.choice(values)
            content = content[:start] + content[a:b] + content[stop:]
        elif way < 0.7:
            content = content[:start] + content[stop:]
        elif way < 0.8:
            content = content[:stop] + content[start:]
        elif way < 0.9:
            at = rng.randrange(len(content))
            content = content[:at] + chr(rng.choice([0, 34, 44, 91, 123, 128, 0x1F600])) + content[at + 1 :]
        elif way < 0.97:
            number = str(rng.choice([0, 1, 2, 5, 7, 64, 2**31, 2**40, -3]))
            content = re.sub(r"\d+", lambda m, n=number: n if rng.random() < 0.05 else m[0], content)
        else:
            return content.encode()[: rng.randrange(len(content))]
    return content


@pytest.mark.slow
def test_fuzz_with_mutations():
    """`python tests/graph/test_graph_files.py 100000` tries more."""
    fuzz(2000, seed=1)


def fuzz(count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    for number in range(count):
        content = mutate(rng, rng.choice(SEEDS))
        began = time.perf_counter()
        try:
            stage = survive(content)
        except BaseException:
            print(f"input {number} of seed {seed}: {content!r}")
            raise
        took = time.perf_counter() - began
        assert took < 1, (took, content)
        seen[stage] = seen.get(stage, 0) + 1
    return seen


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["f32", "any"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["graph", "id", "kind", "attrs", "inputs", "outputs", "dtype", "shape", "stride", "type", "value", "strides"]
    ), inner, max_size=6),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=300)
@given(json_values)
def test_fuzz_with_any_json(value):
    survive(json.dumps({"graph": value}))
    survive(json.dumps(value))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_fuzz_with_any_bytes(content):
    survive(content)


@settings(max_examples=200)
@given(st.data())
def test_fuzz_with_wild_graphs(data):
    """Files of the right form, with any numbers in them."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 2**31, 2**62, UNKNOWN_DIM, -1]), max_size=6)
    kinds = st.sampled_from(["Convolution", "ConvTranspose", "ConvolutionBackwardData", "ConvTransposeBackwardWeights"])
    ops = []
    for id in range(data.draw(st.integers(1, 3))):
        lists = {name: data.draw(sizes) for name in ("strides", "pads_begin", "pads_end", "dilations")}
        op = {"id": id, "kind": data.draw(kinds), "attrs": attributes(**lists), "inputs": [], "outputs": []}
        for place in ("inputs", "inputs", "outputs"):
            shape = data.draw(sizes)
            op[place].append({"id": data.draw(st.integers(0, 6)), "dtype": "f32", "shape": shape, "stride": []})
        ops.append(op)
    survive(json.dumps({"graph": ops}))


if __name__ == "__main__":
    import resource

    assert survive(text()) == "compiled"  # which loads LLVM
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(fuzz(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024
    print(f"grew by {growth} MB")
    assert growth < 100
