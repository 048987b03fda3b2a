"""Time what comes before the work: compiling, finding compiled code again, waking up, a tiny call's way to its kernel.

    python benchmarks/start.py --layers '^(dense|strided)$' --runs 5

Every run is two processes on an empty cache: the first compiles, the second finds the code on disk. Of each problem it
is the time of the first call less that of a later one. Results are compared with right ones first. A call after a rest
finds threads, and CPUs, asleep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import run
from layers import DENSE, LAYERS, Layer

import convgrad
from convgrad.spec import bind

REST = 0.05  # seconds
TINY = Layer("tiny", "dense", "mb1ic8oc8ih4kh3ph1", "some 0.1 MFLOP")


def worker(names: Sequence[str], setting: run.Setting) -> dict[str, Any]:
    """What a new process sees: the first call of all, then that of each other layer, then many of a tiny one."""
    chosen = [layer for name in names for layer in LAYERS if layer.name == name]
    calls = [_call(layer, setting) for layer in [*chosen, TINY]]
    extra, sums = [], []
    for call in calls:
        once, result = _timed(call)
        extra.append(once - min(_timed(call)[0] for _ in range(5)))
        sums.append(_sum(result))
    in_a_row = [_timed(calls[0])[0] for _ in range(20)]
    rested = [_timed_after(REST, calls[0]) for _ in range(10)]
    tiny = median(_timed(calls[-1])[0] for _ in range(20_000))
    return {
        "first": extra[0], "layers": extra[1:-1], "row": median(in_a_row), "rested": median(rested), "tiny": tiny,
        "sums": sums[:-1],
    }  # fmt: skip


def _call(layer: Layer, setting: run.Setting) -> Callable[[], run.Array]:
    operation = _operation(layer, setting)
    inputs = run.operands(operation, seed=len(layer.name))
    function = getattr(convgrad, operation.op.function)
    return lambda: function(*inputs, **operation.attributes)


def _operation(layer: Layer, setting: run.Setting) -> Any:
    form = run.DIRECTIONS[setting.direction]
    return layer.descriptor.operation(form, data_format=setting.layout, dtype=setting.dtype)


def _timed(call: Callable[[], run.Array]) -> tuple[float, run.Array]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _timed_after(rest: float, call: Callable[[], run.Array]) -> float:
    time.sleep(rest)
    return _timed(call)[0]


def _sum(result: run.Array) -> int:
    """A checksum; zeros of both signs are one number."""
    return zlib.crc32((result + result.dtype.type(0)).tobytes())


def right_sums(chosen: Sequence[Layer], setting: run.Setting, progress: Callable[[str], None]) -> list[int]:
    """Checksums of the right results."""
    sums = []
    for layer in chosen:
        progress(f"right result of {layer.name}")
        operation = _operation(layer, setting)
        inputs = run.operands(operation, seed=len(layer.name))
        binding = bind(operation.op, operation.inputs, operation.attributes)
        sums.append(_sum(np.ascontiguousarray(run.expected(operation, binding, inputs))))
    return sums


def start(names: Sequence[str], setting: run.Setting, cache: str) -> dict[str, Any]:
    """A worker in a new process."""
    words = [setting.direction, setting.dtype, setting.layout, str(setting.threads), *names]
    environment = {**os.environ, "CONVGRAD_CACHE_DIR": cache, "CONVGRAD_CACHE": "on"}
    command = [sys.executable, __file__, "--worker", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--worker"]:
        direction, dtype, layout, threads, *names = argv[1:]
        setting = run.Setting(direction, dtype, layout, int(threads))
        convgrad.set_num_threads(setting.threads)
        print(json.dumps(worker(names, setting)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--layers", type=run.pattern, metavar="REGEX", help="layers whose name or group matches (all dense ones)")
    add("--direction", choices=tuple(run.DIRECTIONS), default="data")
    add("--dtype", choices=tuple(run.DTYPES), default="f32")
    add("--layout", choices=run.LAYOUTS, default="NXC")
    add("--threads", type=int, default=run.timing.cpu_count())
    add("--runs", type=int, default=3, help="processes of each kind (3)")
    add("--json", type=Path, metavar="FILE", help="write all times there, in seconds")
    args = parser.parse_args(argv)
    setting = run.Setting(args.direction, args.dtype, args.layout, args.threads)
    chosen = [
        layer
        for layer in LAYERS
        if (args.layers is None and layer.group in DENSE)
        or (args.layers is not None and (args.layers.search(layer.name) or args.layers.search(layer.group)))
    ]
    if len(chosen) < 2:
        parser.error("--layers must match two layers or more: the first call of a process is one of its own")
    print(f"{setting}, {len(chosen)} layers: right results first, then {2 * args.runs} processes", flush=True)
    names = [layer.name for layer in chosen]
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with run.progress_bar(len(chosen) + 2 * args.runs) as progress:
        right = right_sums(chosen, setting, progress)
        for number in range(args.runs):
            with tempfile.TemporaryDirectory() as cache:
                for kind, results in found.items():
                    progress(f"run {number + 1}, {kind} cache")
                    results.append(start(names, setting, cache))
                    if results[-1]["sums"] != right:
                        print(f"WRONG results, {kind} cache: nothing is timed", file=sys.stderr)
                        return 1
    rows = []
    for i, name in enumerate(names[1:]):
        times = {kind: [1e3 * r["layers"][i] for r in results] for kind, results in found.items()}
        rows.append([name, *(f"{value:.1f}" for t in times.values() for value in (median(t), max(t)))])
    print(f"{setting}, milliseconds before the work, of {args.runs} processes: median and most")
    print("\n".join(run.table(["layer", "compiled", "most", "from disk", "most"], rows)))
    for kind, results in found.items():
        firsts = [1e3 * r["first"] for r in results]
        print(f"first call of a process, {kind} cache: median {median(firsts):.1f}, most {max(firsts):.1f} ms")
    row, rested = ([1e3 * r[kind] for results in found.values() for r in results] for kind in ("row", "rested"))
    print(
        f"a call of {names[0]} after {REST * 1e3:.0f} ms of rest: {min(rested):.2f} to {max(rested):.2f} ms; "
        f"in a row {min(row):.2f} to {max(row):.2f} ms"
    )
    tiny = [1e6 * r["tiny"] for results in found.values() for r in results]
    print(f"a repeated call on a tiny problem: {min(tiny):.1f} to {max(tiny):.1f} us in all")
    if args.json is not None:
        args.json.write_text(json.dumps({"setting": str(setting), "layers": names, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
