"""Limits of size in the engines, to keep them readable: short functions of few parameters, which read little of a
plan, and records of few fields.
"""

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
    if SOURCE / "gpu" / "kernels" not in path.parents
}
LINES, PARAMETERS, FIELDS, MEMBERS = 60, 6, 15, 10


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


def members_read(function: ast.FunctionDef) -> set[str]:
    """What a function reads of plans: of `plan`, of a new one that is `made`, or of `self.plan` and the like."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr != "plan":
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in ("plan", "made"):
                found.add(node.attr)
    return found


def knowing_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(found := members_read(node)) > MEMBERS:
            yield f"{node.name} reads {len(found)} members of a plan: {', '.join(sorted(found))}"


def large_records(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            count = sum(isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation) for n in node.body)
            if count > FIELDS:
                yield f"{node.name} has {count} fields"


@pytest.mark.parametrize("file", FILES)
def test_the_engine_is_written_in_small_pieces(file):
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    found = [*long_functions(tree), *wide_functions(tree), *knowing_functions(tree), *large_records(tree)]
    assert not found, f"{file}: {'; '.join(found)}"


def test_what_is_too_large_is_found():
    body = "\n".join(f"    a{i}: int" for i in range(FIELDS + 1))
    assert list(large_records(ast.parse(f"class A:\n{body}\n"))) == ["A has 16 fields"]
    assert list(wide_functions(ast.parse("def f(a, b, c, d, e, f, *, g): ..."))) == ["f takes 7 parameters"]
    reads = " + ".join([*(f"plan.a{i}.b" for i in range(6)), *(f"k.plan.b{i}" for i in range(5)), "k.plan.a0.c"])
    names = "a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4"
    assert list(knowing_functions(ast.parse(f"def f(): {reads}"))) == [f"f reads 11 members of a plan: {names}"]
    lines = "\n".join("    pass" for _ in range(LINES))
    assert list(long_functions(ast.parse(f"def f():\n{lines}\n"))) == ["f has 61 lines"]
