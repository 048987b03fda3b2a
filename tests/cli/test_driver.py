"""The grammar of benchdnn's graph driver: words, settings, cases."""

from __future__ import annotations

import random
import shlex

import pytest
from graph_files import LINES

from convgrad.cli import driver, main
from convgrad.cli.driver import parse
from convgrad.cli.words import UsageError


def test_the_line_of_a_case_repeats_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    cases = parse(["--batch=op/harness_all"])
    for case in cases:
        words = shlex.split(case.line)
        assert words[:2] == ["convgrad", "run"]
        assert parse(words[2:]) == [case]


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
        (["--in-shapes=a:1x2"], "'a' is not a number from 0"),
        (["--in-shapes=0:1+0:2"], "0 is there twice"),
        (["--in-shape=0:1"], "did you mean '--in-shapes'"),
        (["--dt=f64"], "'f64' must be one of f32, bf16, f16"),
        (["--dt=f32", "--dt=0:f32"], "cannot be mixed"),
        (["--dt=0:f32", "--dt=f32"], "cannot be mixed"),
        (["--mb=-1"], "'-1' is not a number from 0"),
        (["--mode=X"], "'X' is not a mode"),
        (["--mode="], "is not a mode"),
        (["--engine=gpu"], "cpu"),
        (["--expected-n-partitions=-1"], "is not a number from 0"),
        (["--attr-fpmath=bf17"], "'bf17' is not a mode"),
        (["--attr-fpmath=bf16:maybe"], "neither true nor false"),
        (["--case"], "needs a value"),
        (["--same-rule=mine"], "must be one of gradient, documented"),
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


def test_every_driver_option_has_help(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for name in driver.OPTIONS:
        assert f"--{name}" in text
    assert "examples:" in text
