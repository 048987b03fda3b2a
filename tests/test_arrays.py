"""Arrays as people have them: any library, any strides, any owner."""

from __future__ import annotations

import gc
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

import convgrad
import convgrad.graph
from convgrad import OutOfMemoryError, SpecError
from convgrad.libraries import open_array
from convgrad.spec import OPS, Description, bind

CALL = dict(strides=1, pads_begin=1, pads_end=1, dilations=1, data_format="NCX", weights_format="OIX")


def _pair(dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.integers(-3, 4, (2, 3, 5)).astype(dtype), rng.integers(-3, 4, (4, 3, 3)).astype(dtype)


EXPECTED = convgrad.convolution(*_pair(), **CALL)


class Exporter:
    """The least that DLPack asks for, around another array. It knows no version unless told to."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


class NewExporter(Exporter):
    def __dlpack__(self, *, max_version=None):
        return self.array.__dlpack__(max_version=max_version)


def _address(array):
    return array.__array_interface__["data"][0]


# ---- PyTorch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_read_and_written_where_they_are(dtype):
    x, w = (torch.from_numpy(a).to(dtype) for a in _pair())
    assert _address(open_array(x, "src")) == x.data_ptr()
    part = x[:, 1:, ::2]
    assert _address(open_array(part, "src")) == part.data_ptr()
    y = convgrad.convolution(x, w, **CALL)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == dtype
    assert torch.equal(y.double(), torch.from_numpy(EXPECTED).double())
    out = torch.full((2, 5, 4), torch.nan, dtype=dtype).transpose(1, 2)
    before = out.data_ptr()
    assert convgrad.convolution(x, w, out=out, **CALL) is out
    assert out.data_ptr() == before
    assert torch.equal(out, y)


def test_parameters_and_their_kin():
    x, w = _pair()
    layer = torch.nn.Conv1d(3, 4, 3, padding=1)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w))
        layer.bias.zero_()
        y = convgrad.convolution(torch.from_numpy(x), layer.weight, layer.bias, **CALL)
    assert not y.requires_grad
    assert np.array_equal(y.numpy(), EXPECTED)
    weight = layer.weight.detach()
    assert np.array_equal(convgrad.convolution(x, weight, **CALL), EXPECTED)
    assert type(convgrad.convolution(weight, weight, **CALL)) is torch.Tensor

    class Mine(torch.Tensor):
        pass

    y = convgrad.convolution(torch.from_numpy(x).as_subclass(Mine), torch.from_numpy(w), **CALL)
    assert isinstance(y, torch.Tensor)
    negated = torch._neg_view(torch.from_numpy(-x))
    assert np.array_equal(convgrad.convolution(negated, torch.from_numpy(w), **CALL).numpy(), EXPECTED)


def test_the_first_input_names_the_library():
    x, w = _pair()
    assert isinstance(convgrad.convolution(torch.from_numpy(x), w, **CALL), torch.Tensor)
    assert isinstance(convgrad.convolution(x, torch.from_numpy(w), **CALL), np.ndarray)
    out = torch.zeros(2, 4, 5)
    assert convgrad.convolution(x, w, out=out, **CALL) is out
    assert np.array_equal(out.numpy(), EXPECTED)


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (torch.zeros(2, 3, 5, device="meta"), "input_device"),
        (torch.zeros(2, 3, 5).to_sparse(), "input_array"),
        (torch.zeros(2, 3, 5, dtype=torch.float8_e5m2), "input_array"),
        (torch.zeros(2, 3, 5, dtype=torch.complex64), "input_dtype"),
        (torch.zeros(2, 3, 5, dtype=torch.bool), "input_dtype"),
        (torch.nn.UninitializedParameter(requires_grad=False), "input_array"),
    ],
    ids=["meta", "sparse", "float8", "complex", "bool", "lazy"],
)
def test_other_tensors_are_refused(tensor, rule):
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(tensor, torch.zeros(4, 3, 3), **CALL)
    assert (caught.value.rule, caught.value.argument) == (rule, "src")


def nested():
    """PyTorch loads much for these, which tests that only lie beside this one need not wait for."""
    return torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([1.0], "got an object of type list; make one with numpy.asarray(..., numpy.float32)"),
        (memoryview(b"abcd"), "got an object of type memoryview; make one with numpy.asarray$"),
        (np.ma.masked_array(np.zeros((2, 3, 5), np.float32)), "mask would be lost; give its .filled(0), or its .data"),
        (True, "got an object of type bool$"),
        (torch.nn.Conv1d(3, 4, 3), "got an object of type Conv1d$"),
        (nested, "got a nested tensor; make a plain one"),
        (np.zeros((2, 3, 5), np.int64), "f64, got int64; convert it to one of them"),
    ],
    ids=lambda v: "" if isinstance(v, str) else type(v).__name__,
)
def test_what_to_do_with_other_objects_is_told(value, part):
    if value is nested:
        value = nested()
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(value, torch.zeros(4, 3, 3), **CALL)
    text = str(caught.value)
    assert text.endswith(part[:-1]) if part.endswith("$") else part in text


def test_a_layer_in_place_of_its_weights_is_answered_with_them():
    x, layer = torch.zeros(2, 3, 5), torch.nn.Conv1d(3, 4, 3)
    for call in (
        lambda weights: convgrad.convolution(x, weights, **CALL),
        lambda weights: convgrad.compat.convolution_backprop_data(x, weights, x.shape, **CALL),
    ):
        with pytest.raises(SpecError, match=r"got an object of type Conv1d; pass its \.weight(;|$)"):
            call(layer)
        with pytest.raises(SpecError, match=r"got an object of type ReLU(;|$)"):
            call(torch.nn.ReLU())


def test_a_masked_array_is_no_place_for_results():
    out = np.ma.masked_array(np.zeros(EXPECTED.shape, np.float32))
    _refused("input_array", "whose mask would be lost; give its .data, which has none", *_pair(), out=out)
    assert convgrad.convolution(*_pair(), out=out.data, **CALL).any()


def test_memory_that_is_gone():
    x, w = _pair()
    tensor = torch.from_numpy(x).clone()
    tensor.untyped_storage().resize_(0)  # as sharded training does between steps
    _refused("input_array", "whose memory was given back", tensor, w)
    jax = pytest.importorskip("jax")
    array = jax.numpy.asarray(x) + 1
    array.delete()
    _refused("input_array", "that was deleted or donated", array, w)


def _refused(rule, part, *inputs, **more):
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(*inputs, **more, **CALL)
    assert caught.value.rule == rule
    assert part in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of PyTorch's own make_dual
def test_gradients_are_not_lost_without_a_word():
    x, w = map(torch.from_numpy, _pair())
    needs = w.clone().requires_grad_()
    part = "that requires grad; give its .detach(), or call under torch.no_grad()"
    for value in (needs, needs * 1, torch.nn.Parameter(w)):
        _refused("input_grad", part, x, value, out=torch.zeros(2, 4, 5))
        _refused("input_grad", part, x.numpy(), value)
        assert convgrad.convolution(x, value, **CALL).requires_grad
    out = torch.zeros(2, 4, 5, requires_grad=True)
    _refused("input_grad", "give its .detach()", x, w, out=out)
    with torch.no_grad():
        assert convgrad.convolution(x, needs, out=out, **CALL) is out
    assert np.array_equal(out.detach().numpy(), EXPECTED)
    with torch.inference_mode():
        convgrad.convolution(x, needs, **CALL)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        _refused("input_grad", "with a tangent", x.numpy(), dual)
        assert np.array_equal(convgrad.convolution(x, dual.detach(), **CALL).numpy(), EXPECTED)


def test_autograd_notices_what_is_written_to():
    x, w = map(torch.from_numpy, _pair())
    a, out = torch.ones(2, 4, 5, requires_grad=True), torch.ones(2, 4, 5)
    loss = (a * out).sum()  # the gradient of a is what `out` holds now
    convgrad.convolution(x, w, out=out, **CALL)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_written_to_inside_of_it_only():
    x, w = map(torch.from_numpy, _pair())
    with torch.inference_mode():
        out = torch.zeros(2, 4, 5)
        convgrad.convolution(x, w, out=out, **CALL)
    assert np.array_equal(out.numpy(), EXPECTED)
    _refused("out_writable", "made under torch.inference_mode", x, w, out=out)
    assert np.array_equal(convgrad.convolution(x, w, **CALL), EXPECTED)


def test_tensors_of_a_trace_are_refused_where_there_are_others():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w = map(torch.from_numpy, _pair())
    array = w.numpy()
    with FakeTensorMode():
        _refused("input_traced", "torch.export", torch.zeros(2, 3, 5), array)
    for transform in (torch.vmap, torch.func.grad):

        def inside(a):
            part = "inside of torch.vmap, torch.func.grad"
            _refused("input_traced", part, a if a.ndim == 3 else a[None], array)
            return a.sum()

        transform(inside)(x)

    def traced(a):
        _refused("input_traced", "torch.jit.trace", a, w)
        return a

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit itself is deprecated
        torch.jit.trace(traced, x, check_trace=False)


# ---- JAX


def test_jax_arrays_go_in_and_come_out():
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "bfloat16", "float16"):
        x, w = (jax.numpy.asarray(a, dtype) for a in _pair())
        y = convgrad.convolution(x, w, **CALL)
        assert isinstance(y, jax.Array)
        assert y.dtype == x.dtype
        assert np.array_equal(np.asarray(y, np.float32), EXPECTED)


def test_jax_arrays_never_change():
    jax = pytest.importorskip("jax")
    x, w = _pair()
    out = jax.numpy.zeros((2, 4, 5))
    alias = out.reshape(40)
    _refused("out_writable", "an array of JAX, whose arrays are immutable", x, w, out=out)
    assert not alias.any()
    logical = convgrad.graph.LogicalTensor(2, "f32", (2, 4, 5))
    graph = convgrad.graph.Graph()
    tensors = [convgrad.graph.LogicalTensor(i, "f32", a.shape) for i, a in enumerate((x, w))]
    call = {k: [v] if isinstance(v, int) else v for k, v in CALL.items()}
    graph.add_op(convgrad.graph.Op(0, "Convolution", tensors, [logical], **call))
    (step,) = graph.compile().steps
    with pytest.raises(SpecError, match="whose arrays are immutable"):
        step.execute(None, [x, w], [out])
    assert not alias.any()
    (y,) = step.execute(None, [jax.numpy.asarray(x), jax.numpy.asarray(w)])
    assert np.array_equal(y.array, EXPECTED)


def test_jax_tracers_are_told_the_truth():
    jax = pytest.importorskip("jax")
    x, w = map(jax.numpy.asarray, _pair())

    def inside(a):
        part = "call convgrad outside of jit, grad and vmap, or through jax.pure_callback"
        _refused("input_traced", part, a if a.ndim == 3 else a[None], w)
        return a.sum()

    for transform in (jax.jit, jax.grad, jax.vmap):
        transform(inside)(x)
    # What the message suggests does work.
    result = jax.ShapeDtypeStruct(EXPECTED.shape, np.float32)
    y = jax.jit(lambda a, b: jax.pure_callback(lambda p, q: convgrad.convolution(p, q, **CALL), result, a, b))(x, w)
    assert np.array_equal(y, EXPECTED)


def test_jax_tracers_in_a_shape():
    jax = pytest.importorskip("jax")

    def inside(n):
        with pytest.raises(SpecError, match=r"call convgrad outside of jit") as caught:
            convgrad.convolution_backward_data(EXPECTED, _pair()[1], (2, 3, n), **CALL)
        assert (caught.value.rule, caught.value.argument) == ("input_traced", "dst_shape")
        return n

    jax.jit(inside)(5)


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        ((2, 3, 5.0), "got (2, 3, 5.0)"),
        (np.array([2.0, 3, 5]), "got an array of float64 of shape (3,)"),
        (_pair()[0], "got an array of float32 of shape (2, 3, 5); give its shape, not the array"),
    ],
)
def test_what_is_no_shape_is_told(shape, got):
    with pytest.raises(SpecError) as caught:
        convgrad.convolution_backward_data(EXPECTED, _pair()[1], shape, **CALL)
    assert str(caught.value).endswith(got)


def test_owners_that_call_their_memory_read_only():
    class Owner(Exporter):
        @property
        def __array_interface__(self):
            found = dict(self.array.__array_interface__)
            found["data"] = (found["data"][0], True)
            return found

    x, w = _pair()
    out = np.zeros_like(EXPECTED)
    _refused("out_writable", "its owner calls read-only", x, w, out=Owner(out))
    assert not out.any()


# ---- DLPack


@pytest.mark.parametrize("exporter", [Exporter, NewExporter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_library_that_speaks_dlpack(exporter, dtype):
    x, w = (torch.from_numpy(a).to(dtype) for a in _pair())
    x = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert _address(open_array(exporter(x), "src")) == x.data_ptr()
    # An unknown library gets an array of NumPy back.
    y = convgrad.convolution(exporter(x), exporter(w), **CALL)
    assert isinstance(y, np.ndarray)
    assert np.array_equal(y.astype(np.float32), EXPECTED)
    out = torch.zeros(2, 4, 5, dtype=dtype)
    wrapped = exporter(out)
    assert convgrad.convolution(x, w, out=wrapped, **CALL) is wrapped
    assert np.array_equal(out.float().numpy(), EXPECTED)


@pytest.mark.parametrize("exporter", [Exporter, NewExporter])
def test_strides_through_dlpack(exporter):
    x, w = _pair()
    assert np.array_equal(convgrad.convolution(exporter(x[:, :, ::-1]), w[..., ::-1], **CALL), EXPECTED[..., ::-1])
    wide = np.zeros((2, 6, 10), np.float32)
    wide[:, ::2, ::2] = x
    assert np.array_equal(convgrad.convolution(exporter(wide[:, ::2, ::2]), w, **CALL), EXPECTED)
    one = np.broadcast_to(x[:, :, :1], x.shape).copy()
    flat = np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:2], 0))
    expected = convgrad.convolution(one, w, **CALL)
    assert np.array_equal(convgrad.convolution(exporter(flat), w, **CALL), expected)
    empty = convgrad.convolution(exporter(np.zeros((0, 3, 5), np.float32)), w, **CALL)
    assert empty.shape == (0, 4, 5)


def test_a_shape_through_dlpack():
    x, w = _pair()
    for dtype in (np.int32, np.int64, np.uint8):
        shape = Exporter(np.array(x.shape, dtype))
        diff_src = convgrad.convolution_backward_data(EXPECTED, w, shape, **CALL)
        assert diff_src.shape == x.shape


def test_memory_lives_as_long_as_it_is_looked_at():
    owner = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    watch = weakref.ref(owner)
    view = open_array(Exporter(owner), "src")
    del owner
    gc.collect()
    assert watch() is not None
    assert view.sum() == 435
    del view
    gc.collect()
    assert watch() is None


def test_read_only_memory_through_dlpack():
    x, w = _pair()
    x.flags.writeable = False
    assert np.array_equal(convgrad.convolution(NewExporter(x), w, **CALL), EXPECTED)
    y = EXPECTED.copy()
    y.flags.writeable = False
    _refused("out_writable", "got a read-only array; give a writable array", x, w, out=y)
    with pytest.raises(SpecError) as caught:
        convgrad.convolution(x, w, out=NewExporter(y), **CALL)
    assert caught.value.rule == "out_writable"
    # Before DLPack 1.0 there was no way to say it, and a library refuses to export.
    with pytest.raises(SpecError, match="whose export fails") as caught:
        convgrad.convolution(Exporter(x), w, **CALL)
    assert caught.value.rule == "input_array"


def test_what_can_only_be_read_as_a_copy_is_no_place_for_results():
    class Copier(NewExporter):
        def __dlpack__(self, *, max_version=None):
            return self.array.__dlpack__(max_version=max_version, copy=True)

    x, w = _pair()
    assert np.array_equal(convgrad.convolution(Copier(x), w, **CALL), EXPECTED)
    pending = torch._neg_view(torch.from_numpy(-x))
    assert pending.is_neg()
    assert np.array_equal(convgrad.convolution(pending, w, **CALL), EXPECTED)
    for out in (Copier(np.zeros_like(EXPECTED)), torch._neg_view(torch.zeros(EXPECTED.shape))):
        with pytest.raises(SpecError, match="only be read as a copy") as caught:
            convgrad.convolution(x, w, out=out, **CALL)
        assert caught.value.rule == "out_writable"


def test_wrong_exports_are_refused():
    x, w = _pair()

    class Nothing(Exporter):
        def __dlpack__(self):
            return None

    class Fails(Exporter):
        def __dlpack__(self):
            raise RuntimeError("not today")

    class Nowhere(Exporter):
        def __dlpack_device__(self):
            return None

    for value, rule, part in (
        (Exporter(x, device=(2, 0)), "input_device", "(2, 0)"),
        (Nothing(x), "input_array", "NoneType"),
        (Fails(x), "input_array", "not today"),
        (Nowhere(x), "input_array", "export fails"),
        (Exporter(x.astype(np.complex64)), "input_dtype", "DLPack type 5"),
        (Exporter(x.astype(np.int16)), "input_dtype", "int16"),
        (Exporter(np.zeros((2, 3, 5), bool)), "input_dtype", "DLPack type 6"),
    ):
        with pytest.raises(SpecError) as caught:
            convgrad.convolution(value, w, **CALL)
        assert (caught.value.rule, caught.value.argument) == (rule, "src")
        assert part in str(caught.value)


def test_a_library_with_a_namespace_gets_its_own_back():
    class Namespace:
        @staticmethod
        def from_dlpack(array):
            return Wrapped(np.from_dlpack(array))

    class Wrapped(Exporter):
        def __array_namespace__(self):
            return Namespace

    x, w = _pair()
    y = convgrad.convolution(Wrapped(x), Wrapped(w), **CALL)
    assert isinstance(y, Wrapped)
    assert np.array_equal(y.array, EXPECTED)


# ---- NumPy


def test_inputs_that_must_not_be_written_to():
    x, w = _pair()
    x.flags.writeable = w.flags.writeable = False
    assert np.array_equal(convgrad.convolution(x, w, **CALL), EXPECTED)


def test_subclasses_of_arrays(tmp_path):
    x, w = _pair()
    on_disk = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    on_disk[...] = x
    y = convgrad.convolution(on_disk, w, **CALL)
    assert type(y) is np.ndarray
    assert np.array_equal(y, EXPECTED)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_out_may_be_an_input(accumulate, groups, data_format):
    # Large enough that a kernel writes its first rows before it has read the last ones.
    rng = np.random.default_rng(1)
    x = rng.integers(-3, 4, (4, 3, 20, 20) if data_format == "NCX" else (4, 20, 20, 3)).astype(np.float32)
    w = rng.integers(-3, 4, (3, 3 // groups, 3, 3)).astype(np.float32)
    call = {**CALL, "data_format": data_format, "groups": groups}
    plain = convgrad.convolution(x, w, **call)
    same = x.copy()
    assert convgrad.convolution(same, w, out=same, accumulate=accumulate, **call) is same
    assert np.array_equal(same, plain + accumulate * x)
    # Only a part of it: shifted by one image.
    both = np.concatenate([x, np.zeros_like(x[:1])])
    prior = both[1:].copy()
    convgrad.convolution(both[:4], w, out=both[1:], accumulate=accumulate, **call)
    assert np.array_equal(both[1:], plain + accumulate * prior)


def test_accumulating_adds_before_rounding():
    # The sum of both is rounded once: 1 + 2**-8 alone would be 1 in bf16, and 1 + 2**-8 + 2**-8 is 1 + 2**-7.
    x = np.array([[[2**-8]]], ml_dtypes.bfloat16)
    w = np.ones((1, 1, 1), ml_dtypes.bfloat16)
    call = {**CALL, "pads_begin": 0, "pads_end": 0}
    out = np.ones((1, 1, 1), np.float32)
    for _ in range(2):
        convgrad.convolution(x, w, out=out, accumulate=True, **call)
    assert out.item() == 1 + 2**-7


def test_interleaved_arrays_can_be_written():
    # Two tensors in one block of memory: no element shares an address with another, though the ranges cross.
    x, w = _pair()
    block = np.full((2, 2, 4, 5), np.nan, np.float32)
    for part in (0, 1):
        convgrad.convolution(x, w, out=block[:, part], **CALL)
    assert np.array_equal(block[:, 0], EXPECTED)
    assert np.array_equal(block[:, 1], EXPECTED)
    # Strides that cross without meeting: 3a + 4b is never the same twice for a < 4.
    line = np.full(400, np.nan, np.float32)
    out = np.lib.stride_tricks.as_strided(line, (2, 4, 5), (4 * 160, 4 * 3, 4 * 4))
    convgrad.convolution(x, w, out=out, **CALL)
    assert np.array_equal(out, EXPECTED)


# ---- sizes

POINT = dict(strides=1, pads_begin=0, pads_end=0, dilations=1)


def test_huge_sizes_in_the_arithmetic():
    side = 2**31
    inputs = [Description("f32", (1, side, side, 1)), Description("f32", (1, side, side, 1))]
    found = bind(OPS["ConvolutionBackwardWeights"], inputs, {**POINT, "weights_shape": (1, 1, 1, 1)})
    assert found.problem.size("x") == found.problem.size("y") == 2**62
    assert found.problem.x_strides == (0, 0, 0, side, 1)
    assert found.problem.flops == 2 * 2**62
    inputs = [Description("bf16", (2**20, 2**20, 2**19, 4)), Description("bf16", (1, 1, 4, 2))]
    found = bind(OPS["Convolution"], inputs, POINT)
    assert found.shape == (2**20, 2**20, 2**19, 2)
    assert found.problem.y_strides == (2**40, 0, 1, 2**20, 2)
    inputs = [Description("f32", (1, 2**30, 1)), Description("f32", (3, 1, 1))]
    call = dict(strides=2**30, pads_begin=0, pads_end=0, dilations=1, data_format="NXC")
    assert bind(OPS["ConvTranspose"], inputs, call).shape == (1, 2**30 * (2**30 - 1) + 3, 1)


def test_a_result_beyond_memory_is_an_error_of_ours():
    src, weights = np.zeros((1, 4, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    with pytest.raises(
        OutOfMemoryError, match=r"^Convolution: no memory for a result of shape .* in f32, .* PB$"
    ) as caught:
        convgrad.convolution(src, weights, **{**POINT, "pads_end": 2**58})
    assert caught.value.status == "out_of_memory"
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("kind", OPS)
def test_no_images(kind):
    op = OPS[kind]
    sizes = {"x": (0, 2, 6), "w": (4, 2, 3), "y": (0, 4, 4)}
    inputs = [np.ones(sizes[a.role], np.float32) for a in op.inputs if a.role in sizes]
    call = {**CALL, "pads_begin": 0, "pads_end": 0, "weights_format": "IOX" if op.transposed else "OIX"}
    if op.shape_source:
        call[op.shape_source] = sizes[op.wanted]
    result = convgrad.apply(kind, *inputs, **call)
    assert result.shape == sizes[op.wanted]
    assert not result.any()


def test_tensors_that_are_known_again_are_still_looked_at():
    """Calls of plain tensors are remembered; those that look alike but are not plain are opened all the same."""
    x, w = map(torch.from_numpy, _pair())
    for _ in range(3):
        assert np.array_equal(convgrad.convolution(x, w, **CALL).numpy(), EXPECTED)
    negative = torch.conj(torch.complex(torch.zeros_like(x), x)).imag
    assert negative.is_neg()
    for _ in range(3):
        assert np.array_equal(convgrad.convolution(negative, w, **CALL).numpy(), -EXPECTED)
    needs = x.clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert np.array_equal(convgrad.convolution(needs, w, **CALL).numpy(), EXPECTED)
        assert convgrad.convolution(needs, w, **CALL).grad_fn is not None
        _refused("input_device", "a meta tensor has no values", x.to("meta"), w)
    with torch.inference_mode():
        locked = torch.zeros(EXPECTED.shape)
    out = torch.zeros(EXPECTED.shape)
    read_only = np.zeros(EXPECTED.shape, np.float32)
    read_only.flags.writeable = False
    for _ in range(3):
        version = out._version
        assert convgrad.convolution(x, w, out=out, **CALL) is out
        assert out._version == version + 1
        _refused("out_writable", "torch.inference_mode", x, w, out=locked)
        convgrad.convolution(*_pair(), out=np.zeros_like(read_only), **CALL)
        _refused("out_writable", "a read-only array", *_pair(), out=read_only)
    gone = x.clone()
    convgrad.convolution(gone, w, **CALL)
    gone.untyped_storage().resize_(0)
    _refused("input_array", "memory was given back", gone, w)
