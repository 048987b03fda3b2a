"""What the README shows is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_run_and_print_what_they_show():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), "README.md", "exec"), {})
    # The message is shown after the example that prints it, indented and broken into lines.
    (printing,) = (block for block in blocks if "print(" in block)
    shown = README.partition(printing)[2].partition("##")[0].partition("```")[2]
    assert shown.split() == printed.getvalue().split()


def test_every_file_that_is_named_exists():
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`?\b((?:tests|docs|examples|benchmarks)/[\w/.]+\.\w+)", text):
            assert (ROOT / name).exists(), f"{page} names {name}"
        for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(name).exists(), f"{page} links to {name}"
