"""The team: everyone works once, barriers hold, and forks, exits, signals and crowds do no harm."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from convgrad import ConvgradError, libraries
from convgrad.cpu.compile import jit
from convgrad.cpu.emit.frame import Frame
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.threads import count as counting
from convgrad.cpu.threads import team as teams
from convgrad.cpu.threads import team_ir
from convgrad.host_team import HOST_TEAM
from marks import slow_but

HOST = jit.host()
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or needs the team")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

KERNELS = """
; Thread t adds 1000 + n to word t, and takes numbers from the counters of all groups; word 100 + 2g + i sums what
; counter i of group g gave.
define void @mark(ptr %a, i64 %t, i64 %n, ptr %team) nounwind {
entry:
  %p = getelementptr i64, ptr %a, i64 %t
  %n1 = add i64 %n, 1000
  %r = atomicrmw add ptr %p, i64 %n1 monotonic
  %np = getelementptr i8, ptr %team, i64 8
  %nt = load i64, ptr %np
  %same = icmp eq i64 %nt, %n
  br i1 %same, label %loop, label %wrong
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %next = add i64 %i, 1
  %group = lshr i64 %i, 1
  %skip = mul i64 %group, NODE
  %which = and i64 %i, 1
  %word = shl i64 %which, 3
  %place = add i64 %skip, %word
  %off = add i64 %place, NODES
  %c = getelementptr i8, ptr %team, i64 %off
  %got = atomicrmw add ptr %c, i64 1 monotonic
  %qi = add i64 %i, 100
  %q = getelementptr i64, ptr %a, i64 %qi
  %s = atomicrmw add ptr %q, i64 %got monotonic
  %up = add i64 %n, GROUP
  %up1 = sub i64 %up, 1
  %groups = udiv i64 %up1, GROUP
  %counters = shl i64 %groups, 1
  %more = icmp slt i64 %next, %counters
  br i1 %more, label %loop, label %done
wrong:
  store i64 -1, ptr %p
  br label %done
done:
  ret void
}

; 300 rounds: thread t writes round + 1 to word 8t, waits, and adds every thread's word to its own sum at 1000 + 8t.
define void @rounds(ptr %a, i64 %t, i64 %n, ptr %team) nounwind {
entry:
  %barrier = load ptr, ptr %team
  %t8 = shl i64 %t, 3
  %mine = getelementptr i64, ptr %a, i64 %t8
  %sums = getelementptr i64, ptr %a, i64 1000
  %sum = getelementptr i64, ptr %sums, i64 %t8
  br label %round
round:
  %r = phi i64 [ 0, %entry ], [ %r1, %end ]
  %r1 = add i64 %r, 1
  store i64 %r1, ptr %mine
  call void %barrier(ptr %team, i64 %t)
  br label %read
read:
  %i = phi i64 [ 0, %round ], [ %i1, %read ]
  %i8 = shl i64 %i, 3
  %p = getelementptr i64, ptr %a, i64 %i8
  %v = load i64, ptr %p
  %s = load i64, ptr %sum
  %s1 = add i64 %s, %v
  store i64 %s1, ptr %sum
  %i1 = add i64 %i, 1
  %m = icmp slt i64 %i1, %n
  br i1 %m, label %read, label %end
end:
  call void %barrier(ptr %team, i64 %t)
  %more = icmp slt i64 %r1, 300
  br i1 %more, label %round, label %done
done:
  ret void
}

; Counts itself in at word 1, then stays until word 0 is set.
define void @stay(ptr %a, i64 %t, i64 %n, ptr %team) nounwind {
entry:
  %here = getelementptr i64, ptr %a, i64 1
  %r = atomicrmw add ptr %here, i64 1 seq_cst
  br label %loop
loop:
  %v = load atomic i64, ptr %a acquire, align 8
  %z = icmp eq i64 %v, 0
  br i1 %z, label %loop, label %done
done:
  ret void
}

; Words: entry, mark, its argument. Every thread enters again, asking for 4 threads.
define void @nest(ptr %a, i64 %t, i64 %n, ptr %team) nounwind {
  %entry = load ptr, ptr %a
  %p1 = getelementptr ptr, ptr %a, i64 1
  %mark = load ptr, ptr %p1
  %p2 = getelementptr ptr, ptr %a, i64 2
  %to = load ptr, ptr %p2
  call void %entry(ptr %mark, ptr %to, i64 4)
  ret void
}

; Thread t divides the smallest normal number by 2 and stores the bits at word t.
define void @subnormal(ptr %a, i64 %t, i64 %n, ptr %team) nounwind {
  %p = getelementptr i64, ptr %a, i64 %t
  %v = load volatile double, ptr %p
  %h = fmul double %v, 5.000000e-01
  store double %h, ptr %p
  ret void
}
"""
for name in ("NODES", "NODE", "GROUP"):
    KERNELS = KERNELS.replace(name, str(getattr(team_ir, name)))
NAMES = ("mark", "rounds", "stay", "nest", "subnormal")


@pytest.fixture(scope="module", params=["futex", "condition", "openmp"])
def team(request):
    """The entry of a team: of our own threads, for both ways to sleep, and of PyTorch's."""
    if request.param == "futex":
        return teams.entry()
    if "windows" in HOST[0]:
        pytest.skip("no threads of our own on this system")
    if request.param == "condition":
        return teams.build(team_ir.source(HOST[0], futex=False))[0]
    assert libraries.find(torch.zeros(1)) is not None
    borrowed, _ = teams.borrowed(HOST_TEAM)
    assert borrowed is not teams.entry() or sys.platform != "linux"
    return borrowed


@pytest.fixture(scope="module")
def is_lent(team):
    """Whether the threads are PyTorch's."""
    return team is teams.borrowed(HOST_TEAM)[0]


@pytest.fixture(scope="module")
def kernels():
    module = jit.load(KERNELS, *HOST)
    module.keep()
    return {name: module.address(name) for name in NAMES}


def words(count=10_000):
    return (ctypes.c_int64 * count)()


def go(team, kernel, count):
    """Run a kernel on fresh words and return them."""
    buffer = words()
    team(kernel, ctypes.addressof(buffer), count)
    return buffer


def check_mark(buffer, most):
    """One run of `mark`: threads 0 to n-1 came once each, n <= most, and every counter began at 0. Returns n."""
    n = buffer[0] - 1000
    assert 1 <= n <= most
    assert list(buffer[:100]) == [1000 + n] * n + [0] * (100 - n)
    counters = 2 * -(-n // team_ir.GROUP)
    assert list(buffer[100:200]) == [n * (n - 1) // 2] * counters + [0] * (100 - counters)
    return n


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40, 0, -5])
def test_everyone_works_once(team, kernels, count):
    for _ in range(20):
        buffer = go(team, kernels["mark"], count)
        n = check_mark(buffer, max(count, 1))
        assert n == max(count, 1) or sys.platform != "linux"


@pytest.mark.parametrize("count", slow_but([1, 2, 3, 8, 9], [40]))
def test_barriers_hold(team, kernels, count):
    for _ in range(5 if count < 16 else 1):
        buffer = go(team, kernels["rounds"], count)
        n = sum(1 for value in buffer[1000::8] if value)
        assert n == count or sys.platform != "linux"
        assert list(buffer[1000 : 1000 + 8 * n : 8]) == [n * 300 * 301 // 2] * n


def test_run_and_entry_are_the_same(kernels):
    buffer = words()
    teams.run(kernels["mark"], ctypes.addressof(buffer), 2)
    check_mark(buffer, 2)
    assert teams.entry() is teams.entry()


@linux
def test_after_idling_workers_sleep_and_wake(team, kernels):
    go(team, kernels["rounds"], 3)
    for _ in range(30):
        time.sleep(0.002)
        buffer = go(team, kernels["mark"], 3)
        assert check_mark(buffer, 3) == 3
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@linux
def test_gil_is_free_and_a_busy_team_does_not_block(team, is_lent, kernels):
    gate = words()
    thread = threading.Thread(target=team, args=(kernels["stay"], ctypes.addressof(gate), 2))
    thread.start()
    while gate[1] < 2:
        time.sleep(0.001)
    # The team stays busy until this thread opens the gate, so this call must run alone. OpenMP has a team for each
    # thread that enters it.
    buffer = go(team, kernels["mark"], 2)
    assert check_mark(buffer, 2) == (2 if is_lent else 1)
    gate[0] = 1
    thread.join()
    buffer = go(team, kernels["mark"], 2)
    assert check_mark(buffer, 2) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_kernel_may_enter_again(team, kernels, count):
    buffer = words()
    address = ctypes.cast(team, ctypes.c_void_p).value
    args = (ctypes.c_void_p * 3)(address, kernels["mark"], ctypes.addressof(buffer))
    team(kernels["nest"], ctypes.addressof(args), count)
    if count == 1:
        assert check_mark(buffer, 4) in (1, 4)
    else:
        # Each of the three threads ran `mark` alone, as thread 0 of 1.
        assert list(buffer[:3]) == [count * 1001, 0, 0] or sys.platform != "linux"


def test_many_python_threads(team, kernels):
    def work(seed):
        for turn in range(60):
            count = 1 + (seed + turn) % 4
            if turn % 2:
                check_mark(go(team, kernels["mark"], count), count)
            else:
                buffer = go(team, kernels["rounds"], count)
                n = sum(1 for value in buffer[1000::8] if value)
                assert 1 <= n <= count
                assert list(buffer[1000 : 1000 + 8 * n : 8]) == [n * 300 * 301 // 2] * n

    with ThreadPoolExecutor(8) as crowd:
        list(crowd.map(work, range(8)))


def test_python_does_not_know_the_workers(team, kernels):
    before = threading.active_count()
    go(team, kernels["mark"], 4)
    assert threading.active_count() == before


@linux
def test_workers_take_no_signals(team, is_lent, kernels):
    if is_lent:
        pytest.skip("these threads are PyTorch's")

    def blocked(thread):
        return int(Path(f"/proc/{thread}/status").read_text().split("SigBlk:")[1].split()[0], 16)

    own = blocked("thread-self")
    before = set(os.listdir("/proc/self/task"))
    go(team, kernels["mark"], 300)
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) >= 9
    for worker in workers:
        # All but SIGKILL, SIGSTOP and the two that the C library keeps for itself.
        assert blocked(f"self/task/{worker}") | 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32 == (1 << 64) - 1
    assert blocked("thread-self") == own


@pytest.mark.skipif("x86_64" not in HOST[0], reason="the mode register is x86's")
@pytest.mark.parametrize("flush", [False, True])
def test_workers_compute_in_the_callers_mode(team, kernels, flush):
    text = """
declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @set(i32 %mode) nounwind {
  %p = alloca i32
  store i32 %mode, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}
"""
    module = jit.load(text, *HOST)
    set_mode = ctypes.CFUNCTYPE(None, ctypes.c_int32)(module.address("set"))
    buffer = (ctypes.c_double * 4)(*[2.0**-1022] * 4)
    set_mode(0x9FC0 if flush else 0x1F80)
    try:
        team(kernels["subnormal"], ctypes.addressof(buffer), 4)
    finally:
        set_mode(0x1F80)
    assert list(buffer) == [0.0 if flush else 2.0**-1023] * 4


@pytest.mark.skipif("x86_64" not in HOST[0], reason="the mode register is x86's")
def test_threads_that_are_lent_come_back_as_they_were():
    # Their mode is one that no caller has; a kernel of ours runs between two looks at it.
    text = """
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
define void @swap(ptr %a) nounwind {
  %p = alloca i32
  %number = load ptr, ptr @number
  %t = call i32 %number()
  %q = getelementptr i32, ptr %a, i32 %t
  %wanted = load i32, ptr %q
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %mode = load i32, ptr %p
  store i32 %mode, ptr %q
  store i32 %wanted, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}
"""
    borrowed, _ = teams.borrowed(HOST_TEAM)
    parallel, number, *_ = teams._openmp()
    module = jit.load(text + f"@number = global i64 {number}", *HOST)
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)
    marks = jit.load(KERNELS, *HOST)
    size = max(3, torch.get_num_threads())
    modes = (ctypes.c_int32 * size)(0x1F80, *[0x9FC1] * (size - 1))  # flush to zero, and the flag of a bad operand
    region(module.address("swap"), ctypes.addressof(modes), size, 0)
    before = list(modes)
    check_mark(go(borrowed, marks.address("mark"), size), size)
    modes[:] = before
    region(module.address("swap"), ctypes.addressof(modes), size, 0)
    assert list(modes)[1:] == [0x9FC1] * (size - 1)


def script(text, timeout=60):
    """Run a script in a process of its own, which may fork, exit or hang."""
    head = f"""
import ctypes, faulthandler, os, signal, sys, threading, time
faulthandler.dump_traceback_later({timeout - 10}, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests in the background, deaf to it
from convgrad.cpu.compile import jit
from convgrad.cpu.ir.builder import Module
from convgrad.cpu.threads import count as counting
from convgrad.cpu.threads import team as teams
from convgrad.cpu.threads import team_ir
module = jit.load({KERNELS!r}, *jit.host())
kernels = {{name: module.address(name) for name in {NAMES!r}}}
def words(): return (ctypes.c_int64 * 10000)()
def mark(count):
    buffer = words()
    teams.run(kernels["mark"], ctypes.addressof(buffer), count)
    return [value - 1000 for value in buffer[:100] if value]
def stay(count):
    gate = words()
    thread = threading.Thread(target=teams.run, args=(kernels["stay"], ctypes.addressof(gate), count), daemon=True)
    thread.start()
    while gate[1] < count: time.sleep(0.001)
    return gate, thread
"""
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", head + text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr, time.perf_counter() - start


@linux
@forks
@pytest.mark.parametrize("moment", slow_but(["busy"], ["before", "idle", "busy"]))
def test_a_child_of_a_fork_has_a_team_of_its_own(moment):
    text = {
        "before": "gate = thread = None",
        "idle": "mark(3); gate = thread = None",
        "busy": "mark(4); gate, thread = stay(3)",
    }[moment]
    text += """
children = []
for turn in range(5):
    child = os.fork()
    if child == 0:
        good = all(mark(count) == [count] * count for count in (2, 3, 1, 5) for _ in range(50))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if mark(2) == [2, 2] else 1)
        os._exit(0 if good and os.waitpid(grandchild, 0)[1] == 0 else 1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
if gate is not None:
    assert mark(2) == [1]
    gate[0] = 1
    thread.join()
assert mark(3) == [3, 3, 3]
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@linux
@forks
@pytest.mark.slow
def test_a_child_of_a_fork_does_not_wait_for_threads_that_were_lent():
    text = """
import torch
from convgrad import libraries
from convgrad.host_team import HOST_TEAM
libraries.find(torch.zeros(1))
def lent(count):
    entry, threads = teams.borrowed(HOST_TEAM + count)
    buffer = words()
    entry(kernels["mark"], ctypes.addressof(buffer), threads)
    return [value - 1000 for value in buffer[:100] if value]
assert lent(3) == [3, 3, 3]
assert teams.borrowed(HOST_TEAM)[0] is not teams.entry()
children = []
for turn in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(lent(count) == [count] * count for count in (2, 3, 1, 5) for _ in range(50)) else 1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
assert lent(3) == [3, 3, 3]
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@linux
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGINT)", -2),
        ("raise SystemExit('words')", 1),
    ],
)
@pytest.mark.parametrize("busy", slow_but([True], [False, True]))
def test_the_interpreter_exits(end, code, busy):
    text = "mark(4)\n" + ("gate, thread = stay(3)\n" if busy else "") + "print('end', flush=True)\n" + end
    got, out, error, seconds = script(text)
    assert (got, out) == (code, "end\n"), error
    assert "Fatal" not in error
    assert seconds < 30


@linux
def test_where_no_thread_can_be_made_calls_run_alone():
    text = """
import resource
mark(1)
# Room for one more stack of 8 MiB, but not for many.
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
n = mark(40)
assert 1 <= len(n) < 20 and n == [len(n)] * len(n), n
assert mark(40) == n and mark(1) == [1]
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setattr(counting, "_chosen", None)
    monkeypatch.delenv("CONVGRAD_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("unset")
def test_number_of_threads(monkeypatch):
    assert counting.get_num_threads() == counting.available()
    counting.set_num_threads(3)
    assert counting.get_num_threads() == 3
    monkeypatch.setattr(counting, "_chosen", None)
    monkeypatch.setenv("CONVGRAD_NUM_THREADS", " 5 ")
    assert counting.get_num_threads() == 5
    counting.set_num_threads(2)
    assert counting.get_num_threads() == 2


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("bad", [0, -1, 1025, 2**70, 1.0, "2", None, True, [2], float("nan")])
def test_bad_numbers_of_threads(bad):
    counting.set_num_threads(2)
    with pytest.raises(
        ConvgradError, match=r"^set_num_threads: n must be a whole number of threads from 1 to 1024, got"
    ):
        counting.set_num_threads(bad)
    assert counting.get_num_threads() == 2


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("bad", ["0", "two", "1.5", "-3", "1025", "0x2", "1_0"])
def test_bad_numbers_in_the_environment(monkeypatch, bad):
    monkeypatch.setenv("CONVGRAD_NUM_THREADS", bad)
    with pytest.raises(ConvgradError, match=f"^CONVGRAD_NUM_THREADS must be .*, got '?{bad}'?$"):
        counting.get_num_threads()


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({}, []),
        ({"proc/self/cgroup": ""}, []),
        ({"proc/self/cgroup": "garbage\n::\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, []),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, [3]),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, [1]),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1 0\n"}, []),
        (
            {
                "proc/self/cgroup": "0::/user/job:1\n",
                "sys/fs/cgroup/user/job:1/cpu.max": "max 100000\n",
                "sys/fs/cgroup/user/cpu.max": "800000 100000\n",
            },
            [8],
        ),
        # A container sees the host's path of its group but only its own group's files.
        ({"proc/self/cgroup": "0::/../host/path\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, [2]),
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/docker/a\n0::/a\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/a/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/memory/a/cpu.cfs_period_us": "100000\n",
            },
            [4],
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/a\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            [],
        ),
    ],
)
def test_quotas(tmp_path, files, quotas):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert counting._quotas(str(tmp_path)) == quotas
    assert counting.available(str(tmp_path)) == min([counting.available(), *quotas])


@linux
def test_affinity_counts():
    text = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(counting.get_num_threads(), mark(2))"
    code, out, error, _ = script(text)
    assert (code, out) == (0, "1 [2, 2]\n"), error


@linux
def test_workers_keep_their_affinity():
    text = """
mask = os.sched_getaffinity(0)
mark(2)
worker = next(int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid())
# Parting from a CPU means to leave it, and to be allowed back.
wrapper = "define void @leave(i32 %cpu) nounwind {\\n  call void @leave_cpu(i32 %cpu)\\n  ret void\\n}\\n"
library = jit.load(team_ir.source(jit.host()[0]) + wrapper, *jit.host())
leave = ctypes.CFUNCTYPE(None, ctypes.c_int32)(library.address("leave"))
where = ctypes.CDLL(None).sched_getcpu
left = 0
for _ in range(20):
    cpu = where()
    leave(cpu)
    left += where() != cpu
    assert os.sched_getaffinity(0) == mask
assert left > 10 or len(mask) == 1
for nonsense in (-1, 1023, 1024, 5000):
    leave(nonsense)
    assert os.sched_getaffinity(0) == mask
one = {min(mask)}
os.sched_setaffinity(0, one)
leave(min(mask))
assert os.sched_getaffinity(0) == one
# A worker that may not leave stays and works.
os.sched_setaffinity(worker, one)
for _ in range(100):
    assert mark(2) == [2, 2]
assert os.sched_getaffinity(worker) == one
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@linux
@pytest.mark.slow
def test_threads_are_woken_where_the_others_are_not():
    text = """
mask = os.sched_getaffinity(0)
wrappers = '''
define i32 @doze(ptr %word) nounwind {
  call void @wait(ptr %word, i32 0)
  %cpu = call i32 @current_cpu()
  ret i32 %cpu
}
define i32 @stir(ptr %word, i32 %thread) nounwind {
  %cpu = call i32 @current_cpu()
  store atomic i32 1, ptr %word seq_cst, align 4
  call void @wake_elsewhere(ptr %word, i32 %thread)
  ret i32 %cpu
}
define i1 @hold(i32 %thread, i32 %cpu, ptr %mask) nounwind {
  %kept = call i1 @avoid_cpu(i32 %thread, i32 %cpu, ptr %mask)
  ret i1 %kept
}
define void @release(i32 %thread, i32 %cpu, ptr %mask) nounwind {
  call void @allow_cpu(i1 true, i32 %thread, i32 %cpu, ptr %mask)
  ret void
}
'''
# Whoever wakes a thread stays in the middle of it until that runs, however busy the machine is: later the system may
# move it anywhere.
wake = "  call void @wake(ptr %word, i32 1)\\n  call void @allow_cpu"
slow = wake.replace("  call void @allow_cpu", "  call void @pauses(i64 2000000)\\n  call void @allow_cpu")
source = team_ir.source(jit.host()[0])
assert source.count(wake) == 1
library = jit.load(source.replace(wake, slow) + wrappers, *jit.host())
address, number = ctypes.c_void_p, ctypes.c_int32
doze = ctypes.CFUNCTYPE(number, address)(library.address("doze"))
stir = ctypes.CFUNCTYPE(number, address, number)(library.address("stir"))
hold = ctypes.CFUNCTYPE(ctypes.c_bool, number, number, address)(library.address("hold"))
release = ctypes.CFUNCTYPE(None, number, number, address)(library.address("release"))

def meet():
    # One sleeps, the other wakes it: where the one is then and may be, and where the other is.
    word, seen = number(0), []
    def sleep():
        seen.append(threading.get_native_id())
        seen.append(doze(ctypes.addressof(word)))
        seen.append(os.sched_getaffinity(0))
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    time.sleep(0.03)
    other = stir(ctypes.addressof(word), seen[0])
    sleeper.join()
    return *seen[1:], other

if len(mask) > 1:
    found = [meet() for _ in range(12)]
    assert sum(cpu != other and may == mask - {other} for cpu, may, other in found) > 9, found
    first, *_, last = sorted(mask)
    bits = ctypes.create_string_buffer(128)
    assert hold(0, first, bits)
    assert os.sched_getaffinity(0) == mask - {first}
    release(0, first, bits)
    assert os.sched_getaffinity(0) == mask
    # What a user has changed meanwhile stays.
    assert hold(0, first, bits)
    os.sched_setaffinity(0, {first})
    release(0, first, bits)
    assert os.sched_getaffinity(0) == {first}
    assert not hold(0, first, bits)  # the only one
    assert not hold(0, last, bits)  # not one of its
    assert os.sched_getaffinity(0) == {first}
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@linux
@pytest.mark.slow
@pytest.mark.parametrize("pauses", [0, 20_000])
def test_threads_that_slept_may_use_all_cpus_again(pauses):
    """Even if whoever woke them was held up in the middle of it, and they went on meanwhile."""
    text = f"""
mask = os.sched_getaffinity(0)
wake = "  call void @wake(ptr %word, i32 1)\\n  call void @allow_cpu"
held_up = wake.replace("  call void @allow_cpu", "  call void @pauses(i64 {pauses})\\n  call void @allow_cpu")
source = team_ir.source(jit.host()[0])
assert source.count(wake) == 1
entry, _ = teams.build(source.replace(wake, held_up))
for count in (2, 2, 2, 3) * 5:
    time.sleep(0.02)
    buffer = words()
    entry(kernels["rounds"], ctypes.addressof(buffer), count)
    assert all(os.sched_getaffinity(int(task)) == mask for task in os.listdir("/proc/self/task"))
print("good")
"""
    code, out, error, _ = script(text)
    assert (code, out) == (0, "good\n"), error


@pytest.mark.parametrize("count", slow_but([1, 3, 64], [1, 2, 3, 8, 20, 64]))
@pytest.mark.parametrize("items", slow_but([0, 7, 500], [0, 1, 2, 7, 500]))
def test_items_are_taken_once_from_both_ends(team, count, items):
    frame = Frame(Module(), [], "float")
    f = frame.f
    args, tid, _, _ = f.args
    with frame.items("first", items) as item:
        f.op(f"atomicrmw add ptr {f.at(args, item, 'i64')}, i64 1 monotonic")
        f.store(tid, f.at(args, f.add(item, 1000), "i64"), "i64", 8)
        f.store(frame.following(item, items), f.at(args, f.add(item, 2000), "i64"), "i64", 8)
    module = jit.load(frame.end(), *HOST)
    for _ in range(20):
        buffer = words()
        team(module.address("kernel"), ctypes.addressof(buffer), count)
        assert list(buffer[:1000]) == [1] * items + [0] * (1000 - items)
        takers, following = buffer[1000 : 1000 + items], buffer[2000 : 2000 + items]
        if count <= 2:
            assert takers == sorted(takers)  # each has neighbours
            assert following == [min(i + 1, items - 1) if t == 0 else max(i - 1, 0) for i, t in enumerate(takers)]


@linux
def test_groups_of_threads_take_their_own_items_first(team):
    """While all threads are at work, each has an item of the part of its group."""
    frame = Frame(Module(), [], "float")
    f = frame.f
    args, tid, threads, _ = f.args
    group, items = team_ir.GROUP, 40
    seen = f.at(args, 5000, "i64")
    with frame.items("first", items) as item:
        f.store(tid, f.at(args, item, "i64"), "i64", 8)
        # Nobody takes a second item before everybody has one.
        f.op(f"atomicrmw add ptr {seen}, i64 1 seq_cst")
        f.do("br label %look")
        f.do("look:")
        here = f.op(f"load atomic i64, ptr {seen} acquire, align 8")
        f.do(f"br i1 {f.test('slt', here, threads)}, label %look, label %on")
        f.do("on:")
    module = jit.load(frame.end(), *HOST)
    for count in (2 * group, 2 * group + 4):
        buffer = words()
        team(module.address("kernel"), ctypes.addressof(buffer), count)
        first = [items * min(g * group, count) // count for g in range(4)]
        for g, (begin, end) in enumerate(pairwise(first)):
            mine = set(buffer[begin:end])
            members = set(range(g * group, min((g + 1) * group, count)))
            assert members <= mine
