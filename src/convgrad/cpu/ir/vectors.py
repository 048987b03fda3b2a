"""Vectors of LLVM: constants, one value in every lane, and the arithmetic that has no instruction of its own."""

from __future__ import annotations

from ...dtypes import DTYPES
from ..target import LINE
from .builder import Function, Value, vector

_SIZES = {"float": 4, "double": 8, "i16": 2, "bfloat": 2}


def sum_type(dtype: str) -> str:
    """The type in which products of an element type are summed."""
    return "float" if DTYPES[dtype].accumulator.itemsize == 4 else "double"


def size_of(type_: str) -> int:
    """Bytes of an element in a buffer."""
    return _SIZES[type_]


def align_of(lanes: int, type_: str) -> int:
    """What addresses of vectors in our own buffers, which begin with a cache line, are multiples of."""
    size = lanes * size_of(type_)
    return min(LINE, size & -size)


def same(lanes: int, value: int) -> str:
    """A constant vector of one i32."""
    return "<" + ", ".join([f"i32 {value}"] * lanes) + ">"


def splat_constant(lanes: int, type_: str, value: str) -> str:
    """A constant vector of one value."""
    return "<" + ", ".join([f"{type_} {value}"] * lanes) + ">"


def splat(f: Function, lanes: int, type_: str, value: Value) -> str:
    """A vector with one value in every lane."""
    if isinstance(value, int):
        return splat_constant(lanes, type_, str(value))
    kind = vector(lanes, type_)
    first = f.op(f"insertelement {kind} poison, {type_} {value}, i32 0")
    return f.op(f"shufflevector {kind} {first}, {kind} poison, <{lanes} x i32> zeroinitializer")


def fma(f: Function, a: str, b: str, c: str, lanes: int, type_: str) -> str:
    """a * b + c, with one rounding where the machine has it."""
    kind, name = vector(lanes, type_), f"llvm.fmuladd.{mangled(lanes, type_)}"
    f.module.declarations.add(f"declare {kind} @{name}({kind}, {kind}, {kind})")
    return f.op(f"call {kind} @{name}({kind} {a}, {kind} {b}, {kind} {c})")


def any_lane(f: Function, lanes: int, bits: str) -> str:
    """Whether one bit of a vector is set."""
    kind, name = vector(lanes, "i1"), f"llvm.vector.reduce.or.v{lanes}i1"
    f.module.declarations.add(f"declare i1 @{name}({kind})")
    return f.op(f"call i1 @{name}({kind} {bits})")


def mangled(lanes: int, type_: str) -> str:
    """How the names of LLVM's functions end that take such a vector."""
    return f"v{lanes}" + {"float": "f32", "double": "f64"}.get(type_, type_)
