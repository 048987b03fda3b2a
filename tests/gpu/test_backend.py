"""The back end without a GPU: what it refuses, and what it hands to kernels of a made-up driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

import convgrad
from convgrad import CompileError, OutOfMemoryError, SpecError, UnsupportedError, engine
from convgrad.backend import Device, Refusal
from convgrad.gpu import backend, driver, launch, recall
from convgrad.gpu.driver import Map
from convgrad.gpu.plan import choose
from convgrad.gpu.plan.records import Descriptor, Launch, Plan
from convgrad.gpu.target import current, of_kind
from convgrad.libraries import torch as torch_library
from convgrad.spec import Problem

LINE = "w f32 n8 g1 cx8 cy8 x32x32 w3x3 y32x32 s1x1 d1x1 p1x1 accumulate"


class Card:
    """A GPU that notes what it is told."""

    class OutOfMemoryError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.device_now, self.memory, self.launched, self.failure, self.full = 0, set(), [], False, False
        self.functions, self.context = {}, 0xC0

    @contextmanager
    def device(self, index):
        before, self.device_now = self.device_now, index
        try:
            yield
        finally:
            self.device_now = before

    def current_device(self):
        return self.device_now

    def caching_allocator_alloc(self, size, index, stream):
        if self.full:
            raise self.OutOfMemoryError("CUDA out of memory")
        assert self.device_now == index
        self.memory.add(at := 1 << 40 | len(self.memory) << 20)
        self.asked = size, stream
        return at

    def caching_allocator_delete(self, at):
        self.memory.remove(at)

    def load(self, step, target, index, aligned):
        assert self.device_now == index
        kernel = Kernel(self, step, index, aligned)
        if self.by_triton:
            return kernel
        self.functions[0xF00 + len(self.functions)] = kernel
        maps = tuple(Map(9, 2, descriptor.block, 3) for descriptor in step.descriptors)
        return launch.Loaded(0xF00 + len(self.functions) - 1, recall.Code(step.kernel, 8, 4096, maps, b""))

    # The driver, which is handed pointers.

    def cuTensorMapEncodeTiled(self, room, kind, rank, at, sizes, strides, box, steps, *rest):
        assert (kind, rank.value, rest) == (9, len(sizes), (0, 3, 2, 0))
        assert ctypes.addressof(room) % 64 == 0
        seen = (at.value, *sizes, *strides, *box, *steps)
        ctypes.memmove(room, (ctypes.c_int64 * len(seen))(*seen), 8 * len(seen))
        return 0

    def cuLaunchKernelEx(self, config, function, places, rest):
        kernel, config = self.functions[function.value], config._obj
        assert (*config.grid, *config.block, config.shared) == (kernel.step.programs, 1, 1, 256, 1, 1, 4096)
        given = [ctypes.c_int64.from_address(place).value for place in places]
        assert (given[-2:], rest) == ([0, 0], None), "no memory of Triton's own"
        return kernel.launch(
            *given[:-2], stream=config.stream, early=[config.attributes[i].name for i in range(config.count)]
        )

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of resources"

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 0xC0 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0


class Kernel:
    """A compiled kernel, which is launched in either way."""

    def __init__(self, card, step, index, aligned):
        self.card, self.step, self.index, self.aligned = card, step, index, aligned

    def __getitem__(self, grid):
        assert grid == (self.step.programs, 1, 1)
        return self.launch

    def launch(self, *given, stream, early=()):
        assert self.card.device_now == self.index
        if not self.card.context:
            return driver.NO_CONTEXT
        if self.card.failure and self.card.by_triton:
            raise RuntimeError("Triton Error [CUDA]: out of resources")
        if self.card.failure:
            return 701
        assert [*early] == ([6] if self.step.early and not self.card.by_triton else [])
        self.card.launched.append((self.step.kernel, self.aligned, given, stream))
        return None


@pytest.fixture(params=["direct", "by Triton"])
def card(monkeypatch, request):
    card = Card()
    card.by_triton = request.param == "by Triton"
    monkeypatch.setattr(launch, "load", card.load)
    monkeypatch.setattr(driver, "library", lambda: card)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=card))
    return card


def numbers(card, step):
    """What a kernel is given besides addresses. Constants are in its code, which Triton sees to itself."""
    if card.by_triton:
        return tuple(value for _, value in (*step.values, *step.constants))
    return tuple(number for _, value in step.values for number in (value if isinstance(value, tuple) else (value,)))


def executable():
    plan = choose.plan(Problem.parse(LINE), of_kind("sm_90"))
    assert [step.kernel for step in plan.launches] == ["weights", "finish"]
    return launch.Executable(plan, of_kind("sm_90"), 3)


def test_memory_that_is_not_aligned_may_have_a_plan_of_its_own(card):
    plan = executable().plan
    other = replace(plan, launches=plan.launches[:1])
    run = launch.Executable(plan, of_kind("sm_90"), 3, lambda: other)
    run(0x1002, 0x2000, 0x3000, 0, 7)
    assert len(card.launched) == 1
    run(0x1000, 0x2000, 0x3000, 0, 7)
    assert len(card.launched) == 3


def test_kernels_get_addresses_in_their_order(card):
    run = executable()
    run(0x1000, 0x2000, 0x3000, 0, 77)
    (sums, aligned, given, stream), (finish, _, then, _) = card.launched
    assert (sums, finish, aligned, stream) == ("weights", "finish", True, 77)
    workspace = given[2]
    assert given[:2] == (0x1000, 0x3000)
    assert then[:2] == (workspace, 0x2000)
    assert card.asked == (run.plan.workspace, 77)
    assert not card.memory, "given back"
    step = run.plan.launches[0]
    assert given[3:] == numbers(card, step)


def test_memory_that_begins_anywhere_has_kernels_of_its_own(card):
    run = executable()
    run(0x1004, 0x2000, 0x3000, 0, 0)
    run(0x1000, 0x2000, 0x3000, 0, 0)
    assert [aligned for _, aligned, _, _ in card.launched] == [False, False, True, True]


def test_calls_with_addresses_of_old_are_not_made_anew(card, monkeypatch):
    run, made = executable(), []
    call = launch.Kernel.call
    monkeypatch.setattr(launch.Kernel, "call", lambda *given: made.append(1) or call(*given))
    for at in (0x1000, 0x1000, 0x2000, 0x1000):
        run(at, 0x2000, 0x3000, 0, 7)
    assert len(made) == 2 * len(run.plan.launches)
    assert [given[0] for _, _, given, _ in card.launched][::2] == [0x1000, 0x1000, 0x2000, 0x1000]
    for at in range(2 * launch.KEPT):
        run(16 * at, 0x2000, 0x3000, 0, 7)
    assert len(run._ready[True].calls) == launch.KEPT, "bounded"
    run(0x1000, 0x2000, 0x3000, 0, 8)
    assert {stream for *_, stream in card.launched[-2:]} == {8}


def test_areas_and_descriptors(card):
    """Areas lie side by side in one piece of memory, each aligned; descriptors see them, or tensors, from an offset."""
    seen = Descriptor("packed", "bf16", (64, 32), (32, 1), (16, 32), offset=8)
    first = Launch("pack", 3, (("w", "bf16"), ("packed", "bf16")), (("count", 5),), (("UNIT", 1),))
    then = Launch(
        "sums", 4, (("bits", "f32"),), (), (), descriptors=(seen, replace(seen, tensor="x", offset=0)), early=True
    )
    plan = Plan("sums", "sums", (first, then), (("packed", 4097), ("bits", 10)), 1e-6, ())
    assert plan.workspace == 4352 + 256
    run = launch.Executable(plan, of_kind("sm_90"), 3)
    run(0x1000, 0x2000, 0x3000, 0, 77)
    at = 1 << 40
    (_, _, given, _), (_, _, seen_by, _) = card.launched
    assert given == (0x2000, at, *numbers(card, first))
    if card.by_triton:  # which encodes them itself
        assert [view.data_ptr() for view in seen_by[:2]] == [at + 16, 0x1000]
        assert seen_by[2] == at + 4352
    else:
        assert seen_by == (at + 16, 64, 32, 32, 1, 0x1000, 64, 32, 32, 1, at + 4352)


def test_what_the_copy_engine_is_told():
    """Axes from the innermost one, strides but that one in bytes, and boxes with the elements that are left out."""
    card = Card()
    driver.library, before = (lambda: card), driver.library
    try:
        seen = Descriptor("x", "bf16", (5, 64, 32), (2048, 32, 1), (2, 16, 8), steps=(1, 2, 1))
        found = driver.encode(seen, Map(9, 2, (2, 16, 8), 3), 0x1000)
    finally:
        driver.library = before
    told = (ctypes.c_int64 * 12).from_buffer(found)
    assert [*told] == [0x1000, 32, 64, 5, 64, 4096, 8, 32, 2, 1, 2, 1]


def test_a_thread_that_has_not_used_the_device(card):
    run = executable()
    card.context = 0
    if card.by_triton:
        return  # it sees to that itself
    run(0x1000, 0x2000, 0x3000, 0, 7)
    assert card.context == 0xC3
    assert len(card.launched) == 2


def test_moved_launches_take_other_memory():
    seen = Descriptor("x", "bf16", (64, 32), (32, 1), (16, 32))
    step = Launch("sums", 4, (("x", "f32"), ("w", "f32")), (), (), descriptors=(seen,)).moved({"x": "copy"})
    assert step.tensors == (("copy", "f32"), ("w", "f32"))
    assert step.descriptors[0].tensor == "copy"


def test_failures_are_told_and_leave_nothing_behind(card):
    run = executable()
    card.failure = True
    with pytest.raises(CompileError, match=r"weights was not launched on sm_90: .*out of resources"):
        run(0, 0, 0, 0)
    assert not card.memory
    assert card.device_now == 0
    card.failure = False
    run(0, 0, 0, 0)
    assert len(card.launched) == 2, "the next call is as good as any"
    card.full = True
    with pytest.raises(OutOfMemoryError, match=f"no memory for {run.plan.workspace} bytes of workspace on cuda 3"):
        run(0, 0, 0, 0)


def test_a_kernel_is_compiled_once_for_a_device(monkeypatch):
    built = []
    monkeypatch.setattr(recall, "find", lambda *given: built.append(given) or len(built))
    monkeypatch.setattr(launch, "_loaded", {})
    steps = choose.plan(Problem.parse(LINE), of_kind("sm_90")).launches
    found = [launch.load(step, of_kind("sm_90"), index, True) for index in (0, 0, 1) for step in steps]
    assert found == [1, 2, 1, 2, 3, 4], "machine code belongs to a device"

    def fail(*given):
        raise ValueError("no such instruction")

    monkeypatch.setattr(recall, "find", fail)
    with pytest.raises(CompileError, match="the GPU kernel weights did not compile: no such instruction"):
        launch.load(steps[0], of_kind("sm_90"), 2, True)
    monkeypatch.setattr(recall, "find", lambda *given: recall.Code("weights", 4, 0, (), b""))
    monkeypatch.setattr(driver, "library", lambda: exec("raise OSError('no driver')"))
    with pytest.raises(CompileError, match="the GPU kernel weights was not loaded on sm_90: no driver"):
        launch.load(steps[0], of_kind("sm_90"), 2, True)


def test_without_a_gpu_the_reason_is_told():
    problem = Problem.parse(LINE)
    with pytest.raises(UnsupportedError, match=r"\(gpu\); no other back end takes it: cpu: computes on cpu"):
        engine.choose(problem, Device("cuda", 0))
    with pytest.raises(SpecError, match="device must be a name such as 'cpu', 'cuda' or 'cuda:1', got 'cuda:x'"):
        convgrad.explain(problem, device="cuda:x")


def made_up(monkeypatch, **changes):
    """PyTorch as it is on a machine with a GPU."""
    found = dict(
        major=9, minor=0, name="H", multi_processor_count=132, shared_memory_per_block_optin=232448,
        clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144,
    ) | changes  # fmt: skip
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: SimpleNamespace(**found),
        current_device=lambda: 0, caching_allocator_delete=lambda at: None,
    )  # fmt: skip
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
    monkeypatch.setattr(backend, "import_module", lambda name: torch)
    monkeypatch.setattr(backend, "_is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    current.cache_clear()
    monkeypatch.setattr(launch.Executable, "_prepare", lambda self, aligned: [])
    return torch


def test_what_is_refused(monkeypatch):
    problem, device = Problem.parse(LINE), Device("cuda", 0)
    torch = made_up(monkeypatch)
    target = backend.machine(device)
    assert (target.name, target.capability, target.multiprocessors, target.clock) == ("H", 90, 132, 1.98)
    assert 4700 < target.bandwidth < 5000
    assert isinstance(backend.load(problem, device), launch.Executable)
    assert backend.load(problem, Device("cuda", 1)) == Refusal("gpu", "there is no CUDA device 1")
    torch.version.hip = "6.0"
    assert "NVIDIA" in backend.load(problem, device).reason
    made_up(monkeypatch, major=7, minor=5)
    assert backend.load(problem, device).reason == "Triton needs compute capability 8.0, H has 7.5"
    torch = made_up(monkeypatch)
    torch.cuda.is_available = lambda: False
    assert backend.plan(problem, device).reason == "PyTorch finds no CUDA device here"
    monkeypatch.setattr(backend, "_is_installed", lambda name: name != "triton")
    assert backend.plan(problem, device).reason == "triton is not installed; the extra `cuda` of convgrad has both"
    current.cache_clear()


def test_a_newer_gpu_counts_as_the_newest_known(monkeypatch):
    made_up(monkeypatch, major=11, minor=0)
    target = backend.machine(Device("cuda", 0))
    assert (target.capability, target.matrix) == (110, of_kind("sm_100").matrix)
    current.cache_clear()


def test_results_are_made_on_the_current_device_the_quicker_way(monkeypatch):
    """And on another one in the plain way."""
    now, made = [0], []

    def maker(way):
        return lambda *given, **how: made.append((way, *given)) or SimpleNamespace(data_ptr=lambda: 0x7000)

    torch = made_up(monkeypatch)
    torch.Tensor = SimpleNamespace
    torch.bfloat16, torch.device = "bf16", lambda *place: place
    torch.empty_strided = maker("plain")
    torch.cuda.OutOfMemoryError = MemoryError
    torch._C = SimpleNamespace(_cuda_getDevice=lambda: now[0])
    torch._C._dynamo = SimpleNamespace(guards=SimpleNamespace(_empty_strided_cuda=maker("quick")))
    backend._makers.cache_clear()
    like = SimpleNamespace(device=SimpleNamespace(index=0))
    assert backend.empty((2, 3), "bf16", (2, 4), like)[1] == 0x7000
    now[0] = 1
    backend.empty((2, 3), "bf16", None, like)
    del torch._C._cuda_getDevice
    backend._makers.cache_clear()
    backend.empty((2, 3), "bf16", None, like)
    backend._makers.cache_clear()
    assert made == [("quick", (2, 3), (1, 2), "bf16"), *[("plain", (2, 3), (3, 1))] * 2]


def test_tensors_on_a_device_are_opened_where_they_are():
    made = SimpleNamespace(
        element_size=lambda: 2, dtype="torch.bfloat16", stride=lambda: (30, 10, 1), shape=(2, 3, 10),
        data_ptr=lambda: 0x7000,
    )  # fmt: skip
    tensor = torch_library.on_device(made, Device("cuda", 1))
    assert tensor.device == Device("cuda", 1)
    assert tensor[1:5] == (0x7000, (2, 3, 10), (60, 20, 2), "bf16")


ALONE = """
import sys
sys.modules["llvmlite"] = None
import convgrad
from convgrad.gpu import backend
from convgrad.spec import Problem
from convgrad.gpu.plan import choose
from convgrad.gpu import launch, target
print(choose.plan(Problem.parse("x f32 n1 g1 cx2 cy3 x4x4 w3x3 y4x4 s1x1 d1x1 p1x1"), target.of_kind("sm_90")))
print(sorted(m for m in sys.modules if m.startswith("convgrad.cpu") and m.count(".") > 2))
print({"torch", "triton", "llvmlite.binding"} & set(sys.modules))
"""


def test_the_engine_needs_nothing_of_the_cpus():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    plan, _, heavy = done.stdout.splitlines()
    assert plan.startswith("Triton kernel gather")
    assert heavy == "set()"
