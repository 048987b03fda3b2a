"""What users install: what is in it, what it says of itself, and that it works where nothing else of ours is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import llvmlite
import ml_dtypes
import msgspec
import numpy as np
import pytest
import rich
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

import convgrad

ROOT = Path(__file__).parents[1]
NAME = f"convgrad-{convgrad.__version__}"
WHEEL = f"{NAME}-py3-none-any.whl"
FOLDERS = (".github", "benchmarks", "docs", "examples", "src", "tests")
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
)
# What the package and its command need; what these need themselves lies beside them.
DEPENDENCIES = (np, ml_dtypes, llvmlite, msgspec, rich)


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    """What a command prints, in an environment that leads to no package of this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CONVGRAD"))}
    known = dict(capture_output=True, encoding="utf-8", errors="replace", check=False)
    done = subprocess.run(command, cwd=cwd, env=kept | settings, **known)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, target: str, folder: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, cwd=source)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, "sdist", folder)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    build(folder / NAME, "wheel", folder)
    return folder


@pytest.fixture(scope="module")
def metadata(dist):
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        return Metadata.from_email(wheel.read(f"{NAME}.dist-info/METADATA"), validate=True)


def files(*folders: Path) -> set[Path]:
    found = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_sources_are_whole(dist):
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {member.name.removeprefix(f"{NAME}/") for member in archive.getmembers()}
    here = {path.relative_to(ROOT).as_posix() for path in files(*(ROOT / folder for folder in FOLDERS))}
    assert names == {*here, *FILES, "PKG-INFO", ".gitignore"}


@pytest.mark.slow
def test_the_wheel_is_the_package_and_nothing_else(dist):
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        names = set(wheel.namelist())
        about = wheel.read(f"{NAME}.dist-info/WHEEL").decode()
        commands = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    inside = {path.relative_to(ROOT / "src").as_posix() for path in files(ROOT / "src" / "convgrad")}
    notes = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert "convgrad/py.typed" in inside
    assert names == inside | {f"{NAME}.dist-info/{note}" for note in notes}
    assert "Tag: py3-none-any" in about.splitlines()
    assert commands.split("\n", 1)[0] == "[console_scripts]"
    assert re.findall("^(.*) = (.*)$", commands, re.M) == [("convgrad", "convgrad.cli:main")]


@pytest.mark.slow
def test_a_checkout_builds_the_very_wheel_that_the_sources_build(dist, tmp_path):
    build(ROOT, "wheel", tmp_path)
    with zipfile.ZipFile(tmp_path / WHEEL) as ours, zipfile.ZipFile(dist / WHEEL) as theirs:
        assert {n: ours.read(n) for n in ours.namelist()} == {n: theirs.read(n) for n in theirs.namelist()}


@pytest.mark.slow
def test_it_says_what_it_is(metadata):
    assert (metadata.name, str(metadata.version)) == ("convgrad", convgrad.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Typing :: Typed" in metadata.classifiers
    needed = {canonicalize_name(r.name) for r in metadata.requires_dist if r.marker is None}
    assert needed == {"numpy", "ml-dtypes", "llvmlite"}


@pytest.mark.slow
def test_the_wheel_works_on_its_own(dist, tmp_path):
    home, away = tmp_path / "home", tmp_path / "away"
    away.mkdir()
    venv.create(home)
    names = ("Scripts/python.exe", "Scripts/convgrad.exe") if os.name == "nt" else ("bin/python", "bin/convgrad")
    python, command = (home / name for name in names)
    settings = {"CONVGRAD_CACHE_DIR": str(tmp_path / "cache")}
    # A pip that is there already is quicker than a second one.
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", dist / WHEEL, cwd=away)
    # No network: the dependencies are those of this process. Paths named in a .pth file come after what is installed.
    (site,) = home.rglob("site-packages")
    places = {str(Path(module.__file__).parents[1]) for module in DEPENDENCIES}
    (site / "dependencies.pth").write_text("\n".join(sorted(places)), encoding="utf-8")

    assert "right to the bit" in run(python, "-I", ROOT / "tests" / "smoke.py", cwd=away, **settings)
    assert run(python, "-m", "convgrad", "--version", cwd=away) == f"convgrad {convgrad.__version__}\n"
    assert "ConvTransposeBackwardWeights" in run(command, "ops", cwd=away)
    checked = run(command, "check", "g2ic10oc14_ih9kh3sh2ph1", "--json", cwd=away, **settings)
    assert checked.count('"passed"') >= 3, checked


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_names_this_version_and_license():
    citation = dict(re.findall(r"^([\w-]+): (.+)$", text("CITATION.cff"), re.M))
    assert citation["version"] == convgrad.__version__
    assert f'license = "{citation["license"]}"' in text("pyproject.toml")


def test_every_python_that_is_promised_is_tested():
    project, workflow = text("pyproject.toml"), text(".github/workflows/tests.yml")
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.M)
    assert re.findall(r"3\.\d+", matrix) == promised
    assert f'requires-python = ">={promised[0]}"' in project
