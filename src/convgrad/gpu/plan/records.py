"""Plans are values: everything that is decided, and that `launch` obeys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...backend import Estimate
from ...spec.problem import Ints

Values = tuple[tuple[str, "int | Ints"], ...]
Constants = tuple[tuple[str, Any], ...]

WORKSPACE = "workspace"
"""The name of the memory for sums that are taken in parts, among the tensors of a launch."""


@dataclass(frozen=True)
class Launch:
    """One kernel, and everything that it is given besides addresses. Arguments are in the order of its parameters."""

    kernel: str  # its name, in `gpu.kernels`
    programs: int
    tensors: tuple[tuple[str, str], ...]  # by role, each with its element type
    values: Values  # whole numbers, and tuples of them
    constants: Constants  # what the code is made for
    warps: int = 4
    stages: int = 2  # how many blocks of the sum are on their way at once

    def constant(self, name: str) -> Any:
        """One of the constants."""
        return dict(self.constants)[name]


@dataclass(frozen=True)
class Plan:
    """How a problem is computed."""

    kernel: str  # the kernel that takes the sums; "finish" if there is nothing to sum, "" if there is nothing at all
    launches: tuple[Launch, ...]
    precision: str  # how products are taken
    tile: Ints  # results, channels and, for matrix products, elements of the sum at a time
    parts: int  # of the sum, that are computed apart
    workspace: int  # bytes
    seconds: float  # that the model expects
    why: tuple[str, ...]

    @property
    def estimate(self) -> Estimate:
        """What the model expects."""
        return Estimate(self.seconds, self.workspace)

    def __str__(self) -> str:
        """What `explain` says of it in one line."""
        return tell(self)


KERNELS = {
    "gather": "matrix products over taps and channels",
    "lanes": "products one by one, channels of all groups side by side",
    "weights": "matrix products over pixels, for each tap",
    "lanes_weights": "products one by one over pixels, for each tap, channels of all groups side by side",
    "finish": "no sums: the result without a product",
    "": "nothing to write: the result is empty",
}
"""What the kernels do."""


def tell(plan: Plan) -> str:
    """A plan in a sentence."""
    words = [f"Triton kernel {plan.kernel}: {KERNELS[plan.kernel]}" if plan.kernel else KERNELS[""]]
    if plan.tile:
        words.append(f"tiles of {'x'.join(map(str, plan.tile))}")
    if plan.parts > 1:
        words.append(f"sums in {plan.parts} parts, added in their order")
    if plan.precision:
        words.append(f"products in {plan.precision}")
    return ", ".join(words)
