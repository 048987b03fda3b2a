"""Time PyTorch's convolution backward beside `convgrad.torch.install()`, layer by layer, on PyTorch's own threads.

    python benchmarks/routed.py --dtype f32,bf16 --layout NXC,NCX
    python benchmarks/routed.py --layers 'depthwise|grouped' --forward

Both are called through PyTorch, as autograd calls them, in alternating blocks of one process. The ratio is PyTorch's
time over ours. Every result is compared with PyTorch's first; nothing is timed that is wrong. The table says what the
policy "fast" takes; a gradient that it takes although it was slower here is marked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from layers import LAYERS, Layer
from run import geometric_mean, header_lines, pattern, progress_bar, table, words
from run import header as environment

import convgrad.torch
from convgrad.bench import timing
from convgrad.bench.torch import output_padding
from convgrad.spec import bind

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
WANTED = ("data", "weights")


@dataclass(frozen=True)
class Row:
    """One gradient of one layer: seconds of PyTorch and of ours, and whether the policy "fast" takes it."""

    layer: str
    group: str
    wanted: str
    dtype: str
    layout: str
    threads: int
    stock: float
    ours: float
    taken: bool
    note: str = ""

    @property
    def ratio(self) -> float:
        """PyTorch's time over ours."""
        return self.stock / self.ours


def call(layer: Layer, wanted: str, dtype: str, layout: str) -> tuple[tuple[Any, ...], int] | None:
    """The arguments of PyTorch's operator, and which of its results is wanted; None if there is no such call."""
    operation = layer.descriptor.operation("FWD_D", data_format=layout, dtype=dtype)
    problem = bind(operation.op, operation.inputs, operation.attributes).problem
    last = layout == "NXC"
    if last and problem.rank == 1:
        return None  # PyTorch has no such memory format in 1D
    order = (
        torch.contiguous_format if not last else torch.channels_last if problem.rank == 2 else torch.channels_last_3d
    )
    made = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        whole = torch.randint(-4, 5, shape, generator=made)
        return whole.to(DTYPES[dtype]).contiguous(memory_format=order)

    x = tensor(problem.n, problem.g * problem.cx, *problem.x)
    y = tensor(problem.n, problem.g * problem.cy, *problem.y)
    w = tensor(problem.g * problem.cy, problem.cx, *problem.w)
    first, grad = (y, x) if layer.transposed else (x, y)
    extra = output_padding(problem) if layer.transposed else (0,) * problem.rank
    how = (problem.stride, problem.pad, problem.dilation, layer.transposed, extra, problem.g)
    pick = WANTED.index(wanted) if wanted in WANTED else 0
    if wanted == "forward":
        return (first, w, None, *map(_listed, how)), 0
    mask = [i == pick for i in range(3)]
    return (grad, first, w, None, *map(_listed, how), mask), pick


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def error(args: tuple[Any, ...], wanted: str, pick: int) -> str:
    """What is wrong with our result; nothing if it is right.

    The inputs are small whole numbers, whose sums are exact in f32 in any order, so PyTorch's is the one right result.
    """
    function = operator(wanted)
    wide = [t.float() if isinstance(t, torch.Tensor) else t for t in args]
    right = picked(function(*wide), wanted, pick)
    with convgrad.torch.installed("all", forward=True):
        found = picked(function(*args), wanted, pick)
    return "" if torch.equal(found, right.to(found.dtype)) else "wrong: not timed"


def operator(wanted: str) -> Callable[..., Any]:
    name = "convolution" if wanted == "forward" else "convolution_backward"
    return getattr(torch.ops.aten, name).default


def picked(result: Any, wanted: str, pick: int) -> torch.Tensor:
    return result if wanted == "forward" else result[pick]


def alternate(function: Callable[[], Any], budget: float, blocks: int = 6) -> tuple[float, float]:
    """Seconds of PyTorch's and of our kernel: the middle of the blocks' least."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(blocks):
        for mine, times in enumerate(found):
            if mine:
                convgrad.torch.install("all", forward=True)
            end = time.perf_counter() + budget / (2 * blocks)
            function()
            runs = []
            while len(runs) < 3 or time.perf_counter() < end:
                begin = time.perf_counter()
                function()
                runs.append(time.perf_counter() - begin)
            times.append(min(runs))
            convgrad.torch.uninstall()
    return median(found[0]), median(found[1])


def measure(layer: Layer, wanted: str, dtype: str, layout: str, threads: int, budget: float) -> Row | None:
    found = call(layer, wanted, dtype, layout)
    if found is None:
        return None
    args, pick = found
    function = operator(wanted)
    wrong = error(args, wanted, pick)
    convgrad.torch.report(clear=True)
    with convgrad.torch.installed(forward=True):
        function(*args)
    taken = convgrad.torch.report(clear=True).taken == 1
    stock, ours = (float("nan"),) * 2 if wrong else alternate(lambda: function(*args), budget)
    return Row(layer.name, layer.group, wanted, dtype, layout, threads, stock, ours, taken, wrong)


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each gradient, then means."""
    head = ["layer", "group", "wanted", "dtype", "layout", "PyTorch ms", "ours ms", "ratio", "fast takes it", "note"]
    cells = []
    for row in rows:
        note = row.note or ("slower, and taken" if row.taken and row.ratio < 0.97 else "")
        numbers = [f"{row.stock * 1e3:.3f}", f"{row.ours * 1e3:.3f}", f"{row.ratio:.2f}"]
        took = "yes" if row.taken else "no"
        cells.append([row.layer, row.group, row.wanted, row.dtype, row.layout, *numbers, took, note])
    yield from table(head, cells)
    yield ""
    means = []
    right = [row for row in rows if not row.note]
    for dtype, layout, wanted, group in dict.fromkeys((r.dtype, r.layout, r.wanted, r.group) for r in right):
        some = [r for r in right if (r.dtype, r.layout, r.wanted, r.group) == (dtype, layout, wanted, group)]
        ratios = [r.ratio for r in some]
        kept = [r.ratio if r.taken else 1.0 for r in some]
        numbers = [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{geometric_mean(kept):.2f}"]
        means.append([dtype, layout, wanted, group, str(len(some)), *numbers])
    yield from table(["dtype", "layout", "wanted", "group", "layers", "mean", "worst", "mean with fast"], means)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=pattern, default=pattern(""), help="those whose name or group matches")
    parser.add_argument("--dtype", type=words(list(DTYPES)), default=["f32"], help="f32,bf16,f16")
    parser.add_argument("--layout", type=words(["NXC", "NCX"]), default=["NXC", "NCX"], help="NXC,NCX")
    parser.add_argument("--forward", action="store_true", help="the forward pass too")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads, which are ours too")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each line")
    parser.add_argument("--mb", type=int, help="images in a batch, in place of each layer's own")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    chosen = [layer for layer in LAYERS if args.layers.search(layer.name) or args.layers.search(layer.group)]
    if args.mb:
        chosen = [layer.with_batch(args.mb) for layer in chosen]
    wanted = [*WANTED, *(["forward"] if args.forward else [])]
    cases = list(product(chosen, wanted, args.dtype, args.layout))
    print(f"{len(cases)} gradients; measuring this machine takes some seconds ...", file=sys.stderr, flush=True)
    head = environment({args.threads: timing.measure_machine(args.threads)}, ["torch"])
    print("\n".join(header_lines(head)), flush=True)
    rows = []
    with progress_bar(len(cases)) as progress:
        for layer, which, dtype, layout in cases:
            progress(f"{layer.name} {which} {dtype} {layout}")
            row = measure(layer, which, dtype, layout, args.threads, args.budget)
            if row is not None:
                rows.append(row)
        progress("")
    print("\n".join(report(rows)))
    if args.json is not None:
        document = {**head, "results": [asdict(row) | {"ratio": row.ratio} for row in rows]}
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 1 if any(row.note for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
