"""Packing: copies between tensors of any strides and element type and dense buffers, and back."""
