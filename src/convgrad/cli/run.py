"""`convgrad run`: graphs from files, as benchdnn's graph driver runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np

from .. import bias, reference
from ..bench import timing
from ..dtypes import DTYPES, Array
from ..errors import ConvgradError, SpecError
from ..graph import memory
from ..graph.compiled import CompiledPartition
from ..graph.graphs import CompiledGraph, Graph
from ..graph.logical import LogicalTensor
from ..graph.ops import Op
from ..spec.table import BIAS_OPS
from . import fill
from .driver import Case
from .report import RESULT, ROWS, Outcome, State, Step
from .rewrite import document, rewrite, strangers
from .rows import Column, widest

PACES = {"P": timing.Pace(), "F": timing.Pace(budget=0.3, blocks=2)}
TIMED = set(PACES)


def columns(cases: Sequence[Case]) -> list[Column]:
    """The columns for cases of one mode, as wide as their files ask for."""
    name = Column("file", widest(case.name for case in cases), lead=True)
    if not TIMED & set(cases[0].mode):
        return [RESULT, name, Column("graph", 40)]
    ops = [op for case in cases[:ROWS] for op in operations(case)]
    shapes = [_shape(op.outputs[0]) for op in ops if op.outputs]
    return [
        RESULT,
        name,
        Column("dtype", 4, lead=True),
        Column("operation", widest(op.name for op in ops)),
        Column("kind", widest(op.kind for op in ops)),
        Column("output", widest(shapes), optional=True),
        Column("ms", 7, right=True),
        Column("GFLOP/s", 7, right=True),
        *([Column("GB/s", 5, right=True, optional=True)] if any(op.kind in BIAS_OPS for op in ops) else []),
    ]


def operations(case: Case) -> tuple[Op, ...]:
    """The operations in the file of a case; none where it cannot be read, which will be told as its outcome."""
    with suppress(ConvgradError):
        return document(case.path).ops
    return ()


def about(cases: Sequence[Case]) -> tuple[str, str]:
    """What the mode comes to: a sentence to begin with, if it takes long, and words for the summary."""
    mode = cases[0].mode
    if timed := TIMED & set(mode):
        pace = PACES["P" if "P" in timed else "F"]
        return (
            f"Every result is compared with the right one, then timed for {pace.budget:g} s.",
            "each result was compared before it was timed",
        )
    if set(mode) & set("CBLI"):
        return "", ""
    return "", "results were not compared; --mode=C does"


def run_case(case: Case) -> Iterator[Outcome | Step]:
    """Do what a case asks for: one outcome, or one per operation where they are timed."""
    began = perf_counter()

    def ended(state: State, detail: str = "", **fields: Any) -> Outcome:
        return Outcome(case.line, state, detail, perf_counter() - began, {"file": case.name} | fields)

    try:
        yield Step(f"reading {case.name}")
        found = document(case.path)
        if kinds := strangers(found):
            names = ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "")
            yield ended(State.not_ours, names, graph=names)
            return
        graph = rewrite(found, case).replace(engine_kind="cpu").graph(strict=case.strict, same_rule=case.same_rule)
        if "L" in case.mode:
            yield ended(State.done, tell(graph), graph=tell(graph))
            return
        count = len(graph.get_partitions())
        expected = case.partitions if case.partitions is not None else int(len(graph.ops) == 1)
        if expected and count != expected:
            yield ended(State.failed, f"{count} partitions instead of {expected}")
            return
        yield Step(f"compiling {case.name}")
        whole = graph.compile()
        if case.mode == "I":
            yield ended(State.done, tell(graph), graph=tell(graph))
            return
        yield from _steps(case, graph, whole, ended)
    except ConvgradError as error:
        yield ended(State.refused, f"{error} ({error.status})")


def _steps(case: Case, graph: Graph, whole: CompiledGraph, ended: Callable[..., Outcome]) -> Iterator[Outcome | Step]:
    """Every operation in turn: compute, compare, time."""
    yield Step(f"filling the tensors of {case.name}", 0, len(whole.steps))
    tensors = tensors_for(whole)
    timing_asked = TIMED & set(case.mode)
    comparing = timing_asked or "C" in case.mode
    states, told = {State.done}, []
    for index, step in enumerate(whole.steps):
        name = step.node.name

        def doing(what: str, name: str = name, index: int = index) -> Step:
            return Step(f"{what} {name}", index, len(whole.steps))

        yield doing("computing")
        execute(step, tensors)
        state, detail = State.done, ""
        if "B" in case.mode:
            state, detail = _again(step, tensors)
        if comparing and state != State.failed:
            yield doing("comparing")
            verdict = judge(step, tensors, whole)
            state = State.failed if not verdict.passed else State.passed if verdict.trusted else State.mistrusted
            detail = "" if state == State.passed else f"{name}: {verdict}"
        if timing_asked and state != State.failed:
            yield doing("timing")
            yield ended(state, detail or tell(graph), **timed(step, tensors, PACES["P" if "P" in case.mode else "F"]))
        elif timing_asked:
            yield ended(state, detail)
        states.add(state)
        if detail:
            told.append((state, detail))
    if not timing_asked:
        worst = next(s for s in (State.failed, State.mistrusted, State.passed, State.done) if s in states)
        yield ended(worst, "; ".join(d for s, d in told if s == worst) or tell(graph), graph=tell(graph))


def _again(step: CompiledPartition, tensors: Mapping[int, Array]) -> tuple[State, str]:
    """Compute an operation once more: the bits must be the same."""
    out = tensors[step.outputs[0].id]
    before = out.tobytes()
    fill.poison(out)
    execute(step, tensors)
    if out.tobytes() == before:
        return State.passed, ""
    return State.failed, f"{step.node.name}: other bits in tensor {step.outputs[0].id}"


def tell(graph: Graph) -> str:
    """Operations and shapes of a graph in a few words."""
    if len(graph.ops) > 2:
        counts = Counter(node.row.kind for node in graph.ops)
        dtypes = "/".join(dict.fromkeys(str(node.inputs[0].dtype) for node in graph.ops))
        return f"{dtypes}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    words = []
    for node in graph.ops:
        roles = [arg.role for arg in node.row.inputs]
        told = {"bias": "bias ", "shape": "shape "}
        shapes = " ".join(told.get(role, "") + _shape(t) for role, t in zip(roles, node.inputs, strict=False))
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
