"""How well plans use many threads: their tasks, shared out as kernels share them, on machines that need not be here.

    python benchmarks/simulate.py --measure here.json       time plans on this machine, on one thread and on several
    python benchmarks/simulate.py here.json                 the simulation beside what was measured
    python benchmarks/simulate.py here.json --servers       servers of 32 to 192 cores

What is measured: the time of each plan on one thread, whatever number of threads it was cut for, which says how much
work it is; the costs of calls and barriers (regions.py); and how fast a thread is while others compute. What is
simulated: which thread takes which task when, and the end of the last one. The tasks are those of the plan: how many,
how long beside each other, in which steps with a barrier between. A step ends no sooner than memory can move its bytes.

The share of the ideal is the time of the best plan on one thread, over the threads and over the time on all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from heapq import heapify, heapreplace
from itertools import pairwise, product
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import regions
from layers import DENSE, LAYERS, Layer
from run import counts, geometric_mean, pattern, table

from convgrad import calls, host
from convgrad.bench import timing
from convgrad.cpu import kernel, target
from convgrad.cpu.gather.records import Gather, TaskOrder, WeightPacking
from convgrad.cpu.plan import tuning
from convgrad.cpu.plan.records import Made
from convgrad.cpu.threads import team
from convgrad.cpu.threads.team_ir import GROUP
from convgrad.cpu.wgrad.records import Mode, WeightGradient
from convgrad.spec import Problem, bind

SERVER_THREADS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192)
FAR = 3.0  # a line of memory comes so many times later from another socket
PACKED_BYTES = 5e9  # of weights that one thread packs in a second: resnet-3x3-512, see docs/benchmarks.md

# Plans as steps of tasks.


@dataclass(frozen=True)
class Step:
    """Tasks that threads take until none is left; a barrier before the next step."""

    sizes: tuple[float, ...]  # of the tasks, in steps of a tile, as cost.py counts them
    bytes: float  # that all of them read and write in memory
    own: float = 0.0  # what each thread does before, for itself


def steps_of(plan: Made, problem: Problem) -> list[Step]:
    """The steps of a plan."""
    if isinstance(plan, Gather):
        return list(_of_gather(plan, problem))
    if isinstance(plan, WeightGradient):
        return list(_of_wgrad(plan, problem))
    return [Step((1.0,) * plan.tasks, problem.bytes)]


def _of_gather(plan: Gather, problem: Problem) -> Iterator[Step]:
    layer, tile, cut, task = plan.layer, plan.tile, plan.cut, plan.task
    tuned = tuning.tuning(tile.target)
    speed = tuned.speed.steps
    weights = layer.groups * plan.group_weights * plan.item
    packing = weights / PACKED_BYTES * speed
    chunks, blocks = plan.sums.chunks, tile.blocks
    vectors = [len(range(at, min(at + tile.block, layer.cout), tile.lanes)) for at in range(0, layer.cout, tile.block)]
    cost = (
        0.0 if plan.source.in_place else (tuned.boxes.pack if layer.in_channel[1] == 1 else tuned.boxes.pack_transposed)
    )
    channels = math.ceil(layer.cin / tile.lanes)
    inputs = prod(p.extent for p in cut.packs) * channels * cost
    per_step = plan.sums.per_step
    # Of a strided data gradient, each phase has a part of the taps.
    taps = layer.taps / prod(layer.out_strides)

    def products(pixels: int, of: Sequence[int]) -> float:
        return pixels * taps * layer.cin / per_step * sum(of)

    lengths = [
        [
            min(m.box, ceil(m.out / m.out_stride) - at) * m.out_stride
            for at in range(0, ceil(m.out / m.out_stride), m.box)
        ]
        for m in cut.maps
    ]
    boxes = [prod(sides) for sides in product(*lengths)]
    whole = prod(cut.region)
    if task.order is TaskOrder.CHANNEL:
        each = packing / (layer.groups * blocks)
        once = sum(inputs * box / whole for box in boxes)
        sizes = [each + once + products(sum(boxes), [v]) for _ in range(layer.groups) for v in vectors]
        yield Step(tuple(sizes), problem.bytes)
        return
    own = 0.0
    if task.weights is WeightPacking.TEAM:
        units = layer.groups * blocks * chunks * plan.weights.parts
        yield Step((packing / units,) * units, 2.0 * weights)
    else:
        own = packing
    parts = [vectors[at : at + task.blocks] for at in range(0, blocks, task.blocks)]

    def size(box: int, part: Sequence[int]) -> float:
        return task.groups * (inputs * box / whole + products(box, part)) + tuned.boxes.task

    pairs = product(boxes, parts) if task.order is TaskOrder.BOX else ((b, p) for p, b in product(parts, boxes))
    sizes = [size(box, part) for box, part in pairs] * plan.group_parts
    yield Step(tuple(sizes), problem.bytes, own)


def _of_wgrad(plan: WeightGradient, problem: Problem) -> Iterator[Step]:
    roles, boxes, parts = plan.roles, plan.boxes, plan.parts
    row_side, lane_side = plan.sides
    tuned = tuning.tuning(target.current()).wgrad
    copy, line = tuned.copy, tuned.large.line
    lengths = [[min(b, n - at) for at in range(0, n, b)] for n, b in zip(boxes.sizes, boxes.box, strict=True)]
    pixels = [prod(sides) for sides in product(*lengths)]
    ends = [boxes.number * part // boxes.slices for part in range(boxes.slices + 1)]
    slices = [sum(pixels[a:b]) for a, b in pairwise(ends)]
    vectors = [
        len(range(at, min(at + plan.block, roles.lane_channels), plan.lanes))
        for at in range(0, roles.lane_channels, plan.block)
    ]
    lane_parts = [sum(vectors[at : at + parts.lane_part]) for at in range(0, roles.blocks, parts.lane_part)]
    rows = [parts.row_part] * parts.row_parts  # the last ones overlap
    packs_rows = row_side.mode is not Mode.IN_PLACE
    packs_lanes = tuned.large.read if lane_side.mode is Mode.IN_PLACE else 1.0

    # Of x there may be more pixels than of y, or fewer, if a stride leaves some out.
    whole = prod(boxes.sizes)
    read = prod(min(x, y * k) for x, y, k in zip(problem.x, problem.y, problem.w, strict=True)) * problem.n / whole
    row_pixels, lane_pixels = (read if side is plan.x else 1.0 for side in plan.sides)

    def size(count: int, row: int, lane: int) -> float:
        multiplied = count * plan.tap_part * ceil(row / plan.rows) * plan.rows * lane / roles.per_step
        lines = ceil(row / 16) if row_side.channel[1] == 1 else row
        copied = packs_rows * row_pixels * row + packs_lanes * lane_pixels * lane * plan.lanes
        return multiplied + count * (copy * copied + line * row_pixels * lines)

    units = [*product(rows, lane_parts)] * roles.groups * parts.tap_parts
    yield Step(tuple(size(count, *unit) for unit in units for count in slices), problem.bytes)
    if boxes.slices > 1:
        count = plan.units * parts.tiles
        sums = plan.task_sums * plan.tasks
        yield Step((copy * sums / count,) * count, 4.0 * sums)


# Machines.


@dataclass(frozen=True)
class Machine:
    """What a machine's threads cost. Functions of the number of threads."""

    name: str
    call: Callable[[int], float]  # seconds
    barrier: Callable[[int], float]
    speed: Callable[[int], float]  # of each thread, of that of one alone
    bandwidth: Callable[[int], float]  # bytes in a second, of all


def measured_machine(found: Mapping[str, Any]) -> Machine:
    """The one that was measured."""
    costs = {c["threads"]: c for c in found["costs"]}

    def between(values: Mapping[int, float]) -> Callable[[int], float]:
        numbers = sorted(values)
        logs, known = np.log(numbers), [values[n] for n in numbers]
        return lambda n: float(np.interp(np.log(n), logs, known))

    return Machine(
        found["machine"],
        between({n: c["call"] for n, c in costs.items()}),
        between({n: c["barrier"] for n, c in costs.items()}),
        between({int(n): speed for n, speed in found["speeds"].items()}),
        between({int(n): speed for n, speed in found["bandwidths"].items()}),
    )


def server(found: Mapping[str, Any], cores: int, sockets: int, socket_bytes: float) -> Machine:
    """A server whose cores are as fast as one thread here, each thread on a core of its own.

    A call or a barrier takes what it takes here on the most threads that were measured on cores of their own, and for
    each level of the tree beyond them as much again as a level takes; levels between sockets take longer.
    """
    costs = {c["threads"]: c for c in found["costs"] if c["threads"] > 1}
    most = max(costs)

    def levels(n: int) -> float:
        return math.log(n) / math.log(GROUP)

    def cost(name: str) -> Callable[[int], float]:
        level = costs[most][name] / levels(most)

        def of(n: int) -> float:
            if n <= 1:
                return 0.0
            if n in costs:
                return float(costs[n][name])
            far = level * (FAR - 1) if n > cores // sockets else 0.0
            return float(level * levels(n) + far)

        return of

    def bandwidth(n: int) -> float:
        one = found["bandwidths"]["1"]
        return float(min(n * one, socket_bytes * ceil(n * sockets / cores)))

    return Machine(f"{cores} cores, {sockets} sockets", cost("call"), cost("barrier"), lambda n: 1.0, bandwidth)


# The simulation.


def makespan(sizes: Sequence[float], threads: int, group: int = GROUP) -> float:
    """The end of the last task, if threads take them as kernels do: see cpu/emit/frame.py."""
    groups = ceil(threads / group)
    shares = [len(sizes) * min(g * group, threads) // threads for g in range(groups + 1)]
    left = [deque(sizes[a:b]) for a, b in pairwise(shares)]
    ends = [(0.0, thread) for thread in range(threads)]
    heapify(ends)
    place = [thread // group for thread in range(threads)]
    last, remaining = 0.0, len(sizes)
    while remaining:
        end, thread = ends[0]
        while not left[place[thread]]:
            place[thread] = (place[thread] + 1) % groups
        mine = left[place[thread]]
        end += mine.pop() if thread % 2 else mine.popleft()
        remaining -= 1
        last = max(last, end)
        heapreplace(ends, (end, thread))
    return last


def work_of(steps: Sequence[Step]) -> float:
    """Steps of a tile on one thread."""
    return sum(sum(step.sizes) + step.own for step in steps)


def simulate(steps: Sequence[Step], alone: float, threads: int, machine: Machine) -> float:
    """Seconds on so many threads, if all takes so long on one."""
    if threads == 1:
        return alone
    unit = alone / work_of(steps) / machine.speed(threads)
    seconds = machine.call(threads) + machine.barrier(threads) * (len(steps) - 1)
    for step in steps:
        computing = unit * (step.own + makespan(step.sizes, threads))
        seconds += max(computing, step.bytes / machine.bandwidth(threads))
    return seconds


# Measuring.


def problem_of(layer: Layer, direction: str) -> Problem:
    operation = layer.descriptor.operation(direction, data_format="NXC", dtype="f32")
    return bind(operation.op, operation.inputs, operation.attributes).problem


@cache
def planned(problem: Problem, threads: int) -> Made:
    plan = kernel.make_plan(problem, target.current(), threads)
    assert isinstance(plan, Made)
    return plan


def compile_all(problems: Sequence[Problem], threads: Sequence[int]) -> None:
    """Have the kernels of all plans on disk, compiled on all CPUs."""
    work = [(str(problem), n) for problem in problems for n in threads]
    with ProcessPoolExecutor(timing.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, work, chunksize=8))


def _compile(work: tuple[str, int]) -> None:
    kernel.find(Problem.parse(work[0]), target.current(), work[1])


def measure(
    layers: Sequence[Layer], threads: Sequence[int], directions: Sequence[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Times of plans cut for so many threads: on one thread, and on all of them where there are CPUs.

    After so many seconds, layers are left out.
    """
    cpus = timing.cpu_count()
    here = [n for n in threads if n <= cpus]
    chosen = [(layer.name, direction, problem_of(layer, direction)) for layer, direction in product(layers, directions)]
    compile_all([problem for *_, problem in chosen], threads)
    end = time.perf_counter() + seconds
    bench = regions.Bench(team.entry())
    one = timing.fma_speed("f32", 1, 0.2) or 1.0
    found: dict[str, Any] = {
        "machine": regions.topology(),
        "costs": [asdict(bench.costs(n, 0.3, ())) for n in here],
        "speeds": {n: (timing.fma_speed("f32", n, 0.2) or n * one) / n / one for n in here},
        "bandwidths": {n: timing.copy_speed(1 << 28, n, 0.2) for n in here},
        "times": [],
    }
    for name, direction, problem in chosen:
        if time.perf_counter() < end:
            rows = times_of(problem, threads, cpus, rounds)
            found["times"] += [{"layer": name, "direction": direction, **row} for row in rows]
    return found


def times_of(problem: Problem, threads: Sequence[int], cpus: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The times of one problem, the least of some rounds, in which plans take turns. All must give the same bits."""
    memory, random = {}, np.random.default_rng(1)
    for role in ("x", "w", "y"):
        memory[role], _ = host.empty((problem.size(role),), problem.dtype_of(role))
        memory[role][...] = random.standard_normal(problem.size(role), np.float32)
    places = calls.addresses(problem, host.tensors(memory), host.tensor(memory[problem.wanted]))
    made: dict[int, kernel.Kernel] = {}
    number: dict[int, int] = {}  # of threads: the first number that work is cut for in the same way
    first: bytes | None = None
    for n in threads:
        plan = planned(problem, n)
        same = [
            m
            for m in made
            if planned(problem, m).tasks == plan.tasks and planned(problem, m).own_bytes == plan.own_bytes
        ]
        number[n] = same[0] if same else n
        found = kernel.find(problem, target.current(), n)
        assert isinstance(found, kernel.Kernel)
        made[n] = found
        found(*places)
        first = first or memory[problem.wanted].tobytes()
        if memory[problem.wanted].tobytes() != first:
            raise AssertionError(f"{problem}: other bits on {n} threads")
    alone, together = (dict.fromkeys(threads, math.inf) for _ in range(2))
    for _ in range(rounds):
        for n in dict.fromkeys(number.values()):
            alone[n] = min(alone[n], seconds_of(partial(made[n], *places, 1)))
        for n in threads:
            if 1 < n <= cpus:
                made[n](*places)
                together[n] = min(together[n], *(seconds_of(partial(made[n], *places)) for _ in range(3)))
    for n in threads:
        yield {"threads": n, "alone": alone[number[n]], "together": together[n] if together[n] < math.inf else None}


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Reports.


@dataclass(frozen=True)
class Share:
    """What a layer makes of so many threads."""

    layer: Layer
    direction: str
    threads: int
    tasks: int
    seconds: float
    ideal: float  # seconds
    measured: float | None

    @property
    def share(self) -> float:
        """Of the ideal."""
        return self.ideal / self.seconds


def shares(
    found: Mapping[str, Any], machine: Machine, threads: Sequence[int], grow: int = 0, *, every: bool = False
) -> list[Share]:
    """The simulation of all layers that were measured, or of every dense one.

    What was not measured on one thread is taken from the steps of the plan: of another number of threads in proportion
    to a plan that was measured, of another layer by the steps that the measured ones take in a second. With `grow`
    batches are as many times larger as there are so many threads.
    """
    times = {(row["layer"], row["direction"], row["threads"]): row for row in found["times"]}
    layers = {layer.name: layer for layer in LAYERS}
    measured = dict.fromkeys(key[:2] for key in times)
    best = {
        pair: min(row["alone"] for key, row in times.items() if key[:2] == pair and key[2] <= 4) for pair in measured
    }
    one = {pair: work_of(plan_steps(problem_of(layers[pair[0]], pair[1]), 1)) for pair in measured}
    second = float(np.median([one[pair] / best[pair] for pair in measured]))  # steps in it
    chosen = product((name for name, layer in layers.items() if layer.group in DENSE), {d for _, d in measured})
    result = []
    for (name, direction), n in product(sorted(chosen) if every else measured, threads):
        layer, larger = layers[name], max(1, n // grow) if grow else 1
        problem = problem_of(layer.with_batch(layer.descriptor.mb * larger), direction)
        row = times.get((name, direction, n)) if larger == 1 else None
        steps, alone_steps = plan_steps(problem, n), work_of(plan_steps(problem, 1))
        ideal = best[name, direction] * larger if (name, direction) in best else alone_steps / second
        alone = row["alone"] if row else ideal * work_of(steps) / alone_steps
        seconds = simulate(steps, alone, planned(problem, n).threads, machine)
        together = row["together"] if row else None
        tasks = planned(problem, n).tasks
        result.append(Share(layer, direction, n, tasks, seconds, ideal / n / machine.speed(n), together))
    return result


@cache
def plan_steps(problem: Problem, threads: int) -> list[Step]:
    """The steps of a problem's plan."""
    return steps_of(planned(problem, threads), problem)


def check(found: Mapping[str, Any]) -> list[str]:
    """The simulation beside what was measured on the same machine."""
    machine = measured_machine(found)
    threads = sorted({row["threads"] for row in found["times"] if row["together"]})
    rows, errors = [], []
    for s in shares(found, machine, threads):
        if s.measured is None:
            continue
        errors.append((s.threads, s.seconds / s.measured))
        rows.append(
            [
                s.layer.name,
                s.direction,
                f"{s.threads}",
                f"{s.tasks}",
                f"{s.seconds * 1e3:.3f}",
                f"{s.measured * 1e3:.3f}",
                f"{s.seconds / s.measured:.2f}",
                f"{s.ideal / s.measured:.2f}",
            ]
        )
    lines = list(table(["layer", "", "threads", "tasks", "simulated ms", "measured", "ratio", "share"], rows))
    for n in threads:
        ratios = [ratio for count, ratio in errors if count == n]
        off = math.exp(np.mean(np.abs(np.log(ratios))))
        lines.append(
            f"{n} threads: simulated over measured {geometric_mean(ratios):.2f} in the mean, "
            f"{min(ratios):.2f} to {max(ratios):.2f}, off by {off - 1:.0%}"
        )
    return lines


def projection(found: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """The share of the ideal on a server."""
    machine, threads = server(found, args.cores, args.sockets, args.bandwidth * 1e9), args.threads
    result = shares(found, machine, threads, args.grow, every=True)
    lines = [f"{machine.name}: share of the ideal, simulated, of {len({s.layer.name for s in result})} dense layers"]
    if args.all:
        names = dict.fromkeys((s.layer.name, s.direction) for s in result)
        by = {(s.layer.name, s.direction, s.threads): s for s in result}
        cells = [
            [
                name,
                direction,
                *(f"{s.share:.2f}/{s.tasks}" if (s := by.get((name, direction, n))) else "" for n in threads),
            ]
            for name, direction in names
        ]
        lines += table(["layer", "", *map(str, threads)], cells)
    for direction in dict.fromkeys(s.direction for s in result):
        cells = []
        for n in threads:
            found_here = [s.share for s in result if s.threads == n and s.direction == direction]
            cells.append(f"{n}: {np.mean(found_here):.2f} ({min(found_here):.2f})" if found_here else "")
        lines.append(f"{direction}  mean (least)  " + "  ".join(filter(None, cells)))
    return lines


def main() -> int:
    """Measure, or simulate what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="what --measure has written")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="time plans on this machine, and write that there")
    parser.add_argument("--layers", type=pattern, help="layers whose name or group matches (all dense ones)")
    parser.add_argument("--directions", default="BWD_D,BWD_W", help="FWD_D,BWD_D,BWD_W")
    parser.add_argument("--threads", type=counts, default=list(SERVER_THREADS), help="that plans are cut for")
    parser.add_argument("--rounds", type=int, default=5, help="of each time the least of so many counts (5)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many, no layer is measured any more")
    parser.add_argument("--servers", action="store_true", help="simulate a server")
    parser.add_argument("--cores", type=int, default=192, help="of the server (192)")
    parser.add_argument("--sockets", type=int, default=2, help="of the server (2)")
    parser.add_argument("--bandwidth", type=float, default=400, metavar="GB/S", help="of the memory of a socket (400)")
    parser.add_argument("--grow", type=int, default=0, metavar="N", help="batches grow by one for each N threads")
    parser.add_argument("--all", action="store_true", help="each layer, not only means")
    args = parser.parse_args()
    if args.measure is not None:
        chosen = [
            layer
            for layer in LAYERS
            if layer.group in DENSE
            and (args.layers is None or args.layers.search(layer.name) or args.layers.search(layer.group))
        ]
        chosen = [layer for start in range(3) for layer in chosen[start::3]]  # if time runs out, some of each kind
        found = measure(chosen, args.threads, args.directions.split(","), args.rounds, args.seconds)
        args.measure.write_text(json.dumps(found))
    else:
        found = json.loads(args.file.read_text())
    if args.servers:
        print("\n".join(projection(found, args)))
    else:
        print(found["machine"])
        print("\n".join(check(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
