"""The tables of docs/gpu.md come from what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_table


def row(layer, layout, ours, theirs):
    setting = {"layer": layer, "direction": "data", "dtype": "bf16", "layout": layout}
    return setting | {"ours": ours, "theirs": theirs, "limit": 1e-5, "error": 2e-3, "their_error": 1e-3}


def test_a_table_has_every_layer_and_means(tmp_path, monkeypatch, capsys):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    rows = [row("a", "NXC", 9e-5, 9e-5), row("b", "NXC", 2e-5, 4e-5), row("b", "NCX", 1e-5, 4e-5)]
    first.write_text(json.dumps({"results": rows}))
    again.write_text(json.dumps({"results": [row("a", "NXC", 4e-5, 2e-5)]}))  # takes the place of the first
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", str(first), str(again)])
    gpu_table.main()
    assert capsys.readouterr().out.splitlines() == [
        "bf16:",
        "",
        "| layer | data, NXC | data, NCX |",
        "|---|---|---|",
        "| a | 40 (0.50) |  |",
        "| b | 20 (2.00) | 10 (4.00) |",
        "| **mean of ratios** | 1.00 | 4.00 |",
        "| **worst** | 0.50 | 4.00 |",
        "| **share of the limit** | 35% | 100% |",
        "| **cuDNN's share** | 35% | 25% |",
        "| **largest error** | 2e-03 | 2e-03 |",
        "| **cuDNN's largest error** | 1e-03 | 1e-03 |",
        "",
    ]
