"""Gradients of real layers, computed and verified.

For every layer the gradients of its data and of its weights are computed in f32, bf16 and f16, and checked three ways
that share nothing with convgrad's own code but the definition:

sums       some elements, corners among them, against sums in plain Python
adjoint    the identity  Σ forward(x, w) · y = Σ x · data(y, w) = Σ w · weights(x, y)
rounding   the results in bf16 and f16 against those in f32, rounded once

All values are small integers, so that every sum is exact and every check is one of equality.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

import convgrad

Ints = tuple[int, ...]
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclass(frozen=True)
class Layer:
    """A layer of a network: (n, channels, spatial sizes) of the bigger side x, channels of the smaller side y."""

    name: str
    n: int
    cx: int
    x: Ints
    cy: int
    kernel: Ints
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    data_format: str = "NXC"

    @property
    def y(self) -> Ints:
        """Sizes of y, what a convolution over x comes to."""
        spans = [(k - 1) * self.dilation + 1 for k in self.kernel]
        return tuple((n + 2 * self.pad - e) // self.stride + 1 for n, e in zip(self.x, spans, strict=True))

    @property
    def gflop(self) -> float:
        """Work of one gradient."""
        return 2e-9 * self.n * prod(self.y) * prod(self.kernel) * self.cx * self.cy / self.groups

    def __str__(self) -> str:
        x, y = ("x".join(map(str, (c, *n))) for c, n in ((self.cx, self.x), (self.cy, self.y)))
        text = f"{y} -> {x}" if self.transposed else f"{x} -> {y}"
        text += f", batch {self.n}, {self.data_format}, kernel {'x'.join(map(str, self.kernel))}"
        options = {
            "padding": (self.pad, 0),
            "stride": (self.stride, 1),
            "dilation": (self.dilation, 1),
            "groups": (self.groups, 1),
        }
        return text + "".join(f", {name} {value}" for name, (value, default) in options.items() if value != default)


LAYERS = [
    Layer("ResNet-50, first", 1, 3, (224, 224), 64, (7, 7), stride=2, pad=3),
    Layer("ResNet-50, 3x3", 2, 64, (56, 56), 64, (3, 3), pad=1),
    Layer("ResNet-50, 3x3 in NCX", 2, 128, (28, 28), 128, (3, 3), pad=1, data_format="NCX"),
    Layer("ResNet-50, 1x1 stride 2", 1, 512, (28, 28), 1024, (1, 1), stride=2),
    Layer("MobileNet, depthwise", 2, 144, (56, 56), 144, (3, 3), pad=1, groups=144),
    Layer("ResNeXt, 32 groups", 1, 128, (56, 56), 128, (3, 3), pad=1, groups=32),
    Layer("DeepLab, dilated", 1, 256, (28, 28), 256, (3, 3), pad=2, dilation=2),
    Layer("WaveNet, 1D dilated", 1, 64, (4000,), 128, (2,), pad=4, dilation=8, data_format="NCX"),
    Layer("3D U-Net, 3x3x3", 1, 32, (24, 24, 24), 32, (3, 3, 3), pad=1),
    Layer("DCGAN, transposed 4x4", 4, 128, (16, 16), 256, (4, 4), stride=2, pad=1, transposed=True),
    Layer("U-Net, transposed 2x2", 2, 64, (56, 56), 128, (2, 2), stride=2, transposed=True, data_format="NCX"),
]


class Tensors:
    """The tensors of a layer over the plain axes: x (n, cx, *x), w (cy, cx/groups, *kernel), y (n, cy, *y)."""

    def __init__(self, layer: Layer, dtype: str) -> None:
        self.layer = layer
        rng = np.random.default_rng(1)
        shapes = {
            "x": (layer.n, layer.cx, *layer.x),
            "w": (layer.cy, layer.cx // layer.groups, *layer.kernel),
            "y": (layer.n, layer.cy, *layer.y),
        }
        self.plain = {role: rng.integers(-3, 4, shape).astype(DTYPES[dtype]) for role, shape in shapes.items()}
        self.given = {role: np.ascontiguousarray(self.arrange(role, a)) for role, a in self.plain.items()}

    def arrange(self, role: str, array: np.ndarray) -> np.ndarray:
        """From the plain axes to the layer's format: NXC with XIO (XOI), or NCX with OIX (IOX)."""
        if self.layer.data_format == "NCX":
            return array
        return np.moveaxis(array, (1, 0), (-2, -1)) if role == "w" else np.moveaxis(array, 1, -1)

    def back(self, role: str, array: np.ndarray) -> np.ndarray:
        """The inverse of `arrange`."""
        if self.layer.data_format == "NCX":
            return array
        return np.moveaxis(array, (-2, -1), (1, 0)) if role == "w" else np.moveaxis(array, -1, 1)

    def compute(self, wanted: str, out_dtype: str | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """One of the three tensors from the other two, by convgrad."""
        layer = self.layer
        last = layer.data_format == "NXC"
        formats = ("XOI" if last else "IOX") if layer.transposed else ("XIO" if last else "OIX")
        call = {
            "strides": layer.stride,
            "pads_begin": layer.pad,
            "pads_end": layer.pad,
            "dilations": layer.dilation,
            "groups": layer.groups,
            "data_format": layer.data_format,
            "weights_format": formats,
            "out_dtype": out_dtype,
            "out": out,
        }
        x, w, y = (self.given[role] for role in "xwy")
        if layer.transposed:
            if wanted == "x":
                return convgrad.conv_transpose(y, w, **call)
            if wanted == "y":
                return convgrad.conv_transpose_backward_data(x, w, **call)
            return convgrad.conv_transpose_backward_weights(y, x, w.shape, **call)
        if wanted == "y":
            return convgrad.convolution(x, w, **call)
        if wanted == "x":
            return convgrad.convolution_backward_data(y, w, x.shape, **call)
        return convgrad.convolution_backward_weights(x, y, w.shape, **call)


def element(tensors: Tensors, wanted: str, at: Ints) -> int:
    """One element of a result, summed up in plain Python.

    y[n, cy, o] = Σ x[n, cx, o * stride + k * dilation - pad] · w[cy, cx, k] ties the three tensors together; the
    element is the sum of the other two's products over all (n, cy, cx, o, k) that it takes part in.
    """
    layer, t = tensors.layer, tensors.plain
    wide, narrow = layer.cx // layer.groups, layer.cy // layer.groups
    total = 0
    if wanted == "w":
        cy, cx, k = at[0], at[1], at[2:]
        group = cy // narrow
        for n in range(layer.n):
            for o in itertools.product(*map(range, layer.y)):
                i = place(layer, o, k)
                if inside(i, layer.x):
                    total += int(t["x"][(n, group * wide + cx, *i)]) * int(t["y"][(n, cy, *o)])
        return total
    for k in itertools.product(*map(range, layer.kernel)):
        if wanted == "y":
            n, cy, o = at[0], at[1], at[2:]
            i = place(layer, o, k)
            if inside(i, layer.x):
                for cx in range(wide):
                    total += int(t["x"][(n, cy // narrow * wide + cx, *i)]) * int(t["w"][(cy, cx, *k)])
        else:
            n, channel, i = at[0], at[1], at[2:]
            reach = [a + layer.pad - b * layer.dilation for a, b in zip(i, k, strict=True)]
            o = tuple(r // layer.stride for r in reach)
            if all(r % layer.stride == 0 for r in reach) and inside(o, layer.y):
                for c in range(narrow):
                    cy = channel // wide * narrow + c
                    total += int(t["y"][(n, cy, *o)]) * int(t["w"][(cy, channel % wide, *k)])
    return total


def place(layer: Layer, o: Ints, k: Ints) -> Ints:
    """Where window `o` has its kernel element `k`."""
    return tuple(a * layer.stride + b * layer.dilation - layer.pad for a, b in zip(o, k, strict=True))


def inside(at: Ints, sizes: Ints) -> bool:
    """Whether a place lies in a tensor."""
    return all(0 <= a < n for a, n in zip(at, sizes, strict=True))


def verify(tensors: Tensors, wanted: str, result: np.ndarray) -> str:
    """The first check that a gradient fails, or nothing."""
    plain = tensors.back(wanted, result)
    rng = np.random.default_rng(2)
    places = [(0,) * plain.ndim, tuple(n - 1 for n in plain.shape)]
    places += [tuple(int(rng.integers(n)) for n in plain.shape) for _ in range(2)]
    for at in places:
        expected = np.float64(element(tensors, wanted, at)).astype(plain.dtype)
        if plain[at] != expected:
            return f"sums: {plain[at]} at {at} is not {expected}"
    forward = "x" if tensors.layer.transposed else "y"
    sums = {}
    for role in (forward, wanted):
        exact = tensors.compute(role, "f32")
        sums[role] = int((exact.astype(np.int64) * tensors.given[role].astype(np.int64)).sum())
        if role == wanted and not np.array_equal(exact.astype(result.dtype), result):
            return "rounding: not the f32 result rounded once"
    if len(set(sums.values())) > 1:
        return f"adjoint: {sums[forward]} is not {sums[wanted]}"
    return ""


class Line:
    """The row of the table that is being made. On a terminal, what is being done stands after it for as long."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        """Add a cell. A pipe gets it at once, without what stood after it."""
        self.text += text
        print(f"\r{self.text}\033[K" if TERMINAL else text, end="", flush=True)

    def doing(self, what: str) -> None:
        """Say what is being done."""
        if TERMINAL:
            print(f"\r{self.text}  {what} ...\033[K", end="", flush=True)


TERMINAL = sys.stdout.isatty()


def gradient(tensors: Tensors, wanted: str, line: Line) -> str:
    """Compute, time and verify one gradient, and add it to the line; what is wrong with it, or nothing."""
    line.doing("compiling")
    result = tensors.compute(wanted)  # the first call also prepares the computation
    line.doing("timing")
    spent = 1e9
    for _ in range(3):  # the quickest counts: other work may get in the way of one
        # Into NaN: memory that an earlier call has left could hold the right values by itself.
        result[...] = np.nan
        begin = time.perf_counter()
        tensors.compute(wanted, out=result)
        spent = min(spent, 1000 * (time.perf_counter() - begin))
    line.add(f"{spent:12.2f}")
    line.doing("verifying")
    failure = verify(tensors, wanted, result)
    line.add(f"{'NO' if failure else 'yes':>10}")
    return failure


def options(words: Sequence[str] | None) -> tuple[list[Layer], list[str]]:
    """The layers and types that are asked for."""
    parser = argparse.ArgumentParser(
        description="Compute, time and verify the gradients of real layers. Exit codes: 0 all verified, 1 not all, "
        "2 wrong usage."
    )
    parser.add_argument("--threads", type=int, metavar="N", help="compute with so many threads")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES], help="element types (all of them)")
    parser.add_argument("--layers", default="", metavar="REGEX", help="only the layers that this finds, such as U-Net")
    given = parser.parse_args(words)
    try:
        chosen = [layer for layer in LAYERS if re.search(given.layers, layer.name, re.IGNORECASE)]
    except re.error as error:
        parser.error(f"--layers {given.layers}: not a regular expression: {error}")
    if not chosen:
        parser.error(f"--layers {given.layers}: finds none of {'; '.join(layer.name for layer in LAYERS)}")
    if given.threads is not None:
        try:
            convgrad.set_num_threads(given.threads)
        except ValueError as error:
            parser.error(f"--threads {given.threads}: {error}")
    return chosen, given.dtype


def main(words: Sequence[str] | None = None) -> int:
    """Compute and verify everything, with a table."""
    layers, dtypes = options(words)
    started = time.perf_counter()
    wrong: list[str] = []
    print(f"convgrad {convgrad.__version__}: gradients of {len(layers)} layers, {convgrad.get_num_threads()} threads\n")
    print(f"{'':25}{'':6}{'data gradient':>22}{'weights gradient':>22}")
    print(f"{'layer':25}{'type':6}{'ms':>12}{'verified':>10}{'ms':>12}{'verified':>10}")
    for layer in layers:
        print(f"{layer.name:25}{layer.gflop:5.2f} GFLOP each", f"  {layer}", sep="\n", flush=True)
        for dtype in dtypes:
            line = Line()
            line.add(f"{'':25}{dtype:6}")
            line.doing("making numbers")
            tensors = Tensors(layer, dtype)
            for wanted in ("y" if layer.transposed else "x", "w"):
                failure = gradient(tensors, wanted, line)
                if failure:
                    wrong.append(f"{layer.name}, {dtype}, {'weights' if wanted == 'w' else 'data'}: {failure}")
            print()
    count = 2 * len(layers) * len(dtypes)
    print(f"\n{count - len(wrong)} of {count} gradients verified in {time.perf_counter() - started:.1f} s.")
    print("Three checks each: single elements against sums in plain Python; the whole")
    print("result by the identity <conv(x, w), y> = <x, data(y, w)> = <w, weights(x, y)>;")
    print("bf16 and f16 against the float32 result, rounded once.")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
