"""Plans, and the machine code of kernels: as an earlier process has stored them, or made anew.

Triton has a cache of its own, but takes most of a second to be imported and to find something there. Code that is
stored here needs no Triton: its key has a digest of the sources that plan and compute, and Triton's version.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import store
from . import compile as compiler
from .driver import Map
from .plan.records import Launch, Plan
from .target import Target

if TYPE_CHECKING:
    from ..spec.problem import Problem

KNOWN = "3.6."  # the version of Triton of whose kernels the parameters are known
FORMAT = "gpu 1"
SETTINGS = ("TRITON_", "LLVM_", "DISABLE_", "NVPTX_")
"""Variables of the environment that begin so may change what Triton compiles,"""
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_LIBCUDA_PATH")
"""but for those that say where things are."""

# How Triton numbers the types of a tensor map's elements, where the driver numbers them otherwise.
_KINDS = {8: 10, 9: 8, 10: 9}


T = TypeVar("T")


class Code(NamedTuple):
    """A kernel that the driver can load and launch."""

    name: str
    warps: int
    shared: int  # bytes
    maps: tuple[Map, ...]  # of its descriptors
    binary: bytes


def plan(problem: Problem, target: Target, how: tuple[str, bool], make: Callable[[], Plan | T]) -> Plan | T:
    """The plan of a problem; `how` products are taken, and whether tensors are aligned. `make` plans anew."""
    key = _key("plan", repr(problem), repr(target), *map(str, how))
    stored = None if key is None else store.get(key)
    if stored is not None:
        # Nobody but this user can have written it, as machine code in the same place.
        known: Plan = pickle.loads(stored)
        return known
    found = make()
    if isinstance(found, Plan):
        _keep(key, pickle.dumps(found))
    return found


def find(launch: Launch, target: Target, aligned: bool) -> Code | Any:
    """The code of a launch's kernel; Triton's compiled kernel where its parameters are not known."""
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(SETTINGS) and k not in PLACES)
    kernel_of = replace(launch, programs=0)
    key = _key("code", version(), repr(kernel_of), target.arch, str(aligned), *settings)
    key = key if version().startswith(KNOWN) else None
    stored = None if key is None else store.get(key)
    if stored is not None:
        return _read(stored)
    kernel = compiler.build(launch, target, aligned)
    code = read(kernel, launch)
    if code is None:
        return kernel
    _keep(key, _written(code))
    return code


def read(kernel: Any, launch: Launch) -> Code | None:
    """What Triton has compiled, if it asks for nothing that is not known here."""
    meta = kernel.metadata
    maps = getattr(meta, "tensordesc_meta", None) or ()
    scratch = meta.global_scratch_size or meta.profile_scratch_size
    if not version().startswith(KNOWN) or scratch or meta.num_ctas != 1 or meta.launch_cooperative_grid:
        return None
    if len(maps) != len(launch.descriptors) or any(found is None or found["fp4_padded"] for found in maps):
        return None
    made = [
        Map(_KINDS.get(m["elem_type"], m["elem_type"]), m["elem_size"], tuple(m["block_size"]), m["swizzle"])
        for m in maps
    ]
    return Code(meta.name, meta.num_warps, meta.shared, tuple(made), kernel.asm["cubin"])


@lru_cache(maxsize=1)
def version() -> str:
    """The version of Triton, which is not imported for it."""
    spec = find_spec("triton")
    if spec is None or not spec.origin:
        return ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def _key(*parts: str) -> bytes | None:
    """The key of what is made of the sources and these parts; None if nothing is stored."""
    sources = None if store.folder() is None else digest()
    return None if sources is None else sha256("\0".join((FORMAT, sources, *parts)).encode()).digest()


def _keep(key: bytes | None, content: bytes) -> None:
    """Store something, unless the sources have changed since, so that nobody knows which this process has imported."""
    if key is not None and digest() == _digest_now():
        store.put(key, content)


def _sources() -> Iterator[Path]:
    """All that plans and code are made of, besides problems."""
    here = Path(__file__).parent
    yield from (here.parent / name for name in ("backend.py", "dtypes.py", "precision.py", "spec/problem.py"))
    yield from sorted(here.rglob("*.py"))


@lru_cache(maxsize=1)
def digest() -> str | None:
    """The digest of the sources as this process has found them first; None if they cannot be read."""
    return _digest_now()


def _digest_now() -> str | None:
    total = sha256()
    try:
        for path in _sources():
            content = path.read_bytes()
            total.update(f"{path.name} {len(content)}\n".encode() + content)
    except OSError:
        return None
    return total.hexdigest()


def _written(code: Code) -> bytes:
    head = {"name": code.name, "warps": code.warps, "shared": code.shared, "maps": code.maps}
    return json.dumps(head).encode() + b"\n" + code.binary


def _read(content: bytes) -> Code:
    head, _, binary = content.partition(b"\n")
    told = json.loads(head)
    maps = tuple(Map(kind, item, tuple(block), swizzle) for kind, item, block, swizzle in told["maps"])
    return Code(told["name"], told["warps"], told["shared"], maps, binary)
