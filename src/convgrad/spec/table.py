"""The operation table: what each operation takes, and every rule that a call can break. Data only.

Validation, shape inference, docs/ops.md and the generated tests all read these rows. Older names and formats are a
translation over them (`dialects.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Origin = Literal["onednn", "document", "extension"]
"""Who knows an entry: oneDNN's code and documents; the documents only (a strict graph refuses it); convgrad only."""


class _Required:
    """The default of an attribute that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()

MAX_NDIMS = 12
"""oneDNN writes an unset list attribute as this many zeros."""


@dataclass(frozen=True)
class Attr:
    """One attribute: its type, its default, and the values it may take."""

    name: str
    type: Literal["s64[]", "s64", "string", "bool"]
    text: str
    default: Any = REQUIRED
    choices: Mapping[str, str] = field(default_factory=dict)  # allowed value → what it means
    minimum: int | None = None
    per: Literal["", "axis", "dimension"] = ""  # a list has one value per spatial axis, or per dimension of the output
    any_case: bool = False
    origin: Origin = "onednn"
    beyond: frozenset[str] = frozenset()  # choices that oneDNN itself refuses


@dataclass(frozen=True)
class Arg:
    """One input or output, at its index: the name, and the role it plays in y = conv(x, w)."""

    name: str
    role: str  # x, w, y, bias or shape
    text: str
    required: bool = True


@dataclass(frozen=True)
class Op:
    """One operation of the family."""

    kind: str
    function: str  # nothing where `apply` alone computes it
    text: str
    inputs: tuple[Arg, ...]
    output: Arg
    attrs: tuple[Attr, ...]
    transposed: bool

    @property
    def wanted(self) -> str:
        """The tensor of y = conv(x, w) that this operation computes."""
        return self.output.role

    @property
    def shape_source(self) -> str | None:
        """The attribute and input that give the shape of the output, where it does not follow from the inputs."""
        return next((a.name for a in self.inputs if a.role == "shape"), None)

    def attr(self, name: str) -> Attr | None:
        """The attribute of that name, or None."""
        return next((a for a in self.attrs if a.name == name), None)

    def arg(self, role: str) -> Arg:
        """The input or output that plays a role in y = conv(x, w)."""
        return next(a for a in (*self.inputs, self.output) if a.role == role)

    @property
    def required_inputs(self) -> int:
        """How many inputs an operation needs at least."""
        return sum(a.required for a in self.inputs)


# Axes of a format, in the words of y = conv(x, w): n batch, c channels, k spatial axes; for weights, y and x stand for
# the channels of those tensors.
DATA_AXES = {"NXC": "nkc", "NCX": "nck"}
CONV_AXES = {"XIO": "kxy", "OIX": "yxk"}
TRANSPOSE_AXES = {"XOI": "kxy", "IOX": "yxk", "XIO": "kyx", "OIX": "xyk"}

# The other order that tensors of a format have in memory: channels last where the format has them first, as PyTorch's
# memory format of that name, and the reverse.
OTHER_ORDER = {"nck": "nkc", "nkc": "nck", "yxk": "ykx", "xyk": "xky", "kxy": "yxk", "kyx": "xyk"}

DTYPES = ("f32", "bf16", "f16")
EXTENDED_DTYPES = ("f64",)
AUTO_PADS = {
    "None": "use pads_begin and pads_end",
    "SAME_UPPER": "as much padding as makes y = x / stride, rounded up; of an odd total the extra zero goes to the end",
    "SAME_LOWER": "the same; of an odd total the extra zero goes to the beginning",
    "VALID": "no padding",
}
SAME_RULES = {
    "gradient": "from the size of x alone, as oneDNN and TensorFlow do, so that gradients belong to their forward",
    "documented": "for ConvolutionBackwardData, the formula printed in its document",
}

_strides = Attr("strides", "s64[]", "distance between windows", minimum=1, per="axis")
_pads_begin = Attr("pads_begin", "s64[]", "zeros before each spatial axis of x", minimum=0, per="axis")
_pads_end = Attr("pads_end", "s64[]", "zeros after each spatial axis of x", minimum=0, per="axis")
_dilations = Attr("dilations", "s64[]", "distance between kernel elements; 1 is dense", minimum=1, per="axis")
_auto_pad = Attr(
    "auto_pad",
    "string",
    "how padding is chosen; with any value but None, pads_begin and pads_end are ignored",
    "None",
    AUTO_PADS,
    any_case=True,
)
_groups = Attr("groups", "s64", "independent blocks that the channels are divided into", 1, minimum=1)
_data_format = Attr(
    "data_format",
    "string",
    "order of the data axes",
    "NXC",
    {"NXC": "(N, spatial, channels)", "NCX": "(N, channels, spatial)"},
)
_conv_format = Attr(
    "weights_format",
    "string",
    "order of the weight axes",
    "XIO",
    {"XIO": "(spatial, in/groups, out)", "OIX": "(out, in/groups, spatial)"},
)
_transpose_format = Attr(
    "weights_format",
    "string",
    "order of the weight axes",
    "XOI",
    {
        "XOI": "(spatial, out/groups, in), or as documented (spatial, out, in/groups)",
        "IOX": "(in, out/groups, spatial), or as documented (in/groups, out, spatial)",
        "XIO": "older spelling: (spatial, in, out/groups)",
        "OIX": "older spelling: (out/groups, in, spatial)",
    },
    beyond=frozenset({"XIO", "OIX"}),
)
_output_padding = Attr(
    "output_padding", "s64[]", "rows and columns added at the end of dst", (0,) * MAX_NDIMS, minimum=0, per="axis"
)
_output_padding_backward = Attr(
    "output_padding",
    "s64[]",
    "the output_padding of the forward operation; sizes are checked against it",
    (0,) * MAX_NDIMS,
    minimum=0,
    per="axis",
    origin="document",
)
_output_padding_data = Attr(
    "output_padding",
    "s64[]",
    "added to the size of diff_src if dst_shape is absent; otherwise ignored",
    (0,) * MAX_NDIMS,
    minimum=0,
    per="axis",
)
_dst_shape = Attr("dst_shape", "s64[]", "shape of diff_src", (0,) * MAX_NDIMS, minimum=1, per="dimension")
_weights_shape = Attr("weights_shape", "s64[]", "shape of diff_weights", (0,) * MAX_NDIMS, minimum=1, per="dimension")

_common = (_strides, _pads_begin, _pads_end, _dilations, _auto_pad, _groups, _data_format)
ALGORITHMS = {
    "direct": "exactly the products of the definition",
    "bf16x6": "f32 in three pieces of bf16, of which six products are summed, on CPUs with tile registers (AMX)",
    "bf16x3": "f32 in two pieces of bf16, of which three products are summed: faster and less exact",
}

EXTENSIONS = (
    Attr(
        "same_rule",
        "string",
        "which rule SAME padding follows",
        "gradient",
        SAME_RULES,
        any_case=True,
        origin="extension",
    ),
    Attr(
        "algorithm",
        "string",
        "how the sums are taken",
        "direct",
        ALGORITHMS,
        any_case=True,
        origin="extension",
    ),
    Attr("accumulate", "bool", "add the result to `out` instead of overwriting it", False, origin="extension"),
    Attr(
        "out_dtype",
        "string",
        "element type of the result; without it, that of the inputs or of `out`",
        "",
        {"f32": "keep the f32 sums of bf16 and f16 data", "bf16": "", "f16": "", "f64": ""},
        origin="extension",
    ),
)

_bias = Arg("bias", "bias", "one value per channel of dst, added before rounding", required=False)

OPS: dict[str, Op] = {
    op.kind: op
    for op in (
        Op(
            "Convolution",
            "convolution",
            "Slide the weights over src.",
            (Arg("src", "x", "input data"), Arg("weights", "w", "kernel"), _bias),
            Arg("dst", "y", "result"),
            (*_common, _conv_format, *EXTENSIONS),
            transposed=False,
        ),
        Op(
            "ConvolutionBackwardData",
            "convolution_backward_data",
            "The gradient of Convolution with respect to src.",
            (
                Arg("diff_dst", "y", "gradient with respect to dst"),
                Arg("weights", "w", "kernel"),
                Arg(
                    "dst_shape", "shape", "shape of diff_src (s32); takes precedence over the attribute", required=False
                ),
            ),
            Arg("diff_src", "x", "gradient with respect to src"),
            (*_common, _conv_format, _output_padding_data, _dst_shape, *EXTENSIONS),
            transposed=False,
        ),
        Op(
            "ConvolutionBackwardWeights",
            "convolution_backward_weights",
            "The gradient of Convolution with respect to weights.",
            (
                Arg("src", "x", "input data of the forward operation"),
                Arg("diff_dst", "y", "gradient with respect to dst"),
                Arg(
                    "weights_shape",
                    "shape",
                    "shape of diff_weights (s32); takes precedence over the attribute",
                    required=False,
                ),
            ),
            Arg("diff_weights", "w", "gradient with respect to weights"),
            (*_common, _conv_format, _weights_shape, *EXTENSIONS),
            transposed=False,
        ),
        Op(
            "ConvTranspose",
            "conv_transpose",
            "Scatter src through the weights: the transpose of Convolution.",
            (Arg("src", "y", "input data"), Arg("weights", "w", "kernel"), _bias),
            Arg("dst", "x", "result"),
            (*_common, _transpose_format, _output_padding, *EXTENSIONS),
            transposed=True,
        ),
        Op(
            "ConvTransposeBackwardData",
            "conv_transpose_backward_data",
            "The gradient of ConvTranspose with respect to src.",
            (Arg("diff_dst", "x", "gradient with respect to dst"), Arg("weights", "w", "kernel")),
            Arg("diff_src", "y", "gradient with respect to src"),
            (*_common, _transpose_format, _output_padding_backward, *EXTENSIONS),
            transposed=True,
        ),
        Op(
            "ConvTransposeBackwardWeights",
            "conv_transpose_backward_weights",
            "The gradient of ConvTranspose with respect to weights.",
            (
                Arg("src", "y", "input data of the forward operation"),
                Arg("diff_dst", "x", "gradient with respect to dst"),
                Arg(
                    "weights_shape",
                    "shape",
                    "shape of diff_weights (s32); takes precedence over the attribute",
                    required=False,
                ),
            ),
            Arg("diff_weights", "w", "gradient with respect to weights"),
            (*_common, _transpose_format, _output_padding_backward, _weights_shape, *EXTENSIONS),
            transposed=True,
        ),
    )
}

_bias_attrs = (_data_format, *(attr for attr in EXTENSIONS if attr.name in ("accumulate", "out_dtype")))

BIAS_OPS: dict[str, Op] = {
    op.kind: op
    for op in (
        Op(
            "BiasAdd",
            "",
            "Add one value per channel.",
            (Arg("src", "data", "input data"), Arg("bias", "bias", "one value per channel")),
            Arg("dst", "sum", "result"),
            _bias_attrs,
            transposed=False,
        ),
        Op(
            "BiasAddBackward",
            "bias_backward",
            "The gradient of BiasAdd, and of the bias of Convolution and ConvTranspose.",
            (Arg("diff_dst", "data", "gradient with respect to dst"),),
            Arg("diff_bias", "bias", "gradient with respect to the bias"),
            _bias_attrs,
            transposed=False,
        ),
    )
}
"""What a layer needs beside the six; bound and computed in `bias.py`."""

ALL_OPS = OPS | BIAS_OPS


RENAMED = {
    "stride": "strides",
    "window_strides": "strides",
    "dilation": "dilations",
    "dilation_rate": "dilations",
    "rhs_dilation": "dilations",
    "group": "groups",
    "feature_group_count": "groups",
    "dtype": "out_dtype",
    "preferred_element_type": "out_dtype",
    "data_layout": "data_format",
    "kernel_layout": "weights_format",
    "filter_format": "weights_format",
}
"""Words of PyTorch, TensorFlow, JAX, ONNX and older documents for attributes that have another name here."""

_LAYOUT = "the order of the axes is given by data_format and weights_format"
_PADDING = (
    "padding is given by pads_begin and pads_end, or chosen by auto_pad='SAME_UPPER' or 'VALID' with "
    "pads_begin=0, pads_end=0 (required, ignored)"
)
_SHAPES = "sizes and channels are read from the shapes of the tensors"
_INPUTS = "the inputs are {inputs}"
_RESULT = "the shape of the result is {shape}"
EXPLAINED = {
    "padding": _PADDING,
    "pads": _PADDING,
    "pad": _PADDING,
    "padding_mode": "padding is always with zeros",
    "layout": _LAYOUT,
    "format": _LAYOUT,
    "memory_format": _LAYOUT,
    "dimension_numbers": _LAYOUT,
    "kernel_size": _SHAPES,
    "kernel_shape": _SHAPES,
    "in_channels": _SHAPES,
    "out_channels": _SHAPES,
    "dim": "1D, 2D or 3D is read from the shapes of the tensors",
    "lhs_dilation": "conv_transpose with strides spaces its input out like this, but it flips the kernel, "
    "and a padding of p is dilation * (kernel - 1) - p there",
    "transposed": "conv_transpose and its gradients are operations of their own",
    "output_size": "sizes follow from the shapes, strides and padding; output_padding adds to them",
    "bias": "bias_backward computes its gradient",
    "use_bias": "a bias is an input, the third one of the forward operations",
    "activation": "apply it to the result",
    "batch_group_count": "groups divides the channels; the batch cannot be divided",
    "output_mask": "each gradient is an operation of its own",
    "precision": "sums are taken in f32, in f64 for f64 data",
    **dict.fromkeys(("input", "inputs", "x", "lhs", "weight", "w", "rhs", "kernel", "filters"), _INPUTS),
    **dict.fromkeys(("shape", "out_shape", "filter_shape"), _RESULT),
    **dict.fromkeys(("grad_output", "grad", "dy", "input_size", "weight_size", "input_shape", "output_shape"), _INPUTS),
}
"""Their words for what is said in another way here."""

SPELLINGS = {
    **dict.fromkeys(("nhwc", "nwc", "ndhwc", "nlc", "channels_last"), "NXC"),
    **dict.fromkeys(("nchw", "ncw", "ncdhw", "ncl", "channels_first"), "NCX"),
    **dict.fromkeys(("hwio", "wio", "dhwio", "lio"), "XIO"),
    **dict.fromkeys(("oihw", "oiw", "oidhw", "oil"), "OIX"),
    **dict.fromkeys(("hwoi", "woi", "dhwoi", "loi"), "XOI"),
    **dict.fromkeys(("iohw", "iow", "iodhw", "iol"), "IOX"),
    "same": "SAME_UPPER",
    **dict.fromkeys(("notset", "explicit"), "None"),
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
"""Their values of attributes that take a word, in small letters."""


@dataclass(frozen=True)
class Rule:
    """One thing that a call must obey. `text` follows the argument's name in a message and may hold {fields}."""

    name: str
    status: Literal["invalid_graph_op", "invalid_shape", "invalid_arguments", "invalid_graph"]
    text: str
    layout: bool = False  # whether another order of the axes could be what was meant; the text names the one in use


RULES: dict[str, Rule] = {
    r.name: r
    for r in (
        # The operation by itself, in the order in which oneDNN checks it.
        Rule("known_operation", "invalid_graph_op", "is not an operation of this family"),
        Rule("input_count", "invalid_graph_op", "takes {expected} ({names})"),
        Rule("input_array", "invalid_arguments", "must be a NumPy array, or a tensor with DLPack support"),
        Rule("input_device", "invalid_arguments", "must lie in {where}"),
        Rule("input_traced", "invalid_arguments", "must hold values: an array that is being traced has none here"),
        Rule("input_grad", "invalid_arguments", "must not require gradients: this result has no autograd history"),
        Rule("byte_order", "invalid_arguments", "must have the byte order of this machine"),
        Rule("input_dtype", "invalid_graph_op", "must be one of {expected}"),
        Rule("same_dtype", "invalid_graph_op", "must have the dtype of {first}, {expected}"),
        Rule("output_dtype", "invalid_graph_op", "must be {expected}"),
        Rule("shape_values", "invalid_graph_op", "must be a list of whole numbers (s32)"),
        Rule("required_attribute", "invalid_graph_op", "is required"),
        Rule("attribute_type", "invalid_graph_op", "must be {expected}"),
        Rule("attribute_choice", "invalid_graph_op", "must be one of {expected}"),
        Rule("attribute_minimum", "invalid_graph_op", "must be at least {minimum}"),
        Rule("known_attribute", "invalid_graph_op", "is not an attribute of this operation"),
        Rule("strict", "invalid_graph_op", "is refused by oneDNN and so by a strict graph"),
        # Shapes.
        Rule("data_rank", "invalid_arguments", "must have 3, 4 or 5 dimensions (1D, 2D, 3D)"),
        Rule("bias_rank", "invalid_shape", "must have at least 2 dimensions"),
        Rule("same_rank", "invalid_shape", "must have {expected} dimensions, as {first} {shape} has"),
        Rule("axis_values", "invalid_shape", "needs {expected}, one per spatial axis of {first} {shape}"),
        Rule("groups_divide", "invalid_shape", "must divide the channels of {tensor} {shape} in {layout}", layout=True),
        Rule(
            "same_batch", "invalid_shape", "must have the batch size of {first}, {expected}, in {layout}", layout=True
        ),
        Rule(
            "channels",
            "invalid_shape",
            "must have {expected} channels in {layout}, so that it fits {first}",
            layout=True,
        ),
        Rule(
            "weights_channels",
            "invalid_shape",
            "must be {expected} in {layout} with groups={groups}, so that it fits {first}",
            layout=True,
        ),
        Rule("weights_empty", "invalid_arguments", "must not be empty: {why}"),
        Rule(
            "bias_length",
            "invalid_arguments",
            "must be a vector of {expected} values, one per {first}",
            layout=True,
        ),
        Rule(
            "kernel_fits",
            "invalid_shape",
            "must not be smaller than the kernel: needs {expected} on spatial axis {axis} of {layout} with padding, "
            "has {size}",
            layout=True,
        ),
        Rule(
            "spatial_sizes",
            "invalid_shape",
            "must be {expected} on spatial axis {axis} of {layout}: {formula}",
            layout=True,
        ),
        Rule(
            "output_size",
            "invalid_shape",
            "must be smaller than the result: {formula} on spatial axis {axis} of {layout}",
            layout=True,
        ),
        Rule("output_padding_stride", "invalid_shape", "must be smaller than strides {strides}"),
        Rule("shape_given", "invalid_shape", "must be given, as an input, as an attribute or by `out`"),
        Rule("shape_rank", "invalid_shape", "needs {expected}, one per dimension of {tensor}"),
        Rule("shape_sign", "invalid_shape", "must not hold a negative size"),
        Rule("shapes_agree", "invalid_shape", "must have the shape {expected} of {source}", layout=True),
        # The array for the result.
        Rule("out_writable", "invalid_arguments", "must be writable"),
        Rule("out_overlap", "invalid_arguments", "must not have two elements at one address"),
        Rule("accumulate_out", "invalid_arguments", "needs `out`, the array to add to"),
        Rule("addressable", "invalid_arguments", "must have fewer than 2**63 elements and bytes"),
    )
}
