"""Convolutions on tile registers (Intel's AMX): products of matrices of bf16 or f16, 16 rows by 32 columns at a time.

A tile instruction multiplies 16 rows of 32 numbers with 16 pairs of rows of 16 numbers, and adds the result to 16 by 16
sums in f32. `tiles` writes these instructions, or calls of `emulation`, plain code that does the same on any machine;
`permission` asks the system for them. `gather_*` are the plan and the kernel of y and x, `sums_*` those of w.
"""
