"""The IR of the team: how threads are started, given work, woken, made to meet at a barrier, and put to sleep.

The team's memory, which kernels get, begins with the address of `void barrier(ptr team)`, then the number of threads
(i64). At `COUNTER * (1 + i)` for i < `COUNTERS` lie counters, each an i64 in a cache line of its own, 0 at the start,
from which kernels take work with `atomicrmw add`. What follows is private to this file.
"""

from __future__ import annotations

from string import Template

from .count import MOST

COUNTER = 64
COUNTERS = 14

# A worker that finds itself on the CPU of its caller leaves it, but not again for so long.
STAY = 4e-3


def source(triple: str, futex: bool = True) -> str:
    """The IR of the team for a target; without futexes it sleeps on a condition variable."""
    arch = triple.split("-", 1)[0].replace("arm64", "aarch64").replace("amd64", "x86_64")
    calls = {"x86_64": {"futex": 202, "gettid": 186}, "aarch64": {"futex": 98, "gettid": 178}}
    if "windows" in triple or "win32" in triple:
        body, waits = ALONE, ""
    elif "linux" in triple and arch in calls and futex:
        body, waits = TEAM, FUTEX
    else:
        body, waits = TEAM, CONDITION
    text = Template(HEAD + waits + body + CPU.get(arch, PLAIN))
    setmask = 3 if "apple" in triple else 2
    return text.substitute(LAYOUT, threads=MOST, others=MOST - 1, setmask=setmask, **calls.get(arch, {}))


# Where things lie in @control. The team comes first; what different threads write is kept 64 bytes or more apart.
LAYOUT = {
    "clear": COUNTER * (COUNTERS + 1),
    "arrived": 960,
    "generation": 1024,
    "dozing": 1028,
    "pending": 1088,
    "kernel": 1152,
    "args": 1160,
    "mode": 1168,
    "patience": 1176,
    "busy": 2048,
    "workers": 2112,
    "most": 2120,
    "cpus": 2128,
    "idle": 2136,
    "patient": 2140,
    "mutex": 2176,
    "condition": 2240,
    "slots": 2304,
    "room": 128 * MOST,
    "size": 2304 + 128 * MOST,
    "stay": round(STAY * 1e9),
}

HEAD = """
@control = internal global [$size x i8] zeroinitializer, align 128

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

; The caller alone, with a team of its own.
define internal void @alone(ptr %kernel, ptr %args) nounwind {
  %team = alloca [2048 x i8], align 64
  call void @llvm.memset.p0.i64(ptr align 64 %team, i8 0, i64 $clear, i1 false)
  store ptr @barrier, ptr %team
  %threads = getelementptr i8, ptr %team, i64 8
  store i64 1, ptr %threads
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

# Both ways to sleep promise the same: @wait returns at once if the word has changed, and otherwise after a @wake, or
# for no reason at all.
FUTEX = """
declare i64 @syscall(i64, ...)
declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @memcmp(ptr, ptr, i64)

define internal void @wait(ptr %word, i32 %value) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i64 128, i32 %value, ptr null, ptr null, i64 0)
  ret void
}

define internal void @wake(ptr %word, i32 %count) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i64 129, i32 %count, ptr null, ptr null, i64 0)
  ret void
}

define internal void @prepare() nounwind {
  ret void
}

define internal i32 @place() nounwind {
  %cpu = call i32 @sched_getcpu()
  ret i32 %cpu
}

; Nanoseconds of a clock that never goes back.
define internal i64 @clock() nounwind {
  %time = alloca { i64, i64 }
  %r = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.p = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.p
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %rest
  ret i64 %now
}

; Keep a thread (0 is this one) from a CPU, if it may use others. %mask gets what it may use then, for @allow.
define internal i1 @avoid(i32 %thread, i32 %cpu, ptr %mask) nounwind {
entry:
  %size = call i32 @sched_getaffinity(i32 %thread, i64 128, ptr %mask)
  %known = icmp sge i32 %size, 0
  %valid = icmp ult i32 %cpu, 1024
  %go = and i1 %known, %valid
  br i1 %go, label %look, label %no
look:
  %one = call i8 @flip(ptr %mask, i32 %cpu)
  ; A CPU that it may not use need not be avoided.
  %was = icmp eq i8 %one, 0
  br i1 %was, label %set, label %no
set:
  ; An empty mask is refused, and nothing has changed.
  %r = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %mask)
  %done = icmp eq i32 %r, 0
  ret i1 %done
no:
  ret i1 false
}

; Turn the bit of a CPU in a mask. Returns it as it is then, at its place in the byte.
define internal i8 @flip(ptr %mask, i32 %cpu) nounwind {
  %index = lshr i32 %cpu, 3
  %wide = zext i32 %index to i64
  %byte = getelementptr i8, ptr %mask, i64 %wide
  %low = trunc i32 %cpu to i8
  %shift = and i8 %low, 7
  %one = shl i8 1, %shift
  %before = load i8, ptr %byte
  %after = xor i8 %before, %one
  store i8 %after, ptr %byte
  %bit = and i8 %after, %one
  ret i8 %bit
}

; Let a thread that was kept from a CPU use it again, unless somebody else has changed what it may use meanwhile.
define internal void @allow(i1 %kept, i32 %thread, i32 %cpu, ptr %mask) nounwind {
entry:
  %now = alloca [128 x i8], align 8
  br i1 %kept, label %look, label %done
look:
  call void @llvm.memset.p0.i64(ptr align 8 %now, i8 0, i64 128, i1 false)
  %size = call i32 @sched_getaffinity(i32 %thread, i64 128, ptr %now)
  %differ = call i32 @memcmp(ptr %now, ptr %mask, i64 128)
  %same = icmp eq i32 %differ, 0
  br i1 %same, label %set, label %done
set:
  %bit = call i8 @flip(ptr %mask, i32 %cpu)
  %r = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %mask)
  br label %done
done:
  ret void
}

; Go to some other CPU than this one, if there is one for us; later the system may again choose any of them.
define internal void @part(i32 %cpu) nounwind {
  %mask = alloca [128 x i8], align 8
  call void @llvm.memset.p0.i64(ptr align 8 %mask, i8 0, i64 128, i1 false)
  %kept = call i1 @avoid(i32 0, i32 %cpu, ptr %mask)
  call void @allow(i1 %kept, i32 0, i32 %cpu, ptr %mask)
  ret void
}

define internal i32 @name() nounwind {
  %long = call i64 (i64, ...) @syscall(i64 $gettid)
  %thread = trunc i64 %long to i32
  ret i32 %thread
}

; Wake a thread that sleeps, on some other CPU than this one. Until this ends nobody else changes what it may use: it
; does not part, and whoever wakes it is busy here.
define internal void @rouse(ptr %word, i32 %thread) nounwind {
  %mask = alloca [128 x i8], align 8
  call void @llvm.memset.p0.i64(ptr align 8 %mask, i8 0, i64 128, i1 false)
  %cpu = call i32 @place()
  %kept = call i1 @avoid(i32 %thread, i32 %cpu, ptr %mask)
  call void @wake(ptr %word, i32 1)
  call void @allow(i1 %kept, i32 %thread, i32 %cpu, ptr %mask)
  ret void
}
"""

CONDITION = """
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)

define internal void @wait(ptr %word, i32 %value) nounwind {
  %mutex = getelementptr i8, ptr @control, i64 $mutex
  %condition = getelementptr i8, ptr @control, i64 $condition
  %a = call i32 @pthread_mutex_lock(ptr %mutex)
  %now = load atomic i32, ptr %word seq_cst, align 4
  %same = icmp eq i32 %now, %value
  br i1 %same, label %sleep, label %done
sleep:
  %b = call i32 @pthread_cond_wait(ptr %condition, ptr %mutex)
  br label %done
done:
  %c = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}

define internal void @wake(ptr %word, i32 %count) nounwind {
  %mutex = getelementptr i8, ptr @control, i64 $mutex
  %condition = getelementptr i8, ptr @control, i64 $condition
  %a = call i32 @pthread_mutex_lock(ptr %mutex)
  %b = call i32 @pthread_cond_broadcast(ptr %condition)
  %c = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}

; Called before the first worker is created, by the caller that has the team.
define internal void @prepare() nounwind {
  %mutex = getelementptr i8, ptr @control, i64 $mutex
  %condition = getelementptr i8, ptr @control, i64 $condition
  %a = call i32 @pthread_mutex_init(ptr %mutex, ptr null)
  %b = call i32 @pthread_cond_init(ptr %condition, ptr null)
  ret void
}

define internal i32 @place() nounwind {
  ret i32 -1
}

define internal i64 @clock() nounwind {
  ret i64 0
}

define internal void @part(i32 %cpu) nounwind {
  ret void
}

define internal i32 @name() nounwind {
  ret i32 0
}

define internal void @rouse(ptr %word, i32 %thread) nounwind {
  call void @wake(ptr %word, i32 1)
  ret void
}
"""

# A worker's slot holds 0 while it has nothing to do, 1 when it shall work, 2 when it sleeps and must be woken.
# `pending` counts the workers that are not done; its sign bit says that the caller sleeps until it is 0.
TEAM = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(ptr)
declare i32 @pthread_attr_init(ptr)
declare i32 @pthread_attr_setstacksize(ptr, i64)
declare i32 @pthread_attr_destroy(ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

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
  call void @grow(i64 %want)
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
  call void @alone(ptr %kernel, ptr %args)
  ret void
begin:
  %n = add i64 %others, 1
  call void @llvm.memset.p0.i64(ptr align 64 @control, i8 0, i64 $clear, i1 false)
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
  ; With more threads than CPUs, the one that is waited for may need the CPU of the one that waits: little spinning.
  %enough = call i1 @roomy(i64 %n)
  %patient.p = getelementptr i8, ptr @control, i64 $patient
  %patient = load i32, ptr %patient.p
  %patience = select i1 %enough, i32 %patient, i32 256
  %patience.p = getelementptr i8, ptr @control, i64 $patience
  store i32 %patience, ptr %patience.p
  %pending = getelementptr i8, ptr @control, i64 $pending
  %others32 = trunc i64 %others to i32
  store atomic i32 %others32, ptr %pending monotonic, align 4
  call void @start(i64 0, i64 %n)
  call void %kernel(ptr %args, i64 0, i64 %n, ptr @control)
  br label %join
join:
  %i = phi i32 [ 0, %begin ], [ %next, %again ]
  %left = load atomic i32, ptr %pending acquire, align 4
  %done = icmp eq i32 %left, 0
  br i1 %done, label %leave, label %again
again:
  call void @breathe(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %patience
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

; One turn of a spin. Now and then the CPU is offered to others, in case the thread that is waited for needs this very
; CPU; if nobody wants it, that takes less than a microsecond.
define internal void @breathe(i32 %i) alwaysinline nounwind {
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

; Whether there is a CPU for each of so many threads.
define internal i1 @roomy(i64 %n) alwaysinline nounwind {
  %cpus.p = getelementptr i8, ptr @control, i64 $cpus
  %cpus = load i64, ptr %cpus.p
  %enough = icmp sle i64 %n, %cpus
  ret i1 %enough
}

; Threads are started as a tree, thread t starting 2t+1 and 2t+2, so that a large team wakes up in parallel.
define internal void @start(i64 %thread, i64 %n) nounwind {
entry:
  %twice = shl i64 %thread, 1
  %first = add i64 %twice, 1
  %end = add i64 %twice, 3
  %enough = call i1 @roomy(i64 %n)
  br label %loop
loop:
  %child = phi i64 [ %first, %entry ], [ %next, %after ]
  %exists = icmp slt i64 %child, %n
  br i1 %exists, label %tell, label %done
tell:
  %offset = shl i64 %child, 7
  %slots = getelementptr i8, ptr @control, i64 $slots
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %here = getelementptr i8, ptr %slot, i64 4
  %cpu = call i32 @place()
  store i32 %cpu, ptr %here
  %before = atomicrmw xchg ptr %slot, i32 1 seq_cst
  %asleep = icmp eq i32 %before, 2
  br i1 %asleep, label %wake, label %after
wake:
  %name.p = getelementptr i8, ptr %slot, i64 8
  %name = load i32, ptr %name.p
  br i1 %enough, label %apart, label %anywhere
apart:
  call void @rouse(ptr %slot, i32 %name)
  br label %after
anywhere:
  call void @wake(ptr %slot, i32 1)
  br label %after
after:
  %next = add i64 %child, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}

define internal ptr @worker(ptr %argument) nounwind {
entry:
  %thread = ptrtoint ptr %argument to i64
  %offset = shl i64 %thread, 7
  %slots = getelementptr i8, ptr @control, i64 $slots
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %idle.p = getelementptr i8, ptr @control, i64 $idle
  %kernel.p = getelementptr i8, ptr @control, i64 $kernel
  %args.p = getelementptr i8, ptr @control, i64 $args
  %mode.p = getelementptr i8, ptr @control, i64 $mode
  %count = getelementptr i8, ptr @control, i64 8
  %pending = getelementptr i8, ptr @control, i64 $pending
  %there.p = getelementptr i8, ptr %slot, i64 4
  %name.p = getelementptr i8, ptr %slot, i64 8
  %name = call i32 @name()
  store i32 %name, ptr %name.p
  %moved = alloca i64
  store i64 0, ptr %moved
  br label %rest
rest:
  %idle = load i32, ptr %idle.p
  br label %spin
spin:
  %i = phi i32 [ 0, %rest ], [ %next, %again ]
  %word = load atomic i32, ptr %slot acquire, align 4
  %told = icmp eq i32 %word, 1
  br i1 %told, label %work, label %again
again:
  call void @breathe(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %idle
  br i1 %more, label %spin, label %doze
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
  ; On one CPU two threads can only take turns. If this one finds itself on the CPU of the one that told it, although
  ; there are enough, it leaves; not often, in case the system insists, and not if it slept: then see @rouse.
  %there = load i32, ptr %there.p
  %here = call i32 @place()
  %together = icmp eq i32 %here, %there
  %enough = call i1 @roomy(i64 %n)
  %apart = and i1 %together, %enough
  %could = and i1 %apart, %awake
  br i1 %could, label %consider, label %begin
consider:
  %now = call i64 @clock()
  %before = load i64, ptr %moved
  %since = sub i64 %now, %before
  %long = icmp sgt i64 %since, $stay
  br i1 %long, label %move, label %begin
move:
  store i64 %now, ptr %moved
  call void @part(i32 %there)
  br label %begin
begin:
  call void @start(i64 %thread, i64 %n)
  %mode = load i64, ptr %mode.p
  call void @set_mode(i64 %mode)
  %kernel = load ptr, ptr %kernel.p
  %args = load ptr, ptr %args.p
  call void %kernel(ptr %args, i64 %thread, i64 %n, ptr @control)
  %left = atomicrmw sub ptr %pending, i32 1 seq_cst
  %last = icmp eq i32 %left, -2147483647
  br i1 %last, label %tell, label %rest
tell:
  call void @wake(ptr %pending, i32 1)
  br label %rest
}

define internal void @barrier(ptr %team) nounwind {
entry:
  %count = getelementptr i8, ptr %team, i64 8
  %n = load i64, ptr %count
  %single = icmp eq i64 %n, 1
  br i1 %single, label %done, label %arrive
arrive:
  %arrived = getelementptr i8, ptr %team, i64 $arrived
  %generation = getelementptr i8, ptr %team, i64 $generation
  %dozing = getelementptr i8, ptr %team, i64 $dozing
  %old = load atomic i32, ptr %generation monotonic, align 4
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel
  %here = add i32 %before, 1
  %n32 = trunc i64 %n to i32
  %last = icmp eq i32 %here, %n32
  br i1 %last, label %open, label %stay
open:
  store atomic i32 0, ptr %arrived monotonic, align 4
  %g = atomicrmw add ptr %generation, i32 1 seq_cst
  %asleep = load atomic i32, ptr %dozing seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %done
wake:
  call void @wake(ptr %generation, i32 2147483647)
  br label %done
stay:
  %patience.p = getelementptr i8, ptr %team, i64 $patience
  %patience = load i32, ptr %patience.p
  br label %spin
spin:
  %i = phi i32 [ 0, %stay ], [ %next, %again ]
  %now = load atomic i32, ptr %generation acquire, align 4
  %opened = icmp ne i32 %now, %old
  br i1 %opened, label %done, label %again
again:
  call void @breathe(i32 %i)
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %patience
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
  ret void
}

; Creates workers up to so many, or fewer where the system refuses; it is then not asked again.
define internal void @grow(i64 %want) nounwind {
entry:
  %all = alloca [128 x i8], align 16
  %old = alloca [128 x i8], align 16
  %attributes = alloca [128 x i8], align 16
  %handle = alloca ptr, align 8
  %workers = getelementptr i8, ptr @control, i64 $workers
  %most = getelementptr i8, ptr @control, i64 $most
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

define void @setup(i64 %cpus, i64 %idle, i64 %patient) nounwind {
  %most.p = getelementptr i8, ptr @control, i64 $most
  store i64 $others, ptr %most.p
  %cpus.p = getelementptr i8, ptr @control, i64 $cpus
  store i64 %cpus, ptr %cpus.p
  %idle.p = getelementptr i8, ptr @control, i64 $idle
  %idle32 = trunc i64 %idle to i32
  store i32 %idle32, ptr %idle.p
  %patient.p = getelementptr i8, ptr @control, i64 $patient
  %patient32 = trunc i64 %patient to i32
  store i32 %patient32, ptr %patient.p
  ret void
}

; In the child of a fork: no workers, nobody inside.
define void @reset() nounwind {
  call void @llvm.memset.p0.i64(ptr align 64 @control, i8 0, i64 $workers, i1 false)
  %workers = getelementptr i8, ptr @control, i64 $workers
  store i64 0, ptr %workers
  %most = getelementptr i8, ptr @control, i64 $most
  store i64 $others, ptr %most
  %slots = getelementptr i8, ptr @control, i64 $slots
  call void @llvm.memset.p0.i64(ptr align 64 %slots, i8 0, i64 $room, i1 false)
  ret void
}
"""

# Where threads cannot be had, every call runs alone.
ALONE = """
define void @entry(ptr %kernel, ptr %args, i64 %threads) nounwind {
  call void @alone(ptr %kernel, ptr %args)
  ret void
}

define internal void @barrier(ptr %team) nounwind {
  ret void
}

define void @setup(i64 %cpus, i64 %idle, i64 %patient) nounwind {
  ret void
}

define void @reset() nounwind {
  ret void
}
"""

# A pause for the spins, and the mode of floating-point arithmetic (rounding, flushing of subnormals). Workers take over
# the caller's mode, or the bits of a result would depend on who computed them.
CPU = {
    "x86_64": """
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal void @pause() alwaysinline nounwind {
  call void @llvm.x86.sse2.pause()
  ret void
}

; All exceptions are masked and no flag is set in what the workers get.
define internal i64 @get_mode() nounwind {
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %mode = load i32, ptr %p
  %clean = and i32 %mode, -64
  %masked = or i32 %clean, 8064
  %wide = zext i32 %masked to i64
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

; The instruction named yield does nothing on most cores; this one takes a few dozen cycles.
define internal void @pause() alwaysinline nounwind {
  call void @llvm.aarch64.isb(i32 15)
  ret void
}

define internal i64 @get_mode() nounwind {
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

define internal void @set_mode(i64 %mode) nounwind {
  ret void
}
"""
