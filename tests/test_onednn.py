"""Agreement with real oneDNN, and a record of each place where it is wrong, refuses, or ends the process.

What can end the process runs in a process apart:

    python tests/test_onednn.py all 500      try the cases below that should not end it, then compare random problems
    python tests/test_onednn.py f16          try one of the cases
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import convgrad
import problems
from convgrad import host
from convgrad.bench import onednn
from convgrad.spec import OPS, bind
from convgrad.tensors import describe

pytestmark = pytest.mark.skipif(onednn.available() is not None, reason=f"no oneDNN here: {onednn.available()}")


def _plain(case: problems.Case) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """A case in the words of oneDNN itself; None where it is known to be wrong or has no such thing."""
    op, given = OPS[case.kind], case.attributes
    if {"accumulate", "same_rule"} & set(given) or "groups as documented" in case.notes:
        return None
    if given.get("weights_format") in (("XIO", "OIX") if op.transposed else ()) or not case.expected.size:
        return None
    roles = [a.role for a in op.inputs if a.role != "shape"]
    inputs = [np.array(a, order="K") for a in case.inputs[: len(roles)]]
    if any(a.size == 0 for a in inputs):
        return None
    shape = case.expected.shape if op.shape_source else None
    found = bind(op, [describe(host.tensor(a), "") for a in inputs], given, shape=shape)
    p = found.problem
    if case.kind == "ConvolutionBackwardData" and p.g > 1:
        return None  # refused, see below
    if case.kind == "ConvTransposeBackwardData" and max(p.dilation) > 1:
        return None  # wrong, see below
    attributes = {
        "strides": p.stride,
        "pads_begin": found.pads_begin,
        "pads_end": found.pads_end,
        "dilations": p.dilation,
        "groups": p.g,
        "data_format": given.get("data_format", "NXC"),
        "weights_format": given.get("weights_format", "XOI" if op.transposed else "XIO"),
    }
    auto = str(given.get("auto_pad", "None"))
    if auto.lower() != "none" and case.kind != "ConvTransposeBackwardWeights":
        attributes["auto_pad"] = auto.upper()
        attributes["pads_begin"] = attributes["pads_end"] = (0,) * p.rank
        if op.transposed and "output_padding" in given and op.wanted != "x":
            return None  # oneDNN has no output_padding here, and so takes another padding
    if op.shape_source:
        attributes[op.shape_source] = shape
    if op.transposed and op.wanted == "x" and "output_padding" in given:
        value = given["output_padding"]
        attributes["output_padding"] = [int(v) for v in np.broadcast_to(np.atleast_1d(value)[: p.rank], p.rank)]
    return attributes, inputs


def _grid(count: int) -> dict[str, int]:
    """Compare random problems, and tell how many there were of each kind."""
    onednn.set_threads(1)
    done = dict.fromkeys(OPS, 0)
    seed = 0
    while sum(done.values()) < count:
        seed += 1
        if not problems.is_about(seed, OPS, "f32", "numpy"):
            continue
        case = problems.replay(seed)
        plain = _plain(case)
        if plain is None:
            continue
        attributes, inputs = plain
        found = onednn.run(case.kind, attributes, inputs, case.expected.shape)
        if not np.array_equal(found, case.expected):
            raise AssertionError(f"oneDNN differs: {case}\n  replay: python tests/problems.py {seed}")
        done[case.kind] += 1
    return done


# ---- where oneDNN goes its own way

CASES: dict[str, Callable[[], None]] = {}


def apart(case: Callable[[], None]) -> Callable[[], None]:
    CASES[case.__name__.removeprefix("_")] = case
    return case


def _integers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-3, 4, shape).astype(np.float32)


NCX = dict(data_format="NCX", groups=1)


@apart
def _dilation_is_dropped() -> None:
    """ConvTransposeBackwardData with dilations: the sum of the undilated operation, and status success."""
    diff_dst, weights = _integers(1, 1, 5), _integers(1, 1, 2)
    call = dict(strides=[2], pads_begin=[0], pads_end=[0], weights_format="IOX", **NCX)
    theirs = onednn.run("ConvTransposeBackwardData", {**call, "dilations": [2]}, [diff_dst, weights], (1, 1, 2))
    undilated = convgrad.conv_transpose_backward_data(diff_dst[:, :, :4], weights, **call, dilations=[1])
    assert np.array_equal(theirs, undilated)
    ours = convgrad.conv_transpose_backward_data(diff_dst, weights, **call, dilations=[2])
    right = F.conv1d(torch.from_numpy(diff_dst), torch.from_numpy(weights), stride=2, dilation=2)
    assert np.array_equal(ours, right.numpy())
    assert not np.array_equal(ours, theirs)


@apart
def _same_padding_from_the_wrong_tensor() -> None:
    """ConvTransposeBackwardWeights with SAME: padding from src, not from diff_dst as the forward operation has it."""
    src, diff_dst = _integers(1, 1, 27), np.arange(1, 55, dtype=np.float32).reshape(1, 1, 54)
    call = dict(strides=[2], dilations=[1], pads_begin=[0], pads_end=[0], weights_format="IOX", **NCX)
    same = {**call, "auto_pad": "SAME_UPPER", "weights_shape": [1, 1, 3]}
    theirs = onednn.run("ConvTransposeBackwardWeights", same, [src, diff_dst], (1, 1, 3))
    moved = {**call, "pads_begin": [1], "pads_end": [1]}  # 27 % 2 is 1: the total is 3 - 1
    as_theirs = convgrad.conv_transpose_backward_weights(src, diff_dst, (1, 1, 3), **moved)
    assert np.array_equal(theirs, as_theirs)
    # Its own ConvTranspose pads by 0 and 1.
    weights = _integers(1, 1, 3)
    forward = onednn.run("ConvTranspose", {**call, "auto_pad": "SAME_UPPER"}, [src, weights], (1, 1, 54))
    spread = F.conv_transpose1d(torch.from_numpy(src), torch.from_numpy(weights), stride=2)[..., :54]
    assert np.array_equal(forward, spread.numpy())
    leaf = torch.zeros(1, 1, 3, requires_grad=True)
    F.conv_transpose1d(torch.from_numpy(src), leaf, stride=2)[..., :54].backward(torch.from_numpy(diff_dst))
    ours = convgrad.conv_transpose_backward_weights(src, diff_dst, (1, 1, 3), **call, auto_pad="SAME_UPPER")
    assert np.array_equal(ours, leaf.grad.numpy())
    assert not np.array_equal(ours, theirs)


@apart
def _groups_are_refused() -> None:
    """ConvolutionBackwardData with groups: does not compile."""
    diff_dst, weights = _integers(1, 4, 3, 3), _integers(4, 2, 3, 3)
    call = dict(strides=[1, 1], pads_begin=[0, 0], pads_end=[0, 0], dilations=[1, 1], weights_format="OIX")
    call |= {"groups": 2, "data_format": "NCX"}
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("ConvolutionBackwardData", {**call, "dst_shape": [1, 4, 5, 5]}, [diff_dst, weights], (1, 4, 5, 5))
    assert caught.value.status == "invalid_shape"
    ours = convgrad.convolution_backward_data(diff_dst, weights, (1, 4, 5, 5), **call)
    right = F.conv_transpose2d(torch.from_numpy(diff_dst), torch.from_numpy(weights), groups=2)
    assert np.array_equal(ours, right.numpy())


@apart
def _shape_inputs_are_refused() -> None:
    """A third input with the shape, as documented: no back end of oneDNN takes it."""
    diff_dst, weights, shape = _integers(1, 2, 3), _integers(2, 2, 3), np.array([1, 2, 5], np.int32)
    call = dict(strides=[1], pads_begin=[0], pads_end=[0], dilations=[1], weights_format="OIX", **NCX)
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("ConvolutionBackwardData", call, [diff_dst, weights, shape], (1, 2, 5))
    assert (caught.value.step, caught.value.status) == ("dnnl_graph_partition_compile", "invalid_graph_op")
    assert convgrad.convolution_backward_data(diff_dst, weights, shape, **call).shape == (1, 2, 5)


@apart
def _output_padding_is_refused() -> None:
    """The documents list output_padding for the gradients of ConvTranspose; the code knows no such attribute."""
    diff_dst, weights = _integers(1, 2, 6), _integers(2, 2, 3)
    call = dict(strides=[2], pads_begin=[1], pads_end=[1], dilations=[1], weights_format="IOX", **NCX)
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("ConvTransposeBackwardData", {**call, "output_padding": [1]}, [diff_dst, weights], (1, 2, 3))
    assert (caught.value.step, caught.value.status) == ("dnnl_graph_add_op", "invalid_graph_op")
    theirs = onednn.run("ConvTransposeBackwardData", call, [diff_dst, weights], (1, 2, 3))
    ours = convgrad.conv_transpose_backward_data(diff_dst, weights, **call, output_padding=[1])
    assert np.array_equal(ours, theirs)


@apart
def _lower_case_is_refused() -> None:
    """The documents write auto_pad in lower case; the code compares letters."""
    src, weights = _integers(1, 2, 6), _integers(2, 2, 3)
    call = dict(strides=[1], pads_begin=[0], pads_end=[0], dilations=[1], weights_format="OIX", **NCX)
    with pytest.raises(onednn.OneDNNError) as caught:
        onednn.run("Convolution", {**call, "auto_pad": "same_upper"}, [src, weights], (1, 2, 6))
    assert caught.value.status == "invalid_graph_op"
    theirs = onednn.run("Convolution", {**call, "auto_pad": "SAME_UPPER"}, [src, weights], (1, 2, 6))
    assert np.array_equal(convgrad.convolution(src, weights, **call, auto_pad="same_upper"), theirs)


def _documented_groups() -> None:
    """Weights of a transposed operation with the documented shape (in/groups, out, spatial)."""
    diff_dst, weights = _integers(2, 6, 9, 9), _integers(2, 6, 3, 3)
    call = dict(strides=[2, 2], pads_begin=[1, 1], pads_end=[1, 1], dilations=[1, 1], weights_format="IOX")
    call |= {"groups": 2, "data_format": "NCX"}
    ours = convgrad.conv_transpose_backward_data(diff_dst, weights, **call)
    moved = weights.reshape(2, 2, 3, 3, 3).swapaxes(0, 1).reshape(4, 3, 3, 3)  # (in, out/groups, spatial)
    right = F.conv2d(torch.from_numpy(diff_dst), torch.from_numpy(moved), stride=2, padding=1, groups=2)
    assert np.array_equal(ours, right.numpy())
    theirs = onednn.run("ConvTransposeBackwardData", call, [diff_dst, moved], ours.shape)
    assert np.array_equal(ours, theirs)
    print("ours is right", flush=True)
    onednn.run("ConvTransposeBackwardData", call, [diff_dst, weights], ours.shape)
    print("oneDNN came back", flush=True)


def _f16() -> None:
    """f16 on a CPU that has no arithmetic for it."""
    diff_dst, weights = _integers(1, 2, 6).astype(np.float16), _integers(2, 2, 3).astype(np.float16)
    call = dict(strides=[1], pads_begin=[1], pads_end=[1], dilations=[1], weights_format="IOX", **NCX)
    ours = convgrad.conv_transpose_backward_data(diff_dst, weights, **call)
    right = F.conv1d(torch.from_numpy(diff_dst).double(), torch.from_numpy(weights).double(), padding=1)
    assert np.array_equal(ours, right.numpy().astype(np.float16))
    print("ours is right", flush=True)
    onednn._FP16_ISA = -1  # without the care that our own wrapper takes
    found = onednn.run("ConvTransposeBackwardData", call, [diff_dst, weights], ours.shape)
    assert np.array_equal(found, ours)
    print("oneDNN came back", flush=True)


def _try_all(count: int) -> None:
    """Try what should not end the process; a line for each case says what went wrong, if anything did, and in the end
    what came of so many random problems.
    """
    for name, case in {**CASES, "grid": lambda: _grid(count)}.items():
        found: object = None
        try:
            found, wrong = case(), ""
        except BaseException:  # an expectation of pytest that is not met is no Exception
            wrong = traceback.format_exc()
        print(json.dumps((name, (wrong, found))), flush=True)


FATAL = {"documented_groups": _documented_groups, "f16": _f16}


def _apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this file in a process of its own, which may die without a trace of it on the disk."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "0"}
    command = ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", sys.executable, __file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


Tried = tuple[dict[str, tuple[str, Any]], str]


@pytest.fixture(scope="module")
def tried() -> Tried:
    """What went wrong in each of the cases and in random problems, all in one process; and that process's errors."""
    done = _apart("all", "300")
    return dict(json.loads(line) for line in done.stdout.splitlines()), done.stderr


@pytest.mark.slow
def test_agreement(tried: Tried) -> None:
    outcomes, errors = tried
    assert "grid" in outcomes, f"the process had ended before:\n{errors[-3000:]}"
    wrong, counts = outcomes["grid"]
    assert not wrong, wrong
    assert min(counts.values()) >= 10, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_oneDNN_differs(name: str, tried: Tried) -> None:
    outcomes, errors = tried
    assert name in outcomes, f"the process had ended before:\n{errors[-3000:]}"
    wrong, _ = outcomes[name]
    assert not wrong, wrong


@pytest.mark.slow
def test_documented_groups_end_the_process():
    done = _apart("documented_groups")
    assert done.stdout.splitlines() == ["ours is right"], done.stderr[-3000:]
    assert done.returncode == -signal.SIGABRT


@pytest.mark.slow
def test_f16_ends_the_process_where_the_cpu_has_none():
    done = _apart("f16")
    lines = done.stdout.splitlines()
    assert lines[0] == "ours is right", done.stderr[-3000:]
    native = onednn._library().lib.dnnl_get_effective_cpu_isa() & 0x100
    if native:
        assert lines[1:] == ["oneDNN came back"]
        assert done.returncode == 0
    else:
        assert lines[1:] == []
        assert done.returncode == -signal.SIGABRT


if __name__ == "__main__":
    if sys.argv[1] == "all":
        _try_all(int(sys.argv[2]))
    else:
        {**CASES, **FATAL}[sys.argv[1]]()
