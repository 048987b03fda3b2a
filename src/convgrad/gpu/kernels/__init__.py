"""The kernels, in Triton. Importing any of them imports Triton.

Every kernel takes pointers, then whole numbers and tuples of them, then constants; `plan.records.Launch` holds what
they are given. Tensors have six axes: (n, g, c, three spatial ones), and weights (g, two of channels, three spatial
ones).
"""
