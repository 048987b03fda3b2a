"""A problem: one computation over y = conv(x, w), with nothing left to decide.

    y[n,g,cy,o] = Σ x[n,g,cx, o*stride + k*dilation - pad] · w[g,cy,cx,k]        (x outside its range does not count)

The size of x does not follow from y alone: several x share one y. So a problem states all three sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any

from ..dtypes import DTYPES
from ..errors import SpecError
from .table import ALGORITHMS

Ints = tuple[int, ...]
Role = str  # "x", "w" or "y"


def dense_strides(shape: Ints, order: Ints | None = None) -> Ints:
    """Strides, in elements, of an array with no gaps; `order` lists the axes from the outermost to the innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def settle(shape: Ints, strides: Ints) -> Ints:
    """Strides with those that no element ever uses, of axes of size 1, set to 0: one problem has one description."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))


def window_sizes(x: Ints, kernel: Ints, stride: Ints, dilation: Ints, pads: Ints) -> Ints:
    """Sizes of y from those of x; `pads` is the padding of both ends together. Negative: the kernel does not fit."""
    spans = (n + p - extent(k, d) for n, k, d, p in zip(x, kernel, dilation, pads, strict=True))
    return tuple(span // s + 1 if span >= 0 else -1 for span, s in zip(spans, stride, strict=True))


def extent(kernel: int, dilation: int) -> int:
    """How many elements of x a kernel of that size spans."""
    return (kernel - 1) * dilation + 1


def uneven(begin: Ints, end: Ints, stride: Ints) -> str:
    """Padding in words, if the size of y is not what the same padding on both sides comes to; else nothing.

    The end of an axis that no window reaches has a negative padding after it: that is none, and so many unread.
    """
    if all(b - s < e <= b for b, e, s in zip(begin, end, stride, strict=True)):
        return ""
    after, unread = tuple(max(e, 0) for e in end), tuple(max(-e, 0) for e in end)
    told = ("x".join(map(str, n if len({*n}) > 1 else n[:1])) for n in (begin, after, unread))
    words = [f"{n} {word}" for n, word in zip(told, ("before", "after", "unread"), strict=True)]
    return ", ".join(words if any(unread) else words[:2])


@dataclass(frozen=True)
class Problem:
    """One computation. Strides are in elements, over the axes (n, g, cx, *x), (g, cy, cx, *w) and (n, g, cy, *y).

    `wanted` names the tensor to compute: y forward, x the data gradient, w the weight gradient. `cx` and `cy` are
    channels of one group. `bias_stride` is None without a bias, which is added to the channels of the wanted tensor.
    """

    wanted: Role
    dtype: str
    out_dtype: str
    n: int
    g: int
    cx: int
    cy: int
    x: Ints
    w: Ints
    y: Ints
    stride: Ints
    dilation: Ints
    pad: Ints
    x_strides: Ints
    w_strides: Ints
    y_strides: Ints
    bias_stride: int | None = None
    accumulate: bool = False
    algorithm: str = "direct"

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.x)

    def shape(self, role: Role) -> Ints:
        """Sizes of a tensor over the axes that its strides are given for."""
        if role == "x":
            return (self.n, self.g, self.cx, *self.x)
        if role == "w":
            return (self.g, self.cy, self.cx, *self.w)
        return (self.n, self.g, self.cy, *self.y)

    def strides(self, role: Role) -> Ints:
        """Strides of a tensor, in elements."""
        return {"x": self.x_strides, "w": self.w_strides, "y": self.y_strides}[role]

    def size(self, role: Role) -> int:
        """The number of elements of a tensor."""
        return prod(self.shape(role))

    @property
    def given(self) -> tuple[Role, Role]:
        """The two tensors that the wanted one is computed from."""
        a, b = (role for role in ("x", "w", "y") if role != self.wanted)
        return a, b

    def dtype_of(self, role: Role) -> str:
        """The element type of a tensor."""
        return self.out_dtype if role == self.wanted else self.dtype

    @cached_property
    def taps(self) -> int:
        """Pairs (o, k) that meet inside x, over one channel pair of one image."""
        total = 1
        for axis in range(self.rank):
            total *= sum(max(0, stop - start) for start, stop in (self.reach(axis, k) for k in range(self.w[axis])))
        return total

    def reach(self, axis: int, k: int) -> tuple[int, int]:
        """The range of o for which kernel element `k` of an axis lies inside x: 0 <= o*stride + shift < x."""
        shift = k * self.dilation[axis] - self.pad[axis]
        start = max(0, -(shift // self.stride[axis]))
        stop = min(self.y[axis], -((shift - self.x[axis]) // self.stride[axis]))
        return start, max(start, stop)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the definition."""
        return 2 * self.n * self.g * self.cx * self.cy * self.taps

    @property
    def bytes(self) -> int:
        """Bytes of the three tensors, each counted once."""
        roles: tuple[Role, ...] = ("x", "w", "y")
        return sum(self.size(role) * DTYPES[self.dtype_of(role)].size for role in roles)

    @property
    def end(self) -> Ints:
        """Padding after each axis. It follows from the sizes, and is negative where windows leave a rest of x."""
        spans = map(extent, self.w, self.dilation)
        each = zip(self.x, self.y, self.stride, spans, self.pad, strict=True)
        return tuple((y - 1) * s - x + e - p for x, y, s, e, p in each)

    @property
    def uneven(self) -> str:
        """The padding in words, if it is not the same on both sides; else nothing."""
        return uneven(self.pad, self.end, self.stride)

    def __str__(self) -> str:
        """One line that `Problem.parse` reads back: `x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1`."""
        sizes = (f"{key}{'x'.join(map(str, getattr(self, name)))}" for key, name in _SIZES.items())
        words = [self.wanted, self.dtype, *(f"{key}{getattr(self, key)}" for key in ("n", "g", "cx", "cy")), *sizes]
        for role in ("x", "w", "y"):
            layout = self._layout(role)
            if layout:
                words.append(f"{role}@{layout}")
        if self.out_dtype != self.dtype:
            words.append(f"out:{self.out_dtype}")
        if self.bias_stride is not None:
            words.append("bias" if self.bias_stride == 1 else f"bias@{self.bias_stride}")
        if self.accumulate:
            words.append("accumulate")
        if self.algorithm != "direct":
            words.append(f"algorithm:{self.algorithm}")
        return " ".join(words)

    def _layout(self, role: Role) -> str:
        """The name of a tensor's layout if it has one ("" for channels first), else its strides."""
        strides = self.strides(role)
        for name, order in _orders(role, self.rank).items():
            if strides == settle(self.shape(role), dense_strides(self.shape(role), order)):
                return "" if name == "ncx" else name
        return ",".join(map(str, strides))

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that a line describes. What the line leaves out: dense channels-first tensors, no bias."""
        found: dict[str, str] = {}
        words = text.split()
        for word in words[2:]:
            match = _WORD.fullmatch(word)
            if match is None:
                raise SpecError(f"problem text: {word!r} is not of the form of {_EXAMPLE!r}")
            key = next(k for k, v in match.groupdict().items() if v is not None)
            if key == "algorithm" and match[key] not in ALGORITHMS:
                raise SpecError(f"problem text: {word!r} must be one of {', '.join(f'{key}:{a}' for a in ALGORITHMS)}")
            found[key] = match[key]
        missing = [k for k in (*_COUNTS, *(f"{s}_sizes" for s in _SIZES)) if k not in found]
        if len(words) < 2 or words[0] not in ("x", "w", "y") or words[1] not in DTYPES or missing:
            lacks = f", which has {', '.join(m.removesuffix('_sizes') for m in missing)} too" if missing else ""
            form = f"problem text: {text!r} is not of the form of {_EXAMPLE!r}{lacks}"
            descriptor = "; descriptors are for the command `convgrad explain`" if len(words) == 1 else ""
            raise SpecError(form + descriptor)
        counts: dict[str, Any] = {k: int(found[k]) for k in _COUNTS}
        sizes: dict[str, Any] = {
            name: tuple(map(int, found[f"{key}_sizes"].split("x"))) for key, name in _SIZES.items()
        }
        if len({len(v) for v in sizes.values()}) != 1:
            raise SpecError(f"problem text: every size in {text!r} needs the same number of axes")
        least = {"g": 1, "w": 1, "stride": 1, "dilation": 1, "n": 0, "cx": 0, "cy": 0, "x": 0, "y": 0}
        for name, smallest in least.items():
            if min(sizes.get(name) or (counts[name],)) < smallest:
                raise SpecError(f"problem text: {name} must be at least {smallest} in {text!r}")
        if not 1 <= len(sizes["x"]) <= 3:
            raise SpecError(f"problem text: {text!r} must have 1, 2 or 3 spatial axes")
        plain = cls(
            wanted=words[0],
            dtype=words[1],
            out_dtype=found.get("out", words[1]),
            **counts,
            **sizes,
            x_strides=(),
            w_strides=(),
            y_strides=(),
            bias_stride=int(found.get("bias_at", "1")) if "bias" in found or "bias_at" in found else None,
            accumulate="accumulate" in found,
            algorithm=found.get("algorithm", "direct"),
        )
        values = {f.name: getattr(plain, f.name) for f in fields(plain)}
        roles: tuple[Role, ...] = ("x", "w", "y")
        for role in roles:
            layout = found.get(f"{role}_layout", "ncx")
            order = _orders(role, plain.rank).get(layout)
            shape = plain.shape(role)
            strides = tuple(map(int, layout.split(","))) if order is None else dense_strides(shape, order)
            if len(strides) != len(shape):
                raise SpecError(f"problem text: {role}@{layout} needs {len(shape)} strides, or a layout: ncx, nxc, xio")
            values[f"{role}_strides"] = settle(shape, strides)
        return cls(**values)


_EXAMPLE = "x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1"
_SIZES = {"x": "x", "w": "w", "y": "y", "s": "stride", "d": "dilation", "p": "pad"}
_COUNTS = ("n", "g", "cx", "cy")
_DIGITS = "[0-9]{1,19}"
_WORD = re.compile(
    "|".join(
        [
            *(rf"{k}(?P<{k}>{_DIGITS})" for k in _COUNTS),
            *(rf"{k}(?P<{k}_sizes>-?{_DIGITS}(?:x-?{_DIGITS})*)" for k in _SIZES),
            *(rf"{r}@(?P<{r}_layout>nxc|xio|ncx|-?{_DIGITS}(?:,-?{_DIGITS})*)" for r in "xwy"),
            rf"out:(?P<out>{'|'.join(DTYPES)})",
            r"(?P<bias>bias)",
            rf"bias@(?P<bias_at>-?{_DIGITS})",
            r"(?P<accumulate>accumulate)",
            r"algorithm:(?P<algorithm>\w+)",
        ]
    )
)


def _orders(role: Role, rank: int) -> dict[str, Ints]:
    """Layouts with a name, as the order of the axes from the outermost to the innermost."""
    space = tuple(range(3, 3 + rank))
    if role == "w":  # axes (g, cy, cx, *w)
        return {"ncx": (0, 1, 2, *space), "xio": (*space, 2, 0, 1)}
    return {"ncx": (0, 1, 2, *space), "nxc": (0, *space, 1, 2)}
