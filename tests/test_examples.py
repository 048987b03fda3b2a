"""Every example does what it shows: commands in help texts and documents, Python in documents and docstrings.

They run from the root of the repository, where they say that they do.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest

import convgrad
import convgrad.bench.timing
import convgrad.cli.run
import convgrad.graph
from convgrad import cli
from marks import slow_but

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(convgrad.__path__, "convgrad.")
    if not found.name.endswith("__main__")
]


def commands(text):
    """The lines of a text that begin with the command, those joined that end with a backslash."""
    whole = re.sub(r" *\\\n *", " ", text)
    return re.findall(r"^ *(?:\$ )?(convgrad (?:run|check|bench|ops|explain)\b.*?) *$", whole, re.M)


def helped():
    texts = [cli._help(command) for command in cli.COMMANDS]
    texts += [module.__doc__ or "" for module in MODULES]
    blocks = [re.findall(r"```\w*\n(.*?)```|((?:^    .*\n)+)", page.read_text(encoding="utf-8"), re.S | re.M)
              for page in PAGES]  # fmt: skip
    texts += ["".join(pair) for page in blocks for pair in page]
    # In running text, between backquotes; a word in capitals stands for one of the reader's.
    inline = [re.findall(r"`(convgrad [a-z]+ [^`]*)`", page.read_text(encoding="utf-8")) for page in PAGES]
    texts += [line for page in inline for line in page if not re.search(r" [A-Z]+(\.json)?\b", line)]
    return sorted({line for text in texts for line in commands(text)})


COMMANDS = helped()


def test_there_are_commands():
    """Every command has examples that run, and a page that shows some."""
    for command in cli.COMMANDS:
        assert sum(line.startswith(f"convgrad {command}") for line in COMMANDS) >= 2, command
        assert len(commands(cli._help(command))) >= 2
    assert len(commands((ROOT / "docs" / "cli.md").read_text(encoding="utf-8"))) > 8


QUICK = [line for line in COMMANDS if not line.startswith("convgrad bench")]


@pytest.mark.usefixtures("measured_briefly")
@pytest.mark.parametrize("line", slow_but(QUICK, COMMANDS))
def test_commands(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    # What takes seconds is timed briefly, and what is large has one image.
    if words[0] == "bench":
        words += ["--budget=0.02", "--peers="]
    if words[0] in ("bench", "check") and not any(word.endswith(".json") or " " in word for word in words):
        words += ["--mb=1"]
    if words[0] == "run":
        monkeypatch.setattr(cli.run, "PACES", dict.fromkeys("PF", convgrad.bench.timing.Pace(budget=0.02, blocks=1)))
    assert cli.main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_help_says_where_its_files_are():
    """Who has installed convgrad need not have the repository."""
    for command in cli.COMMANDS:
        text = cli._help(command)
        assert ("examples/" not in text) or "in convgrad's repository" in text, command


@pytest.mark.parametrize(("name", "library"), [("autograd", "torch"), ("jax_vjp", "jax")])
def test_gradients_in_other_libraries(name, library, capsys):
    """The programs compare convgrad's gradients with the library's own."""
    pytest.importorskip(library)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert "equal" in capsys.readouterr().out


@pytest.fixture
def train(monkeypatch):
    """The program that trains networks both ways; it sets the number of threads, which is put back."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    before = torch.get_num_threads(), convgrad.get_num_threads()
    yield importlib.import_module("train")
    torch.set_num_threads(before[0])
    convgrad.set_num_threads(before[1])


@pytest.mark.slow
def test_training(train, tmp_path, capsys):
    """Gradients of ours train as PyTorch's do, and what was measured is in a table, a file and a picture."""
    pytest.importorskip("matplotlib")
    numbers, picture = tmp_path / "train.json", tmp_path / "train.png"
    words = ["--quick", "--models", "audio", "--report", "--policy", "all", "--json", str(numbers)]
    assert train.main([*words, "--png", str(picture)]) == 0
    shown = capsys.readouterr().out
    (row,) = json.loads(numbers.read_text(encoding="utf-8"))["rows"]
    assert (row["model"], row["format"], row["wrong"]) == ("audio", "contiguous", [])  # 1D has no channels last
    assert row["ms"].keys() == {"stock", "convgrad"}
    assert f"{row['ms']['convgrad']:.1f}" in shown
    assert len(row["layers"]) > 5
    assert " yes" in shown
    assert " NO" not in shown
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_training_shows_no_times_of_wrong_gradients(train, dtype, monkeypatch, tmp_path, capsys):
    """A tap of every kernel is not learnt."""
    from convgrad.torch import plans

    right = plans.Step.run

    def wrong(step, x, w, y, bias=None):
        right(step, x, w, y, bias)
        if step.problem.wanted == "w":
            w[..., -1] = 0

    monkeypatch.setattr(plans.Step, "run", wrong)
    numbers = tmp_path / "train.json"
    words = ["--quick", "--models", "audio", "--dtype", dtype, "--policy", "all", "--json", str(numbers)]
    assert train.main(words) == 1
    (row,) = json.loads(numbers.read_text(encoding="utf-8"))["rows"]
    assert not row["ms"]
    assert row["ratio"] is None
    assert re.search(r"gradients are wrong, such as \d\S*weight: ", row["wrong"][-1])
    shown = capsys.readouterr().out
    assert " NO" in shown
    assert " yes" not in shown


def test_training_that_is_interrupted_ends_with_what_is_done(train, monkeypatch, tmp_path, capsys):
    done = train.Row("audio", "f32", "contiguous", {"convgrad": [2.0, 1.0]}, dict.fromkeys(train.WAYS, 0.0), [])

    def measure(case, references, given):
        yield "training"
        if case[1] == "bf16":
            raise KeyboardInterrupt
        yield done

    monkeypatch.setattr(train, "measure", measure)
    numbers = tmp_path / "train.json"
    assert train.main(["--models", "audio", "--dtype", "f32", "bf16", "--json", str(numbers)]) == 130
    shown = capsys.readouterr().out
    assert "Interrupted: 1 of 2 trainings are done." in shown
    assert "1 of 1 trainings as close" in shown
    assert len(json.loads(numbers.read_text(encoding="utf-8"))["rows"]) == 1


def test_every_network_trains(train):
    """Each of them, in both formats: every parameter has a gradient, of float64's size and of its own format."""
    given = train.options(["--quick"])
    assert {case[0].name for case in train.cases(given)} == {model.name for model in train.MODELS}
    for model, dtype, layout in train.cases(given):
        training = train.Training(model, dtype, layout, given)
        curve = training.curve(2)
        exact = train.Training(model, "f64", layout, given).curve(2)
        assert curve.gradients.keys() == dict(training.net.named_parameters()).keys()
        assert not train.faults(exact, [curve], curve, dtype)
        assert train.distance(curve, exact) < 1e-4


@pytest.mark.parametrize("off", [1e-3, float("nan")])
def test_training_notices_other_losses(train, off):
    """Both as far from float64's as rounding takes them is right."""
    torch = pytest.importorskip("torch")
    gradients = {"weight": torch.ones(3)}
    exact, stock, ours, wrong = (train.Curve([2.0, 1.0 + d], gradients) for d in (0, 1e-5, -2e-5, off))
    assert not train.faults(exact, [stock], ours, "f32")
    (text,) = train.faults(exact, [stock], wrong, "f32")
    assert text.startswith("the losses are ")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_documents(page, monkeypatch):
    """The blocks of a page are one program."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    exec(compile("\n".join(blocks), page.name, "exec"), {})


def ones(*shape):
    return np.ones(shape, np.float32)


SRC, SMALL, WEIGHTS = ones(2, 8, 8, 4), ones(2, 4, 4, 5), ones(3, 3, 4, 5)
UP = {"weights": ones(3, 3, 5, 4)}
NAMES = {
    "apply": {"diff_dst": ones(2, 5, 8, 8), "weights": ones(4, 5, 4, 4)},
    "explain": {},
    "convolution": {"src": SRC, "weights": WEIGHTS},
    "convolution_backward_data": {"src": SRC, "diff_dst": SMALL, "weights": WEIGHTS},
    "convolution_backward_weights": {"src": SRC, "diff_dst": SMALL, "weights": WEIGHTS},
    "conv_transpose": {"src": ones(2, 4, 4, 4)} | UP,
    "conv_transpose_backward_data": {"diff_dst": ones(2, 7, 7, 5)} | UP,
    "conv_transpose_backward_weights": {"src": ones(2, 4, 4, 4), "diff_dst": ones(2, 7, 7, 5)} | UP,
    "bias_backward": {"diff_dst": SMALL},
    "LogicalTensor": {},
    "Op": {
        "diff_dst": convgrad.graph.LogicalTensor(0, "f32", (8, 32, 56, 56)),
        "weights": convgrad.graph.LogicalTensor(1, "f32", (32, 64, 3, 3)),
        "diff_src": convgrad.graph.LogicalTensor(2, "f32"),
    },
}
"""What the examples in docstrings have, by the function or class that they explain."""


def documented():
    """Functions and classes whose docstrings have a block of code, and the block."""
    found = {}
    for module in [convgrad, *MODULES]:
        for name, thing in vars(module).items():
            if inspect.isfunction(thing) or inspect.isclass(thing):
                blocks = re.findall(r"::\n\n((?:(?:    .*)?\n?)+)", inspect.getdoc(thing) or "")
                if blocks and thing.__module__.startswith("convgrad"):
                    found[name] = textwrap.dedent(blocks[0])
    return found


BLOCKS = documented()


def test_every_block_has_its_names():
    assert {*BLOCKS} == {*NAMES}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_in_docstrings(name, capsys):
    module = {"LogicalTensor": convgrad.graph, "Op": convgrad.graph}.get(name, convgrad)
    exec(compile(BLOCKS[name], name, "exec"), {"convgrad": convgrad, **vars(module), **NAMES[name]})


@pytest.mark.parametrize("module", [m for m in MODULES if ">>> " in inspect.getsource(m)], ids=lambda m: m.__name__)
def test_doctests(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
