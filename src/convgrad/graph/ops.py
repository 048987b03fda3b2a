"""Operations of a graph: as the caller builds them, and as a graph keeps them once they are checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import SpecError
from ..spec.check import broken, check_attributes, check_dtypes, check_input_count, shown
from ..spec.dialects import Meaning
from ..spec.table import OPS
from ..spec.table import Op as Row
from .kinds import DataType, find, refuse
from .logical import IDS, LogicalTensor, _whole


class Op:
    """One operation with its inputs and outputs in index order, and its attributes by name.

    ::

        op = Op(0, "ConvolutionBackwardData", [diff_dst, weights], [diff_src], strides=[1, 1], pads_begin=[1, 1],
                pads_end=[1, 1], dilations=[1, 1], dst_shape=[8, 64, 56, 56], data_format="NCX", weights_format="OIX")
    """

    def __init__(
        self,
        id: int,
        kind: str,
        inputs: Iterable[LogicalTensor] = (),
        outputs: Iterable[LogicalTensor] = (),
        name: str = "",
        **attrs: Any,
    ) -> None:
        number = _whole(id)
        if number is None or number not in IDS:
            raise refuse("number", "the id of an operation", repr(id), least=0, most="2**64 - 1")
        if not isinstance(kind, str):
            raise refuse("known_kind", shown(kind))
        self.id = number
        self.kind = kind
        self.name = name or f"{kind}_{number}"
        self.inputs: list[LogicalTensor] = []
        self.outputs: list[LogicalTensor] = []
        self.attrs: dict[str, Any] = {}
        self.add_inputs(inputs)
        self.add_outputs(outputs)
        self.set_attrs(attrs)

    def add_input(self, tensor: LogicalTensor) -> Op:
        """Append an input."""
        self.inputs.append(_logical(tensor, f"an input of {self.name}"))
        return self

    def add_inputs(self, tensors: Iterable[LogicalTensor]) -> Op:
        """Append inputs."""
        for tensor in listed_tensors(tensors, f"the inputs of {self.name}"):
            self.add_input(tensor)
        return self

    def add_output(self, tensor: LogicalTensor) -> Op:
        """Append an output."""
        self.outputs.append(_logical(tensor, f"an output of {self.name}"))
        return self

    def add_outputs(self, tensors: Iterable[LogicalTensor]) -> Op:
        """Append outputs."""
        for tensor in listed_tensors(tensors, f"the outputs of {self.name}"):
            self.add_output(tensor)
        return self

    def set_attr(self, name: str, value: Any) -> Op:
        """Set an attribute; a later value replaces an earlier one."""
        if isinstance(value, str) and not value:
            raise refuse("empty_attribute", f"{self.name}: {name}")
        self.attrs[name] = value
        return self

    def set_attrs(self, attrs: Mapping[str, Any]) -> Op:
        """Set attributes by name."""
        for name, value in attrs.items():
            self.set_attr(name, value)
        return self

    def __repr__(self) -> str:
        return f"Op({self.id}, {self.kind!r}, name={self.name!r})"


def listed_tensors(tensors: object, what: str) -> Iterable[LogicalTensor]:
    """A list of tensors; one that stands by itself, or anything else, is refused."""
    if isinstance(tensors, (LogicalTensor, str, bytes, Mapping)) or not isinstance(tensors, Iterable):
        hint = "write [tensor] for a single one" if isinstance(tensors, LogicalTensor) else ""
        raise refuse("tensor_list", what, type(tensors).__name__, hint=hint)
    return tensors


def _logical(tensor: object, what: str) -> LogicalTensor:
    if not isinstance(tensor, LogicalTensor):
        raise refuse("logical_tensor", what, type(tensor).__name__)
    return tensor


@dataclass(frozen=True)
class Node:
    """An operation as a graph keeps it: checked, in the table's words, defaults filled in."""

    id: int
    name: str
    meaning: Meaning
    inputs: tuple[LogicalTensor, ...]
    output: LogicalTensor
    attrs: Mapping[str, Any] = field(hash=False)

    @property
    def row(self) -> Row:
        """The row of the table."""
        return self.meaning.op

    @property
    def label(self) -> str:
        """Kind and name, for messages."""
        return (
            self.meaning.name if self.name == f"{self.meaning.name}_{self.id}" else f"{self.meaning.name} {self.name!r}"
        )

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        """The output, as an `Op` has it."""
        return (self.output,)

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Inputs and output."""
        return (*self.inputs, self.output)

    @property
    def is_convolution(self) -> bool:
        """Whether the operation is one of the six."""
        return self.row.kind in OPS

    @property
    def key(self) -> tuple[object, ...]:
        """What tells two operations apart."""
        return (self.id, self.name, self.meaning.name, tuple(self.attrs.items()))

    def input_name(self, index: int) -> str:
        """The caller's word for an input."""
        return self.meaning.inputs[index]

    def retell(self, error: SpecError) -> SpecError:
        """An error of the table's words in the caller's, with the operation in front."""
        return retell(error, self.meaning, self.label)


def retell(error: SpecError, meaning: Meaning, label: str) -> SpecError:
    """An error of the table's words in the caller's, with the operation in front."""
    if error.argument == "out":
        # A graph has no `out`: what it was is the output tensor.
        name = meaning.op.output.name
        message = error.message.removeprefix("out ").replace(f" of {name} in ", " in ")
        if error.message.startswith("out "):
            error = SpecError(f"{name} {message}", status=error.status, rule=error.rule, argument=name)
    told = meaning.retell(error)
    told.message = told.message.replace("by `out`", "by the shape of the output")
    told.operation = label
    return told


def check(op: Op, *, strict: bool, same_rule: str) -> Node:
    """Check an operation by the table, in oneDNN's order, and fill in the defaults."""
    try:
        meaning = find(op.kind)
    except SpecError as error:
        error.operation = op.name
        raise
    label = meaning.name if op.name == f"{op.kind}_{op.id}" else f"{meaning.name} {op.name!r}"
    try:
        return _checked(op, meaning, strict, same_rule)
    except SpecError as error:
        raise retell(error, meaning, label) from None


def _checked(op: Op, meaning: Meaning, strict: bool, same_rule: str) -> Node:
    row = meaning.op
    if strict and meaning.dialect is not None:
        raise broken("strict", repr(op.kind))
    inputs = _arranged(op.inputs, meaning)
    check_input_count(row, len(inputs))
    dtype = check_dtypes(row, [str(t.dtype) for t in inputs], strict=strict)
    for arg, tensor in zip(row.inputs, inputs, strict=False):
        if arg.role == "shape" and tensor.dtype != DataType.s32:
            raise broken("shape_values", arg.name, tensor.dtype)
    if len(op.outputs) != 1:
        raise refuse("output_count", "the operation", len(op.outputs), name=row.output.name)
    output = op.outputs[0]
    if output.dtype == DataType.undef and not strict:
        output = output.replace(dtype=dtype)
    attrs = _scalars(row, meaning.attributes(op.attrs))
    asked = attrs.get("out_dtype")
    allowed = (dtype, "f32") if dtype in ("bf16", "f16") and not strict else (dtype,)
    if output.dtype not in ((asked,) if asked else allowed):
        raise broken("output_dtype", row.output.name, output.dtype, expected=asked or " or ".join(allowed))
    if row.attr("same_rule") and same_rule != "gradient":
        attrs.setdefault("same_rule", same_rule)
    empty = any(t.shape is not None and 0 in t.shape for t in (*inputs, output))
    exact = check_attributes(row, attrs, allow_empty=empty, strict=strict)
    kept = {a.name: exact[a.name] for a in row.attrs if a.origin == "onednn" or exact[a.name] != a.default}
    rank = max(t.ndims for t in (*inputs, output)) - 2
    for attr in row.attrs:
        # One number for all axes becomes a list as soon as their count is known; so do pads without numbers, which end
        # oneDNN's process when there are groups.
        if attr.per == "axis" and rank > 0:
            value = kept.get(attr.name)
            if isinstance(value, int):
                kept[attr.name] = (value,) * rank
            elif value == () and attr.name.startswith("pads"):
                kept[attr.name] = (0,) * rank
    return Node(op.id, op.name, meaning, inputs, output, MappingProxyType(kept))


def _arranged(inputs: list[LogicalTensor], meaning: Meaning) -> tuple[LogicalTensor, ...]:
    """The inputs in the table's order; the oldest spelling of one operation has its shape in the middle."""
    if meaning.dialect is not None and meaning.dialect.shape_second and len(inputs) == 3:
        first, second, third = inputs
        if second.dtype == DataType.s32 != third.dtype:
            return first, third, second
    return tuple(inputs)


def _scalars(row: Row, given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes; of a list that stands for one number, the first element counts, as in oneDNN."""
    attrs = dict(given)
    for attr in row.attrs:
        value = attrs.get(attr.name)
        if attr.type == "s64" and isinstance(value, (list, tuple)) and value:
            attrs[attr.name] = value[0]
    return attrs
