"""Draw what `train.py` wrote: `python examples/train_plot.py train.json train.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

STOCK, OURS, EXACT, WRONG = "#8a8a8a", "#20798f", "#222222", "#d2622f"
ACROSS = 6  # loss curves in a line


def draw(document: dict[str, Any], path: Path) -> None:
    """Write a picture: the time of a step of every training, and below the loss curves."""
    rows = document["rows"]
    lines = -(-len(rows) // ACROSS)
    height = 1.2 + 0.45 * len(rows) + 1.9 * lines
    plt.rcParams.update({"font.size": 8, "font.family": "sans-serif"})
    figure = plt.figure(figsize=(12, height), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[0.9 + 0.45 * len(rows), 0.3 + 1.9 * lines])
    times(top.subplots(), rows)
    curves = list(bottom.subplots(lines, min(ACROSS, len(rows)), squeeze=False).flat)
    for axes, row in zip(curves, rows, strict=False):
        losses(axes, row)
    for axes in curves[len(rows) :]:
        axes.axis("off")
    figure.suptitle(document["versions"])
    figure.savefig(path, dpi=140)
    plt.close(figure)


def times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The time of a step in PyTorch's way as 1, ours beside it; the part in convolution backward is darker."""
    for at, row in enumerate(rows):
        if not row["ms"]:
            axes.text(0.01, at, "wrong: no times", color=WRONG, va="center")
            continue
        for name, colour, shift in (("stock", STOCK, -0.19), ("convgrad", OURS, 0.19)):
            length = row["ms"][name] / row["ms"]["stock"]
            axes.barh(at + shift, length, 0.36, color=colour, alpha=0.45)
            axes.barh(at + shift, length * row["share"][name], 0.36, color=colour)
            axes.text(length + 0.005, at + shift, f"{row['ms'][name]:.0f} ms", va="center", fontsize=7)
        axes.text(1.1, at, f"{row['ratio']:.2f}", va="center", weight="bold")
    axes.set_yticks(range(len(rows)), [f"{row['model']} {row['dtype']} {row['format']}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max([1.18, *(1.1 * row["ms"]["convgrad"] / row["ms"]["stock"] for row in rows if row["ms"])]))
    axes.set_xlabel("time of a step over PyTorch's; bold: PyTorch's over convgrad's")
    handles = [Patch(color=STOCK, label="PyTorch"), Patch(color=OURS, label="convgrad")]
    handles.append(Patch(color="#555555", label="darker: in convolution backward"))
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def losses(axes: Axes, row: dict[str, Any]) -> None:
    """The losses of one training."""
    for name, colour, style, width in (
        ("stock", STOCK, "-", 3),
        ("float64", EXACT, "-", 0.8),
        ("convgrad", OURS, "--", 1.5),
    ):
        axes.plot(row["losses"][name], style, color=colour, linewidth=width, label=name)
    colour = WRONG if row["wrong"] else EXACT
    axes.set_title(f"{row['model']} {row['dtype']} {row['format']}", fontsize=8, color=colour)
    axes.legend(frameon=False, fontsize=6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Draw a file."""
    if len(sys.argv) != 3:
        print("usage: python examples/train_plot.py train.json train.png", file=sys.stderr)
        return 2
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
