"""Time convgrad beside PyTorch and oneDNN Graph on real layers: a table, JSON and a picture.

    python benchmarks/run.py --dtype f32 --layout NXC,NCX --direction data,weights --json results.json --png results.png

Every result is compared with a right one first; nothing is timed that is wrong. docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from layers import DENSE, GROUPS, LAYERS, Layer

import convgrad
from convgrad import reference
from convgrad.bench import onednn, timing
from convgrad.bench import torch as pytorch
from convgrad.dtypes import DTYPES, name_of
from convgrad.spec import Binding, bind
from convgrad.spec.descriptors import Operation

DIRECTIONS = {"data": "BWD_D", "weights": "BWD_W", "forward": "FWD_D"}
LAYOUTS = ("NXC", "NCX")
PEERS: dict[str, Any] = {"torch": pytorch, "onednn": onednn}

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Setting:
    """What one column of the results has in common."""

    direction: str
    dtype: str
    layout: str
    threads: int

    def __str__(self) -> str:
        return f"{self.direction} {self.dtype} {self.layout} {self.threads}T"


@dataclass(frozen=True)
class Result:
    """One layer in one setting. Times are in seconds; a peer that did not run has a note instead."""

    layer: str
    group: str
    setting: Setting
    problem: str
    flops: int
    bytes: int
    first: float  # the first call: planning and compiling, unless the code was on disk
    times: dict[str, timing.Timing]
    limit: float  # the least time that the machine allows
    bound: str  # what sets it: "fma", "dot", "tile" or "copy"
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """convgrad's time."""
        return self.times["convgrad"].least

    @property
    def share(self) -> float:
        """How much of what the machine can do is done."""
        return self.limit / self.seconds

    def ratio(self, peer: str) -> float | None:
        """How many times as long a peer takes."""
        return self.times[peer].least / self.seconds if peer in self.times and "convgrad" in self.times else None


class WrongError(Exception):
    """A result that is not the right one."""


def operands(operation: Operation, seed: int) -> list[Array]:
    """Whole numbers from -4 to 4: every product and sum is exact in f32, so there is one right result in any order."""
    random = np.random.default_rng(seed)
    return [random.integers(-4, 5, d.shape, dtype=np.int8).astype(DTYPES[d.dtype].numpy) for d in operation.inputs]


def expected(operation: Operation, binding: Binding, inputs: Sequence[Array]) -> Array:
    """The right result: PyTorch's in f32 where it has the call, for it is quick; else the reference's."""
    problem, kind = binding.problem, operation.op.kind
    if pytorch.available() is not None or pytorch.refusal(kind, problem) is not None:
        return certain(operation, binding, inputs)
    wide = pytorch.run(kind, operation.attributes, [a.astype(np.float32) for a in inputs])
    with np.errstate(over="ignore"):
        return wide.astype(DTYPES[problem.out_dtype].numpy)


def certain(operation: Operation, binding: Binding, inputs: Sequence[Array]) -> Array:
    """The right result by the reference, in float64 and rounded once."""
    problem = binding.problem
    given = {arg.role: array for arg, array in zip(operation.op.inputs, inputs, strict=False)}
    views = {role: reference.canonical(given[role], problem, role) for role in problem.given}
    wide = np.empty(operation.shape, np.float64)
    reference.canonical(wide, problem, problem.wanted)[...] = reference.compute(problem, views, oracle=True)
    with np.errstate(over="ignore"):
        return wide.astype(DTYPES[problem.out_dtype].numpy)


def check(found: Array, right: Array) -> None:
    """convgrad's result must be the right one, bit for bit."""
    if found.shape != right.shape or found.dtype != right.dtype:
        raise WrongError(f"{found.dtype} {found.shape} instead of {right.dtype} {right.shape}")
    wrong = np.count_nonzero(found != right)
    if wrong:
        at = tuple(int(i) for i in np.argwhere(found != right)[0])
        raise WrongError(f"{wrong} of {right.size} values, at {at} {found[at]} instead of {right[at]}")


def check_peer(found: Array, right: Array) -> None:
    """A peer may round sums on the way: half of the digits must be right."""
    a, b = found.astype(np.float64), right.astype(np.float64)
    off = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1.0))
    digits = DTYPES[name_of(right.dtype) or "f32"].digits
    if not off <= 2.0 ** -(digits / 2):
        raise WrongError(f"relative error {off:.2g}")


def measure(
    layer: Layer,
    setting: Setting,
    peers: Sequence[str],
    pace: timing.Pace,
    machine: timing.Machine,
    probe: timing.Probe,
) -> Result:
    """Check and time one layer in one setting."""
    operation = layer.descriptor.operation(
        DIRECTIONS[setting.direction], data_format=setting.layout, dtype=setting.dtype
    )
    binding = bind(operation.op, operation.inputs, operation.attributes)
    problem = binding.problem
    inputs = operands(operation, seed=len(layer.name))
    right = expected(operation, binding, inputs)
    function = getattr(convgrad, operation.op.function)
    limit, bound = machine.bound(problem.flops, problem.bytes, setting.dtype)
    notes: dict[str, str] = {}
    callables: dict[str, Callable[[], object]] = {}

    def ours() -> Array:
        return function(*inputs, **operation.attributes)  # type: ignore[no-any-return]

    began = time.perf_counter()
    found = ours()
    first = time.perf_counter() - began
    if not np.array_equal(found, right):
        # Before convgrad is blamed, the slow and plain judge is heard.
        right = certain(operation, binding, inputs)
    try:
        check(found, right)
        callables["convgrad"] = ours
    except WrongError as error:
        notes["convgrad"] = f"wrong: {error}"
    for peer in peers:
        try:
            callables[peer] = _peer(peer, operation, binding, inputs, right)
        except (onednn.OneDNNError, ValueError, RuntimeError) as error:
            notes[peer] = str(error).splitlines()[0]
        except WrongError as error:
            notes[peer] = f"wrong: {error}"
    del found, right
    # Nobody asks how long the peers take for what convgrad gets wrong.
    times = timing.alternate(callables, pace, probe.steady) if "convgrad" in callables else {}
    return Result(
        layer=layer.name,
        group=layer.group,
        setting=setting,
        problem=str(problem),
        flops=problem.flops,
        bytes=problem.bytes,
        first=first,
        times=times,
        limit=limit,
        bound=bound,
        notes=notes,
    )


def _peer(
    name: str, operation: Operation, binding: Binding, inputs: Sequence[Array], right: Array
) -> Callable[[], object]:
    """A peer's callable for the same operation on the same arrays, its result checked."""
    kind = operation.op.kind
    if name == "torch":
        compiled = pytorch.Compiled(kind, operation.attributes, inputs)
        check_peer(compiled.array(), right)
        return compiled
    problem = binding.problem
    if kind == "ConvTransposeBackwardData" and max(problem.dilation) > 1:
        raise ValueError("oneDNN 3.2 drops the dilation")
    out = np.empty(operation.shape, inputs[0].dtype)
    partition = onednn.Compiled(kind, operation.attributes, inputs, out)
    check_peer(partition(), right)
    return partition


def run(
    layers: Sequence[Layer],
    settings: Sequence[Setting],
    peers: Sequence[str],
    pace: timing.Pace,
    machines: dict[int, timing.Machine],
    progress: Callable[[str], None],
) -> list[Result]:
    """Measure every layer in every setting."""
    results = []
    probes: dict[int, timing.Probe] = {}
    for setting in settings:
        count = setting.threads
        set_threads(count, peers)
        if count not in probes:
            probes[count] = timing.Probe.of(count)
        for layer in layers:
            progress(f"{layer.name} {setting}")
            results.append(measure(layer, setting, peers, pace, machines[count], probes[count]))
    progress("")
    return results


def set_threads(count: int, peers: Sequence[str]) -> None:
    convgrad.set_num_threads(count)
    for peer in peers:
        PEERS[peer].set_threads(count)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Mean:
    """The geometric mean of the ratios to a peer over a group of layers, and the worst of them."""

    group: str
    setting: Setting
    peer: str
    count: int
    mean: float
    worst: float
    worst_layer: str


def means(results: Sequence[Result], peers: Sequence[str]) -> list[Mean]:
    """Means for every group that was measured, then for all dense ones together."""
    found = []
    wanted = [*((group, (group,)) for group in GROUPS), ("all dense", DENSE), ("all", tuple(GROUPS))]
    for setting in dict.fromkeys(r.setting for r in results):
        for (group, members), peer in product(wanted, peers):
            ratios = {
                r.layer: ratio
                for r in results
                if r.setting == setting and r.group in members and (ratio := r.ratio(peer)) is not None
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                mean = geometric_mean(list(ratios.values()))
                found.append(Mean(group, setting, peer, len(ratios), mean, ratios[worst], worst))
    return found


def report(results: Sequence[Result], peers: Sequence[str]) -> Iterator[str]:
    """The results as lines of text: one table per setting, then the means."""
    for setting in dict.fromkeys(r.setting for r in results):
        rows = [r for r in results if r.setting == setting]
        yield ""
        what = {"data": "data gradient", "weights": "weight gradient"}.get(setting.direction, setting.direction)
        yield f"{what}, {setting.dtype}, {setting.layout}, {setting.threads} thread{'s'[: setting.threads > 1]}"
        yield from table(
            ["layer", "group", "ms", "median", *(f"x {p}" for p in peers), "GFLOP/s", "of limit", "notes"],
            [_row(r, peers) for r in rows],
        )
        yield ""
        yield from table(
            ["group", *(c for p in peers for c in (f"x {p}", "layers", "worst", "layer"))],
            _mean_rows(means(rows, peers), peers),
        )
    yield from _scaling(results)


def _row(result: Result, peers: Sequence[str]) -> list[str]:
    head = [result.layer, result.group]
    if "convgrad" not in result.times:
        return [*head, *["-"] * (2 + len(peers) + 2), result.notes.get("convgrad", "")]
    ratios = [_number(result.ratio(p), ".2f") for p in peers]
    said = [f"{p}: {text}" for p, text in result.notes.items()]
    slow = timing.restless(result.times)
    notes = "; ".join([*([f"restless: {slow}"] if slow else []), *said])
    return [
        *head,
        f"{1e3 * result.seconds:.3f}",
        f"{1e3 * result.times['convgrad'].middle:.3f}",
        *ratios,
        f"{result.flops / result.seconds / 1e9:.1f}",
        f"{100 * result.share:.0f}% {result.bound}",
        notes[:60],
    ]


def _mean_rows(found: Sequence[Mean], peers: Sequence[str]) -> list[list[str]]:
    rows = []
    for group in dict.fromkeys(m.group for m in found):
        row = [group]
        for peer in peers:
            mean = next((m for m in found if m.group == group and m.peer == peer), None)
            row += [f"{mean.mean:.2f}", str(mean.count), f"{mean.worst:.2f}", mean.worst_layer] if mean else ["-"] * 4
        rows.append(row)
    return rows


def _scaling(results: Sequence[Result]) -> Iterator[str]:
    """How much more threads gain, where several numbers of them were measured."""
    by_key = {(r.layer, r.setting): r for r in results if "convgrad" in r.times}
    for many in dict.fromkeys(r.setting for r in results):
        if many.threads == 1:
            continue
        one = Setting(many.direction, many.dtype, many.layout, 1)
        gains = {
            layer: by_key[layer, one].seconds / r.seconds
            for (layer, setting), r in by_key.items()
            if setting == many and (layer, one) in by_key
        }
        if gains:
            worst = min(gains, key=gains.__getitem__)
            yield ""
            yield f"{many} over 1T: {geometric_mean(list(gains.values())):.2f}, least {gains[worst]:.2f} ({worst})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell, empty ones left out; numbers to the right."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    head, rows = [head[i] for i in kept], [[row[i] for i in kept] for row in rows]
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    right = [all(re.fullmatch(r"[-\d.]+%?( \w+)?|", row[i]) for row in rows) for i in range(len(head))]
    for number, row in enumerate(cells):
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        yield "  ".join(parts).rstrip()
        if number == 0:
            yield "  ".join("-" * w for w in widths)


def header(machines: dict[int, timing.Machine], peers: Sequence[str]) -> dict[str, Any]:
    """What a reader must know to trust a figure: where and with what it was measured."""
    machine = next(iter(machines.values()))
    versions = {name: metadata.version(name) for name in ("numpy", "llvmlite")}
    versions |= {"python": platform.python_version()}
    versions |= {peer: PEERS[peer].version() for peer in peers}
    return {
        "cpu": machine.cpu,
        "system": f"{platform.system()} {platform.release()}",
        "convgrad": convgrad.__version__,
        "commit": commit(),
        "versions": versions,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machines": [asdict(m) for m in machines.values()],
    }


def commit() -> str:
    """The commit of this checkout, with a plus sign if files differ from it."""
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.stdout.strip()


def header_lines(head: dict[str, Any]) -> Iterator[str]:
    yield f"{head['cpu']}, {head['system']}, {head['time']}"
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    yield f"convgrad {head['convgrad']} ({head['commit']}), {versions}"
    for m in head["machines"]:
        if m["fma"]:
            peaks = f"FMA peak {m['fma']['f32'] / 1e9:.0f} GFLOP/s f32 (one thread {m['fma_single']['f32'] / 1e9:.0f})"
        else:
            peaks = "FMA peak unknown"
        if m["bf16_dot"]:
            peaks += f", bf16 dot products {m['bf16_dot'] / 1e9:.0f}"
        if m["bf16_tiles"]:
            peaks += f", bf16 tiles {m['bf16_tiles'] / 1e9:.0f}"
        copies = ", ".join(f"{s / 2**20:g} MB {speed / 1e9:.0f}" for s, speed in sorted(m["copies"].items()))
        yield f"{m['threads']} thread{'s'[: m['threads'] > 1]}: {peaks}; copies in GB/s: {copies}"


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call at the beginning of each step; a bar if rich is there and somebody watches, else lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        Console = None
    if Console is not None and sys.stderr.isatty():
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # Drawn once per step only: a thread that redraws would take time from the cores that are measured.
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
            task = bar.add_task("", total=total)
            steps = -1

            def draw(text: str) -> None:
                nonlocal steps
                steps += 1
                bar.update(task, completed=steps, description=text)
                bar.refresh()

            yield draw
        return
    began, count, said = time.monotonic(), 0, 0.0

    def say(text: str) -> None:
        nonlocal count, said
        now = time.monotonic()
        # Often enough to see that it goes on, seldom enough not to flood a log.
        if text and (count == 0 or now - said > 10):
            left = (now - began) / count * (total - count) if count else 0.0
            remaining = f", {left:.0f} s left" if count else ""
            print(f"[{count + 1}/{total}{remaining}] {text}", file=sys.stderr, flush=True)
            said = now
        count += 1

    yield say


def words(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A reader of lists of words, as in data,weights."""

    def read(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        for word in found:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} must be one of {', '.join(choices)}")
        return list(dict.fromkeys(found))

    return read


def counts(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of thread counts, as 2 or 1,2")
    return list(dict.fromkeys(found))


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--layers", type=pattern, metavar="REGEX", help="layers whose name, group or source matches")
    add("--dtype", type=words(tuple(DTYPES)), default=["f32"], help="f32,bf16,f16,f64 (f32)")
    add("--layout", type=words(LAYOUTS), default=list(LAYOUTS), help="NXC,NCX (both)")
    add("--direction", type=words(tuple(DIRECTIONS)), default=["data", "weights"], help="data,weights,forward")
    add("--threads", type=counts, default=[timing.cpu_count()], help="as 2, or 1,2 to see the gain (all CPUs)")
    add("--peers", type=words((*PEERS, "none")), default=list(PEERS), help="torch,onednn or none (both)")
    add("--mb", type=int, metavar="N", help="N images in every batch, as in training (some milliseconds' worth)")
    add("--budget", type=float, default=2.0, help="seconds for one layer in one setting (2)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--png", type=Path, metavar="FILE", help="draw the results there")
    add("--quick", action="store_true", help="the first layer of each group, a short time each")
    add("--list", action="store_true", help="print the layers and stop")
    args = parser.parse_args(argv)
    if args.budget <= 0:
        parser.error("--budget must be above 0")
    chosen = [
        layer
        for layer in LAYERS
        if args.layers is None or any(args.layers.search(t) for t in (layer.name, layer.group, layer.source))
    ]
    if not chosen:
        parser.error(f"--layers {args.layers.pattern!r} matches no layer; --list shows them")
    if args.mb is not None:
        if args.mb < 1:
            parser.error("--mb must be above 0")
        chosen = [layer.with_batch(args.mb) for layer in chosen]
    if args.quick:
        chosen = list({layer.group: layer for layer in reversed(chosen)}.values())[::-1]
        args.budget = min(args.budget, 0.4)
    args.chosen = chosen
    if args.png is not None:
        import plot  # noqa: F401  A missing matplotlib is better found before an hour of timing than after.
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.list:
        rows = [[layer.name, layer.group, layer.text, layer.source] for layer in args.chosen]
        print("\n".join(table(["layer", "group", "descriptor", "source"], rows)))
        return 0
    peers = []
    for peer in args.peers:
        reason = None if peer == "none" else PEERS[peer].available()
        if reason:
            print(f"without {peer}: {reason}", file=sys.stderr)
        elif peer != "none":
            peers.append(peer)
    settings = [
        Setting(direction, dtype, layout, count)
        for dtype, direction, layout, count in product(args.dtype, args.direction, args.layout, args.threads)
    ]
    machines = {count: timing.measure_machine(count) for count in args.threads}
    head = header(machines, peers)
    print("\n".join(header_lines(head)), flush=True)
    pace = timing.Pace(budget=args.budget)
    others = timing.OtherWork()
    with progress_bar(len(args.chosen) * len(settings)) as progress:
        results = run(args.chosen, settings, peers, pace, machines, progress)
    share = others.share()
    print("\n".join(report(results, peers)))
    if told := others.told():
        print(f"\n{told}")
    document = {
        **head,
        "other_work": share,
        "results": [asdict(r) for r in results],
        "means": [asdict(m) for m in means(results, peers)],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if args.png is not None:
        from plot import draw

        draw(document, args.png)
    wrong = [r for r in results if "convgrad" in r.notes]
    for result in wrong:
        print(f"WRONG {result.layer} {result.setting}: {result.notes['convgrad']}\n  {result.problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
