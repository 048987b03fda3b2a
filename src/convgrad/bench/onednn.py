"""Real oneDNN Graph on NumPy arrays, through its C API (wheel onednn-cpu-gomp).

    run("ConvolutionBackwardData", attrs, [diff_dst, weights], diff_src_shape)

Attributes have oneDNN's names and types: an int for a scalar, a sequence of ints for a list, a string. Nothing is
checked or completed here, so that a refusal is oneDNN's own, an `OneDNNError`. oneDNN 3.2 does not refuse everything:
sizes that contradict each other (a diff_src that strides and padding do not lead to) end the process, by an exception
that its C API lets through. Give it problems that `convgrad.spec.bind` has accepted, or run it in a process apart.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..dtypes import Array

KINDS = {
    "Convolution": 13,
    "ConvolutionBackwardData": 14,
    "ConvolutionBackwardWeights": 15,
    "ConvTranspose": 16,
    "ConvTransposeBackwardData": 17,
    "ConvTransposeBackwardWeights": 18,
}
STATUSES = (
    "success",
    "out_of_memory",
    "invalid_arguments",
    "unimplemented",
    "last_impl_reached",
    "runtime_error",
    "not_required",
    "invalid_graph",
    "invalid_graph_op",
    "invalid_shape",
    "invalid_data_type",
)
_ATTRIBUTES = {
    "groups": 0x32,
    "dilations": 0x41,
    "dst_shape": 0x42,
    "output_padding": 0x45,
    "pads_begin": 0x46,
    "pads_end": 0x47,
    "strides": 0x4B,
    "weights_shape": 0x4C,
    "auto_pad": 0x81,
    "data_format": 0x83,
    "weights_format": 0x87,
}
_DTYPES = {
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.float32): 3,
    np.dtype(np.int32): 4,
}
_CPU = 1  # dnnl_cpu
_IN_ORDER = 1  # dnnl_stream_in_order
_FUSION = 1  # dnnl_graph_partition_policy_fusion
_FP16_ISA = 0x100  # The bit of dnnl_cpu_isa_t for native f16 arithmetic.
_MAX_NDIMS = 12


class OneDNNError(RuntimeError):
    """A refusal of oneDNN's. `status` is its name, `step` the call that returned it."""

    def __init__(self, step: str, status: str, detail: str = "") -> None:
        super().__init__(f"oneDNN: {step}: {status}{f' ({detail})' if detail else ''}")
        self.step = step
        self.status = status


class _LogicalTensor(ctypes.Structure):
    """dnnl_graph_logical_tensor_t."""

    _fields_ = [
        ("id", ctypes.c_size_t),
        ("ndims", ctypes.c_int),
        ("dims", ctypes.c_int64 * _MAX_NDIMS),
        ("data_type", ctypes.c_int),
        ("property", ctypes.c_int),
        ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * _MAX_NDIMS),
    ]


class _Version(ctypes.Structure):
    """The head of dnnl_version_t."""

    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int)]


class _Library:
    """The loaded library and its one CPU engine. Both live as long as the process."""

    def __init__(self) -> None:
        path = _find()
        if path is None:
            raise OSError("libdnnl.so is not installed; pip install onednn-cpu-gomp (Linux on x86-64)")
        self.lib = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
        self.engine = ctypes.c_void_p()
        self.call("dnnl_engine_create", ctypes.byref(self.engine), _CPU, ctypes.c_size_t(0))

    def call(self, function: str, *args: Any, detail: str = "") -> None:
        """Call a function that returns a status."""
        status = getattr(self.lib, function)(*args)
        if status:
            raise OneDNNError(function, STATUSES[status] if status < len(STATUSES) else str(status), detail)

    @contextmanager
    def made(self, thing: str, *args: Any, detail: str = "") -> Iterator[ctypes.c_void_p]:
        """An object that is destroyed at the end of the block."""
        handle = ctypes.c_void_p()
        self.call(f"{thing}_create", ctypes.byref(handle), *args, detail=detail)
        try:
            yield handle
        finally:
            self.call(f"{thing}_destroy", handle)


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


def _find() -> Path | None:
    """Where the wheel has put its library: it lies outside of site-packages."""
    try:
        files = metadata.files("onednn-cpu-gomp") or []
    except metadata.PackageNotFoundError:
        files = []
    listed = [Path(str(f.locate())) for f in files if f.name.startswith("libdnnl.so")]
    for path in [*listed, *sorted(Path(sys.prefix, "lib").glob("libdnnl.so*"))]:
        if path.is_file():
            return path.resolve()
    return None


def available() -> str | None:
    """Why oneDNN cannot be used here, or None if it can."""
    try:
        _library()
    except (OSError, OneDNNError) as error:
        return str(error)
    return None


def version() -> str:
    """The version of the loaded library, as in "3.2.0"."""
    function = _library().lib.dnnl_version
    function.restype = ctypes.POINTER(_Version)
    found = function().contents
    return f"{found.major}.{found.minor}.{found.patch}"


def set_threads(count: int) -> None:
    """Let oneDNN use that many threads in calls from this Python thread, for everything compiled from now on."""
    if count < 1:
        raise ValueError(f"oneDNN needs at least 1 thread, got {count}")
    _library().lib.omp_set_num_threads(count)


def get_threads() -> int:
    """How many threads oneDNN uses in calls from this Python thread."""
    return int(_library().lib.omp_get_max_threads())


class Compiled:
    """One operation, compiled for given arrays. Calling it reads `inputs` and writes `out`.

    The arrays are held, not copied: change their values between calls to compute on others.
    """

    def __init__(self, kind: str, attrs: Mapping[str, Any], inputs: Sequence[Array], out: Array) -> None:
        library = _library()
        self.inputs, self.out = tuple(inputs), out
        self._library = library
        arrays = (*self.inputs, out)
        if any(a.dtype == np.float16 for a in arrays) and not library.lib.dnnl_get_effective_cpu_isa() & _FP16_ISA:
            # The library would end the process: the exception that says so is caught by nobody.
            raise OneDNNError("f16", "unimplemented", "this CPU has no native f16 arithmetic")
        tensors = [_describe(library, number, array) for number, array in enumerate(arrays)]
        with ExitStack() as kept:
            partition = _compile(library, kept, kind, attrs, tensors)
            handles = [
                kept.enter_context(
                    library.made(
                        "dnnl_graph_tensor", ctypes.byref(t), library.engine, ctypes.c_void_p(array.ctypes.data)
                    )
                )
                for t, array in zip(tensors, arrays, strict=True)
            ]
            # A stream of its own, so that two compiled operations can run in two Python threads.
            self._stream = kept.enter_context(library.made("dnnl_stream", library.engine, _IN_ORDER))
            self._args = (
                partition,
                self._stream,
                ctypes.c_size_t(len(self.inputs)),
                (ctypes.c_void_p * len(self.inputs))(*(h.value for h in handles[:-1])),
                ctypes.c_size_t(1),
                (ctypes.c_void_p * 1)(handles[-1].value),
            )
            # What the block has made is destroyed with this object instead of with the block.
            weakref.finalize(self, kept.pop_all().close)

    def __call__(self) -> Array:
        """Compute, and return `out`."""
        self._library.call("dnnl_graph_compiled_partition_execute", *self._args)
        self._library.call("dnnl_stream_wait", self._stream)
        return self.out


def run(kind: str, attrs: Mapping[str, Any], inputs: Sequence[Array], out_shape: Sequence[int]) -> Array:
    """Compute one operation. The result has the element type of the inputs."""
    return Compiled(kind, attrs, inputs, np.empty(tuple(out_shape), inputs[0].dtype))()


def _describe(library: _Library, number: int, array: Array) -> _LogicalTensor:
    """A logical tensor with the array's own strides."""
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise OneDNNError("logical tensor", "invalid_data_type", str(array.dtype))
    tensor = _LogicalTensor()
    library.call(
        "dnnl_graph_logical_tensor_init_with_strides",
        ctypes.byref(tensor),
        ctypes.c_size_t(number),
        dtype,
        array.ndim,
        (ctypes.c_int64 * array.ndim)(*array.shape),
        (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides)),
        0,
        detail=f"shape {array.shape}",
    )
    return tensor


def _compile(
    library: _Library, kept: ExitStack, kind: str, attrs: Mapping[str, Any], tensors: Sequence[_LogicalTensor]
) -> ctypes.c_void_p:
    """A graph of one operation, compiled. Only the compiled partition outlives the call, in `kept`."""
    if kind not in KINDS:
        raise OneDNNError(kind, "invalid_graph_op", f"known are {', '.join(KINDS)}")
    *inputs, output = tensors
    with (
        library.made("dnnl_graph_op", ctypes.c_size_t(0), KINDS[kind], kind.encode()) as op,
        library.made("dnnl_graph_graph", _CPU) as graph,
    ):
        for name, value in attrs.items():
            _set_attribute(library, op, name, value)
        for tensor in inputs:
            library.call("dnnl_graph_op_add_input", op, ctypes.byref(tensor))
        library.call("dnnl_graph_op_add_output", op, ctypes.byref(output))
        library.call("dnnl_graph_add_op", graph, op, detail=kind)
        library.call("dnnl_graph_graph_finalize", graph)
        library.call("dnnl_graph_graph_filter", graph, _FUSION)
        count = ctypes.c_size_t()
        library.call("dnnl_graph_graph_get_partition_num", graph, ctypes.byref(count))
        if count.value != 1:
            raise OneDNNError("dnnl_graph_graph_get_partition_num", "unimplemented", f"{count.value} partitions")
        with _partition(library, graph, count) as partition:
            supported = ctypes.c_uint8()
            library.call("dnnl_graph_partition_is_supported", partition, ctypes.byref(supported))
            if not supported.value:
                raise OneDNNError("dnnl_graph_partition_is_supported", "unimplemented", kind)
            compiled = kept.enter_context(library.made("dnnl_graph_compiled_partition", partition))
            library.call(
                "dnnl_graph_partition_compile",
                partition,
                compiled,
                ctypes.c_size_t(len(inputs)),
                _pointers(inputs),
                ctypes.c_size_t(1),
                _pointers([output]),
                library.engine,
                detail=kind,
            )
            return compiled


@contextmanager
def _partition(library: _Library, graph: ctypes.c_void_p, count: ctypes.c_size_t) -> Iterator[ctypes.c_void_p]:
    """The one partition of a graph."""
    partition = ctypes.c_void_p()
    library.call("dnnl_graph_graph_get_partitions", graph, count, ctypes.byref(partition))
    try:
        yield partition
    finally:
        library.call("dnnl_graph_partition_destroy", partition)


def _pointers(tensors: Sequence[_LogicalTensor]) -> ctypes.Array[Any]:
    kind: Callable[..., ctypes.Array[Any]] = ctypes.POINTER(_LogicalTensor) * len(tensors)
    return kind(*(ctypes.pointer(t) for t in tensors))


def _set_attribute(library: _Library, op: ctypes.c_void_p, name: str, value: Any) -> None:
    key = _ATTRIBUTES.get(name)
    if key is None:
        raise OneDNNError(name, "invalid_graph_op", "no attribute of this family")
    if isinstance(value, str):
        text = value.encode()
        library.call("dnnl_graph_op_set_attr_str", op, key, text, ctypes.c_size_t(len(text)), detail=name)
        return
    numbers = [int(v) for v in (value if isinstance(value, Sequence) else [value])]
    array = (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
    library.call("dnnl_graph_op_set_attr_s64", op, key, array, ctypes.c_size_t(len(numbers)), detail=name)
