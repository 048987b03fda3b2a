"""`convgrad run`: graphs from files, as benchdnn's graph driver runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import bias, reference, timing
from ..dtypes import DTYPES
from ..errors import ConvgradError, SpecError
from ..graph import memory
from ..graph.compiled import CompiledPartition
from ..graph.graphs import CompiledGraph, Graph
from ..graph.logical import LogicalTensor
from ..graph.reader import Document, read_file
from . import fill
from .driver import Case, is_ours, rewrite
from .report import Outcome, State

Array = np.ndarray[Any, np.dtype[Any]]
PACES = {"P": timing.Pace(), "F": timing.Pace(budget=0.3, blocks=2)}


@lru_cache(maxsize=64)
def document(path: Path) -> Document:
    """A file, read once for all its cases."""
    return read_file(path)


def run_case(case: Case) -> Iterator[Outcome]:
    """Do what a case asks for: one outcome, or one per operation where they are timed."""
    began = perf_counter()

    def ended(state: State, detail: str = "", **fields: Any) -> Outcome:
        return Outcome(case.line, state, detail, perf_counter() - began, fields)

    try:
        found = document(case.path)
        if not is_ours(found):
            kinds = sorted({op.kind for op in found.ops})
            yield ended(State.not_ours, ", ".join(kinds[:4]) + (" and more" if len(kinds) > 4 else ""))
            return
        graph = rewrite(found, case).replace(engine_kind="cpu").graph(strict=case.strict, same_rule=case.same_rule)
        if "L" in case.mode:
            yield ended(State.done, tell(graph), file=case.name, graph=tell(graph))
            return
        count = len(graph.get_partitions())
        expected = case.partitions if case.partitions is not None else int(len(graph.ops) == 1)
        if expected and count != expected:
            yield ended(State.failed, f"{count} partitions instead of {expected}")
            return
        whole = graph.compile()
        if case.mode == "I":
            yield ended(State.done, tell(graph), file=case.name, graph=tell(graph))
            return
        yield from _outcomes(case, graph, whole, ended)
    except ConvgradError as error:
        yield ended(State.refused, f"{error} ({error.status})")


def _outcomes(case: Case, graph: Graph, whole: CompiledGraph, ended: Callable[..., Outcome]) -> Iterator[Outcome]:
    tensors = tensors_for(whole)
    steps = whole.steps
    for step in steps:
        execute(step, tensors)
    state, detail = State.done, tell(graph)
    if "B" in case.mode:
        before = {i: a.tobytes() for i, a in tensors.items()}
        for step in steps:
            fill.poison(tensors[step.outputs[0].id])
            execute(step, tensors)
        changed = [i for i, a in tensors.items() if a.tobytes() != before[i]]
        state, detail = (State.failed, f"other bits in tensor {changed[0]}") if changed else (State.passed, detail)
    if "C" in case.mode or "P" in case.mode or "F" in case.mode:
        verdicts = {step.node.name: judge(step, tensors, whole) for step in steps}
        wrong = {name: v for name, v in verdicts.items() if not v.passed}
        doubtful = {name: v for name, v in verdicts.items() if not v.trusted}
        state = State.failed if wrong else State.mistrusted if doubtful else State.passed
        if wrong or doubtful:
            detail = "; ".join(f"{name}: {v}" for name, v in (wrong or doubtful).items())
    if state != State.failed and ("P" in case.mode or "F" in case.mode):
        pace = PACES["P" if "P" in case.mode else "F"]
        for step in steps:
            yield ended(state, detail, **timed(step, tensors, pace))
        return
    fields = {"file": case.name, "graph": tell(graph)}
    yield ended(state, detail, **fields)


def tell(graph: Graph) -> str:
    """Operations and shapes of a graph in a few words."""
    if len(graph.ops) > 2:
        counts = Counter(node.row.kind for node in graph.ops)
        dtypes = "/".join(dict.fromkeys(str(node.inputs[0].dtype) for node in graph.ops))
        return f"{dtypes}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    words = []
    for node in graph.ops:
        shapes = " ".join(_shape(t) for t in node.inputs)
        words.append(f"{node.row.kind} {node.inputs[0].dtype} {shapes} → {_shape(node.output)}")
    return "; ".join(words)


def _shape(tensor: LogicalTensor) -> str:
    if tensor.shape is None:
        return "?"
    return "x".join(str(n) if n >= 0 else "?" for n in tensor.shape) or "scalar"


def tensors_for(whole: CompiledGraph) -> dict[int, Array]:
    """Filled inputs and poisoned outputs for a whole graph, by id; refused if there is no memory for the check."""
    found = {t.id: t for step in whole.steps for t in (*step.inputs, *step.outputs)}
    shapes = {
        tensor.id: step.outputs[0].shape
        for step in whole.steps
        for arg, tensor in zip(step.node.row.inputs, step.inputs, strict=False)
        if arg.role == "shape"
    }
    late = [t.id for t in found.values() if not t.is_known]
    if late or len(whole.steps) < len(whole.partitions):
        what = f"the shape of tensor {late[0]} is an input" if late else "a shape is an input"
        raise SpecError(f"{what}; say what it is with --in-shapes=ID:SHAPE", status="invalid_shape")
    # The reference widens each tensor to f64, and the result once more.
    size = sum(t.get_mem_size() + 16 * t.size for t in found.values())
    memory.require(size, "the tensors of the graph and of its check")
    wanted = recipes(whole)
    arrays = {}
    for id, logical in found.items():
        array = memory.allocate(logical)
        if id in shapes:
            array.reshape(-1)[...] = shapes[id]
        elif id in wanted:
            fill.fill(array, wanted[id], seed=id)
        else:
            fill.poison(array)
        arrays[id] = array
    return arrays


def recipes(whole: CompiledGraph) -> dict[int, fill.Recipe]:
    """What each input of a graph holds, so that every operation that takes it has exact sums."""
    made = {step.outputs[0].id for step in whole.steps}
    found: dict[int, fill.Recipe] = {}
    bounds: list[tuple[int, int, float]] = []
    for step in whole.steps:
        ids = [tensor.id for tensor in step.inputs]
        if step.problem is not None:
            recipe = fill.recipes(step.node.row, step.problem)
            first, second = (recipe[arg.name] for arg in step.node.row.inputs[:2])
            if not made & {*ids[:2]}:
                bounds.append((ids[0], ids[1], first.density * second.density))
        else:
            ranges = fill.RANGES[str(step.inputs[0].dtype)]
            recipe = {"src": fill.Recipe(ranges.src), "diff_dst": fill.Recipe(ranges.diff_dst)}
            recipe["bias"] = fill.Recipe(fill.BIAS)
        for arg, id in zip(step.node.row.inputs, ids, strict=False):
            if arg.name in recipe and id not in made:
                known = found.get(id, recipe[arg.name])
                largest = min(known.largest, recipe[arg.name].largest)
                found[id] = fill.Recipe(largest, min(known.density, recipe[arg.name].density))
    if len(bounds) > 1:
        densities = fill.balanced(bounds)
        found |= {id: fill.Recipe(found[id].largest, density) for id, density in densities.items()}
    return found


def execute(step: CompiledPartition, tensors: Mapping[int, Array]) -> None:
    """Run one partition on the arrays of its tensors."""
    step.execute(None, [tensors[t.id] for t in step.inputs], [tensors[t.id] for t in step.outputs])


def judge(step: CompiledPartition, tensors: Mapping[int, Array], whole: CompiledGraph) -> fill.Verdict:
    """Compare the result of one partition with the right one, from the inputs that it had."""
    inputs = [tensors[t.id] for t in step.inputs]
    out = tensors[step.outputs[0].id]
    problem = step.problem
    if problem is None:
        right = np.empty(out.shape, np.float64)
        bias.compute(step.node.row, step.node.attrs, "f64", [a.astype(np.float64) for a in inputs], right)
        with np.errstate(over="ignore"):
            return fill.compare(right.astype(out.dtype), out, trust=0.0)
    given = {arg.role: array for arg, array in zip(step.node.row.inputs, inputs, strict=False)}
    verdict = fill.check(step.node.row, problem, given, out)
    made = {s.outputs[0].id for s in whole.steps}
    if verdict.passed or not any(t.id in made for t in step.inputs):
        return verdict
    # What an operation before has computed can be too large for exact sums: then the error has a bound.
    views = {role: reference.canonical(given[role], problem, role) for role in problem.given}
    if "bias" in given:
        views["bias"] = given["bias"].reshape(problem.g, -1)
    right = reference.compute(problem, views, oracle=True)
    found = reference.canonical(out, problem, problem.wanted).astype(np.float64)
    off = np.abs(found - right) > fill.tolerance(problem, given)
    return fill.Verdict(right.size, int(off.sum()), verdict.first if off.any() else "", verdict.trusted, verdict.zeros)


def timed(step: CompiledPartition, tensors: Mapping[int, Array], pace: timing.Pace) -> dict[str, Any]:
    """Time and speed of one partition."""
    problem = step.problem
    found = timing.alternate({"convgrad": lambda: execute(step, tensors)}, pace)["convgrad"]
    fields: dict[str, Any] = {
        "operation": step.node.name,
        "kind": step.node.row.kind,
        "dtype": str(step.inputs[0].dtype),
        "output": _shape(step.outputs[0]),
        "ms": found.least * 1e3,
    }
    if problem is not None:
        fields["GFLOP/s"] = problem.flops / found.least / 1e9
    else:
        moved = sum(t.size * DTYPES[str(t.dtype)].size for t in (*step.inputs, *step.outputs))
        fields["GB/s"] = moved / found.least / 1e9
    return fields
