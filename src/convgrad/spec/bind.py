"""From an operation, its attributes and the descriptions of its tensors to a Problem. Every user's mistake ends here.

oneDNN's words (src, diff_dst, NXC, XOI) come in, `x w y` and strides go out; they meet in this file only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..dtypes import DTYPES
from ..errors import SpecError
from .check import S64, broken, check_attributes, check_dtypes, check_input_count, values
from .problem import Ints, Problem, dense_strides, extent, settle, window_sizes
from .table import CONV_AXES, DATA_AXES, MAX_NDIMS, OTHER_ORDER, RULES, TRANSPOSE_AXES, Op


@dataclass(frozen=True)
class Description:
    """A tensor as its owner sees it: in the order of its format, strides in elements (None: dense)."""

    dtype: str
    shape: Ints
    strides: Ints | None = None


class Layout(NamedTuple):
    """The order of the axes of data and of weights, by oneDNN's names."""

    data: str
    weights: str

    def of(self, role: str) -> str:
        """The format of a tensor."""
        return self.weights if role == "w" else self.data

    def axes(self, op: Op, role: str) -> str:
        """The axes of a tensor, in the letters of the table."""
        if role != "w":
            return DATA_AXES[self.data]
        return (TRANSPOSE_AXES if op.transposed else CONV_AXES)[self.weights]

    def agrees(self, op: Op) -> bool:
        """Whether data and weights are of one family: spatial axes last in both, or in neither."""
        return self.axes(op, "x").endswith("k") == self.axes(op, "w").endswith("k")

    def __str__(self) -> str:
        return f"data_format={self.data!r} with weights_format={self.weights!r}"


@dataclass(frozen=True)
class Binding:
    """What an operation comes to: the problem, and the output in its owner's words."""

    op: Op
    problem: Problem
    shape: Ints
    strides: Ints  # of the output, in elements
    pads_begin: Ints
    pads_end: Ints
    layout: Layout


@dataclass(frozen=True)
class _Weights:
    """Weights as read: sizes of their channel axes, and which of them the groups ride on."""

    shape: Ints
    cy: int  # in one group
    cx: int  # in one group
    kernel: Ints
    grouped: str  # "y" as oneDNN lays them out, "x" as the documents of the transposed operations do


def bind(
    op: Op,
    inputs: Sequence[Description | None],
    attributes: Mapping[str, Any],
    *,
    shape: Ints | None = None,
    out: Description | None = None,
    infer_size: bool = False,
    spatial_shape: bool = False,
    strict: bool = False,
    follow: bool = False,
) -> Binding:
    """Check one operation against its tensors and describe it as a problem.

    `shape` is the value of the shape input. `out` describes the output where it is known. `infer_size` lets
    ConvolutionBackwardData compute the size of diff_src when nothing states it. `spatial_shape` lets a shape leave out
    batch and channels, as the oldest spelling does. `strict` refuses what oneDNN refuses. With `follow`, an output that
    `out` does not describe has the order in memory of the first input, channels first or last; else that of its format.
    """
    ask = _Question(op, inputs, shape, out, infer_size, spatial_shape, strict, follow)
    try:
        return _bind(ask, attributes)
    except SpecError as error:
        if error.rule in RULES and RULES[error.rule].layout:
            fits = _fits(ask, attributes, error.rule)
            error.message += f"; {fits}" if fits else ""
            error.args = (error.message,)
        raise


def layouts_that_fit(
    op: Op,
    inputs: Sequence[Description | None],
    attributes: Mapping[str, Any],
    *,
    shape: Ints | None = None,
    out: Description | None = None,
    infer_size: bool = False,
    spatial_shape: bool = False,
) -> list[Binding]:
    """What the same call comes to in layouts other than the one in use, if it fits those; the likelier ones first."""
    return _fitting(_Question(op, inputs, shape, out, infer_size, spatial_shape), attributes)


class _Question(NamedTuple):
    """What `bind` is asked, but for the attributes."""

    op: Op
    inputs: Sequence[Description | None]
    shape: Ints | None
    out: Description | None
    infer_size: bool
    spatial_shape: bool
    strict: bool = False
    follow: bool = False


def _fits(ask: _Question, attributes: Mapping[str, Any], rule: str) -> str:
    """What was probably meant by shapes that do not belong together: another layout, number of groups, or order."""
    depthwise = _depthwise(ask, attributes) if rule == "weights_channels" else ""
    if depthwise and attributes.get("groups", 1) != 1:
        return depthwise
    # With groups, data and weights of two families fit by accident: small numbers of channels divide many sizes.
    grouped = attributes.get("groups", 1) != 1
    if found := [fit for fit in _fitting(ask, attributes) if fit.layout.agrees(ask.op) or not grouped]:
        return f"these shapes fit {found[0].layout}"
    if grouped and rule == "weights_channels":
        with suppress(SpecError):
            _bind(ask, {**attributes, "groups": 1})
            return "these shapes fit groups=1"
    if depthwise:
        return depthwise
    op, (first, second) = ask.op, ask.inputs[:2]
    if rule not in ("same_batch", "channels", "weights_channels") or first is None or second is None:
        return ""
    tensors = first.shape, second.shape, ask.shape or ()
    counts = {a // b for shape in tensors for other in tensors for a in shape for b in other if b and a % b == 0}
    for groups in sorted(counts - {0, 1}) if attributes.get("groups") in (None, 1) else ():
        with suppress(SpecError):
            _bind(ask, {**attributes, "groups": groups})
            return f"these shapes fit groups={groups}"
    with suppress(SpecError):
        _bind(ask._replace(inputs=(second, first, *ask.inputs[2:])), attributes)
        return f"{op.inputs[0].name} and {op.inputs[1].name} look exchanged"
    return ""


def _depthwise(ask: _Question, attributes: Mapping[str, Any]) -> str:
    """How to pass weights that look like TensorFlow's of a depthwise layer: (*kernel, channels, results of each)."""
    op = ask.op
    format = op.attr("weights_format")
    if op.transposed or format is None or attributes.get("weights_format", format.default) != "XIO":
        return ""
    index = next((i for i, arg in enumerate(op.inputs) if arg.role == "w"), None)
    given = ask.inputs[index] if index is not None else None
    shape = given.shape if given else tuple(ask.shape or attributes.get(str(op.shape_source)) or ())
    *kernel, channels, each = shape
    if channels == 1 or attributes.get("groups", 1) not in (1, channels):
        return ""
    merged = (*kernel, 1, channels * each)
    if index is not None and given is not None:
        here = Description(given.dtype, merged)
        ask = ask._replace(inputs=[*ask.inputs[:index], here, *ask.inputs[index + 1 :]])
        told = f"pass them reshaped to {merged}"
    else:
        ask = ask._replace(shape=merged)
        told = f"pass {op.shape_source}={merged} and reshape the result"
    with suppress(SpecError):
        _bind(ask, {**attributes, "groups": channels})
        more = f", and groups={channels}" if attributes.get("groups", 1) == 1 else ""
        return f"they look like TensorFlow's depthwise weights: {told}{more}"
    return ""


def _fitting(ask: _Question, attributes: Mapping[str, Any]) -> list[Binding]:
    """As `layouts_that_fit`. Data and weights of one family are likelier than others.

    A kernel that would be longer than it is now, and not square, was hardly meant: channels are many, kernels small.
    """
    formats = {name: ask.op.attr(name) for name in ("data_format", "weights_format")}
    choices = [
        [choice for choice in attr.choices if not (ask.strict and choice in attr.beyond)]
        for attr in formats.values()
        if attr is not None
    ]
    used = Layout._make(attributes.get(name) or attr.default for name, attr in formats.items() if attr is not None)
    weights = next((d.shape for arg, d in zip(ask.op.inputs, ask.inputs, strict=False) if d and arg.role == "w"), None)
    found = []
    for layout in map(Layout._make, product(*choices)):
        if layout == used:
            continue
        try:
            other = _bind(ask, {**attributes, "data_format": layout.data, "weights_format": layout.weights})
        except SpecError:
            continue
        _, _, kernel = _read(weights or other.shape, used.axes(ask.op, "w"))
        if max(other.problem.w) <= max(kernel) or len(set(other.problem.w)) == 1 < len(kernel):
            found.append(other)
    return sorted(found, key=lambda fit: (not fit.layout.agrees(ask.op), fit.layout.data != used.data))


def _bind(ask: _Question, attributes: Mapping[str, Any]) -> Binding:
    op, inputs, shape, out, infer_size, spatial_shape, strict, follow = ask
    given = {arg.role: d for arg, d in zip(op.inputs, inputs, strict=False) if d is not None}
    check_input_count(op, sum(arg.required for arg in op.inputs if arg.role in given))
    dtype = check_dtypes(op, [d.dtype if d else None for d in inputs], strict=strict)
    empty = any(0 in d.shape for d in given.values())
    attrs = check_attributes(op, attributes, allow_empty=empty, strict=strict)
    out_dtype = result_dtype(op, dtype, attrs["out_dtype"], out)
    if attrs["accumulate"] and out is None:
        raise broken("accumulate_out", "accumulate")

    data = next(arg for arg in op.inputs if arg.role in ("x", "y"))
    layout = Layout(attrs["data_format"], attrs["weights_format"])
    rank = _rank(op, data.name, given, out, layout)
    axes = {role: layout.axes(op, role) for role in ("x", "w", "y")}
    tell = (data.name, given[data.role].shape)
    stride, dilation, begin, end = (
        _per_axis(name, attrs[name], rank, tell) for name in ("strides", "dilations", "pads_begin", "pads_end")
    )
    extra = _per_axis("output_padding", attrs.get("output_padding", 0), rank, tell)
    groups = attrs["groups"]
    if op.wanted == "x" and op.transposed and any(o >= s for o, s in zip(extra, stride, strict=True)):
        raise broken("output_padding_stride", "output_padding", extra, strides=stride)

    n, totals = _batch_and_channels(op, given, layout, groups)
    asked, source = _asked_shape(op, attrs, shape, out, rank, spatial_shape)
    w = _weights(op, given["w"].shape if "w" in given else asked, layout, groups, totals, given, source)
    if min(w.kernel) < 1:
        name = source if op.wanted == "w" else op.arg("w").name
        raise broken("weights_empty", name, w.shape, why="a kernel has an element at least")
    span = tuple(extent(k, d) for k, d in zip(w.kernel, dilation, strict=True))
    sizes: dict[str, Ints] = {role: _read(given[role].shape, axes[role])[2] for role in ("x", "y") if role in given}

    if op.wanted == "x" and not op.transposed and asked:
        sizes["x"] = _asked_data(op, asked, source, layout, n, w.cx * groups, rank, given, spatial_shape)
    auto = attrs["auto_pad"]
    if auto == "VALID":
        begin = end = (0,) * rank
    elif auto != "None":
        documented = attrs["same_rule"] == "documented" and op.wanted == "x" and not op.transposed
        totals_padding = _same_padding(sizes, span, stride, extra, documented, op.transposed)
        first_half = tuple(t // 2 for t in totals_padding)
        rest = tuple(t - h for t, h in zip(totals_padding, first_half, strict=True))
        upper = (auto == "SAME_UPPER") != documented
        begin, end = (first_half, rest) if upper else (rest, first_half)

    if "x" not in sizes:
        if not op.transposed and not infer_size:
            raise broken("shape_given", str(op.shape_source))
        sizes["x"] = tuple(
            s * (m - 1) + e - b - p + o
            for s, m, e, b, p, o in zip(stride, sizes["y"], span, begin, end, extra, strict=True)
        )
        for axis, size in enumerate(sizes["x"]):
            if size < 0:
                formula = f"{stride[axis]} * ({sizes['y'][axis]} - 1) + {span[axis]} - {begin[axis]} - {end[axis]}"
                formula += f" + {extra[axis]}" if extra[axis] else ""
                formula += f" = {size}"
                raise broken("output_size", "padding", axis=axis, formula=formula, layout=layout.data)
    # Padding that follows from the sizes would follow other ones, too: nothing is told of those that fit.
    told = not auto.startswith("SAME")
    _check_windows(op, layout, sizes, w.kernel, span, stride, dilation, begin, end, source, told)
    if "y" not in sizes:
        pads = tuple(b + e for b, e in zip(begin, end, strict=True))
        sizes["y"] = window_sizes(sizes["x"], w.kernel, stride, dilation, pads)
    if any(extra) and op.transposed and op.wanted != "x":
        _check_output_padding(op, layout, sizes, span, stride, begin, end, extra)

    totals = {"x": w.cx * groups, "y": w.cy * groups}
    if op.wanted == "w":
        result = w.shape
    else:
        result = _place(axes[op.wanted], n, totals[op.wanted], sizes[op.wanted])
        if 0 in given["w"].shape and 0 not in result:
            why = f"{op.output.name} {result} is not, and would have sums over no channels"
            raise broken("weights_empty", op.arg("w").name, given["w"].shape, why=why)
    if out is not None and out.shape != result:
        name = f"{op.output.name} in {layout.of(op.wanted)}"
        why = _why(op, given, layout, _read(out.shape, axes[op.wanted])[2], (sizes, span, stride, begin, end, extra))
        raise broken("shapes_agree", "out", out.shape, hint=why, expected=result, source=name)
    if prod(result) * DTYPES[out_dtype].size not in S64:
        raise broken("addressable", op.output.name, result)
    if "bias" in given and given["bias"].shape != (totals[op.wanted],):
        first = f"channel of {op.output.name} for {_told('w', op, given, layout)}"
        raise broken("bias_length", "bias", given["bias"].shape, expected=totals[op.wanted], first=first)

    if out is None:
        order = axes[op.wanted]
        if follow and _lies_the_other_way(given[data.role], axes[data.role]):
            order = OTHER_ORDER[order]
        out = Description(out_dtype, result, _dense(result, axes[op.wanted], order))
    described = {**given, op.wanted: out}
    strides = {role: described[role].strides or dense_strides(described[role].shape) for role in ("x", "w", "y")}
    bias = given.get("bias")
    problem = Problem(
        wanted=op.wanted,
        dtype=dtype,
        out_dtype=out_dtype,
        n=n,
        g=groups,
        cx=w.cx,
        cy=w.cy,
        x=sizes["x"],
        w=w.kernel,
        y=sizes["y"],
        stride=stride,
        dilation=dilation,
        pad=begin,
        x_strides=settle((n, groups, w.cx, *sizes["x"]), _split_data(strides["x"], axes["x"], w.cx)),
        w_strides=settle((groups, w.cy, w.cx, *w.kernel), _split_weights(strides["w"], axes["w"], w)),
        y_strides=settle((n, groups, w.cy, *sizes["y"]), _split_data(strides["y"], axes["y"], w.cy)),
        bias_stride=None if bias is None else (bias.strides or (1,))[0],
        accumulate=attrs["accumulate"],
        algorithm=attrs["algorithm"],
    )
    return Binding(op, problem, result, strides[op.wanted], begin, end, layout)


def _told(role: str, op: Op, given: Mapping[str, Description], layout: Layout) -> str:
    """A tensor in a message: `src (8, 32, 32, 3) in NXC`."""
    return f"{op.arg(role).name} {given[role].shape} in {layout.of(role)}"


def _why(
    op: Op,
    given: Mapping[str, Description],
    layout: Layout,
    got: Ints,
    windows: tuple[Mapping[str, Ints], Ints, Ints, Ints, Ints, Ints],
) -> str:
    """What the shape of a result follows from, with the formula of the first spatial size that is another one."""
    words = f"it follows from {' and '.join(_told(arg.role, op, given, layout) for arg in op.inputs[:2])}"
    sizes, *rest = windows
    if op.wanted == "w" or (op.wanted == "x" and not op.transposed):
        return words
    for axis, (span, step, before, after, more) in enumerate(zip(*rest, strict=True)):
        x, y = sizes["x"][axis], sizes["y"][axis]
        if got[axis] != (y if op.wanted == "y" else x):
            formula = f"({x} + {before} + {after} - {span}) // {step} + 1 = {y}"
            if op.wanted == "x":
                formula = f"{step} * ({y} - 1) + {span} - {before} - {after}{f' + {more}' if more else ''} = {x}"
            return f"{words}: {formula} on spatial axis {axis}"
    return words


def _lies_the_other_way(tensor: Description, axes: str) -> bool:
    """Whether data lies in memory with its channels last where its format has them first, or the reverse.

    Axes of one element say nothing, nor do strides of 0; what can be read both ways is read as its format.
    """
    if tensor.strides is None:
        return False
    _, channels, space = _read(tensor.shape, axes)
    _, step, steps = _read(tensor.strides, axes)
    apart = [abs(s) for s, n in zip(steps, space, strict=True) if n > 1]
    if channels < 2 or not apart or not step or not all(apart):
        return False
    return abs(step) < min(apart) if axes.endswith("k") else abs(step) > max(apart)


def _dense(shape: Ints, axes: str, order: str) -> Ints:
    """Strides of a tensor without gaps whose axes are in one order and lie in memory in another."""
    rank = len(shape) - 2
    spread = axes.index("k")
    at: dict[str, Ints] = {"k": tuple(range(spread, spread + rank))}
    at |= {a: (i + (rank - 1 if i > spread else 0),) for i, a in enumerate(axes) if a != "k"}
    return dense_strides(shape, tuple(axis for letter in order for axis in at[letter]))


def result_dtype(op: Op, dtype: str, asked: str, out: Description | None) -> str:
    """The element type of the result."""
    allowed = (dtype, "f32") if dtype in ("bf16", "f16") else (dtype,)
    if asked and asked not in allowed:
        raise broken("output_dtype", "out_dtype", asked, expected=" or ".join(allowed))
    if out is None:
        return asked or dtype
    if out.dtype not in ((asked,) if asked else allowed):
        raise broken("output_dtype", "out", out.dtype, expected=asked or " or ".join(allowed))
    return out.dtype


def _rank(op: Op, first: str, given: Mapping[str, Description], out: Description | None, layout: Layout) -> int:
    """The number of spatial axes, the same in every tensor."""
    shape = given[next(a.role for a in op.inputs if a.name == first)].shape
    if not 3 <= len(shape) <= 5:
        grey = f"a single grey image is {first}[None, {'None' if layout.data == 'NCX' else ':, :, None'}]"
        raise broken("data_rank", first, shape, hint=grey if len(shape) == 2 else "")
    for role, description in given.items():
        name = op.arg(role).name
        if role in ("x", "w", "y") and len(description.shape) != len(shape):
            lonely = role == "w" and len(description.shape) == len(shape) + 1
            hint = f"a batch of one is {first}[None]" if lonely else ""
            raise broken("same_rank", name, description.shape, hint=hint, expected=len(shape), first=first, shape=shape)
    if out is not None and len(out.shape) != len(shape):
        raise broken("same_rank", "out", out.shape, expected=len(shape), first=first, shape=shape)
    return len(shape) - 2


def _per_axis(name: str, value: int | Ints, rank: int, tell: tuple[str, Ints]) -> Ints:
    """One value per spatial axis. A scalar serves all; no pads at all are zeros; oneDNN pads its lists to 12."""
    if isinstance(value, int):
        return (value,) * rank
    if not value and name.startswith("pads"):
        return (0,) * rank
    if name == "output_padding" and len(value) == MAX_NDIMS and not any(value[rank:]):
        return value[:rank]
    if len(value) != rank:
        hint = ""
        if name.startswith("pads") and len(value) == 2 * rank:
            hint = f"write pads_begin={value[:rank]}, pads_end={value[rank:]} if these are both, as in ONNX"
        elif name in ("strides", "dilations") and len(value) == rank + 2 and value[0] == 1 in (value[1], value[-1]):
            space = value[2:] if value[-1] != 1 else value[1:-1]
            hint = f"batch and channels have none here: {name}={space}"
        raise broken("axis_values", name, value, hint=hint, expected=values(rank), first=tell[0], shape=tell[1])
    return value


def _read(shape: Ints, axes: str) -> tuple[int, int, Ints]:
    """Batch and channels of data, y and x channels of weights, and the spatial sizes, from a shape in a format."""
    rank = len(shape) - 2
    spread = axes.index("k")
    letters = sorted(set(axes) - {"k"}, key="nycx".index)
    at = {letter: axes.index(letter) + (rank - 1 if axes.index(letter) > spread else 0) for letter in letters}
    first, second = (shape[at[letter]] for letter in letters)
    return first, second, shape[spread : spread + rank]


def _place(axes: str, first: int, second: int, space: Ints) -> Ints:
    """The inverse of `_read`."""
    letters = sorted(set(axes) - {"k"}, key="nycx".index)
    parts: dict[str, Ints] = {letters[0]: (first,), letters[1]: (second,), "k": space}
    return tuple(size for letter in axes for size in parts[letter])


def _batch_and_channels(
    op: Op, given: Mapping[str, Description], layout: Layout, groups: int
) -> tuple[int, dict[str, int]]:
    """The batch size, and the channels of each data tensor that is there."""
    batch: int | None = None
    totals: dict[str, int] = {}
    first = ""
    for role in (a.role for a in op.inputs if a.role in ("x", "y")):
        name, shape = op.arg(role).name, given[role].shape
        n, channels, _ = _read(shape, layout.axes(op, role))
        if channels % groups:
            got = f"{channels} and groups={groups}"
            raise broken("groups_divide", "groups", got, tensor=name, shape=shape, layout=layout.data)
        if batch is not None and n != batch:
            raise broken("same_batch", name, shape, first=first, expected=batch, layout=layout.data)
        batch, totals[role], first = n, channels, first or name
    assert batch is not None
    return batch, totals


def _asked_shape(
    op: Op, attrs: Mapping[str, Any], shape: Ints | None, out: Description | None, rank: int, spatial_shape: bool
) -> tuple[Ints, str]:
    """The output's shape as the caller states it, and who stated it: the input, else the attribute, else `out`."""
    name = op.shape_source
    if name is None:
        return (), ""
    attribute = attrs[name] if any(attrs[name]) or len(attrs[name]) != MAX_NDIMS else None
    asked = shape if shape is not None else attribute
    if asked is None:
        if out is None:
            if op.wanted == "w":
                raise broken("shape_given", name)
            return (), name
        return out.shape, "out"
    lengths = {rank + 2, rank} if spatial_shape else {rank + 2}
    if len(asked) not in lengths:
        raise broken("shape_rank", name, asked, expected=values(rank + 2), tensor=op.output.name)
    if min(asked) < 0:
        raise broken("shape_sign", name, asked)
    return asked, name


def _asked_data(
    op: Op,
    asked: Ints,
    source: str,
    layout: Layout,
    n: int,
    channels: int,
    rank: int,
    given: Mapping[str, Description],
    spatial_shape: bool,
) -> Ints:
    """The spatial sizes of an output whose shape was stated, its batch and channels checked."""
    if spatial_shape and len(asked) == rank:
        return asked
    batch, stated, space = _read(asked, layout.axes(op, "x"))
    if batch != n:
        raise broken("same_batch", source, asked, first=op.arg("y").name, expected=n, layout=layout.data)
    if stated != channels:
        first = _told("w", op, given, layout)
        raise broken("channels", source, asked, expected=channels, first=first, layout=layout.data)
    return space


def _weights(
    op: Op,
    shape: Ints,
    layout: Layout,
    groups: int,
    totals: Mapping[str, int],
    given: Mapping[str, Description],
    source: str,
) -> _Weights:
    """Read the weights' shape. Transposed operations take oneDNN's layout of groups and the documented one."""
    name = op.arg("w").name if "w" in given else source
    axes = layout.axes(op, "w")
    wy, wx, kernel = _read(shape, axes)
    candidates = {"y": (wy, wx * groups)}  # where the groups ride → total channels of y and x
    if op.transposed and groups > 1:
        candidates["x"] = (wy * groups, wx)
    for grouped, (cy, cx) in candidates.items():
        if totals.get("y", cy) == cy and totals.get("x", cx) == cx:
            stated = cy if grouped == "y" else cx
            if stated % groups:
                got = f"{stated} and groups={groups}"
                raise broken("groups_divide", "groups", got, tensor=name, shape=shape, layout=layout.weights)
            return _Weights(shape, cy // groups, cx // groups, kernel, grouped)
    forms = []
    for grouped in candidates:
        sizes: dict[str, Sequence[object]] = {"y": "*", "x": "*", "k": kernel}
        sizes |= {role: (total if role == grouped else total // groups,) for role, total in totals.items()}
        forms.append("(" + ", ".join(str(size) for letter in axes for size in sizes[letter]) + ")")
    shared = groups > 1 and not op.transposed and "x" in totals
    raise broken(
        "weights_channels",
        name,
        shape,
        hint=f"{totals['x']} channels in {groups} groups are {totals['x'] // groups} in each" if shared else "",
        expected=" or ".join(forms),
        groups=groups,
        layout=layout.weights,
        first=" and ".join(_told(a.role, op, given, layout) for a in op.inputs if a.role in totals),
    )


def _same_padding(
    sizes: Mapping[str, Ints], span: Ints, stride: Ints, extra: Ints, documented: bool, transposed: bool
) -> Ints:
    """The total padding of SAME per axis."""
    if documented and "x" in sizes:
        totals = [
            s * (y - 1) + e - x + o for s, y, e, x, o in zip(stride, sizes["y"], span, sizes["x"], extra, strict=True)
        ]
    elif "x" not in sizes or (transposed and any(extra)):
        totals = [e - s for e, s in zip(span, stride, strict=True)]
    else:
        totals = [e - (n % s or s) for e, s, n in zip(span, stride, sizes["x"], strict=True)]
    return tuple(max(t, 0) for t in totals)


def _check_windows(
    op: Op,
    layout: Layout,
    sizes: Mapping[str, Ints],
    kernel: Ints,
    span: Ints,
    stride: Ints,
    dilation: Ints,
    begin: Ints,
    end: Ints,
    source: str,
    told: bool,
) -> None:
    """The sizes of x and y must belong together. Which would fit instead is told if that is known."""
    pads = tuple(b + e for b, e in zip(begin, end, strict=True))
    small = window_sizes(sizes["x"], kernel, stride, dilation, pads)
    big_name = source if op.wanted == "x" and source else op.arg("x").name
    # oneDNN's dst_shape is the shape of diff_src, which nobody guesses.
    big = f"{op.arg('x').name} ({source})" if op.wanted == "x" and source else big_name
    for axis, size in enumerate(sizes["x"]):
        if small[axis] < 0:
            has = f"{size} + {begin[axis]} + {end[axis]}"
            raise broken("kernel_fits", big_name, expected=span[axis], size=has, axis=axis, layout=layout.data)
        if "y" in sizes and sizes["y"][axis] != small[axis]:
            formula = f"({size} + {begin[axis]} + {end[axis]} - {span[axis]}) // {stride[axis]} + 1 for {big} of {size}"
            name = op.arg("y").name
            got = sizes["y"][axis]
            least, most = 1, 0
            if op.wanted == "x":
                least = stride[axis] * (got - 1) + span[axis] - pads[axis]
                most = least + stride[axis] - 1
            elif op.wanted == "w":
                longest = size + pads[axis] - stride[axis] * (got - 1)  # from the first element to the last
                least = max(1, (longest - stride[axis] + dilation[axis] - 1) // dilation[axis] + 1)
                most = (longest - 1) // dilation[axis] + 1
            allowed = f"must be {least}"
            if most > least:
                allowed = f"may be {least} {'or' if most == least + 1 else 'to'} {most}"
            hint = f"{op.output.name} {allowed} there" if told and most >= least else ""
            raise broken(
                "spatial_sizes",
                name,
                got,
                hint=hint,
                expected=small[axis],
                axis=axis,
                formula=formula,
                layout=layout.data,
            )


def _check_output_padding(
    op: Op, layout: Layout, sizes: Mapping[str, Ints], span: Ints, stride: Ints, begin: Ints, end: Ints, extra: Ints
) -> None:
    """A stated output_padding must explain the size of diff_dst."""
    for axis, size in enumerate(sizes["x"]):
        expected = stride[axis] * (sizes["y"][axis] - 1) + span[axis] - begin[axis] - end[axis] + extra[axis]
        if size != expected:
            formula = (
                f"{stride[axis]} * ({sizes['y'][axis]} - 1) + {span[axis]} - {begin[axis]} - {end[axis]}"
                f" + output_padding {extra[axis]}"
            )
            name = op.arg("x").name
            raise broken("spatial_sizes", name, size, expected=expected, axis=axis, formula=formula, layout=layout.data)


def _split_data(strides: Ints, axes: str, channels: int) -> Ints:
    """Strides over (n, g, c, *space) from those of a tensor in the order of its format."""
    n, c, space = _read(strides, axes)
    return (n, c * channels, c, *space)


def _split_weights(strides: Ints, axes: str, w: _Weights) -> Ints:
    """Strides over (g, cy, cx, *kernel) from those of weights in the order of their format."""
    cy, cx, kernel = _read(strides, axes)
    group = cy * w.cy if w.grouped == "y" else cx * w.cx
    return (group, cy, cx, *kernel)
