"""What all kernels are made of: register tiles, prefetch, stores, and the repair of NaN that padding makes."""
