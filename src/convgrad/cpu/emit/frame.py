"""The frame of a kernel: its exported function with arguments, buffers, counters, barrier, first and last steps.

Every thread of a team calls `kernel(args, tid, threads, team)`. `args` holds the addresses of the tensors and of the
workspace; `team` begins with the barrier's function and has counters from which threads take work. Both are laid out
by `threads/team_ir.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..ir.builder import Function, Module, Value
from ..plan.prefetch import Prefetch
from ..plan.workspace import Buffer, elements
from ..threads.team_ir import COUNTER, GROUP, NODE, NODES
from .prefetch import list_lines

ARGUMENTS = ("x", "w", "y", "bias", "workspace")
COUNTERS = {"first": NODES, "second": NODES + COUNTER}  # of each step of a kernel: bytes to that of the first group


class Frame:
    """The exported function, while it is written into `f`.

    `tensors` are the addresses of the arguments by name, `at` those of the buffers. In the workspace, shared buffers
    come first, then those of each thread.
    """

    def __init__(self, m: Module, buffers: Sequence[Buffer], sum_: str) -> None:
        self.module = m
        self.f = f = m.function("kernel", ["p:args", "i:tid", "i:threads", "p:team"], exported=True)
        args, tid, _, self.team = f.args
        self.tensors = {name: f.load(f.at(args, i, "ptr"), "ptr", 8) for i, name in enumerate(ARGUMENTS)}
        workspace = self.tensors["workspace"]
        shared, own = (elements(buffers, per_thread=per_thread) for per_thread in (False, True))
        mine = f.at(workspace, f.add(shared, f.mul(tid, own)), sum_)
        self.at: dict[str, str] = {}
        for base, per_thread in ((workspace, False), (mine, True)):
            offset = 0
            for buffer in buffers:
                if buffer.per_thread == per_thread:
                    self.at[buffer.name] = f.at(base, offset, sum_)
                    offset += buffer.elements

    def list_lines(self, prefetch: Prefetch) -> None:
        """First of all, fill the buffer "lines" with the offsets that the tiles prefetch."""
        self.f.call(list_lines(self.module, prefetch), self.at["lines"])

    def end(self, *, stream: bool = False) -> str:
        """The module's text; before, results that were streamed are made visible to other threads."""
        if stream:
            self.f.settle()
        return str(self.module)

    # Work that threads share.

    def counter(self, name: str) -> str:
        """The address of a counter: that of the first group of threads."""
        return self.f.at(self.team, COUNTERS[name], "i8")

    @contextmanager
    def items(self, counter: str, count: Value) -> Iterator[str]:
        """Run the body for the items that this thread takes of 0 to count - 1, by the counter of a step."""
        with items(self.f, self.counter(counter), count) as item:
            yield item

    def following(self, item: Value, count: Value) -> Value:
        """The item that this thread is likely to take after one, or the last at its end."""
        f = self.f
        step = f.div(f.add(f.min(f.args[2], GROUP), 1), 2)
        ahead = f.min(f.add(item, step), f.sub(count, 1))
        return f.choose(_odd(f), f.max(f.sub(item, step), 0), ahead)

    def barrier(self) -> None:
        """Wait until every thread of the team has come here."""
        barrier = self.f.load(self.team, "ptr", 8)
        self.f.do(f"call void {barrier}(ptr {self.team}, i64 {self.f.args[1]})")


@contextmanager
def items(f: Function, counter: str, count: Value) -> Iterator[str]:
    """Run the body for the items that this thread takes of 0 to count - 1.

    Each group of threads has a part of the items and a counter of its own, and takes from the parts of the following
    groups when its own is done. In a group, threads of even numbers take items from the first on, those of odd numbers
    from the last: of two threads, each takes neighbours, call after call, and their memory stays in its caches. The
    lower half of a counter says how many items were taken from the first on, the upper half how many from the last.
    """
    f.count += 1
    k = f.count
    _, tid, threads, _ = f.args
    odd = _odd(f)
    one = f.choose(odd, 1 << 32, 1)
    groups = f.div(f.add(threads, GROUP - 1), GROUP)
    home = f.div(tid, GROUP)
    f.do(f"br label %home{k}")
    f.do(f"home{k}:")
    f.do(f"br label %part{k}")
    f.do(f"part{k}:")
    group = f.op(f"phi i64 [ {home}, %home{k} ], [ %next{k}, %along{k} ]")
    visited = f.op(f"phi i64 [ 1, %home{k} ], [ %visited{k}, %along{k} ]")
    place = f.at(counter, f.mul(group, NODE), "i8")
    before = f.mul(group, GROUP)
    first, stop = (
        f.op(f"udiv i64 {f.mul(count, members)}, {threads}")
        for members in (before, f.min(f.add(before, GROUP), threads))
    )
    size = f.sub(stop, first)
    # Looking is cheaper than taking: where nothing is left, all threads can look at the same time.
    seen = f.op(f"load atomic i64, ptr {place} monotonic, align 8")
    f.do(f"br i1 {_left(f, seen, size)[0]}, label %take{k}, label %along{k}")
    f.do(f"take{k}:")
    taken = f.op(f"atomicrmw add ptr {place}, i64 {one} monotonic")
    more, low, high = _left(f, taken, size)
    item = f.op(f"select i1 {odd}, i64 {f.sub(f.sub(stop, 1), high)}, i64 {f.add(first, low)}")
    f.do(f"br i1 {more}, label %work{k}, label %along{k}")
    f.do(f"work{k}:")
    yield item
    f.do(f"br label %take{k}")
    f.do(f"along{k}:")
    f.do(f"%visited{k} = add i64 {visited}, 1")
    following = f.add(group, 1)
    f.do(f"%next{k} = select i1 {f.test('eq', following, groups)}, i64 0, i64 {following}")
    f.do(f"br i1 {f.test('slt', visited, groups)}, label %part{k}, label %done{k}")
    f.do(f"done{k}:")


def _left(f: Function, taken: str, size: Value) -> tuple[str, str, str]:
    """Whether items are left when so many are taken, and how many those are from the first on and from the last."""
    low, high = f.op(f"and i64 {taken}, {(1 << 32) - 1}"), f.op(f"lshr i64 {taken}, 32")
    return f.test("slt", f.add(low, high), size), low, high


def _odd(f: Function) -> str:
    """Whether the thread that runs an exported function has an odd number."""
    return f.op(f"trunc i64 {f.args[1]} to i1")
