"""The machine code of kernels: as Triton compiles it, or as an earlier process has stored it.

Triton has a cache of its own, but takes most of a second to be imported and to find something there. Code that is
stored here needs no Triton: its key has a digest of the kernels' sources, and Triton's version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .. import store
from . import compile as compiler
from .driver import Map
from .plan.records import Launch
from .target import Target

KNOWN = "3.6."  # the version of Triton of whose kernels the parameters are known
FORMAT = "gpu code 1"
SETTINGS = ("TRITON_", "LLVM_", "DISABLE_", "NVPTX_")
"""Variables of the environment that begin so may change what Triton compiles,"""
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_LIBCUDA_PATH")
"""but for those that say where things are."""

# How Triton numbers the types of a tensor map's elements, where the driver numbers them otherwise.
_KINDS = {8: 10, 9: 8, 10: 9}


class Code(NamedTuple):
    """A kernel that the driver can load and launch."""

    name: str
    warps: int
    shared: int  # bytes
    maps: tuple[Map, ...]  # of its descriptors
    binary: bytes


def find(launch: Launch, target: Target, aligned: bool) -> Code | Any:
    """The code of a launch's kernel; Triton's compiled kernel where its parameters are not known."""
    key = _key(launch, target, aligned)
    stored = None if key is None else store.get(key)
    if stored is not None:
        return _read(stored)
    kernel = compiler.build(launch, target, aligned)
    code = read(kernel, launch)
    if code is None:
        return kernel
    if key is not None and digest() == _digest_now():
        store.put(key, _written(code))
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


def _key(launch: Launch, target: Target, aligned: bool) -> bytes | None:
    """What the code depends on; None if it is not to be stored."""
    sources = None if store.folder() is None or not version().startswith(KNOWN) else digest()
    if sources is None:
        return None
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(SETTINGS) and k not in PLACES)
    parts = (FORMAT, version(), sources, repr(replace(launch, programs=0)), target.arch, str(aligned), *settings)
    return sha256("\0".join(parts).encode()).digest()


def _sources() -> Iterator[Path]:
    """All that code is made of, besides launches."""
    here = Path(__file__).parent
    yield here / "compile.py"
    yield from sorted((here / "kernels").rglob("*.py"))


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
