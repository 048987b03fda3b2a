"""Random calls of every operation, bit for bit as PyTorch computes them in float64."""

from __future__ import annotations

import numpy as np
import pytest

import convgrad
import problems
from convgrad.spec.dialects import DIALECTS, find
from convgrad.spec.table import OPS
from marks import slow_but

CHUNK = 100


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("chunk", range(14))
def test_apply(chunk):
    rng = np.random.default_rng([1, chunk])
    for _ in range(CHUNK):
        problems.check(problems.draw(rng))


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("chunk", range(3))
def test_apply_with_many_channels(chunk):
    rng = np.random.default_rng([2, chunk])
    for _ in range(CHUNK):
        problems.check(problems.draw(rng, wide=True))


@pytest.mark.usefixtures("by_reference")
@pytest.mark.filterwarnings("ignore::convgrad.LayoutWarning")
@pytest.mark.parametrize("chunk", range(3))
def test_functions(chunk):
    rng = np.random.default_rng([3, chunk])
    for number in range(CHUNK):
        problems.check(problems.draw(rng), lambda *args, n=number, **kwargs: _by_function(n % 3, *args, **kwargs))


@pytest.mark.parametrize("chunk", slow_but([0], range(4)))
def test_apply_by_the_engine_that_users_get(chunk):
    rng = np.random.default_rng([5, chunk])
    for number in range(CHUNK // 4):
        problems.check(problems.draw(rng, wide=bool(number % 2)))


def _by_function(named: int, kind: str, *inputs, **attributes):
    """The same call through the operation's own function, the last `named` inputs by name."""
    name = kind.removesuffix("-1")
    meaning = find(name)
    inputs = tuple(meaning.arrange(inputs))
    if name in DIALECTS:
        function = getattr(convgrad.compat, DIALECTS[name].function)
    else:
        function = getattr(convgrad, OPS[name].function)
    # The shape attribute is the third input's default in a function, and has the same name.
    shape = attributes.pop(meaning.inputs[-1], None)
    if shape is not None and len(inputs) == 2:
        inputs = (*inputs, shape)
    first = max(0, len(inputs) - named)
    by_name = dict(zip(meaning.inputs[first:], inputs[first:], strict=False))
    return function(*inputs[:first], **by_name, **attributes)


def test_the_generator_reaches_every_kind_and_option():
    rng = np.random.default_rng(4)
    cases = [problems.draw(rng) for _ in range(400)]
    assert {case.kind.removesuffix("-1") for case in cases} == set(problems.KINDS)
    assert {case.expected.dtype for case in cases} == {np.dtype(d) for d in problems.DTYPES.values()}
    assert {case.expected.ndim for case in cases} == {3, 4, 5}
    seen = {name for case in cases for name in case.attributes}
    asked = {attr.name for op in OPS.values() for attr in op.attrs} | {"filter_format", "output_shape", "filter_shape"}
    assert seen == asked
    assert any("groups as documented" in case.notes for case in cases)
    assert any(not case.expected.size for case in cases)


@pytest.mark.usefixtures("by_reference")
def test_a_wrong_result_fails_with_the_line_that_replays_it():
    case = next(c for c in map(problems.replay, range(100)) if c.expected.size and c.out is None)

    def wrong(*args, **kwargs):
        result = convgrad.apply(*args, **kwargs)
        result[(0,) * case.expected.ndim] += 1
        return result

    with pytest.raises(AssertionError, match=rf"python tests/problems.py {case.seed}$"):
        problems.check(case, wrong)
    problems.check(problems.replay(case.seed))
