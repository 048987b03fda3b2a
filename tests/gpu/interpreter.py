"""Plans of the GPU engine run by Triton's interpreter, on the memory of the host: for tests where there is no GPU.

Triton looks at TRITON_INTERPRET as it is imported, so all of this belongs to a process of its own.

    python tests/gpu/interpreter.py --count 1000 --seed 7    many random calls, each by a way that is drawn, too
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from convgrad import calls, engine, host
from convgrad.backend import Refusal
from convgrad.gpu.compile import function
from convgrad.gpu.launch import PLACES
from convgrad.gpu.plan import choose, rows
from convgrad.gpu.plan.records import Launch, Plan, offsets
from convgrad.gpu.target import Target, of_kind
from convgrad.spec import Problem


def run(plan: Plan, places: dict[str, int]) -> None:
    """Write the wanted tensor; `places` are addresses."""
    # What parts of sums do not write must not be read.
    workspace = np.full(plan.workspace, 0xFF, np.uint8)
    places = places | {name: host.address(workspace) + offset for name, offset in offsets(plan.areas).items()}
    for launch in plan.launches:
        launched(launch, places)


def launched(launch: Launch, places: dict[str, int]) -> None:
    """Run one kernel; `places` are addresses."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    kernel = function(launch)
    types = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16, "f64": tl.float64}

    def pointer(role: str, dtype: str) -> tl.tensor:
        kind = tl.pointer_type(types[dtype])
        return tl.tensor(TensorHandle(np.array([places[role]], np.uint64), kind), kind)

    pointers = [pointer(role, dtype) for role, dtype in launch.tensors]
    kernel[(launch.programs,)](*pointers, *(v for _, v in launch.values), *(v for _, v in launch.constants))


class Backend:
    """A back end for the host that computes by plans for a GPU.

    With `rng`, the way to take the sums is drawn from all that there are, and offsets have 64 bits now and then.
    """

    name, device = "interpreted", "cpu"
    empty, duplicate, copy = staticmethod(host.empty), staticmethod(host.duplicate), staticmethod(host.copy)

    def __init__(self, target: Target, precision: str = "default", rng: np.random.Generator | None = None) -> None:
        self.target, self.precision, self.rng = target, precision, rng
        self.ways: Counter[str] = Counter()

    def setting(self) -> None:
        """Nothing."""

    def plan(self, problem: Problem, device: Any) -> Plan | Refusal:
        if self.rng is None or not problem.flops or not problem.size(problem.wanted):
            found = choose.plan(problem, self.target, self.precision)
        elif not rows.hindrance(problem) and self.rng.random() < 0.7:
            found = rows.plan(problem, self.target)
            if self.rng.random() < 0.3:
                found = widened(found)
        else:
            ways = choose.candidates(problem, self.target, self.precision)
            kind = self.rng.choice(sorted({(way.kernel, way.flat, way.parts > 1) for way in ways}))
            ways = [way for way in ways if [way.kernel, way.flat, way.parts > 1] == _typed(kind)]
            # Programs take time here, so ways with many are left out where there are others.
            ways = sorted(ways, key=lambda way: way.programs)[: 1 + len(ways) // 2]
            found = choose.settle(problem, self.target, ways[self.rng.integers(len(ways))], self.precision)
            if self.rng.random() < 0.3:
                found = widened(found)
        return Refusal(self.name, found) if isinstance(found, str) else found

    def load(self, problem: Problem, device: Any) -> Any:
        found = self.plan(problem, device)
        if isinstance(found, Refusal):
            return found
        self.ways[_way(found)] += 1
        return partial(self.execute, found)

    @staticmethod
    def execute(plan: Plan, x: int, w: int, y: int, bias: int, context: int = 0) -> None:
        run(plan, dict(zip(PLACES, (x, w, y, bias), strict=False)))


def _way(plan: Plan) -> str:
    """The kernels of a plan, and what they were made for."""
    constants = dict(plan.launches[0].constants) if plan.launches else {}
    return " ".join(
        [
            "+".join(launch.kernel for launch in plan.launches) or "none",
            *(name for name in ("FLAT", "WIDE") if constants.get(name)),
        ]
    )


def _typed(kind: Any) -> list[Any]:
    return [str(kind[0]), kind[1] == "True", kind[2] == "True"]


def widened(plan: Plan) -> Plan:
    """The same plan with offsets of 64 bits."""
    launches = tuple(
        dataclasses.replace(launch, constants=tuple((n, v or n == "WIDE") for n, v in launch.constants))
        for launch in plan.launches
    )
    return dataclasses.replace(plan, launches=launches)


@contextmanager
def alone(backend: Backend) -> Iterator[Backend]:
    """A back end computes everything in a block, and no call is remembered."""
    backends, known = engine.BACKENDS, calls.KNOWN
    engine.BACKENDS, calls.KNOWN = [backend], {}
    try:
        yield backend
    finally:
        engine.BACKENDS, calls.KNOWN = backends, known


def small(name: str, multiprocessors: int) -> Target:
    """A GPU of a kind with so many multiprocessors: few make few programs, many split sums."""
    return dataclasses.replace(of_kind(name), multiprocessors=multiprocessors)


def prepare() -> None:
    """Have this process interpret kernels, and mend what Triton's interpreter does otherwise than a GPU.

    It takes bf16 in products for whole numbers, cuts f32 off to bf16 without rounding, and takes the number out of an
    array in a way that newer NumPy refuses.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    _remember_types(tl, interpreter)
    options = interpreter.interpreter_builder.options
    allowed = (*options.allowed_dot_input_precisions, "bf16x6")
    # Sums of integers would be computed again in 64 bits, and what comes out be looked at only with `debug`.
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, allowed_dot_input_precisions=allowed, sanitize_overflow=False
    )
    builder, kinds = interpreter.InterpreterBuilder, interpreter._get_np_dtype
    old_dot, patch_tensor = builder.create_dot, interpreter._patch_lang_tensor

    def values(handle):
        data = handle.data
        return data.view(ml_dtypes.bfloat16).astype(np.float32) if handle.dtype.scalar == tl.bfloat16 else data

    def cast(self, source, kind):
        with np.errstate(over="ignore", invalid="ignore"):
            if kind.scalar == tl.bfloat16:
                data = values(source).astype(ml_dtypes.bfloat16).view(np.uint16)
            else:
                data = values(source).astype(kinds(kind))
        return interpreter.TensorHandle(data, kind.scalar)

    def dot(self, a, b, *more):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(values(side), tl.float32) for side in (a, b))
        return old_dot(self, a, b, *more)

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
        scope.set_attr(tensor, "__bool__", lambda self: self.handle.data.size != 1 or bool(self.handle.data.item()))

    # Each call of a function by a kernel would patch the language anew, which takes longer than all else.
    patch_language, patched = interpreter._patch_lang, []

    def patch_once(function):
        if not patched:
            patched.extend((patch_language(function), patch_language(tl.zeros.fn)))
            return SimpleNamespace(restore=restore)
        return SimpleNamespace(restore=lambda: None)

    def restore():
        while patched:
            patched.pop().restore()

    builder.cast_impl, builder.create_dot = cast, dot
    interpreter._patch_lang_tensor, interpreter._patch_lang = patch, patch_once


def _remember_types(tl, interpreter) -> None:
    """Have Triton make the type of a shape and an element once, rather than for every step of every program: without
    this the interpreter is busy with types most of the time.
    """
    core, semantic = tl.core, interpreter.TritonSemantic
    make_block, kinds, broadcast = core.block_type.__init__, interpreter._get_np_dtype, semantic.broadcast_impl_value
    blocks, numbers, scalar = {}, {}, (core.tuple(()), core.constexpr(1))

    def block(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.of_tensor = core.tuple([core.constexpr(size) for size in self.shape]), core.constexpr(self.numel)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.of_tensor if kind.is_block() else scalar

    def number(kind):
        name = kind.scalar.name
        if name not in numbers:
            numbers[name] = kinds(kind)
        return numbers[name]

    def together(self, left, right):
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype, semantic.broadcast_impl_value = number, together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chosen", action="store_true", help="the way that the planner chooses")
    asked = parser.parse_args()
    prepare()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import problems

    rng, failures, ways = np.random.default_rng(asked.seed), 0, Counter()
    for at in range(asked.count):
        target = small(str(rng.choice(["sm_80", "sm_86", "sm_90", "sm_100"])), int(rng.choice([2, 8, 200])))
        with alone(Backend(target, rng=None if asked.chosen else rng)) as backend:
            try:
                problems.check(problems.draw(rng, wide=bool(rng.random() < 0.4)))
            except AssertionError as error:
                failures += 1
                print(f"{at}: {error}\n  {backend.ways}", flush=True)
        ways += backend.ways
        if at % 100 == 99:
            print(f"{at + 1} of {asked.count}, {failures} wrong", flush=True)
    print(f"{asked.count} problems, {failures} wrong; {dict(ways.most_common())}")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
