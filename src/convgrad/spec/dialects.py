"""Older spellings of the operations, as a translation over the table: names in, the table's names out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from .check import broken, lookup, meant, shown
from .table import ALL_OPS, OPS, Op


@dataclass(frozen=True)
class Dialect:
    """One older operation: the row it means, and the words that differ."""

    kind: str
    function: str
    op: str
    inputs: tuple[str, ...]
    output: str
    attrs: Mapping[str, str]  # older attribute name → the table's
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where the older default differs, by the table's name
    spatial_shape: bool = False  # the oldest spelling states only the spatial sizes of the output
    shape_second: bool = False  # the oldest spelling puts the shape before the last tensor

    @property
    def row(self) -> Op:
        """The operation that is meant."""
        return OPS[self.op]

    @property
    def words(self) -> dict[str, str]:
        """The table's word → the older word, for messages."""
        names = zip(self.row.inputs, self.inputs, strict=True)
        words = {arg.name: old for arg, old in names} | {self.row.output.name: self.output}
        return words | {new: old for old, new in self.attrs.items()}


_format = {"filter_format": "weights_format"}
_transposed = {"weights_format": "XIO"}

DIALECTS: dict[str, Dialect] = {
    d.kind: d
    for d in (
        Dialect(
            "ConvolutionBackpropData",
            "convolution_backprop_data",
            "ConvolutionBackwardData",
            ("output_delta", "filter", "output_shape"),
            "input_delta",
            _format | {"output_shape": "dst_shape"},
            spatial_shape=True,
        ),
        Dialect(
            "ConvolutionBackpropFilters",
            "convolution_backprop_filters",
            "ConvolutionBackwardWeights",
            ("input_forward", "output_delta", "filter_shape"),
            "filter_delta",
            _format | {"filter_shape": "weights_shape"},
            shape_second=True,
        ),
        Dialect(
            "ConvTransposeBackpropData",
            "conv_transpose_backprop_data",
            "ConvTransposeBackwardData",
            ("output_delta", "filter"),
            "input_delta",
            _format,
            _transposed,
        ),
        Dialect(
            "ConvTransposeBackpropFilters",
            "conv_transpose_backprop_filters",
            "ConvTransposeBackwardWeights",
            ("input_forward", "output_delta", "filter_shape"),
            "filter_delta",
            _format | {"filter_shape": "weights_shape"},
            _transposed,
        ),
    )
}


@dataclass(frozen=True)
class Meaning:
    """A named operation: its row, and the dialect it was spelled in, if any."""

    name: str
    op: Op
    dialect: Dialect | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs by the names of the caller's spelling."""
        return self.dialect.inputs if self.dialect else tuple(arg.name for arg in self.op.inputs)

    def arrange(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs in the order of the table."""
        if self.dialect and self.dialect.shape_second and len(inputs) == 3:
            first, second, third = inputs
            if _is_shape(second) and not _is_shape(third):
                return first, third, second
        return inputs

    def attributes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes by the table's names."""
        if self.dialect is None:
            return dict(given)
        meant_by = self.dialect.attrs
        newer = {arg.name: old for arg, old in zip(self.op.inputs, self.inputs, strict=True) if arg.role != "shape"}
        attributes = dict(self.dialect.defaults)
        for name, value in given.items():
            if meant_by.get(name, name) in given and name in meant_by:
                raise broken("known_attribute", name, hint=f"it means {meant_by[name]}, which is given too")
            if name in newer:
                error = broken("known_attribute", name, hint=f"did you mean {newer[name]!r}?")
                error.operation = self.name  # it is in the caller's words
                raise error
            if value is not None:
                attributes[meant_by.get(name, name)] = value
        return attributes

    def says(self, given: Mapping[str, Any], name: str) -> bool:
        """Whether an attribute of the table was given, in either spelling."""
        return any(given.get(word) is not None for word in (name, self.tell(name)))

    def retell(self, error: SpecError) -> SpecError:
        """An error in the words of the caller, the operation's name in front."""
        if error.operation:
            return error
        message = self.tell(error.message)
        if error.rule == "input_array" and error.argument != "out" and self.op.shape_source:
            # PyTorch's gradients take the shape before the last tensor.
            name = self.dialect.function if self.dialect else self.op.function
            message += f"; the order is {name}({', '.join(self.inputs)})"
        return SpecError(
            message,
            status=error.status,
            rule=error.rule,
            argument=self.tell(error.argument),
            operation=self.name,
        )

    def tell(self, text: str) -> str:
        """A text in the words of the caller."""
        words = self.dialect.words if self.dialect else {}
        return re.sub(r"\b\w+\b", lambda m: words.get(m[0], m[0]), text)


def _is_shape(value: Any) -> bool:
    """Whether an input is a shape, by having fewer dimensions than any tensor of data."""
    dimensions = getattr(value, "ndim", 3)
    return isinstance(value, (list, tuple)) or (isinstance(dimensions, int) and dimensions < 3)


def find(kind: object) -> Meaning:
    """The operation of a documented name, new or old, with or without the version `-1` that the old ones carry."""
    if isinstance(kind, str):
        name = kind.removesuffix("-1")
        if name in ALL_OPS:
            return Meaning(name, ALL_OPS[name])
        if name in DIALECTS:
            return Meaning(name, DIALECTS[name].row, DIALECTS[name])
        hint = meant(kind, [*ALL_OPS, *DIALECTS])
        if hint:
            raise broken("known_operation", shown(kind), hint=hint)
    op = lookup(kind)
    return Meaning(op.kind, op)
