"""Which gradients `install()` takes: what is expected to be no slower than PyTorch's own kernel, or everything."""

from __future__ import annotations

from .plans import Step

POLICIES = ("fast", "all")


def hindrance(step: Step, policy: str) -> str:
    """Why a gradient that could be computed here is left to PyTorch; nothing if it is taken."""
    if step.backend == "reference":
        return "no kernel of ours computes it"
    return ""
