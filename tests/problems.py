"""Random calls of every operation, and the judge: PyTorch in float64.

Values are integers, few and small enough that every sum is exact in the accumulator. So whatever the order of the
summation, a result must equal PyTorch's, rounded once to the type of the result.

    python tests/problems.py 1234            replay the case with that seed
    python tests/problems.py --count 50000   check many; --reference has the reference engine compute them
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from math import isqrt, prod
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

import convgrad
from convgrad import engine, numpy_backend

# The judge's convolutions are tiny: more threads only get into each other's way.
torch.set_num_threads(1)

Ints = tuple[int, ...]
Array = np.ndarray

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64}
EXACT = {"f32": 2**24, "bf16": 2**8, "f16": 2**11, "f64": 2**53}  # integers up to here have no rounding

FORWARD = ("Convolution", "ConvTranspose")
KINDS = {  # name → (the operation it means, the tensor wanted in y = conv(x, w))
    "Convolution": ("Convolution", "y"),
    "ConvolutionBackwardData": ("Convolution", "x"),
    "ConvolutionBackwardWeights": ("Convolution", "w"),
    "ConvTranspose": ("ConvTranspose", "x"),
    "ConvTransposeBackwardData": ("ConvTranspose", "y"),
    "ConvTransposeBackwardWeights": ("ConvTranspose", "w"),
    "ConvolutionBackpropData": ("Convolution", "x"),
    "ConvolutionBackpropFilters": ("Convolution", "w"),
    "ConvTransposeBackpropData": ("ConvTranspose", "y"),
    "ConvTransposeBackpropFilters": ("ConvTranspose", "w"),
}


@dataclass
class Case:
    """One call, and what must come out of it."""

    seed: int
    kind: str
    inputs: list[Any]
    attributes: dict[str, Any]
    out: Any  # the array to write to, or None
    expected: Array  # in the type of the result
    guard: Guard | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = ", ".join(_brief(value) for value in self.inputs)
        attributes = ", ".join(f"{k}={v!r}" for k, v in self.attributes.items())
        out = "" if self.out is None else f", out={_brief(self.out)}"
        notes = f"   # {'; '.join(self.notes)}" if self.notes else ""
        return f"apply({self.kind!r}, {shapes}, {attributes}{out}){notes}"


@dataclass
class Guard:
    """The memory around an array for a result: whatever is not the result must stay as it was."""

    memory: Array
    before: Array
    inside: Array  # which elements of `memory` belong to the result


def check(case: Case, call: Callable[..., Any] = convgrad.apply) -> None:
    """Make the call and compare. A failure says in one line how to see it again."""
    originals = [np.array(_numpy(v)) for v in case.inputs if hasattr(v, "dtype")]
    try:
        result = call(case.kind, *case.inputs, out=case.out, **case.attributes)
    except Exception as error:
        raise AssertionError(_report(case, f"{type(error).__name__}: {error}")) from error
    if case.out is not None and result is not case.out:
        raise AssertionError(_report(case, "did not return `out`"))
    first = case.inputs[0]
    if case.out is None and type(result) is not type(first):
        raise AssertionError(_report(case, f"{type(first).__name__} in, {type(result).__name__} out"))
    got = _numpy(result)
    if got.dtype != case.expected.dtype or got.shape != case.expected.shape:
        what = f"got {got.dtype}{got.shape}, expected {case.expected.dtype}{case.expected.shape}"
        raise AssertionError(_report(case, what))
    wrong = got != case.expected
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        what = f"{wrong.sum()} of {wrong.size} differ, first at {where}: {got[where]} is not {case.expected[where]}"
        raise AssertionError(_report(case, what))
    for value, original in zip((v for v in case.inputs if hasattr(v, "dtype")), originals, strict=True):
        if _numpy(value).tobytes() != original.tobytes():
            raise AssertionError(_report(case, "an input was changed"))
    if case.guard is not None:
        changed = (case.guard.memory != case.guard.before) & ~case.guard.inside
        if changed.any():
            raise AssertionError(_report(case, "memory around `out` was changed"))


def _report(case: Case, what: str) -> str:
    return f"{what}\n  {case}\n  replay: python tests/problems.py {case.seed}"


@contextmanager
def reference_engine() -> Iterator[None]:
    """Have the reference compute everything: it builds no code, so that thousands of problems take seconds."""
    backends = engine.BACKENDS
    engine.BACKENDS = [numpy_backend]
    try:
        yield
    finally:
        engine.BACKENDS = backends


def draw(rng: np.random.Generator, *, wide: bool = False) -> Case:
    """A random case. `wide` draws more channels, around the widths of vectors."""
    return replay(2 * int(rng.integers(2**31)) + wide)


def replay(seed: int) -> Case:
    """The case of a seed; odd ones have many channels."""
    return _Draw(seed).case()


def is_about(seed: int, kinds: Collection[str], dtype: str, library: str) -> bool:
    """Whether the case of a seed is, told without making it."""
    draw = _Draw(seed)
    draw.begin()
    return draw.kind in kinds and (draw.dtype, draw.library) == (dtype, library)


class _Draw:
    """The making of one case. The geometry is in the words of y = conv(x, w)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.notes: list[str] = []

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def whole(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def begin(self) -> None:
        """What is computed, of which type, in which library."""
        self.kind = self.pick(list(KINDS))
        self.base, self.wanted = KINDS[self.kind]
        self.transposed = self.base == "ConvTranspose"
        self.older = "Backprop" in self.kind
        self.dtype = self.pick(["f32", "f32", "bf16", "f16", "f64"])
        self.library = "torch" if self.chance(0.25) else "numpy"

    def case(self) -> Case:
        self.begin()
        self.geometry()
        values = self.values()
        expected = self.judge(values)
        return self.call(values, expected)

    # ---- sizes

    def geometry(self) -> None:
        wide = bool(self.seed % 2)
        self.rank = self.pick([1, 2, 2, 3])
        most = {1: 24, 2: 9, 3: 5}[self.rank]
        self.g = self.pick([1, 1, 2, 3, 4])
        channels = [1, 2, 3, 4, 5] if not wide else [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33]
        self.cx, self.cy = self.pick(channels), self.pick(channels)
        if self.chance(0.15):  # depthwise
            self.g, self.cx, self.cy = self.pick(channels) * 2, 1, self.pick([1, 1, 2])
        self.n = 0 if self.chance(0.04) else self.whole(1, 3)
        self.auto = self.pick(["None"] * 5 + ["SAME_UPPER", "SAME_LOWER", "VALID"])
        self.documented = (
            self.auto.startswith("SAME") and self.base == "Convolution" and self.wanted == "x" and self.chance(0.4)
        )
        axes = [self.axis(most) for _ in range(self.rank)]
        names = ("x", "k", "y", "stride", "dilation", "begin", "end", "extra")
        for name, sizes in zip(names, zip(*axes, strict=True), strict=True):
            setattr(self, name, tuple(sizes))
        # A result without elements: no channels on its side.
        if self.chance(0.02) and self.g == 1:
            if self.wanted in "xw":
                self.cx = 0
            else:
                self.cy = 0

    def axis(self, most: int) -> tuple[int, ...]:
        """Sizes on one axis: x, kernel, y, stride, dilation, pads, and what the last window leaves of x."""
        k = self.pick([1, 1, 2, 3, 3, 4, 5])
        s = self.pick([1, 1, 2, 2, 3, 4, 6])  # also beyond the kernel
        d = self.pick([1, 1, 1, 2, 3])
        span = (k - 1) * d + 1
        if self.auto == "None":
            x = self.whole(1, most) if not self.chance(0.03) else 0
            largest = self.pick([0, 1, 2, k, 3 * k + 3])  # also beyond the kernel
            begin, end = self.whole(0, largest), self.whole(0, largest)
            end += max(0, span - x - begin - end)
        elif self.auto == "VALID":
            x, begin, end = self.whole(span, span + most), 0, 0
        else:
            x, begin, end = self.same(k, s, span, most)
        rest = x + begin + end - span
        return x, k, rest // s + 1, s, d, begin, end, rest % s

    def same(self, k: int, s: int, span: int, most: int) -> tuple[int, int, int]:
        """Sizes and pads of SAME, from its meaning: y is x over the stride, rounded up."""
        if self.documented:
            # Any x that some padding explains, of all that share one y.
            y = self.whole(1, most)
            x = self.whole(max(1, s * (y - 1) + 1 - span), s * (y - 1) + span)
            total = s * (y - 1) + span - x
            # The padding is minimal, so nothing is left over, and the odd element lies on the other side.
            first, rest = (total + 1) // 2, total // 2
            return (x, first, rest) if self.auto == "SAME_UPPER" else (x, rest, first)
        if self.transposed:
            y = self.whole(1, max(1, most // s))
            total = max(span - s, 0)
            extra = self.whole(0, s - 1) if self.chance(0.3) else 0
            x = s * (y - 1) + span - total + extra
        else:
            x = self.whole(1, most)
            total = max((-(-x // s) - 1) * s + span - x, 0)
        first, rest = total // 2, total - total // 2
        return (x, first, rest) if self.auto == "SAME_UPPER" else (x, rest, first)

    # ---- values

    def shape(self, role: str) -> Ints:
        """The shape of a tensor, channels first, weights as PyTorch has them: (all of y, x of one group, kernel)."""
        if role == "w":
            return (self.g * self.cy, self.cx, *self.k)
        if role == "bias":
            return (self.shape(self.wanted)[1],)
        channels, space = (self.g * self.cx, self.x) if role == "x" else (self.g * self.cy, self.y)
        return (self.n, channels, *space)

    def values(self) -> dict[str, Array]:
        """The tensors, channels first, as exact float64."""
        length = {
            "y": self.cx * prod(self.k),
            "x": self.cy * prod(self.k),
            "w": self.n * prod(self.y),
        }[self.wanted]
        budget = EXACT["f64" if self.dtype == "f64" else "f32"] - 512  # for a bias and what `out` held
        largest = min(isqrt(budget // max(length, 1)), EXACT[self.dtype])
        largest = min(largest, self.pick([1, 3, 40, largest, largest]))
        roles = [role for role in "xwy" if role != self.wanted]
        self.biased = self.kind in FORWARD and self.chance(0.4)
        values = {role: self.integers(self.shape(role), largest) for role in roles}
        if self.biased:
            values["bias"] = self.integers(self.shape("bias"), 200)
        self.accumulate = self.chance(0.15)
        if self.accumulate:
            values["prior"] = self.integers(self.shape(self.wanted), 200)
        # An axis of stride zero holds one value over and over.
        for role in roles:
            axes = [i for i, size in enumerate(values[role].shape) if size > 1]
            if axes and self.chance(0.06):
                axis = self.pick(axes)
                values[role] = np.broadcast_to(np.take(values[role], [0], axis), values[role].shape)
                self.notes.append(f"{role} repeats along axis {axis}")
        return values

    def integers(self, shape: Ints, largest: int) -> Array:
        values = self.rng.integers(-largest, largest + 1, shape).astype(np.float64)
        return values if self.chance(0.8) else values * (self.rng.random(shape) < 0.3)

    # ---- the judge

    def judge(self, values: dict[str, Array]) -> Array:
        """The wanted tensor by PyTorch in float64, channels first."""
        t = {role: torch.from_numpy(np.array(v)) for role, v in values.items()}
        forward = self.forward_transpose if self.transposed else self.forward
        source, result = ("y", "x") if self.transposed else ("x", "y")
        if 0 in self.shape(self.wanted):
            total = torch.zeros(self.shape(self.wanted), dtype=torch.float64)
        elif self.wanted == result:
            total = forward(t[source], t["w"])
        else:
            given = {source: t.get(source), "w": t.get("w")}
            given[self.wanted] = torch.zeros(self.shape(self.wanted), dtype=torch.float64, requires_grad=True)
            forward(given[source], given["w"]).backward(t[result])
            total = given[self.wanted].grad
        if self.biased:
            total = total + t["bias"].reshape(-1, *(1,) * self.rank)
        if self.accumulate:
            total = total + t["prior"]
        return total.numpy()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pads = [p for pair in zip(reversed(self.begin), reversed(self.end), strict=True) for p in pair]
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.rank - 1]
        y = convolve(F.pad(x, pads), w, None, self.stride, 0, self.dilation, self.g)
        assert tuple(y.shape) == self.shape("y")
        return y

    def forward_transpose(self, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        spread = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.rank - 1]
        x = spread(y, w, None, self.stride, 0, 0, self.g, self.dilation)
        # Cut the padding off. Where the end reaches beyond what was spread, there is nothing: zeros.
        for axis, (begin, size) in enumerate(zip(self.begin, self.x, strict=True), 2):
            more = max(0, begin + size - x.shape[axis])
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, more]).narrow(axis, begin, size)
        assert tuple(x.shape) == self.shape("x")
        return x

    # ---- the call

    def call(self, values: dict[str, Array], expected: Array) -> Case:
        self.data_format = self.pick(["NCX", "NXC"])
        families = ("XOI", "IOX", "XIO", "OIX") if self.transposed else ("XIO", "OIX")
        self.weights_format = self.pick(families)
        # The documents lay the groups of transposed weights out along the other axis.
        self.other_groups = self.transposed and self.g > 1 and self.cx > 0 and self.chance(0.4)
        if self.other_groups:
            self.notes.append("groups as documented")
        attributes = self.attributes()
        out_dtype = "f32" if self.dtype in ("bf16", "f16") and self.chance(0.2) else self.dtype
        expected = self.arrange(self.wanted, expected)
        with np.errstate(over="ignore"):
            expected = np.ascontiguousarray(expected).astype(DTYPES[out_dtype])
        out, guard = None, None
        if self.accumulate or self.chance(0.3):
            prior = self.arrange(self.wanted, values["prior"]) if self.accumulate else None
            out, guard = self.result_array(expected.shape, DTYPES[out_dtype], prior)
            if out_dtype != self.dtype and self.chance(0.5):
                attributes["out_dtype"] = out_dtype
            if self.accumulate:
                attributes["accumulate"] = True
        elif out_dtype != self.dtype:
            attributes["out_dtype"] = out_dtype
        roles = {"y": "xw", "x": "yw", "w": "yx" if self.transposed else "xy"}[self.wanted]
        inputs = [self.present(self.arrange(role, values[role])) for role in roles]
        if self.biased:
            inputs.append(self.present(values["bias"]))
        self.state_shape(inputs, attributes, expected.shape, out is not None)
        if self.older:
            self.translate(inputs, attributes)
        kind = self.kind + "-1" if self.older and self.chance(0.2) else self.kind
        return Case(self.seed, kind, inputs, attributes, out, expected, guard, self.notes)

    def arrange(self, role: str, values: Array) -> Array:
        """A tensor's values in the order of its format."""
        last = [*range(2, values.ndim)]
        if role != "w":
            return values if self.data_format == "NCX" else values.transpose(0, *last, 1)
        if self.other_groups:
            # (g * cy, cx, k) → (cy, g * cx, k)
            split = values.reshape(self.g, self.cy, self.cx, *self.k)
            values = np.moveaxis(split, 0, 1).reshape(self.cy, self.g * self.cx, *self.k)
        orders = {"OIX": (0, 1, *last), "XIO": (*last, 1, 0)}
        if self.transposed:
            orders = {"IOX": (0, 1, *last), "XOI": (*last, 1, 0), "OIX": (1, 0, *last), "XIO": (*last, 0, 1)}
        return values.transpose(orders[self.weights_format])

    def attributes(self) -> dict[str, Any]:
        """The attributes in one of the ways that people write them."""
        written: dict[str, Any] = {"strides": self.numbers(self.stride), "dilations": self.numbers(self.dilation)}
        if self.auto == "None":
            written["pads_begin"], written["pads_end"] = self.pads(self.begin), self.pads(self.end)
        else:  # they do not count
            written["pads_begin"] = self.numbers(tuple(self.whole(0, 9) for _ in self.x))
            written["pads_end"] = self.numbers(tuple(self.whole(0, 9) for _ in self.x))
        self.optional(written, "auto_pad", self.spelled(self.auto), self.auto == "None")
        self.optional(written, "groups", self.g if self.chance(0.8) else np.int64(self.g), self.g == 1)
        self.optional(written, "data_format", self.data_format, self.data_format == "NXC")
        default = "XIO" if self.older or not self.transposed else "XOI"
        self.optional(written, "weights_format", self.weights_format, self.weights_format == default)
        self.optional(written, "algorithm", self.spelled("direct"), True)  # the exact one
        if self.documented:
            written["same_rule"] = self.spelled("documented")
        if self.transposed:
            stated = self.wanted == "x" or self.chance(0.4)
            needed = self.wanted == "x" and any(self.extra)
            # Of SAME, a stated rest says which forward operation is meant; unstated, x alone gives the padding.
            if self.auto.startswith("SAME") and any(self.extra):
                stated = needed = True
            if stated:
                padding = self.numbers(self.extra)
                if self.chance(0.1):
                    padding = (*self.extra, *(0,) * (12 - self.rank))  # as oneDNN writes it
                self.optional(written, "output_padding", padding, not needed)
        elif self.wanted == "x":
            self.optional(written, "output_padding", (0,) * self.rank, True)
        names = list(written)
        self.rng.shuffle(names)
        return {name: written[name] for name in names}

    def optional(self, written: dict[str, Any], name: str, value: Any, default: bool) -> None:
        """Write an attribute, unless it has its default value and luck leaves it out."""
        if not default or self.chance(0.5):
            written[name] = value

    def numbers(self, values: Ints) -> Any:
        forms: list[Any] = [values, list(values), np.array(values)]
        if len(set(values)) == 1:
            forms.append(values[0])
        return self.pick(forms)

    def pads(self, values: Ints) -> Any:
        return [] if not any(values) and self.chance(0.1) else self.numbers(values)

    def spelled(self, word: str) -> str:
        return self.pick([word, word.lower(), word.upper()])

    def state_shape(self, inputs: list[Any], attributes: dict[str, Any], shape: Ints, has_out: bool) -> None:
        """Say what the shape of the result is: by an input, by the attribute, by `out`, or not at all."""
        if self.wanted != "w" and (self.transposed or self.wanted != "x"):
            return
        name = "weights_shape" if self.wanted == "w" else "dst_shape"
        ways = ["input", "attribute", "both"] + ["out"] * has_out
        # What the sizes come to without a word: nothing left over. SAME asks for a whole number of strides.
        rest_free = not any(self.extra) and not self.documented
        if self.auto.startswith("SAME"):
            spans = [(k - 1) * d + 1 for k, d in zip(self.k, self.dilation, strict=True)]
            rest_free = rest_free and all(
                x == s * (y - 1) + e - max(e - s, 0)
                for x, s, y, e in zip(self.x, self.stride, self.y, spans, strict=True)
            )
        if name == "dst_shape" and rest_free:
            ways.append("nothing")
        way = self.pick(ways)
        empty_input = any(0 in np.shape(v) for v in inputs)
        if way in ("input", "both"):
            forms = [shape, list(shape), np.array(shape, np.int32), np.array([shape], np.int64)]
            if self.library == "torch":
                forms.append(torch.tensor(shape, dtype=torch.int32))
            if self.older and name == "dst_shape":  # the oldest spelling
                forms.append(self.x)
            inputs.append(self.pick(forms))
        if way == "both" and (0 not in shape or empty_input):
            attributes[name] = tuple(self.whole(1, 5) for _ in shape)  # the input goes first
        if way == "attribute":
            if 0 in shape and not empty_input:
                inputs.append(shape)
            else:
                attributes[name] = self.pick([shape, list(shape), np.array(shape)])

    def translate(self, inputs: list[Any], attributes: dict[str, Any]) -> None:
        """The older words."""
        older = {"weights_format": "filter_format", "dst_shape": "output_shape", "weights_shape": "filter_shape"}
        for name in [n for n in attributes if n in older]:
            attributes[older[name]] = attributes.pop(name)
        if self.kind == "ConvolutionBackpropFilters" and len(inputs) == 3 and self.chance(0.5):
            inputs[1], inputs[2] = inputs[2], inputs[1]

    # ---- memory

    def present(self, values: Array) -> Any:
        """An input with those values, laid out in memory in some way."""
        dtype = np.dtype(DTYPES[self.dtype])
        way = self.pick(["dense"] * 4 + ["permuted", "permuted", "stepped", "reversed", "unaligned", "field", "odd"])
        repeated = 0 in values.strides and values.size
        if repeated:
            axes = [i for i, s in enumerate(values.strides) if s == 0 and values.shape[i] > 1]
            if axes:
                index = tuple(slice(0, 1) if i in axes else slice(None) for i in range(values.ndim))
                array = np.broadcast_to(values[index].astype(dtype), values.shape)
                return self.hand_over(array)
        array = self.room(values.shape, dtype, way)[0]
        array[...] = values.astype(dtype)
        if way != "dense":
            self.notes.append(f"{way} {array.shape}")
        if self.library == "numpy" and self.chance(0.3):
            array.flags.writeable = False
        return self.hand_over(array)

    def result_array(self, shape: Ints, dtype: Any, prior: Array | None) -> tuple[Any, Guard]:
        """An array for the result, between bytes that nobody may touch."""
        way = self.pick(["dense", "permuted", "stepped", "reversed", "unaligned", "field", "odd"])
        array, memory = self.room(shape, np.dtype(dtype), way)
        self.notes.append(f"out {way}")
        inside = np.zeros(memory.shape, bool)
        if array.size:
            # Mark the bytes of the result by writing two patterns through the array and seeing what changes.
            bits = array.view(f"i{array.itemsize}") if array.dtype.itemsize in (2, 4, 8) else array
            bits[...] = 0
            zeros = memory.copy()
            bits[...] = -1
            inside = memory != zeros
        array[...] = np.nan if prior is None else prior.astype(dtype)
        return self.hand_over(array), Guard(memory, memory.copy(), inside)

    def room(self, shape: Ints, dtype: np.dtype, way: str) -> tuple[Array, Array]:
        """An array of a shape in a random layout, and the bytes that it lies in."""
        if self.library == "torch" and way in ("reversed", "unaligned", "field", "odd"):
            way = "permuted"
        rank = len(shape)
        if way == "dense":
            memory = self.bytes(max(prod(shape), 1) * dtype.itemsize)
            return memory.view(dtype)[: prod(shape)].reshape(shape), memory
        if way == "permuted":
            order = self.rng.permutation(rank)
            memory = self.bytes(max(prod(shape), 1) * dtype.itemsize)
            dense = memory.view(dtype)[: prod(shape)].reshape([shape[i] for i in order])
            return dense.transpose(np.argsort(order)), memory
        if way in ("stepped", "reversed"):
            steps = [self.whole(1, 3) for _ in shape]
            if way == "reversed":
                steps = [-s if self.chance(0.6) else s for s in steps]
            room = [n * abs(s) + self.whole(0, 1) for n, s in zip(shape, steps, strict=True)]
            memory = self.bytes(max(prod(room), 1) * dtype.itemsize)
            dense = memory.view(dtype)[: prod(room)].reshape(room)
            cut = tuple(slice(0, n * abs(s), abs(s)) for n, s in zip(shape, steps, strict=True))
            flip = tuple(slice(None, None, -1 if s < 0 else 1) for s in steps)
            return dense[cut][flip], memory
        if way == "unaligned":
            memory = self.bytes(prod(shape) * dtype.itemsize + 1)
            return memory[1 : 1 + prod(shape) * dtype.itemsize].view(dtype).reshape(shape), memory
        if way == "field":  # of a record whose size is no multiple of the element's
            record = np.dtype([("first", np.int8), ("value", dtype), ("last", np.int16)])
            memory = self.bytes(max(prod(shape), 1) * record.itemsize)
            return memory.view(record)[: prod(shape)].reshape(shape)["value"], memory
        # "odd": axes of size 1 have strides that mean nothing
        memory = self.bytes(max(prod(shape), 1) * dtype.itemsize)
        dense = memory.view(dtype)[: prod(shape)].reshape(shape)
        strides = [s if n != 1 else self.pick([0, -8, 10**6, 3]) for n, s in zip(shape, dense.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(dense, shape, strides), memory

    def bytes(self, size: int) -> Array:
        return self.rng.integers(0, 256, size, np.uint8)

    def hand_over(self, array: Array) -> Any:
        """An array in the library of the case."""
        if self.library == "numpy":
            return array
        if not array.flags.writeable or not all(array.strides):
            # PyTorch takes no read-only array; it can repeat an axis by itself.
            axes = [i for i, s in enumerate(array.strides) if s == 0]
            index = tuple(slice(0, 1) if i in axes else slice(None) for i in range(array.ndim))
            return self.tensor(np.array(array[index])).expand(array.shape)
        return self.tensor(array)

    def tensor(self, array: Array) -> torch.Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def _numpy(value: Any) -> Array:
    """A NumPy view of a result."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"torch.{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    return f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) and value.ndim > 2 else repr(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int, help="cases to replay")
    parser.add_argument("--count", type=int, default=1000, help="how many to draw without seeds (1000)")
    parser.add_argument("--start", type=int, default=0, help="which numbers to draw from (0)")
    parser.add_argument("--reference", action="store_true", help="compute by the reference engine")
    given = parser.parse_args(arguments)
    with reference_engine() if given.reference else nullcontext():
        return _run(given)


def _run(given: argparse.Namespace) -> int:
    rng = np.random.default_rng(given.start)
    failures = 0
    for done in count():
        if done == (len(given.seeds) or given.count):
            break
        case = replay(given.seeds[done]) if given.seeds else draw(rng, wide=bool(done % 4 == 3))
        if given.seeds:
            print(case)
        try:
            check(case)
        except AssertionError as failure:
            failures += 1
            print(failure)
            if failures == 10:
                break
    print(f"{done + (failures == 10)} checked, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
