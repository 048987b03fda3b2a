"""`convgrad bench`: how long problems take here, beside what the machine can do and beside other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np

from .. import calls, engine, host
from ..bench import onednn, timing, torch
from ..cpu.threads.count import get_num_threads
from ..dtypes import Array
from ..engine import Choice
from ..errors import ConvgradError, SpecError
from ..graph import writer
from ..spec import Problem
from . import fill, run
from .driver import Case
from .report import RESULT, Outcome, State, Step
from .rewrite import document
from .rows import Column, widest
from .tasks import Entry, Task, arrays, attempts, of_settings, widest_problem

OVER = 1.05
"""A share of the machine's best above which the best was measured wrong."""


@dataclass(frozen=True)
class Bench:
    """What to measure against, and for how long."""

    peers: tuple[str, ...] = ()
    pace: timing.Pace = field(default_factory=timing.Pace)

    @property
    def machine(self) -> timing.Machine:
        """The limits of this machine, measured once."""
        return _machine(get_num_threads())

    @property
    def probe(self) -> timing.Probe:
        """What tells whether the machine is as fast as usual."""
        return _probe(get_num_threads())


@lru_cache(maxsize=4)
def _machine(threads: int) -> timing.Machine:
    return timing.measure_machine(threads, 1.0)


@lru_cache(maxsize=4)
def _probe(threads: int) -> timing.Probe:
    return timing.Probe.of(threads)


PEERS: dict[str, ModuleType] = {"torch": torch, "onednn": onednn}


def peers() -> dict[str, ModuleType]:
    """The other libraries that are installed."""
    return {name: peer for name, peer in PEERS.items() if peer.available() is None}


def columns(entries: Sequence[Entry | Case], bench: Bench) -> list[Column]:
    """The columns for problems and graphs, as wide as they ask for."""
    problems = [entry for entry in entries if isinstance(entry, Entry)]
    nodes = [op for case in entries if isinstance(case, Case) for op in run.operations(case)]
    times = [Column(f"{name} ms", 7, right=True) for name in bench.peers]
    return [
        Column(RESULT.name, RESULT.width, optional=True),
        Column("problem", max(widest(op.name for op in nodes), widest_problem(problems)), lead=True),
        Column("dir", max(widest(op.kind for op in nodes), of_settings(problems, "directions")), lead=bool(nodes)),
        Column("dt", max(4, of_settings(problems, "dtypes"))),
        Column("tag", 3),
        Column("ms", 7, right=True),
        Column("GFLOP/s", 7, right=True),
        Column("of peak", 8, right=True),
        *times,
        Column("restless", quiet=True),
    ]


def notes(outcomes: Sequence[Outcome], others: timing.OtherWork) -> Iterator[str]:
    """What must be known to trust the times."""
    if any(str(o.fields.get("of peak", "")).startswith("over") for o in outcomes):
        yield "over: faster than the limit that was measured, so that was measured while something else slowed it."
    if told := others.told():
        yield told


def measured(bench: Bench) -> Iterator[Step]:
    """Measure the machine, if that has not been done."""
    yield Step("measuring the machine")
    _ = bench.machine, bench.probe


def bench_entry(entry: Entry, bench: Bench) -> Iterator[Outcome | Step]:
    """Measure every problem of an entry; a result that is wrong is not timed."""
    try:
        yield from measured(bench)
        for index, task in enumerate(attempts(entry, "bench")):
            if isinstance(task, Outcome):
                yield task
                continue
            yield Step(f"checking {task.title}", index, entry.count)
            found = ready(task)
            if isinstance(found, Outcome):
                yield found
                continue
            yield Step(f"timing {task.title}", index, entry.count)
            yield bench_task(task, bench, *found)
    except ConvgradError as error:
        yield Outcome(f"convgrad bench '{entry.text}'", State.refused, f"{error} ({error.status})")


def ready(task: Task) -> Outcome | tuple[dict[str, Array], Array, Choice]:
    """The arrays of a problem whose result is right, and who computes it; or what became of it."""
    began = perf_counter()
    line = task.line("bench")
    try:
        given = arrays(task)
        out = given.pop(task.problem.wanted)
        choice = engine.choose(task.problem)
        calls.run(task.problem, choice, host.tensors(given), host.tensor(out))
    except ConvgradError as error:
        return Outcome(line, State.refused, f"{error} ({error.status})", 0.0, task.fields)
    if not task.problem.accumulate:
        verdict = fill.check(task.op, task.problem, given, out)
        if not verdict.passed:
            return Outcome(line, State.failed, str(verdict), perf_counter() - began, task.fields)
    return given, out, choice


def bench_task(task: Task, bench: Bench, given: dict[str, Array], out: Array, choice: Choice) -> Outcome:
    """Measure one problem."""
    began = perf_counter()
    inputs = [given[arg.role] for arg in task.op.inputs if arg.role in given]
    ours = partial(choice.execute, *calls.addresses(task.problem, host.tensors(given), host.tensor(out)))

    fields = side_by_side(bench, task.problem, task.op.kind, task.attributes, inputs, out, ours)
    return Outcome(task.line("bench"), State.passed, "", perf_counter() - began, task.fields | fields)


def bench_graph(case: Case, bench: Bench) -> Iterator[Outcome | Step]:
    """Check and measure every operation of a graph."""
    began = perf_counter()
    line = f"convgrad bench {case.name}"
    try:
        yield from measured(bench)
        yield Step(f"compiling {case.name}")
        whole = document(case.path).replace(engine_kind="cpu").graph().compile()
        total = len(whole.steps)
        tensors = run.tensors_for(whole)
        for index, step in enumerate(whole.steps):
            yield Step(f"checking {step.node.name}", index, total)
            run.execute(step, tensors)
            verdict = run.judge(step, tensors, whole)
            fields: dict[str, Any] = {"problem": step.node.name, "dir": step.node.row.kind}
            fields |= {"dt": str(step.inputs[0].dtype), "tag": str(step.node.attrs.get("data_format", "")).lower()}
            if not verdict.passed:
                yield Outcome(line, State.failed, f"{step.node.name}: {verdict}", perf_counter() - began, fields)
                continue
            yield Step(f"timing {step.node.name}", index, total)
            if step.problem is None:
                fields["ms"] = run.timed(step, tensors, bench.pace)["ms"]
                yield Outcome(line, State.passed, "", perf_counter() - began, fields)
                continue
            try:
                attributes: Mapping[str, Any] | None = writer.attributes(step.node)
            except SpecError:
                attributes = None
            inputs = [tensors[t.id] for t in step.inputs]
            out = tensors[step.outputs[0].id]
            kind = step.node.row.kind

            def ours(step: Any = step) -> None:
                run.execute(step, tensors)

            fields |= side_by_side(bench, step.problem, kind, attributes, inputs, out, ours)
            yield Outcome(line, State.passed, "", perf_counter() - began, fields)
    except ConvgradError as error:
        yield Outcome(line, State.refused, f"{case.name}: {error} ({error.status})")


def side_by_side(
    bench: Bench,
    problem: Problem,
    kind: str,
    attributes: Mapping[str, Any] | None,
    inputs: Sequence[Array],
    out: Array,
    ours: Callable[[], None],
) -> dict[str, Any]:
    """Times of convgrad and of the peers that take the problem, and the share of the machine's best."""
    callables: dict[str, Callable[[], object]] = {"convgrad": ours}
    for name, peer in peers().items():
        if name in bench.peers and attributes is not None:
            try:
                arrays = (inputs,) if name == "torch" else (inputs, np.empty_like(out))
                known = {k: v for k, v in attributes.items() if k != "out_dtype"}
                if problem.out_dtype != problem.dtype:
                    continue
                callables[name] = peer.Compiled(kind, known, *arrays)
                callables[name]()
            except (ValueError, RuntimeError):
                callables.pop(name, None)
    times = timing.alternate(callables, bench.pace, bench.probe.steady)
    least = times["convgrad"].least
    limit, bound = bench.machine.bound(problem.flops, problem.bytes, problem.dtype)
    fields: dict[str, Any] = {
        "ms": least * 1e3,
        "GFLOP/s": problem.flops / least / 1e9,
        "of peak": f"{limit / least:.0%} {bound}" if limit <= OVER * least else f"over {bound}",
    }
    for name in bench.peers:
        fields[f"{name} ms"] = times[name].least * 1e3 if name in times else None
    if slow := timing.restless(times):
        fields["restless"] = slow
    return fields
