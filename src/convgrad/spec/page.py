"""The reference page of the operations, docs/ops.md, from the table: `python -m convgrad.spec.page` prints it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from .dialects import DIALECTS, Dialect
from .table import (
    AUTO_PADS,
    BIAS_OPS,
    DTYPES,
    EXTENDED_DTYPES,
    EXTENSIONS,
    MAX_NDIMS,
    OPS,
    REQUIRED,
    RULES,
    SAME_RULES,
    Attr,
    Op,
)

_ORIGINS = {"onednn": "", "document": "documents"}

_ROLES = {
    "y": "out[n, c, o] = Σ x[n, c', o * strides + k * dilations - pads_begin] · w[c, c', k]",
    "x": "out[n, c', i] = Σ y[n, c, o] · w[c, c', k]  over all o, k with  o * strides + k * dilations - pads_begin = i",
    "w": "out[c, c', k] = Σ x[n, c', o * strides + k * dilations - pads_begin] · y[n, c, o]",
    "sum": "out[n, c, ...] = data[n, c, ...] + bias[c]",
    "bias": "out[c] = Σ data[n, c, ...]  over all n and all places",
}

_SIZES = {  # (transposed, wanted) → how spatial sizes belong together
    (False, "y"): "dst = (src + pads_begin + pads_end - span) // strides + 1",
    (False, "x"): "diff_dst = (diff_src + pads_begin + pads_end - span) // strides + 1",
    (False, "w"): "diff_dst = (src + pads_begin + pads_end - span) // strides + 1",
    (True, "x"): "dst = strides * (src - 1) + span - pads_begin - pads_end + output_padding",
    (True, "y"): "diff_src = (diff_dst + pads_begin + pads_end - span) // strides + 1",
    (True, "w"): "src = (diff_dst + pads_begin + pads_end - span) // strides + 1",
}

_INTRO = """\
# Operations

Generated from the table in `convgrad/spec/table.py` by `make docs`; edit that instead.

Six operations, one geometry: with `y = conv(x, w)`, each takes two of the three tensors and computes the third.

| operation | function | inputs (roles) | computes |
|---|---|---|---|
{overview}

Lists have one value per spatial axis (one axis for 1D, two for 2D, three for 3D); a single number serves every axis.
`span` below is `(kernel - 1) * dilations + 1`, what a kernel covers. Channels are divided into `groups` blocks, and
block `j` of one tensor meets only block `j` of the other. Two more operations add a [bias](#biases) and compute its
gradient.

In the formulas, `n` is an image, `c` and `c'` are channels of a group in the two tensors, `i` and `o` are places in
them, `k` is an element of the kernel, and what would lie outside of a tensor has no part in a sum.

All operations take the [extensions](#extensions) too. The last column of a table of attributes is empty where oneDNN
has the attribute. *documents* means that only its documents do: oneDNN's code, and a strict graph, refuse it.
"""

_PADDING = """\
## Padding

`auto_pad` may be written in any letter case. With any value but `None`, `pads_begin` and `pads_end` are ignored; they
are required all the same, as in oneDNN, so pass 0.

{choices}

The total of SAME, per axis, is never below 0. `same_rule` says what it is, and where the larger half of an odd one
goes:

**`gradient`** ({gradient}):

    total = span - strides                       where x % strides = 0, and for ConvTranspose
    total = span - x % strides                   else
    SAME_UPPER:  pads_begin = total // 2         pads_end = total - pads_begin
    SAME_LOWER:  pads_end = total // 2           pads_begin = total - pads_end

`x` is the tensor that the windows slide over: `src` of the Convolution operations, `diff_dst` of the gradients of
ConvTranspose, the shape of `diff_src` for ConvolutionBackwardData. A gradient of ConvTranspose whose `output_padding`
is not 0 takes the total that ConvTranspose itself has, `span - strides`.

**`documented`** ({documented}; everything else follows the first rule):

    total = strides * (diff_dst - 1) + span - diff_src + output_padding
    SAME_LOWER:  pads_begin = total // 2         pads_end = total - pads_begin
    SAME_UPPER:  pads_end = total // 2           pads_begin = total - pads_end

The two agree where the total is even, `output_padding` is 0 and `diff_dst` is `diff_src / strides` rounded up.
"""

_GROUPS = """\
## Weights of transposed operations with groups

oneDNN's code and its documents lay groups out differently. Both are accepted, told apart by the channels of the data.

| weights_format | groups divide out, as in oneDNN and PyTorch | groups divide in, as in the documents of IOX and XOI |
|---|---|---|
| IOX | (in, out/groups, spatial) | (in/groups, out, spatial) |
| XOI | (spatial, out/groups, in) | (spatial, out, in/groups) |
| OIX, an older spelling | (out/groups, in, spatial) | (out, in/groups, spatial) |
| XIO, an older spelling | (spatial, in, out/groups) | (spatial, in/groups, out) |

Where groups divide `in`, block `j` of the `out` axis holds the weights of group `j`. `diff_weights` comes in the layout
that `weights_shape` (or `out`) asks for.
"""

_BIASES = """\
## Biases

The gradient of the bias of Convolution and ConvTranspose is that of BiasAdd, which the documents have beside the six.
Both operations take data of any rank from 2, and of the [extensions](#extensions) `out`, `accumulate` and `out_dtype`.
"""

_LAYOUTS = """\
## Layouts of arrays

Defaults are those of the documents, channels last. If you pass `data_format="NCX"` but no `weights_format`, you get a
`convgrad.LayoutWarning` (once for each place of call), because the default format of weights has its spatial axes
first. The same warning comes with channels last if only another format makes the kernel square. Shapes that do not fit
are an error, which names the layout that they do fit. Pass `weights_format` to silence the warning. `apply` and graphs
follow the documents without a warning.

Where the caller gives no `out`, the result lies in memory as the first input does: as its format says, or, where that
input has its channels last in memory and first by its format (PyTorch's `channels_last`) or the reverse, in the same
way. So a data gradient follows `diff_dst`, and a weight gradient follows `src`. Graphs lay results out as their logical
tensors say.

Where all arrays of a call are PyTorch's and there is no `out`, autograd, `torch.func` and `torch.compile` see the call
as one operation, which they can differentiate, transform and compile. Elsewhere results have no autograd history: with
`out`, or beside arrays of other libraries, a PyTorch tensor that requires grad is refused while grad mode is on. So are
arrays that are being traced and have no values yet: JAX's always, PyTorch's with `out`. Immutable arrays (JAX arrays,
read-only NumPy arrays) are refused as `out`.
"""


def page() -> str:
    """The whole page."""
    overview = "\n".join(
        f"| [{op.kind}](#{op.kind.lower()}) | `{op.function}` | {_plays(op)} | {op.output.name} = {op.wanted} |"
        for op in OPS.values()
    )
    parts = [
        _INTRO.format(overview=overview),
        *(_section(op) for op in OPS.values()),
        _BIASES,
        *(_section(op, "###") for op in BIAS_OPS.values()),
        _extensions(),
        _PADDING.format(choices=_list(AUTO_PADS), **SAME_RULES),
        _GROUPS,
        _LAYOUTS,
        _dtypes(),
        _older(),
        _rules(),
    ]
    return "\n".join(parts)


def _plays(op: Op) -> str:
    return ", ".join(f"{a.name} = {a.role}" for a in op.inputs if a.role in ("x", "w", "y"))


def _list(choices: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in choices.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _section(op: Op, heading: str = "##") -> str:
    """One operation."""
    function = f"`convgrad.{op.function}`" if op.function else f'`convgrad.apply("{op.kind}", ...)`'
    parts = [f"{heading} {op.kind}\n", f"{op.text} {function}\n", f"    {_formula(op)}\n"]
    inputs = [(str(i), a.name, a.text, "yes" if a.required else "no") for i, a in enumerate(op.inputs)]
    parts.append(_table(("input", "name", "what it is", "required"), inputs))
    parts.append(_table(("output", "name", "what it is"), [("0", op.output.name, op.output.text)]))
    attributes = [
        (f"`{a.name}`", a.type, _default(a), _values(a), _ORIGINS[a.origin]) for a in op.attrs if a not in EXTENSIONS
    ]
    parts.append(_table(("attribute", "type", "default", "meaning and values", "known to"), attributes))
    if op.wanted in ("x", "w", "y"):
        parts.append(f"Sizes on each spatial axis: `{_SIZES[op.transposed, op.wanted]}`.\n")
    parts.extend(_notes(op))
    return "\n".join(parts)


def _extensions() -> str:
    """What every operation takes besides."""
    rows = [[f"`{a.name}`", a.type, _default(a), _values(a)] for a in EXTENSIONS]
    rows.append(["`out`", "array", "none", "write the result there, whatever its strides, and return it"])
    return "\n".join(["## Extensions\n", _table(("extension", "type", "default", "meaning and values"), rows)])


def _formula(op: Op) -> str:
    """The sum in the words of the operation."""
    words = {a.role: a.name for a in op.inputs} | {"out": op.output.name}
    return re.sub(r"\b(out|x|y|w|data)(?=\[)", lambda m: words[m[1]], _ROLES[op.wanted])


def _notes(op: Op) -> Iterator[str]:
    if op.shape_source:
        sources = f"the input `{op.shape_source}`, else from the attribute `{op.shape_source}`, else from `out`"
        text = f"The shape of {op.output.name} comes from {sources}."
        if op.wanted == "x":
            text += (
                " Without any of them the function computes it, an extension: "
                "`strides * (diff_dst - 1) + span - pads_begin - pads_end + output_padding`. A graph asks for it."
            )
        yield text + "\n"


def _default(attr: Attr) -> str:
    if attr.default is REQUIRED:
        return "required"
    if attr.default == (0,) * MAX_NDIMS:
        return "zeros" if attr.per == "axis" else "none"
    return f"`{attr.default}`" if attr.default != "" else "none"


def _values(attr: Attr) -> str:
    """What an attribute means, and the values that it takes."""
    text = attr.text
    if attr.minimum is not None:
        text += f"; at least {attr.minimum}"
    if attr.per == "dimension":
        text += ", one per dimension"
    if attr.name == "auto_pad":
        return text + ": " + ", ".join(f"`{c}`" for c in attr.choices) + " (see [Padding](#padding))"
    if attr.choices:
        strict = dict.fromkeys(attr.beyond, " (a strict graph refuses it)")
        text += ": " + "; ".join(f"`{c}` {t}".strip() + strict.get(c, "") for c, t in attr.choices.items())
    return text


def _dtypes() -> str:
    rows = [(dtype, dtype, "f32" if dtype in ("bf16", "f16") else "") for dtype in (*DTYPES, *EXTENDED_DTYPES)]
    marked = [(f"{t} (convgrad)" if t in EXTENDED_DTYPES else t, result, wide) for t, result, wide in rows]
    return "\n".join(
        [
            "## Data types\n",
            "All tensors of a call have one element type, bias included; a shape input is s32, or any integers.\n",
            _table(("inputs", "result", "result with `out_dtype`, or by `out`"), marked),
            "Sums of f32, bf16 and f16 data are kept in f32 (of f64 data in f64), in no particular order, and are "
            "rounded once, to nearest even, at the end.\n",
        ]
    )


def _older() -> str:
    """The older names."""
    parts = ["## Older names\n"]
    parts.append(
        "Operations of the oneDNN Graph preview, for `convgrad.apply` (with or without the version `-1`) and as "
        "functions in `convgrad.compat`. They compute what their successors do.\n"
    )
    rows = [
        (d.kind, f"`compat.{d.function}`", f"[{d.op}](#{d.op.lower()})", ", ".join(_words(d)), _older_notes(d))
        for d in DIALECTS.values()
    ]
    parts.append(_table(("operation", "function", "today", "words", "differs"), rows))
    return "\n".join(parts)


def _words(dialect: Dialect) -> Iterator[str]:
    for new, old in dialect.words.items():
        if new != old:
            yield f"`{old}` = {new}"


def _older_notes(dialect: Dialect) -> str:
    notes = [f"{dialect.words.get(name, name)} is `{value}` by default" for name, value in dialect.defaults.items()]
    if dialect.spatial_shape:
        notes.append("the shape may be of the spatial sizes alone")
    if dialect.shape_second:
        notes.append("the shape may come second")
    return "; ".join(notes)


def _rules() -> str:
    """What is refused."""
    rows = [
        (f"`{r.name}`", f"… {re.sub(r'{([a-z_]+)}', lambda m: f'*{m[1]}*', r.text)}", r.status) for r in RULES.values()
    ]
    return "\n".join(
        [
            "## Rules\n",
            "A call that breaks a rule raises `convgrad.SpecError` (also a `ValueError`) with the name of the "
            "operation as `.operation`, the argument at fault as `.argument`, the rule as `.rule` and oneDNN's name "
            "for the failure as `.status`. Sizes are stricter than in oneDNN, which lets a kernel stick out of its "
            "padded input by less than a stride.\n",
            _table(("rule", "the argument …", "status"), rows),
        ]
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode("utf-8"))  # whatever the encoding of the terminal
