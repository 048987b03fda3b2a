"""The GPU engine on a real GPU, exact or not: run by `make test-gpu`, without pytest and without llvmlite.

python tests/gpu/device.py                  all of it: some minutes
python tests/gpu/device.py --count 200      fewer random calls
python tests/gpu/device.py --first 200      others
python tests/gpu/device.py --seconds 300    as many of them as that takes
python tests/gpu/device.py --sanitizer      a sample under compute-sanitizer, memcheck and racecheck, too
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "src"), str(HERE.parents[1])]

LAYERS = {
    "dense": ((8, 64, 28, 28), (96, 64, 3, 3), (1, 1), (1, 1), 1),
    "strided": ((4, 40, 29, 31), (24, 40, 3, 3), (2, 2), (1, 1), 1),
    "phases without taps": ((4, 32, 28, 30), (48, 32, 1, 1), (2, 3), (0, 0), 1),
    "stem": ((4, 3, 112, 112), (64, 3, 7, 7), (2, 2), (3, 3), 1),
    "depthwise": ((8, 96, 28, 28), (96, 1, 7, 7), (1, 1), (3, 3), 96),
    "grouped": ((4, 128, 28, 28), (128, 4, 3, 3), (1, 1), (1, 1), 32),
    "1D": ((4, 512, 512), (512, 1, 4), (1,), (3,), 512),
    "3D": ((2, 32, 12, 14, 16), (32, 32, 3, 3, 3), (1, 1, 1), (1, 1, 1), 1),
    "pointwise": ((4, 256, 14, 14), (512, 256, 1, 1), (1, 1), (0, 0), 1),
}
"""Input, weights, strides, padding and groups."""


def hindrance() -> str:
    """Why there is nothing to test here."""
    for library in ("torch", "triton"):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch finds no CUDA device here"


def on_the_gpu(kind: str, *inputs: Any, out: Any = None, **attributes: Any) -> Any:
    """A call on tensors of the GPU that hold the same values, its result brought back."""
    import ml_dtypes
    import numpy as np
    import torch

    import convgrad

    def there(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iu":
            value = np.array(value, order="C")  # PyTorch takes neither negative strides nor half elements
            if value.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).cuda()
            return torch.from_numpy(value).cuda()
        return value.cuda() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def back(value: Any) -> Any:
        value = value.cpu()
        if isinstance(inputs[0], torch.Tensor):
            return value
        plain = value.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if value.dtype is torch.bfloat16 else None
        return value.numpy() if plain is None else plain

    place = None if out is None else there(out)
    if place is not None and not attributes.get("accumulate"):
        place.fill_(torch.nan)
    result = convgrad.apply(kind, *map(there, inputs), out=place, **attributes)
    if out is None:
        return back(result)
    if isinstance(out, torch.Tensor):
        out.copy_(result.cpu())
    else:
        out[...] = back(result) if not isinstance(inputs[0], torch.Tensor) else result.float().cpu().numpy()
    return out


def random_calls(first: int, count: int, seconds: float, jobs: int) -> Iterator[str]:
    """Random calls of every operation, judged by PyTorch in float64, by several processes: compiling takes longest."""
    import multiprocessing

    found, done, end = 0, 0, time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for wrong in pool.imap_unordered(_random_call, range(first, first + count), chunksize=1):
            done += 1
            if wrong:
                found += 1
                if found <= MOST_TOLD:
                    yield wrong
            print(f"  {done} of {count}", end="\r", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                pool.terminate()
                break
    if found > MOST_TOLD:
        yield f"and {found - MOST_TOLD} more"
    print(f"  {done} random calls from {first} on")


MOST_TOLD = 20


def _random_call(seed: int) -> str:
    """What is wrong with the result of one of them."""
    import numpy as np

    import problems

    try:
        problems.check(problems.draw(np.random.default_rng(seed), wide=bool(seed % 2)), on_the_gpu)
    except Exception as error:  # each is a line of the report
        return f"random call {seed}: {type(error).__name__}: {error}"
    return ""


def steps(name: str, dtype: Any, last: bool) -> Any:
    """A layer's three tensors in guarded, poisoned memory, and what computes each from the others."""
    import torch

    from convgrad.torch.plans import Geometry, Result, make_step

    shape, weights, stride, pad, groups = LAYERS[name]
    space = [(n + 2 * b - k) // s + 1 for n, k, s, b in zip(shape[2:], weights[2:], stride, pad, strict=True)]
    shapes = {"x": shape, "w": weights, "y": (shape[0], weights[0], *space)}
    blocks, tensors = {}, {}
    for role, size in shapes.items():
        # An odd start, so that some memory is not aligned.
        start = 64 if role != "w" else 65
        blocks[role] = torch.full((prod(size) + 129,), torch.nan, dtype=dtype, device="cuda")
        inner = blocks[role][start : start + prod(size)]
        order = (size[0], *size[2:], size[1]) if last else size
        tensors[role] = inner.view(order).movedim(-1, 1) if last else inner.view(order)
    geometry = Geometry(stride, pad, (1,) * len(stride), groups)

    def step(role: str) -> Callable[[], None]:
        out = tensors[role]
        result = Result(tuple(out.shape), out.stride(), out.dtype)
        made = make_step(role, {r: t for r, t in tensors.items() if r != role}, None, result, geometry)
        return lambda: made.run(tensors["x"], tensors["w"], tensors["y"])

    return blocks, tensors, step


KINDS = ("float32", "bfloat16", "float16", "float64")
PRECISIONS = ("default", "ieee", "tf32x3", "bf16x6", "tf32")


def prepare(jobs: int) -> Iterator[str]:
    """What the layers need is compiled by several processes, and kept on disk for this one."""
    import multiprocessing

    work = [(name, dtype, last, "default") for name in LAYERS for dtype in KINDS for last in (False, True)]
    work += [(name, "float32", True, precision) for name in LAYERS for precision in PRECISIONS[1:]]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from filter(None, pool.imap_unordered(_prepare, work, chunksize=1))


def _prepare(work: tuple[str, str, bool, str]) -> str:
    """One layer in one setting, computed."""
    import torch

    import convgrad

    name, dtype, last, precision = work
    convgrad.set_float32_precision(precision)
    try:
        _, tensors, step = steps(name, getattr(torch, dtype), last)
        for role in tensors:
            step(role)()
        torch.cuda.synchronize()
    except Exception as error:  # each is a line of the report
        return f"{' '.join(map(str, work))}: {type(error).__name__}: {error}"
    return ""


def adjoints() -> Iterator[str]:
    """The three sums of each layer are equal on whole numbers, and nothing is written around a result."""
    import torch

    for name in LAYERS:
        for dtype in [getattr(torch, kind) for kind in KINDS]:
            for last in (False, True):
                blocks, tensors, step = steps(name, dtype, last)
                values = {role: torch.randint_like(tensor, -1, 2) for role, tensor in tensors.items()}
                sums = []
                for role in "xwy":
                    for other in "xwy":
                        tensors[other].copy_(values[other])
                    tensors[role].fill_(torch.nan)
                    step(role)()
                    sums.append(float((tensors[role].double() * values[role].double()).sum()))
                    start = (tensors[role].data_ptr() - blocks[role].data_ptr()) // blocks[role].element_size()
                    guards = (blocks[role][:start], blocks[role][start + tensors[role].numel() :])
                    if not all(bool(guard.isnan().all()) for guard in guards):
                        yield f"{name} {dtype} {role}: wrote around the result"
                # Results in bf16 and f16 are exact below 2^8 and 2^11, which sums of these layers stay near.
                if dtype in (torch.float32, torch.float64) and len(set(sums)) != 1:
                    yield f"{name} {dtype} {'NXC' if last else 'NCX'}: the sums differ: {sums}"


def same_bits() -> Iterator[str]:
    """The same bits in 20 runs, while another stream keeps the GPU busy; in a CUDA graph, too."""
    import torch

    load = torch.randn(2048, 2048, device="cuda")
    busy = torch.cuda.Stream()
    for name in LAYERS:
        for dtype in (torch.float32, torch.bfloat16):
            _, tensors, step = steps(name, dtype, True)
            for tensor in tensors.values():
                tensor.normal_()
            for role in "xwy":
                kept, run = tensors[role].clone(), step(role)
                run()
                first = tensors[role].clone()
                for _ in range(20):
                    with torch.cuda.stream(busy):
                        load @ load
                    tensors[role].fill_(torch.nan)
                    run()
                    if not torch.equal(tensors[role], first):
                        yield f"{name} {dtype} {role}: other bits in another run"
                graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.graph(graph, stream=aside):
                    run()
                tensors[role].fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                if not torch.equal(tensors[role], first):
                    yield f"{name} {dtype} {role}: other bits by a CUDA graph"
                tensors[role].copy_(kept)


def one_by_one(name: str, role: str) -> float:
    """The error, relative to the norm, of sums of random numbers in f32 whose products are added one after another.

    The k-th sum has the variance k times that of a product, and is rounded by at most u = 2^-24 of it: by an error of
    variance u^2/3 of its own, if all up to u are as likely. Those of n of them add up to n^2/2 * u^2/3 times the
    variance of a product, and the result has the variance n times that.
    """
    shape, weights, stride, pad, _ = LAYERS[name]
    taps = [-(-k // (s if role == "x" else 1)) for k, s in zip(weights[2:], stride, strict=True)]
    space = [(n + 2 * b - k) // s + 1 for n, k, s, b in zip(shape[2:], weights[2:], stride, pad, strict=True)]
    groups = LAYERS[name][4]
    count = prod(taps) * weights[0] // groups if role == "x" else shape[0] * prod(space)
    return 2**-24 * (count / 6) ** 0.5


def errors() -> Iterator[str]:
    """Errors on random data, beside those of PyTorch's plain f32."""
    import torch

    import convgrad

    torch.backends.cudnn.allow_tf32 = False
    for name, (_, _, stride, pad, groups) in LAYERS.items():
        _, tensors, step = steps(name, torch.float32, True)
        how = ([*stride], [*pad], [1] * len(stride), False, [0] * len(stride), groups)
        for tensor in tensors.values():
            tensor.normal_()
        wide = {role: tensor.double() for role, tensor in tensors.items()}
        mask = [True, True, False]
        exact = torch.ops.aten.convolution_backward(wide["y"], wide["x"], wide["w"], None, *how, mask)
        stock = torch.ops.aten.convolution_backward(tensors["y"], tensors["x"], tensors["w"], None, *how, mask)
        right, plain = (dict(zip("xw", found[:2], strict=True)) for found in (exact, stock))
        for role in "xw":
            theirs = float((plain[role].double() - right[role]).norm() / right[role].norm())
            told, kept = [f"cuDNN {theirs:.1e}"], tensors[role].clone()
            for precision in PRECISIONS:
                convgrad.set_float32_precision(precision)
                step(role)()
                ours = float((tensors[role].double() - right[role]).norm() / right[role].norm())
                told.append(f"{precision} {ours:.1e}")
                # Of two ways to sum, either may be the luckier by some tens of percent.
                if precision == "default" and ours > 2 * theirs:
                    yield f"{name} {role}: error {ours:.1e} with {precision}, cuDNN's is {theirs:.1e}"
                most = one_by_one(name, role)
                if precision == "ieee" and ours > max(most, 2 * theirs):
                    yield f"{name} {role}: error {ours:.1e} with ieee, one by one {most:.1e}, cuDNN's is {theirs:.1e}"
            tensors[role].copy_(kept)
            convgrad.set_float32_precision("default")
            print(f"  {name} {role}: {', '.join(told)}")


def infinities() -> Iterator[str]:
    """An infinity in the data spoils the results whose windows contain it, and no others: an infinite sum stays one."""
    import torch

    import convgrad

    for name in ("dense", "pointwise", "3D", "depthwise"):
        _, _, stride, pad, groups = LAYERS[name]
        how = ([*stride], [*pad], [1] * len(stride), False, [0] * len(stride), groups)
        for precision in ("bf16x6", "tf32", "ieee", "default"):
            dtype = "bfloat16" if precision == "default" else "float32"
            convgrad.set_float32_precision(precision)
            for given, role in ("xy", "yx"):
                _, tensors, step = steps(name, getattr(torch, dtype), True)
                for tensor in tensors.values():
                    tensor.normal_()
                tensors[given].select(0, 0).select(0, 1).view(-1)[5] = torch.inf
                tensors[given].select(0, -1).select(0, 0)[(-1,) * len(stride)] = -torch.inf
                tensors[role].fill_(torch.nan)
                step(role)()
                found = tensors[role].cpu().double()
                x, w, y = (tensors[r].cpu().double() for r in "xwy")
                if role == "y":
                    right = torch.ops.aten.convolution(x, w, None, *how)
                else:
                    mask = [True, False, False]
                    right = torch.ops.aten.convolution_backward(y, x, w, None, *how, mask)[0]
                if wrong := int((found.isfinite() != right.isfinite()).sum()):
                    yield f"{name} {dtype} {precision} {role}: {wrong} results are spoilt, or are not"
                elif not torch.equal(found[right.isinf()], right[right.isinf()]):
                    yield f"{name} {dtype} {precision} {role}: an infinite sum became something else"
    convgrad.set_float32_precision("default")


def descriptors() -> Iterator[str]:
    """Blocks copied by tensor maps, launched directly and by Triton; what it takes the host."""
    import torch

    from convgrad.gpu import compile as compiler
    from convgrad.gpu import launch, recall, target
    from convgrad.gpu.plan.records import Descriptor, Launch, Plan

    if torch.cuda.get_device_capability()[0] < 9:
        print("  left out: it takes compute capability 9.0")
        return
    sys.path.insert(0, str(HERE.parent))
    import copying

    wide = Descriptor("x", "bf16", (16, 192), (256, 1), (16, 64))
    given = (("notes", "f32"),), (("columns", 192),), (("BLOCK", 16),), 4, 1
    step = Launch("copying", 4, *given, descriptors=(wide, Descriptor("y", "bf16", (16, 256), (256, 1), (16, 64))))
    plan = Plan("copying", "copies", (step,), (("notes", 16),), 0.0, ())
    function, version, find = compiler.function, recall.KNOWN, recall.find
    x = torch.randn(16, 256, device="cuda").bfloat16()
    expected = x.clone()
    expected[:, 192:] = 0
    try:
        compiler.function = lambda step: copying.copying if step.kernel == "copying" else function(step)
        # The store does not know the source of this kernel.
        recall.find = lambda *given: (kernel := compiler.build(*given), recall.read(kernel, given[0]) or kernel)[1]
        for recall.KNOWN in (version, "no version"):
            launch._loaded.clear()
            run = launch.Executable(plan, target.current(0), 0)
            y = torch.full_like(x, torch.nan)
            stream = torch.cuda.current_stream().cuda_stream
            run(x.data_ptr(), 0, y.data_ptr(), 0, stream)
            if not torch.equal(y, expected):
                yield f"blocks are copied wrongly, launched for {recall.KNOWN}"
            begin = time.perf_counter()
            for _ in range(200):
                run(x.data_ptr(), 0, y.data_ptr(), 0, stream)
            taken = (time.perf_counter() - begin) / 200
            way = "directly" if run._ready[True].kernels[0].by_triton is None else "by Triton"
            print(f"  a call with two descriptors and workspace, launched {way}: {taken * 1e6:.1f} us of the host")
    finally:
        compiler.function, recall.KNOWN, recall.find = function, version, find


def beyond() -> Iterator[str]:
    """Offsets beyond 2^31 elements, where there is memory for them."""
    import torch

    import convgrad

    if torch.cuda.mem_get_info()[0] < 24 << 30:
        print("  left out: it takes 24 GiB")
        return
    x = torch.randint(-2, 3, (1, 33, 8192, 8192), device="cuda").to(torch.float16)
    w = torch.randint(-2, 3, (4, 33, 1, 1), device="cuda").to(torch.float16)
    how = dict(data_format="NCX", weights_format="OIX", strides=1, pads_begin=0, pads_end=0, dilations=1)
    y = convgrad.convolution(x, w, **how)
    for part in (slice(0, 16), slice(-16, None)):
        expected = torch.einsum("nihw,oi->nohw", x[:, :, part].double(), w[:, :, 0, 0].double())
        if not torch.equal(y[:, :, part].double(), expected):
            yield "a tensor of more than 2^31 elements is computed wrongly"


SAMPLED = ("float32", "bfloat16")
CHECKS = ("memcheck", "racecheck")


def sample(name: str, dtype: str, last: bool) -> None:
    """One layer, all three results, once each."""
    import torch

    _, tensors, step = steps(name, getattr(torch, dtype), last)
    for role in tensors:
        step(role)()
    torch.cuda.synchronize()


def sanitized(jobs: int) -> Iterator[str]:
    """Every layer under compute-sanitizer, in processes of their own; their kernels were compiled before."""
    from concurrent.futures import ThreadPoolExecutor

    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield "compute-sanitizer was not found"
        return
    work = [
        (check, name, dtype, layout)
        for check in CHECKS
        for name in LAYERS
        for dtype in SAMPLED
        for layout in ("NXC", "NCX")
    ]
    # Every tensor gets memory of its own, so that what is beyond it is nobody's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def run(work: tuple[str, str, str, str]) -> str:
        check, *layer = work
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, str(HERE), "--sample", *layer]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
        except subprocess.TimeoutExpired:
            return f"{' '.join(work)}: not done within 300 s"
        return f"{' '.join(work)}: {(done.stdout + done.stderr)[:3000]}" if done.returncode else ""

    with ThreadPoolExecutor(max(1, jobs // 2)) as pool:
        for at, wrong in enumerate(pool.map(run, work), 1):
            print(f"  {at} of {len(work)}", end="\r", file=sys.stderr, flush=True)
            if wrong:
                yield wrong
    print(f"  {len(work)} runs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3000, help="of random calls")
    parser.add_argument("--first", type=int, default=0, help="the first of the random calls")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for random calls, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compute them")
    parser.add_argument("--sanitizer", action="store_true", help="a sample under compute-sanitizer, too")
    parser.add_argument("--parts", help="only these, with commas: random_calls, prepare, adjoints and so on")
    parser.add_argument("--sample", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if reason := hindrance():
        print(f"tests/gpu/device.py needs a GPU: {reason}", file=sys.stderr)
        return 2
    if asked.sample:
        name, dtype, layout = asked.sample
        sample(name, dtype, layout == "NXC")
        return 0
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "prepare": lambda: prepare(asked.jobs),
        "adjoints": adjoints,
        "descriptors": descriptors,
        "same_bits": same_bits,
        "errors": errors,
        "infinities": infinities,
        "beyond": beyond,
        "sanitized": lambda: sanitized(asked.jobs),
        "random_calls": lambda: random_calls(asked.first, asked.count, asked.seconds, asked.jobs),
    }
    if not asked.sanitizer:
        del parts["sanitized"]
    failures = 0
    for title in asked.parts.split(",") if asked.parts else parts:
        begin, found = time.perf_counter(), 0
        for what in parts[title]():
            found += 1
            print(f"  {what}", flush=True)
        failures += found
        print(f"{title}: {f'{found} wrong' if found else 'ok'}, {time.perf_counter() - begin:.0f} s", flush=True)
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
