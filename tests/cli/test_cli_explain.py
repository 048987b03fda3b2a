"""`convgrad explain` and `convgrad.explain`: what a person is told; pictures; and `convgrad ops`."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from math import prod
from pathlib import Path

import numpy as np
import pytest

import convgrad
from convgrad import engine, explanation
from convgrad.cli import main
from convgrad.cli.picture import ASCII, picture
from convgrad.cpu import target, telling
from convgrad.cpu.plan.registry import make_plan
from convgrad.cpu.threads import count
from convgrad.errors import SpecError
from convgrad.spec import OPS, Problem
from convgrad.spec.bind import Description, bind
from convgrad.spec.problem import extent
from cpu.machines import INTEL

ROOT = Path(__file__).parents[2]
KINDS = {  # a problem line for each kind of plan, and words of what it is told by
    "gather": ("y f32 n2 g1 cx20 cy40 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1", "collects its products"),
    "gather of a gradient": ("x f32 n2 g1 cx20 cy40 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1", "into 4 kinds"),
    "gather of few channels": ("y f32 n1 g1 cx6 cy2 x20x24 w3x3 y20x24 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc", "neighbours"),
    "wgrad": ("w f32 n2 g1 cx20 cy40 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1", "each weight of diff_weights"),
    "wgrad of a 1x1 kernel": ("y f32 n2 g1 cx64 cy64 x28x28 w1x1 y28x28 s1x1 d1x1 p0x0", "a product of matrices"),
    "depthwise channels": ("y f32 n2 g64 cx1 cy1 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1 x@nxc y@nxc", "on its own"),
    "depthwise channels of a gradient": (
        "w f32 n2 g64 cx1 cy1 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
        "on its own",
    ),
    "depthwise pixels": ("x f64 n2 g64 cx1 cy1 x16x32 w3x3 y16x32 s1x1 d1x1 p1x1", "one image after another"),
    "reference": ("x f32 n1 g1 cx2 cy2 x200x200 w1x1 y3x3 s65x64 d1x1 p0x0", "NumPy reference, on one thread: strides"),
}


def lines_of(capsys, *words: str) -> list[str]:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out.splitlines()


def flat(lines: list[str]) -> str:
    """Lines as one, so that it does not matter where they are folded."""
    return " ".join(" ".join(lines).split())


@pytest.fixture
def fixed(monkeypatch):
    """The same machine everywhere, because the text names it: 16 lanes, two threads."""
    machine = target.Target("avx512", "x86_64-unknown-linux-gnu", "test", "+avx512f", 64, 32)
    monkeypatch.setattr(target, "current", lambda: machine)
    monkeypatch.setattr(count, "_chosen", 2)


def test_the_text_of_a_problem(fixed):
    text = convgrad.explain("x f32 n8 g1 cx64 cy64 x56x56 w3x3 y28x28 s2x2 d1x1 p1x1")
    assert text.splitlines() == [
        "ConvolutionBackwardData, f32: The gradient of Convolution with respect to src.",
        "",
        "  diff_dst  n c h w     8x64x28x28  f32    1.5 MiB",
        "  weights   out in h w  64x64x3x3   f32  144.0 KiB",
        "  diff_src  n c h w     8x64x56x56  f32    6.1 MiB  <- result",
        "",
        "  strides 2x2, pads_begin 1x1, pads_end 0x0, dilations 1x1, groups 1",
        "  pads_end follows from the sizes: on h, w: 1 in all, 1 before and 0 after",
        "  h, w: diff_dst 28 = (diff_src 56 + pads 1 + 0 - kernel 3) // stride 2 + 1",
        "",
        "diff_src = ConvolutionBackwardData(diff_dst, weights)",
        "  work    225.7 million multiply-adds for 1.6 million results, each of at most",
        "          256 products (2x2 taps, 64 channels); taps that meet padding, 2.4% of",
        "          them, are not counted; the zeros that stride 2x2 would put into",
        "          diff_dst are never multiplied",
        "  where   CPU, AVX-512 (test), 2 threads, by the gather loop nest: each pixel of",
        "          diff_src collects its products with diff_dst, over the kernel and the",
        "          channels; the stride divides the pixels into 4 kinds, each using only",
        "          its own part of the kernel",
        "  tile    4 pixels x 64 channels: 16 vectors of 16 sums in registers",
        "  tasks   8 tasks, each a box of at most 3136 pixels",
        "  memory  7.8 MiB in the three tensors, 55 FLOP per byte: as a rule arithmetic",
        "          decides how long it takes; 2.7 MiB of workspace",
        "  time    about 982 us is expected of a machine of this kind",
        "  notes   - results wait in a buffer: their channels are strided",
        "          - pixels at the border leave out the taps that meet only padding",
        "          - each thread packs all weights for itself",
        "          - the input of the next box is fetched while one is computed",
    ]


def test_notes_have_the_names_of_the_operation(capsys, fixed):
    line = "w f32 n2 g1 cx48 cy16 x50x50 w1x1 y50x50 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio"
    assert "- src is read in place" in flat(lines_of(capsys, line))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_is_told(kind, capsys, fixed):
    line, words = KINDS[kind]
    lines = lines_of(capsys, line)
    assert words in flat(lines)
    assert max(map(len, lines)) <= 80
    (found,) = lines_of(capsys, "--json", line)
    facts = json.loads(found)
    assert facts["problem"] == str(Problem.parse(line))
    if kind == "reference":
        assert facts["engine"] == "reference"
        assert f"would take {facts['instead']}" in flat(lines)
        return
    plan = engine.explain(Problem.parse(line)).plan
    assert facts["engine"] == "cpu"
    assert facts["nest"] == plan.nest == kind.split(" of ")[0]
    assert f"by the {facts['nest']} loop nest: {facts['how']}" in flat(lines)
    assert set(facts["plan"]) == {f.name for f in fields(plan)}
    assert (facts["threads"], facts["tasks"], facts["workspace"]) == (plan.threads, plan.tasks, plan.workspace)
    assert 0 < facts["lanes_in_use"] <= 1
    assert len(facts["why"]) == len(plan.why)
    assert all(f"- {reason}" in flat(lines) for reason in facts["why"])
    told = lines_of(capsys, "--verbose", line)
    assert max(map(len, told)) <= 80
    names = [line.split()[0] for line in told if re.match(r"    [a-z]\S*  ", line)]
    assert {name for name, _, _ in telling.leaves(plan)} - {"why"} <= set(names)


def test_every_field_of_a_plan_has_words():
    used = set()
    for line, _ in KINDS.values():
        plan = engine.explain(Problem.parse(line)).plan
        if plan is not None:
            used |= {key for _, key, _ in telling.leaves(plan)}
    for wanted in "yw":  # on tile registers, which the machine at hand need not have
        p = Problem.parse(f"{wanted} bf16 n2 g1 cx64 cy96 x14x14 w3x3 y14x14 s1x1 d1x1 p1x1")
        plan = make_plan(p, INTEL["tiles, emulated"], 2)
        assert max(len(told) for told in telling.tell(plan, {"x": "x", "w": "w", "y": "y"}).tile.splitlines()) < 120
        assert all(words for _, _, words in telling.details(plan))
        used |= {key for _, key, _ in telling.leaves(plan)}
    assert set(telling.WORDS) == used


def test_a_descriptor_is_told_in_all_directions(capsys):
    lines = lines_of(capsys, "mb8ic64oc64_ih56kh3ph1sh2")
    starts = ["dst = Convolution(", "diff_src = ConvolutionBackwardData(", "diff_weights = ConvolutionBackwardWeights("]
    at = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert at == sorted(at)
    assert sum("// stride 2 + 1" in line for line in lines) == 1
    assert max(map(len, lines)) <= 80
    for direction, start in zip(("FWD_D", "BWD_D", "BWD_W"), starts, strict=True):
        found = lines_of(capsys, f"--dir={direction}", "mb8ic64oc64_ih56kh3ph1sh2")
        assert [s for s in starts if any(line.startswith(s) for line in found)] == [start]
        assert sum("<- result" in line for line in found) == 1
    found = [json.loads(line) for line in lines_of(capsys, "--json", "--deconv", "ic4oc4_ih5kh3")]
    assert [facts["result"] for facts in found] == ["dst", "diff_src", "diff_weights"]
    # Of types that only one direction has, that one is told; of those that none has, why.
    lines = lines_of(capsys, "--dt=bf16:bf16:f32", "ic4oc4_ih5kh3")
    assert [line for line in lines if " = Conv" in line] == ["dst = Convolution(src, weights)"]
    assert main(["explain", "--dt=f32:bf16:f16", "ic4oc4_ih5kh3"]) == 2
    assert main(["explain", "--dir=BWD_D", "--dt=bf16:bf16:f32", "ic4oc4_ih5kh3"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dir=FWD_D", "ic4oc4_ih5kh3"], "strides 1x1, pads_begin 0x0"),
        (["--dir=FWD_D", "ic4ih5oc4oh5kh3"], "padding was not given; the sizes need on h, w: 2 in all, 1 before and 1"),
        (
            ["--dir=FWD_D", "ic4ih6oc4oh3kh3sh2ph0"],
            "pads_end follows from the sizes: on h, w: 1 in all, 0 before and 1",
        ),
        (["--dir=FWD_B", "--dt=bf16", "g4ic8oc16iw9kw3"], "bias c 16 bf16 32 bytes"),
        (["--dir=FWD_B", "--dt=bf16", "g4ic8oc16iw9kw3"], "weights out in/groups w 16x2x3"),
        (["--deconv", "--dir=BWD_D", "--tag=nxc", "g4ic8oc16iw9kw3"], "weights w out/groups in 3x4x8"),
        (
            ["--dir=FWD_D", "ic4oc4_ih9kh3dh1"],
            "(src 9 + pads 0 + 0 - reach 5) // stride 1 + 1; reach 5 = (kernel 3 - 1)",
        ),
        (
            ["--deconv", "--dir=FWD_D", "ic4oc4iw5ow10kw3sw2pw1"],
            "dst 10 = stride 2 * (src 5 - 1) + kernel 3 - pads 1 - 0",
        ),
        (
            ["--dir=BWD_D", "ic4oc4_ih7kh1sh2"],
            "no window meets 33 of 49 positions of diff_src (67%): there diff_src is 0",
        ),
        (["--dir=FWD_D", "ic4oc4_id5kd3pd1"], "n c d h w 2x4x5x5x5"),
        (["y f32 n0 g1 cx2 cy2 x2 w1 y2 s1 d1 p0"], "none: dst is empty"),
        (["y f32 n1 g1 cx0 cy2 x2 w1 y2 s1 d1 p0 bias"], "none: no product reaches dst, which is the bias"),
        (["x f32 n1 g1 cx2 cy2 x2 w1 y2 s1 d1 p0 accumulate"], "accumulate: the sums are added to what diff_src holds"),
        (["y f32 n1 g1 cx2 cy2 x9 w1 y2 s1 d1 p0"], "w: dst 2, as stated; src 9 has room for 9"),
        (["y f32 n1 g1 cx2 cy2 x4 w1 y4 s1 d1 p0 x@0,0,9,2"], "src has the strides 0, 9, 2, in elements"),
        (
            ["y f32 n1 g2 cx2 cy2 x4 w1 y4 s1 d1 p0 x@0,99,9,2"],
            "src has the strides 0, 99, 9, 2 of n g c w, in elements",
        ),
        (["y f64 n8 g1 cx64 cy64 x56x56 w3x3 y56x56 s1x1 d1x1 p1x1"], "CPU,"),
    ],
)
def test_sizes_are_told(words, told, capsys):
    lines = lines_of(capsys, *words)
    assert told in flat(lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("auto", "told"),
    [
        ("SAME_UPPER", "auto_pad SAME_UPPER takes on w: 1 in all, 0 before and 1 after (the odd one goes after)"),
        ("SAME_LOWER", "auto_pad SAME_LOWER takes on w: 1 in all, 1 before and 0 after (the odd one goes before)"),
        ("VALID", "auto_pad VALID: no padding"),
    ],
)
def test_padding_that_is_derived_is_told(auto, told):
    attributes = {"strides": [2], "dilations": [1], "pads_begin": [5], "pads_end": [5], "auto_pad": auto}
    op, formats = OPS["Convolution"], {"data_format": "NCX", "weights_format": "OIX"}
    binding = bind(op, [Description("f32", (1, 4, 8)), Description("f32", (4, 4, 3))], attributes | formats)
    case = explanation.Case(op, binding.problem, "NCX", "OIX", attributes)
    assert told in flat(explanation.text(case))
    assert case.pads_end == binding.pads_end


def test_derived_padding_is_that_of_the_call():
    rng = np.random.default_rng(3)
    known = 0
    for number in range(400):
        kind = ("Convolution", "ConvolutionBackwardData", "ConvTranspose", "ConvTransposeBackwardData")[number % 4]
        n, k, s, d = (int(i) for i in rng.integers((1, 1, 1, 1), (12, 5, 4, 3)))
        attributes = {"strides": [s], "dilations": [d], "pads_begin": [1], "pads_end": [2]}
        attributes |= {"data_format": "NCX", "weights_format": "IOX" if OPS[kind].transposed else "OIX"}
        attributes["auto_pad"] = str(rng.choice(["None", "SAME_UPPER", "SAME_LOWER", "VALID"]))
        if kind == "ConvTranspose":
            attributes["output_padding"] = [int(rng.integers(0, s))]
        if kind == "ConvolutionBackwardData":
            attributes |= {"same_rule": str(rng.choice(["gradient", "documented"])), "dst_shape": [1, 1, n * s]}
        inputs = [Description("f32", (1, 1, n)), Description("f32", (1, 1, k))]
        try:
            binding = bind(OPS[kind], inputs, attributes)
        except SpecError:
            continue
        known += 1
        case = explanation.Case(OPS[kind], binding.problem, "NCX", "OIX", attributes)
        assert (binding.problem.pad, case.pads_end) == (binding.pads_begin, binding.pads_end), attributes
    assert known > 200


def test_formulas_are_right():
    """What is written on the right comes to what is written on the left."""
    rng = np.random.default_rng(1)
    count = 0
    for _ in range(300):
        x, k, s, d, p = (int(rng.integers(low, high)) for low, high in ((1, 30), (1, 5), (1, 4), (1, 4), (0, 4)))
        y = (x + 2 * p - extent(k, d)) // s + 1
        if y < 1:
            continue
        problem = Problem.parse(f"y f32 n1 g1 cx1 cy1 x{x} w{k} y{y} s{s} d{d} p{p}")
        for kind in ("Convolution", "ConvTransposeBackwardData"):
            case = explanation.Case(OPS[kind], problem, "NCX", "OIX", {"pads_end": [p]})
            for formula in explanation.facts(case)["sizes"]:
                for part in formula.removeprefix("w: ").split("; "):
                    left, right = part.split(" = ")
                    assert eval(re.sub("[a-z_]+", "", right)) == int(left.split()[-1]), formula
                    count += 1
    assert count > 400


def test_positions_that_no_window_reaches():
    rng = np.random.default_rng(2)
    for _ in range(300):
        x, k, y, s, d, p = (int(n) for n in rng.integers((1, 1, 1, 1, 1, 0), (20, 6, 9, 6, 5, 7)))
        problem = Problem.parse(f"y f32 n1 g1 cx1 cy1 x{x} w{k} y{y} s{s} d{d} p{p}")
        met = [o * s + i * d - p for o in range(y) for i in range(k)]
        facts = explanation.facts(explanation.of_problem(problem))
        assert facts["unreached"] == x - len({i for i in met if 0 <= i < x})
        outside = sum(not 0 <= i < x for i in met)
        assert facts["padding_share"] == pytest.approx(outside / len(met), abs=1e-6)


def test_a_graph_file(capsys):
    lines = lines_of(capsys, str(ROOT / "examples" / "layer.json"))
    assert max(map(len, lines)) <= 80
    found = [json.loads(line) for line in lines_of(capsys, "--json", str(ROOT / "examples" / "layer.json"))]
    assert len({facts["name"] for facts in found}) == len(found) > 1
    assert "BiasAddBackward 'diff_bias'" in lines
    for facts in found:
        assert facts["name"] in lines
        assert facts["name"].startswith(facts["operation"])
        if facts["operation"] == "BiasAddBackward":
            assert facts["engine"] == "numpy"
            continue
        assert all(prod(t["shape"]) * 4 == t["bytes"] for t in facts["tensors"].values() if t["dtype"] == "f32")


def test_any_problem_can_be_told():
    rng = np.random.default_rng(5)
    limits = ((0, 40), (1, 5), (0, 20), (1, 5), (1, 4), (0, 5))
    for number in range(60):
        rank, wanted = int(rng.integers(1, 4)), str(rng.choice(list("xwy")))
        words = [wanted, str(rng.choice(["f32", "bf16", "f16", "f64"])), f"n{rng.integers(0, 9)}"]
        words += [f"g{rng.choice([1, 1, 2, 16])}", f"cx{rng.integers(0, 40)}", f"cy{rng.integers(1, 70)}"]
        words += [k + "x".join(map(str, rng.integers(*ends, rank))) for k, ends in zip("xwysdp", limits, strict=True)]
        words += ["x@nxc", "y@nxc", "w@xio"] * (number % 2) + ["accumulate"] * (number % 3 == 0)
        words += ["bias"] * (number % 5 == 0 and wanted != "w")
        problem = Problem.parse(" ".join(words))
        case = explanation.of_problem(problem)
        lines = explanation.text(case, verbose=number % 4 == 0)
        lines += picture(problem, width=80, glyphs=ASCII, names=(case.names["x"], case.names["y"]))
        assert all(line.isascii() and len(line) <= 80 for line in lines), problem
        assert json.loads(json.dumps(explanation.facts(case)))["problem"] == str(problem)


def test_wider_terminals_get_wider_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    assert 80 < max(map(len, lines_of(capsys, "mb8ic64oc64_ih56kh3ph1sh2"))) <= 110


def test_what_cannot_be_explained(capsys, monkeypatch):
    assert main(["explain", "--match=other", "ic4oc4_ih5kh3"]) == 2
    assert main(["explain"]) == 2
    assert main(["explain", "ic16"]) == 2
    monkeypatch.setenv("CONVGRAD_TARGET", "none such")
    assert main(["explain", "ic4oc4_ih5kh3"]) == 2
    assert "CONVGRAD_TARGET='none such'" in capsys.readouterr().err


def test_threads_that_stay_idle_are_told(monkeypatch):
    monkeypatch.setattr(count, "_chosen", 4)
    assert "1 of 4 threads (too little work to share)" in convgrad.explain("y f32 n1 g1 cx4 cy4 x9 w3 y9 s1 d1 p1")


# ---- pictures


def test_pictures():
    p = Problem.parse("x f32 n1 g1 cx1 cy1 x8x7 w3x2 y4x2 s2x4 d1x2 p1x0")
    assert picture(p, glyphs=ASCII) == [
        "h: x 8, kernel 3, stride 2, dilation 1, padding used: 1 before, 0 after, y 4",
        "     .01234567",
        "y 0  o##",
        "y 1    ###",
        "y 2      ###",
        "y 3        ###",
        "",
        "w: x 7, kernel 2, stride 4, dilation 2, padding used: 0 before, 0 after, y 2",
        "     0123456",
        "y 0  #-#",
        "y 1      #-#",
        "      ^ ^ ^ no window reaches these",
        "",
        "# meets x   o meets padding   . padding   - dilation",
    ]


def test_pictures_of_what_does_not_fit():
    p = Problem.parse("y f32 n1 g1 cx1 cy1 x500 w3 y249 s2 d1 p0")
    lines = picture(p, width=40, glyphs=ASCII)
    assert all(len(line) <= 40 for line in lines)
    assert any(line.startswith("~") for line in lines)
    assert any(line.startswith("y 248") for line in lines)
    for line in (
        "w f32 n1 g1 cx1 cy1 x1 w3 y100 s1 d1 p100",
        "y f32 n1 g1 cx1 cy1 x0 w3 y0 s1 d1 p1",
        "x f32 n1 g1 cx1 cy1 x3x3x3 w1x1x1 y1x1x1 s3x3x3 d1x1x1 p0x0x0",
    ):
        assert picture(Problem.parse(line))


# ---- ops


def test_ops(capsys):
    assert main(["ops"]) == 0
    text = capsys.readouterr().out
    for kind in (*OPS, "BiasAdd", "BiasAddBackward"):
        assert kind in text
    for kind in OPS:
        assert main(["ops", kind]) == 0
        text = capsys.readouterr().out
        for attr in OPS[kind].attrs:
            assert attr.name in text
        assert "[bias]" not in text
    assert main(["ops", "ConvTransposeBackpropData"]) == 0
    text = capsys.readouterr().out
    assert "filter_format" in text
    assert "x is output_delta and y is input_delta" in text
    assert "The older name of ConvTransposeBackwardData" in text
    assert main(["ops", "--json", "ConvTranspose"]) == 0
    (schema,) = json.loads(capsys.readouterr().out)
    assert [a["name"] for a in schema["inputs"]] == ["src", "weights", "bias"]
    assert main(["ops", "Convolve"]) == 2
    assert "did you mean 'Convolution'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, *OPS, "BiasAddBackward", "ConvTransposeBackpropData"])
def test_ops_fit_a_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ops", *([name] if name else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    for attr in OPS[name].attrs if name in OPS else ():
        assert any(line.startswith(f"{attr.name} ") for line in lines)
