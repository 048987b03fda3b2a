"""What was measured on a GPU is compared with what the policy "fast" takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

gpu_policy = pytest.importorskip("gpu_policy", exc_type=ImportError)


def row(layer, direction, layout, ratio, dtype="bf16"):
    named = {"layer": layer, "direction": direction, "dtype": dtype, "layout": layout}
    return named | {"ours": 1e-5, "theirs": ratio * 1e-5}


def test_what_a_rule_should_say_is_told(tmp_path, monkeypatch, capsys):
    rows = [
        row("convnext dw 7x7 96 56", "data", "NXC", 0.5),
        row("convnext dw 7x7 96 56", "weights", "NXC", 2.0),
        row("resnet 1x1 1024-512 14", "weights", "NXC", 2.0),
        row("resnet 3x3s2 128 56", "weights", "NXC", 0.5),
        row("resnet 1x1 64-256 56", "forward", "NCX", 0.5),
    ]
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"results": rows}))
    monkeypatch.setattr(sys, "argv", ["gpu_policy.py", str(file)])
    gpu_policy.main()
    first, taken, second, left, last = capsys.readouterr().out.splitlines()
    assert (first, second) == ("taken, though cuDNN was ahead:", "left, though cuDNN was behind:")
    assert taken.split() == ["0.50", "bf16", "data", "NXC", "convnext", "dw", "7x7", "96", "56"]
    assert left.startswith("   2.00 bf16 weights NXC resnet 1x1 1024-512 14")
    assert last == "2 of 5 taken; the mean ratio is 1.00, where 1.00 stands for what is left"


@pytest.mark.parametrize("layer", gpu_policy.LAYERS, ids=lambda layer: layer.name)
def test_layers_come_to_problems_of_their_layout(layer):
    for layout in ("NXC", "NCX"):
        for direction in ("data", "weights", "forward"):
            p = gpu_policy.problem(layer, direction, "bf16", layout)
            assert (p.n, p.g) == (layer.images, layer.groups)
            assert (p.wanted == "w") == (direction == "weights")
            assert {p.cx * p.g, p.cy * p.g} == {layer.channels, layer.filters}
            axis = 2 if p.cy > 1 else 1
            assert (p.y_strides[axis] == 1) == (layout == "NXC")
