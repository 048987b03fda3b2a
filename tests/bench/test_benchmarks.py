"""The list of layers means what it says, and the benchmark times right results only."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest

import convgrad
from convgrad.bench import timing
from convgrad.bench import torch as pytorch
from convgrad.spec import bind

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import layers
import picture
import run

TINY = layers.Layer("tiny", "dense", "mb1ic3oc4ih6kh3ph1", "a test")
T_TINY = layers.Layer("t-tiny", "transposed", "mb1ic3oc4ih6oh12kh4sh2ph1", "a test")


@pytest.fixture
def tiny(monkeypatch, measured_briefly):
    """A benchmark of two small layers on a machine that need not be measured."""
    monkeypatch.setattr(run, "LAYERS", (TINY, T_TINY))
    machine = timing.Machine("a", 1, {"f32": 1e11, "f64": 5e10}, {"f32": 1e11, "f64": 5e10}, None, {1: 1e10})
    monkeypatch.setattr(timing, "measure_machine", lambda threads: machine)
    before = convgrad.get_num_threads()
    yield ["--threads", "1", "--budget", "0.02"]
    convgrad.set_num_threads(before)


def names(found):
    return [layer.name for layer in found]


def test_layers_have_names_of_their_own():
    assert len(set(names(layers.LAYERS))) == len(layers.LAYERS) >= 40
    assert {layer.group for layer in layers.LAYERS} == set(layers.GROUPS)
    assert set(layers.DENSE) == set(layers.GROUPS) - {"uneven", "depthwise", "grouped", "stem"}


def test_a_batch_can_be_given(tiny, capsys, tmp_path):
    assert [layer.with_batch(7).descriptor.mb for layer in layers.LAYERS] == [7] * len(layers.LAYERS)
    out = tmp_path / "out.json"
    assert run.main([*tiny, "--mb", "5", "--peers", "none", "--layout", "NXC", "--json", str(out)]) == 0
    assert all(" n5 " in result["problem"] for result in json.loads(out.read_text())["results"])
    with pytest.raises(SystemExit):
        run.main([*tiny, "--mb", "0"])
    assert "--mb must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize("layer", layers.LAYERS, ids=names(layers.LAYERS))
def test_a_layer_is_of_its_group(layer):
    d = layer.descriptor
    smallest = min(d.ic, d.oc) // d.groups
    if d.groups > 1:
        group = "depthwise" if d.groups == d.ic == d.oc else "grouped"
    elif smallest < 16:
        group = "stem"
    elif layer.transposed:
        group = "transposed"
    elif d.ndims != 4:
        group = f"{d.ndims - 2}D"
    elif max(d.s) > 1:
        group = "strided"
    elif max(d.d) > 0:
        group = "dilated"
    else:
        group = "pointwise" if max(d.k) == 1 else "dense"
    uneven = d.ic % 16 > 0 or d.oc % 16 > 0
    assert layer.group == group or (layer.group == "uneven" and uneven and group in layers.DENSE)


@pytest.mark.parametrize("direction", run.DIRECTIONS)
@pytest.mark.parametrize("layout", run.LAYOUTS)
def test_layers_can_be_bound_and_are_exact(direction, layout):
    for layer in layers.LAYERS:
        operation = layer.descriptor.operation(run.DIRECTIONS[direction], data_format=layout)
        binding = bind(operation.op, operation.inputs, operation.attributes)
        assert binding.shape == operation.shape
        problem = binding.problem
        # From milliseconds on two cores to what a patient user waits for.
        assert 1e7 < problem.flops < 6e9, layer.name
        # Whole numbers up to 4 in size: a sum of so many products is exact in f32 if it stays below 2**24.
        kernel, windows = prod(problem.w), problem.n * prod(problem.y)
        terms = {"y": problem.cx * kernel, "x": problem.cy * kernel, "w": windows}[problem.wanted]
        assert 16 * terms < 2**24, layer.name
        assert pytorch.refusal(operation.op.kind, problem) is None, layer.name


@pytest.mark.slow
def test_it_prints_writes_and_draws(tiny, tmp_path, capsys):
    arguments = [*tiny, "--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"), "--dtype", "bf16"]
    assert run.main(arguments) == 0
    text = capsys.readouterr().out
    assert "weight gradient, bf16, NCX, 1 thread" in text
    assert "all dense" in text
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["results"]) == 2 * 2 * 2
    first = found["results"][0]
    assert first["problem"] == "x bf16 n1 g1 cx3 cy4 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc"
    here = {name for name, peer in run.PEERS.items() if peer.available() is None}
    assert set(first["times"]) == {"convgrad", *here}
    assert all(t["least"] > 0 for t in first["times"].values())
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_not_timed(tiny, monkeypatch, tmp_path, capsys):
    right = convgrad.convolution_backward_data

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        result[0, 1, 2, 3] += 1
        return result

    monkeypatch.setattr(convgrad, "convolution_backward_data", wrong)
    arguments = [*tiny, "--json", str(tmp_path / "r.json"), "--layout", "NCX", "--direction", "data"]
    assert run.main(arguments) == 1
    printed = capsys.readouterr()
    assert "WRONG tiny data f32 NCX 1T: wrong: 1 of 108 values, at (0, 1, 2, 3)" in printed.err
    bad, good = json.loads((tmp_path / "r.json").read_text())["results"]
    assert bad["times"] == {}
    assert good["times"]


def test_convgrad_is_not_blamed_for_a_wrong_judge(tiny, monkeypatch, tmp_path):
    right = pytorch.run
    monkeypatch.setattr(pytorch, "run", lambda *args: right(*args) + 1)
    arguments = [*tiny, "--json", str(tmp_path / "r.json"), "--layout", "NCX", "--direction", "data"]
    assert run.main(arguments) == 0
    assert all(r["times"] for r in json.loads((tmp_path / "r.json").read_text())["results"])


def test_a_peer_that_is_wrong_has_no_ratio():
    right = np.ones((4, 4), np.float32)
    run.check_peer(right * (1 + 1e-6), right)
    with pytest.raises(run.WrongError):
        run.check_peer(right * 1.01, right)
    with pytest.raises(run.WrongError):
        run.check_peer(np.full_like(right, np.nan), right)


def result(layer, group, ours, torch):
    setting = run.Setting("data", "f32", "NXC", 2)
    times = {"convgrad": timing.Timing(ours, ours, 1, 1), "torch": timing.Timing(torch, torch, 1, 1)}
    return run.Result(layer, group, setting, "", 1, 1, 0.0, times, ours / 2, "fma")


def test_means_are_geometric_and_by_group():
    results = [
        result("a", "dense", 1.0, 2.0),
        result("b", "dense", 1.0, 8.0),
        result("c", "strided", 4.0, 1.0),
        result("d", "stem", 1.0, 100.0),
    ]
    found = {m.group: m for m in run.means(results, ["torch"])}
    assert found["dense"].mean == pytest.approx(4)
    assert (found["dense"].worst, found["dense"].worst_layer) == (2.0, "a")
    assert found["all dense"].mean == pytest.approx((2 * 8 / 4) ** (1 / 3))
    assert found["all dense"].worst_layer == "c"
    assert found["all"].count == 4
    assert results[0].share == 0.5


def test_layers_are_chosen_by_name_group_or_source(capsys):
    assert run.main(["--list", "--layers", "^wavenet|^depthwise$"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [
        "wavenet-k2-d128",
        *(layer.name for layer in layers.LAYERS if layer.group == "depthwise"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "("], "not a regular expression"),
        (["--layers", "nothing has this name"], "matches no layer"),
        (["--dtype", "f32,f8"], "'f8' must be one of f32"),
        (["--threads", "0"], "not a list of thread counts"),
        (["--budget", "0"], "must be above 0"),
    ],
)
def test_mistakes_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_picture_of_the_speed_shows_the_table():
    page = (picture.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert (picture.DOCS / "speed.svg").read_text(encoding="utf-8") == picture.draw(page)
    assert picture.draw(page) != picture.draw(page.replace("| 61 (37) |", "| 62 (37) |"))
