"""How words are read, whichever grammar they belong to."""

from __future__ import annotations

import pytest

from convgrad.cli import words
from convgrad.cli.words import Option, UsageError

OPTIONS = words.by_name(Option("dt", "TYPE", "a type", True), Option("batch", "FILE", "a file"), Option("json", "", ""))


def test_values_join_their_options():
    assert words.joined(["--dt", "f32", "a", "--json", "b"], OPTIONS) == ["--dt=f32", "a", "--json", "b"]
    assert words.joined(["--dt", ""], OPTIONS) == ["--dt="]
    assert words.joined(["a", "--dt"], OPTIONS) == ["a", "--dt"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b --dt f16", "--dt=f16 a b"),
        ("a --dt=f16 b", "a --dt=f16 b"),
        ("--batch x --json", "--json --batch=x"),
        ("--json", "--json"),
    ],
)
def test_options_after_the_last_input_go_first(line, expected):
    assert words.hoisted(line.split(), OPTIONS, ("batch",)) == expected.split()


def test_a_command_takes_its_own_options_out():
    line = ["a", "--json", "--mb=2", "-v1", "--dt", "f32", "json"]
    assert words.split(line, OPTIONS) == ({"json": "true", "verbose": "1", "dt": "f32"}, ["a", "--mb=2", "json"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--dtt=f32", "there is no option '--dtt=f32'; did you mean '--dt'?"),
        ("--budgt", "there is no option '--budgt'; did you mean '--budget'?"),
        ("--x", "there is no option '--x'; there are --budget, --dt, --batch, --json"),
        ("-dt", "there is no option"),
        ("--dt", "--dt needs a value: --dt=TYPE"),
        ("--json=1", "--json takes no value"),
    ],
)
def test_options_that_are_refused(word, message):
    with pytest.raises(UsageError) as caught:
        words.option_of(word, OPTIONS, ["budget"])
    assert message in str(caught.value)


def test_values_that_are_refused_are_told_with_their_form():
    told = "--dt=f9: 'f9' must be one of f32, f16; the form is --dt=TYPE"
    with pytest.raises(UsageError, match=told), words.refusing(OPTIONS["dt"], "f9"):
        words.one_of("f9", ["f32", "f16"])
    with pytest.raises(ValueError, match="not a number"):
        words.count_of("9" * 19)


def test_options_without_effect():
    assert all(words.is_ignored(word, words.IGNORED) for word in ("--summary=no-impl", "--canonical", "-v5", "-v"))
    assert not any(words.is_ignored(word, words.IGNORED) for word in ("--dt=f32", "-vx", "--summaries"))


def test_batch_files_are_found_from_those_that_name_them(tmp_path):
    inner = tmp_path / "inputs" / "conv"
    inner.mkdir(parents=True)
    (inner / "shapes").write_text("a b # c d\n\n#e\nf #")
    outer = inner / "all"
    assert words.opened("conv/shapes", [], [outer]) == ((inner / "shapes").resolve(), ["a", "b", "f"])
    with pytest.raises(UsageError, match="--batch=conv/shapes: No such file"):
        words.opened("conv/shapes", [], [])
    with pytest.raises(UsageError, match="the file includes itself"):
        words.opened("shapes", [inner], [(inner / "shapes").resolve()])
