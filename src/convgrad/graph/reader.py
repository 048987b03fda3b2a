"""oneDNN's JSON of every version, read liberally: unknown keys, preview spellings, absent fields.

What is wrong in a file is told in one message with the place in it. A hostile file is refused before it takes memory:
the text, its nesting and its lists have limits, and shapes are only numbers here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ..errors import ConvgradError, SpecError
from .graphs import Graph
from .kinds import DataType, EngineKind, FpMathMode, LayoutType, PropertyType, here
from .logical import UNKNOWN_DIM, LogicalTensor
from .ops import Op

try:
    import msgspec
except ImportError as error:  # pragma: no cover
    raise ImportError("reading graph files needs msgspec: pip install msgspec") from error

MAX_BYTES = 16 << 20
MAX_BRACKETS = 1 << 18
MAX_COMMAS = 1 << 21
MAX_OPS = 10_000

IGNORED = ("op_depth", "matched", "partition_id", "backend")
"""Attributes that oneDNN adds to its dumps and that mean nothing to an operation."""

_S64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Dims = Annotated[list[_S64], msgspec.Meta(max_length=12)]
_Name = Annotated[str, msgspec.Meta(max_length=1000)]


class _Tensor(msgspec.Struct):
    id: _Id
    dtype: DataType
    shape: _Dims = msgspec.field(default_factory=lambda: [UNKNOWN_DIM])
    stride: _Dims = msgspec.field(default_factory=list)
    layout_type: LayoutType = LayoutType.strided
    property_type: PropertyType = PropertyType.undef


class _Op(msgspec.Struct):
    id: _Id
    kind: _Name
    name: _Name = ""
    attrs: dict[str, msgspec.Raw] = {}
    inputs: Annotated[list[_Tensor], msgspec.Meta(max_length=1000)] = []
    outputs: Annotated[list[_Tensor], msgspec.Meta(max_length=1000)] = []


class _Root(msgspec.Struct):
    graph: Annotated[list[_Op], msgspec.Meta(min_length=1, max_length=MAX_OPS)]
    version: _Name = ""
    engine_kind: EngineKind = EngineKind.cpu
    fpmath_mode: FpMathMode = FpMathMode.strict
    fpmath_mode_apply_to_int: bool | str = False
    input_ports: list[_Id] = []
    output_ports: list[_Id] = []


class _Scalar(msgspec.Struct, tag_field="type", tag="s64"):
    value: _S64 | list[_S64]


class _List(msgspec.Struct, tag_field="type", tag="s64[]"):
    value: _S64 | list[_S64]


class _Real(msgspec.Struct, tag_field="type", tag="f32"):
    value: float


class _Reals(msgspec.Struct, tag_field="type", tag="f32[]"):
    value: float | list[float]


class _Bool(msgspec.Struct, tag_field="type", tag="bool"):
    value: bool | int


class _String(msgspec.Struct, tag_field="type", tag="string"):
    value: _Name


WORDS = {
    "dtype": DataType,
    "layout_type": LayoutType,
    "property_type": PropertyType,
    "engine_kind": EngineKind,
    "fpmath_mode": FpMathMode,
}
"""The keys whose values are words of a list."""

_root = msgspec.json.Decoder(_Root)
_attribute = msgspec.json.Decoder(_Scalar | _List | _Real | _Reals | _Bool | _String)


@dataclass(frozen=True)
class Document:
    """A file as read: its operations, of any kind, not checked yet."""

    ops: tuple[Op, ...]
    version: str = ""
    engine_kind: EngineKind = EngineKind.cpu
    fpmath_mode: FpMathMode = FpMathMode.strict
    apply_to_int: bool = False
    input_ports: tuple[int, ...] = ()
    output_ports: tuple[int, ...] = ()
    source: str = "graph"

    def graph(self, *, strict: bool = False, same_rule: str = "gradient") -> Graph:
        """The graph, checked and finalized."""
        graph = Graph(self.engine_kind, self.fpmath_mode, self.apply_to_int, strict=strict, same_rule=same_rule)
        graph.version = self.version or graph.version
        for op in self.ops:
            graph.add_op(op)
        made = {node.output.id for node in graph.ops}
        taken = {t.id for node in graph.ops for t in node.inputs}
        for id in self.output_ports:
            if id in made & taken:
                graph.keep(id)
        graph.finalize()
        return graph

    def replace(self, **changes: Any) -> Document:
        """The same document with other fields."""
        return replace(self, **changes)


def load(path: str | Path, *, strict: bool = False, same_rule: str = "gradient") -> Graph:
    """The graph in a file, checked and finalized."""
    return read_file(path).graph(strict=strict, same_rule=same_rule)


def from_json(text: str | bytes, *, strict: bool = False, same_rule: str = "gradient") -> Graph:
    """The graph in a text, checked and finalized."""
    return read(text).graph(strict=strict, same_rule=same_rule)


def read_file(path: str | Path) -> Document:
    """The document in a file."""
    if not isinstance(path, (str, os.PathLike)):
        raise SpecError(f"path must be the name of a file, got {type(path).__name__}")
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # The latter for a name that no file can have.
        raise SpecError(f"{path}: {getattr(error, 'strerror', None) or error}", status="invalid_arguments") from None
    return read(content, source=str(path))


def read(text: str | bytes, *, source: str = "graph") -> Document:
    """The document in a text."""
    if not isinstance(text, (str, bytes, bytearray, memoryview)):
        hint = "; json.dumps makes one of it" if isinstance(text, (dict, list)) else ""
        raise SpecError(f"a graph must be given as a text in JSON, got {type(text).__name__}{hint}")
    try:
        return _read(text.encode() if isinstance(text, str) else bytes(text), source)
    except ConvgradError as error:
        raise SpecError(f"{source}: {error}", status=error.status, argument=getattr(error, "argument", "")) from None


def _read(content: bytes, source: str) -> Document:
    if len(content) > MAX_BYTES:
        raise _wrong("", f"a graph file has at most {MAX_BYTES >> 20} MiB")
    if content.count(b"{") + content.count(b"[") > MAX_BRACKETS or content.count(b",") > MAX_COMMAS:
        raise _wrong("", "too many values for a graph file")
    content = content.removeprefix(b"\xef\xbb\xbf")
    root = _decoded(_root, content, "$")
    _check_keys(content)
    ops = tuple(_op(op, f"$.graph[{i}]") for i, op in enumerate(root.graph))
    return Document(
        ops,
        root.version,
        root.engine_kind,
        root.fpmath_mode,
        root.fpmath_mode_apply_to_int in (True, "true", "1"),
        tuple(root.input_ports),
        tuple(root.output_ports),
        source,
    )


def _wrong(place: str, what: str) -> SpecError:
    return SpecError(f"{place}: {what}" if place else what, status="invalid_graph", argument=place)


def _decoded(decoder: msgspec.json.Decoder[Any], content: bytes | msgspec.Raw, place: str) -> Any:
    """A value of the schema; what does not fit is told with its place."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `")
        if decoder is _root and not path:
            what = f"this is not a oneDNN graph file: {what}"
        for word in WORDS if what.startswith("Invalid enum value") else ():
            if path.endswith(f".{word}`"):
                known = list(map(str, WORDS[word]))
                what += f", must be one of {', '.join(known)}"
                got = what.partition("'")[2].partition("'")[0]
                hint = here(got, known)
                what += f"; {hint}" if hint else ""
        raise _wrong(place + path.removesuffix("`").removeprefix("$"), what) from None
    except msgspec.DecodeError as error:
        raise _wrong(_position(bytes(content), str(error)), f"not JSON: {str(error).split(' (byte')[0]}") from None
    except RecursionError:
        raise _wrong(place, "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _wrong(f"byte {error.start}", "not UTF-8") from None
    except (ValueError, OverflowError) as error:
        raise _wrong(place, str(error)) from None


def _position(content: bytes, message: str) -> str:
    """Line and column of the byte that a message names."""
    _, found, number = message.partition("(byte ")
    if not found:
        return "at the end"
    before = content[: int(number.rstrip(")"))]
    return f"line {before.count(10) + 1} column {len(before) - before.rfind(10)}"


class _Twice(dict[str, Any]):
    """An object with a key that it has twice."""

    key = ""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice, seen = _Twice(found), set[str]()
    for key, _ in pairs:
        if key in seen:
            twice.key = key
        seen.add(key)
    return twice


def _check_keys(content: bytes) -> None:
    """Of two values for one key a reader takes the first or the last; so there must not be two."""
    try:
        tree = json.loads(content, object_pairs_hook=_pairs)
    except RecursionError:
        raise _wrong("$", "nested too deeply") from None
    except ValueError as error:
        raise _wrong("$", f"not JSON: {error}") from None
    waiting: list[tuple[str, Any]] = [("$", tree)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, _Twice):
            raise _wrong(place, f"has the key {value.key!r} twice")
        if isinstance(value, dict):
            waiting.extend((f"{place}.{key}", v) for key, v in value.items() if isinstance(v, (dict, list)))
        elif isinstance(value, list):
            waiting.extend((f"{place}[{i}]", v) for i, v in enumerate(value) if isinstance(v, (dict, list)))


def _op(given: _Op, place: str) -> Op:
    """An operation, with values for attributes."""
    attrs: dict[str, Any] = {}
    for name, raw in given.attrs.items():
        if name in IGNORED:
            continue
        found = _decoded(_attribute, raw, f"{place}.attrs.{name}")
        value = found.value
        if isinstance(found, _Bool):
            value = bool(value)
        if isinstance(found, _List) and not isinstance(value, list):
            value = [value]
        if value != "":
            attrs[name] = tuple(value) if isinstance(value, list) else value
    try:
        return Op(
            given.id,
            given.kind,
            [_logical(t, f"{place}.inputs[{i}]") for i, t in enumerate(given.inputs)],
            [_logical(t, f"{place}.outputs[{i}]") for i, t in enumerate(given.outputs)],
            given.name,
        ).set_attrs(attrs)
    except SpecError as error:
        raise error if error.status == "invalid_graph" else _wrong(place, str(error)) from None


def _logical(given: _Tensor, place: str) -> LogicalTensor:
    """A tensor. Every layout with strides is a strided one, as for oneDNN's own reader, except `any`."""
    dims: int | Sequence[int] = -1 if given.shape in ([UNKNOWN_DIM], [-1]) else given.shape
    unknown = dims == -1 or any(n < 0 for n in given.shape)
    strides: Sequence[int] | None = given.stride
    if unknown or not given.stride or all(s < 0 for s in given.stride) or given.layout_type == LayoutType.any:
        strides = None
    layout = given.layout_type
    if layout != LayoutType.any and (strides is not None or not given.shape):
        layout = LayoutType.strided
    if layout == LayoutType.opaque:
        layout = LayoutType.undef
    try:
        return LogicalTensor(given.id, given.dtype, dims, layout, given.property_type, strides=strides)
    except SpecError as error:
        raise _wrong(place, str(error)) from None
