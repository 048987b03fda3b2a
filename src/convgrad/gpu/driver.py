"""The CUDA driver, as far as kernels need it to be loaded and launched, by ctypes.

What Triton compiles can be launched without Triton: its own launchers read all arguments anew in each call, and to
import it takes longer than a first result may. Here the arguments of a launch are laid out once, for addresses.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .plan.records import Descriptor

MAP = 128  # bytes of a tensor map, which lies at a multiple of 64
WARP = 32
NO_CONTEXT = 201  # the error where a thread has not used the device yet

_SHARED = 8  # the attribute of a function for how much shared memory it may be given
_PLENTY = 48 << 10  # what it may be given without
_EARLY = 6  # the attribute of a launch which says that it may begin before the one before it ends
_FETCHED = 2  # a tensor map has 128 bytes fetched into the second cache


class _Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_int), ("rest", ctypes.c_int), ("value", ctypes.c_int), ("room", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Map(NamedTuple):
    """What the compiler made of a descriptor."""

    kind: int  # of the elements, as the driver numbers them
    item: int  # bytes of an element
    block: tuple[int, ...]
    swizzle: int  # as the driver numbers them


class Shape(NamedTuple):
    """What a launch is like, but for its arguments."""

    programs: int
    warps: int
    shared: int  # bytes
    early: bool


Launched = tuple[Callable[..., int], tuple[Any, ...]]
"""What launches a kernel, and all that it is given; it returns 0, or an error."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver; an OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise an error of the driver's."""
    if status:
        raise RuntimeError(f"{what}: {told(status)}")


def told(status: int) -> str:
    """An error in the driver's words."""
    text = ctypes.c_char_p()
    library().cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error {status}, {(text.value or b'unknown').decode()}"


def enter(index: int) -> None:
    """See to it that this thread can use a device, which PyTorch may not have used in it yet."""
    driver, context, device = library(), ctypes.c_void_p(), ctypes.c_int()
    check(driver.cuCtxGetCurrent(ctypes.byref(context)), "no context is known")
    if not context.value:
        check(driver.cuDeviceGet(ctypes.byref(device), index), f"there is no device {index}")
        check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"device {index} has no context")
        check(driver.cuCtxSetCurrent(context), f"the context of device {index} was not entered")


def load(code: bytes, name: str, shared: int) -> int:
    """A kernel of a module, on the device that is current; it stays there."""
    driver, module, function = library(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), code), "the module was not loaded")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"{name} is not in the module")
    if shared > _PLENTY:
        check(driver.cuFuncSetAttribute(function, _SHARED, shared), f"{shared} bytes of shared memory")
    return function.value or 0


def launch(function: int, shape: Shape, stream: int, arguments: Sequence[int | ctypes.Array[Any]]) -> Launched:
    """A launch with arguments: addresses and whole numbers, and tensor maps. They stay in memory as long as it does."""
    # A parameter is a pointer to its value. Numbers of 32 bits are the first half of 64, in the order of bytes here.
    numbers = [0 if isinstance(value, ctypes.Array) else value for value in arguments]
    values = (ctypes.c_int64 * len(numbers))(*[_signed(number) for number in numbers])
    begin = ctypes.addressof(values)
    places = [
        ctypes.addressof(value) if isinstance(value, ctypes.Array) else begin + 8 * at
        for at, value in enumerate(arguments)
    ]
    parameters: Any = (ctypes.c_void_p * len(places))(*places)
    config = _Config((shape.programs, 1, 1), (WARP * shape.warps, 1, 1), shape.shared, stream, None, 0)
    if shape.early:
        config.attributes, config.count = ctypes.pointer(_Attribute(_EARLY, 0, 1)), 1
    parameters.kept = (values, *arguments)  # by what is handed over
    return library().cuLaunchKernelEx, (ctypes.byref(config), ctypes.c_void_p(function), parameters, None)


def _signed(number: int) -> int:
    """An address or a number as 64 bits with a sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def encode(descriptor: Descriptor, made: Map, address: int) -> ctypes.Array[Any]:
    """A map of the tensor that a descriptor sees from an address on."""
    room = (ctypes.c_char * (MAP + 64))()
    begin = -ctypes.addressof(room) % 64
    found: Any = (ctypes.c_char * MAP).from_buffer(room, begin)
    steps = descriptor.steps or (1,) * len(descriptor.shape)
    box = [side * step for side, step in zip(made.block, steps, strict=True)]
    status = library().cuTensorMapEncodeTiled(
        found,
        made.kind,
        ctypes.c_uint32(len(descriptor.shape)),
        ctypes.c_void_p(address),
        _many(ctypes.c_uint64, descriptor.shape),
        _many(ctypes.c_uint64, [made.item * stride for stride in descriptor.strides[:-1]]),
        _many(ctypes.c_uint32, box),
        _many(ctypes.c_uint32, steps),
        0,  # channels are not interleaved
        made.swizzle,
        _FETCHED,
        0,  # zeros outside
    )
    check(status, f"a tensor of shape {descriptor.shape} and strides {descriptor.strides} has no map")
    return found  # type: ignore[no-any-return]


def _many(kind: Any, values: Sequence[int]) -> Any:
    """Values of the driver's, which counts axes from the innermost one."""
    return (kind * len(values))(*reversed(values))
