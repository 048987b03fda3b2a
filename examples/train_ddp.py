"""Train a small network on several processes, with convgrad's gradients: stock PyTorch, and one line.

Every process has its part of each batch; DistributedDataParallel takes the mean of their gradients. With
`convgrad.torch.install()`, convgrad computes them. At the end, the gradients of all processes are compared with
those that one process computes alone.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --channels-last --steps 100
    python examples/train_ddp.py --stock            one process, and PyTorch's own gradients
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import convgrad.torch

SIZE = 24
CLASSES = ("horizontal", "vertical", "chessboard", "plain")


def network() -> torch.nn.Sequential:
    """Convolutions of several kinds; no batch norm, whose statistics are of each process's part alone."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 5, padding=2, groups=16),
        torch.nn.Conv2d(16, 32, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, len(CLASSES)),
    )


def batch(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy patterns and which they are. A step has the same batch in every process."""
    made = torch.Generator().manual_seed(step)
    labels = torch.randint(len(CLASSES), (count,), generator=made)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=made)
    odd = torch.arange(SIZE) % 2
    patterns = (odd[:, None].expand(SIZE, SIZE), odd.expand(SIZE, SIZE), odd[:, None] ^ odd, torch.zeros(SIZE, SIZE))
    return noise / 2 + torch.stack([p.float() for p in patterns])[labels][:, None], labels


def loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the images."""
    return torch.nn.functional.cross_entropy(model(images), labels)


class Training:
    """One process of a training run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.rank, self.processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.given = given
        self.order = torch.channels_last if given.channels_last else torch.contiguous_format
        torch.manual_seed(0)
        self.alone = network().to(memory_format=self.order)
        self.model = DistributedDataParallel(self.alone) if self.processes > 1 else self.alone

    def part(self, step: int, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """What this process computes of a batch."""
        count = self.given.batch
        images, labels = batch(step, count * self.processes)
        mine = slice(None) if whole else slice(self.rank * count, (self.rank + 1) * count)
        return images[mine].contiguous(memory_format=self.order), labels[mine]

    def run(self) -> tuple[float, float]:
        """Train; the first and the last loss, over all processes."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        losses, begin = [], time.perf_counter()
        for step in range(self.given.steps):
            loss = loss_of(self.model, *self.part(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.detach()
            if self.processes > 1:
                dist.all_reduce(value)
            losses.append(value.item() / self.processes)
            self.tell(step + 1, losses[-1], time.perf_counter() - begin)
        return losses[0], losses[-1]

    def tell(self, done: int, loss: float, seconds: float) -> None:
        """Where the training is: a bar on a terminal, ten lines elsewhere."""
        steps, terminal = self.given.steps, sys.stdout.isatty()
        last = done == steps
        if self.rank or not (terminal or last or done % max(1, steps // 10) == 0):
            return
        bar = f"[{'#' * (20 * done // steps):20}] " if terminal else ""
        line = f"{bar}step {done:{len(str(steps))}} of {steps}  loss {loss:.4f}  {1e3 * seconds / done:.1f} ms a step"
        print(f"\r{line}\033[K" if terminal else line, end="" if terminal and not last else "\n", flush=True)

    def difference(self) -> float:
        """How far the processes' mean gradients are from those of one process on the whole batch, relative to them."""
        step = self.given.steps
        self.model.zero_grad()
        loss_of(self.model, *self.part(step)).backward()
        ours = [parameter.grad.clone() for parameter in self.alone.parameters()]
        self.alone.zero_grad()
        loss_of(self.alone, *self.part(step, whole=True)).backward()
        theirs = [parameter.grad for parameter in self.alone.parameters()]
        pairs = zip(ours, theirs, strict=True)
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for."""
    about, _, examples = (__doc__ or "").partition("\n\n    ")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=f"examples:\n    {examples}\nexit codes: 0 all is well, 1 the gradients differ, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_count, default=50, metavar="N", help="steps to train (50)")
    parser.add_argument("--batch", type=_count, default=16, metavar="N", help="images of each process in a step (16)")
    parser.add_argument("--threads", type=_count, metavar="N", help="threads of each process (as PyTorch chooses)")
    parser.add_argument("--channels-last", action="store_true", help="the memory format of images and weights")
    parser.add_argument("--stock", action="store_true", help="leave all gradients to PyTorch")
    return parser.parse_args(words)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(words: Sequence[str] | None = None) -> int:
    """Train, compare, report."""
    given = options(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    if "RANK" in os.environ:  # torchrun has started several of us
        dist.init_process_group("gloo")
    if not given.stock:
        convgrad.torch.install()
    try:
        training = Training(given)
        who = "PyTorch's" if given.stock else "convgrad's"
        if training.rank == 0:
            print(f"{who} gradients; processes: {training.processes}, threads of each: {torch.get_num_threads()}")
        before, after = training.run()
        difference = training.difference()
        # Sums of some ten thousand float32 products in another order, each rounded by 2^-24.
        well = difference <= 10000 * 2**-24
        if training.rank == 0:
            print(f"loss {before:.4f} before, {after:.4f} after {given.steps} steps")
            print(f"gradients {'agree with' if well else 'DIFFER FROM'} those of one process: within {difference:.1e}")
            print("" if given.stock else f"\nof the first process:\n{convgrad.torch.report()}")
        return 0 if well else 1
    finally:
        convgrad.torch.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
