"""What a case changes in a graph file: shapes, layouts, types and attributes. What follows from them is inferred anew.

Outputs are inferred here, before there is a graph: `--mode=L` tells them, and a layout that the case does not name
follows the file's. The graph checks and binds what comes out of this as it does any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..graph.compiled import resolve
from ..graph.graphs import in_order
from ..graph.kinds import FpMathMode, PropertyType, find, is_ours
from ..graph.logical import LogicalTensor
from ..graph.ops import Op, check
from ..graph.placing import told
from ..graph.reader import Document, read_file
from ..spec.problem import Ints, dense_strides, settle
from ..spec.table import DTYPES
from .driver import Case


@lru_cache(maxsize=64)
def document(path: Path) -> Document:
    """A file, read once for all its cases."""
    return read_file(path)


def strangers(document: Document) -> list[str]:
    """The kinds of a file's operations that are not of this family."""
    found = set()
    for op in document.ops:
        try:
            if not is_ours(op.kind):
                found.add(op.kind)
        except SpecError as error:
            error.operation = f"{document.source}: {op.name}"
            raise
    return sorted(found)


def rewrite(document: Document, case: Case) -> Document:
    """The file with the changes of a case."""
    if case.op_kind:
        raise SpecError("--op-kind: only binary and eltwise operations can be exchanged", status="invalid_arguments")
    tensors = {t.id: t for op in document.ops for t in (*op.inputs, *op.outputs)}
    made = {t.id for op in document.ops for t in op.outputs}
    taken = {t.id for op in document.ops for t in op.inputs}
    inputs = {id: t for id, t in tensors.items() if id not in made}
    outputs = made - taken | (set(document.output_ports) & made)
    _known(case.in_shapes, sorted({*inputs, *outputs}), "--in-shapes: {} is not an input or output of the graph")
    _known(case.op_attrs, [op.id for op in document.ops], "--op-attrs: there is no operation {}")
    _known(case.tensor_property, tensors, "--tensor-property: there is no tensor {}")
    _known(case.dt if isinstance(case.dt, Mapping) else {}, tensors, "--dt: there is no tensor {}")
    found = {id: _reshaped(t, case.in_shapes[id]) if id in case.in_shapes else t for id, t in inputs.items()}
    if case.mb:
        found |= {id: _with_batch(found[id], case.mb) for id in _batched(document)}
    found = {id: _retyped(t, case) for id, t in found.items()}
    ops = [_with_attrs(op, case.op_attrs.get(op.id, ""), case.rewrites) for op in document.ops]
    if case.rewrites:
        relaid = any(found[id].strides != t.strides for id, t in inputs.items())
        found = _inferred(ops, found, relaid, case)
    else:
        found |= {id: _retyped(tensors[id], case) for id in made}
    mode, _, flag = case.fpmath.partition(":")
    return document.replace(
        ops=tuple(_copy(op, [found[t.id] for t in op.inputs], [found[t.id] for t in op.outputs]) for op in ops),
        fpmath_mode=FpMathMode(mode) if mode else document.fpmath_mode,
        apply_to_int=flag == "true" if mode else document.apply_to_int,
    )


def _known(ids: Iterable[int], known: Iterable[int], wrong: str) -> None:
    """Refuse an id that the file does not have."""
    for id in ids:
        if id not in known:
            raise SpecError(f"{wrong.format(id)}, only {told(known)}")


def _copy(op: Op, inputs: Iterable[LogicalTensor], outputs: Iterable[LogicalTensor]) -> Op:
    """An operation on other tensors."""
    return Op(op.id, op.kind, inputs, outputs, op.name).set_attrs(op.attrs)


def _retyped(tensor: LogicalTensor, case: Case) -> LogicalTensor:
    """A tensor with its new type and property."""
    dtype = str(tensor.dtype)
    if isinstance(case.dt, Mapping):
        dtype = case.dt.get(tensor.id, dtype)
    elif case.dt and dtype in DTYPES:
        dtype = case.dt
    known = case.tensor_property.get(tensor.id, str(tensor.property_type))
    return tensor.replace(dtype=dtype, property_type=PropertyType.of(known, "property"))


def _reshaped(tensor: LogicalTensor, text: str) -> LogicalTensor:
    """A tensor with the shape and strides of an --in-shapes value."""
    words, star, layout = text.partition("*")
    if not star and words.isalpha() and words != "scalar":
        words, layout = "", words  # the older grammar has no star before a tag
    if star and not layout:
        raise SpecError(f"--in-shapes: {text!r} has nothing after its *")
    if words in ("-", "scalar"):
        return tensor.replace(dims=())
    shape = _numbers(words, text) if words else tensor.get_dims()
    if not layout:
        return tensor.replace(dims=shape, layout_type="strided", strides=None)
    if layout.isalpha():
        letters = [chr(ord("a") + i) for i in range(len(shape))]
        if sorted(layout) != letters:
            raise SpecError(f"--in-shapes: {layout!r} must have each of {''.join(letters)} once, for shape {shape}")
        strides = dense_strides(shape, tuple(letters.index(c) for c in layout))
    else:
        strides = _numbers(layout, text)
    return tensor.replace(dims=shape, layout_type="strided", strides=strides)


def _numbers(text: str, whole: str) -> Ints:
    words = text.split("x")
    if not all(word.isdecimal() and len(word) < 20 for word in words):
        raise SpecError(f"--in-shapes: {whole!r} is not of the form 2x3x4, 2x3x4*acb or 2x3x4*12x1x3")
    return tuple(int(word) for word in words)


def _batched(document: Document) -> list[int]:
    """The inputs whose first axis is the batch."""
    made = {t.id for op in document.ops for t in op.outputs}
    found = []
    for op in document.ops:
        meaning = find(op.kind)
        if meaning.op.shape_source is not None:
            raise SpecError(
                f"--mb: the {meaning.op.shape_source} of {op.name} would not follow; "
                f"use --in-shapes and --op-attrs={op.id}:{meaning.op.shape_source}:...",
                status="invalid_arguments",
            )
        for arg, tensor in zip(meaning.op.inputs, op.inputs, strict=False):
            if arg.role in ("x", "y", "data") and tensor.id not in made:
                found.append(tensor.id)
    return found


def _with_batch(tensor: LogicalTensor, batch: int) -> LogicalTensor:
    shape = (batch, *tensor.get_dims()[1:])
    return tensor.replace(dims=shape, layout_type="strided", strides=_like(tensor, shape))


def _like(tensor: LogicalTensor, shape: Ints) -> Ints | None:
    """Strides for a shape, its axes in the order of a tensor's; None where that has gaps, or another rank."""
    if tensor.strides is None or tensor.shape is None or len(shape) != len(tensor.shape):
        return None
    order = tuple(sorted(range(len(shape)), key=lambda axis: (-tensor.get_strides()[axis], axis)))
    dense = dense_strides(tensor.shape, order)
    if settle(tensor.shape, dense) != settle(tensor.shape, tensor.strides):
        return None
    return dense_strides(shape, order)


def _with_attrs(op: Op, text: str, rewrites: bool) -> Op:
    """An operation with the attributes of an --op-attrs value; the last of two values for one name counts."""
    attrs = dict(op.attrs)
    if rewrites and not any(attrs.get("output_padding", (1,))):
        del attrs["output_padding"]  # Zeros say nothing, and there may be more axes now.
    for entry in filter(None, text.split("*")):
        name, colon, value = entry.partition(":")
        if not colon or not value:
            raise SpecError(f"--op-attrs: {entry!r} is not of the form NAME:VALUE")
        if value == "undef":
            attrs.pop(name, None)
            continue
        attrs[name] = _value(op, name, value)
    changed = Op(op.id, op.kind, op.inputs, op.outputs, op.name)
    return changed.set_attrs(attrs)


def _value(op: Op, name: str, text: str) -> Any:
    """An attribute's value from its text, by the type that the table gives it."""
    meaning = find(op.kind)
    renamed = meaning.dialect.attrs.get(name, name) if meaning.dialect else name
    attr = meaning.op.attr(renamed)
    if attr is None:
        return text
    words = text.split("x") if attr.type == "s64[]" else [text]
    if attr.type in ("s64", "s64[]"):
        if not all(word.removeprefix("-").isdecimal() and len(word) < 21 for word in words):
            raise SpecError(
                f"--op-attrs: {name} must be {'numbers like 2x2' if len(words) > 1 else 'a number'}, got {text!r}"
            )
        numbers = [int(word) for word in words]
        return numbers if attr.type == "s64[]" else numbers[0]
    if attr.type == "bool":
        return text in ("true", "1")
    return text


def _inferred(ops: list[Op], inputs: Mapping[int, LogicalTensor], relaid: bool, case: Case) -> dict[int, LogicalTensor]:
    """All tensors, the outputs inferred anew: shapes from the inputs, the order of axes from the file.

    Where the inputs are `relaid`, the order is that of the first one. An output that --in-shapes names has its say.
    """
    found = dict(inputs)
    for op in in_order(ops):
        given = [found[t.id] for t in op.inputs]
        for output in op.outputs:
            found[output.id] = _output(op, given, _retyped(output, case), relaid, case)
    return found


def _output(op: Op, given: Sequence[LogicalTensor], old: LogicalTensor, relaid: bool, case: Case) -> LogicalTensor:
    """An output, inferred as the graph would. Where nothing else states the shape of a gradient, the file does."""
    asked = case.in_shapes.get(old.id, "")
    if asked[:1].isdigit() or asked in ("-", "scalar"):
        return _reshaped(old, asked)
    unknown = old.replace(dims=-1, layout_type="strided")
    node = check(_copy(op, given, [unknown]), strict=case.strict, same_rule=case.same_rule)
    source = node.row.shape_source
    stated = source is None or any(node.attrs[source])
    try:
        shape = resolve(node, node.inputs, node.output if stated else old, None)[0].get_dims()
    except SpecError as error:
        raise node.retell(error) from None
    like = _like(given[0] if relaid else old, shape)
    inferred = old.replace(dims=shape, layout_type="strided", strides=like)
    return _reshaped(inferred, asked) if asked else inferred
