"""`convgrad run`: what becomes of graph files, and what is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from graph_files import LINES, lt, write

from convgrad.cli import main, report, run
from convgrad.graph import LogicalTensor, Op, from_json

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "graph"


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
    assert case["detail"].startswith(
        f"{path}: CONV_0: 'Convolutoin' is not an operation of oneDNN Graph; did you mean 'C"
    )
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
        for name, why in (("nowhere.json", "No such file"), ("op.json", "Is a directory"), ("text.json", "not JSON")):
            path = folder / name
            if why == "Is a directory":
                path.mkdir(exist_ok=True)
            elif why == "not JSON":
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
