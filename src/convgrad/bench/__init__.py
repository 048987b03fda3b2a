"""What benchmarks and the command need: timing, and other implementations of the same operations to compare with.

Nothing here serves a computation. A peer is loaded on first use, and says in `available()` why it cannot be used.
"""
