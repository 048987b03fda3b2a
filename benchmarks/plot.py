"""Draw the results of run.py: `python benchmarks/plot.py results.json results.png`."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

AHEAD, BEHIND, OTHER, INK, FAINT = "#20798f", "#d2622f", "#3b3b3b", "#222222", "#8a8a8a"
SHARES = {"fma": "#7f94b8", "dot": "#7f94b8", "copy": "#c3a75a"}
BAND = "#f4f4f2"
DENSE = ("dense", "strided", "pointwise", "dilated", "1D", "3D", "transposed")
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def draw(document: dict[str, Any], path: Path) -> None:
    """Write a picture: a row per layer, and per setting its ratios to the peers and its share of the limit.

    Element types lie one below the other, each with a scale of its own.
    """
    results = document["results"]
    dtypes = list(dict.fromkeys(r["setting"]["dtype"] for r in results))
    by_dtype = {d: [r for r in results if r["setting"]["dtype"] == d] for d in dtypes}
    places, heads = _rows(results)
    rows = len(places) + len(heads)
    across = max(len({_setting(r) for r in found}) for found in by_dtype.values())

    plt.rcParams.update({"font.size": 8, "font.family": "sans-serif", "axes.edgecolor": FAINT})
    # In inches: the panels, the space between them, above and below, and the whole.
    panel, between, above, below = 0.165 * rows, 0.95, 1.0, 0.62
    width = 2.2 + 3.6 * across
    subtitle = textwrap.wrap(_subtitle(document), int(16 * width))
    columns = 6 if across > 1 else 2
    above += 0.15 * len(subtitle)
    below += 0.18 * (6 // columns - 1)
    height = above + len(dtypes) * panel + (len(dtypes) - 1) * between + below
    figure, axes = plt.subplots(
        len(dtypes),
        2 * across,
        figsize=(width, height),
        sharey=True,
        squeeze=False,
        gridspec_kw={"width_ratios": [2.5, 1.0] * across, "wspace": 0.06, "hspace": between / panel},
    )
    for line, found in zip(axes, by_dtype.values(), strict=True):
        settings = list(dict.fromkeys(map(_setting, found)))
        scale = _scale(found)
        for number, setting in enumerate(settings):
            mine = [r for r in found if _setting(r) == setting]
            left, right = line[2 * number], line[2 * number + 1]
            for axis in (left, right):
                _bands(axis, heads, rows)
            _draw_ratios(left, mine, places, heads, scale)
            _draw_shares(right, mine, places)
            left.set_title(_title(setting, mine), loc="left", fontsize=8.5, color=INK)
        for axis in line[2 * len(settings) :]:
            axis.set_visible(False)
        for axis in line:
            axis.tick_params(axis="y", length=0)
        line[0].set_ylim(rows - 0.4, -0.6)
        line[0].set_yticks([*heads.values(), *places.values()], [*heads, *places])
        for label in line[0].get_yticklabels()[: len(heads)]:
            label.set_fontweight("bold")

    figure.subplots_adjust(left=1.75 / width, right=1 - 0.15 / width, top=1 - above / height, bottom=below / height)
    edge = 0.15 / width
    figure.text(edge, 1 - 0.28 / height, "convgrad beside its peers", fontsize=13, weight="bold", color=INK)
    figure.text(edge, 1 - 0.38 / height, "\n".join(subtitle), fontsize=8, color=FAINT, va="top")
    figure.legend(handles=_legend(results), loc="lower left", ncol=columns, frameon=False, bbox_to_anchor=(0, 0))
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def _rows(results: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """The row of each layer, and of the name of each group above its layers."""
    members: dict[str, dict[str, None]] = {}
    for result in results:
        members.setdefault(result["group"], {})[result["layer"]] = None
    places: dict[str, int] = {}
    heads: dict[str, int] = {}
    for group, layers in members.items():
        heads[group] = len(places) + len(heads)
        for layer in layers:
            places[layer] = len(places) + len(heads)
    return places, heads


def _scale(results: list[dict[str, Any]]) -> tuple[float, float]:
    """The range of ratios, with room at the right for figures."""
    ratios = [ratio for r in results for ratio in _ratios(r).values()]
    low, high = min([0.8, *ratios]) / 1.15, max([1.25, *ratios])
    return low, high * (high / low) ** 0.25


def _title(setting: tuple[str, str, str, int], results: list[dict[str, Any]]) -> str:
    direction, dtype, layout, threads = setting
    what = {"data": "data gradient", "weights": "weight gradient"}.get(direction, direction)
    return f"{what}, {dtype} {layout}, {threads} thread{'s'[: threads > 1]}\n{_summary(results)}"


def _setting(result: dict[str, Any]) -> tuple[str, str, str, int]:
    s = result["setting"]
    return s["direction"], s["dtype"], s["layout"], s["threads"]


def _ratios(result: dict[str, Any]) -> dict[str, float]:
    """The peers' times over convgrad's."""
    times = result["times"]
    if "convgrad" not in times:
        return {}
    return {p: t["least"] / times["convgrad"]["least"] for p, t in times.items() if p != "convgrad"}


def _main_peer(results: list[dict[str, Any]]) -> str | None:
    """The peer that the bars stand for."""
    found = {peer for r in results for peer in _ratios(r)}
    return next((peer for peer in ("torch", "onednn") if peer in found), None)


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _bands(axis: Axes, heads: dict[str, int], rows: int) -> None:
    """Light stripes that hold the rows of a group together."""
    edges = [*heads.values(), rows]
    for number, (start, stop) in enumerate(pairwise(edges)):
        if number % 2 == 0:
            axis.axhspan(start - 0.5, stop - 0.5, color=BAND, lw=0, zorder=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_ratios(
    axis: Axes,
    results: list[dict[str, Any]],
    places: dict[str, int],
    heads: dict[str, int],
    scale: tuple[float, float],
) -> None:
    peer = _main_peer(results)
    low, high = scale
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.axvline(1, color=INK, lw=0.9, zorder=2)
    for result in results:
        at, found = places[result["layer"]], _ratios(result)
        if "convgrad" not in result["times"]:
            axis.text(1, at, "  wrong result", color=BEHIND, va="center", fontsize=7, weight="bold")
            continue
        if peer in found:
            ratio = found[peer]
            axis.barh(at, ratio - 1, left=1, height=0.62, color=AHEAD if ratio >= 1 else BEHIND, zorder=1.5)
            _number(axis, at, f"{ratio:.2f}", fontsize=6.5)
        if "onednn" in found and peer != "onednn":
            axis.plot(found["onednn"], at, "D", ms=3.2, mfc="white", mec=OTHER, mew=0.8, zorder=3)
    for group, head in heads.items():
        values = [r[peer] for r in map(_ratios, (r for r in results if r["group"] == group)) if peer in r]
        if values and peer:
            mean = _mean(values)
            rows = [places[r["layer"]] for r in results if r["group"] == group]
            axis.plot([mean, mean], [min(rows) - 0.45, max(rows) + 0.45], color=INK, lw=0.8, ls=(0, (2, 2)), zorder=2.5)
            _number(axis, head, f"mean {mean:.2f}", fontsize=7, weight="bold")
    inside = [t for t in TICKS if low <= t <= high]
    # Few enough labels not to touch each other.
    axis.xaxis.set_major_locator(FixedLocator(inside[:: 1 + len(inside) // 8]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    axis.grid(axis="x", color="#dddddd", lw=0.6, zorder=0.5)
    axis.set_xlabel("times as fast", color=FAINT)


def _number(axis: Axes, at: float, text: str, **how: Any) -> None:
    """A figure in the column at the right edge, where no bar is."""
    axis.text(0.995, at, text, transform=axis.get_yaxis_transform(), ha="right", va="center", color=INK, **how)


def _draw_shares(axis: Axes, results: list[dict[str, Any]], places: dict[str, int]) -> None:
    axis.set_xlim(0, 1.28)
    axis.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
    axis.axvline(1, color=FAINT, lw=0.7, zorder=1)
    axis.grid(axis="x", color="#dddddd", lw=0.6, zorder=0.5)
    axis.set_xlabel("of the limit", color=FAINT)
    for result in results:
        if "convgrad" in result["times"]:
            share = result["limit"] / result["times"]["convgrad"]["least"]
            at = places[result["layer"]]
            axis.barh(at, min(share, 1.0), height=0.62, color=SHARES[result["bound"]], zorder=1.5)
            axis.text(min(share, 1.0) + 0.03, at, f"{100 * share:.0f}", va="center", fontsize=6.5, color=INK)


def _summary(results: list[dict[str, Any]]) -> str:
    """The mean over the dense groups and its worst layer, in a line."""
    peer = _main_peer(results)
    values = {r["layer"]: _ratios(r)[peer] for r in results if r["group"] in DENSE and peer in _ratios(r)}
    if not values:
        return ""
    worst = min(values, key=values.__getitem__)
    return f"all dense: mean {_mean(list(values.values())):.2f}, worst {values[worst]:.2f} ({worst})"


def _subtitle(document: dict[str, Any]) -> str:
    versions = document["versions"]
    names = {"torch": "PyTorch", "onednn": "oneDNN"}
    peers = ", ".join(f"{text} {versions[key]}" for key, text in names.items() if key in versions)
    peaks = ", ".join(
        f"{m['fma']['f32'] / 1e9:.0f} GFLOP/s on {m['threads']} thread{'s'[: m['threads'] > 1]}"
        for m in document["machines"]
        if m["fma"]
    )
    parts = [document["cpu"], f"convgrad {document['convgrad']} ({document['commit']})", peers]
    if peaks:
        parts.append(f"FMA peak {peaks}")
    return "  ·  ".join(part for part in [*parts, document["time"][:10]] if part)


def _legend(results: list[dict[str, Any]]) -> list[Any]:
    name = {"torch": "PyTorch", "onednn": "oneDNN Graph"}.get(_main_peer(results) or "", "the peer")
    handles: list[Any] = [Patch(color=AHEAD, label=f"faster than {name}"), Patch(color=BEHIND, label="slower")]
    if name == "PyTorch" and any("onednn" in _ratios(r) for r in results):
        handles.append(Line2D([], [], ls="", marker="D", ms=4, mfc="white", mec=OTHER, label="beside oneDNN Graph"))
    handles.append(Line2D([], [], color=INK, lw=0.8, ls=(0, (2, 2)), label="geometric mean of a group"))
    handles.append(Patch(color=SHARES["fma"], label="limit: peak of FMA, or of bf16 dot products"))
    handles.append(Patch(color=SHARES["copy"], label="limit: copy bandwidth"))
    return handles


def main() -> int:
    if len(sys.argv) != 3:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
