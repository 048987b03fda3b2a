"""Plans are values: everything that is decided, and that `launch` obeys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ...backend import Estimate
from ...spec.problem import Ints

Values = tuple[tuple[str, "int | Ints"], ...]
Constants = tuple[tuple[str, Any], ...]
Areas = tuple[tuple[str, int], ...]

PARTS = "parts"
"""The name of the area for sums that are taken in parts, among the tensors of a launch."""

AREA = 256  # bytes: every area begins at a multiple of them


@dataclass(frozen=True)
class Descriptor:
    """A tensor as the copy engine of a multiprocessor sees it (`TensorDescriptor`): blocks of it go to shared memory.

    Copies ask that the tensor begins at a multiple of 16 bytes, and so do its strides but the last, which is 1. What
    lies outside of the shape arrives as zeros.
    """

    tensor: str  # its role, or an area
    dtype: str
    shape: Ints
    strides: Ints  # in elements
    block: Ints  # powers of two
    swizzle: int = 128  # bytes of a row of shared memory; 0, 32, 64 or 128
    offset: int = 0  # elements before the first one that is seen
    transposed: bool = False
    steps: Ints = ()  # from element to element of each axis that are taken; without them, all are


@dataclass(frozen=True)
class Launch:
    """One kernel, and everything that it is given besides addresses.

    Parameters of a kernel are descriptors, pointers, whole numbers and constants, in this order.
    """

    kernel: str  # the function's name
    programs: int
    tensors: tuple[tuple[str, str], ...]  # pointers: by role or area, each with its element type
    values: Values  # whole numbers, and tuples of them
    constants: Constants  # what the code is made for
    warps: int = 4
    stages: int = 2  # how many blocks of the sum are on their way at once
    module: str = ""  # in `gpu.kernels`, where it is not the kernel's name: "weights", or "hopper.gather"
    descriptors: tuple[Descriptor, ...] = ()
    registers: int = 0  # of a thread, at most; 0 leaves it to the compiler
    early: bool = False  # whether its programs may begin before the launch before it ends, for which they wait

    def constant(self, name: str) -> Any:
        """One of the constants."""
        return dict(self.constants)[name]

    def moved(self, names: Mapping[str, str]) -> Launch:
        """The same launch on other memory: tensors have the names that they are given here."""
        return replace(
            self,
            tensors=tuple((names.get(role, role), dtype) for role, dtype in self.tensors),
            descriptors=tuple(replace(d, tensor=names.get(d.tensor, d.tensor)) for d in self.descriptors),
        )


@dataclass(frozen=True)
class Plan:
    """How a problem is computed."""

    kernel: str  # the kernel that takes the sums; "finish" if there is nothing to sum, "" if there is nothing at all
    does: str  # what it does, in words
    launches: tuple[Launch, ...]  # in their order
    areas: Areas  # memory besides the tensors: names, each with its bytes
    seconds: float  # that the model expects
    notes: tuple[str, ...]  # on how, for a person
    precision: str = ""  # how products are taken
    tile: Ints = ()  # results, channels and, for matrix products, elements of the sum at a time
    parts: int = 1  # of the sum, that are computed apart
    level: str = "portable"  # what made it: a name in `registry.LEVELS`
    within: str = ""  # of a level that makes a detour: the one that takes the sums
    passed: tuple[str, ...] = ()  # why other levels did not make it

    @property
    def why(self) -> tuple[str, ...]:
        """What `explain` says of it besides."""
        return *self.notes, *self.passed

    @property
    def workspace(self) -> int:
        """Bytes of all areas."""
        return sum(room(size) for _, size in self.areas)

    @property
    def estimate(self) -> Estimate:
        """What the model expects."""
        return Estimate(self.seconds, self.workspace)

    def __str__(self) -> str:
        """What `explain` says of it in one line."""
        return tell(self)


def room(size: int) -> int:
    """The bytes that an area takes: what comes after it is aligned."""
    return ceil(size / AREA) * AREA


def offsets(areas: Areas) -> dict[str, int]:
    """Where the areas begin in the workspace."""
    found, end = {}, 0
    for name, size in areas:
        found[name] = end
        end += room(size)
    assert len(found) == len(areas), "areas have different names"
    return found


def free_name(name: str, areas: Areas) -> str:
    """A name that no area has: of copies between copies, each has its own."""
    taken = {area for area, _ in areas}
    while name in taken:
        name += ", again"
    return name


def tell(plan: Plan) -> str:
    """A plan in a sentence."""
    words = [f"Triton kernel {plan.kernel}: {plan.does}" if plan.kernel else plan.does]
    if plan.tile:
        words.append(f"tiles of {'x'.join(map(str, plan.tile))}")
    if plan.parts > 1:
        words.append(f"sums in {plan.parts} parts, added in their order")
    if plan.precision:
        words.append(f"products in {plan.precision}")
    return ", ".join(words)
