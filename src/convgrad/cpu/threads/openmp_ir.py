"""The IR of a team that borrows its threads: those of the OpenMP library that the host program has loaded.

`GOMP_parallel` is how code compiled by GCC enters a parallel region. GNU's library has it, and so have LLVM's and
Intel's, which take GCC's place. A call goes like this: `@entry` makes the memory of the team on its stack and enters
a region of all threads that the host would use, which is what keeps OpenMP's own threads as they are; `@part` runs
on each, and all but as many as were asked for leave at once. The end of the region is the end of the call.

The threads belong to somebody else: the mode of floating-point arithmetic is put back when a thread is done.
"""

from __future__ import annotations

OPENMP = """
@parallel = internal global ptr null
@thread_number = internal global ptr null
@thread_count = internal global ptr null
@most_threads = internal global ptr null

; The addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads and omp_get_max_threads.
define void @adopt(ptr %parallel, ptr %number, ptr %count, ptr %most) nounwind {
  store ptr %parallel, ptr @parallel
  store ptr %number, ptr @thread_number
  store ptr %count, ptr @thread_count
  store ptr %most, ptr @most_threads
  call void @prepare()
  ret void
}

define void @entry(ptr %kernel, ptr %args, i64 %threads) nounwind {
entry:
  %several = icmp sgt i64 %threads, 1
  br i1 %several, label %begin, label %single
single:
  call void @run_alone(ptr %kernel, ptr %args)
  ret void
begin:
  %team = alloca [$most x i8], align 128
  %asked = call i64 @llvm.smin.i64(i64 %threads, i64 $threads)
  %groups = call i64 @groups_of(i64 %asked)
  %nodes = mul i64 %groups, $node
  %used = add i64 %nodes, $part
  call void @llvm.memset.p0.i64(ptr align 64 %team, i8 0, i64 %used, i1 false)
  store ptr @barrier, ptr %team
  %kernel.p = getelementptr i8, ptr %team, i64 $kernel
  store ptr %kernel, ptr %kernel.p
  %args.p = getelementptr i8, ptr %team, i64 $args
  store ptr %args, ptr %args.p
  %mode = call i64 @get_mode()
  %mode.p = getelementptr i8, ptr %team, i64 $mode
  store i64 %mode, ptr %mode.p
  %enough = call i1 @cpus_suffice(i64 %threads)
  %most_spins.p = getelementptr i8, ptr @control, i64 $most_spins
  %most_spins = load i32, ptr %most_spins.p
  %spins = select i1 %enough, i32 %most_spins, i32 $few_spins
  %spins.p = getelementptr i8, ptr %team, i64 $spins
  store i32 %spins, ptr %spins.p
  %asked.p = getelementptr i8, ptr %team, i64 $asked
  store i64 %asked, ptr %asked.p
  %cpu = call i32 @current_cpu()
  %cpu.p = getelementptr i8, ptr %team, i64 $caller_cpu
  store i32 %cpu, ptr %cpu.p
  %most.f = load ptr, ptr @most_threads
  %most32 = call i32 %most.f()
  %most = sext i32 %most32 to i64
  %size = call i64 @llvm.smax.i64(i64 %most, i64 %threads)
  %size32 = trunc i64 %size to i32
  %parallel = load ptr, ptr @parallel
  call void %parallel(ptr @part, ptr %team, i32 %size32, i32 0)
  ret void
}

define internal void @part(ptr %team) nounwind {
entry:
  %number.f = load ptr, ptr @thread_number
  %number32 = call i32 %number.f()
  %thread = sext i32 %number32 to i64
  %count.f = load ptr, ptr @thread_count
  %count32 = call i32 %count.f()
  %count = sext i32 %count32 to i64
  %asked.p = getelementptr i8, ptr %team, i64 $asked
  %asked = load i64, ptr %asked.p
  %n = call i64 @llvm.smin.i64(i64 %count, i64 %asked)
  %wanted = icmp slt i64 %thread, %n
  br i1 %wanted, label %count_in, label %done
count_in:
  ; The host may give fewer threads than asked for, and nobody knows before the region begins: each thread writes the
  ; same number before it uses it.
  %count.p = getelementptr i8, ptr %team, i64 8
  store atomic i64 %n, ptr %count.p monotonic, align 8
  %kernel.p = getelementptr i8, ptr %team, i64 $kernel
  %kernel = load ptr, ptr %kernel.p
  %args.p = getelementptr i8, ptr %team, i64 $args
  %args = load ptr, ptr %args.p
  %caller = icmp eq i64 %thread, 0
  br i1 %caller, label %first, label %other
first:
  call void %kernel(ptr %args, i64 0, i64 %n, ptr %team)
  br label %done
other:
  ; A thread on the CPU of its caller moves to another: two threads on one CPU can only take turns.
  %there.p = getelementptr i8, ptr %team, i64 $caller_cpu
  %there = load i32, ptr %there.p
  %here = call i32 @current_cpu()
  %same = icmp eq i32 %here, %there
  %enough = call i1 @cpus_suffice(i64 %n)
  %nearby = and i1 %same, %enough
  br i1 %nearby, label %move, label %begin
move:
  call void @leave_cpu(i32 %there)
  br label %begin
begin:
  %before = call i64 @raw_mode()
  %mode.p = getelementptr i8, ptr %team, i64 $mode
  %mode = load i64, ptr %mode.p
  call void @set_mode(i64 %mode)
  call void %kernel(ptr %args, i64 %thread, i64 %n, ptr %team)
  call void @set_mode(i64 %before)
  br label %done
done:
  ret void
}

; Its threads are the host's, which has to see to them after a fork; a child uses a team of our own.
define void @reset() nounwind {
  ret void
}
"""
