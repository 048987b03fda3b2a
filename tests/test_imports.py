"""One call, one direction: nothing imports upward, and importing convgrad costs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import convgrad

SOURCE = Path(convgrad.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}

# A file imports from lower layers and from its own package. What is not named here lies on top of all: graphs,
# command line, bridges to other libraries.
LAYERS = {
    "errors": 0,
    "dtypes": 0,
    "memory": 1,
    "host_team": 0,
    "precision": 1,
    "store": 2,
    "spec": 1,
    "bias": 2,
    "reference": 2,
    "backend": 2,
    "tensors": 3,
    "host": 3,
    "libraries": 4,
    "cpu": 4,
    "gpu": 4,
    "numpy_backend": 4,
    "engine": 5,
    "advice": 5,
    "explanation": 6,
    "repeats": 6,
    "torch": 6,
    "calls": 7,
    "functional": 8,
    "compat": 9,
}
TOP = 10
HEAVY = ("llvmlite", "torch", "jax", "triton")


def _part(module: str) -> str:
    """The file or package of convgrad that a module belongs to: `cpu` for `cpu.plan`."""
    return module.partition(".")[0]


@cache
def _imports(file: str) -> frozenset[tuple[str, bool]]:
    """What a file imports: modules of convgrad as `.cpu.plan`, others as they are; and whether on being imported."""
    tree = ast.parse(FILES[file].read_text())
    # Not on being imported: within a function, and under `if TYPE_CHECKING`.
    later = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.If)) for n in ast.walk(f)}
    package = file.split("/")[:-1]
    found = set()
    for node in ast.walk(tree):
        at_once = id(node) not in later
        if isinstance(node, ast.Import):
            found |= {(a.name.replace("convgrad", "", 1) or ".", at_once) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = ["", *package[: len(package) - node.level + 1], *base]
            elif base[0] == "convgrad":
                base = ["", *base[1:]]
            for alias in node.names:
                deeper = "/".join([*base[1:], alias.name])
                is_module = base[0] == "" and (f"{deeper}.py" in FILES or f"{deeper}/__init__.py" in FILES)
                found.add((".".join([*base, alias.name] if is_module else base), at_once))
    return frozenset(found)


@pytest.mark.parametrize("file", FILES)
def test_nothing_imports_upward(file):
    mine = _part(file.removesuffix(".py").replace("/", "."))
    layer = TOP + 1 if mine == "__init__" else LAYERS.get(mine, TOP)
    for module, _ in _imports(file):
        if module.startswith("."):
            theirs = _part(module[1:])
            if theirs == mine:
                continue
            below = LAYERS.get(theirs, TOP) < layer or (layer == TOP and theirs not in LAYERS)
            assert below, f"{file} imports {module[1:] or 'convgrad'}"


def test_modules_do_not_import_each_other_in_a_ring():
    def module_files(name: str) -> list[str]:
        path = name.replace(".", "/")
        return [f for f in (f"{path}.py", f"{path}/__init__.py") if f in FILES]

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " → ".join((*path, file))
        if file in done:
            return
        for module, at_once in _imports(file):
            if module.startswith(".") and at_once and module != ".":
                for other in module_files(module[1:]):
                    visit(other, (*path, file))
        done.add(file)

    done: set[str] = set()
    for file in FILES:
        visit(file, ())


def test_llvmlite_is_used_in_one_file():
    users = [file for file in FILES for module, _ in _imports(file) if module.startswith("llvmlite")]
    assert set(users) <= {"cpu/compile/llvm.py"}


def _alone(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_heavy_library():
    loaded = _alone("import sys, convgrad; print(*sys.modules)").split()
    assert not {module.partition(".")[0] for module in loaded} & set(HEAVY)


def test_graphs_are_there_when_they_are_used():
    code = "import sys, convgrad; print('convgrad.graph' in sys.modules, convgrad.graph.Graph.__name__)"
    assert _alone(code).split() == ["False", "Graph"]


def test_import_is_quick():
    # Time of the process's own, so that whatever else keeps the machine busy does not count. On an idle machine it is
    # the time that a user waits.
    code = "import time; start = time.process_time(); import convgrad; print(time.process_time() - start)"
    assert min(float(_alone(code)) for _ in range(5)) < 0.3


def test_the_version_is_one_that_tools_understand():
    assert all(part.isdigit() for part in convgrad.__version__.split(".")[:2])


def test_every_public_name_exists():
    for module in (convgrad, convgrad.compat, convgrad.spec):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None
