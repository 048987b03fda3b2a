"""The threads that run a kernel.

`count` says how many, `team` is the way in from Python, `team_ir` has the fork-join itself, as LLVM IR, and `wake_ir`
how threads sleep and are woken.
"""
