"""Code for a Reduce plan."""
from __future__ import annotations
from .plan import Reduce
def write(plan: Reduce) -> str:
    raise NotImplementedError
