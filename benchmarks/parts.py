"""Whether a training step with convgrad costs what its parts cost: the threads of two libraries may disturb each other.

    python benchmarks/parts.py                                       the six networks of examples/, f32, both formats
    python benchmarks/parts.py --models resnet unet --dtype bf16

The parts are measured alone. All convolution backward calls of one step are recorded, and then called one after another
with nothing in between, by PyTorch's kernels and by ours, in turns. What is left of PyTorch's own step, when its calls
are taken away, stays as it is. So a step with convgrad should take PyTorch's step, less PyTorch's calls, plus ours; the
column "more" is what it takes beyond that. Memory that a step asks for afresh is given by the system at its own pace,
in both ways: repeat a row before you believe a few percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from run import header as environment
from run import header_lines, progress_bar, table
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models import MODELS, Model
from train import AUTOCAST, FORMATS, WAYS, Training, cases, timed, way

from convgrad.bench import timing

Call = tuple[Any, ...]
"""The arguments of one convolution backward."""


class Recorder(TorchDispatchMode):
    """Within the block, the arguments of each convolution backward, as copies with the same strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; keep what it was given if it is the one."""
        if call is torch.ops.aten.convolution_backward.default:
            self.calls.append(tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args))
        return call(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step and of its convolution backward calls alone, of PyTorch and with convgrad."""

    model: str
    dtype: str
    format: str
    step: dict[str, float]
    calls: dict[str, float]

    @property
    def expected(self) -> float:
        """What a step with convgrad should take."""
        return self.step["stock"] - self.calls["stock"] + self.calls["convgrad"]

    @property
    def more(self) -> float:
        """What it takes beyond that, as a part of it."""
        return self.step["convgrad"] / self.expected - 1


def alone(calls: Sequence[Call], given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds for all calls of a step, one after another, in both ways by turns."""
    function = torch.ops.aten.convolution_backward.default
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    end = time.perf_counter() + given.seconds / 2
    while len(times["stock"]) < 6 or time.perf_counter() < end:
        for name in WAYS:
            with way(name, given):
                for warm in (True, False, False, False):
                    begin = time.perf_counter()
                    for args in calls:
                        function(*args)
                    if not warm:
                        times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: median(found) for name, found in times.items()}


def measure(model: Model, dtype: str, layout: str, given: argparse.Namespace) -> Row:
    training = Training(model, dtype, layout, given)
    for name in WAYS:
        with way(name, given):
            training.step()  # compiles what is new
    with Recorder() as recorder:
        training.gradients()
    calls = alone(recorder.calls, given)
    recorder.calls.clear()
    step, _ = timed(training, given)
    return Row(model.name, dtype, layout, step, calls)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    head = ["model", "dtype", "format", "step ms", "calls ms", "ours: calls ms", "expected", "step ms", "more"]
    found = []
    for r in rows:
        numbers = [r.step["stock"], r.calls["stock"], r.calls["convgrad"], r.expected, r.step["convgrad"]]
        found.append([r.model, r.dtype, r.format, *(f"{n:.2f}" for n in numbers), f"{r.more:+.1%}"])
    yield from table(head, found)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dtype", nargs="+", choices=AUTOCAST, default=["f32"], help="element types (f32)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=[*FORMATS], help="memory formats (both)")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads, which are ours too")
    parser.add_argument("--policy", choices=["fast", "all"], default="fast")
    parser.add_argument("--forward", action="store_true", help="take the forward pass as well")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row")
    parser.add_argument("--batch", type=int, help="images in a batch, in place of each network's own")
    parser.add_argument("--quick", action="store_true", help="a test of seconds; its times mean little")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    torch.set_num_threads(given.threads)
    if given.quick:
        given.seconds = 0.1
    chosen = cases(given)
    head = environment({given.threads: timing.measure_machine(given.threads)}, ["torch"])
    print("\n".join(header_lines(head)), flush=True)
    rows = []
    with progress_bar(len(chosen)) as progress:
        for model, dtype, layout in chosen:
            progress(f"{model.name} {dtype} {layout}")
            rows.append(measure(model, dtype, layout, given))
        progress("")
    print("\n".join(lines(rows)))
    if given.json is not None:
        found = [asdict(row) | {"expected": row.expected, "more": row.more} for row in rows]
        given.json.write_text(json.dumps({**head, "results": found}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
