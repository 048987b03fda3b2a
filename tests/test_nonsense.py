"""Nonsense of every kind: a call either works or raises an error of convgrad's own, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import convgrad
from convgrad import ConvgradError, SpecError
from convgrad.spec.dialects import DIALECTS, find
from convgrad.spec.table import OPS
from problems import KINDS, draw

pytestmark = pytest.mark.usefixtures("all_by_reference")


class Odd:
    """An object that is nothing in particular."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __repr__(self):
        return "Odd()"


class Fake:
    """Something that claims to be a list of numbers."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index > 1:
            raise IndexError
        return "a"


def _loop():
    ring: list = [1]
    ring.append(ring)
    return ring


# Sizes are small or beyond any memory: what lies between would only fill this machine.
VALUES = [
    *(None, True, False, 0, 1, 2, 3, 7, -1, 2**48, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**5000),
    *(0.0, 1.0, 1.5, float("nan"), float("inf"), 1j, np.int64(2), np.int8(-1), np.float32(2), np.bool_(True)),
    *("", "NCX", "nxc", "OIX", "XOI", "same_upper", "None", "none", "f32", "x" * 1000, "\ud800", "\0", b"NCX"),
    *((), [], (1,), (1, 1), [2, 1], (1, 2, 3), (0, 0), (-1, 1), (1, 2**62), (2**48, 1), (1.5, 2), ("1", "2")),
    *((None, None), [[1, 2]], [[1], [2, 3]], _loop(), (2, 4, 7, 6), (0,) * 12, (1,) * 12, (1,) * 1000, (True, True)),
    *({}, {"a": 1}, {1, 2}, set(), range(2), iter((1, 2)), Odd(), Odd, len, ..., NotImplemented, Fake(), object),
    *(Odd(ndim=2), Odd(ndim="x"), Odd(shape=3), Odd(dtype=1), Odd(__dlpack__=1), slice(1), memoryview(b"ab")),
    *(np.zeros(()), np.zeros(2), np.ones((2, 2), int), np.array([1, 1]), np.array([2.0, 1]), np.array(["a"])),
    *(np.zeros((2, 4, 7, 6)), np.zeros((2, 4, 7, 6), np.float32), np.zeros((2, 3, 5), np.float16), np.zeros((0,))),
    *(np.zeros((1, 1, 1, 1, 1, 1), np.float32), np.array(None), np.array([None, 1]), np.zeros(3, "M8[s]")),
    *(np.zeros(2, [("a", "f4")]), np.ma.masked_array([1, 2], [0, 1]), np.zeros((2, 3, 4), ">f4"), np.array([10**30])),
    *(
        torch.zeros(2, 4, 7, 6),
        torch.tensor([1, 1]),
        torch.tensor(3),
        torch.zeros(2, device="meta"),
        torch.Size((1, 1)),
    ),
    *(torch.zeros(2, 3, 4).to_sparse(), torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.float32, np.float32),
]
NAMES = sorted(
    {attr.name for op in OPS.values() for attr in op.attrs}
    | {word for d in DIALECTS.values() for word in (*d.attrs, *d.inputs)}
    | {"out", "kind", "self", "stride", "padding", ""}
)


def _attempt(rng: np.random.Generator) -> None:
    """A valid call with a few things replaced by nonsense."""
    case = draw(rng)
    kind, inputs, attributes = case.kind, list(case.inputs), dict(case.attributes)
    if case.out is not None:
        attributes["out"] = case.out

    def nonsense():
        return VALUES[int(rng.integers(len(VALUES)))]

    for _ in range(int(rng.integers(1, 4))):
        what = rng.random()
        if what < 0.35 and inputs:
            inputs[int(rng.integers(len(inputs)))] = nonsense()
        elif what < 0.4:
            inputs.insert(int(rng.integers(len(inputs) + 1)), nonsense())
        elif what < 0.45 and inputs:
            inputs.pop(int(rng.integers(len(inputs))))
        elif what < 0.75:
            attributes[list(attributes)[int(rng.integers(len(attributes)))]] = nonsense()
        elif what < 0.9:
            attributes[NAMES[int(rng.integers(len(NAMES)))]] = nonsense()
        elif what < 0.95:
            attributes.pop(list(attributes)[int(rng.integers(len(attributes)))])
        else:
            kind = [*KINDS, *VALUES][int(rng.integers(len(KINDS) + len(VALUES)))]
    attributes.pop("kind", None)  # Python itself refuses a second value for a parameter
    name = kind.removesuffix("-1") if isinstance(kind, str) else ""
    try:
        if name in KINDS and rng.random() < 0.5:
            meaning = find(name)
            home, entry = (convgrad.compat, meaning.dialect) if meaning.dialect else (convgrad, meaning.op)
            getattr(home, entry.function)(*inputs, **attributes)
        else:
            convgrad.apply(kind, *inputs, **attributes)
    except ConvgradError as error:
        if not str(error) or (isinstance(error, SpecError) and not error.operation):
            raise AssertionError("an error that does not say who and what") from error


@pytest.mark.filterwarnings("ignore::convgrad.LayoutWarning")
@pytest.mark.parametrize("chunk", range(10))
def test_only_our_errors(chunk):
    for number in range(300):
        try:
            _attempt(np.random.default_rng([chunk, number]))
        except Exception as error:
            raise AssertionError(f"chunk {chunk}, number {number}: {type(error).__name__}: {error}") from error
