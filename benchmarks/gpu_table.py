"""The results of benchmarks/gpu.py as tables in Markdown, as docs/gpu.md has them.

    python benchmarks/gpu_table.py gpu.json             a table for each way of taking products
    python benchmarks/gpu_table.py gpu.json --dtype bf16

A cell has convgrad's microseconds and, in brackets, how many times as long cuDNN took. The last rows are the geometric
mean of these ratios, the worst of them, and the share of the limit that each side reaches: the larger of what the
arithmetic takes at the rate of a large matrix product and what the bytes take at the rate of a copy, in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    ("data", "NXC"),
    ("data", "NCX"),
    ("weights", "NXC"),
    ("weights", "NCX"),
    ("forward", "NXC"),
    ("forward", "NCX"),
)

Row = dict[str, Any]


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def read(paths: Sequence[str]) -> list[Row]:
    """The results of several files, of which later ones replace what earlier ones have."""
    found: dict[tuple[str, ...], Row] = {}
    for path in paths:
        for row in json.loads(Path(path).read_text(encoding="utf-8"))["results"]:
            found[tuple(row[key] for key in ("layer", "direction", "dtype", "layout"))] = row
    return list(found.values())


def table(results: Sequence[Row]) -> Iterator[str]:
    """The lines of the table of one type."""
    columns = [c for c in COLUMNS if any((r["direction"], r["layout"]) == c for r in results)]
    found = {(r["layer"], r["direction"], r["layout"]): r for r in results}
    yield "| layer | " + " | ".join(f"{direction}, {layout}" for direction, layout in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for layer in dict.fromkeys(r["layer"] for r in results):
        cells = [found.get((layer, *column)) for column in columns]
        told = [f"{c['ours'] * 1e6:.0f} ({c['theirs'] / c['ours']:.2f})" if c else "" for c in cells]
        yield f"| {layer} | {' | '.join(told)} |"
    for name, tell in ROWS.items():
        of_columns = [[r for r in results if (r["direction"], r["layout"]) == column] for column in columns]
        yield f"| **{name}** | {' | '.join(tell(rows) for rows in of_columns)} |"


ROWS = {
    "mean of ratios": lambda rows: f"{mean([r['theirs'] / r['ours'] for r in rows]):.2f}",
    "worst": lambda rows: f"{min(r['theirs'] / r['ours'] for r in rows):.2f}",
    "share of the limit": lambda rows: f"{mean([r['limit'] / r['ours'] for r in rows]):.0%}",
    "cuDNN's share": lambda rows: f"{mean([r['limit'] / r['theirs'] for r in rows]):.0%}",
    "largest error": lambda rows: f"{max(r['error'] for r in rows):.0e}",
    "cuDNN's largest error": lambda rows: f"{max(r['their_error'] for r in rows):.0e}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="+", help="of benchmarks/gpu.py; later files replace what earlier ones have")
    parser.add_argument("--dtype", default="", help="only this one")
    asked = parser.parse_args()
    results = read(asked.json)
    for dtype in dict.fromkeys(row["dtype"] for row in results):
        if asked.dtype in ("", dtype):
            print(f"{dtype}:\n", *table([row for row in results if row["dtype"] == dtype]), "", sep="\n")


if __name__ == "__main__":
    main()
