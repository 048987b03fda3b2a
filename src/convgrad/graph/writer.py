"""Graphs as oneDNN's JSON, in the form that oneDNN reads back.

Every attribute is written, unset lists as twelve zeros. What oneDNN has no word for is said in its words where that
is possible without touching memory (an older order of weight axes is another view of the same weights, another rule of
padding is explicit padding), left out where the shapes say it already (output_padding of a gradient), and refused
otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..spec.table import EXTENDED_DTYPES, MAX_NDIMS
from .compiled import resolve
from .kinds import LayoutType, refuse
from .logical import UNKNOWN_DIM, LogicalTensor
from .ops import Node

if TYPE_CHECKING:
    from .graphs import Graph, Partition

Json = dict[str, Any]
Order = tuple[int, ...]

_NEWER = {"XIO": "XOI", "OIX": "IOX"}  # formats of transposed weights: the older one → the one with its axes swapped


def write(graph: Graph, *, onednn: bool = True) -> str:
    """A graph as text."""
    ports = ([t.id for t in graph.input_ports], [t.id for t in graph.output_ports])
    return _text(graph, graph.get_fpmath_mode(), graph.ops, ports, onednn)


def _text(
    owner: Graph | Partition,
    fpmath: tuple[Any, bool],
    nodes: Sequence[Node],
    ports: tuple[list[int], list[int]],
    onednn: bool,
    more: Mapping[int, Mapping[str, str]] | None = None,
) -> str:
    swaps = _swaps(nodes) if onednn else {}
    head: Json = {
        "version": owner.version,
        "engine_kind": str(owner.engine_kind),
        "fpmath_mode": str(fpmath[0]),
        "fpmath_mode_apply_to_int": "true" if fpmath[1] else "false",
        "input_ports": ports[0],
        "output_ports": ports[1],
    }
    ops = [_op(node, swaps, onednn, (more or {}).get(node.id, {})) for node in nodes]
    return json.dumps(head | {"graph": ops}, indent=2) + "\n"


def _op(node: Node, swaps: Mapping[int, Order], onednn: bool, more: Mapping[str, str]) -> Json:
    dialect = None if onednn else node.meaning.dialect
    older = {new: old for old, new in dialect.attrs.items()} if dialect else {}
    attrs = {
        older.get(name, name): {"type": kind, "value": value} for name, kind, value in _attributes(node, swaps, onednn)
    }
    return {
        "id": node.id,
        "name": node.name,
        "kind": node.row.kind if dialect is None else dialect.kind,
        "attrs": attrs | {name: {"type": "string", "value": value} for name, value in more.items()},
        "inputs": [_tensor(t, swaps.get(t.id), onednn) for t in node.inputs],
        "outputs": [_tensor(node.output, swaps.get(node.output.id), onednn)],
    }


def attributes(node: Node) -> Mapping[str, Any]:
    """The attributes of an operation as oneDNN knows them, for tensors as they are; refused where it has no words."""
    if _swaps([node]):
        raise _unspeakable(node, f"weights_format={node.attrs['weights_format']!r}")
    return _spoken(node)


def _attributes(node: Node, swaps: Mapping[int, Order], onednn: bool) -> Iterable[tuple[str, str, Any]]:
    """Name, type and value of every attribute to write."""
    attrs = _spoken(node) if onednn else node.attrs
    for attr in node.row.attrs:
        if attr.name not in attrs:
            continue
        value = attrs[attr.name]
        if attr.type == "s64[]":
            value = _list(node, attr.name, value, swaps)
        elif onednn and value in attr.beyond:
            value = _NEWER[value]
        yield attr.name, attr.type, int(value) if attr.type == "bool" else value


def _spoken(node: Node) -> Mapping[str, Any]:
    """The attributes that oneDNN knows, with all that the others say."""
    attrs = dict(node.attrs)
    documented = node.row.kind == "ConvolutionBackwardData" and attrs.get("same_rule") == "documented"
    stated = node.row.transposed and node.row.wanted != "x" and any(attrs.get("output_padding", ()))
    if (documented or stated) and attrs["auto_pad"] not in ("None", "VALID"):
        # The padding is not the one that oneDNN would find from the sizes: state it.
        stated_later = node.row.shape_source is not None and len(node.inputs) == 3 and not node.output.is_known
        known = all(t.is_known for t in node.inputs) and not stated_later
        binding = resolve(node, node.inputs, node.output, None)[1] if known else None
        if binding is None:
            raise _unspeakable(node, f"auto_pad={attrs['auto_pad']!r} with shapes that are not known yet")
        attrs |= {"auto_pad": "None", "pads_begin": binding.pads_begin, "pads_end": binding.pads_end}
    dialect, source = node.meaning.dialect, str(node.row.shape_source)
    if dialect is not None and dialect.spatial_shape and len(node.inputs) == 2:
        # The oldest spelling leaves out batch and channels, or all of it.
        if not all(t.is_known for t in node.inputs):
            raise _unspeakable(node, f"{source}={attrs[source]} and inputs that are not known")
        attrs[source] = resolve(node, node.inputs, node.output, None)[0].get_dims()
    if attrs.get("accumulate"):
        raise _unspeakable(node, "accumulate=True")
    return {a.name: attrs[a.name] for a in node.row.attrs if a.origin == "onednn"}


def _list(node: Node, name: str, value: Any, swaps: Mapping[int, Order]) -> list[int]:
    """A list attribute; a shape of weights has its axes turned with them."""
    if isinstance(value, int):
        raise _unspeakable(node, f"{name}={value} for axes of unknown number")
    if name == node.row.shape_source and node.row.wanted == "w" and len(value) != MAX_NDIMS:
        order = swaps.get(node.output.id)
        if order is not None and len(order) == len(value):
            value = [value[axis] for axis in order]
    return list(value)


def _ndims(node: Node) -> int:
    """The number of dimensions of data and weights, from whichever is known."""
    known = max(t.ndims for t in node.tensors)
    if known < 3:
        raise _unspeakable(node, "a number of dimensions that is not known")
    return known


def _swaps(nodes: Sequence[Node]) -> dict[int, Order]:
    """Weights whose axes oneDNN wants in another order, by tensor id. All operations on a tensor must agree."""
    found: dict[int, Order | None] = {}
    for node in nodes:
        for dtype in {t.dtype for t in node.tensors} & set(EXTENDED_DTYPES):
            raise _unspeakable(node, f"dtype {dtype}")
        for role, tensor in zip((*(a.role for a in node.row.inputs), ""), node.inputs, strict=False):
            _note(found, node, tensor, role)
        _note(found, node, node.output, node.row.wanted)
        if node.row.transposed and node.attrs["groups"] > 1:
            _check_groups(node)
    return {id: order for id, order in found.items() if order}


def _note(found: dict[int, Order | None], node: Node, tensor: LogicalTensor, role: str) -> None:
    order: Order | None = None
    form = node.attrs.get("weights_format")
    if role == "w" and node.row.transposed and form in _NEWER:
        axes = list(range(_ndims(node)))
        first, second = (0, 1) if form == "OIX" else (-2, -1)
        axes[first], axes[second] = axes[second], axes[first]
        order = tuple(axes)
        if any(arg.role == "shape" for arg, _ in zip(node.row.inputs, node.inputs, strict=False)):
            raise _unspeakable(node, f"weights_format={form!r} and a shape that is an input")
    if found.setdefault(tensor.id, order) != order:
        raise _unspeakable(node, f"weights (tensor {tensor.id}) of weights_format={form!r} and of another order too")


def _check_groups(node: Node) -> None:
    """The documented layout of groups, (in/groups, out, X), is no view of oneDNN's (in, out/groups, X)."""
    row, form = node.row, node.attrs["weights_format"]
    tensors = {arg.role: t for arg, t in zip(row.inputs, node.inputs, strict=False)} | {row.wanted: node.output}
    channel = 1 if node.attrs["data_format"] == "NCX" else -1
    weights = tensors["w"].shape if tensors["w"].is_known else node.attrs.get("weights_shape")
    if "shape" in tensors and not tensors["w"].is_known:
        weights = None
    if weights is None or len(weights) == MAX_NDIMS:
        return
    at = {"IOX": (0, 1), "OIX": (1, 0), "XOI": (-1, -2), "XIO": (-2, -1)}[form]  # the axes of y and of x channels
    expected = {"y": weights[at[0]], "x": weights[at[1]] * node.attrs["groups"]}
    for role, channels in expected.items():
        data = tensors[role]
        if data.is_known and data.get_dims()[channel] != channels:
            raise _unspeakable(node, f"weights {weights} in the documented layout of groups")


def _tensor(tensor: LogicalTensor, order: Order | None, onednn: bool) -> Json:
    shape, strides = tensor.shape, tensor.strides
    if order is not None and shape is not None:
        shape = tuple(shape[axis] for axis in order)
        strides = strides and tuple(strides[axis] for axis in order)
    unknown = [UNKNOWN_DIM]
    layout = tensor.layout_type
    if onednn and layout == LayoutType.opaque:
        raise SpecError(f"tensor {tensor.id}: an opaque layout means nothing in a file", status="invalid_arguments")
    return {
        "id": tensor.id,
        "dtype": str(tensor.dtype),
        "shape": unknown if shape is None else list(shape),
        "stride": unknown if strides is None else list(strides),
        "layout_type": str(layout),
        "property_type": str(tensor.property_type),
    }


def _unspeakable(node: Node, what: str) -> SpecError:
    hint = "write it for convgrad with onednn=False"
    return SpecError(f"{what} cannot be said in oneDNN's format; {hint}", status="unimplemented", operation=node.label)


DUMP: set[str] = set()
"""What is written to the working folder: `graph`, `subgraph`, both or nothing."""


def set_dump_mode(mode: str) -> None:
    """Write graphs as they are partitioned (`graph`) and partitions as they are compiled (`subgraph`); "" for none."""
    words = set(filter(None, mode.split(",")))
    if not words <= {"graph", "subgraph"}:
        raise refuse("dump_mode", "the dump mode", repr(mode))
    DUMP.clear()
    DUMP.update(words)


def dump_graph(graph: Graph, groups: Sequence[Sequence[Node]]) -> None:
    """Write graph-<id>.json, and the same with the partition of each operation, if that is asked for."""
    if "graph" not in DUMP:
        return
    ports = ([t.id for t in graph.input_ports], [t.id for t in graph.output_ports])
    more = {
        node.id: {"partition_id": str(i), "backend": "convgrad_backend"}
        for i, group in enumerate(groups)
        for node in group
    }
    Path(f"graph-{graph.id}.json").write_text(write(graph, onednn=False))
    text = _text(graph, graph.get_fpmath_mode(), graph.ops, ports, False, more)
    Path(f"graph-{graph.id}-partitioning.json").write_text(text)


def dump_subgraph(partition: Partition, nodes: Sequence[Node], key: object) -> None:
    """Write graph-<partition>-<hash>.json, if that is asked for."""
    if "subgraph" not in DUMP:
        return
    ports = ([t.id for t in partition.get_input_ports()], [t.id for t in partition.get_output_ports()])
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    text = _text(partition, partition.fpmath, nodes, ports, False)
    Path(f"graph-{partition.id}-{digest}.json").write_text(text)


def _from_environment(environment: Mapping[str, str]) -> None:
    """oneDNN ignores a value that it does not understand; a variable is no place to fail."""
    try:
        set_dump_mode(environment.get("ONEDNN_GRAPH_DUMP", ""))
    except SpecError:
        set_dump_mode("")


_from_environment(os.environ)
