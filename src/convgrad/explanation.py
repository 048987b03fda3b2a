"""What a problem comes to, told to a person: sizes, padding, the computation, and where it runs.

The text holds no character beyond ASCII, so that any terminal shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd, prod
from textwrap import wrap
from typing import Any

from . import engine
from .cpu import backend as cpu
from .cpu.threads.count import get_num_threads
from .dtypes import DTYPES
from .engine import Planned
from .spec import OPS, Problem
from .spec.problem import Ints, extent, window_sizes
from .spec.table import CONV_AXES, DATA_AXES, TRANSPOSE_AXES, Op

SPACE = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
TARGETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "baseline": "baseline"}
MUCH, LITTLE = 30, 8  # FLOP per byte: CPUs of today do some 10 to 20 in the time that a byte takes


@dataclass(frozen=True)
class Case:
    """A problem as the operation that it is, with the order of axes of its tensors and the attributes that were given.

    `half` says that nobody gave any padding: it is cut in two halves.
    """

    op: Op
    problem: Problem
    data: str
    weights: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    half: bool = False

    @property
    def names(self) -> dict[str, str]:
        """The names of the tensors, by role."""
        return {role: self.op.arg(role).name for role in "xwy"}

    @property
    def given(self) -> list[str]:
        """The names of the inputs."""
        roles = {*self.problem.given, *(("bias",) if self.problem.bias_stride is not None else ())}
        return [arg.name for arg in self.op.inputs if arg.role in roles]

    @property
    def auto(self) -> str:
        """The rule of padding, in capitals: NONE, VALID, SAME_UPPER or SAME_LOWER."""
        return str(self.attributes.get("auto_pad") or "None").upper()

    @property
    def pads_end(self) -> Ints:
        """Zeros after each axis: those given, else what the sizes need."""
        p, given = self.problem, self.attributes.get("pads_end")
        if self.auto == "NONE" and isinstance(given, (tuple, list)) and len(given) == p.rank:
            return tuple(given)
        if self.auto == "VALID":
            return (0,) * p.rank
        # SAME is a rule about the size without output_padding, which needs less.
        counts = self.auto != "NONE" and (self.op.transposed or self.documented)
        more = self.attributes.get("output_padding", 0) if counts else 0
        extra = (more,) * p.rank if isinstance(more, int) else more
        return tuple(max(0, need + o) for need, o in zip(_needed(p), extra, strict=False))

    @property
    def documented(self) -> bool:
        """Whether SAME follows the formula of the document."""
        return self.op.kind == "ConvolutionBackwardData" and self.attributes.get("same_rule") == "documented"


def of_problem(problem: Problem) -> Case:
    """A problem without a word about the operation: a convolution, or a transposed one if its data has a bias."""
    kinds = {"y": "Convolution", "x": "ConvolutionBackwardData", "w": "ConvolutionBackwardWeights"}
    transposed = problem.wanted == "x" and problem.bias_stride is not None
    op = OPS["ConvTranspose" if transposed else kinds[problem.wanted]]
    first, last = ("IOX", "XOI") if transposed else ("OIX", "XIO")
    words = str(problem).split()
    nxc = "x@nxc" in words or "y@nxc" in words
    return Case(op, problem, "NXC" if nxc else "NCX", last if "w@xio" in words else first)


def text(case: Case, width: int = 80, *, verbose: bool = False) -> list[str]:
    """A case told in full."""
    return [*title(case, width), "", *shapes([case], width), "", *computation(case, width, verbose=verbose)]


def title(case: Case, width: int) -> list[str]:
    """What the operation is."""
    return wrap(f"{case.op.kind}, {case.problem.dtype}: {case.op.text}", width, subsequent_indent="  ")


def shapes(cases: Sequence[Case], width: int) -> list[str]:
    """The tensors, attributes and formulas that all of some cases share; names and types are those of the first."""
    case = cases[0]
    p = case.problem
    rows, notes = [], []
    for name, role in [(arg.name, arg.role) for arg in (*case.op.inputs, case.op.output)]:
        if role in ("x", "w", "y"):
            axes = _axes(case, role)
            shape, dtype, count = "x".join(str(a.size) for a in axes), p.dtype_of(role), p.size(role)
            rows.append([name, " ".join(a.name for a in axes), shape, dtype, size_of(count, dtype)])
            if not _dense(axes):
                notes.append(f"{name} has the strides {_strides(p, role, axes)}, in elements")
        elif role == "bias" and p.bias_stride is not None:
            channels = p.g * (p.cx if p.wanted == "x" else p.cy)
            rows.append([name, "c", str(channels), p.dtype, size_of(channels, p.dtype)])
        else:
            continue
        if len(cases) == 1 and role == p.wanted:
            rows[-1].append("<- result")
    if p.accumulate:
        notes.append(f"accumulate: the sums are added to what {case.names[p.wanted]} holds")
    lines = [*_table(rows), *notes]
    begin, end = p.pad, case.pads_end
    told = [("strides", p.stride), ("pads_begin", begin), ("pads_end", end), ("dilations", p.dilation)]
    words = [f"{name} {'x'.join(map(str, value))}" for name, value in told]
    lines += ["", ", ".join([*words, f"groups {p.g}"]), *_padding(case)]
    return _fold([*lines, *_sizes(case)], width)


def computation(case: Case, width: int, *, verbose: bool = False) -> list[str]:
    """The work, who does it and how, and what it costs."""
    p, planned = case.problem, engine.explain(case.problem)
    result = case.names[p.wanted]
    lines = [f"{result} = {case.op.kind}({', '.join(case.given)})"]
    rows = [("work", _work(case))]
    data = f"{bytes_text(p.bytes)} in the three tensors"
    if p.bytes:
        data += f", {_round(p.flops / p.bytes)} FLOP per byte"
    if planned.backend is not cpu:
        rows.append(("where", _elsewhere(planned)))
        return [*lines, *_labelled([*rows, ("memory", data)], width)]
    from .cpu import telling

    plan: Any = planned.plan
    told = telling.tell(plan, case.names)
    target = cpu.machine()
    machine = f"CPU, {TARGETS.get(target.name, target.name)} ({target.cpu})"
    threads = _threads(plan.threads, get_num_threads(), plan.tasks, p)
    rows.append(("where", f"{machine}, {threads}, by the {told.nest} loop nest: {told.how}"))
    idle = f"; {1 - told.lanes_used:.0%} of the lanes are idle" if told.lanes_used < 0.995 else ""
    rows.append(("tile", told.tile + idle))
    rows.append(("tasks", told.tasks))
    rows.append(("memory", f"{data}{_bound(p, target.l2)}; {bytes_text(plan.workspace)} of workspace"))
    rows.append(("time", f"about {seconds_text(plan.estimate.seconds)} is expected of a machine of this kind"))
    rows += [("notes" if i == 0 else "", f"- {reason}") for i, reason in enumerate(telling.reasons(plan, case.names))]
    lines += _labelled(rows, width)
    if verbose:
        lines += [*_labelled([("line", str(p))], width), *_details(telling.details(plan), width)]
    return lines


def facts(case: Case) -> dict[str, Any]:
    """The same for machines."""
    p, planned = case.problem, engine.explain(case.problem)
    tensors = {
        case.names[role]: {
            "role": role,
            "axes": [a.name for a in _axes(case, role)],
            "shape": [a.size for a in _axes(case, role)],
            "strides": [a.stride for a in _axes(case, role)],
            "dtype": p.dtype_of(role),
            "bytes": p.size(role) * DTYPES[p.dtype_of(role)].size,
        }
        for role in "xwy"
    }
    found: dict[str, Any] = {
        "operation": case.op.kind,
        "result": case.names[p.wanted],
        "inputs": case.given,
        "problem": str(p),
        "shapes": {role: list(p.shape(role)) for role in "xwy"},
        "tensors": tensors,
        "data_format": case.data,
        "weights_format": case.weights,
        "strides": p.stride,
        "dilations": p.dilation,
        "groups": p.g,
        "auto_pad": str(case.attributes.get("auto_pad") or "None"),
        "pads_begin": p.pad,
        "pads_end": case.pads_end,
        "accumulate": p.accumulate,
        "sizes": _sizes(case),
        "multiply_adds": p.flops // 2,
        "flops": p.flops,
        "bytes": p.bytes,
        "flops_per_byte": round(p.flops / p.bytes, 3) if p.bytes else 0.0,
        "padding_share": round(_padding_share(p), 6),
        "unreached": _unreached(p),
        "engine": planned.backend.name,
        "target": _target(),
        "threads_there": get_num_threads(),
    }
    if planned.backend is not cpu:
        why, instead = (
            "; ".join(filter(None, words)) for words in zip(*(r[1:] for r in planned.refusals), strict=True)
        )
        return found | {"reason": why, "instead": instead}
    from .cpu import telling

    plan: Any = planned.plan
    told = telling.tell(plan, case.names)
    return found | {
        "threads": plan.threads,
        "nest": told.nest,
        "how": told.how,
        "tile": told.tile,
        "lanes_in_use": round(told.lanes_used, 4),
        "tasks": plan.tasks,
        "workspace": plan.workspace,
        "expected_seconds": plan.estimate.seconds,
        "why": list(telling.reasons(plan, case.names)),
        "plan": telling.values(plan),
    }


def _elsewhere(planned: Planned) -> str:
    """Who else computes, and why the CPU's kernels do not."""
    who = "NumPy reference, on one thread" if planned.plan is None else f"{planned.backend.name}, {planned.plan}"
    text = "; ".join(
        [f"{who}: {planned.refusals[0].reason}" if planned.refusals else who, *map(str, planned.refusals[1:])]
    )
    instead = [refusal.instead for refusal in planned.refusals if refusal.instead]
    return f"{text}; the CPU's kernels would take {'; '.join(instead)}" if instead else text


def _target() -> dict[str, Any] | None:
    """The machine that the CPU's kernels are written for; None if none can be compiled."""
    if not cpu.has_compiler():
        return None
    target = cpu.machine()
    return {"name": target.name, "cpu": target.cpu, "vector_bytes": target.width}


@dataclass(frozen=True)
class _Axis:
    """An axis of a tensor in its owner's order. The stride is None if groups and channels do not make one axis."""

    name: str
    size: int
    stride: int | None


def _axes(case: Case, role: str) -> list[_Axis]:
    p = case.problem
    shape, strides = p.shape(role), p.strides(role)
    space = [_Axis(*axis) for axis in zip(SPACE[p.rank], shape[3:], strides[3:], strict=True)]
    if role != "w":
        n, c = _Axis("n", shape[0], strides[0]), _joined("c", shape[1:3], strides[1:3])
        parts = {"n": [n], "c": [c], "k": space}
        return [axis for letter in DATA_AXES[case.data] for axis in parts[letter]]
    letters = (TRANSPOSE_AXES if case.op.transposed else CONV_AXES)[case.weights]
    # oneDNN has groups ride on the channels of y; the documents of the transposed operations, on those of x.
    names = ("in", "out") if case.op.transposed else ("out", "in")
    y, x = _joined(names[0], (p.g, p.cy), strides[:2]), _Axis(names[1], p.cx, strides[2])
    if p.g > 1 and y.stride is None:
        y, x = _Axis(f"{names[0]}/groups", p.cy, strides[1]), _joined(names[1], (p.g, p.cx), (strides[0], strides[2]))
    elif p.g > 1:
        x = _Axis(f"{names[1]}/groups", p.cx, strides[2])
    parts = {"y": [y], "x": [x], "k": space}
    return [axis for letter in letters for axis in parts[letter]]


def _joined(name: str, sizes: Sequence[int], strides: Sequence[int]) -> _Axis:
    """Groups and the channels of one as one axis."""
    (groups, channels), (outer, inner) = sizes, strides
    apart = groups > 1 and channels > 1 and outer != channels * inner
    return _Axis(name, groups * channels, None if apart else inner if channels > 1 else outer)


def _strides(p: Problem, role: str, axes: Sequence[_Axis]) -> str:
    """Strides in the order of the shape; of groups and channels apart, if they make no one axis."""
    if any(axis.stride is None for axis in axes):
        letters = "n g c" if role != "w" else "g out in"
        return f"{', '.join(map(str, p.strides(role)))} of {letters} {' '.join(SPACE[p.rank])}"
    return ", ".join(str(axis.stride) for axis in axes)


def _dense(axes: Sequence[_Axis]) -> bool:
    step = 1
    for axis in reversed(axes):
        if axis.size > 1 and axis.stride != step:
            return 0 in [a.size for a in axes]
        step *= axis.size
    return True


def _needed(p: Problem) -> Ints:
    """Zeros after each axis that the sizes need; negative if they leave something unread."""
    return tuple(
        (y - 1) * s + extent(k, d) - begin - x
        for x, k, y, s, d, begin in zip(p.x, p.w, p.y, p.stride, p.dilation, p.pad, strict=True)
    )


def _alike(p: Problem, extra: Ints) -> list[tuple[str, int]]:
    """Axes that have the same numbers under one label, with the first of them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for axis, numbers in enumerate(zip(p.x, p.w, p.y, p.stride, p.dilation, p.pad, extra, strict=True)):
        found.setdefault(numbers, []).append(axis)
    return [(", ".join(SPACE[p.rank][axis] for axis in axes), axes[0]) for axes in found.values()]


def _padding(case: Case) -> list[str]:
    """Where padding comes from, if it was not given."""
    p, end = case.problem, case.pads_end
    if case.auto == "VALID":
        return ["auto_pad VALID: no padding"]
    lines = []
    for label, axis in _alike(p, end):
        before, after = p.pad[axis], end[axis]
        all_ = f"{label}: {before + after} in all, {before} before and {after} after"
        odd = ""
        if abs(before - after) == 1:
            odd = f" (the odd one goes {'after' if after > before else 'before'})"
        if case.auto != "NONE":
            rule = " (same_rule documented)" if case.documented else ""
            lines.append(f"auto_pad {case.auto}{rule} takes on {all_}{odd}")
        elif case.half:
            lines.append(f"padding was not given; the sizes need on {all_}{odd}")
        elif "pads_end" not in case.attributes and before != after:
            lines.append(f"pads_end follows from the sizes: on {all_}")
    return lines


def _sizes(case: Case) -> list[str]:
    """How the sizes follow from each other, with numbers."""
    p, end, names = case.problem, case.pads_end, case.names
    lines = []
    for label, i in _alike(p, end):
        x, y, s, k, d, begin, after = p.x[i], p.y[i], p.stride[i], p.w[i], p.dilation[i], p.pad[i], end[i]
        span = extent(k, d)
        kernel = f"kernel {k}" if d == 1 else f"reach {span}"
        if case.op.transposed:
            more = x - (s * (y - 1) + span - begin - after)
            formula = f"stride {s} * ({names['y']} {y} - 1) + {kernel} - pads {begin} - {after}"
            formula += f" + output_padding {more}" if more else ""
            known = 0 <= more < max(s, 2)
            lines.append(f"{label}: {names['x']} {x} = {formula}" if known else f"{label}: {names['x']} {x}, as stated")
        else:
            formula = f"({names['x']} {x} + pads {begin} + {after} - {kernel}) // stride {s} + 1"
            (fits,) = window_sizes((x,), (k,), (s,), (d,), (begin + after,))
            lines.append(f"{label}: {names['y']} {y} = {formula}")
            if fits != y:
                lines[-1] = f"{label}: {names['y']} {y}, as stated; {names['x']} {x} has room for {max(fits, 0)}"
        if d > 1:
            lines[-1] += f"; reach {span} = (kernel {k} - 1) * dilation {d} + 1"
    return lines


def _work(case: Case) -> str:
    p, names = case.problem, case.names
    result = names[p.wanted]
    if not p.size(p.wanted):
        return f"none: {result} is empty"
    if not p.flops:
        return f"none: no product reaches {result}, which {_alone(p)}"
    per = {"y": "channels", "x": "channels", "w": "images"}[p.wanted]
    taps = "x".join(map(str, _most(p)))
    of = "pixels" if p.wanted == "w" else "taps"
    count = {"y": p.cx, "x": p.cy, "w": p.n}[p.wanted]
    products = count * prod(_most(p))
    text = f"{count_text(p.flops // 2)} multiply-adds for {count_text(p.size(p.wanted))} results, each of at most "
    text += f"{products:,} products ({taps} {of}, {count} {per if count != 1 else per.removesuffix('s')})"
    share = _padding_share(p)
    if share > 0.0005:
        text += f"; taps that meet padding, {share:.1%} of them, are not counted"
    if p.wanted == "x" and max(p.stride) > 1:
        text += (
            f"; the zeros that stride {'x'.join(map(str, p.stride))} would put into {names['y']} are never multiplied"
        )
    missed = _unreached(p)
    if missed:
        what = f"there {result} {_alone(p)}" if p.wanted == "x" else "they are not read"
        text += f"; no window meets {missed:,} of {prod(p.x):,} positions of {names['x']}"
        text += f" ({_percent(missed / prod(p.x))}): {what}"
    return text


def _percent(share: float) -> str:
    """A share as a percentage that is 100% only if it is all."""
    return f"{min(share, 0.9999):.2%}" if 0.995 <= share < 1 else f"{share:.0%}"


def _alone(p: Problem) -> str:
    """What a result is without a product."""
    if p.accumulate:
        return "stays as it is"
    return "is 0" if p.bias_stride is None else "is the bias"


def _most(p: Problem) -> Ints:
    """Products along each axis that a result is the sum of, at most."""
    if p.wanted == "y":
        return p.w
    if p.wanted == "x":
        return tuple(ceil(k * gcd(s, d) / s) for k, s, d in zip(p.w, p.stride, p.dilation, strict=True))
    ends = [[p.reach(axis, k) for k in range(p.w[axis])] for axis in range(p.rank)]
    return tuple(max(stop - start for start, stop in found) for found in ends)


def _padding_share(p: Problem) -> float:
    """The share of all taps of all windows that meet padding."""
    every = prod(p.w) * prod(p.y)
    return 1 - p.taps / every if every else 0.0


def _unreached(p: Problem) -> int:
    """Positions of x that no window meets."""
    return prod(p.x) - prod(_reached(p, axis) for axis in range(p.rank))


def _reached(p: Problem, axis: int) -> int:
    """Positions along an axis of x that some window meets. Those of one remainder by the stride are ranges."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for k in range(p.w[axis]):
        ahead, residue = divmod(k * p.dilation[axis] - p.pad[axis], p.stride[axis])
        start, stop = p.reach(axis, k)
        ranges.setdefault(residue, []).append((start + ahead, stop + ahead))
    count = 0
    for found in ranges.values():
        done = min(start for start, _ in found)
        for start, stop in sorted(found):
            count += max(0, stop - max(start, done))
            done = max(done, stop)
    return count


def _threads(taken: int, there: int, tasks: int, p: Problem) -> str:
    from .cpu.plan.registry import ALONE

    if taken == there:
        return f"{taken} thread{'s' if taken > 1 else ''}"
    if p.flops < ALONE and p.bytes < ALONE:
        reason = "too little work to share"
    else:
        reason = "there are no more tasks" if taken == tasks else "as memory allows"
    return f"{taken} of {there} threads ({reason})"


def _bound(p: Problem, cache: int) -> str:
    """What decides how long it takes, as a rule."""
    intensity = p.flops / max(1, p.bytes)
    if intensity >= MUCH:
        return ": as a rule arithmetic decides how long it takes"
    if p.bytes <= cache:
        return ": few, but the tensors fit in the caches" if intensity < LITTLE else ""
    if intensity < LITTLE:
        return ": few, so memory decides how long it takes"
    return ": arithmetic and memory take about as long"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    right = (4,)
    cells = [
        [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=False))]
        for r in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def _fold(lines: Iterable[str], width: int) -> list[str]:
    """Lines, indented, those that are too long continued further in."""
    found: list[str] = []
    for line in lines:
        if len(line) + 2 <= width:
            found.append(f"  {line}".rstrip())
        else:
            found += wrap(" ".join(line.split()), width, initial_indent="  ", subsequent_indent="    ")
    return found


def _labelled(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    lines: list[str] = []
    for label, text in rows:
        hanging = " " * (12 if text.startswith("- ") else 10)
        lines += wrap(text, width, initial_indent=f"  {label:<8}", subsequent_indent=hanging, break_on_hyphens=False)
    return lines


def _details(rows: Sequence[tuple[str, str, str]], width: int) -> list[str]:
    """Every field of the plan: name, value, what it is."""
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    second = min(second, 22)
    lines = ["  every field of the plan; --json has the entries of tables"]
    for name, value, what in rows:
        start = f"    {name:<{first}}  {value:<{second}}  "
        lines += wrap(what, width, initial_indent=start, subsequent_indent=" " * (first + second + 8)) or [
            start.rstrip()
        ]
    return lines


def count_text(count: int) -> str:
    """A count for people: 401,408 or 231.2 million."""
    for name, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:,}"


def seconds_text(seconds: float) -> str:
    """A time for people, of which two digits count."""
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= unit:
            return f"{_round(seconds / unit)} {name}"
    return f"{_round(seconds / 1e-6)} us"


def bytes_text(count: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    for name, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} bytes"


def size_of(count: int, dtype: str) -> str:
    """The memory of so many elements."""
    return bytes_text(count * DTYPES[dtype].size)


def _round(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
