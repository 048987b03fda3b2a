"""The command on a terminal: signs of life all the time, rows as they are finished, lines that fit; and in a pipe."""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from convgrad.cli import bench, driver, tasks
from convgrad.cli.rows import Column, Rows

fcntl = pytest.importorskip("fcntl")
pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")

ROOT = Path(__file__).parents[2]
LONG = 'mb1ic4ih9oc4oh9kh3ph1n"a_name_that_is_longer_than_any_line_of_a_small_terminal_has_room_for_in_it"'


@dataclass
class Session:
    """What a command has written to a terminal, in pieces, and when."""

    code: int
    pieces: list[tuple[float, str]]

    @property
    def text(self):
        return "".join(piece for _, piece in self.pieces)

    @property
    def lines(self):
        """The lines that stay: what is erased, and orders to the terminal, left out."""
        lines = [line.rpartition("\x1b[2K")[2] for line in self.text.replace("\r\n", "\n").split("\n")]
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rpartition("\r")[2].rstrip() for line in lines]

    @property
    def longest_silence(self):
        """From the start to the last word; after the summary nothing is waited for."""
        times = [0.0, *(at for at, _ in self.pieces)]
        return max(b - a for a, b in itertools.pairwise(times))

    def when(self, word):
        """When a word was there for the first time."""
        text = ""
        for at, piece in self.pieces:
            text += piece
            if word in text:
                return at
        raise AssertionError(f"{word!r} is not in {text!r}")


def on_terminal(*words, columns=80, cache=None, **settings):
    """Run Python on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm"} | ({"CONVGRAD_CACHE_DIR": str(cache)} if cache else {}) | settings
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the other side is closed.
            break
        if not piece:
            break
        pieces.append((time.perf_counter() - began, piece.decode(errors="replace")))
    os.close(ours)
    return Session(process.wait(timeout=60), pieces)


@pytest.mark.slow
def test_a_graph_shows_row_by_row(tmp_path):
    """Also when every kernel has yet to be compiled."""
    found = on_terminal("-m", "convgrad", "run", "--mode=F", "examples/layer.json", cache=tmp_path)
    assert found.code == 0, found.text
    assert found.longest_silence < 2
    assert found.when("timing diff_bias") - found.when("forward ") > 0.5, "the first row waits for the last"
    assert max(map(len, found.lines)) <= 80
    rows = [line.split() for line in found.lines if line.startswith("passed")]
    assert [row[1:3] for row in rows] == [
        ["forward", "Convolution"],
        ["diff_src", "ConvolutionBackwardData"],
        ["diff_weights", "ConvolutionBackwardWeights"],
        ["diff_bias", "BiasAddBackward"],
    ]
    assert "4 of 4" in found.text
    assert sum("then timed for 0.3 s" in line for line in found.lines) == 1
    assert any("each result was compared before it was timed" in line for line in found.lines)


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_fit_the_terminal(columns):
    words = ["check", "--dir=FWD_D", "--mb=1", "--dt=f32,bf16:bf16:f32", LONG, "ic4oc4_ih5oh6kh3ph1"]
    found = on_terminal("-m", "convgrad", *words, columns=columns)
    assert found.code == 0, found.text
    assert max(map(len, found.lines)) <= columns
    assert sum(line.startswith("passed") for line in found.lines) == 4
    assert "…" in found.text
    bars = re.findall(r" of \d+ ?([━╸╺]*)", re.sub(r"\x1b\[[0-9;]*m", "", found.text))
    assert bars
    assert columns < 80 or {len(bar) for bar in bars} == {12}, "what is being done leaves no room for the bar"
    assert re.search(r"mb1ic4ih5oc4oh6kh3ph1$", "\n".join(found.lines), re.M)


@pytest.mark.slow
def test_times_fit_too():
    words = ["bench", "--budget=0.1", "--peers=", "--dir=BWD_WB", "ic8oc8_ih14kh3ph1"]
    found = on_terminal("-m", "convgrad", *words, CONVGRAD_NUM_THREADS="1")
    assert found.code == 0, found.text
    assert max(map(len, found.lines)) <= 80
    assert "of peak" in found.text
    assert found.longest_silence < 2
    fields = {
        "problem": "ic8oc8_ih14kh3ph1",
        "dir": "BWD_WB",
        "dt": "f32",
        "tag": "ncx",
        "ms": 0.00123,
        "of peak": "5%",
    }
    for entries in (
        tasks.parse(["--dir=BWD_WB", "ic8oc8_ih14kh3ph1"], tasks.Settings()),
        driver.parse([str(ROOT / "examples" / "resnet50.json")]),
    ):
        rows = Rows(bench.columns(entries, bench.Bench(("torch", "onednn"))), 80)
        head, above, row = rows.lines(fields | {"GFLOP/s": 456.0, "torch ms": 12.3, "onednn ms": None})
        assert len(head) <= 80
        assert head.split()[-4:] == ["torch", "ms", "onednn", "ms"] or "restless" in head
        assert above.startswith("ic8oc8_ih14kh3ph1")
        assert "…" not in row


def test_a_pipe_gets_plain_lines():
    words = [sys.executable, "-m", "convgrad", "check", "--dir=FWD_D", "--mb=1", LONG, "ic4oc4_ih5oh6kh3ph1"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=ROOT)
    head, first, second, summary = found.stdout.splitlines()
    assert (found.returncode, found.stderr) == (0, "")
    assert "\x1b" not in found.stdout
    assert head.split() == ["result", "dir", "dt", "tag", "padding", "problem"]
    assert first.endswith(LONG)
    assert second.split() == ["passed", "FWD_D", "f32", "ncx", "1", "before,", "2", "after", "mb1ic4ih5oc4oh6kh3ph1"]
    assert summary.startswith("2 passed in ")


def test_columns_of_a_narrow_screen():
    """Leading columns go above, optional ones go, the widest is shortened, the last is folded between words."""
    columns = [
        Column("problem", 9, lead=True),
        Column("ms", 5, right=True),
        Column("extra", 4, optional=True),
        Column("note", 6),
    ]
    fields = {"problem": "conv_long", "ms": 1.25, "extra": "more", "note": "two words"}
    assert Rows(columns).lines(fields) == [
        "problem       ms  extra  note",
        "conv_long   1.25  more   two words",
    ]
    assert Rows(columns, 24).lines(fields) == [
        "   ms  extra  note",
        "conv_long",
        " 1.25  more   two words",
    ]
    narrow = Rows(columns, 14)
    assert narrow.lines(fields) == ["   ms  note", "conv_long", " 1.25  two", "       words"]
    assert narrow.lines(fields | {"ms": 2.0}) == ["    2  two", "       words"]
    assert Rows([Column("name", 12), Column("x", 3)], 10).lines({"name": "long_name_it_is", "x": 123}) == [
        "name   x",
        "long…  123",
    ]


DEMO = ["examples/layers.py", "--layers=depthwise|wavenet", "--dtype", "f32"]


@pytest.mark.slow
def test_the_demo(tmp_path):
    found = on_terminal(*DEMO, "--threads=1", cache=tmp_path)
    assert found.code == 0, found.text
    assert found.longest_silence < 2
    assert "verifying ..." in found.text
    assert max(map(len, found.lines)) <= 80
    piped = subprocess.run(
        [sys.executable, *DEMO, "--threads=1"], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert (piped.returncode, piped.stderr) == (0, "")
    for text in ("\n".join(found.lines), piped.stdout):
        assert "gradients of 2 layers, 1 threads" in text
        assert len(re.findall(r"^ {25}f32  +[\d.]+ +yes +[\d.]+ +yes$", text, re.M)) == 2
        assert "4 of 4 gradients verified" in text
    assert not {"\r", "\x1b"} & {*piped.stdout}
    assert "verifying" not in piped.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--help"], 0, "--layers REGEX"),
        (["--fast"], 2, "unrecognized arguments: --fast"),
        (["more"], 2, "unrecognized arguments: more"),
        (["--layers=AlexNet"], 2, "finds none of ResNet-50, first"),
        (["--layers=("], 2, "not a regular expression"),
        (["--threads=0"], 2, "from 1 to 1024, got 0"),
        (["--dtype=f8"], 2, "invalid choice: 'f8'"),
    ],
)
def test_words_of_the_demo(words, code, message):
    found = subprocess.run([sys.executable, DEMO[0], *words], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert found.returncode == code
    assert message in found.stdout + found.stderr
    assert "data gradient" not in found.stdout
