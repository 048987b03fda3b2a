"""The benchmark of what comes before the work compares results first, and tells compiling from finding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import start

ARGUMENTS = ["--layers", "^(efficientnet-1x1-240-40|mobilenet-1x1-96-576)$", "--runs", "1", "--threads", "1"]


@pytest.mark.slow
def test_it_tells_compiling_from_finding(capsys, tmp_path):
    out = tmp_path / "start.json"
    assert start.main([*ARGUMENTS, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "efficientnet-1x1-240-40" in text  # the other one is the first call of its process
    assert "first call of a process, warm cache" in text
    assert "a call of mobilenet-1x1-96-576 after 50 ms of rest" in text
    found = json.loads(out.read_text())
    assert [len(found[kind][0]["layers"]) for kind in ("cold", "warm")] == [1, 1]
    assert found["cold"][0]["sums"] == found["warm"][0]["sums"]


def test_nothing_is_timed_that_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(start, "right_sums", lambda chosen, setting, progress: [1, 2])
    monkeypatch.setattr(start, "start", lambda names, setting, cache: {"sums": [1, 3]})
    assert start.main(ARGUMENTS) == 1
    assert "WRONG" in capsys.readouterr().err


def test_one_layer_is_too_few(capsys):
    with pytest.raises(SystemExit):
        start.main(["--layers", "^resnet-3x3-64$"])
    assert "two layers" in capsys.readouterr().err
