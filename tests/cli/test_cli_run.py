"""`convgrad run`: the grammar of benchdnn's graph driver, its rewriting of files, and what it reports."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest

from convgrad.cli import driver, main, report, run
from convgrad.cli.driver import Case, parse
from convgrad.cli.rewrite import rewrite
from convgrad.cli.words import UsageError
from convgrad.errors import SpecError
from convgrad.graph import Graph, LogicalTensor, Op, from_json, read_file

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "graph"


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small files like those of oneDNN's repository, in folders like its own."""
    root = tmp_path_factory.mktemp("graph")
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
    return root


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


def outcomes(capsys, *words):
    """Run, and read the lines of JSON."""
    code = main(["run", "--json", *words])
    *cases, summary = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    return code, cases, summary["summary"]


@pytest.mark.slow
def test_all_lines_of_a_batch(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, cases, summary = outcomes(capsys, "--batch=test_all")
    wrong = [c for c in cases if c["state"] not in ("passed", "not ours", "mistrusted")]
    assert not wrong, wrong
    doubtful = [c["case"] for c in cases if c["state"] == "mistrusted"]
    assert not doubtful, doubtful
    assert code == 0
    assert summary["not ours"] == 2
    assert summary["passed"] == len(cases) - 2 == 73


def test_each_line_alone_and_from_elsewhere(folder, capsys, monkeypatch):
    """Single lines as arguments, the case found from the working folder; a batch file finds its cases by itself."""
    monkeypatch.chdir(folder)
    lines = [line for line in LINES.splitlines() if line.startswith("--reset") and "dcba" in line]
    assert lines
    for line in lines:
        code, cases, _ = outcomes(capsys, *line.split())
        assert code == 0
        assert {c["state"] for c in cases} == {"passed"}
    monkeypatch.chdir(ROOT)
    code, cases, _ = outcomes(capsys, f"--batch={folder / 'op' / 'harness_all'}", "--mode=L")
    assert code == 0
    assert len(cases) == 75


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus is not here")
def test_files_of_onednns_repository(capsys, monkeypatch):
    monkeypatch.chdir(CORPUS)
    words = ["--dt=f32,bf16,f16", "--case=conv_bwd_d_2d.json", "--case=conv_bwd_w_2d.json", "--case=deconv_bwd_d.json"]
    words += ["--dt=bf16", "--in-shapes=0:1x14x14x128", "--op-attrs=0:data_format:NXC*dst_shape:1x28x28x32"]
    words += ["--case=conv_bwd_d_2d.json"]
    code, cases, _ = outcomes(capsys, *words)
    assert code == 0
    assert [c["state"] for c in cases] == ["passed"] * 10


def test_the_line_of_a_case_repeats_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    cases = parse(["--batch=op/harness_all"])
    for case in cases:
        words = shlex.split(case.line)
        assert words[:2] == ["convgrad", "run"]
        assert parse(words[2:]) == [case]


# ---- grammar


def test_alternatives_are_multiplied(folder, monkeypatch):
    monkeypatch.chdir(folder)
    cases = parse(["--dt=f32,bf16", "--in-shapes=,0:1x2x3x4", "--mb=0,5", "--case=x.json"])
    assert [(c.in_shapes, c.dt, c.mb) for c in cases] == [
        (shapes, dt, mb) for shapes in ({}, {0: "1x2x3x4"}) for dt in ("f32", "bf16") for mb in (0, 5)
    ]


def test_options_stay_until_reset_and_the_mode_beyond():
    words = ["--mode=r", "--dt=bf16", "--case=a", "--case=b", "--reset", "--case=c"]
    assert [(c.name, c.dt, c.mode) for c in parse(words)] == [("a", "bf16", "R"), ("b", "bf16", "R"), ("c", "", "R")]


def test_options_at_the_end_apply_to_all():
    assert [(c.name, c.dt) for c in parse(["a", "b", "--dt", "f16"])] == [("a", "f16"), ("b", "f16")]
    assert [(c.name, c.dt) for c in parse(["a", "--dt=f16", "b"])] == [("a", ""), ("b", "f16")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--in-shapes=0"], "has no value after a colon"),
        (["--in-shapes=0:"], "has no value after a colon"),
        (["--in-shapes=a:1x2"], "'a' is no count"),
        (["--in-shapes=0:1+0:2"], "0 is there twice"),
        (["--in-shape=0:1"], "did you mean 'in-shapes'"),
        (["--dt=f64"], "'f64' is none of f32, bf16, f16"),
        (["--dt=f32", "--dt=0:f32"], "cannot be mixed"),
        (["--dt=0:f32", "--dt=f32"], "cannot be mixed"),
        (["--mb=-1"], "'-1' is no count"),
        (["--mode=X"], "'X' is no mode"),
        (["--mode="], "no mode"),
        (["--engine=gpu"], "cpu"),
        (["--expected-n-partitions=-1"], "no count"),
        (["--attr-fpmath=bf17"], "'bf17' is no mode"),
        (["--attr-fpmath=bf16:maybe"], "neither true nor false"),
        (["--case"], "needs a value"),
        (["--same-rule=mine"], "none of gradient, documented"),
        (["--batch=/nowhere"], "No such file"),
        (["-x"], "is no option"),
        ([], "no file"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "convgrad run --help" in error


def test_batch_files_that_include_themselves(tmp_path):
    path = tmp_path / "batch"
    path.write_text(f"--batch={path}")
    with pytest.raises(UsageError, match="includes itself"):
        parse([f"--batch={path}"])


def test_fuzz_of_lines(folder, capsys, monkeypatch):
    """Lines with characters changed are understood, refused or wrong usage; never an accident."""
    monkeypatch.chdir(folder)
    rng = random.Random(3)
    lines = [line for line in LINES.splitlines() if line.startswith("--reset")]
    codes = set()
    for _ in range(400):
        line = rng.choice(lines)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len("--reset "), len(line))
            line = (
                line[:at]
                + rng.choice(["", "0", "9" * 25, ":", "*", "+", ",", "x", "-", "a", "=", "\0", "é"])
                + line[at + 1 :]
            )
        codes.add(main(["run", "--json", "--mode=L", *line.split()]))
        text = capsys.readouterr().out
        assert '"crashed"' not in text, (line, text)
    assert codes == {0, 1, 2}


# ---- rewriting


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
        ("conv_2d.json", {"in_shapes": {7: "1"}}, "7 is no input or output of the graph; there are 0, 1, 2"),
        ("conv_2d.json", {"in_shapes": {0: "1x2*"}}, "nothing after its *"),
        ("conv_2d.json", {"in_shapes": {0: "1y2"}}, "not of the form"),
        ("conv_2d.json", {"in_shapes": {0: "*abca"}}, "each of abcd once"),
        ("conv_2d.json", {"in_shapes": {0: "*abc"}}, "each of abcd once"),
        ("conv_2d.json", {"in_shapes": {0: "1x16x4x4*1x2"}}, "strides must be 4 values"),
        ("conv_2d.json", {"op_attrs": {3: "strides:1x1"}}, "there is no operation 3; there are 0"),
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


# ---- outcomes


def test_states_and_exit_codes(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, (case,), summary = outcomes(capsys, "--op-attrs=0:strides:0x1", "--case=op/f32/conv_2d.json")
    assert (code, case["state"], summary["refused"]) == (1, "refused", 1)
    assert "strides must be at least 1" in case["detail"]
    assert case["case"] == "convgrad run --op-attrs=0:strides:0x1 --case=op/f32/conv_2d.json"
    (folder / "gone").write_text("--case=op/f32/nothing.json")
    code, (case,), _ = outcomes(capsys, "--batch=gone")
    assert (code, case["state"]) == (1, "refused")
    assert "No such file" in case["detail"]
    code, (case,), _ = outcomes(capsys, "--expected-n-partitions=2", "--case=op/f32/conv_2d.json")
    assert (code, case["state"], case["detail"]) == (1, "failed", "1 partitions instead of 2")
    code, (case,), _ = outcomes(capsys, "--case=op/f32/add.json")
    assert (code, case["state"], case["detail"], case["file"]) == (2, "not ours", "Add", "op/f32/add.json")
    code, (case,), _ = outcomes(capsys, "--in-shapes=0:900000000x16x9x9", "--case=op/f32/conv_2d.json")
    assert (code, case["state"]) == (1, "refused")
    assert "of memory" in case["detail"]
    code, (case,), _ = outcomes(
        capsys, "--strict", "--op-attrs=0:output_padding:1x1", "--case=op/f32/deconv_bwd_d.json"
    )
    assert (code, case["state"]) == (1, "refused")


def test_unknown_kinds_are_no_strangers(folder, capsys):
    """A kind that oneDNN Graph does not have is a mistake in the file; one of its others is not ours."""
    text = (folder / "op" / "f32" / "conv_2d.json").read_text()
    path = folder / "typo.json"
    path.write_text(text.replace('"Convolution"', '"Convolutoin"'))
    code, (case,), _ = outcomes(capsys, str(path))
    assert (code, case["state"]) == (1, "refused")
    assert case["detail"].startswith(f"{path}: CONV_0: 'Convolutoin' is no operation of oneDNN Graph; did you mean 'C")
    path = folder / "stranger.json"
    path.write_text(text.replace('"Convolution"', '"MatMul"'))
    assert main(["run", str(path)]) == 2
    shown = capsys.readouterr()
    assert f"{path}  MatMul" in shown.out
    assert "nothing here is of this family" in shown.err
    code, cases, _ = outcomes(capsys, str(path), str(folder / "op" / "f32" / "conv_2d.json"))
    assert (code, [c["state"] for c in cases]) == (0, ["not ours", "passed"])


def test_files_that_cannot_be_read(folder, capsys):
    """One line, and the exit code of wrong usage; nothing is run."""
    good = str(folder / "op" / "f32" / "conv_2d.json")
    for command in ("run", "bench"):
        for name, why in (("nowhere.json", "No such file"), ("op.json", "Is a directory"), ("text.json", "no JSON")):
            path = folder / name
            if why == "Is a directory":
                path.mkdir(exist_ok=True)
            elif why == "no JSON":
                path.write_text("hello")
            assert main([command, good, str(path)]) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            assert shown.err.startswith(f"convgrad {command}: {path}: ")
            assert why in shown.err
            assert shown.err.count("\n") == 1


@pytest.mark.parametrize("mode", ["L", "I", "R", "B", "CB"])
def test_modes(folder, capsys, monkeypatch, mode):
    monkeypatch.chdir(folder)
    code, (case,), _ = outcomes(capsys, f"--mode={mode}", "op/f32/conv_2d.json")
    assert (code, case["state"]) == (0, "passed" if set(mode) & set("BC") else "done")


def test_times(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, (case,), _ = outcomes(capsys, "--mode=F", "op/f32/conv_2d.json")
    assert (code, case["state"]) == (0, "passed")
    assert case["ms"] > 0
    assert case["GFLOP/s"] > 0


def test_wrong_results_are_found(folder, capsys, monkeypatch):
    """The right results with one value spoiled, in every operation."""
    monkeypatch.chdir(folder)
    plain = run.execute

    def spoiled(step, tensors):
        plain(step, tensors)
        out = tensors[step.outputs[0].id]
        out[(-1,) * out.ndim] += 1

    monkeypatch.setattr(run, "execute", spoiled)
    for name in ("conv_2d", "conv_bwd_d_2d", "conv_bwd_w_2d", "deconv", "deconv_bwd_d", "deconv_bwd_w"):
        code, (case,), _ = outcomes(capsys, f"op/f32/{name}.json")
        assert (code, case["state"]) == (1, "failed")
        assert "1 of" in case["detail"]
        assert "instead of" in case["detail"]
    code, (case,), _ = outcomes(capsys, str(ROOT / "examples" / "layer.json"))
    assert (code, case["state"]) == (1, "failed")


def test_values_that_are_not_written_are_found(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(run, "execute", lambda step, tensors: None)
    code, (case,), _ = outcomes(capsys, "op/f32/conv_bwd_d_2d.json")
    assert (code, case["state"]) == (1, "failed")
    assert "nan instead of" in case["detail"]


def test_chains_of_operations_are_judged_with_a_bound(tmp_path, capsys):
    """What one operation computes can be too large for the next one's sums to be exact."""
    attrs = {"strides": [1], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
    ops = [
        Op(i, "Convolution", [lt(10 + i, (1, 64, 20)), lt(i, (64, 64, 3))], [lt(11 + i, (1, 64, 20))], f"c{i}",
           weights_format="OIX", **attrs)
        for i in range(4)
    ]  # fmt: skip
    write(tmp_path / "chain.json", *ops)
    code, (case,), _ = outcomes(capsys, str(tmp_path / "chain.json"))
    assert (code, case["state"]) == (0, "passed")


def test_layers_are_trusted_in_every_type(capsys):
    layer = str(ROOT / "examples" / "layer.json")
    code, cases, _ = outcomes(capsys, layer, "--dt=f32,bf16,f16")
    assert (code, [c["state"] for c in cases]) == (0, ["passed"] * 3)


def test_run_time_shapes(tmp_path, capsys):
    attrs = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
    attrs |= {"weights_format": "OIX"}
    shape = LogicalTensor(3, "s32", (3,))
    op = Op(0, "ConvolutionBackwardData", [lt(0, (1, 4, 5)), lt(1, (4, 2, 3)), shape], [lt(2, -1)], **attrs)
    write(tmp_path / "late.json", op)
    code, (case,), _ = outcomes(capsys, str(tmp_path / "late.json"))
    assert (code, case["state"]) == (1, "refused")
    assert "--in-shapes=ID:SHAPE" in case["detail"]
    code, (case,), _ = outcomes(capsys, str(tmp_path / "late.json"), "--in-shapes=2:1x2x10")
    assert (code, case["state"]) == (0, "passed")


def test_tables_for_people(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["run", "op/f32/conv_2d.json", "op/f32/add.json"]) == 0
    text = capsys.readouterr().out
    assert "Convolution f32 2x16x14x14 8x16x1x1 → 2x8x14x14" in text
    assert "not ours    op/f32/add.json      Add\n" in text
    assert "1 passed, 1 not ours in" in text
    assert main(["run", "--dt=bf16", "op/f32/conv_2d.json", "--in-shapes=0:1x1x1x1"]) == 1
    text = capsys.readouterr().out
    assert "refused: Convolution 'CONV_0': weights must be" in text
    assert "  repeat: convgrad run --dt=bf16 --in-shapes=0:1x1x1x1 --case=op/f32/conv_2d.json" in text


def test_ctrl_c_leaves_a_summary(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    plain = run.run_case

    def stopped(case):
        if case.dt == "bf16":
            raise KeyboardInterrupt
        return plain(case)

    monkeypatch.setattr(run, "run_case", stopped)
    assert main(["run", "--dt=f32,bf16,f16", "op/f32/conv_2d.json"]) == 130
    assert "interrupted, 1 of 3 done: 1 passed" in capsys.readouterr().out
    code, cases, summary = outcomes(capsys, "--dt=f32,bf16,f16", "op/f32/conv_2d.json")
    assert (code, len(cases), summary["interrupted"]) == (130, 1, True)


def test_an_accident_is_one_case_among_others(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    plain = run.run_case

    def broken(case):
        if case.dt == "bf16":
            raise ZeroDivisionError("no")
        return plain(case)

    monkeypatch.setattr(run, "run_case", broken)
    code, cases, _ = outcomes(capsys, "--dt=f32,bf16,f16", "op/f32/conv_2d.json")
    assert code == 1
    assert [c["state"] for c in cases] == ["passed", "crashed", "passed"]
    assert "ZeroDivisionError" in cases[1]["detail"]


def test_many_cases_show_only_what_failed(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(report, "ROWS", 2)
    attrs = "--op-attrs=,0:strides:2x2,0:strides:0x0"
    assert main(["run", "--mode=L", attrs, "op/f32/conv_2d.json"]) == 1
    text = capsys.readouterr().out
    assert text.count("conv_2d.json") == 1
    assert "2 done, 1 refused" in text


def test_the_reference_agrees_with_a_direct_definition(folder):
    """The judge itself, once, against four loops."""
    whole = from_json((folder / "op" / "f32" / "conv_bias_2d.json").read_text()).compile()
    tensors = run.tensors_for(whole)
    (step,) = whole.steps
    run.execute(step, tensors)
    x, w, b, y = tensors[0], tensors[1], tensors[3], tensors[2]
    for c, i, j in np.ndindex(8, 4, 4):
        assert y[0, c, i, j] == (x[0, :, i : i + 3, j : j + 3] * w[c]).sum() + b[c]
    assert run.judge(step, tensors, whole).passed


def test_every_driver_option_has_help(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for name in driver.OPTIONS:
        assert f"--{name}" in text
    assert "examples:" in text
