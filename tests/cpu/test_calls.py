"""The public functions through the engine: memory of the result, remembered calls, threads, forks and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import SpecError, calls, reference
from convgrad.cpu import kernel, target
from convgrad.cpu.gather.records import Gather
from convgrad.cpu.kernel import Kernel
from convgrad.spec.problem import Problem
from marks import slow_but

from .guard import poisoned_workspace

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
SAME = {"strides": 1, "pads_begin": 1, "pads_end": 1, "dilations": 1}
Array = np.ndarray


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that nobody remembers, and no files."""
    monkeypatch.setenv("CONVGRAD_CACHE", "off")
    monkeypatch.setattr(calls, "KNOWN", {})


def integers(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def forward(x: Array, w: Array) -> Array:
    """What a convolution with padding 1 must give; x is (n, h, w, c), w is (3, 3, cx, cy)."""
    n, *size, cx = x.shape
    sizes = "x".join(map(str, size))
    p = Problem.parse(f"y f32 n{n} g1 cx{cx} cy{w.shape[3]} x{sizes} w3x3 y{sizes} s1x1 d1x1 p1x1")
    given = {"x": np.moveaxis(x, 3, 1)[:, None], "w": w.transpose(3, 2, 0, 1)[None]}
    return np.moveaxis(reference.compute(p, given)[:, 0], 1, 3)


def engine_used() -> bool:
    """Whether a kernel computed the calls so far."""
    return bool(calls.KNOWN) and all(isinstance(call.choice.execute, Kernel) for call in calls.KNOWN.values())


X, W = integers(1, 2, 7, 9, 5), integers(2, 3, 3, 5, 20)
Y = forward(X, W)


# The array of the result.


def test_out_is_written_whole() -> None:
    out = np.full(Y.shape, np.nan, np.float32)
    assert convgrad.convolution(X, W, **SAME, out=out) is out
    assert np.array_equal(out, Y)
    assert engine_used()


@pytest.mark.parametrize("kind", ["reversed", "stepped", "fortran", "unaligned"])
def test_out_of_any_strides(kind: str) -> None:
    room = np.full((4, 14, 18, 40), np.nan, np.float32)
    out = {
        "reversed": room[:2, :7, :9, :20][::-1, :, ::-1, ::-1],
        "stepped": room[::2, ::2, ::2, ::2],
        "fortran": np.asfortranarray(room[:2, :7, :9, :20]),
        "unaligned": np.zeros(Y.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(Y.shape),
    }[kind]
    out[...] = np.nan
    for _ in range(2):
        convgrad.convolution(X, W, **SAME, out=out)
        assert np.array_equal(out, Y)
    assert engine_used()
    if kind in ("reversed", "stepped"):
        assert np.isnan(room).sum() == room.size - out.size


def test_accumulate() -> None:
    before = integers(3, *Y.shape)
    out = before.copy()
    for times in (1, 2):
        convgrad.convolution(X, W, **SAME, out=out, accumulate=True)
        assert np.array_equal(out, before + times * Y)
    convgrad.convolution(X, W, **SAME, out=out, accumulate=False)
    assert np.array_equal(out, Y)
    assert engine_used()


def test_out_that_is_an_input() -> None:
    """The image is large enough that results are written while others are still to be computed from it."""
    image, w = integers(3, 1, 150, 150, 16), integers(4, 3, 3, 16, 16)
    expected = forward(image, w)
    x = image.copy()
    assert convgrad.convolution(x, w, **SAME, out=x) is x
    assert np.array_equal(x, expected)
    x = image.copy()
    convgrad.convolution(x, w, **SAME, out=x, accumulate=True)
    assert np.array_equal(x, expected + image)
    # A part of the same memory, the other way around.
    memory = np.zeros(image.size + 7, np.float32)
    x, out = memory[7:].reshape(image.shape), memory[:-7].reshape(image.shape)[:, ::-1]
    x[...] = image
    convgrad.convolution(x, w, **SAME, out=out)
    assert np.array_equal(out, expected)


def test_input_twice() -> None:
    """Inputs may share memory as they like."""
    w = convgrad.convolution_backward_weights(X, X, (3, 3, 5, 5), **SAME)
    assert np.array_equal(w, convgrad.convolution_backward_weights(X, X.copy(), (3, 3, 5, 5), **SAME))
    assert w[1, 1, 2, 2] == (X[..., 2] ** 2).sum()


# Remembered calls.


def test_the_same_call_with_other_values() -> None:
    assert np.array_equal(convgrad.convolution(X, W, **SAME), Y)
    other = integers(5, *X.shape)
    assert np.array_equal(convgrad.convolution(other, W, **SAME), forward(other, W))
    assert len(calls.KNOWN) == 1
    assert engine_used()


@pytest.mark.parametrize("wrong", [{"groups": True}, {"strides": [True, True]}, {"strides": 1.0}, {"accumulate": 0}])
def test_a_remembered_call_excuses_no_mistake(wrong: dict[str, Any]) -> None:
    """True == 1 == 1.0, but they are not the same attribute."""
    right = {"groups": 1, "strides": [1, 1], "accumulate": False}
    convgrad.convolution(X, W, **{**SAME, **right})
    for _ in range(2):
        with pytest.raises(SpecError):
            convgrad.convolution(X, W, **{**SAME, **right, **wrong})
    assert np.array_equal(convgrad.convolution(X, W, **{**SAME, **right}), Y)


def test_a_remembered_call_excuses_no_other_input() -> None:
    convgrad.convolution(X, W, None, **SAME)
    shape = (3, 3, 5, 20)
    gradient = convgrad.convolution_backward_weights(X, Y, shape, **SAME)
    mistakes = [(X.astype(">f4"), W), (X.astype(np.int32), W), (X.tolist(), W), (X[0], W), (X,), (X, W, None, None)]
    for inputs in mistakes:
        with pytest.raises(SpecError):
            convgrad.convolution(*inputs, **SAME)
    for other in ((3, 3, 5, 20.0), (3, 3, True, 20), (3, 3, 5)):
        with pytest.raises(SpecError):
            convgrad.convolution_backward_weights(X, Y, other, **SAME)
    bias = integers(9, 20)
    assert np.array_equal(convgrad.convolution(X, W, bias, **SAME), Y + bias)
    assert np.array_equal(convgrad.convolution(X, W, **SAME), Y)
    assert np.array_equal(convgrad.convolution(X, bias=bias, weights=W, **SAME), Y + bias)
    for again in (list(shape), np.array(shape), shape):
        assert np.array_equal(convgrad.convolution_backward_weights(X, Y, again, **SAME), gradient)


def test_a_shape_counts_by_its_values() -> None:
    """Several sizes of src share one size of dst; and a shape may be an array."""
    w, dst = integers(3, 3, 3, 5, 8), integers(4, 2, 4, 4, 8)
    for kind in (tuple, list, np.array):
        for size in (7, 8, 7):
            found = convgrad.convolution_backward_data(dst, w, kind([2, size, size, 5]), **{**SAME, "strides": 2})
            assert found.shape == (2, size, size, 5)
        with pytest.raises(SpecError):
            convgrad.convolution_backward_data(dst, w, kind([2, 99, 7, 5]), **{**SAME, "strides": 2})


def test_arrays_of_other_strides() -> None:
    for x in (X, np.asfortranarray(X), X[::-1][::-1], X.repeat(2, axis=2)[:, :, ::2], X.transpose(0, 3, 1, 2).copy()):
        x = x.transpose(0, 2, 3, 1) if x.shape != X.shape else x
        assert np.array_equal(convgrad.convolution(x, W, **SAME), Y)
    assert len(calls.KNOWN) >= 4
    assert engine_used()


def test_other_dtypes_shapes_and_functions() -> None:
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        result = convgrad.convolution(X.astype(dtype), W.astype(dtype), **SAME)
        assert result.dtype == dtype
        assert np.array_equal(result, Y.astype(dtype))
    wide = convgrad.convolution(X.astype(np.float16), W.astype(np.float16), **SAME, out_dtype="f32")
    assert wide.dtype == np.float32
    # Square channels: the formats are told apart by the attribute alone.
    w = integers(6, 3, 3, 5, 5)
    one = convgrad.conv_transpose(X, w, **SAME, weights_format="XOI")
    two = convgrad.conv_transpose(X, w, **SAME, weights_format="XIO")
    assert np.array_equal(two, convgrad.conv_transpose(X, w.swapaxes(2, 3), **SAME, weights_format="XOI"))
    assert not np.array_equal(one, two)
    assert engine_used()


def test_other_settings() -> None:
    """Kernels are chosen for the number of threads and the machine that hold now."""
    x, w = integers(7, 4, 30, 30, 32), integers(8, 3, 3, 32, 32)
    threads, y = convgrad.get_num_threads(), forward(x, w)
    try:
        for number in (1, 2, 3):
            convgrad.set_num_threads(number)
            assert np.array_equal(convgrad.convolution(x, w, **SAME), y)
    finally:
        convgrad.set_num_threads(threads)
    assert {call.choice.execute.plan.threads for call in calls.KNOWN.values()} == {1, 2, 3}


def test_another_machine_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    convgrad.convolution(X, W, **SAME)
    monkeypatch.setenv("CONVGRAD_TARGET", "baseline")
    assert np.array_equal(convgrad.convolution(X, W, **SAME), Y)
    first, second = (call.choice.execute.plan.lanes for call in calls.KNOWN.values())
    host = target.native()
    assert first == (host.at_half_width() if host.double_pumped else host).lanes(4)  # W has few channels
    assert second == 4


def test_memory_kept_for_later_calls_is_bounded() -> None:
    """Also when many calls at once have taken much of it."""
    spaces = [kernel._take(kernel.KEEP // 3) for _ in range(5)]
    assert len({space.address for space in spaces}) == 5
    for space in spaces:
        kernel._give(space)
    assert 0 < sum(space.size for space in kernel._free) <= kernel.KEEP


def test_a_workspace_beyond_memory_is_an_error_of_ours() -> None:
    with pytest.raises(convgrad.OutOfMemoryError, match="no memory for a workspace"):
        kernel._take(1 << 60)


# What lies around and under the data.


@pytest.mark.parametrize(
    "dtype", slow_but([np.float32, ml_dtypes.bfloat16], [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
)
def test_workspace_may_hold_anything(dtype: Any) -> None:
    """Padding, lanes beyond the last channel and pixels without a partner come from no memory that is not set."""
    for groups, channels in ((1, 5), (4, 1), (2, 3)):
        x = integers(1, 2, 7, 9, groups * channels, dtype=dtype)
        w = integers(2, 3, 3, channels, groups * channels, dtype=dtype)
        y = integers(3, 2, 7, 9, groups * channels, dtype=dtype)
        attributes = {**SAME, "groups": groups}

        def compute(x: Array = x, w: Array = w, y: Array = y, attributes: dict[str, Any] = attributes) -> list[Array]:
            return [
                convgrad.convolution(x, w, **attributes),
                convgrad.convolution_backward_data(y, w, x.shape, **attributes),
                convgrad.convolution_backward_weights(x, y, w.shape, **attributes),
            ]

        expected = compute()
        with poisoned_workspace():
            results = compute()
        assert all(np.isfinite(e).all() for e in expected)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_not_finite(value: float, dtype: Any) -> None:
    """Numbers that are not finite spread as the definition says, with one exception: where a kernel element or a pixel
    meets padding, or a zero that fills up a pair, there is a product with zero, which makes NaN of an infinity.

    So results may be NaN near the border where the definition has no such product. Nothing else is touched: not other
    channels, not other images, not results that meet no such number at all.
    """
    x, w = integers(1, 3, 7, 9, 6, dtype=dtype), integers(2, 3, 3, 6, 20, dtype=dtype)
    y = integers(3, 3, 7, 9, 20, dtype=dtype)
    clean = convgrad.convolution(x, w, **SAME), convgrad.convolution_backward_weights(x, y, w.shape, **SAME)

    # One weight, of output channel 11: the other channels do not know, and inside its plane all is as defined.
    spoilt = w.copy()
    spoilt[0, 1, 2, 11] = value
    result = convgrad.convolution(x, spoilt, **SAME)
    with np.errstate(invalid="ignore"):
        defined = forward(x.astype(np.float32), spoilt.astype(np.float32)).astype(dtype)
    others = np.arange(20) != 11
    assert np.array_equal(result[..., others], clean[0][..., others])
    inside = (slice(None), slice(1, -1), slice(1, -1), 11)
    assert np.array_equal(result[inside], defined[inside], equal_nan=True)
    border = result[..., 11].astype(np.float32)
    same = (border == defined[..., 11].astype(np.float32)) | (np.isnan(border) & np.isnan(defined[..., 11]))
    assert (same | np.isnan(border)).all()

    # One pixel of image 1: only outputs around it change.
    spoilt = x.copy()
    spoilt[1, 3, 4, 2] = value
    result = convgrad.convolution(spoilt, w, **SAME)
    around = np.zeros(result.shape, bool)
    around[1, 2:5, 3:6] = True
    assert np.array_equal(result[~around], clean[0][~around])
    with np.errstate(invalid="ignore"):
        defined = forward(spoilt.astype(np.float32), w.astype(np.float32)).astype(dtype)
    assert np.array_equal(result, defined, equal_nan=True)

    # In the weight gradient, only weights of its channel.
    result = convgrad.convolution_backward_weights(spoilt, y, w.shape, **SAME)
    others = np.arange(6) != 2
    assert np.array_equal(result[:, :, others], clean[1][:, :, others])
    assert not np.isfinite(result[:, :, 2].astype(np.float32)).any()
    assert engine_used()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_not_finite_with_few_channels(value: float, dtype: Any) -> None:
    """Results beside one that meets an infinity are as defined: zeros that fill up lanes do not count."""
    x, w = integers(1, 2, 20, 24, 6, dtype=dtype), integers(2, 3, 3, 6, 2, dtype=dtype)
    problem = Problem.parse("y f32 n2 g1 cx6 cy2 x20x24 w3x3 y20x24 s1x1 d1x1 p1x1 x@nxc w@xio y@nxc")
    plan = kernel.make_plan(problem, target.current(), 2)
    assert isinstance(plan, Gather)
    assert plan.tile.fold is not None
    spoilt = x.copy()
    spoilt[1, 9, 10, 2] = value
    result = convgrad.convolution(spoilt, w, **SAME)
    with np.errstate(invalid="ignore"):
        defined = forward(spoilt.astype(np.float32), w.astype(np.float32)).astype(dtype)
    assert np.array_equal(result, defined, equal_nan=True)
    assert engine_used()


# Threads and processes.


def test_the_gil_is_free() -> None:
    """Another Python thread goes on while one computes."""
    x, w = np.ones((4, 200, 200, 32), np.float32), np.ones((5, 5, 32, 64), np.float32)
    attributes = {"strides": 1, "pads_begin": 2, "pads_end": 2, "dilations": 1}
    convgrad.convolution(x[:1], w, **attributes)
    out = np.empty((4, 200, 200, 64), np.float32)
    convgrad.convolution(x, w, **attributes, out=out)  # compiled, and memory taken
    times: list[float] = []

    def work() -> None:
        for _ in range(4):
            times.append(time.perf_counter())
            convgrad.convolution(x, w, **attributes, out=out)
            times.append(time.perf_counter())

    thread = threading.Thread(target=work)
    ticks = []
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks.append(time.perf_counter())
    during = [sum(start < t < stop for t in ticks) for start, stop in zip(times[::2], times[1::2], strict=True)]
    # A call takes tens of milliseconds; who waits for the lock sees none of it.
    assert sorted(during)[-2] >= 5, (during, times)


def test_eight_threads_on_different_problems() -> None:
    cases = [(integers(i, 2, 12 + i, 20, 16), integers(50 + i, 3, 3, 16, 17 + i)) for i in range(8)]
    expected = [forward(x, w) for x, w in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        for step in range(40):
            j = i if step % 4 else (i + step) % 8
            if not np.array_equal(convgrad.convolution(*cases[j], **SAME), expected[j]):
                wrong.append(j)

    with ThreadPoolExecutor(8) as crowd:
        list(crowd.map(work, range(8)))
    assert not wrong
    assert engine_used()


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a new process; one that hangs is a failure."""
    return subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=False, timeout=120)


CROWD = """
import os, sys, threading, time
import numpy as np
import convgrad

convgrad.set_num_threads(2)
rng = np.random.default_rng(0)
x, w = rng.integers(-3, 4, (4, 40, 40, 32)).astype("f"), rng.integers(-3, 4, (3, 3, 32, 33)).astype("f")
attributes = dict(strides=1, pads_begin=1, pads_end=1, dilations=1)
y = convgrad.convolution(x, w, **attributes)
stop, done = threading.Event(), []


def right(channels=33):
    return np.array_equal(convgrad.convolution(x, w[..., :channels], **attributes), y[..., :channels])


def work():
    while not stop.is_set():
        done.append(right())


crowd = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in crowd:
    thread.start()
while len(done) < 3:
    time.sleep(0.001)
"""


@forks
@pytest.mark.slow
def test_fork_in_the_middle() -> None:
    """Children compute what the parent has compiled and what it has not, with threads of their own."""
    program = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
for i in range(6):
    child = os.fork()
    if child == 0:
        ok = right() and right(20 + i) and right()
        os._exit(0 if ok else 1)
    assert right()
    assert os.waitpid(child, 0)[1] == 0, i
stop.set()
for thread in crowd:
    thread.join()
assert all(done)
# Now that the team is idle, a child that believed in its workers would wait for them.
child = os.fork()
if child == 0:
    os._exit(0 if right() and right(31) else 1)
assert os.waitpid(child, 0)[1] == 0
assert right()
print("well")
"""
    result = run(CROWD + program)
    assert (result.returncode, result.stdout) == (0, "well\n"), result.stderr


@pytest.mark.parametrize(
    "way", slow_but(["print('end')"], ["print('end')", "sys.exit(3)", "raise RuntimeError('end')"])
)
def test_exit_while_a_thread_computes(way: str) -> None:
    result = run(CROWD + way)
    assert result.returncode == {"p": 0, "s": 3, "r": 1}[way[0]], result.stderr
    assert "Fatal" not in result.stderr
    assert result.stderr == "" or "RuntimeError: end" in result.stderr.splitlines()[-1]


def _in_a_process(seed: int) -> bytes:
    x, w = integers(seed, 4, 40, 40, 16), integers(seed + 1, 3, 3, 16, 20)
    return bytes(convgrad.convolution(x, w, **SAME).tobytes())


@pytest.mark.slow
def test_processes_made_by_spawn() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for seed, result in enumerate(pool.map(_in_a_process, range(4))):
            assert result == _in_a_process(seed)
