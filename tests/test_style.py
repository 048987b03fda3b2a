"""Limits of size in the engines, to keep them readable: short functions of few parameters, records of few fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import convgrad

SOURCE = Path(convgrad.__file__).parent
# Kernels for a GPU are one function each, which says everything that it is given.
FILES = {
    path.relative_to(SOURCE).as_posix(): path
    for path in [*sorted((SOURCE / "cpu").rglob("*.py")), *sorted((SOURCE / "gpu").rglob("*.py"))]
    if path.parent != SOURCE / "gpu" / "kernels"
}
LINES, PARAMETERS, FIELDS = 60, 6, 15


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES:
                yield f"{node.name} has {lines} lines"


def wide_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in given if name not in ("self", "cls")])
            if count > PARAMETERS:
                yield f"{node.name} takes {count} parameters"


def large_records(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            count = sum(isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation) for n in node.body)
            if count > FIELDS:
                yield f"{node.name} has {count} fields"


@pytest.mark.parametrize("file", FILES)
def test_the_engine_is_written_in_small_pieces(file):
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    found = [*long_functions(tree), *wide_functions(tree), *large_records(tree)]
    assert not found, f"{file}: {'; '.join(found)}"


def test_what_is_too_large_is_found():
    body = "\n".join(f"    a{i}: int" for i in range(FIELDS + 1))
    assert list(large_records(ast.parse(f"class A:\n{body}\n"))) == ["A has 16 fields"]
    assert list(wide_functions(ast.parse("def f(a, b, c, d, e, f, *, g): ..."))) == ["f takes 7 parameters"]
    lines = "\n".join("    pass" for _ in range(LINES))
    assert list(long_functions(ast.parse(f"def f():\n{lines}\n"))) == ["f has 61 lines"]
