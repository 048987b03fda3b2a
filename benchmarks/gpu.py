"""Time gradients on a GPU beside PyTorch's, which are cuDNN's: a table, JSON and a picture.

    python benchmarks/gpu.py --dtype bf16,f32 --layout NXC,NCX --direction data,weights --json gpu.json --png gpu.png

Every result is compared with PyTorch's in float64 first, on small whole numbers, to the bit; what is wrong is not
timed. Both sides are timed by turns, by events of the device, with the second cache emptied before each run: whoever is
timed first on a cool GPU would look faster. NumPy, ml_dtypes, PyTorch and Triton are all that is needed, and for the
picture matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_layers import LAYERS, Layer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

DTYPES = {"bf16": "bfloat16", "f16": "float16"} | dict.fromkeys(("f32", "tf32", "ieee", "tf32x3", "bf16x6"), "float32")
DIRECTIONS = ("data", "weights", "forward")


@dataclass(frozen=True)
class Result:
    """A layer in one setting: times in seconds, and what the machine could do at best."""

    layer: str
    kind: str
    direction: str
    dtype: str
    layout: str
    ours: float
    theirs: float
    limit: float
    kernel: str
    error: float  # of random data, relative to float64; theirs beside it
    their_error: float

    @property
    def ratio(self) -> float:
        """How many times as long PyTorch takes."""
        return self.theirs / self.ours


def hindrance() -> str:
    """Why nothing can be timed here."""
    for library in ("torch", "triton"):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch finds no CUDA device here"


class Bench:
    """The GPU of this machine, and how things are timed on it."""

    def __init__(self, rounds: int) -> None:
        import torch

        self.torch, self.rounds = torch, rounds
        self.cold = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.copy = self._copy_rate()
        self.peaks: dict[str, float] = {}

    def times(self, functions: Sequence[Callable[[], Any]]) -> list[float]:
        """The median time of each function, by turns."""
        found: list[list[float]] = [[] for _ in functions]
        for function in functions:
            for _ in range(3):
                function()
        for _ in range(self.rounds):
            for function, times in zip(functions, found, strict=True):
                self.cold.zero_()
                start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                # A stream that is kept busy hides the time that the host takes to launch.
                self.torch.cuda._sleep(200_000)
                start.record()
                function()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop) / 1e3)
        return [statistics.median(times) for times in found]

    def _copy_rate(self) -> float:
        source = self.torch.empty(1 << 30, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        return 2 * source.numel() / self.times([lambda: target.copy_(source)])[0]

    def peak(self, dtype: str) -> float:
        """Multiplications and additions in a second, by a large matrix product of PyTorch."""
        if dtype not in self.peaks:
            kind = getattr(self.torch, DTYPES[dtype])
            self.precision(dtype)
            a, b = (self.torch.randn(8192, 8192, device="cuda", dtype=kind) for _ in range(2))
            self.peaks[dtype] = 2 * 8192**3 / self.times([lambda: a @ b])[0]
        return self.peaks[dtype]

    def precision(self, dtype: str) -> None:
        """The same precision of f32 on both sides."""
        import convgrad

        convgrad.set_float32_precision(dtype if dtype in convgrad.precision.PRECISIONS else "default")
        self.torch.backends.cudnn.allow_tf32 = self.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"


class Case:
    """A layer in one setting, with its tensors."""

    def __init__(self, bench: Bench, layer: Layer, direction: str, dtype: str, layout: str) -> None:
        self.bench, self.layer, self.direction, self.dtype, self.layout = bench, layer, direction, dtype, layout
        torch, rank = bench.torch, len(layer.space)
        self.how = tuple([value] * rank for value in (layer.stride, layer.padding, layer.dilation))
        weights = (layer.filters, layer.channels // layer.groups)
        if layer.transposed:
            weights = (layer.channels, layer.filters // layer.groups)
        self.x = self.tensor((layer.images, layer.channels, *layer.space))
        self.w = self.tensor((*weights, *[layer.kernel] * rank))
        with torch.no_grad():
            # In the layout that is timed: PyTorch's own result of a layer in 1D lies as it likes.
            self.y = self.tensor(self.forward(self.x, self.w).shape)

    def tensor(self, shape: Sequence[int]) -> Any:
        """A tensor of the layer in its layout, its values not set."""
        torch = self.bench.torch
        made = torch.empty(shape, dtype=getattr(torch, DTYPES[self.dtype]), device="cuda")
        order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
        if self.layout == "NXC" and order is not None:
            return made.contiguous(memory_format=order)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if self.layout == "NXC" else made

    def fill(self, whole: bool) -> None:
        """New values: small whole numbers, whose sums are exact, or random ones."""
        for tensor in (self.x, self.w, self.y):
            if whole:
                tensor.random_(-2, 3)
            else:
                tensor.normal_()

    def forward(self, x: Any, w: Any) -> Any:
        """The layer itself, by PyTorch."""
        layer = self.layer
        output = [0] * len(layer.space)
        how = (*self.how, layer.transposed, output, layer.groups)
        return self.bench.torch.ops.aten.convolution(x, w, None, *how)

    def theirs(self, x: Any, w: Any, y: Any) -> Any:
        """The result by PyTorch."""
        if self.direction == "forward":
            return self.forward(x, w)
        layer, data = self.layer, self.direction == "data"
        how = (*self.how, layer.transposed, [0] * len(layer.space), layer.groups, [data, not data, False])
        return self.bench.torch.ops.aten.convolution_backward(y, x, w, None, *how)[0 if data else 1]

    def judged(self) -> Any:
        """The result by PyTorch in float64; trying its ways out would take longer than the result."""
        self.bench.torch.backends.cudnn.benchmark = False
        try:
            return self.theirs(*(t.double() for t in (self.x, self.w, self.y)))
        finally:
            self.bench.torch.backends.cudnn.benchmark = True

    def ours(self) -> Any:
        """The result by convgrad, in memory that is poisoned first, and what computes it."""
        from convgrad.torch.plans import Geometry, Result, make_step

        layer, torch = self.layer, self.bench.torch
        role = {"forward": "y", "data": "x", "weights": "w"}[self.direction]
        like = {"x": self.x, "w": self.w, "y": self.y}[role]
        out = torch.full_like(like, math.nan)
        tensors = {"x": self.x, "w": self.w, "y": self.y} | {role: out}
        if layer.transposed:  # what PyTorch calls the input is y of the geometry
            tensors["x"], tensors["y"] = tensors["y"], tensors["x"]
            role = {"x": "y", "y": "x"}.get(role, role)
        result = Result(tuple(out.shape), out.stride(), out.dtype)
        geometry = Geometry(*(tuple(values) for values in self.how), layer.groups)
        given = {r: t for r, t in tensors.items() if r != role}
        step = make_step(role, given, None, result, geometry)
        return out, lambda: step.run(tensors["x"], tensors["w"], tensors["y"]), step

    def result(self) -> Result | str:
        """Check, then time; or what is wrong."""
        torch, bench = self.bench.torch, self.bench
        out, run, step = self.ours()
        exact = self.dtype != "tf32"  # the others keep small whole numbers
        self.fill(whole=exact)
        run()
        expected = self.judged().to(out.dtype)
        if exact and not torch.equal(out, expected):
            return f"{int((out != expected).sum())} of {out.numel()} results are wrong"
        self.fill(whole=False)
        errors = []
        right = self.judged()
        run()
        for found in (out, self.theirs(self.x, self.w, self.y)):
            errors.append(float((found.double() - right).norm() / right.norm()))
        del right, expected
        ours, theirs = bench.times([run, lambda: self.theirs(self.x, self.w, self.y)])
        problem = step.problem
        limit = max(problem.flops / bench.peak(self.dtype), problem.bytes / bench.copy)
        plan = getattr(step.execute, "plan", None)
        kernel = getattr(plan, "kernel", step.backend)
        setting = (self.direction, self.dtype, self.layout)
        return Result(self.layer.name, self.layer.kind, *setting, ours, theirs, limit, kernel, *errors)


def compile_kernels(case: tuple[Layer, tuple[str, str, str]]) -> None:
    """Compile what a case needs, which Triton keeps on disk; what fails will fail again where it is told."""
    layer, setting = case
    bench = Bench.__new__(Bench)
    bench.torch = importlib.import_module("torch")
    bench.precision(setting[1])
    with contextlib.suppress(Exception):
        Case(bench, layer, *setting).ours()
    bench.torch.cuda.empty_cache()


def line(result: Result) -> str:
    """A row of the table."""
    shares = [f"{result.limit / time:6.1%}" for time in (result.ours, result.theirs)]
    return (
        f"{result.layer:30} {result.direction:8} {result.dtype:5} {result.layout:4} {result.ours * 1e6:9.1f}"
        f" {result.theirs * 1e6:9.1f} {result.ratio:6.2f} {shares[0]} {shares[1]}  {result.kernel:14}"
        f" {result.error:.1e} {result.their_error:.1e}"
    )


HEAD = (
    f"{'layer':30} {'gradient':8} {'type':5} {'':4} {'ours us':>9} {'cuDNN us':>9} {'ratio':>6} {'ours':>6}"
    f" {'theirs':>6}  {'kernel':14} errors: ours, theirs"
)


def summary(results: Sequence[Result]) -> list[str]:
    """Geometric mean and worst layer of each setting."""
    lines = []
    for setting in dict.fromkeys((r.direction, r.dtype, r.layout) for r in results):
        ratios = {r.layer: r.ratio for r in results if (r.direction, r.dtype, r.layout) == setting}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        worst = min(ratios, key=lambda name: ratios[name])
        told = f"mean {mean:.2f}, worst {ratios[worst]:.2f} ({worst}), {len(ratios)} layers"
        lines.append(f"{' '.join(setting):24} {told}")
    return lines


def draw(results: Sequence[Result], path: str) -> None:
    """A picture: a row for each layer, the ratio of times in each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = list(dict.fromkeys((r.direction, r.dtype, r.layout) for r in results))
    names = list(dict.fromkeys(r.layer for r in results))
    figure, axes = plt.subplots(figsize=(9, 1 + 0.32 * len(names)))
    for setting in settings:
        found = [r for r in results if (r.direction, r.dtype, r.layout) == setting]
        axes.plot([r.ratio for r in found], [names.index(r.layer) for r in found], "o", ms=5, label=" ".join(setting))
    axes.axvline(1, color="#222222", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("cuDNN's time over ours")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write(results: Sequence[Result], bench: Bench, path: str) -> None:
    """The results as JSON, with what they were measured on."""
    torch = bench.torch
    device = {"device": torch.cuda.get_device_name(), "copy": bench.copy, "peaks": bench.peaks}
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    document = {**device, **versions, "results": [asdict(result) for result in results]}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bf16,f32", help="of bf16, f16, f32; of f32 as tf32, tf32x3, bf16x6, ieee")
    parser.add_argument("--layout", default="NXC,NCX")
    parser.add_argument("--direction", default="data,weights", help="of data, weights and forward")
    parser.add_argument("--layers", default="", help="only those whose name or kind contains one of these")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", default="")
    parser.add_argument("--png", default="")
    asked = parser.parse_args()
    if reason := hindrance():
        print(f"benchmarks/gpu.py needs a GPU: {reason}", file=sys.stderr)
        return 2
    import torch

    torch.backends.cudnn.benchmark = True
    bench = Bench(asked.rounds)
    words = asked.layers.split(",")
    layers = [layer for layer in LAYERS if any(word in layer.name or word in layer.kind for word in words)]
    settings = [
        (direction, dtype, layout)
        for dtype in asked.dtype.split(",")
        for layout in asked.layout.split(",")
        for direction in asked.direction.split(",")
    ]
    if asked.jobs > 1:
        cases = [(layer, setting) for setting in settings for layer in layers]
        with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
            for at, _ in enumerate(pool.imap_unordered(compile_kernels, cases), 1):
                print(f"compiled {at} of {len(cases)}", end="\r", file=sys.stderr, flush=True)
    results: list[Result] = []
    wrong, begin, count = 0, time.perf_counter(), len(layers) * len(settings)
    print(f"{torch.cuda.get_device_name()}, copies at {bench.copy / 1e12:.2f} TB/s\n{HEAD}")
    for at, (setting, layer) in enumerate(((s, layer) for s in settings for layer in layers), 1):
        bench.precision(setting[1])
        try:
            found: Result | str = Case(bench, layer, *setting).result()
        except Exception as error:  # what fails is a line of the table, and the next layer is timed
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, str):
            wrong += 1
            print(f"{layer.name:30} {' '.join(setting)}: {found}", flush=True)
        else:
            results.append(found)
            print(line(found), flush=True)
            if asked.json:  # each time, so that a run that is cut off has what it measured
                write(results, bench, asked.json)
        torch.cuda.empty_cache()
        left = (time.perf_counter() - begin) / at * (count - at)
        print(f"{at} of {count}, {left:.0f} s left", end="\r", file=sys.stderr, flush=True)
    print(*summary(results), sep="\n")
    if asked.png and results:
        draw(results, asked.png)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
