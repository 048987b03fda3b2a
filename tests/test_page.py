"""The reference page is what the table says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from convgrad.spec import OPS, RULES
from convgrad.spec.dialects import DIALECTS
from convgrad.spec.page import page

PAGE = Path(__file__).parents[1] / "docs" / "ops.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/ops.md is old: run `make docs`"


def test_the_page_says_everything():
    text = page()
    for op in OPS.values():
        section = text.partition(f"\n## {op.kind}\n")[2].partition("\n## ")[0]
        for word in (*(a.name for a in op.inputs), op.output.name, op.function):
            assert word in section
        for attr in op.attrs:
            assert f"`{attr.name}`" in section or (attr.origin == "extension" and f"`{attr.name}`" in text)
            assert all(f"`{choice}`" in text for choice in attr.choices)
    for name in (*RULES, *DIALECTS):
        assert name in text


def test_the_page_prints():
    command = [sys.executable, "-W", "error", "-m", "convgrad.spec.page"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode("utf-8").replace("\r\n", "\n") == page()
