"""Kernels for Hopper alone (compute capability 9.0), in Gluon, Triton's explicit layer.

A multiprocessor's copy engine brings blocks of tensors to shared memory, where its matrix units read them; a warp of
its own asks for copies, and two groups of four warps compute. Nothing but barriers in shared memory joins them.
"""
