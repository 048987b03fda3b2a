"""The CPU engine: plans, generated kernels, and the compiler, cache and threads under them."""

import time

# When this process began to import the engine: see compile/recall.py.
BEGUN = time.time()
