"""`convgrad check`, `bench`, `explain` and `ops`; and the integers that make checks exact."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from convgrad import calls, engine, host
from convgrad.cli import bench, check, fill, main, report, tasks
from convgrad.spec import OPS, Problem
from convgrad.spec.table import OPS as ROWS

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus"


def outcomes(capsys, *words):
    code = main([*words[:1], "--json", *words[1:]])
    *cases, summary = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    return code, cases, summary["summary"]


# ---- integers


def test_ranges_and_densities_are_benchdnns():
    p = Problem.parse("y bf16 n2 g1 cx64 cy32 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1")
    recipes = fill.recipes(ROWS["Convolution"], p)
    assert recipes["weights"] == fill.Recipe(4)
    assert recipes["src"] == fill.Recipe(4, 2**8 / (4 * 4) / (9 * 64))
    x = Problem.parse("x f16 n2 g2 cx64 cy32 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1")
    recipes = fill.recipes(ROWS["ConvolutionBackwardData"], x)
    assert recipes == {"weights": fill.Recipe(2), "diff_dst": fill.Recipe(4, 2**11 / (4 * 2) / (9 * 32))}
    recipes = fill.recipes(ROWS["ConvTranspose"], Problem.parse(f"x bf16 {str(x)[6:]}"))
    assert recipes["src"] == fill.Recipe(4, 2**8 / (4 * 8) / (9 * 32))
    w = Problem.parse("w bf16 n2 g1 cx4 cy4 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1")
    assert fill.length(ROWS["ConvolutionBackwardWeights"], w) == 2 * 14 * 14
    assert fill.length(ROWS["ConvTransposeBackwardWeights"], w) == 2 * 28 * 28
    assert fill.recipes(ROWS["ConvolutionBackwardWeights"], w)["src"].density == 1
    few = Problem.parse("y f32 n1 g1 cx1 cy1 x3 w3 y1 s1 d1 p0")
    assert fill.recipes(ROWS["Convolution"], few)["src"] == fill.Recipe(32, 1.0)


def test_fill():
    array = np.empty((50, 40), np.float32)
    fill.fill(array, fill.Recipe(4, 0.25), seed=1)
    assert set(np.unique(array)) == set(range(-4, 5))
    assert 0.15 < (array != 0).mean() < 0.3
    assert array[0, 0] > 0
    again = np.empty((50, 40), np.float32)
    fill.fill(again, fill.Recipe(4, 0.25), seed=1)
    np.testing.assert_array_equal(array, again)
    thin = np.empty(3, np.float32)
    fill.fill(thin, fill.Recipe(4, 0.0), seed=1)
    assert thin.tolist()[1:] == [0, 0]
    assert thin[0] > 0


def test_densities_of_tensors_that_are_shared():
    bounds = [(0, 1, 0.028), (5, 1, 0.0139), (0, 5, 0.0102)]
    found = fill.balanced(bounds)
    for a, b, bound in bounds:
        assert 0.9 * bound < found[a] * found[b] <= bound * (1 + 1e-9)
    loose = fill.balanced([(0, 1, 1.0), (1, 2, 0.25), (0, 2, 1.0)])
    assert loose[1] * loose[2] <= 0.25 * (1 + 1e-9)
    assert loose[0] == 1.0


def test_compare():
    right = np.array([1, 0, -2, np.inf, np.nan, 5], np.float16)
    assert fill.compare(right, right.copy()).passed
    for index, value in ((0, 2), (1, 1), (3, -np.inf), (3, 1), (4, 0), (5, np.nan)):
        found = right.copy()
        found[index] = value
        verdict = fill.compare(right, found)
        assert verdict.wrong == 1
        assert f"({index},)" in verdict.first
    tiny = np.array([0.0, 1.0], np.float32)
    assert fill.compare(tiny, np.array([1e-8, 1.0], np.float32)).passed
    assert not fill.compare(tiny, np.array([1e-6, 1.0], np.float32)).passed
    zeros = fill.compare(np.array([0, 0, 0, 0, 1.0]), np.array([0, 0, 0, 0, 1.0]))
    assert (zeros.passed, zeros.trusted, str(zeros)) == (True, False, "80% zeros")


def test_results_with_gaps_need_fewer_values_to_be_trusted():
    conv, data = OPS["Convolution"], OPS["ConvolutionBackwardData"]
    plain = Problem.parse("y f32 n1 g1 cx1 cy1 x9 w3 y7 s1 d1 p0")
    assert fill.trust(conv, plain) == fill.TRUST
    strided = Problem.parse("x f32 n1 g1 cx1 cy1 x9 w1 y3 s3 d1 p0")
    assert fill.trust(data, strided) == pytest.approx(fill.TRUST / 3)
    padded = Problem.parse("y f32 n1 g1 cx1 cy1 x1 w3 y100 s1 d1 p50")
    assert fill.reached(padded) == 0.03
    assert fill.trust(conv, padded) == pytest.approx(fill.TRUST * 0.03)
    hidden = Problem.parse("w f32 n1 g1 cx1 cy1 x1 w3 y1 s1 d1 p1")
    assert fill.reached(hidden) == pytest.approx(1 / 3)


def test_the_tolerance_for_large_values_is_a_bound():
    p = Problem.parse("y f32 n1 g1 cx64 cy8 x30 w3 y28 s1 d1 p0")
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((1, 64, 30), np.float32), "w": rng.standard_normal((8, 64, 3), np.float32)}
    out = np.empty((1, 8, 28), np.float32)
    calls.run(p, engine.choose(p), host.tensors(given), host.tensor(out))
    wide = {r: a.astype(np.float64).reshape(p.shape(r)) for r, a in given.items()}
    exact = sum(np.einsum("oc,ncl->nol", wide["w"][0, :, :, k], wide["x"][:, 0, :, k : k + 28]) for k in range(3))
    off = np.abs(out - exact)
    allowed = fill.tolerance(p, given).reshape(out.shape)
    assert (off <= allowed).all()
    assert (np.abs(1.001 * exact - exact) > allowed).any()


# ---- check


@pytest.mark.slow
def test_descriptors_in_all_directions_types_and_layouts(capsys):
    words = ["--dir=FWD_B,FWD_D,FWD_I,BWD_D,BWD_W,BWD_WB", "--dt=f32,bf16,f16,f64", "--tag=ncx,nxc"]
    code, cases, summary = outcomes(capsys, "check", *words, "ic6oc4_ih7kh3ph1sh2")
    assert (code, summary["passed"], len(cases)) == (0, 48, 48)
    code, cases, _ = outcomes(capsys, "check", "--deconv", *words, "--dt=bf16", "--mb=0,3", "g2ic6oc4_iw7kw3pw1sw2dw1")
    assert (code, len(cases)) == (0, 24)
    assert {c["problem"][:5] for c in cases} == {"g2ic6", "g2mb3"}
    assert {c["state"] for c in cases} == {"passed"}


def test_results_of_another_type(capsys):
    words = ["--dt=bf16:bf16:f32", "--dir=FWD_D", "ic16oc16_ih7kh3ph1"]
    code, (case,), _ = outcomes(capsys, "check", *words)
    assert (code, case["state"]) == (0, "passed")
    code, (case,), _ = outcomes(capsys, "check", "--dt=bf16:f32:bf16", "--dir=BWD_W", "ic16oc16_ih7kh3ph1")
    assert (code, case["state"]) == (0, "passed")
    code, (case,), _ = outcomes(capsys, "check", "--dt=bf16:f32:bf16", "--dir=BWD_D", "ic16oc16_ih7kh3ph1")
    assert (code, case["state"]) == (1, "refused")
    assert (
        "both inputs of BWD_D, WEI and DST, must have one type; for a result of f32 write f32:bf16:bf16"
        in case["detail"]
    )
    code, cases, _ = outcomes(capsys, "check", "--dt=bf16:bf16:f32", "ic16oc16_ih7kh3ph1")
    assert [case["state"] for case in cases] == ["passed", "refused", "refused"]
    for case in cases[1:]:  # its own line comes to the same
        assert case["dir"] in ("BWD_D", "BWD_W")
        code, (again,), _ = outcomes(capsys, *shlex.split(case["case"])[1:])
        assert (code, again) == (1, case)


@pytest.mark.parametrize(
    "line",
    [
        "x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1",
        "y bf16 n1 g2 cx3 cy5 x9 w3 y7 s1 d1 p0 out:f32 bias accumulate",
        "x f16 n1 g2 cx3 cy5 x9 w3 y7 s1 d1 p0 bias@3 x@nxc",
        "w f32 n2 g1 cx2 cy2 x5 w3 y5 s1 d1 p1 x@0,0,5,-1 accumulate",
        "y f32 n2 g1 cx2 cy2 x5 w3 y5 s1 d1 p1 x@0,0,0,0 bias@0",
        "y f32 n0 g1 cx2 cy2 x5 w3 y5 s1 d1 p1",
    ],
)
@pytest.mark.parametrize("chosen", ["cpu", "reference"])
def test_problem_lines(line, chosen, capsys):
    code, (case,), _ = outcomes(capsys, "check", f"--engine={chosen}", line)
    assert (code, case["state"]) == (0, "passed"), case
    engine = [f"--engine={chosen}"] if chosen != "cpu" else []
    assert shlex.split(case["case"])[2:] == [*engine, str(Problem.parse(line))]


def test_a_failure_prints_the_line_that_repeats_it(capsys, monkeypatch):
    plain = calls.run

    def spoiled(problem, choice, given, out):
        plain(problem, choice, given, out)
        out.memory[(0,) * out.memory.ndim] += 1

    monkeypatch.setattr(calls, "run", spoiled)
    assert main(["check", "--dir=BWD_D", "--tag=nxc", "ic16oc16_ih7kh3ph1"]) == 1
    text = capsys.readouterr().out
    assert "failed: 1 of 1568 values are wrong, the first at (0, 0, 0, 0, 0):" in text
    repeat = next(line for line in text.splitlines() if "repeat: " in line).partition("repeat: ")[2]
    assert repeat == "convgrad check --dir=BWD_D --dt=f32 --tag=nxc ic16ih7oc16oh7kh3ph1"
    assert main(shlex.split(repeat)[1:]) == 1
    monkeypatch.undo()
    assert main(shlex.split(repeat)[1:]) == 0


def test_batches(tmp_path, capsys):
    folder = tmp_path / "deconv"
    folder.mkdir()
    (folder / "shapes").write_text('# some\nic4oc4_ih5kh3 # one\n\nic4oc6_iw5kw3n"two"\nic2oc2_id3kd2\n')
    (tmp_path / "all").write_text("--reset --dir=BWD_W --dt=bf16 --attr-post-ops=relu --batch=deconv/shapes\n")
    code, cases, _ = outcomes(capsys, "check", f"--batch={tmp_path / 'all'}")
    assert code == 0
    assert [c["case"].split()[2:5] for c in cases] == [["--deconv", "--dir=BWD_W", "--dt=bf16"]] * 3
    code, cases, _ = outcomes(capsys, "check", f"--batch={folder / 'shapes'}", "--match=two", "--dir=FWD_D")
    assert [c["problem"] for c in cases] == ['ic4iw5oc6ow7kw3pw0n"two"']
    (tmp_path / "self").write_text(f"--batch={tmp_path / 'self'}")
    assert main(["check", f"--batch={tmp_path / 'self'}"]) == 2
    assert "includes itself" in capsys.readouterr().err
    (tmp_path / "odd").write_text("--batch=a\0b")
    for command in ("check", "run"):
        assert main([command, f"--batch={tmp_path / 'odd'}"]) == 2
        assert "null" in capsys.readouterr().err
    (tmp_path / "wrong").write_text("ic4oc4_ih5kh3\nic4oc_ih5kh3\n")
    code, cases, _ = outcomes(capsys, "check", "--dir=FWD_D", f"--batch={tmp_path / 'wrong'}")
    assert (code, [c["state"] for c in cases]) == (1, ["passed", "refused"])
    assert "wrong: descriptor 'ic4oc_ih5kh3'" in cases[1]["detail"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no problem"),
        (["ic16", "oc16", "ih7kh3"], "descriptor 'ic16'"),
        (["ic16 oc16 ih7 kh3 ph1"], "a descriptor has no spaces: ic16oc16ih7kh3ph1"),
        (["--threads=2", "ic1oc1_ih1kh1"], "CONVGRAD_NUM_THREADS"),
        (["--dt=float32", "ic1oc1_ih1kh1"], "'float32' is 'f32' here"),
        (["--dir=UP", "ic1oc1_ih1kh1"], "'UP' must be one of FWD_B"),
        (["--dt=f8", "ic1oc1_ih1kh1"], "'f8' must be one of"),
        (["--dt=f32:f32", "ic1oc1_ih1kh1"], "SRC:WEI:DST"),
        (["--tag=nhwc", "ic1oc1_ih1kh1"], "must be one of ncx, abx, nxc, axb, any; 'nhwc' is 'nxc' here"),
        (["--mb=x", "ic1oc1_ih1kh1"], "'x' is not a number from 0"),
        (["--match=(", "ic1oc1_ih1kh1"], "not a regular expression"),
        (["--batch=nowhere"], "No such file"),
        (["--dirs=FWD_D"], "did you mean '--dir'"),
        (["--engine=gpu", "ic1oc1_ih1kh1"], "cpu and reference"),
        (["ic1oc1_ih1kh1", "--dt"], "needs a value"),
        (["ic1oc1_ih1kh1", "ic1"], "descriptor 'ic1': oc must be given"),
        (["x f32 n2"], "x f32 n2"),
        (["examples/layer.json"], "is a graph file, not a problem; use `convgrad run`"),
        ([str(ROOT)], f"a file, not a problem; use --batch={ROOT}"),
        ([f"--batch={ROOT}"], "Is a directory"),
        (["--batch=examples/layer.json"], "a graph file is not a list of words"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["check", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_commands_that_are_none(capsys):
    for word, message in (
        ("chek", "did you mean 'check'"),
        ("fly", "run, check, bench"),
        ("--foo", "no command '--foo'"),
    ):
        assert main([word]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--jsn"], "did you mean '--json'?"),
        (["check", "--engin=cpu"], "did you mean '--engine'?"),
        (["bench", "--budgt=1"], "did you mean '--budget'?"),
        (["bench", "--peer="], "did you mean '--peers'?"),
        (["bench", "--dri=FWD_D"], "did you mean '--dir'?"),
        (["explain", "--verbos"], "did you mean '--verbose'?"),
        (["check", "--zzz"], "there are --json, --engine, --conv, --deconv, --dir,"),
        (["check", "--json=no"], "--json takes no value"),
        (["ops", "--foo"], "there is no option '--foo'; there are --json"),
        (["ops", "Foo"], "'Foo' is not an operation of oneDNN Graph; `convgrad ops` lists"),
        (["ops", "Convolution", "Convolutoin"], "did you mean 'Convolution'?"),
        (["ops", "--json", "ConvolutionBackpropFilter"], "did you mean 'ConvolutionBackpropFilters'?"),
        (["ops", "ReLU"], "'ReLU' is not an operation of this family; `convgrad ops` lists"),
    ],
)
def test_names_that_are_none(words, message, capsys):
    """One line with the nearest name of the command's own options and of its grammar, or all there are."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_search_that_finds_nothing(capsys):
    for command in ("check", "bench", "explain"):
        assert main([command, "--match=zzz", "ic1oc1_ih1kh1"]) == 2
        shown = capsys.readouterr()
        assert "--match=zzz finds none of 1 problems" in shown.err
        assert not shown.out


LINE = "x f32 n2 g1 cx4 cy4 x7 w3 y7 s1 d1 p1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--dt=bf16", "--dir=BWD_W", LINE], f"--dir and --dt apply to descriptors; the line '{LINE}' names"),
        (["explain", "--deconv", LINE], "--deconv applies to descriptors"),
        (["explain", "--dt=bf16", "examples/layer.json"], "--dt applies to descriptors; examples/layer.json names"),
        (["bench", "--mb=7", "examples/layer.json"], "--mb applies to descriptors; examples/layer.json names"),
    ],
)
def test_options_that_do_not_apply_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_command_help(capsys):
    assert main(["help", "check"]) == 0
    assert "usage: convgrad check" in capsys.readouterr().out
    assert main(["check", "--", "ic4oc4_ih5kh3"]) == 0
    with pytest.raises(SystemExit) as caught:
        main(["help"])
    assert caught.value.code == 0
    assert "usage: convgrad" in capsys.readouterr().out


def test_problem_lines_have_no_columns_of_options(capsys):
    assert main(["check", LINE]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["result", "problem"]


def test_what_makes_times_doubtful(monkeypatch):
    others = bench.timing.OtherWork()
    monkeypatch.setattr(others, "share", lambda: 0.61)
    right = report.Outcome("", report.State.passed, fields={"of peak": "99% fma"})
    over = report.Outcome("", report.State.passed, fields={"of peak": "over fma"})
    assert list(bench.notes([right], others)) == [
        "Other processes took 61% of the CPUs meanwhile: do not trust these times."
    ]
    monkeypatch.setattr(others, "share", lambda: 0.01)
    assert list(bench.notes([right], others)) == []
    (note,) = bench.notes([right, over], others)
    assert "faster than the limit" in note


def test_sizes_that_only_uneven_padding_comes_to_are_told(capsys):
    """benchdnn takes any size of the output, and pads after the axis whatever its windows need."""
    assert main(["check", "--dir=FWD_D", "ic16oc16_ih7oh8kh3ph1", "ic16oc16_ih7kh3ph1"]) == 0
    head, odd, even, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["result", "dir", "dt", "tag", "padding", "problem"]
    assert "1 before, 2 after  ic16ih7oc16oh8kh3ph1" in odd
    assert even.split()[-2:] == ["-", "ic16ih7oc16oh7kh3ph1"]
    for words, padding in (
        (["ic16oc16_ih7kh3ph1"], None),
        (["ic16oc16_ih8kh3sh2ph1"], None),  # the last window leaves a rest, which is no choice of the descriptor
        (["ic16oc16_ih7oh6kh3ph1"], "1 before, 0 after"),
        (["ic16oc16_ih7oh7iw7ow8kh3kw3ph1pw1"], "1 before, 1x2 after"),
        (["ic16oc16_ih7oh3kh3sh2ph1"], "1 before, 0 after, 1 unread"),  # a window would still fit
        (["--deconv", "ic16oc16_ih7kh3ph1"], None),
        (["--deconv", "ic16oc16_ih7oh8kh3ph1"], "1 before, 0 after"),
    ):
        code, (case,), _ = outcomes(capsys, "check", "--dir=BWD_D", *words)
        assert (code, case["state"], case.get("padding")) == (0, "passed", padding)
    line = "x f32 n2 g1 cx3 cy2 x28x28 w3x3 y{} s2x2 d1x1 p1x1"
    for sizes, padding in (
        ("14x14", None),
        ("40x14", "1 before, 52x0 after"),
        ("14x4", "1 before, 0 after, 0x20 unread"),
    ):
        code, (case,), _ = outcomes(capsys, "check", line.format(sizes))
        assert (code, case["state"], case.get("padding")) == (0, "passed", padding)
    assert main(["check", line.format("40x14")]) == 0
    assert "1 before, 52x0 after  x f32" in capsys.readouterr().out


def test_huge_problems_are_refused(capsys):
    code, (case,), _ = outcomes(capsys, "check", "--dir=FWD_D", "mb100000ic1024ih1024oc1024kh3")
    assert (code, case["state"]) == (1, "refused")
    assert "of memory" in case["detail"]


@pytest.mark.slow
@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus is not here")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*conv/shapes_*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_some_of_every_file_of_the_corpus(path):
    """Two small problems of each file, in all directions and layouts, with all types between them; `convgrad check
    --batch=FILE` does all.
    """
    entries = tasks.parse([f"--batch={path}", "--mb=1"], tasks.Settings())
    small = [entry for entry in entries if next(iter(tasks.tasks(entry))).problem.flops < 1e8]  # as many in each task
    picked = small[len(small) // 3 :: max(1, len(small) // 2)][:2]
    assert picked or "3d" in path.name
    for entry, tag, dtypes in zip(picked, ("ncx", "nxc"), (("f32", "f16"), ("bf16",)), strict=False):
        chosen = replace(entry, settings=replace(entry.settings, tags=(tag,), dtypes=dtypes))
        outcomes = [o for o in check.check_entry(chosen) if isinstance(o, report.Outcome)]
        assert len(outcomes) == chosen.count
        for outcome in outcomes:
            assert str(outcome.state) in ("passed", "mistrusted"), outcome


# ---- bench


@pytest.mark.slow
@pytest.mark.usefixtures("measured_briefly")
def test_bench(capsys):
    code, cases, _ = outcomes(capsys, "bench", "--budget=0.05", "--dir=FWD_D,BWD_D", "ic8oc8_ih14kh3ph1")
    assert (code, len(cases)) == (0, 2)
    for case in cases:
        assert case["ms"] > 0
        assert case["GFLOP/s"] > 0
        assert case["of peak"].endswith(("fma", "copy"))
        for peer in bench.peers():
            assert case[f"{peer} ms"] > 0
    example = str(ROOT / "examples" / "conv_transpose_backward_weights.json")
    code, (case,), _ = outcomes(capsys, "bench", "--budget=0.05", "--peers=", example)
    assert (code, case["problem"]) == (0, "unet_up")
    assert "torch ms" not in case


def test_words_of_bench(capsys):
    assert main(["bench", "--peers=cudnn", "ic8oc8_ih14kh3ph1"]) == 2
    assert "torch and onednn are known" in capsys.readouterr().err
    for peer in set(bench.PEERS) - set(bench.peers()):
        assert main(["bench", f"--peers={peer}", "ic8oc8_ih14kh3ph1"]) == 2
        assert "is not installed" in capsys.readouterr().err
    assert main(["bench", "--budget=long", "ic8oc8_ih14kh3ph1"]) == 2
    assert main(["bench"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("measured_briefly")
def test_values_may_be_words_of_their_own(capsys):
    code, (case,), _ = outcomes(
        capsys, "bench", "ic8oc8_ih7kh3ph1", "--dir", "BWD_D", "--peers", "", "--budget", "0.05"
    )
    assert (code, case["dir"]) == (0, "BWD_D")
    assert not [name for name in case if name.endswith(" ms")]
    assert main(["check", "--engine", "reference", "ic8oc8_ih7kh3ph1"]) == 0
    assert main(["bench", "ic8oc8_ih7kh3ph1", "--budget"]) == 2
    assert "--budget needs a value" in capsys.readouterr().err


@pytest.mark.usefixtures("measured_briefly")
def test_bench_times_nothing_that_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(calls, "run", lambda problem, choice, given, out, *others: out.memory.fill(1))
    monkeypatch.setattr(bench.timing, "alternate", lambda *args: pytest.fail("timed"))
    code, (case,), _ = outcomes(capsys, "bench", "--dir=FWD_D", "ic8oc8_ih14kh3ph1")
    assert (code, case["state"]) == (1, "failed")


# ---- the command


@pytest.mark.parametrize("command", ["run", "check", "bench", "ops", "explain"])
def test_help_has_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"  convgrad {command}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_itself(tmp_path):
    """As a process: the exit code, the encoding of a dumb terminal, a pipe that closes."""
    command = [sys.executable, "-m", "convgrad"]
    done = subprocess.run([*command, "check", "ic4oc4_ih5kh3"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 passed" in done.stdout
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "explain", "ic4oc4_ih5kh3"], capture_output=True, text=True, env=environment, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "# meets src" in done.stdout
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == 0
    assert subprocess.run([*command, "fly"], capture_output=True, timeout=100).returncode == 2


def test_without_the_extra_packages(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["ops"]) == 2
    assert "pip install rich msgspec" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["ic4oc4_ih7kh3", "ph1"], ["ic4oc4", "ih7", "kh3ph1"], ["ic1ih1kh1oc1", "ic4oc4_ih7", "kh3"]]
)
def test_a_descriptor_in_pieces(words, capsys):
    assert main(["check", *words]) == 2
    assert "; a descriptor has no spaces: ic" in capsys.readouterr().err
    assert main(["check", "ph1"]) == 2
    assert "no spaces" not in capsys.readouterr().err
