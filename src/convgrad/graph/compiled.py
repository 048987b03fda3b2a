"""Compiled partitions: shapes inferred, the problem bound and planned. Executing one only computes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from .. import bias, calls, host
from .. import engine as engines
from ..dtypes import DTYPES, Array
from ..errors import SpecError, UnsupportedError
from ..libraries import find, open_shape
from ..spec import Problem, bind
from ..spec.bind import Binding, Description
from ..spec.check import broken
from ..spec.problem import Ints, settle
from ..tensors import check_writable, overlaps
from . import verbose
from .kinds import LayoutType, refuse
from .logical import SIZE_MAX, LogicalTensor
from .memory import Engine, Stream, Tensor, allocate, require
from .ops import Node
from .placing import by_id, told


@dataclass(frozen=True)
class Compiled:
    """One operation, ready to run: its tensors as inferred, and the problem where it is a convolution.

    `problem` is None for the bias operations, and where an input states the shape at run time.
    """

    node: Node
    inputs: tuple[LogicalTensor, ...]
    output: LogicalTensor
    problem: Problem | None
    choice: engines.Choice | None = None  # who computes the problem

    @property
    def late(self) -> bool:
        """Whether the shape of the output is known only at run time."""
        return not self.output.is_known

    def run(self, arrays: Sequence[Array], out: Array | None) -> tuple[LogicalTensor, Array]:
        """Compute. Without `out`, and where the shape is found only now, the result is a new array."""
        try:
            return self._run(arrays, out)
        except SpecError as error:
            raise self.node.retell(error) from None

    def _run(self, arrays: Sequence[Array], out: Array | None) -> tuple[LogicalTensor, Array]:
        node, output, problem, choice = self.node, self.output, self.problem, self.choice
        if out is None and node.attrs.get("accumulate"):
            raise broken("accumulate_out", "accumulate")
        if not node.is_convolution:
            place = allocate(output) if out is None else out
            bias.compute(node.row, node.attrs, str(self.inputs[0].dtype), arrays, place)
            return output, place
        given = {arg.role: array for arg, array in zip(node.row.inputs, arrays, strict=False)}
        stated = given.pop("shape", None)
        if stated is not None:
            shape = open_shape(stated, str(node.row.shape_source))
            if problem is None or shape != output.shape:
                # Found only now; or checked only now, against the shape that was compiled for.
                output, binding = resolve(node, self.inputs, output, shape)
                if binding is not None:
                    problem, choice = binding.problem, choose(binding.problem, node)
        if problem is None or choice is None:
            raise broken("shape_given", str(node.row.shape_source))
        if out is None:
            out = allocate(output)
        if out.shape != output.shape:
            raise broken("shapes_agree", node.row.output.name, out.shape, expected=output.shape, source="this problem")
        calls.run(problem, choice, host.tensors(given), host.tensor(out))
        return output, out


def _describe(tensor: LogicalTensor) -> Description:
    return Description(str(tensor.dtype), tensor.get_dims(), tensor.strides)


def build(node: Node, inputs: Sequence[LogicalTensor], output: LogicalTensor) -> Compiled:
    """Infer the output, bind the problem and plan it."""
    try:
        known = tuple(_known(node, i, t) for i, t in enumerate(inputs))
        shape_at_run_time = any(arg.role == "shape" for arg, _ in zip(node.row.inputs, inputs, strict=False))
        if shape_at_run_time and not output.is_known:
            return Compiled(node, known, output.replace(layout_type=LayoutType.strided), None)
        found, binding = resolve(node, known, output, None)
    except SpecError as error:
        raise node.retell(error) from None
    if binding is None:
        return Compiled(node, known, found, None)
    return Compiled(node, known, found, binding.problem, choose(binding.problem, node))


def choose(problem: Problem, node: Node) -> engines.Choice:
    """Who computes a problem, unless its tensors do not fit into memory at all."""
    spans = [1 + sum((n - 1) * s for n, s in zip(problem.shape(r), problem.strides(r), strict=True)) for r in "xwy"]
    sizes = [DTYPES[problem.dtype_of(r)].size for r in "xwy"]
    require(sum(span * size for span, size in zip(spans, sizes, strict=True)), f"{node.label}, {problem}")
    return engines.choose(problem)


def resolve(
    node: Node, inputs: Sequence[LogicalTensor], output: LogicalTensor, shape: Ints | None
) -> tuple[LogicalTensor, Binding | None]:
    """The output with shape and strides, and what a convolution comes to.

    `shape` is the value of the shape input, where it is known.
    """
    if output.layout_type == LayoutType.opaque:
        raise refuse("known_input", node.row.output.name, output.tell(), what="no strides follow from an opaque layout")
    row = node.row
    descriptions = [
        None if arg.role == "shape" else _describe(tensor) for arg, tensor in zip(row.inputs, inputs, strict=False)
    ]
    if not node.is_convolution:
        found = _placed(output, bias.infer(row, descriptions, node.attrs), row.output.name)
        return found, None
    attrs = {name: value for name, value in node.attrs.items() if name != "accumulate"}
    if len(inputs) == len(row.inputs) and row.shape_source is not None:
        del attrs[row.shape_source]  # The input goes before the attribute, and its value comes later.
    if output.dtype != inputs[0].dtype:
        attrs["out_dtype"] = str(output.dtype)
    dialect = node.meaning.dialect
    oldest = dialect is not None and dialect.spatial_shape
    known = _describe(output) if output.is_known else None
    binding = bind(row, descriptions, attrs, shape=shape, out=known, infer_size=oldest, spatial_shape=oldest)
    found = _placed(output, binding.shape, row.output.name)
    if node.attrs.get("accumulate"):
        # Put back here: `bind` adds to an output only if it is told of one, and it may have been inferred just now.
        binding = replace(binding, problem=replace(binding.problem, accumulate=True))
    return found, binding


def _known(node: Node, index: int, tensor: LogicalTensor) -> LogicalTensor:
    """An input with a shape and strides; `any` strides become dense ones."""
    name = f"{node.input_name(index)} (tensor {tensor.id})"
    if tensor.dtype != node.inputs[index].dtype:
        raise refuse("port_dtype", name, tensor.dtype, expected=node.inputs[index].dtype)
    if tensor.layout_type == LayoutType.any:
        tensor = tensor.replace(layout_type=LayoutType.strided)
    if not tensor.is_known or tensor.strides is None:
        what = "its layout" if tensor.is_known else "every size of its shape"
        raise refuse("known_input", name, tensor.tell(), what=what)
    return tensor


def _placed(output: LogicalTensor, shape: Ints, name: str) -> LogicalTensor:
    """The output with its inferred shape: its own strides where it has some, else dense."""
    given = output.shape
    if given is not None and (
        len(given) != len(shape) or any(g >= 0 and g != n for g, n in zip(given, shape, strict=True))
    ):
        told = tuple(g if g >= 0 else "?" for g in given)
        raise broken("shapes_agree", name, told, expected=shape, source="this problem")
    if output.is_known and output.strides is not None:
        if overlaps(shape, output.strides, most=1 << 20):
            raise refuse("output_overlap", name, output.tell())
        return output
    return output.replace(dims=shape, layout_type=LayoutType.strided)


class CompiledPartition:
    """A partition that can run, any number of times and from any number of threads at once."""

    def __init__(self, number: int, nodes: tuple[Node, ...], compiled: Compiled, engine: Engine, fpmath: str) -> None:
        self.id = number
        self._nodes = nodes
        self._compiled = compiled
        self.engine = engine
        self._fields = verbose.describe(number, nodes, compiled.inputs, (compiled.output,), fpmath)

    @property
    def inputs(self) -> tuple[LogicalTensor, ...]:
        """The inputs, in index order."""
        return self._compiled.inputs

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        """The outputs, shapes and strides filled in; a shape stated at run time is still unknown."""
        return (self._compiled.output,)

    @property
    def node(self) -> Node:
        """The operation that is computed; a BiasAdd that was fused is its third input."""
        return self._compiled.node

    @property
    def problem(self) -> Problem | None:
        """The computation in terms of y = conv(x, w); None for a bias operation and for a shape known only later."""
        return self._compiled.problem

    def query_logical_tensor(self, id: int) -> LogicalTensor:
        """An input or output as compiled."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.id == id:
                return tensor
        known = told(t.id for t in (*self.inputs, *self.outputs))
        raise refuse("tensor_of_graph", f"id {id!r}", where="the tensors of the partition", known=known)

    def get_inplace_ports(self) -> list[tuple[int, int]]:
        """Pairs of an input and an output that may share their memory."""
        if self._compiled.node.row.kind == "BiasAdd":
            return [(self.inputs[0].id, self.outputs[0].id)]
        return []

    def get_scratchpad_logical_tensor(self) -> LogicalTensor:
        """Memory that an execution could be lent: none is needed."""
        return SCRATCHPAD

    def execute(
        self,
        stream: Stream | None,
        inputs: Any,
        outputs: Any = None,
        scratchpad: Tensor | None = None,
    ) -> list[Tensor]:
        """Compute, and return the outputs. Tensors are matched by id; a bare array is memory for the port at its place.

        Without `outputs` they are allocated. A `Tensor` whose shape was not known gets it, and its memory, now.
        """
        if stream is not None and not isinstance(stream, Stream):
            raise refuse("stream", "stream", type(stream).__name__)
        if stream is not None and stream.engine.kind != self.engine.kind:
            raise refuse("engine_kind", "stream", stream.engine.kind, expected=self.engine.kind)
        given = [t.array for t in self._matched(inputs, self.inputs, "inputs")]
        targets = self._matched(outputs, self.outputs, "outputs") if outputs is not None else [None]
        target = targets[0]
        place = None
        if target is not None and not (self._compiled.late and not target.logical.is_known):
            place = target.array
            self.check_target(target)
        timed = verbose.EXEC.isEnabledFor(20)
        began = perf_counter() if timed else 0.0
        logical, array = self._compiled.run(given, place)
        if timed:
            verbose.profile(verbose.EXEC, "exec", self._fields, perf_counter() - began)
        if place is not None and target is not None:
            owner = target.get_data_handle()
            library = find(owner)
            if library is not None:
                library.written(owner)
        if target is None:
            return [Tensor(logical, self.engine, array)]
        if place is None:
            target.settle(logical, array)
        return [target]

    def check_target(self, target: Tensor) -> None:
        """Refuse memory that must not be written to."""
        try:
            check_writable(target.locked)
        except SpecError as error:
            raise self._compiled.node.retell(error) from None

    def _matched(self, given: Any, ports: tuple[LogicalTensor, ...], what: str) -> list[Tensor]:
        """The tensors of the ports, in index order."""
        tensors = {id: value for id, value in by_id(given, ports, what).items() if value is not None}
        node = self._compiled.node
        result = []
        for index, port in enumerate(ports):
            name = node.input_name(index) if what == "inputs" else node.row.output.name
            tensor = tensors.get(port.id)
            if tensor is None:
                raise refuse("port", what, told(tensors), id=port.id, name=name, op=node.label)
            if not isinstance(tensor, Tensor):
                tensor = Tensor(port, self.engine, tensor)
            if tensor.engine.kind != self.engine.kind:
                raise refuse("engine_kind", f"tensor {port.id}", tensor.engine.kind, expected=self.engine.kind)
            if not _fits(tensor.logical, port):
                name = f"{name} (tensor {port.id}) of {node.label}"
                raise refuse("tensor_described", name, tensor.logical.tell(), expected=port.tell())
            result.append(tensor)
        return result


def _fits(tensor: LogicalTensor, port: LogicalTensor) -> bool:
    """Whether a tensor is what was compiled for."""
    if tensor.dtype != port.dtype:
        return False
    if not port.is_known:
        return port.shape is None or tensor.shape is None or len(tensor.shape) == len(port.shape)
    if tensor.shape != port.shape or tensor.strides is None or port.strides is None:
        return False
    return settle(port.get_dims(), tensor.strides) == settle(port.get_dims(), port.strides)


SCRATCHPAD = LogicalTensor(SIZE_MAX, "u8", (0,))


class Cache:
    """Compiled partitions by what they were compiled from; the one not used for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(0, capacity)
        self._kept: OrderedDict[Hashable, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """How many partitions are kept."""
        return self._capacity

    @capacity.setter
    def capacity(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise refuse("capacity", "the capacity of the compiled partition cache", repr(value))
        with self._lock:
            self._capacity = value
            while len(self._kept) > value:
                self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Compiled]) -> tuple[Compiled, bool]:
        """What is kept for a key, or what `make` makes; and whether it was kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found, True
        made = make()
        with self._lock:
            if self._capacity:
                self._kept[key] = made
                while len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
        return made, False


def _capacity(environment: Mapping[str, str]) -> int:
    for prefix in ("DNNL", "ONEDNN"):
        try:
            return int(environment.get(f"{prefix}_GRAPH_COMPILED_PARTITION_CACHE_CAPACITY", ""))
        except ValueError:
            continue
    return 1024


CACHE = Cache(_capacity(os.environ))


def get_compiled_partition_cache_capacity() -> int:
    """How many compiled partitions are kept."""
    return CACHE.capacity


def set_compiled_partition_cache_capacity(capacity: int) -> None:
    """Keep at most that many compiled partitions; 0 keeps none."""
    CACHE.capacity = capacity


def get_constant_tensor_cache_capacity(kind: str = "cpu") -> int:
    """Megabytes of constants that are kept: none, always."""
    return 0


def set_constant_tensor_cache_capacity(kind: str, size: int) -> None:
    """Refused unless 0: constants that are kept by address go stale when they are edited in place."""
    if size:
        raise UnsupportedError(
            "constant tensors are never kept between executions, so that edits in place are always seen; "
            "the only capacity is 0"
        )
