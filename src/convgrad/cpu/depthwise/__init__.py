"""Depthwise layers: each channel is computed on its own.

Two kernels serve them, with channels or with pixels in the lanes of a vector. What decides between them is in `choose`;
`records` has their plans, `channels_plan` and `pixels_plan` make these, and the kernels write the code.
"""
