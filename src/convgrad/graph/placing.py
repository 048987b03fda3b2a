"""Which memory the tensors of an execution have: what the caller gave for each, and what of it is shared.

An output of a whole graph may lie on an input that is still to be read. It is then computed in memory of its own, and
copied when nothing reads that input any more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import host
from ..dtypes import Array
from ..libraries import find, on_host, open_tensor
from .kinds import refuse
from .logical import LogicalTensor
from .memory import Tensor, allocate


def by_id(given: object, ports: Sequence[LogicalTensor], what: str) -> dict[int, Any]:
    """What was given for tensors, by their ids: of a dictionary, or of a list, in which bare arrays go by place."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (Tensor, str, bytes)) or not isinstance(given, Iterable) or find(given) is not None:
        raise refuse("given", what, type(given).__name__)
    found: dict[int, Any] = {}
    for place, value in enumerate(given):
        if not isinstance(value, Tensor) and place >= len(ports):
            raise refuse("tensor", f"{what}[{place}]", type(value).__name__)
        id = value.logical.id if isinstance(value, Tensor) else ports[place].id
        if id in found:
            raise refuse("port_once", what, id=id)
        found[id] = value
    return found


def told(ids: Iterable[object]) -> str:
    """Ids in a message: `the id 2`, `the ids 2 and 4`; `none` where there is none."""
    words = [str(id) for id in ids]
    if not words:
        return "none"
    return f"the ids {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"the id {words[0]}"


class Step(NamedTuple):
    """An operation of a whole graph by the ids of its tensors."""

    label: str
    inputs: tuple[int, ...]
    output: int


def check_outputs(steps: Sequence[Step], targets: Mapping[int, Any], fused: Container[int]) -> None:
    """Memory is given for what a partition computes; a result that is fused away is in no memory."""
    made = [step.output for step in steps]
    for id in targets:
        if id not in made:
            hint = "it is fused into another one; graph.keep(id) before compiling makes it an output"
            raise refuse(
                "tensor_of_graph",
                f"outputs: id {id!r}",
                where="what the graph computes",
                known=told(made),
                hint=hint if id in fused else "",
            )


def apart(steps: Sequence[Step], given: Mapping[int, Any], targets: Mapping[int, Any]) -> set[int]:
    """The outputs that lie on an input which an operation after theirs reads. No two outputs may share memory."""
    where = {step.output: index for index, step in enumerate(steps)}
    until = {id: index for index, step in enumerate(steps) for id in step.inputs}
    written = {id: array for id, value in targets.items() if (array := _memory(id, value)) is not None}
    if not written:
        return set()
    read = {id: array for id in given if id in until and (array := _memory(id, given[id])) is not None}
    found = set()
    for first, second in _sharing(written, read):
        if first in written and second in written:
            labels = {step.output: step.label for step in steps}
            names = [f"tensor {id} of {labels[id]}" for id in sorted((first, second), key=where.__getitem__)]
            raise refuse("apart", names[1], other=names[0])
        output, source = (first, second) if first in written else (second, first)
        if until[source] > where[output]:
            found.add(output)
    return found


def _memory(id: int, value: Any) -> Array | None:
    """The memory that was given for a tensor, as an array; None if it has none yet."""
    if isinstance(value, Tensor):
        return value.array if value.get_data_handle() is not None else None
    if value is None:
        return None
    name = f"the memory of tensor {id}"
    return on_host(open_tensor(value, name), name)


def _sharing(written: Mapping[int, Array], read: Mapping[int, Array]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors, one of them written at least, that have an element in common."""
    spans = []
    for id, array in [*written.items(), *read.items()]:
        low, high = host.tensor(array).bounds
        spans.append((low, high, id, array))
    open_spans: list[tuple[int, int, int, Array]] = []
    for low, high, id, array in sorted(spans, key=lambda span: span[:2]):
        open_spans = [span for span in open_spans if span[1] > low]
        for _, _, other, memory in open_spans:
            if (id in written or other in written) and _meet(array, memory):
                yield other, id
        open_spans.append((low, high, id, array))


def _meet(a: Array, b: Array) -> bool:
    """Whether two arrays have a byte in common. Strides made to be hard to tell count as if they had."""
    try:
        return np.shares_memory(a, b, max_work=1 << 20)  # type: ignore[arg-type]  # it takes any number
    except RuntimeError:  # NumPy's TooHardError, whose place depends on the version
        return True


def beside(target: Tensor) -> Tensor:
    """A tensor as another one, with its values, in memory of its own."""
    array = allocate(target.logical)
    array[...] = target.array
    return Tensor(target.logical, target.engine, array)


def put(values: Tensor, target: Tensor) -> None:
    """Copy what waited in memory of its own to where it belongs."""
    target.array[...] = values.array
    owner = target.get_data_handle()
    library = find(owner)
    if library is not None:
        library.written(owner)
