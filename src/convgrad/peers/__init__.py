"""Other implementations of the same operations, to compare results and speed with. Nothing here serves a computation.

Each peer is loaded on first use only, and says in `available()` why it cannot be used.
"""
