"""Several processes: what they compute together is what one computes alone.

This file is also the program that starts the processes: each runs its cases, one after another, and ends with an error
at the first that fails. They meet over gloo. Values are small whole numbers, whose sums are exact in any order and over
any number of processes; PyTorch is the judge, in float64 and in one process.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import itertools
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import problems

CASES = {2: [], 4: []}
BY_KERNELS = set()


def case(*worlds, kernels=False):
    """What every process of a group runs, by how many there are: four only where two cannot show it.

    How tensors are cut does not depend on what computes their parts, so kernels are compiled for layers alone.
    """

    def add(function):
        for world in worlds:
            CASES[world].append(function)
        if kernels:
            BY_KERNELS.add(function)
        return function

    return add


def together(folder: Path, *counts: int) -> None:
    """Run the cases of so many processes, and of so many others after them; an error of any of them is told with its
    traceback.
    """
    command = [sys.executable, __file__, folder, *map(str, counts)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    logs = {log: count for count in counts for log in log_files(folder, count)}
    assert run.returncode == 0, told(logs, run.stderr)
    for log, count in logs.items():
        done = [line.removeprefix("done: ") for line in log.read_text().splitlines() if line.startswith("done: ")]
        assert done == [function.__name__ for function in CASES[count]]


def log_files(folder: Path, count: int) -> list[Path]:
    return [folder / f"process{rank}of{count}" for rank in range(count)]


def told(logs: Iterable[Path], what: str) -> str:
    return "\n".join([what, *(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs if log.exists())])


needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch was built without gloo"
)


@needs_gloo
@pytest.mark.slow
def test_on_two_and_on_four_processes(tmp_path):
    """Two compile a function as well. Four have meshes of two axes, parts of unequal size and empty ones."""
    together(tmp_path, 2, 4)


LATER = """
import importlib.util, sys, torch, convgrad.torch
assert importlib.util.find_spec("torch.distributed.tensor")  # as one asks whether it is there
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed.tensor as library
assert not any("convgrad" in type(finder).__module__ for finder in sys.meta_path)
known = {operator.name() for operator in library.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs}
print(*sorted(name for name in known if name.startswith("convgrad")))
"""


@needs_gloo
@pytest.mark.slow
def test_dtensor_is_not_imported_until_it_is_needed():
    done = subprocess.run([sys.executable, "-W", "error", "-c", LATER], capture_output=True, text=True, timeout=120)
    expected = [f"convgrad::convolution{which}" for which in ("", "_data", "_weights", "_weights_into")]
    assert done.stdout.split() == expected, done.stderr


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"


@needs_gloo
@pytest.mark.slow
def test_the_example_under_torchrun():
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, EXAMPLE, "--steps", "12"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "processes: 2, threads of each: 1" in done.stdout
    assert "step 12 of 12" in done.stdout
    assert "gradients agree with those of one process" in done.stdout
    assert "convgrad (cpu)" in done.stdout


def test_the_example_in_one_process(capsys):
    example = runpy.run_path(str(EXAMPLE))
    for words in ([], ["--stock", "--channels-last"]):
        assert example["main"](["--steps", "30", "--batch", "8", *words]) == 0
        out = capsys.readouterr().out
        before, after = (float(number) for number in re.search(r"loss (\S+) before, (\S+) after", out).groups())
        assert after < before / 2
        assert ("convgrad (cpu)" in out) == (not words)
        assert "within 0.0e+00" in out  # nothing is shared, so nothing differs
    with pytest.raises(SystemExit) as left:
        example["main"](["--steps", "0"])
    assert left.value.code == 2
    assert "0 is not a positive number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example["main"](["--help"])
    assert "torchrun --nproc-per-node 2 examples/train_ddp.py" in capsys.readouterr().out


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, the same in all processes, most of them 0."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=made) * (torch.rand(shape, generator=made) < 0.4).float()


def exactly(ours: torch.Tensor | None, judge: torch.Tensor) -> None:
    assert ours is not None
    assert ours.shape == judge.shape
    assert torch.equal(ours.double(), judge)


# What follows runs in the processes, and imports what they only need.


def layers(world):
    """Function, x, w, and how: some on two processes, others on four."""
    x, w = whole(5, 8, 7, 7, seed=1), whole(12, 8, 3, 3, seed=2)
    if world == 2:
        # These two differ in no tensor's shape but the result's.
        yield "conv2d", x, w, {"padding": 1}
        yield "conv2d", x, w, {"padding": 1, "stride": 2}
        yield "conv2d", x, whole(8, 1, 3, 3, seed=3), {"padding": 1, "groups": 8}
        yield "conv_transpose2d", x, whole(8, 12, 3, 3, seed=2), {"stride": 2, "output_padding": 1}
    else:
        yield "conv1d", x[..., 0], w[..., 0], {}
        yield "conv_transpose3d", x[..., None], whole(8, 4, 2, 3, 1, seed=2), {"padding": (0, 1, 0)}
        yield "conv_transpose2d", x, whole(8, 3, 3, 3, seed=3), {"groups": 4}


def against_one(mesh, given, placed):
    """Run a layer on shared tensors and in one process, forward and backward; the placements of all that comes out."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    import convgrad.torch

    name, x, w, how = given
    channels = w.shape[1] * how.get("groups", 1) if "transpose" in name else w.shape[0]
    leaves = [x, w, whole(channels, seed=4)]
    ours = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(leaves, placed, strict=True)]
    judges = [t.double().requires_grad_() for t in leaves]
    judge = getattr(F, name)(*judges, **how)
    y = getattr(convgrad.torch, name)(*ours, **how)
    grad = whole(*judge.shape, seed=5)
    judge.backward(grad.double())
    # A sum over processes gets its gradient whole.
    y.backward(distribute_tensor(grad, mesh, [Replicate() if p.is_partial() else p for p in y.placements]))
    exactly(y.full_tensor(), judge.detach())
    for mine, theirs in zip(ours, judges, strict=True):
        exactly(mine.grad.full_tensor(), theirs.grad)
    return [y.placements, *(t.grad.placements for t in ours)]


@case(2)
def cuts_of_one_axis(world):
    """What is asked for is what is computed: nothing is put together that need not be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (world,))
    r, p, s0, s1 = Replicate(), Partial(), Shard(0), Shard(1)
    for given in layers(world):
        transposed = "transpose" in given[0]
        out, inner = (s1, s0) if transposed else (s0, s1)  # of w: channels of the result, channels of the input
        # x, w, bias: y, and the gradients of the three
        plain = {(r, r, r): (r, r, r, r), (s0, r, r): (s0, s0, p, p)}
        one = {(r, out, s0): (s1, p, out, s0), (r, out, r): (s1, p, out, s0), (s1, inner, r): (p, s1, inner, r)}
        grouped = {(s1, s0, s0): (s1, s1, s0, s0), (r, s0, r): (s1, s1, s0, s0)}
        if world > 2:
            plain.pop((s0, r, r))  # DTensor cuts five images in four only where another axis is cut, too
        for placed, expected in (plain | (grouped if "groups" in given[3] else one)).items():
            found = against_one(mesh, given, [[place] for place in placed])
            assert found == [(place,) for place in expected], (given[0], given[3], placed, found)


@case(2, 4)
def other_cuts(world):
    """What no rule has is put together or cut further, by PyTorch's choice; sizes need not come out even."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (world,))
    r, s0, s1 = Replicate(), Shard(0), Shard(1)
    name, x, w, how = next(layers(2))
    for placed in ((s0, s0, s0), (s1, s1, s0), (s1, r, r), (r, s1, r)):
        against_one(mesh, (name, x, w, how), [[place] for place in placed])
    against_one(mesh, (name, x[:1], w, how), [[s0], [r], [r]])
    against_one(mesh, (name, x[:3], w[:5], how), [[r], [s0], [r]])
    # Three groups are not shared by two processes, nor by four.
    three = name, x[:, :6], whole(6, 2, 3, 3), {"groups": 3}
    for placed in ((s1, s0, s0), (s0, r, r), (r, s0, r)):
        against_one(mesh, three, [[place] for place in placed])


@case(4)
def cuts_of_two_axes(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, world // 2))
    r, s0, s1 = Replicate(), Shard(0), Shard(1)
    plain = [([s0, r], [r, s0], [r, s0]), ([s0, s1], [r, s1], [r, r]), ([s0, s0], [r, r], [r, r])]
    plain += [([r, r], [s0, s0], [r, s0]), ([s1, r], [s1, s0], [r, r])]
    grouped = [([s0, s1], [r, s0], [r, s0]), ([s1, s1], [s0, s0], [r, r]), ([r, r], [s0, s0], [r, r])]
    for name, x, w, how in layers(2):
        if name == "conv2d" and "stride" not in how:
            for placed in grouped if "groups" in how else plain:
                against_one(mesh, (name, x, w, how), placed)
    # Five images on four processes: two, two, one and none; or three and two, and each of these in two.
    found = against_one(mesh, next(layers(2)), plain[2])
    assert found[0] == (s0, s0)
    # Two groups for four processes: DTensor cuts nothing, rather than wrongly.
    two = "conv2d", whole(4, 8, 5, 5), whole(8, 4, 3, 3), {"groups": 2}
    for placed in grouped:
        against_one(mesh, two, placed)


@case(2)
def adding_to_weights(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    r, p, s0, s1 = Replicate(), Partial(), Shard(0), Shard(1)
    x, y, before = whole(4, 8, 6, 6, seed=1), whole(4, 12, 6, 6, seed=2), whole(12, 8, 3, 3, seed=3)
    numbers = [3, 3], [1, 1], [1, 1], [1, 1]

    def added(x, y, into, groups=1):
        torch.ops.convgrad.convolution_weights_into(x, y, into, *numbers, groups)

    judge = torch.nn.grad.conv2d_weight(x.double(), before.shape, y.double(), padding=1)
    for of_x, of_y, of_w in ((s0, s0, p), (r, r, r), (r, s1, s0), (s1, r, s1), (s0, s0, r), (r, r, s0)):
        parts = [distribute_tensor(x, mesh, [of_x]), distribute_tensor(y, mesh, [of_y])]
        if of_w.is_partial():
            into = DTensor.from_local(before.clone(), mesh, [of_w])
        else:
            into = distribute_tensor(before.clone(), mesh, [of_w])
        added(*parts, into)
        exactly(into.full_tensor(), before.double() * (world if of_w.is_partial() else 1) + judge)
    by_channel = distribute_tensor(before[:8, :1].clone(), mesh, [s0])
    added(distribute_tensor(x, mesh, [s1]), distribute_tensor(y[:, :8], mesh, [s1]), by_channel, 8)
    judge = torch.nn.grad.conv2d_weight(x.double(), (8, 1, 3, 3), y[:, :8].double(), padding=1, groups=8)
    exactly(by_channel.full_tensor(), before[:8, :1].double() + judge)
    if world == 4:
        both = init_device_mesh("cpu", (2, 2))
        parts = [distribute_tensor(t, both, [s0, r]) for t in (x, y)]
        with pytest.raises(RuntimeError, match=r"nothing can be added to weights placed as .*Shard.*Replicate"):
            added(*parts, distribute_tensor(before, both, [s0, r]))


@case(2)
def refusals(world):
    """Mistakes are told in our words. Spatial axes are not cut, but a gradient that comes cut is put together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import convgrad.torch

    mesh = init_device_mesh("cpu", (world,))
    x, w = (distribute_tensor(whole(*shape), mesh, [Replicate()]) for shape in ((4, 8, 8, 8), (8, 8, 4, 4)))
    for axis in (2, 3):
        cut_x, cut_w = (t.redistribute(placements=[Shard(axis)]) for t in (x, w))
        for function in (convgrad.torch.conv2d, convgrad.torch.conv_transpose2d):
            for bad in ((cut_x, w), (x, cut_w)):
                with pytest.raises(RuntimeError, match=rf"sharded over axis {axis}, which is spatial.*redistribute"):
                    function(*bad)
    with pytest.raises(RuntimeError, match=r"w must be \(\*, 8, 4, 4\) in OIX with groups=1"):
        convgrad.torch.conv2d(x, w[:, :3])
    grad, judges = whole(4, 8, 5, 5), [t.full_tensor().double().requires_grad_() for t in (x, w)]
    F.conv2d(*judges).backward(grad.double())
    x.requires_grad_()
    w.requires_grad_()
    convgrad.torch.conv2d(x, w).backward(distribute_tensor(grad, mesh, [Shard(3)]))
    for mine, theirs in zip((x, w), judges, strict=True):
        exactly(mine.grad.full_tensor(), theirs.grad)


@case(2, kernels=True)
def stock_layers_on_dtensors(world):
    """PyTorch's own rules for its convolution, where `install()` computes what a process does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    import convgrad.torch

    mesh = init_device_mesh("cpu", (world,))
    x = whole(4, 8, 8, 8, seed=1)

    def gradients(shared, place):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(8, 8, 3, padding=1)
        with torch.no_grad():
            for i, parameter in enumerate(layer.parameters()):
                parameter.copy_(whole(*parameter.shape, seed=i))
        layer = distribute_module(layer, mesh) if shared else layer.double()
        given = distribute_tensor(x, mesh, [place]) if shared else x.double()
        given.requires_grad_()
        y = layer(given)
        grad = whole(*y.shape, seed=3)
        y.backward(distribute_tensor(grad, mesh, y.placements) if shared else grad.double())
        found = [y.detach(), given.grad, *(parameter.grad for parameter in layer.parameters())]
        return [t.full_tensor() if shared else t for t in found]

    for place in (Replicate(), Shard(0)):
        for forward in (False, True):
            with convgrad.torch.installed("all", forward=forward):
                found = gradients(True, place)
            for ours, judge in zip(found, gradients(False, place), strict=True):
                exactly(ours, judge)
            report = convgrad.torch.report(clear=True)
            assert (report.taken, report.passed) == (2 + forward, 0), report


def layer_of_ours(kind):
    """A stock layer whose forward pass calls ours."""
    import convgrad.torch

    class Ours(kind):
        def _conv_forward(self, x, weight, bias):
            how = (self.stride, self.padding, self.dilation, self.groups)
            return convgrad.torch.conv2d(x, weight, bias, *how)

    return Ours


def model(ours=False):
    """Layers of several kinds, whole numbers in them; sizes of one, where strides say nothing, among them."""
    conv = layer_of_ours(torch.nn.Conv2d) if ours else torch.nn.Conv2d
    layers = [
        conv(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        conv(8, 8, 3, padding=1, groups=8, bias=False),
        conv(8, 4, 1),
        torch.nn.ReLU(),
        conv(4, 8, 3, stride=2),
        torch.nn.ConvTranspose2d(8, 1, 2, stride=2),
        conv(1, 2, 3),
    ]
    net = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=i).clamp(-1, 1))
    return net


def images(count):
    return whole(count, 3, 11, 11, seed=50)


def judged(count):
    """The gradients of a model in one process, in float64."""
    net = model().double()
    net(images(count).double()).sum().backward()
    return [parameter.grad for parameter in net.parameters()]


@case(2, kernels=True)
def data_parallel(world):
    """DDP warns where gradients do not lie as it made room for them; warnings are errors here."""
    import convgrad.torch

    rank, judges = dist.get_rank(), judged(2 * world)
    orders = torch.contiguous_format, torch.channels_last
    for order, ours in itertools.product(orders, (False, True)):
        view = ours == (order is torch.channels_last)
        net = model(ours).to(memory_format=order)
        shared = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=view, static_graph=view)
        mine = images(2 * world)[2 * rank : 2 * rank + 2].contiguous(memory_format=order)
        with convgrad.torch.installed("all"):
            for _ in range(2):  # DDP arranges its buckets anew after the first
                net.zero_grad()
                shared(mine).sum().backward()
                for parameter, judge in zip(net.parameters(), judges, strict=True):
                    exactly(parameter.grad * world, judge)
        report = convgrad.torch.report(clear=True)
        assert report.passed == 0
        assert report.taken == 2 * (2 if ours else 11)


@case(2, kernels=True)
def data_parallel_in_real_numbers(world):
    """Of one layer, so that all start from the same numbers. A sum of m products, in any order, is off by at most
    m * 2^-24 times the sum of their magnitudes; the mean over processes adds the roundings of their sum and of a
    division.
    """
    import convgrad.torch

    rank, each = dist.get_rank(), 3
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(4, 8, 3, bias=False)
    x, grad = torch.randn(each * world, 4, 10, 10), torch.randn(each * world, 8, 8, 8)
    mine = slice(each * rank, each * rank + each)
    shared = torch.nn.parallel.DistributedDataParallel(layer)
    with convgrad.torch.installed("all"):
        shared(x[mine]).backward(grad[mine])
    assert convgrad.torch.report(clear=True).taken == 1
    exact, size = (
        torch.nn.grad.conv2d_weight(f(x.double()), layer.weight.shape, f(grad.double())) for f in (lambda t: t, abs)
    )
    products = each * world * 8 * 8
    assert ((layer.weight.grad.double() * world - exact).abs() <= (products + world + 1) * 2**-24 * size).all()


@case(2, kernels=True)
def fully_sharded(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import convgrad.torch

    mesh, rank, judges = init_device_mesh("cpu", (world,)), dist.get_rank(), judged(2 * world)
    for ours in (False, True):
        net = model(ours)
        for layer in net:
            if [*layer.parameters()]:
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        with convgrad.torch.installed("all"):
            net(images(2 * world)[2 * rank : 2 * rank + 2]).sum().backward()
        for parameter, judge in zip(net.parameters(), judges, strict=True):
            exactly(parameter.grad.full_tensor() * world, judge)
        report = convgrad.torch.report(clear=True)
        assert (report.taken, report.passed) == (2 if ours else 11, 0), report


@case(2)
def compiled(world):
    """DTensors go through a compiled function."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import convgrad.torch

    mesh = init_device_mesh("cpu", (world,))
    leaves = [whole(4, 4, 6, 6, seed=1), whole(8, 2, 3, 3, seed=2)]
    ours = [
        distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(leaves, (Shard(0), Replicate()), strict=True)
    ]
    judges = [t.double().requires_grad_() for t in leaves]

    def loss(function, x, w):
        return function(x, w, None, 2, 1, 1, 2).sum()

    torch.compile(loss, backend="aot_eager", fullgraph=True)(convgrad.torch.conv2d, *ours).backward()
    loss(F.conv2d, *judges).backward()
    for mine, theirs in zip(ours, judges, strict=True):
        exactly(mine.grad.full_tensor(), theirs.grad)


def member(world: int, folder: Path, rank: int) -> None:
    """One of the processes."""
    with log_files(folder, world)[rank].open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    limit, store = datetime.timedelta(seconds=120), (folder / f"store{world}").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    for run in CASES[world]:
        with contextlib.nullcontext() if run in BY_KERNELS else problems.reference_engine():
            run(world)
        print(f"done: {run.__name__}", flush=True)
    dist.barrier()
    # Of twenty processes that did nothing but multiply DTensors, PyTorch aborted one as it ended, its work done.
    os._exit(0)


def main(folder: Path, worlds: list[int]) -> None:
    """Processes, so many at a time, which on Linux begin with all that they need imported."""
    needed = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "convgrad.torch"]
    for name in needed + ["torch._inductor.compile_fx"] * (2 in worlds):  # two compile a function
        importlib.import_module(name)
    for world in worlds:
        group(world, folder)


def group(world: int, folder: Path, limit: float = 120.0) -> None:
    """Start the processes that meet, and wait for them."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    children = [context.Process(target=member, args=(world, folder, rank)) for rank in range(world)]
    for child in children:
        child.start()
    end = time.monotonic() + limit
    # When one has failed, the others wait for it in vain.
    while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    else:
        time.sleep(0.5 if any(child.exitcode for child in children) else 0)
    left = [child for child in children if child.is_alive()]
    for child in left:
        child.kill()
        child.join()
    codes = [child.exitcode for child in children]
    if any(codes):
        sys.exit(f"the processes ended with {codes}; {len(left)} were stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(world) for world in sys.argv[2:]])
