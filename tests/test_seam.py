"""A back end for another kind of device and an array library that nobody has heard of: all it takes is registration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
import torch

import convgrad
from convgrad import SpecError, UnsupportedError, calls, engine, host, libraries, numpy_backend, reference
from convgrad.backend import Device, Refusal, Tensor
from convgrad.dtypes import DTYPES, name_of
from convgrad.spec import Problem
from convgrad.spec.problem import dense_strides

CALL = dict(strides=1, pads_begin=1, pads_end=1, dilations=1)


class Card:
    """A device of its own memory: its addresses mean nothing to the host."""

    BASE = 1 << 50

    def __init__(self) -> None:
        self.memory = np.full(1 << 20, 0xFF, np.uint8)  # NaN in every type
        self.used = 64

    def take(self, size: int) -> int:
        at, self.used = self.used, self.used + -(-size // 64) * 64
        return self.BASE + at

    def view(self, at: int, shape, strides, dtype: str) -> np.ndarray:
        kind = DTYPES[dtype].numpy
        start = at - self.BASE
        assert 0 <= start < self.memory.size, "an address of another memory"
        block = self.memory[start : start + kind.itemsize].view(kind)
        return np.lib.stride_tricks.as_strided(block, shape, strides)


@dataclass(eq=False)
class Sheet:
    """An array of the made-up library."""

    card: Card
    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, card: Card, array: np.ndarray) -> Sheet:
        sheet = cls(card, card.take(array.nbytes), array.shape, array.strides, name_of(array.dtype))
        sheet.numpy()[...] = array
        return sheet

    def numpy(self) -> np.ndarray:
        return self.card.view(self.at, self.shape, self.strides, self.dtype)


class Sheets:
    """The library, as convgrad wants to see it."""

    name = "sheets"

    def owns(self, value):
        return isinstance(value, Sheet)

    def keyed(self):
        return (Sheet,)

    def look(self, value):
        return (value.shape, value.strides, value.dtype, "card"), value.at

    def is_writable(self, value):
        return True

    def open(self, value, name):
        return Tensor(value, value.at, value.shape, value.strides, value.dtype, Device("card", 1))

    def wrap(self, memory, like):
        return memory

    def written(self, value):
        value.notes.append("written")

    def context(self, value):
        return 7


class CardBackend:
    """A back end that computes on the card."""

    name = "cards"
    device = "card"

    def __init__(self, card: Card) -> None:
        self.card, self.clock, self.loaded, self.contexts = card, 1, [], []

    def setting(self):
        return self.clock

    def load(self, problem, device):
        if (refusal := self.plan(problem, device)) != "by hand":
            return refusal
        self.loaded.append(problem)

        def execute(x, w, y, bias, context=0):
            self.contexts.append(context)
            at = {"x": x, "w": w, "y": y}
            views = {}
            for role in at:
                dtype = problem.dtype_of(role)
                strides = tuple(s * DTYPES[dtype].size for s in problem.strides(role))
                views[role] = self.card.view(at[role], problem.shape(role), strides, dtype)
            out = views.pop(problem.wanted)
            before = out.copy()
            out[...] = np.nan  # as a kernel may that writes results while it reads inputs
            out[...] = reference.compute(problem, views, before)

        return execute

    def plan(self, problem, device):
        assert device == Device("card", 1)
        return Refusal(self.name, "has no bf16", "f32") if problem.dtype == "bf16" else "by hand"

    def empty(self, shape, dtype, strides, like):
        size = DTYPES[dtype].size
        at = self.card.take(prod(shape) * size)
        strides = strides or tuple(s * size for s in dense_strides(shape))
        return Sheet(self.card, at, shape, strides, dtype), at

    def duplicate(self, tensor):
        low, high = tensor.bounds
        at = self.card.take(high - low) + tensor.address - low
        copied = tensor._replace(memory=Sheet(self.card, at, *tensor[2:5]), address=at)
        self.copy(tensor, copied)
        return copied

    def copy(self, source, target):
        target.memory.numpy()[...] = source.memory.numpy()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "BACKENDS", list(engine.BACKENDS))
    monkeypatch.setattr(libraries, "LIBRARIES", list(libraries.LIBRARIES))
    monkeypatch.setattr(calls, "KNOWN", {})
    card = Card()
    card.backend = CardBackend(card)
    engine.register(card.backend)
    libraries.register(Sheets())
    yield card
    libraries.KEYED.pop(Sheet, None)


def pair(dtype=np.float32):
    rng = np.random.default_rng(0)
    return (rng.integers(-3, 4, shape).astype(dtype) for shape in ((2, 5, 6, 3), (3, 3, 3, 4)))


def test_the_back_end_computes_in_its_own_memory(card):
    x, w = pair()
    expected = convgrad.convolution(x, w, **CALL)
    a, b = Sheet.of(card, x), Sheet.of(card, w)
    for times in (1, 2, 3):
        y = convgrad.convolution(a, b, **CALL)
        assert isinstance(y, Sheet)
        assert np.array_equal(y.numpy(), expected)
        assert len(card.backend.contexts) == times
    assert set(card.backend.contexts) == {7}
    assert len(card.backend.loaded) <= 2, "known when it comes again"
    card.backend.clock += 1
    before = len(card.backend.loaded)
    convgrad.convolution(a, b, **CALL)
    assert len(card.backend.loaded) == before + 1, "another setting, another choice"


def test_gradients_and_keywords(card):
    x, w = pair()
    y = convgrad.convolution(x, w, **CALL)
    a, b, c = (Sheet.of(card, array) for array in (x, w, y))
    for _ in range(2):
        found = convgrad.convolution_backward_weights(a, diff_dst=c, weights_shape=w.shape, **CALL)
        assert np.array_equal(found.numpy(), convgrad.convolution_backward_weights(x, y, w.shape, **CALL))
        found = convgrad.convolution_backward_data(c, b, x.shape, **CALL)
        assert np.array_equal(found.numpy(), convgrad.convolution_backward_data(y, w, x.shape, **CALL))


def test_results_that_are_written_over_inputs(card):
    rng = np.random.default_rng(1)
    x, w = rng.integers(-3, 4, (1, 9, 9, 4)).astype("f"), rng.integers(-3, 4, (3, 3, 4, 4)).astype("f")
    b = Sheet.of(card, w)
    expected = convgrad.convolution(x, w, **CALL)
    for accumulate in (False, True, False, True):
        a, apart = Sheet.of(card, x), Sheet.of(card, x)
        assert convgrad.convolution(a, b, **CALL, out=a, accumulate=accumulate) is a
        assert convgrad.convolution(Sheet.of(card, x), b, **CALL, out=apart, accumulate=accumulate) is apart
        for out in (a, apart):
            assert np.array_equal(out.numpy(), expected + x if accumulate else expected)
            assert out.notes == ["written"]


def test_reasons_of_every_back_end_reach_the_user(card):
    tensors = [Sheet.of(card, array.astype(DTYPES["bf16"].numpy)) for array in pair()]
    reasons = (
        r"has no bf16 \(cards\); no other back end takes it: "
        r"cpu: computes on cpu, not on card 1; reference: computes on cpu, not on card 1; gpu: computes on cuda"
    )
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=reasons):
            convgrad.convolution(*tensors, **CALL)
    with pytest.raises(UnsupportedError, match=reasons):
        engine.explain(Problem.parse("y bf16 n1 g1 cx1 cy1 x3 w3 y3 s1 d1 p1"), Device("card", 1))


def test_tensors_on_different_devices(card):
    x, w = pair()
    for _ in range(2):
        with pytest.raises(SpecError, match="weights must be where src is, on card 1, got a tensor on cpu 0"):
            convgrad.convolution(Sheet.of(card, x), w, **CALL)
        with pytest.raises(SpecError, match="out must be where src is, on cpu 0, got a tensor on card 1"):
            convgrad.convolution(x, w, **CALL, out=Sheet.of(card, np.zeros((2, 5, 6, 4), np.float32)))
    with pytest.raises(SpecError, match="must lie in CPU memory, got a tensor on card 1"):
        convgrad.bias_backward(Sheet.of(card, x))


class OnCard(torch.Tensor):
    """A tensor that says it is on a CUDA device, of which this machine may have none. Its memory is the host's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index = 1
    is_cpu = False
    device = property(lambda self: torch.device("cuda", self.index))

    def get_device(self):
        return self.index

    def detach(self):
        return self  # not a plain tensor, which would be on the host

    @classmethod
    def of(cls, array, index=1):
        tensor = torch.from_numpy(array).as_subclass(cls)
        tensor.index = index
        return tensor


class CudaBackend:
    """A back end of CUDA devices, as far as the seam can tell."""

    name, device = "made up", "cuda"

    def __init__(self):
        self.seen = []

    def setting(self):
        return None

    def load(self, problem, device):
        found = numpy_backend.load(problem, device)

        def execute(x, w, y, bias, context=0):
            self.seen.append((device, context))
            found(x, w, y, bias)

        return execute

    def empty(self, shape, dtype, strides, like):
        tensor = like.new_empty(shape)
        return tensor, tensor.data_ptr()

    duplicate, copy = host.duplicate, host.copy


def test_tensors_of_pytorch_on_a_cuda_device(monkeypatch):
    monkeypatch.setattr(engine, "BACKENDS", list(engine.BACKENDS))
    monkeypatch.setattr(calls, "KNOWN", {})
    x, w = pair()
    expected = convgrad.convolution(x, w, **CALL)
    a, b = OnCard.of(x), OnCard.of(w)
    where = r"no CUDA device here \(gpu\); no other back end takes it: cpu: computes on cpu, not on cuda 1; .*$"
    with pytest.raises(UnsupportedError, match=where):
        convgrad.convolution(a, b, **CALL)
    backend = CudaBackend()
    engine.register(backend)
    streams = {0: 1 << 40, 1: 1 << 41}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    for _ in range(2):
        assert np.array_equal(convgrad.convolution(a, b, **CALL).numpy(), expected)
    out = torch.full(expected.shape, torch.nan).as_subclass(OnCard)
    assert convgrad.convolution(a, b, out=out, **CALL) is out
    assert np.array_equal(out.numpy(), expected)
    assert backend.seen == [(Device("cuda", 1), streams[1])] * 3
    with pytest.raises(SpecError, match="weights must be where src is, on cuda 1, got a tensor on cuda 0"):
        convgrad.convolution(a, OnCard.of(w, 0), **CALL)
    with pytest.raises(SpecError, match="got a tensor on cpu 0"):
        convgrad.convolution(a, torch.from_numpy(w), **CALL)
    library = libraries.find(a)
    keys = [library.look(tensor)[0] for tensor in (a, OnCard.of(x, 1), OnCard.of(x, 0), torch.from_numpy(x))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3, "two devices of a kind have keys of their own"


def test_operations_of_a_bias_stay_on_a_cuda_device():
    """PyTorch computes them where the tensors are, with one rounding."""
    x, _ = pair()
    a, b = OnCard.of(x), OnCard.of(np.arange(x.shape[-1], dtype=np.float32))
    found = convgrad.bias_backward(a, data_format="NXC")
    assert isinstance(found, torch.Tensor)
    assert np.array_equal(found.numpy(), convgrad.bias_backward(x, data_format="NXC"))
    moved = convgrad.apply("BiasAdd", a, b, data_format="NXC")
    assert np.array_equal(moved.numpy(), x + b.numpy())
    out = OnCard.of(np.full(x.shape[-1], 0.5, np.float32))
    assert convgrad.bias_backward(a, data_format="NXC", out=out, accumulate=True) is out
    assert np.array_equal(out.numpy(), found.numpy() + np.float32(0.5))
    with pytest.raises(SpecError, match="bias must be where src is, on cuda 1, got a tensor on cpu 0"):
        convgrad.apply("BiasAdd", a, torch.from_numpy(b.numpy()), data_format="NXC")


def test_what_is_opened_of_a_cuda_tensor():
    array = np.zeros((4, 6), np.int16)
    for dtype, named in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.int16, "int16")):
        tensor = torch.from_numpy(array)[:, ::2].view(dtype).as_subclass(OnCard)
        opened = libraries.open_tensor(tensor, "src")
        assert opened.address == array.ctypes.data
        assert opened[2:] == ((4, 3), (12, 4), named, Device("cuda", 1), "", False)


def test_one_that_was_asked_for_by_name():
    problem = Problem.parse("y f32 n1 g1 cx1 cy1 x3 w3 y3 s1 d1 p1")
    assert [engine.choose(problem, only=name).backend.name for name in ("cpu", "reference")] == ["cpu", "reference"]
    empty = Problem.parse("y f32 n0 g1 cx1 cy1 x3 w3 y3 s1 d1 p1")
    choice = engine.choose(empty)
    assert (choice.backend.name, *map(str, choice.refusals)) == (
        "reference",
        "cpu: nothing to sum: a tensor is empty",
    )
    with pytest.raises(UnsupportedError, match=r"nothing to sum: a tensor is empty \(cpu\); no other .*: gpu: "):
        engine.choose(empty, only="cpu")


WITHOUT = """
import sys
sys.modules["llvmlite"] = None
import numpy as np
import convgrad
x, w = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 3), np.float32)
for _ in range(2):
    print(convgrad.convolution(x, w, strides=1, pads_begin=1, pads_end=1, dilations=1).sum())
print(convgrad.explain("y f32 n1 g1 cx2 cy3 x4x4 w3x3 y4x4 s1x1 d1x1 p1x1"))
"""


def test_without_llvmlite_the_reference_computes():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["600.0", "600.0"]
    assert "NumPy reference, on one thread: llvmlite, which compiles" in " ".join(" ".join(lines).split())
