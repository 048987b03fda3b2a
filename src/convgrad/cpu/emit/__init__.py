"""What kernels are made of: their frame, register tiles, prefetch, stores, and the repair of NaN made by padding."""
