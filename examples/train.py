"""Train six small networks with PyTorch's own convolution gradients and with convgrad's: losses and times side by side.

    python examples/train.py                                        all six, f32, both memory formats
    python examples/train.py --models resnet unet --dtype f32 bf16
    python examples/train.py --models mobilenet --report            how long each layer takes
    python examples/train.py --threads 4 --json train.json --png train.png
    python examples/train.py --device cuda --batch 256 --dtype f32 bf16
    python examples/train.py --quick                                a test of seconds; its times mean little

The networks are plain PyTorch (`models.py`); all that changes between the two is `convgrad.torch.installed()`. bf16 and
f16 are those of `torch.autocast`, f16 with a GradScaler. PyTorch's own f16 is slow, so it is asked for by name.

Times are medians of single steps; the two take turns, some steps each, in one process on the same threads. The column
"conv. backward" is the share of the step that PyTorch's operator takes, in either way. No time is shown where a result
is wrong, and the exit code is 1 then (2 after wrong usage, 130 after Ctrl-C, which ends with what was done so far).
Steps that allocate much vary with what the system does to give memory, in both ways; the quartiles tell. On a GPU, a
small step takes as long as the host takes to launch it, and `--batch` makes it larger; both take products of f32 in
TF32 there, unless `--no-tf32` is given.

What counts as right:

Both trainings begin with the same weights and see the same data; what differs is the order in which sums are taken, so
rounding differs, and training amplifies that. By how much, PyTorch shows itself: its distance from the same training in
float64, the larger of two runs, with all threads and with another number, or on a GPU with and without trials of all
algorithms. convgrad's loss curve may lie at most 8 times
as far from that of float64. Two amplified roundings are like two draws from one distribution about 0: if they were
normal, one would be 8 times as large as the largest of two others once in a hundred times, while that largest is a
maximum over all steps as well, which is hardly ever so small. A wrong gradient is off by orders of magnitude.

A loss is one number, so the gradients of the first step are compared too, each parameter by the norm of its distance
from float64: at most 8 times PyTorch's in f32; at most twice in bf16 and f16, where most of the distance comes from
rounding what is passed between layers, which both do alike. Where PyTorch's distance is small by chance, the middle one
of all parameters counts, in proportion to the norm of the gradient.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from models import MODELS, Model
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import convgrad
import convgrad.torch

AUTOCAST = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}
FORMATS = {"contiguous": "NCX", "channels-last": "NXC"}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}  # PyTorch has none for one spatial axis
WAYS = ("stock", "convgrad")

BATCHES = 4  # that a training sees in turns
CURVE_ROOM = 8.0
GRADIENT_ROOM = {"f32": 8.0, "bf16": 2.0, "f16": 2.0}


class Curve(NamedTuple):
    """The losses of a training, and the gradients of its first step in float64."""

    losses: list[float]
    gradients: dict[str, Tensor]


class Training:
    """A network in training: weights, data and optimizer, in an element type ("f64" too) and a memory format."""

    def __init__(self, model: Model, dtype: str, layout: str, given: argparse.Namespace) -> None:
        batch, size, width = model.small if given.quick else (given.batch or model.batch, model.size, model.width)
        kind = torch.float64 if dtype == "f64" else torch.float32
        torch.manual_seed(0)
        self.device = given.device
        self.net = model.make(width, model.classes).to(self.device, kind)
        random = torch.Generator().manual_seed(1)
        self.data = [model.data(batch, size, model.classes, random) for _ in range(BATCHES)]
        self.data = [(x.to(self.device, kind), labels.to(self.device)) for x, labels in self.data]
        if layout == "channels-last":
            order = LAST[model.rank]
            self.net = self.net.to(memory_format=order)
            self.data = [(x.contiguous(memory_format=order), labels) for x, labels in self.data]
        self.autocast = AUTOCAST.get(dtype)
        self.rate = model.rate
        self.start = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.restart()

    def restart(self) -> None:
        """Go back to the first step."""
        self.net.load_state_dict(self.start)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate, momentum=0.9)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=1024.0, enabled=self.autocast is torch.float16)
        self.steps = 0

    def gradients(self) -> float:
        """The loss of the next batch; its gradients are left in the parameters."""
        x, labels = self.data[self.steps % BATCHES]
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            loss = F.cross_entropy(self.net(x), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        return float(loss.detach())

    def step(self) -> float:
        """One step; the loss before it."""
        loss = self.gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        return loss

    def walk(self, steps: int) -> Iterator[int | Curve]:
        """Train from the first step on; says how many steps are done, and at last the curve."""
        self.restart()
        losses = [self.step()]
        # The optimizer has used the gradients but not changed them.
        found = {name: value.grad.double() for name, value in self.net.named_parameters() if value.grad is not None}
        while len(losses) < steps:
            yield len(losses)
            losses.append(self.step())
        yield Curve(losses, found)

    def curve(self, steps: int) -> Curve:
        """The same at once."""
        *_, curve = self.walk(steps)
        assert isinstance(curve, Curve)
        return curve


def told(what: str, training: Training, steps: int) -> Generator[str, None, Curve]:
    """Train, and say after each step how far it is."""
    yield what
    began = time.perf_counter()
    walk = training.walk(steps)
    while not isinstance(done := next(walk), Curve):
        left = (time.perf_counter() - began) / done * (steps - done)
        yield f"{what}, {done} of {steps} steps, {left:.0f} s left"
    return done


def way(name: str, given: argparse.Namespace) -> AbstractContextManager[None]:
    """What computes convolution gradients within the block."""
    return nullcontext() if name == "stock" else convgrad.torch.installed(given.policy, forward=given.forward)


@contextmanager
def otherwise(given: argparse.Namespace) -> Iterator[None]:
    """Another way in which PyTorch computes, so that it rounds other sums."""
    if given.device == "cuda":
        torch.backends.cudnn.benchmark = False
    else:
        torch.set_num_threads(1 if given.threads > 1 else 2)
    try:
        yield
    finally:
        if given.device == "cuda":
            torch.backends.cudnn.benchmark = True
        torch.set_num_threads(given.threads)


@dataclass
class Row:
    """What one training comes to: distances of the losses from float64's; times only if nothing is wrong."""

    model: str
    dtype: str
    format: str
    losses: dict[str, list[float]]
    distance: dict[str, float]
    wrong: list[str]
    ms: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None  # stock's time over convgrad's
    quartiles: tuple[float, float] | None = None  # of the ratios of blocks that follow each other
    share: dict[str, float] = field(default_factory=dict)  # of the step, in convolution backward
    layers: list[dict[str, Any]] = field(default_factory=list)
    report: str = ""


def distance(curve: Curve, reference: Curve) -> float:
    """How far a loss curve comes from another."""
    a, b = (torch.tensor(found.losses, dtype=torch.float64) for found in (curve, reference))
    return float((a - b).abs().max())  # NaN if one is


def faults(reference: Curve, stock: Sequence[Curve], ours: Curve, dtype: str) -> list[str]:
    """What is wrong with a training, if anything."""
    found = []
    # A loss is known to the rounding of a float32.
    bound = CURVE_ROOM * max(distance(curve, reference) for curve in stock) + 2.0**-23 * max(reference.losses)
    if not distance(ours, reference) <= bound:  # NaN is not
        found.append(f"the losses are {distance(ours, reference):.1e} from float64's, and may be {bound:.1e}")
    errors, norms = {}, {}
    for name, exact in reference.gradients.items():
        norms[name] = float(exact.norm())
        errors[name] = max(float((curve.gradients[name] - exact).norm()) for curve in stock)
    middle = median(errors[name] / norms[name] for name in norms if norms[name])
    far = {}
    for name, exact in reference.gradients.items():
        error = float((ours.gradients[name] - exact).norm())
        bound = GRADIENT_ROOM[dtype] * max(errors[name], middle * norms[name])
        if not error <= bound:
            far[name] = f"{error:.1e} from float64's, may be {bound:.1e}"
    if far:
        name, text = next(reversed(far.items()))  # where backward went wrong first
        found.append(f"{len(far)} of {len(norms)} gradients are wrong, such as {name}: {text}")
    return found


def timed(training: Training, given: argparse.Namespace) -> tuple[dict[str, float], list[float]]:
    """The median time of a step in milliseconds for both ways, which take turns, and the ratios of their blocks."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    ratios = []
    gc.collect()
    gc.disable()
    end = time.perf_counter() + given.seconds
    try:
        while len(ratios) < 2 or time.perf_counter() < end:
            middle = {}
            for name in WAYS:
                block = []
                with way(name, given):
                    training.step()  # to warm up: the other way left its own data in the caches
                    for _ in range(3):
                        begin = time.perf_counter()
                        training.step()
                        block.append(1e3 * (time.perf_counter() - begin))
                        if block[0] > 1e3:
                            break
                times[name] += block
                middle[name] = median(block)
            ratios.append(middle["stock"] / middle["convgrad"])
    finally:
        gc.enable()
    return {name: median(found) for name, found in times.items()}, ratios


def finish() -> None:
    """Wait for the GPU, if it is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Watch(TorchDispatchMode):
    """Within the block, the time of each call of PyTorch's convolution backward, in milliseconds by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, list[float]] = {}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; time it if it is the one."""
        if call is not torch.ops.aten.convolution_backward.default:
            return call(*args, **(kwargs or {}))
        finish()
        begin = time.perf_counter()
        result = call(*args, **(kwargs or {}))
        finish()
        took = 1e3 * (time.perf_counter() - begin)
        x, w, _, stride, padding, dilation, transposed, _, groups, _ = args[1:]
        words = ["transposed" if transposed else "", *("x".join(map(str, t.shape)) for t in (x, w))]
        for letter, values, plain in (("s", stride, 1), ("p", padding, 0), ("d", dilation, 1), ("g", [groups], 1)):
            words += [f"{letter}{values[0]}"] * (values[0] != plain)  # all axes of these networks have the same
        self.layers.setdefault(" ".join(filter(None, words)), []).append(took)
        return result


def profiled(
    training: Training, given: argparse.Namespace, ms: Mapping[str, float]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The share of a step in convolution backward for both ways, and the times of each layer."""
    watches, whole = {name: Watch() for name in WAYS}, dict.fromkeys(WAYS, 0.0)
    rounds = 8 if given.report else 1 if given.quick or max(ms.values()) > 1e3 else 3
    for _ in range(rounds):
        for name in WAYS:
            with way(name, given):
                training.step()
                with watches[name]:
                    begin = time.perf_counter()
                    training.step()
                    whole[name] += 1e3 * (time.perf_counter() - begin)
    rows = []
    for layer, times in watches["stock"].layers.items():
        found: dict[str, Any] = {"layer": layer, "calls": len(times) // rounds}
        for name in WAYS:
            found[name] = median(watches[name].layers[layer])
        rows.append(found)
    rows.sort(key=lambda row: -row["calls"] * row["stock"])
    return {name: sum(map(sum, watches[name].layers.values())) / whole[name] for name in WAYS}, rows


Case = tuple[Model, str, str]
"""A network, its element type and its memory format."""


def measure(case: Case, references: dict[str, Curve], given: argparse.Namespace) -> Iterator[str | Row]:
    """Train and time one network; says what is being done, and at last what it came to."""
    model, dtype, layout = case
    steps = given.steps or (3 if given.quick or dtype == "f16" else 12)
    key = f"{model.name} {steps}"
    if key not in references:
        references[key] = yield from told("training in float64", Training(model, "f64", "contiguous", given), steps)
    training = Training(model, dtype, layout, given)
    convgrad.torch.report(clear=True)
    curves = {}
    for name in WAYS:
        with way(name, given):
            curves[name] = yield from told(f"training, {name}", training, steps)
    stock = [curves["stock"]]
    if dtype != "f16":  # which takes too long
        with otherwise(given):
            stock.append((yield from told("training, stock otherwise", training, steps)))
    reference = references[key]
    far = {"stock": max(distance(c, reference) for c in stock), "convgrad": distance(curves["convgrad"], reference)}
    losses = {"float64": reference.losses} | {name: curve.losses for name, curve in curves.items()}
    row = Row(model.name, dtype, layout, losses, far, faults(reference, stock, curves["convgrad"], dtype))
    if not row.wrong:
        yield f"timing for {given.seconds:g} s"
        row.ms, ratios = timed(training, given)
        row.ratio = row.ms["stock"] / row.ms["convgrad"]
        ordered = sorted(ratios)
        row.quartiles = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        yield "profiling"
        row.share, row.layers = profiled(training, given, row.ms)
    row.report = str(convgrad.torch.report(clear=True))
    yield row


COLUMNS = {"model": 11, "type": 6, "format": 15, "stock ms": 10, "convgrad ms": 13, "ratio": 8, "quartiles": 14,
           "conv. backward": 19, "loss": 17, "from float64": 20, "": 4}  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row of the table. A wrong one has no times."""
    curve = row.losses["convgrad"]
    both = [f"{row.distance[name]:.1e}" for name in WAYS]
    end = [f"{curve[0]:.3f} -> {curve[-1]:.3f}", ", ".join(both), "NO" if row.wrong else "yes"]
    if row.wrong or row.ratio is None or row.quartiles is None:
        return [row.model, row.dtype, row.format, "", "", "", "", "", *end]
    times = [f"{row.ms[name]:.1f}" for name in WAYS]
    low, high = row.quartiles
    share = f"{row.share['stock']:.0%}, {row.share['convgrad']:.0%}"
    return [row.model, row.dtype, row.format, *times, f"{row.ratio:.2f}", f"{low:.2f} - {high:.2f}", share, *end]


class Screen:
    """The table as it grows, and what is being done: by rich on a terminal that is wide enough, else lines."""

    def __init__(self, total: int) -> None:
        self.total, self.finished, self.live = total, 0, None
        self.terminal = sys.stdout.isatty()
        wide = shutil.get_terminal_size().columns >= sum(COLUMNS.values())
        if self.terminal and wide and importlib.util.find_spec("rich"):
            from rich.console import Group
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Table

            self.table = Table(*COLUMNS)
            parts = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
            self.bar = Progress(*parts)
            self.task = self.bar.add_task("", total=total)
            self.live = Live(Group(self.table, self.bar), refresh_per_second=4)

    def __enter__(self) -> Screen:
        if self.live is not None:
            self.live.start()
        else:
            print(self.line(COLUMNS), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.bar.update(self.task, description="")
            self.live.stop()

    @staticmethod
    def line(texts: Sequence[str] | Mapping[str, int]) -> str:
        """A row in plain text."""
        return "".join(f"{text:{width}}" for text, width in zip(texts, COLUMNS.values(), strict=True)).rstrip()

    def doing(self, what: str) -> None:
        """Say what is being done."""
        if self.live is not None:
            self.bar.update(self.task, description=what)
        elif self.terminal:
            print(f"\r{self.finished} of {self.total}: {what} ...\033[K", end="", flush=True)

    def add(self, row: Row) -> None:
        """Add a row."""
        self.finished += 1
        if self.live is not None:
            self.table.add_row(*cells(row), style="red" if row.wrong else None)
            self.bar.update(self.task, completed=self.finished)
        else:
            print(("\r" if self.terminal else "") + self.line(cells(row)), flush=True)


def layers(row: Row) -> str:
    """How long each layer's gradients take, the one with most of stock's time first."""
    width = max((len(found["layer"]) for found in row.layers), default=5)
    lines = [f"\n{row.model} {row.dtype} {row.format}: data, weights and bias gradients, ms for each call"]
    lines += [f"{'layer':{width}} {'calls':>6} {'stock':>9} {'convgrad':>9} {'ratio':>7}"]
    for found in row.layers:
        ratio = found["stock"] / found["convgrad"]
        lines.append(
            f"{found['layer']:{width}} {found['calls']:6} {found['stock']:9.2f} {found['convgrad']:9.2f} {ratio:7.2f}"
        )
    return "\n".join([*lines, row.report])


def cases(given: argparse.Namespace) -> list[Case]:
    """What is trained, in order."""
    models = [model for model in MODELS if model.name in given.models]
    return [
        (model, dtype, layout)
        for dtype in given.dtype
        for model in models
        for layout in given.format
        if layout == "contiguous" or model.rank in LAST
    ]


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for."""
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [model.name for model in MODELS]
    told = "; ".join(f"{model.name}: {model.about}" for model in MODELS)
    add("--models", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of the networks: {told}")
    add("--dtype", nargs="+", choices=AUTOCAST, default=["f32"], help="element types (f32)")
    add("--format", nargs="+", choices=FORMATS, default=[*FORMATS], help="memory formats (both; 1D has the first)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="threads (%(default)s)")
    add("--steps", type=int, metavar="N", help="steps of the loss curves (12; 3 for f16)")
    add("--batch", type=int, metavar="N", help="images, volumes or sounds in a step (1 to 16, as the network is)")
    add("--seconds", type=float, default=4.0, help="how long each network is timed, at least (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where (%(default)s)")
    add("--no-tf32", action="store_true", help="on a GPU, products of f32 are not taken in TF32")
    add("--policy", choices=("fast", "all"), default="fast", help="what convgrad takes (%(default)s)")
    add("--forward", action="store_true", help="have convgrad compute the forward pass as well")
    add("--report", action="store_true", help="show the time of each layer, and what computed it")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--png", type=Path, metavar="FILE", help="draw losses and times there")
    add("--quick", action="store_true", help="tiny networks and few steps")
    given = parser.parse_args(words)
    for name in ("threads", "steps", "batch"):
        value = getattr(given, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    given.seconds = 0.1 if given.quick else given.seconds
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here")
    if not cases(given):
        parser.error("PyTorch has no channels-last format for one spatial axis: audio is contiguous")
    if given.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Train everything, with a table."""
    given = options(words)
    torch.set_num_threads(given.threads)
    convgrad.set_num_threads(given.threads)
    place = f"{given.threads} threads"
    if given.device == "cuda":
        torch.backends.cudnn.benchmark = True
        allowed = torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not given.no_tf32
        place = f"{torch.cuda.get_device_name()}, TF32 {'allowed' if allowed else 'not allowed'}"
    versions = f"convgrad {convgrad.__version__}, PyTorch {torch.__version__}, {place}"
    print(f"{versions}, policy {given.policy}{', forward too' if given.forward else ''}; ratio: stock over convgrad\n")
    rows: list[Row] = []
    references: dict[str, Curve] = {}
    todo, interrupted = cases(given), False
    try:
        with Screen(len(todo)) as screen:
            for case in todo:
                for found in measure(case, references, given):
                    if isinstance(found, Row):
                        rows.append(found)
                        screen.add(found)
                    else:
                        screen.doing(f"{case[0].name} {case[1]} {case[2]}: {found}")
    except KeyboardInterrupt:
        interrupted = True
        print(f"\nInterrupted: {len(rows)} of {len(todo)} trainings are done.")
    wrong = [f"{row.model} {row.dtype} {row.format}: {text}" for row in rows for text in row.wrong]
    if given.report:
        print("\n".join(layers(row) for row in rows))
    print(f"\n{sum(not row.wrong for row in rows)} of {len(rows)} trainings as close to float64's as they must be.")
    print("\n".join(wrong), end="\n" if wrong else "")
    document = {"versions": versions, "machine": platform.machine(), "rows": [asdict(row) for row in rows]}
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if given.png is not None and rows:
        from train_plot import draw

        draw(document, given.png)
    return 130 if interrupted else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
