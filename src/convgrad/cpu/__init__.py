"""The CPU engine: plans, generated kernels, and the compiler, cache and threads under them."""

import time

# When this process began to read the engine's sources: see `notes`.
BEGUN = time.time()
