"""Graphs and their partitions: build operation by operation, finalize, partition, compile, execute."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from .. import engine as engines
from ..dtypes import Array
from ..errors import ConvgradError, SpecError
from ..spec.problem import settle
from ..spec.table import SAME_RULES
from . import verbose, writer
from .compiled import CACHE, CompiledPartition, build
from .kinds import DataType, EngineKind, FpMathMode, LayoutType, Policy, PropertyType, Status, refuse
from .logical import LogicalTensor
from .memory import Engine, Stream, Tensor
from .ops import Node, Op, check, listed_tensors
from .placing import Step, apart, beside, by_id, check_outputs, put, told

N = TypeVar("N", Op, Node)
_numbers = count()
VERSION = "3.8.0"
"""The version of oneDNN whose files convgrad writes."""


class Graph:
    """Operations that pass tensors to each other.

    `strict` refuses what oneDNN refuses. `same_rule` is the rule of SAME padding for every operation that does not
    state one.
    """

    def __init__(
        self,
        engine_kind: str = "cpu",
        fpmath_mode: str = "strict",
        apply_to_int: bool = False,
        *,
        strict: bool = False,
        same_rule: str = "gradient",
    ) -> None:
        self.id = next(_numbers)
        self.version = VERSION
        self.engine_kind = EngineKind.of(engine_kind, "engine_kind")
        self._fpmath = (FpMathMode.of(fpmath_mode, "fpmath_mode"), bool(apply_to_int))
        if same_rule not in SAME_RULES:
            raise refuse("word", "same_rule", repr(same_rule), expected=", ".join(SAME_RULES))
        if strict and same_rule != "gradient":
            raise refuse("strict_rule", "same_rule", repr(same_rule))
        self.strict = strict
        self.same_rule = same_rule
        self._nodes: dict[int, Node] = {}
        self._kept: set[int] = set()
        self._order: tuple[Node, ...] | None = None

    def set_fpmath_mode(self, mode: str, apply_to_int: bool = False) -> None:
        """Allow less precision. It is noted and passed on in files; what is computed is always `strict`."""
        self._open("set the mode")
        self._fpmath = (FpMathMode.of(mode, "fpmath_mode"), bool(apply_to_int))

    def get_fpmath_mode(self) -> tuple[FpMathMode, bool]:
        """The mode, and whether it applies to integers."""
        return self._fpmath

    def add_op(self, op: Op, allow_exception: bool = True) -> Status:
        """Check an operation by the table and add it. Without exceptions, a mistake is returned as its status."""
        try:
            self._open("add operations")
            if not isinstance(op, Op):
                raise refuse("operation", "what is added to a graph", type(op).__name__)
            if op.id in self._nodes:
                raise refuse("new_op_id", f"id {op.id} of {op.name}", other=self._nodes[op.id].name)
            self._nodes[op.id] = check(op, strict=self.strict, same_rule=self.same_rule)
        except ConvgradError as error:
            verbose.CHECK.info("%sgraph,check,%s,%s", verbose.PREFIX, error.status, error)
            if allow_exception:
                raise
            return Status[error.status]
        return Status.success

    def keep(self, id: int) -> None:
        """Make an inner tensor an output too."""
        self._open("keep tensors")
        if not any(id == node.output.id for node in self._nodes.values()):
            known = told(node.output.id for node in self._nodes.values())
            raise refuse("tensor_of_graph", f"id {id!r}", where="what the graph's operations compute", known=known)
        self._kept.add(id)

    def _open(self, what: str) -> None:
        if self._order is not None:
            raise refuse("open_graph", "the graph", what=what)

    @property
    def is_finalized(self) -> bool:
        """Whether the graph is complete."""
        return self._order is not None

    @property
    def ops(self) -> tuple[Node, ...]:
        """The operations as checked: in topological order once the graph is finalized, before that as added."""
        return tuple(self._nodes.values()) if self._order is None else self._order

    def finalize(self) -> Status:
        """Declare the graph complete. Tensors with one id must be one tensor, and there must be an order."""
        if self._order is None:
            if not self._nodes:
                raise refuse("not_empty", "the graph")
            _check_tensors(self._nodes.values())
            self._order = in_order(list(self._nodes.values()))
        return Status.success

    @property
    def tensors(self) -> dict[int, LogicalTensor]:
        """Every tensor by its id, in the order of the operations."""
        found: dict[int, LogicalTensor] = {}
        for node in self.ops:
            for tensor in node.tensors:
                if tensor.id not in found or (tensor.is_known and not found[tensor.id].is_known):
                    found[tensor.id] = tensor
        return found

    @property
    def input_ports(self) -> tuple[LogicalTensor, ...]:
        """Tensors that no operation computes."""
        made = {node.output.id for node in self.ops}
        return tuple(t for t in self.tensors.values() if t.id not in made)

    @property
    def output_ports(self) -> tuple[LogicalTensor, ...]:
        """Tensors that no operation consumes, and those that were kept."""
        taken = {t.id for node in self.ops for t in node.inputs} - self._kept
        return tuple(node.output for node in self.ops if node.output.id not in taken)

    def get_partitions(self, policy: str = "fusion") -> list[Partition]:
        """The graph cut into partitions, in topological order."""
        chosen = Policy.of(policy, "policy")
        if self._order is None:
            raise refuse("finalized", "the graph")
        groups: list[tuple[Node, ...]] = [(node,) for node in self._order]
        if chosen == Policy.fusion:
            groups = _fused(self._order, {t.id for t in self.output_ports})
        partitions = [Partition._of(nodes, self) for nodes in groups]
        writer.dump_graph(self, [p._nodes for p in partitions])
        return partitions

    def compile(self, engine: Engine | None = None, policy: str = "fusion") -> CompiledGraph:
        """Finalize, partition and compile the whole graph; `execute` then runs it in topological order."""
        self.finalize()
        return CompiledGraph(self, engine or Engine(), policy)

    def to_json(self, *, onednn: bool = True) -> str:
        """The graph in oneDNN's format. `onednn=False` also writes what only convgrad reads."""
        return writer.write(self, onednn=onednn)


class Partition:
    """Operations that are compiled and run as one: one operation, or a forward operation with its BiasAdd."""

    def __init__(self, op: Op, engine_kind: str = "cpu") -> None:
        graph = Graph(engine_kind)
        graph.add_op(op)
        graph.finalize()
        self._set(graph.ops, graph)

    @classmethod
    def _of(cls, nodes: tuple[Node, ...], graph: Graph) -> Partition:
        partition = object.__new__(cls)
        partition._set(nodes, graph)
        return partition

    def _set(self, nodes: tuple[Node, ...], graph: Graph) -> None:
        self.id = next(_numbers)
        self.engine_kind = graph.engine_kind
        self.fpmath = graph.get_fpmath_mode()
        self.version = graph.version
        self._strict = graph.strict
        self._nodes = nodes
        self._work = _joined(*nodes) if len(nodes) == 2 else nodes[0]

    def get_id(self) -> int:
        """The number of the partition."""
        return self.id

    def get_ops(self) -> list[int]:
        """The ids of its operations."""
        return [node.id for node in self._nodes]

    def get_ops_num(self) -> int:
        """How many operations it has."""
        return len(self._nodes)

    def get_engine_kind(self) -> EngineKind:
        """The kind of engine that it is for."""
        return self.engine_kind

    @property
    def label(self) -> str:
        """Its operation, for messages."""
        return self._work.label

    @property
    def step(self) -> Step:
        """The ids of its tensors."""
        return Step(self.label, tuple(t.id for t in self._work.inputs), self._work.output.id)

    @property
    def fused(self) -> tuple[int, ...]:
        """Tensors that are made and used up inside of it, in no memory."""
        return tuple(node.output.id for node in self._nodes if node.output.id != self._work.output.id)

    def word_for(self, id: int) -> str:
        """What the operation calls an input."""
        return self._work.input_name(next(i for i, t in enumerate(self._work.inputs) if t.id == id))

    def get_input_ports(self) -> list[LogicalTensor]:
        """The inputs, in index order."""
        return list(self._work.inputs)

    def get_output_ports(self) -> list[LogicalTensor]:
        """The outputs."""
        return [self._work.output]

    def _refusal(self) -> str:
        if self.engine_kind == EngineKind.gpu:
            return "its engine is a gpu, and graphs compute on cpu"
        if self._strict and len(self._work.inputs) == 3 and self._work.row.inputs[2].role == "shape":
            return "oneDNN runs no operation whose shape is an input, and the graph is strict"
        return ""

    def is_supported(self) -> bool:
        """Whether it can be compiled."""
        return not self._refusal()

    def compile(
        self,
        inputs: Sequence[LogicalTensor] | None = None,
        outputs: Sequence[LogicalTensor] | None = None,
        engine: Engine | None = None,
    ) -> CompiledPartition:
        """Infer shapes, bind, plan and generate code. Tensors are found by id, others are ignored.

        Without tensors, those of the graph serve.
        """
        engine = Engine() if engine is None else engine
        if not isinstance(engine, Engine):
            raise refuse("engine", "engine", type(engine).__name__)
        refusal = self._refusal()
        label = self._work.label
        if refusal:
            raise refuse("supported", f"the partition of {label}", why=refusal)
        if self.engine_kind not in (EngineKind.any, engine.kind):
            raise refuse("engine_kind", "engine", engine.kind, expected=self.engine_kind)
        given = self._matched(inputs, self.get_input_ports(), "inputs")
        wanted = self._matched(outputs, self.get_output_ports(), "outputs")[0]
        if wanted.dtype != self._work.output.dtype:
            name = f"{self._work.row.output.name} (tensor {wanted.id}) of {label}"
            raise refuse("port_dtype", name, wanted.dtype, expected=self._work.output.dtype)
        ops = tuple(node.key for node in self._nodes)
        key = (self._work.key, ops, given, wanted, engine.kind, tuple(engines.setting()), self.fpmath)
        began = perf_counter()
        compiled, kept = CACHE.get(key, lambda: build(self._work, given, wanted))
        if verbose.COMPILE.isEnabledFor(20):
            what = "compile:compiled_partition_cache_hit" if kept else "compile:cache_miss"
            fields = verbose.describe(self.id, self._nodes, compiled.inputs, (compiled.output,), str(self.fpmath[0]))
            verbose.profile(verbose.COMPILE, what, fields, perf_counter() - began)
        writer.dump_subgraph(self, self._nodes, key)
        return CompiledPartition(self.id, self._nodes, compiled, engine, str(self.fpmath[0]))

    def _matched(
        self, given: Sequence[LogicalTensor] | None, ports: list[LogicalTensor], what: str
    ) -> tuple[LogicalTensor, ...]:
        if given is None:
            return tuple(ports)
        tensors: dict[int, LogicalTensor] = {}
        for tensor in listed_tensors(given, what):
            if not isinstance(tensor, LogicalTensor):
                raise refuse("logical_tensor", f"each of {what}", type(tensor).__name__)
            if tensors.setdefault(tensor.id, tensor) != tensor:
                raise refuse("port_once", what, id=tensor.id)
        names = [self._work.input_name(i) for i in range(len(ports))]
        if what == "outputs":
            names = [self._work.row.output.name]
        for port, name in zip(ports, names, strict=True):
            if port.id not in tensors:
                raise refuse("port", what, told(tensors), id=port.id, name=name, op=self._work.label)
        return tuple(tensors[port.id] for port in ports)


class CompiledGraph:
    """A whole graph, compiled. A partition that waits for a shape stated at run time is compiled when it is known."""

    def __init__(self, graph: Graph, engine: Engine, policy: str) -> None:
        self.engine = engine
        self.partitions = tuple(graph.get_partitions(policy))
        self.inputs = graph.input_ports
        known = {t.id: t for t in self.inputs}
        steps: list[CompiledPartition | None] = []
        for partition in self.partitions:
            step = self._compile(partition, known)
            steps.append(step)
            output = step.outputs[0] if step else partition.get_output_ports()[0].replace(dims=-1)
            known[output.id] = output
        self._steps = tuple(steps)
        self.outputs = tuple(known[t.id] for t in graph.output_ports)

    @property
    def steps(self) -> tuple[CompiledPartition, ...]:
        """The compiled partitions, in the order in which they run."""
        return tuple(step for step in self._steps if step is not None)

    def _compile(self, partition: Partition, known: Mapping[int, LogicalTensor]) -> CompiledPartition | None:
        inputs = [known[t.id] for t in partition.get_input_ports()]
        made_later = {p.get_output_ports()[0].id for p in self.partitions}
        if any(not t.is_known and t.id in made_later for t in inputs):
            return None
        return partition.compile(inputs, None, self.engine)

    def execute(self, stream: Stream | None, inputs: Any, outputs: Any = None) -> dict[int, Array]:
        """Compute from arrays (or Tensors) by tensor id; returns the outputs as arrays by id.

        `outputs` are arrays to write to. What it leaves out is allocated. Either may be a list instead: its Tensors say
        their ids, and its arrays go by place in `self.inputs` or `self.outputs`. An output may lie on an input.
        """
        tensors = self._given(by_id(inputs, self.inputs, "inputs"))
        targets = self._targets({} if outputs is None else by_id(outputs, self.outputs, "outputs"))
        waiting = apart(self._order, tensors, targets)
        late: list[tuple[Tensor, Tensor]] = []
        for partition, step in zip(self.partitions, self._steps, strict=True):
            if step is None:
                step = self._compile(partition, {i: t.logical for i, t in tensors.items()})
            if step is None:
                raise SpecError("a shape is still not known", status="invalid_shape")
            port = step.outputs[0]
            target = targets.get(port.id)
            if target is not None and port.id in waiting:
                own = target if isinstance(target, Tensor) else Tensor(port, self.engine, target)
                step.check_target(own)
                target = beside(own)
                late.append((target, own))
            places = None if target is None else [target]
            tensors[port.id] = step.execute(stream, [tensors[t.id] for t in step.inputs], places)[0]
        for values, own in late:
            put(values, own)
            tensors[own.logical.id] = own
        return {t.id: tensors[t.id].array for t in self.outputs}

    def _given(self, inputs: Mapping[int, Any]) -> dict[int, Tensor]:
        """The inputs as Tensors."""
        tensors: dict[int, Tensor] = {}
        for port in self.inputs:
            value = inputs.get(port.id)
            if value is None:
                taker = next(p for p in self.partitions if any(t.id == port.id for t in p.get_input_ports()))
                given = told(id for id, value in inputs.items() if value is not None)
                raise refuse("port", "inputs", given, id=port.id, name=taker.word_for(port.id), op=taker.label)
            tensors[port.id] = value if isinstance(value, Tensor) else Tensor(_dense(port), self.engine, value)
        return tensors

    def _targets(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        """The memory for results: as Tensors, unless their shapes are still to be found."""
        check_outputs(self._order, outputs, {id for p in self.partitions for id in p.fused})
        known = {step.outputs[0].id: step.outputs[0] for step in self.steps if step.outputs[0].is_known}
        return {
            id: Tensor(known[id], self.engine, value) if id in known and not isinstance(value, Tensor) else value
            for id, value in outputs.items()
            if value is not None
        }

    @property
    def _order(self) -> list[Step]:
        """The partitions by the ids of their tensors, in the order in which they run."""
        return [p.step for p in self.partitions]


def _dense(tensor: LogicalTensor) -> LogicalTensor:
    return tensor.replace(layout_type=LayoutType.strided) if tensor.layout_type == LayoutType.any else tensor


def _check_tensors(nodes: Iterable[Node]) -> None:
    """One id means one tensor, which one operation makes."""
    first: dict[int, tuple[LogicalTensor, Node]] = {}
    maker: dict[int, Node] = {}
    for node in nodes:
        for tensor in node.tensors:
            seen, owner = first.setdefault(tensor.id, (tensor, node))
            if not _same(seen, tensor):
                raise refuse(
                    "one_tensor",
                    f"tensor id {tensor.id}",
                    first=seen.tell(),
                    second=tensor.tell(),
                    here=owner.label,
                    there=node.label,
                )
        other = maker.setdefault(node.output.id, node)
        if other is not node:
            name = f"tensor {node.output.id}"
            raise refuse("one_producer", name, first=other.label, second=node.label)


def _same(a: LogicalTensor, b: LogicalTensor) -> bool:
    """Whether two descriptions can be of one tensor; what one of them leaves open, the other may state."""
    if DataType.undef not in (a.dtype, b.dtype) and a.dtype != b.dtype:
        return False
    if PropertyType.undef not in (a.property_type, b.property_type) and a.property_type != b.property_type:
        return False
    if a.layout_id != b.layout_id and None not in (a.layout_id, b.layout_id):
        return False
    if a.shape is None or b.shape is None:
        return True
    if len(a.shape) != len(b.shape) or any(m != n for m, n in zip(a.shape, b.shape, strict=True) if min(m, n) >= 0):
        return False
    if a.strides is None or b.strides is None:
        return True
    return settle(a.shape, a.strides) == settle(b.shape, b.strides)


def in_order(ops: Sequence[N]) -> tuple[N, ...]:
    """Topological order; among those that can go next, the one added first."""
    maker = {t.id: i for i, op in enumerate(ops) for t in op.outputs}
    needs = [{maker[t.id] for t in op.inputs if t.id in maker} for op in ops]
    takers: dict[int, list[int]] = {}
    for i, makers in enumerate(needs):
        for made in makers:
            takers.setdefault(made, []).append(i)
    waits = list(map(len, needs))
    ready = [i for i, missing in enumerate(waits) if not missing]
    order: list[N] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(ops[i])
        for taker in takers.get(i, ()):
            waits[taker] -= 1
            if not waits[taker]:
                heapq.heappush(ready, taker)
    if len(order) < len(ops):
        stuck = [op.name for i, op in enumerate(ops) if waits[i]]
        more = f" and {len(stuck) - 5} more" if len(stuck) > 5 else ""
        raise refuse("no_cycle", "the graph", names=", ".join(stuck[:5]) + more)
    return tuple(order)


def _fused(order: Sequence[Node], outputs: set[int]) -> list[tuple[Node, ...]]:
    """Each forward operation without a bias together with the BiasAdd that alone takes its result."""
    takers: dict[int, list[Node]] = {}
    for node in order:
        for tensor in node.inputs:
            takers.setdefault(tensor.id, []).append(node)
    partner: dict[int, Node] = {}
    for node in order:
        after = takers.get(node.output.id, [])
        if (
            node.row.kind in ("Convolution", "ConvTranspose")
            and len(node.inputs) == 2
            and node.output.id not in outputs
            and node.output.dtype == node.inputs[0].dtype
            and not node.attrs.get("accumulate")
            and len(after) == 1
            and after[0].row.kind == "BiasAdd"
            and after[0].inputs[0].id == node.output.id
            and after[0].inputs[1].id != node.output.id
            and after[0].attrs["data_format"] == node.attrs["data_format"]
        ):
            partner[node.id] = after[0]
    second = {node.id: first for first, node in partner.items()}
    by_id = {node.id: node for node in order}
    # A pair stands where its BiasAdd stood: by then its bias is there too.
    groups: list[tuple[Node, ...]] = []
    for node in order:
        if node.id in partner:
            continue
        groups.append((by_id[second[node.id]], node) if node.id in second else (node,))
    return groups


def _joined(forward: Node, add: Node) -> Node:
    """A forward operation and its BiasAdd as one operation with a bias."""
    return replace(forward, inputs=(*forward.inputs, add.inputs[1]), output=add.output)
