"""The threads that run a kernel.

`count` says how many, `team` is the way in from Python, `team_ir` has the fork-join itself, as LLVM IR, `openmp_ir` the
one on threads of the caller's OpenMP, and `wake_ir` how threads sleep and are woken.
"""
