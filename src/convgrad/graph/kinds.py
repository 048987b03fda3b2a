"""The words of the graph objects, spelled as oneDNN spells them, and the mistakes that can be made with them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from ..errors import SpecError
from ..spec import dialects
from ..spec.check import breach, broken, dtype_word, meant, shown
from ..spec.dialects import DIALECTS, Meaning
from ..spec.table import ALL_OPS, SPELLINGS, Rule

W = TypeVar("W", bound="Word")


class Word(str, Enum):
    """A word of a closed list. Wherever one is expected, its spelling will do."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def of(cls: type[W], value: object, argument: str) -> W:
        """The member for a spelling."""
        try:
            return cls(value)
        except ValueError:
            known = [str(member) for member in cls]
            raise refuse("word", argument, repr(value), hint=here(value, known), expected=", ".join(known)) from None


def here(value: object, known: Sequence[str]) -> str:
    """A hint at the word of a list that a value means: `'float32' is 'f32' here`."""
    word = dtype_word(value)
    ours = SPELLINGS.get(word.lower(), word) if isinstance(word, str) else None
    if ours in known:
        return f"{value!r} is {ours!r} here" if isinstance(value, str) else f"that is {ours!r} here"
    return meant(value, known)


class DataType(Word):
    """Element types. `f64` is convgrad's own; the operations of this family take f32, bf16, f16 and f64."""

    undef = "undef"
    f16 = "f16"
    bf16 = "bf16"
    f32 = "f32"
    s32 = "s32"
    s8 = "s8"
    u8 = "u8"
    boolean = "boolean"
    f8_e5m2 = "f8_e5m2"
    f8_e4m3 = "f8_e4m3"
    s4 = "s4"
    u4 = "u4"
    s64 = "s64"
    f64 = "f64"


class LayoutType(Word):
    """How much is said of the strides."""

    undef = "undef"
    any = "any"
    strided = "strided"
    opaque = "opaque"


class PropertyType(Word):
    """What is known of a tensor's values."""

    undef = "undef"
    variable = "variable"
    constant = "constant"
    host_scalar = "host_scalar"


class EngineKind(Word):
    """Kinds of devices."""

    cpu = "cpu"
    gpu = "gpu"
    any = "any"


class FpMathMode(Word):
    """How much precision f32 inputs may lose. convgrad computes `strict`, a valid answer to all of them."""

    strict = "strict"
    bf16 = "bf16"
    f16 = "f16"
    tf32 = "tf32"
    any = "any"


class Policy(Word):
    """How a graph is cut into partitions: a BiasAdd joins the operation before it, or one partition per operation."""

    fusion = "fusion"
    debug = "debug"


class Status(IntEnum):
    """oneDNN's codes. Every exception of convgrad has the name of its code in `status`."""

    success = 0
    out_of_memory = 1
    invalid_arguments = 2
    unimplemented = 3
    last_impl_reached = 4
    runtime_error = 5
    not_required = 6
    invalid_graph = 7
    invalid_graph_op = 8
    invalid_shape = 9
    invalid_data_type = 10


NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.f32: np.dtype(np.float32),
    DataType.bf16: np.dtype(ml_dtypes.bfloat16),
    DataType.f16: np.dtype(np.float16),
    DataType.f64: np.dtype(np.float64),
    DataType.s32: np.dtype(np.int32),
    DataType.s64: np.dtype(np.int64),
    DataType.s8: np.dtype(np.int8),
    DataType.u8: np.dtype(np.uint8),
    DataType.boolean: np.dtype(np.bool_),
}
"""Element types that have a NumPy type."""

BITS: dict[DataType, int] = {t: 8 * n.itemsize for t, n in NUMPY.items()} | {
    DataType.f8_e5m2: 8,
    DataType.f8_e4m3: 8,
    DataType.s4: 4,
    DataType.u4: 4,
}

_KINDS = """
    Abs AbsBackward Add AvgPool AvgPoolBackward BatchNormForwardTraining BatchNormInference
    BatchNormTrainingBackward BiasAdd BiasAddBackward Clamp ClampBackward Concat Convolution ConvolutionBackwardData
    ConvolutionBackwardWeights ConvTranspose ConvTransposeBackwardData ConvTransposeBackwardWeights Dequantize
    Divide Dropout DynamicDequantize DynamicQuantize Elu EluBackward End Exp GELU GELUBackward GenIndex GreaterEqual
    GroupNorm HardSigmoid HardSigmoidBackward HardSwish HardSwishBackward Identity Interpolate InterpolateBackward
    LayerNorm LayerNormBackward LeakyReLU Log LogSoftmax LogSoftmaxBackward MatMul Maximum MaxPool MaxPoolBackward
    Minimum Mish MishBackward Multiply Pow PReLU PReLUBackward Quantize Reciprocal ReduceL1 ReduceL2 ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReLU ReLUBackward Reorder RMSNorm Round Select Sigmoid SigmoidBackward
    SoftMax SoftMaxBackward SoftPlus SoftPlusBackward Sqrt SqrtBackward Square SquaredDifference StaticReshape
    StaticTranspose Subtract Tanh TanhBackward TypeCast Wildcard
"""
KINDS = frozenset(_KINDS.split())
"""Every operation of oneDNN Graph, of this family or not."""

PREVIEW_KINDS = frozenset(k.replace("Backward", "Backprop") for k in KINDS if not k.startswith("Conv"))
"""The names that oneDNN Graph's preview had for them. Those of this family are in `spec.dialects`."""

GRAPH_RULES: dict[str, Rule] = {
    r.name: r
    for r in (
        # Logical tensors and operations by themselves.
        Rule("word", "invalid_arguments", "must be one of {expected}"),
        Rule("number", "invalid_arguments", "must be a whole number from {least} to {most}"),
        Rule("exchanged", "invalid_arguments", "comes before dims: LogicalTensor(id, 'f32', (2, 3))"),
        Rule("dims", "invalid_arguments", "must be a number of dimensions or a list of sizes below 2**63"),
        Rule("ndims", "invalid_arguments", "must not exceed 12 dimensions"),
        Rule("strides", "invalid_arguments", "must be {expected}, each from 0 to 2**63 - 1"),
        Rule("layout", "invalid_arguments", "goes with {expected}"),
        Rule("host_scalar", "invalid_arguments", "must be a scalar (ndims 0) of s32, f32 or s64 to be a host_scalar"),
        Rule("getter", "invalid_arguments", "is not known: {why}"),
        Rule("logical_tensor", "invalid_arguments", "must be a LogicalTensor"),
        Rule("operation", "invalid_arguments", "must be an Op"),
        Rule("known_kind", "invalid_graph_op", "is not an operation of oneDNN Graph"),
        Rule("empty_attribute", "invalid_arguments", "must not be an empty string"),
        # Graphs.
        Rule("open_graph", "invalid_graph", "is finalized; {what} before that"),
        Rule("finalized", "invalid_graph", "must be finalized first; call finalize()"),
        Rule("new_op_id", "invalid_graph_op", "is the id of another operation, {other}; give each its own"),
        Rule("output_count", "invalid_graph_op", "has 1 output, {name}"),
        Rule("one_tensor", "invalid_graph", "means two tensors: {first} in {here}, {second} in {there}"),
        Rule("one_producer", "invalid_graph", "is the output of both {first} and {second}"),
        Rule("no_cycle", "invalid_graph", "must have an order: {names} wait for each other"),
        Rule("not_empty", "invalid_graph", "must have an operation"),
        Rule("tensor_of_graph", "invalid_arguments", "is not among {where}, {known}"),
        Rule("strict_rule", "invalid_arguments", "must be 'gradient' in a strict graph, the rule that oneDNN follows"),
        # Compiling and executing.
        Rule("engine_kind", "invalid_arguments", "must be of kind {expected}"),
        Rule("supported", "invalid_arguments", "is not supported: {why}"),
        Rule("port", "invalid_arguments", "must include the tensor {id} ({name} of {op})"),
        Rule("given", "invalid_arguments", "must be a list of Tensors or arrays, or a dictionary of them by tensor id"),
        Rule("apart", "invalid_arguments", "must not share memory with {other}: give each output its own"),
        Rule("engine", "invalid_arguments", "must be an Engine, such as Engine('cpu')"),
        Rule("stream", "invalid_arguments", "must be a Stream or None"),
        Rule("tensor_list", "invalid_arguments", "must be a list of LogicalTensors"),
        Rule("port_once", "invalid_arguments", "must have the tensor {id} once"),
        Rule("known_input", "invalid_arguments", "must be known when compiling: {what}"),
        Rule("port_dtype", "invalid_arguments", "must be of {expected}, as in the graph"),
        Rule("output_overlap", "invalid_arguments", "must not have two elements at one address"),
        Rule("capacity", "invalid_arguments", "must not be negative"),
        Rule("tensor", "invalid_arguments", "must be a Tensor"),
        Rule("tensor_described", "invalid_arguments", "must be as compiled, {expected}"),
        Rule("handle", "invalid_arguments", "must be {expected}"),
        Rule("handle_absent", "invalid_arguments", "has no memory; give it some with set_data_handle"),
        Rule("dump_mode", "invalid_arguments", "must be made of graph and subgraph, with a comma between them"),
    )
}


def refuse(rule: str, argument: str, got: object = None, *, hint: str = "", **facts: object) -> SpecError:
    """The error for a broken rule of the graph objects."""
    return breach(GRAPH_RULES[rule], argument, got, hint=hint, **facts)


def find(kind: str) -> Meaning:
    """The operation of a kind that a graph may hold. The rule of the error tells a strange kind from a wrong one."""
    name = kind.removesuffix("-1")
    if name in {*ALL_OPS, *DIALECTS}:
        return dialects.find(kind)
    if name in KINDS | PREVIEW_KINDS:
        raise broken("known_operation", shown(kind))
    raise refuse("known_kind", shown(kind), hint=meant(kind, [*ALL_OPS, *DIALECTS, *sorted(KINDS)]))


def is_ours(kind: str) -> bool:
    """Whether a kind of operation is of this family. One that oneDNN Graph does not have at all is an error."""
    try:
        find(kind)
    except SpecError as error:
        if error.rule != "known_operation":
            raise
        return False
    return True
