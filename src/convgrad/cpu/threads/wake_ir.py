"""The IR of sleep and wake-up: how a thread of the team waits without using a CPU, and how another thread wakes it.

`@wait(word, value)` sleeps while the word has the value. It returns after `@wake(word, count)`, at once if the word has
changed already, and sometimes for no reason, so its callers look at the word again. When threads sleep and who wakes
them is in team_ir.py.

On Linux a futex does this (`FUTEX`); elsewhere a condition variable (`CONDITION`), without a choice of CPU.

Why a choice of CPU? The system likes to wake a thread on the CPU of the thread that wakes it. That one goes on
computing, so the two would take turns on one CPU while another is free. `@wake_elsewhere` forbids the sleeping thread
this CPU for as long as the wake-up takes. Sixteen threads are awake sooner without it (24 instead of 40 us after a
short rest, 114 instead of 207 after a long one, on an Emerald Rapids), and one that finds itself there can leave.
"""

from __future__ import annotations

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

define internal i32 @current_cpu() nounwind {
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

; Forbid a thread (0 is this one) a CPU, if it may use others. %mask gets the CPUs that are left, for @allow_cpu.
define internal i1 @avoid_cpu(i32 %thread, i32 %cpu, ptr %mask) nounwind {
entry:
  %size = call i32 @sched_getaffinity(i32 %thread, i64 128, ptr %mask)
  %known = icmp sge i32 %size, 0
  %valid = icmp ult i32 %cpu, 1024
  %go = and i1 %known, %valid
  br i1 %go, label %look, label %no
look:
  %one = call i8 @flip_bit(ptr %mask, i32 %cpu)
  ; Nothing to do if it may not use this CPU anyway.
  %was = icmp eq i8 %one, 0
  br i1 %was, label %set, label %no
set:
  ; The system refuses an empty mask; then nothing has changed.
  %r = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %mask)
  %done = icmp eq i32 %r, 0
  ret i1 %done
no:
  ret i1 false
}

; Flip the bit of a CPU in a mask. Returns the new bit, at its place in the byte.
define internal i8 @flip_bit(ptr %mask, i32 %cpu) nounwind {
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

; Let a thread use the CPU again that @avoid_cpu forbade it, unless somebody else has changed its CPUs meanwhile.
define internal void @allow_cpu(i1 %kept, i32 %thread, i32 %cpu, ptr %mask) nounwind {
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
  %bit = call i8 @flip_bit(ptr %mask, i32 %cpu)
  %r = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %mask)
  br label %done
done:
  ret void
}

; Move this thread to another CPU, if it may use one. From then on the system may again choose any of them.
define internal void @leave_cpu(i32 %cpu) nounwind {
  %mask = alloca [128 x i8], align 8
  call void @llvm.memset.p0.i64(ptr align 8 %mask, i8 0, i64 128, i1 false)
  %kept = call i1 @avoid_cpu(i32 0, i32 %cpu, ptr %mask)
  call void @allow_cpu(i1 %kept, i32 0, i32 %cpu, ptr %mask)
  ret void
}

define internal i32 @thread_id() nounwind {
  %long = call i64 (i64, ...) @syscall(i64 $gettid)
  %thread = trunc i64 %long to i32
  ret i32 %thread
}

; Wake a sleeping thread on another CPU than this one. Nobody else changes its CPUs meanwhile: the thread itself does
; not call @leave_cpu after it slept, and only this thread wakes it.
define internal void @wake_elsewhere(ptr %word, i32 %thread) nounwind {
  %mask = alloca [128 x i8], align 8
  call void @llvm.memset.p0.i64(ptr align 8 %mask, i8 0, i64 128, i1 false)
  %cpu = call i32 @current_cpu()
  %kept = call i1 @avoid_cpu(i32 %thread, i32 %cpu, ptr %mask)
  call void @wake(ptr %word, i32 1)
  call void @allow_cpu(i1 %kept, i32 %thread, i32 %cpu, ptr %mask)
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

; Called once, before the first worker is created.
define internal void @prepare() nounwind {
  %mutex = getelementptr i8, ptr @control, i64 $mutex
  %condition = getelementptr i8, ptr @control, i64 $condition
  %a = call i32 @pthread_mutex_init(ptr %mutex, ptr null)
  %b = call i32 @pthread_cond_init(ptr %condition, ptr null)
  ret void
}

define internal i32 @current_cpu() nounwind {
  ret i32 -1
}

define internal i64 @clock() nounwind {
  ret i64 0
}

define internal void @leave_cpu(i32 %cpu) nounwind {
  ret void
}

define internal i32 @thread_id() nounwind {
  ret i32 0
}

define internal void @wake_elsewhere(ptr %word, i32 %thread) nounwind {
  call void @wake(ptr %word, i32 1)
  ret void
}
"""
