"""Problem descriptors of benchdnn, oneDNN's test program: `mb1ic16ih7oc32oh7kh3ph1n"name"`.

A descriptor names the sizes of one forward operation (a convolution or, read by another driver, a deconvolution); a
direction then says which operation of the table is meant. Dilations are counted from 0 here and from 1 in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SpecError
from .bind import Description
from .check import S64, meant
from .problem import Ints, extent, uneven
from .table import OPS, Op

DIRECTIONS = {
    "FWD_B": "forward, with bias",
    "FWD_D": "forward",
    "FWD_I": "forward, for inference",
    "BWD_D": "gradient of the data",
    "BWD_W": "gradient of the weights",
    "BWD_WB": "gradient of the weights; that of the bias is an operation of its own",
}

_AXES = "dhw"
_SPATIAL = "iokspd"  # input, output, kernel, stride, padding, dilation
_COUNTS = ("g", "mb", "ic", "oc")
_KEYS = (*_COUNTS, *(f"{size}{axis}" for size in _SPATIAL for axis in _AXES))
_ENTRY = re.compile(rf"({'|'.join(_KEYS)})(-?[0-9]*)_?")


@dataclass(frozen=True)
class Operation:
    """An operation with its attributes and tensors, as `spec.bind` takes them, and the shape that it must come to."""

    op: Op
    attributes: dict[str, Any]
    inputs: tuple[Description, ...]
    shape: Ints


@dataclass(frozen=True)
class Descriptor:
    """One problem. Sizes are per spatial axis; `d` is counted from 0, `g` is None without a group axis.

    >>> d = Descriptor.parse("ic16oc16_ih7kh3ph1")
    >>> d.mb, d.i, d.o
    (2, (7, 7), (7, 7))
    """

    transposed: bool
    g: int | None
    mb: int
    ic: int
    oc: int
    i: Ints
    o: Ints
    k: Ints
    s: Ints
    p: Ints
    d: Ints
    name: str = ""

    @property
    def ndims(self) -> int:
        """Dimensions of the data: 3, 4 or 5."""
        return len(self.i) + 2

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.g or 1

    @property
    def dilations(self) -> Ints:
        """Dilations counted from 1, as the operations do."""
        return tuple(d + 1 for d in self.d)

    @property
    def end(self) -> Ints:
        """Padding after each axis. It follows from the sizes, and is negative where windows leave a rest of x."""
        x, y = (self.o, self.i) if self.transposed else (self.i, self.o)
        spans = map(extent, self.k, self.dilations)
        return tuple((m - 1) * s - n + e - p for n, m, s, e, p in zip(x, y, self.s, spans, self.p, strict=True))

    @property
    def uneven(self) -> str:
        """The padding in words, if `o` is not what the same padding on both sides comes to; else nothing.

        benchdnn takes any `o`: what its windows need is padded after each axis, or left out there.
        """
        return uneven(self.p, self.end, self.s)

    def with_mb(self, mb: int) -> Descriptor:
        """The same problem with another batch size; 0 keeps it, as `--mb=0` does."""
        return replace(self, mb=mb) if mb else self

    def __str__(self) -> str:
        """The short form: what is not said is the default, and equal axes are written once."""
        return self._text(canonical=False)

    def canonical(self) -> str:
        """The long form, with every key."""
        return self._text(canonical=True)

    def _text(self, canonical: bool) -> str:
        sizes = {key: getattr(self, key) for key in _SPATIAL}
        axes = _AXES[3 - len(self.i) :]
        if not canonical and all(len(set(values)) == 1 for values in sizes.values()):
            axes = axes[0]
        spatial = {
            key: "".join(f"{key}{axis}{value}" for axis, value in zip(axes, values, strict=False))
            for key, values in sizes.items()
        }
        return "".join(
            [
                f"g{self.groups}" if canonical or self.g is not None else "",
                f"mb{self.mb}" if canonical or self.mb != 2 else "",
                f"ic{self.ic}{spatial['i']}oc{self.oc}{spatial['o']}{spatial['k']}",
                spatial["s"] if canonical or set(self.s) != {1} else "",
                spatial["p"],
                spatial["d"] if canonical or set(self.d) != {0} else "",
                f"n{self.name}" if self.name else "",
            ]
        )

    @classmethod
    def parse(cls, text: str, *, transposed: bool = False) -> Descriptor:
        """The problem that a text describes, what it leaves out deduced. `transposed` reads it as a deconvolution."""
        found, name = _entries(text)
        for key in ("ic", "oc"):
            if not found.get(key):
                raise _wrong(text, f"{key} must be given and at least 1", key)
        for key in ("g", *(f"s{axis}" for axis in _AXES)):
            if found.get(key) == 0:
                raise _wrong(text, f"{key} must be at least 1", key)
        if any(found[key] % found.get("g", 1) for key in ("ic", "oc")):
            raise _wrong(text, "g must divide ic and oc", "g")
        axes = {axis: _axis(text, found, axis, transposed) for axis in _AXES}
        present = [axis for axis in _AXES if axes[axis]]
        if not present:
            raise _wrong(text, "no spatial sizes: id, ih or iw and the kernel must be given")
        if present[0] == "d" and len(present) == 2:
            raise _wrong(text, f"has sizes for d and {present[1]}; give those of all three axes, or of d alone")
        # Axes left out after the first are like it: `ih7kh3` is square, `id7kd3` is a cube.
        axes |= {axis: axes[present[0]] for axis in _AXES if axis > present[0] and not axes[axis]}
        names = _AXES[_AXES.index(present[0]) :]
        i, o, k, s, p, d = zip(*(axes[axis] for axis in names), strict=True)
        result = cls(transposed, found.get("g"), found.get("mb", 2), found["ic"], found["oc"], i, o, k, s, p, d, name)
        for axis, begin, end, step in zip(names, p, result.end, s, strict=True):
            if begin < 0 or end <= -step:
                what = f"o{axis} does not belong to i{axis}, k{axis} and s{axis}"
                raise _wrong(text, f"{what}: they would need the padding {begin} before and {end} after", f"o{axis}")
        return result

    def operation(self, direction: str, *, data_format: str = "NCX", dtype: str = "f32") -> Operation:
        """The operation of a direction, with its tensors in NCX and OIX (IOX), or in NXC and XIO (XOI)."""
        if direction not in DIRECTIONS:
            hint = meant(direction, DIRECTIONS) or f"there are {', '.join(DIRECTIONS)}"
            raise SpecError(f"descriptor {str(self)!r}: {direction!r} is not a direction; {hint}")
        if data_format not in ("NCX", "NXC"):
            raise SpecError(f"descriptor {str(self)!r}: data_format must be NCX or NXC, got {data_format!r}")
        first = data_format == "NCX"
        src, dst = ((self.mb, c, *n) if first else (self.mb, *n, c) for c, n in ((self.ic, self.i), (self.oc, self.o)))
        # The channels that the groups ride on: those of y in y = conv(x, w).
        whole, part = (self.ic, self.oc) if self.transposed else (self.oc, self.ic)
        weights = (whole, part // self.groups, *self.k) if first else (*self.k, part // self.groups, whole)
        formats = ("IOX", "XOI") if self.transposed else ("OIX", "XIO")
        attributes: dict[str, Any] = {
            "strides": self.s,
            "pads_begin": self.p,
            "pads_end": tuple(max(e, 0) for e in self.end),
            "dilations": self.dilations,
            "groups": self.groups,
            "data_format": data_format,
            "weights_format": formats[0] if first else formats[1],
        }
        family = "ConvTranspose" if self.transposed else "Convolution"
        if direction.startswith("FWD"):
            shapes, result = [src, weights], dst
            if direction == "FWD_B":
                shapes.append((self.oc,))
            if self.transposed:
                attributes["output_padding"] = tuple(max(-e, 0) for e in self.end)
        elif direction == "BWD_D":
            family += "BackwardData"
            shapes, result = [dst, weights], src
        else:
            family += "BackwardWeights"
            shapes, result = [src, dst], weights
        op = OPS[family]
        if op.shape_source:
            attributes[op.shape_source] = result
        return Operation(op, attributes, tuple(Description(dtype, shape) for shape in shapes), result)


@dataclass(frozen=True)
class Batch:
    """What a file of descriptors holds: the problems, and apart from them the options, as written."""

    descriptors: tuple[Descriptor, ...]
    options: tuple[str, ...]


def read(path: str | Path, *, transposed: bool = False) -> Batch:
    """The descriptors in a file."""
    with open(path, encoding="utf-8") as file:
        return scan(file, transposed=transposed, where=str(path))


def scan(lines: Iterable[str], *, transposed: bool = False, where: str = "line") -> Batch:
    """The descriptors in lines of text. A word that begins with # makes the rest of its line a comment."""
    descriptors, options = [], []
    for number, line in enumerate(lines, 1):
        for word in line.split():
            if word.startswith("#"):
                break
            if word.startswith("--"):
                options.append(word)
                continue
            try:
                descriptors.append(Descriptor.parse(word, transposed=transposed))
            except SpecError as error:
                raise SpecError(f"{where}:{number}: {error.message}", argument=error.argument) from None
    return Batch(tuple(descriptors), tuple(options))


def _wrong(text: str, what: str, argument: str = "") -> SpecError:
    return SpecError(f"descriptor {text!r}: {what}", argument=argument)


def _entries(text: str) -> tuple[dict[str, int], str]:
    """The keys and their values, a later one going before an earlier one, and the name."""
    found: dict[str, int] = {}
    at = 0
    while at < len(text):
        if text[at] == "n":
            return found, text[at + 1 :]
        match = _ENTRY.match(text, at)
        if match is None:
            if _ENTRY.match(text.lower(), at):
                raise _wrong(text, f"keys are lower-case letters, got {text[at:]!r}")
            raise _wrong(text, f"no key at character {at + 1}, {text[at:]!r}; keys are {', '.join(_KEYS)} and n")
        key, digits = match.groups()
        if not digits or digits.startswith("-"):
            raise _wrong(text, f"{key} at character {at + 1} needs a number that is not negative", key)
        if len(digits) > 19 or int(digits) not in S64:
            raise _wrong(text, f"{key} at character {at + 1} is 2**63 or more", key)
        found[key] = int(digits)
        at = match.end()
    return found, ""


def _axis(text: str, found: dict[str, int], axis: str, transposed: bool) -> Ints | None:
    """Input, output, kernel, stride, padding and dilation of one spatial axis; None where there is no such axis."""
    i, o, k, d = (found.get(f"{key}{axis}", 0) for key in "iokd")
    s, p = found.get(f"s{axis}", 1), found.get(f"p{axis}")
    if not any((i, o, k, d, p)) and s == 1:
        return None
    for key, value in (("i", i), ("k", k)):
        if not value:
            raise _wrong(text, f"{key}{axis} must be given and at least 1", f"{key}{axis}")
    span = extent(k, d + 1)
    if o:
        total = (i - 1) * s - o + span if transposed else (o - 1) * s - i + span
        return i, o, k, s, (_truncate(total, 2) if p is None else p), d
    p = p or 0
    o = (i - 1) * s + span - 2 * p if transposed else _truncate(i - span + 2 * p, s) + 1
    if o < 1:
        if not transposed and span > i + 2 * p:
            what = f"a kernel of {k} that covers {span}" if d else f"the kernel ({k})"
            raise _wrong(text, f"{what} is larger than the input with its padding ({i + 2 * p})", f"k{axis}")
        raise _wrong(text, f"o{axis} is not given and would be {o}, less than 1", f"o{axis}")
    return i, o, k, s, p, d


def _truncate(a: int, b: int) -> int:
    """Division towards zero, as C++ divides."""
    return -(-a // b) if a < 0 else a // b
