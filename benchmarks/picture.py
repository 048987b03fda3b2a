"""Draw the README's picture of the speed from the table in docs/benchmarks.md.

python benchmarks/picture.py             write docs/speed.svg
python benchmarks/picture.py --check     say whether it is current
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ROWS = (
    "dense, f32, channels last",
    "dense, f32, channels first",
    "dense, bf16, channels last",
    "dense, bf16, channels first",
    "dense, f16, channels last",
    "4 depthwise, f32, channels last",
    "4 depthwise, f32, channels first",
    "4 grouped, f32, channels last",
    "4 grouped, f32, channels first",
)
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 220, 70, 74, 38
LOW, HIGH = 0.5, 100.0
COLOURS = {"data gradient": "#20798f", "weight gradient": "#d2a22f"}
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def figures(page: str) -> dict[str, list[tuple[float, float]]]:
    """(mean, slowest layer) of the data and the weight gradient for each row of the table."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        pairs = [re.fullmatch(r"([\d.]+) \(([\d.]+)\)", cell) for cell in cells[1:3]]
        if all(pairs) and len(pairs) == 2:
            found[cells[0]] = [(float(p[1]), float(p[2])) for p in pairs if p]
    return found


def place(ratio: float) -> float:
    """Where a ratio lies on the axis."""
    share = math.log(ratio / LOW) / math.log(HIGH / LOW)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def draw(page: str) -> str:
    """The picture as SVG."""
    table = figures(page)
    height = TOP + ROW * len(ROWS) + 44
    bottom = TOP + ROW * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="16" y="24" font-size="15" font-weight="bold">PyTorch’s time divided by convgrad’s '
        "(logarithmic scale)</text>",
        '<text x="16" y="42" fill="#666">Gradients of real layers on 2 cores of an AMD EPYC (Zen 5), '
        "beside PyTorch 2.13. PyTorch has no fast f16.</text>",
        '<text x="280" y="62" fill="#666">bar: mean of the group; dot: its slowest layer</text>',
    ]
    x = 16
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="52" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="62">{name}</text>')
        x += 130
    for tick in TICKS:
        at = place(tick)
        weight = ' stroke="#222" stroke-width="1.5"' if tick == 1 else ' stroke="#ddd"'
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"{weight}/>')
        text = "1, as fast" if tick == 1 else f"{tick:g}"
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#666">{text}</text>')
    for index, row in enumerate(ROWS):
        y = TOP + ROW * index + 5
        label = re.sub(r"^\d+ ", "", row)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{label}</text>')
        for (mean, worst), colour in zip(table[row], COLOURS.values(), strict=True):
            start, end = sorted((place(1), place(mean)))
            parts.append(f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="12" fill="{colour}"/>')
            at = place(worst)
            parts.append(
                f'<line x1="{min(at, start):.1f}" y1="{y + 6}" x2="{start:.1f}" y2="{y + 6}" stroke="{colour}"/>'
            )
            parts.append(f'<circle cx="{at:.1f}" cy="{y + 6}" r="3.5" fill="#fff" stroke="#222"/>')
            parts.append(f'<text x="{end + 6:.1f}" y="{y + 10}" font-size="11">{mean:g}</text>')
            y += 14
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    picture = draw((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    path = DOCS / "speed.svg"
    if check:
        current = path.exists() and path.read_text(encoding="utf-8") == picture
        print(f"{path.name} is {'current' if current else 'old: run python benchmarks/picture.py'}")
        return 0 if current else 1
    path.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
