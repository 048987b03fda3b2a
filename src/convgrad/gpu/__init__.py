"""The GPU engine: plans, kernels in Triton, and what launches them. It needs nothing of the CPU's."""
