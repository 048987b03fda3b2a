"""The CPU engine: plans, generated kernels, and the compiler, cache and threads under them."""
