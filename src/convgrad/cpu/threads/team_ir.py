"""The IR of the team: a fork-join that starts threads, gives them work, and has them wait for each other at barriers.

A call goes like this. `@entry` takes the team and creates missing workers (`@create_workers`). Then it gives work to
the workers, as a tree (`@start_children`): it writes 1 into a worker's slot and, if that worker sleeps, wakes it. Each
`@worker` starts its own children, runs the kernel, says that it is done (`@finish`), and waits for its next work: it
spins for a while, then sleeps. The caller runs the kernel, too, and then waits in the same way until `pending` is 0.
Inside, kernels call `@barrier`. How a thread sleeps and is woken (`@wait`, `@wake`) is in wake_ir.py.

A line of memory that many threads change or watch goes from one to the next, each time for a tenth of a microsecond.
So threads are in groups of `GROUP`, by their numbers, and each group has a node: memory in which its members meet at a
barrier, count those that are done, and take work from. The last of a group to come to a barrier, or to be done, does
so for its group at the root. A team of no more than one group meets at the root at once.

Kernels get the address of the team's memory. It begins with the address of `void barrier(ptr team, i64 thread)` and
the number of threads (i64). The node of group g is at `NODES + g * NODE` and begins with `COUNTERS` counters, each an
i64, 0 at the start of a call; kernels take work from them with `atomicrmw add`. The rest is private: see `LAYOUT`.
"""

from __future__ import annotations

from string import Template

from .count import MOST_THREADS
from .openmp_ir import OPENMP
from .wake_ir import CONDITION, FUTEX

GROUP = 8  # threads that share a node, an even number: as many cores share a last-level cache on AMD's servers
FANOUT = 4  # threads that a thread starts
NODES = 384  # where the nodes of groups begin in the memory of a team
NODE = 256  # bytes from one node to the next: lines of memory are fetched in pairs
COUNTER = 8  # bytes from one counter of a node to the next
COUNTERS = 2

CHOSEN = 2  # threads that are woken on a CPU that is chosen for them: see wake_ir.py
STAY = 4e-3  # seconds: a worker that left the CPU of its caller does not do so again for so long; origin not recorded

FEW_SPINS = 256  # before a thread sleeps, if there are more threads than CPUs. Origin not recorded


def source(triple: str, futex: bool = True, openmp: bool = False) -> str:
    """The IR of the team for a target: with threads of its own, or with those of the host's OpenMP.

    `futex=False` has Linux use condition variables too, to test them.
    """
    arch = triple.split("-", 1)[0].replace("arm64", "aarch64").replace("amd64", "x86_64")
    calls = {"x86_64": {"futex": 202, "gettid": 186}, "aarch64": {"futex": 98, "gettid": 178}}
    several = SHARED + (OPENMP if openmp else TEAM)
    if "windows" in triple or "win32" in triple:
        body, waits = ALONE, ""
    elif "linux" in triple and arch in calls and futex:
        body, waits = several, FUTEX
    else:
        body, waits = several, CONDITION
    text = Template(HEAD + waits + body + CPU.get(arch, PLAIN))
    setmask = 3 if "apple" in triple else 2
    numbers = {"threads": MOST_THREADS, "others": MOST_THREADS - 1, "setmask": setmask, "stay": round(STAY * 1e9)}
    numbers |= {"few_spins": FEW_SPINS, "chosen": CHOSEN, "fanout": FANOUT}
    numbers |= {"group": GROUP, "nodes": NODES, "node": NODE}
    return text.substitute(LAYOUT | SIZES | numbers | calls.get(arch, {}))


# Offsets in the memory of the team, in bytes: @control, or a copy of its beginning on the stack of the caller, up to
# `part` and the nodes of its groups, if the threads are the host's. What different threads write is in different cache
# lines. Before the root is what kernels know: the address of @barrier at 0, the number of threads at 8.
LAYOUT = {
    # A node: that of a group, or the root. After the counters:
    "left": 16,  # i32: workers of the group that are not done
    "arrived": 64,  # i32: threads that have come to the barrier
    "generation": 128,  # i32: barriers that have opened; threads spin, then sleep, while it stays the same
    "dozing": 132,  # i32: threads that sleep at the barrier
    "root": 64,
    "pending": 80,  # i32, `left` of the root: groups, or workers of one, not done; its sign bit: the caller sleeps
    # The call. The caller writes it before it starts workers.
    "kernel": 256,  # ptr
    "args": 264,  # ptr
    "mode": 272,  # i64: the caller's mode of floating-point arithmetic
    "spins": 280,  # i32: how often a thread looks, at the barrier and at the end, before it sleeps
    # With the host's threads.
    "asked": 288,  # i64: threads that the caller has asked for
    "caller_cpu": 296,  # i32: the CPU that the caller was on
    "part": NODES,  # the end of what a call uses beside the nodes
}
_TEAM = NODES + NODE * -(-MOST_THREADS // GROUP)
LAYOUT |= {
    # The team.
    "busy": _TEAM,  # i32: 1 while a call has the team
    "workers": _TEAM + 64,  # i64: workers that exist
    "most_workers": _TEAM + 72,  # i64: workers that may exist: less than at first if the system refused one
    "cpus": _TEAM + 80,  # i64: CPUs that the process may use
    "idle_spins": _TEAM + 88,  # i32: how often a worker looks for work before it sleeps
    "most_spins": _TEAM + 92,  # i32: `spins` if there is a CPU for each thread
    # For systems without futexes.
    "mutex": _TEAM + 128,
    "condition": _TEAM + 192,
    # One slot of 128 bytes for each thread. At 0, i32: 0 nothing to do, 1 work, 2 asleep (whoever writes 1 over 2 wakes
    # the thread). At 4, i32: the CPU of the thread that wrote the 1. At 8, i32: the system's number of the thread.
    "slots": _TEAM + 256,
}
SIZES = {
    "room": 128 * MOST_THREADS,
    "size": LAYOUT["slots"] + 128 * MOST_THREADS,
    "alone": NODES + NODE,
    "most": _TEAM,
}  # bytes of all slots, of @control, of a team of one, and of one with threads of the host

HEAD = """
@control = internal global [$size x i8] zeroinitializer, align 128

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

; The caller runs the kernel alone, as a team of one whose memory is on the stack.
define internal void @run_alone(ptr %kernel, ptr %args) nounwind {
  %team = alloca [$alone x i8], align 128
  store ptr @barrier, ptr %team
  %threads = getelementptr i8, ptr %team, i64 8
  store i64 1, ptr %threads
  %node = getelementptr i8, ptr %team, i64 $nodes
  call void @llvm.memset.p0.i64(ptr align 64 %node, i8 0, i64 64, i1 false)
  call void %kernel(ptr %args, i64 0, i64 1, ptr %team)
  ret void
}

define void @pauses(i64 %n) nounwind {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  call void @pause()
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""

# What every team of several threads has.
SHARED = """
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

; One iteration of a spin. Every 64th offers the CPU to others, in case the thread that is waited for needs it; if
; nobody wants it, that takes less than a microsecond.
define internal void @spin_once(i32 %i) alwaysinline nounwind {
entry:
  call void @pause()
  %low = and i32 %i, 63
  %now = icmp eq i32 %low, 63
  br i1 %now, label %yield, label %done
yield:
  %r = call i32 @sched_yield()
  br label %done
done:
  ret void
}

; Whether there is a CPU for each of n threads.
define internal i1 @cpus_suffice(i64 %n) alwaysinline nounwind {
  %cpus.p = getelementptr i8, ptr @control, i64 $cpus
  %cpus = load i64, ptr %cpus.p
  %enough = icmp sle i64 %n, %cpus
  ret i1 %enough
}

; The node of a thread's group, and how many members of n threads are in it.
define internal ptr @node_of(ptr %team, i64 %thread) alwaysinline nounwind {
  %group = udiv i64 %thread, $group
  %offset = mul i64 %group, $node
  %nodes = getelementptr i8, ptr %team, i64 $nodes
  %node = getelementptr i8, ptr %nodes, i64 %offset
  ret ptr %node
}

define internal i64 @members_of(i64 %thread, i64 %n) alwaysinline nounwind {
  %over = urem i64 %thread, $group
  %first = sub i64 %thread, %over
  %rest = sub i64 %n, %first
  %members = call i64 @llvm.smin.i64(i64 %rest, i64 $group)
  ret i64 %members
}

define internal i64 @groups_of(i64 %n) alwaysinline nounwind {
  %more = add i64 %n, $group
  %up = sub i64 %more, 1
  %groups = udiv i64 %up, $group
  ret i64 %groups
}

define internal void @barrier(ptr %team, i64 %thread) nounwind {
entry:
  %count = getelementptr i8, ptr %team, i64 8
  %n = load i64, ptr %count
  %root = getelementptr i8, ptr %team, i64 $root
  %single = icmp eq i64 %n, 1
  br i1 %single, label %done, label %several
several:
  %few = icmp sle i64 %n, $group
  br i1 %few, label %flat, label %tree
flat:
  %last = call i1 @arrive(ptr %team, ptr %root, i64 %n)
  br i1 %last, label %open, label %done
open:
  call void @open(ptr %root)
  br label %done
tree:
  %node = call ptr @node_of(ptr %team, i64 %thread)
  %members = call i64 @members_of(i64 %thread, i64 %n)
  %leads = call i1 @arrive(ptr %team, ptr %node, i64 %members)
  br i1 %leads, label %up, label %done
up:
  %groups = call i64 @groups_of(i64 %n)
  %final = call i1 @arrive(ptr %team, ptr %root, i64 %groups)
  br i1 %final, label %open_root, label %open_node
open_root:
  call void @open(ptr %root)
  br label %open_node
open_node:
  call void @open(ptr %node)
  br label %done
done:
  ret void
}

; Come to a node as one of n. The last one returns 1 and has to open it; the others return 0 when that is done.
define internal i1 @arrive(ptr %team, ptr %node, i64 %n) nounwind {
entry:
  %arrived = getelementptr i8, ptr %node, i64 $arrived
  %generation = getelementptr i8, ptr %node, i64 $generation
  %dozing = getelementptr i8, ptr %node, i64 $dozing
  %old = load atomic i32, ptr %generation monotonic, align 4
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel
  %here = add i32 %before, 1
  %n32 = trunc i64 %n to i32
  %last = icmp eq i32 %here, %n32
  br i1 %last, label %whole, label %stay
whole:
  store atomic i32 0, ptr %arrived monotonic, align 4
  ret i1 true
stay:
  %spins.p = getelementptr i8, ptr %team, i64 $spins
  %spins = load i32, ptr %spins.p
  br label %spin
spin:
  %i = phi i32 [ 0, %stay ], [ %next, %again ]
  %now = load atomic i32, ptr %generation acquire, align 4
  %opened = icmp ne i32 %now, %old
  br i1 %opened, label %done, label %again
again:
  call void @spin_once(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %spins
  br i1 %more, label %spin, label %doze
doze:
  %d = atomicrmw add ptr %dozing, i32 1 seq_cst
  br label %sleep
sleep:
  call void @wait(ptr %generation, i32 %old)
  %then = load atomic i32, ptr %generation acquire, align 4
  %same = icmp eq i32 %then, %old
  br i1 %same, label %sleep, label %up
up:
  %u = atomicrmw sub ptr %dozing, i32 1 seq_cst
  br label %done
done:
  ret i1 false
}

; Let those go on that wait at a node.
define internal void @open(ptr %node) nounwind {
entry:
  %generation = getelementptr i8, ptr %node, i64 $generation
  %dozing = getelementptr i8, ptr %node, i64 $dozing
  %g = atomicrmw add ptr %generation, i32 1 seq_cst
  %asleep = load atomic i32, ptr %dozing seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %done
wake:
  call void @wake(ptr %generation, i32 2147483647)
  br label %done
done:
  ret void
}

define void @setup(i64 %cpus, i64 %idle_spins, i64 %most_spins) nounwind {
  %most.p = getelementptr i8, ptr @control, i64 $most_workers
  store i64 $others, ptr %most.p
  %cpus.p = getelementptr i8, ptr @control, i64 $cpus
  store i64 %cpus, ptr %cpus.p
  %idle_spins.p = getelementptr i8, ptr @control, i64 $idle_spins
  %idle_spins32 = trunc i64 %idle_spins to i32
  store i32 %idle_spins32, ptr %idle_spins.p
  %most_spins.p = getelementptr i8, ptr @control, i64 $most_spins
  %most_spins32 = trunc i64 %most_spins to i32
  store i32 %most_spins32, ptr %most_spins.p
  ret void
}
"""

TEAM = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(ptr)
declare i32 @pthread_attr_init(ptr)
declare i32 @pthread_attr_setstacksize(ptr, i64)
declare i32 @pthread_attr_destroy(ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)

define void @entry(ptr %kernel, ptr %args, i64 %threads) nounwind {
entry:
  %busy = getelementptr i8, ptr @control, i64 $busy
  %workers = getelementptr i8, ptr @control, i64 $workers
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %try, label %single
try:
  %taken = cmpxchg ptr %busy, i32 0, i32 1 acquire monotonic
  %free = extractvalue { i32, i1 } %taken, 1
  br i1 %free, label %mine, label %single
mine:
  %asked = call i64 @llvm.smin.i64(i64 %threads, i64 $threads)
  %want = sub i64 %asked, 1
  %have = load i64, ptr %workers
  %few = icmp slt i64 %have, %want
  br i1 %few, label %create, label %ready
create:
  call void @create_workers(i64 %want)
  br label %ready
ready:
  %grown = load i64, ptr %workers
  %others = call i64 @llvm.smin.i64(i64 %want, i64 %grown)
  %none = icmp eq i64 %others, 0
  br i1 %none, label %give, label %begin
give:
  store atomic i32 0, ptr %busy release, align 4
  br label %single
single:
  call void @run_alone(ptr %kernel, ptr %args)
  ret void
begin:
  %n = add i64 %others, 1
  store ptr @barrier, ptr @control
  %count = getelementptr i8, ptr @control, i64 8
  store i64 %n, ptr %count
  %kernel.p = getelementptr i8, ptr @control, i64 $kernel
  store ptr %kernel, ptr %kernel.p
  %args.p = getelementptr i8, ptr @control, i64 $args
  store ptr %args, ptr %args.p
  %mode = call i64 @get_mode()
  %mode.p = getelementptr i8, ptr @control, i64 $mode
  store i64 %mode, ptr %mode.p
  ; If there are more threads than CPUs, a thread that spins may keep another from the CPU that it needs: spin less.
  %enough = call i1 @cpus_suffice(i64 %n)
  %most_spins.p = getelementptr i8, ptr @control, i64 $most_spins
  %most_spins = load i32, ptr %most_spins.p
  %spins = select i1 %enough, i32 %most_spins, i32 $few_spins
  %spins.p = getelementptr i8, ptr @control, i64 $spins
  store i32 %spins, ptr %spins.p
  %pending = getelementptr i8, ptr @control, i64 $pending
  %few_groups = icmp sle i64 %n, $group
  %groups = call i64 @groups_of(i64 %n)
  %parts = select i1 %few_groups, i64 %others, i64 %groups
  %parts32 = trunc i64 %parts to i32
  store atomic i32 %parts32, ptr %pending monotonic, align 4
  br label %clear
clear:
  %first = phi i64 [ 0, %begin ], [ %beyond, %clear ]
  %node = call ptr @node_of(ptr @control, i64 %first)
  call void @llvm.memset.p0.i64(ptr align 64 %node, i8 0, i64 $left, i1 false)
  %members = call i64 @members_of(i64 %first, i64 %n)
  %is_first = icmp eq i64 %first, 0
  %others_of = sub i64 %members, 1
  %left_of = select i1 %is_first, i64 %others_of, i64 %members
  %left_of32 = trunc i64 %left_of to i32
  %left.p = getelementptr i8, ptr %node, i64 $left
  store atomic i32 %left_of32, ptr %left.p monotonic, align 4
  %beyond = add i64 %first, $group
  %more_groups = icmp slt i64 %beyond, %n
  br i1 %more_groups, label %clear, label %start
start:
  call void @start_children(i64 0, i64 %n)
  call void %kernel(ptr %args, i64 0, i64 %n, ptr @control)
  br label %join
join:
  %i = phi i32 [ 0, %start ], [ %next, %again ]
  %left = load atomic i32, ptr %pending acquire, align 4
  %done = icmp eq i32 %left, 0
  br i1 %done, label %leave, label %again
again:
  call void @spin_once(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %spins
  br i1 %more, label %join, label %doze
doze:
  %before = atomicrmw or ptr %pending, i32 -2147483648 seq_cst
  br label %check
check:
  %now = load atomic i32, ptr %pending acquire, align 4
  %over = icmp eq i32 %now, -2147483648
  br i1 %over, label %leave, label %sleep
sleep:
  call void @wait(ptr %pending, i32 %now)
  br label %check
leave:
  store atomic i32 0, ptr %busy release, align 4
  ret void
}

; Give work to the children of a thread, then wake those that sleep. Threads form a tree: t has the children
; $fanout * t + 1 and following, so that a large team is woken in parallel.
define internal void @start_children(i64 %thread, i64 %n) nounwind {
entry:
  %times = mul i64 %thread, $fanout
  %first = add i64 %times, 1
  %beyond = add i64 %first, $fanout
  %end = call i64 @llvm.smin.i64(i64 %beyond, i64 %n)
  ; To choose the CPU of a thread takes longer than to wake it. Of many, each moves itself, if it has to.
  %enough = call i1 @cpus_suffice(i64 %n)
  %few = icmp sle i64 %n, $chosen
  %chosen = and i1 %enough, %few
  %slots = getelementptr i8, ptr @control, i64 $slots
  %any = icmp slt i64 %first, %end
  br i1 %any, label %begin, label %done
begin:
  %cpu = call i32 @current_cpu()
  br label %tell
tell:
  %child = phi i64 [ %first, %begin ], [ %next, %tell ]
  %sleeping = phi i32 [ 0, %begin ], [ %sleepers, %tell ]
  %offset = shl i64 %child, 7
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %here = getelementptr i8, ptr %slot, i64 4
  store i32 %cpu, ptr %here
  %before = atomicrmw xchg ptr %slot, i32 1 seq_cst
  %asleep = icmp eq i32 %before, 2
  %bit = zext i1 %asleep to i32
  %shifted = shl i32 %sleeping, 1
  %sleepers = or i32 %shifted, %bit
  %next = add i64 %child, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %tell, label %look
look:
  ; The last bit is the last child's.
  %later = phi i64 [ %end, %tell ], [ %which, %after ]
  %left = phi i32 [ %sleepers, %tell ], [ %fewer, %after ]
  %nobody = icmp eq i32 %left, 0
  br i1 %nobody, label %done, label %one
one:
  %which = sub i64 %later, 1
  %fewer = lshr i32 %left, 1
  %sleeps = trunc i32 %left to i1
  br i1 %sleeps, label %wake, label %after
wake:
  %offset2 = shl i64 %which, 7
  %sleeper = getelementptr i8, ptr %slots, i64 %offset2
  %name.p = getelementptr i8, ptr %sleeper, i64 8
  %name = load i32, ptr %name.p
  br i1 %chosen, label %elsewhere, label %anywhere
elsewhere:
  call void @wake_elsewhere(ptr %sleeper, i32 %name)
  br label %after
anywhere:
  call void @wake(ptr %sleeper, i32 1)
  br label %after
after:
  br label %look
done:
  ret void
}

; Say that a worker is done: to its group, and if it is the last one there, to the caller.
define internal void @finish(i64 %thread, i64 %n) nounwind {
entry:
  %pending = getelementptr i8, ptr @control, i64 $pending
  %few = icmp sle i64 %n, $group
  br i1 %few, label %tell, label %inside
inside:
  %node = call ptr @node_of(ptr @control, i64 %thread)
  %left.p = getelementptr i8, ptr %node, i64 $left
  %before = atomicrmw sub ptr %left.p, i32 1 acq_rel
  %last = icmp eq i32 %before, 1
  br i1 %last, label %tell, label %done
tell:
  %left = atomicrmw sub ptr %pending, i32 1 seq_cst
  %waited_for = icmp eq i32 %left, -2147483647
  br i1 %waited_for, label %wake, label %done
wake:
  call void @wake(ptr %pending, i32 1)
  br label %done
done:
  ret void
}

define internal ptr @worker(ptr %argument) nounwind {
entry:
  %thread = ptrtoint ptr %argument to i64
  %offset = shl i64 %thread, 7
  %slots = getelementptr i8, ptr @control, i64 $slots
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %idle_spins.p = getelementptr i8, ptr @control, i64 $idle_spins
  %spins.p = getelementptr i8, ptr @control, i64 $spins
  %kernel.p = getelementptr i8, ptr @control, i64 $kernel
  %args.p = getelementptr i8, ptr @control, i64 $args
  %mode.p = getelementptr i8, ptr @control, i64 $mode
  %count = getelementptr i8, ptr @control, i64 8
  %pending = getelementptr i8, ptr @control, i64 $pending
  %there.p = getelementptr i8, ptr %slot, i64 4
  %name.p = getelementptr i8, ptr %slot, i64 8
  %name = call i32 @thread_id()
  store i32 %name, ptr %name.p
  %moved = alloca i64
  store i64 0, ptr %moved
  br label %rest
rest:
  %idle_spins = load i32, ptr %idle_spins.p
  br label %spin
spin:
  %i = phi i32 [ 0, %rest ], [ %next, %again ], [ %next, %longer ]
  %bound = phi i32 [ %idle_spins, %rest ], [ %bound, %again ], [ %further, %longer ]
  %word = load atomic i32, ptr %slot acquire, align 4
  %told = icmp eq i32 %word, 1
  br i1 %told, label %work, label %again
again:
  call void @spin_once(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %bound
  br i1 %more, label %spin, label %tired
tired:
  ; While others work there may soon be more to do: the time of an idle worker counts from the end of the call, though
  ; this one waits no longer than at a barrier.
  %unfinished = load atomic i32, ptr %pending monotonic, align 4
  %others = and i32 %unfinished, 2147483647
  %still_on = icmp ne i32 %others, 0
  %spins = load i32, ptr %spins.p
  %patient = icmp slt i32 %next, %spins
  %stays = and i1 %still_on, %patient
  br i1 %stays, label %longer, label %doze
longer:
  %further = add i32 %next, %idle_spins
  br label %spin
doze:
  %change = cmpxchg ptr %slot, i32 0, i32 2 seq_cst acquire
  %quiet = extractvalue { i32, i1 } %change, 1
  br i1 %quiet, label %sleep, label %work
sleep:
  call void @wait(ptr %slot, i32 2)
  %woken = load atomic i32, ptr %slot acquire, align 4
  %still = icmp eq i32 %woken, 2
  br i1 %still, label %sleep, label %work
work:
  %awake = phi i1 [ true, %spin ], [ true, %doze ], [ false, %sleep ]
  store atomic i32 0, ptr %slot monotonic, align 4
  %n = load i64, ptr %count
  ; Two threads on one CPU can only take turns. If this worker is on the CPU of the thread that started it although
  ; there are enough CPUs, it moves: not often, in case the system moves it back, and not if @wake_elsewhere has chosen
  ; its CPU.
  %there = load i32, ptr %there.p
  %here = call i32 @current_cpu()
  %same_cpu = icmp eq i32 %here, %there
  %enough = call i1 @cpus_suffice(i64 %n)
  %nearby = and i1 %same_cpu, %enough
  %many = icmp sgt i64 %n, $chosen
  %own_choice = or i1 %awake, %many
  %could = and i1 %nearby, %own_choice
  br i1 %could, label %consider, label %begin
consider:
  %now = call i64 @clock()
  %before = load i64, ptr %moved
  %since = sub i64 %now, %before
  %long = icmp sgt i64 %since, $stay
  br i1 %long, label %move, label %begin
move:
  store i64 %now, ptr %moved
  call void @leave_cpu(i32 %there)
  br label %begin
begin:
  call void @start_children(i64 %thread, i64 %n)
  %mode = load i64, ptr %mode.p
  call void @set_mode(i64 %mode)
  %kernel = load ptr, ptr %kernel.p
  %args = load ptr, ptr %args.p
  call void %kernel(ptr %args, i64 %thread, i64 %n, ptr @control)
  call void @finish(i64 %thread, i64 %n)
  br label %rest
}

; Create workers until there are as many as wanted. If the system refuses one, there will never be more.
define internal void @create_workers(i64 %want) nounwind {
entry:
  %all = alloca [128 x i8], align 16
  %old = alloca [128 x i8], align 16
  %attributes = alloca [128 x i8], align 16
  %handle = alloca ptr, align 8
  %workers = getelementptr i8, ptr @control, i64 $workers
  %most = getelementptr i8, ptr @control, i64 $most_workers
  %slots = getelementptr i8, ptr @control, i64 $slots
  %bound = load i64, ptr %most
  %goal = call i64 @llvm.smin.i64(i64 %want, i64 %bound)
  %have = load i64, ptr %workers
  %few = icmp slt i64 %have, %goal
  br i1 %few, label %begin, label %done
begin:
  %none = icmp eq i64 %have, 0
  br i1 %none, label %first, label %ready
first:
  call void @prepare()
  br label %ready
ready:
  %a = call i32 @sigfillset(ptr %all)
  %b = call i32 @pthread_sigmask(i32 $setmask, ptr %all, ptr %old)
  %c = call i32 @pthread_attr_init(ptr %attributes)
  %d = call i32 @pthread_attr_setstacksize(ptr %attributes, i64 8388608)
  br label %loop
loop:
  %last = phi i64 [ %have, %ready ], [ %thread, %created ]
  %thread = add i64 %last, 1
  %argument = inttoptr i64 %thread to ptr
  %r = call i32 @pthread_create(ptr %handle, ptr %attributes, ptr @worker, ptr %argument)
  %good = icmp eq i32 %r, 0
  br i1 %good, label %created, label %refused
created:
  %h = load ptr, ptr %handle
  %e = call i32 @pthread_detach(ptr %h)
  store i64 %thread, ptr %workers
  %more = icmp slt i64 %thread, %goal
  br i1 %more, label %loop, label %end
refused:
  store i64 %last, ptr %most
  br label %end
end:
  %f = call i32 @pthread_attr_destroy(ptr %attributes)
  %g = call i32 @pthread_sigmask(i32 $setmask, ptr %old, ptr null)
  br label %done
done:
  ret void
}

; Called in the child of a fork, which has no workers and no call inside.
define void @reset() nounwind {
  call void @llvm.memset.p0.i64(ptr align 64 @control, i8 0, i64 $workers, i1 false)
  %workers = getelementptr i8, ptr @control, i64 $workers
  store i64 0, ptr %workers
  %most = getelementptr i8, ptr @control, i64 $most_workers
  store i64 $others, ptr %most
  %slots = getelementptr i8, ptr @control, i64 $slots
  call void @llvm.memset.p0.i64(ptr align 64 %slots, i8 0, i64 $room, i1 false)
  ret void
}
"""

# On Windows every call runs alone.
ALONE = """
define void @entry(ptr %kernel, ptr %args, i64 %threads) nounwind {
  call void @run_alone(ptr %kernel, ptr %args)
  ret void
}

define internal void @barrier(ptr %team, i64 %thread) nounwind {
  ret void
}

define void @setup(i64 %cpus, i64 %idle_spins, i64 %most_spins) nounwind {
  ret void
}

define void @reset() nounwind {
  ret void
}
"""

# By architecture: the pause of a spin, and the mode of floating-point arithmetic (rounding, flushing of subnormals).
# Workers take over the caller's mode; otherwise the bits of a result would depend on the thread that computed it.
CPU = {
    "x86_64": """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal void @pause() alwaysinline nounwind {
  call void @llvm.x86.sse2.pause()
  ret void
}

; Workers get the mode with all exceptions masked and no flag set.
define internal i64 @get_mode() nounwind {
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %mode = load i32, ptr %p
  %clean = and i32 %mode, -64
  %masked = or i32 %clean, 8064
  %wide = zext i32 %masked to i64
  ret i64 %wide
}

; The mode of a thread that is not ours, to be put back.
define internal i64 @raw_mode() nounwind {
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %mode = load i32, ptr %p
  %wide = zext i32 %mode to i64
  ret i64 %wide
}

define internal void @set_mode(i64 %wide) nounwind {
  %p = alloca i32
  %mode = trunc i64 %wide to i32
  store i32 %mode, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}
""",
    "aarch64": """
declare void @llvm.aarch64.isb(i32)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

; Not the instruction named yield, which does nothing on most cores; isb takes a few dozen cycles.
define internal void @pause() alwaysinline nounwind {
  call void @llvm.aarch64.isb(i32 15)
  ret void
}

define internal i64 @get_mode() nounwind {
  %mode = call i64 @llvm.aarch64.get.fpcr()
  ret i64 %mode
}

define internal i64 @raw_mode() nounwind {
  %mode = call i64 @llvm.aarch64.get.fpcr()
  ret i64 %mode
}

define internal void @set_mode(i64 %mode) nounwind {
  call void @llvm.aarch64.set.fpcr(i64 %mode)
  ret void
}
""",
}

PLAIN = """
define internal void @pause() alwaysinline nounwind {
  fence seq_cst
  ret void
}

define internal i64 @get_mode() nounwind {
  ret i64 0
}

define internal i64 @raw_mode() nounwind {
  ret i64 0
}

define internal void @set_mode(i64 %mode) nounwind {
  ret void
}
"""
