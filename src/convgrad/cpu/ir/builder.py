"""A small builder of LLVM IR: a module, its functions, integers, memory, loops and branches.

Numbers that are known stay Python integers and are folded; the rest are names of SSA values. Text is written directly
because that takes a tenth of the time of an object model, and a kernel is read as text anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Value = int | str
"""An i64: a known integer, or the name of a value."""


def float_text(value: float, type_: str) -> str:
    """A floating-point constant as LLVM reads it: the bits of the exact double."""
    if type_ == "float":
        value = struct.unpack("f", struct.pack("f", value))[0]
    return "0x" + struct.pack(">d", value).hex().upper()


def vector(lanes: int, type_: str) -> str:
    """The name of a vector type; one lane is a scalar to everyone but the type system."""
    return f"<{lanes} x {type_}>"


class Module:
    """Functions and constants that become one object file."""

    def __init__(self) -> None:
        self.constants: list[str] = []
        self.declarations: set[str] = set()
        self.metadata: set[str] = set()
        self.functions: list[Function] = []

    def table(self, name: str, values: Sequence[int]) -> str:
        """A constant array of i64. Returns its address."""
        items = ", ".join(f"i64 {v}" for v in values) or "i64 0"
        self.constants.append(
            f"@{name} = private unnamed_addr constant [{max(len(values), 1)} x i64] [{items}], align 64"
        )
        return f"@{name}"

    def function(
        self, name: str, arguments: Sequence[str], *, exported: bool = False, inline: bool = False
    ) -> Function:
        """A new function. Arguments are names with their type before a colon: `p:src`, `i:count`."""
        f = Function(self, name, arguments, exported, inline)
        self.functions.append(f)
        return f

    def __str__(self) -> str:
        parts = [*self.constants, *sorted(self.declarations), *map(str, self.functions), *self.metadata]
        return "\n".join(parts) + "\n"


class Function:
    """One function being written, line by line."""

    def __init__(self, module: Module, name: str, arguments: Sequence[str], exported: bool, inline: bool) -> None:
        self.module = module
        self.name = name
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.count = 0
        self.exported = exported
        self.inline = inline
        self.kinds = ["ptr" if a.startswith("p:") else "i64" for a in arguments]
        self.args: list[str] = [f"%{a[2:]}" for a in arguments]

    def __str__(self) -> str:
        arguments = ", ".join(f"{kind} {name}" for kind, name in zip(self.kinds, self.args, strict=True))
        linkage = "" if self.exported else "internal "
        attributes = "nounwind " + ("alwaysinline" if self.inline else "noinline")
        attributes += ' "prefer-vector-width"="512" "no-builtins" "frame-pointer"="none"'
        body = "\n  ".join([*self.allocas, *self.lines])
        return f"define {linkage}void @{self.name}({arguments}) {attributes} {{\nentry:\n  {body}\n  ret void\n}}"

    # Plumbing.

    def name_value(self) -> str:
        """A fresh SSA name."""
        self.count += 1
        return f"%v{self.count}"

    def do(self, text: str) -> None:
        """Write an instruction without a result."""
        self.lines.append(text)

    def op(self, text: str) -> str:
        """Write an instruction and name its result."""
        name = self.name_value()
        self.lines.append(f"{name} = {text}")
        return name

    def call(self, function: Function, *args: Value) -> None:
        """Call another function of the module."""
        text = ", ".join(f"{kind} {a}" for kind, a in zip(function.kinds, args, strict=True))
        self.do(f"call void @{function.name}({text})")

    def call_either(self, condition: str, first: Function | None, second: Function, *args: Value) -> None:
        """Call one of two functions that take the same arguments; without the first, always the second."""
        if first is None:
            self.call(second, *args)
            return
        branch = self.either(condition)
        self.call(first, *args)
        self.otherwise(branch)
        self.call(second, *args)
        self.join(branch)

    # Integers.

    def add(self, *terms: Value) -> Value:
        """A sum; known terms are added up front."""
        known = sum(t for t in terms if isinstance(t, int))
        names = [t for t in terms if isinstance(t, str)]
        if not names:
            return known
        total = names[0]
        for term in names[1:]:
            total = self.op(f"add nsw i64 {total}, {term}")
        return self.op(f"add nsw i64 {total}, {known}") if known else total

    def sub(self, a: Value, b: Value) -> Value:
        """A difference."""
        if isinstance(b, int):
            return self.add(a, -b)
        return self.op(f"sub nsw i64 {a}, {b}")

    def mul(self, a: Value, b: Value) -> Value:
        """A product."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if isinstance(a, int):
            a, b = b, a
        if b == 0:
            return 0
        return a if b == 1 else self.op(f"mul nsw i64 {a}, {b}")

    def div(self, a: Value, b: int) -> Value:
        """A quotient of a number that is not negative."""
        if isinstance(a, int):
            return a // b
        return a if b == 1 else self.op(f"udiv i64 {a}, {b}")

    def rem(self, a: Value, b: int) -> Value:
        """The remainder of that quotient."""
        if isinstance(a, int):
            return a % b
        return 0 if b == 1 else self.op(f"urem i64 {a}, {b}")

    def split(self, index: Value, sizes: Sequence[int]) -> list[Value]:
        """The digits of an index in mixed radix, the first one outermost."""
        digits: list[Value] = []
        for size in reversed(sizes[1:]):
            digits.append(self.rem(index, size))
            index = self.div(index, size)
        return [index, *reversed(digits)]

    def _pick(self, kind: str, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b) if kind == "smin" else max(a, b)
        self.module.declarations.add(f"declare i64 @llvm.{kind}.i64(i64, i64)")
        return self.op(f"call i64 @llvm.{kind}.i64(i64 {a}, i64 {b})")

    def min(self, a: Value, b: Value) -> Value:
        """The smaller one."""
        return self._pick("smin", a, b)

    def max(self, a: Value, b: Value) -> Value:
        """The larger one."""
        return self._pick("smax", a, b)

    def test(self, relation: str, a: Value, b: Value) -> str:
        """A comparison: eq, ne, slt, sge, ult, ..."""
        return self.op(f"icmp {relation} i64 {a}, {b}")

    def both(self, a: str, b: str) -> str:
        """Whether both conditions hold."""
        return self.op(f"and i1 {a}, {b}")

    def choose(self, condition: str, a: Value, b: Value) -> Value:
        """One of two integers."""
        return self.op(f"select i1 {condition}, i64 {a}, i64 {b}")

    # Memory.

    def at(self, pointer: str, offset: Value, type_: str) -> str:
        """The address so many elements further."""
        if offset == 0:
            return pointer
        return self.op(f"getelementptr {type_}, ptr {pointer}, i64 {offset}")

    def load(self, pointer: str, type_: str, align: int) -> str:
        """A value from memory."""
        return self.op(f"load {type_}, ptr {pointer}, align {align}")

    def store(self, value: Value, pointer: str, type_: str, align: int) -> None:
        """A value to memory."""
        self.do(f"store {type_} {value}, ptr {pointer}, align {align}")

    def stream(self, value: Value, pointer: str, type_: str, align: int) -> None:
        """A value to memory, past the caches. A kernel that does so ends with `settle`."""
        self.module.metadata.add("!0 = !{i32 1}")
        self.do(f"store {type_} {value}, ptr {pointer}, align {align}, !nontemporal !0")

    def prefetch(self, pointer: str, *, near: bool = False) -> None:
        """Prefetch a line of memory into the second-level cache, or the first-level one. The address may be any."""
        self.module.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 {3 if near else 2}, i32 1)")

    def settle(self) -> None:
        """Make what was written past the caches visible to other threads. x86 only."""
        self.module.declarations.add("declare void @llvm.x86.sse.sfence()")
        self.do("call void @llvm.x86.sse.sfence()")

    def aligned(self, pointer: str, bytes_: int) -> str:
        """Whether an address is a multiple of so many bytes, a power of two."""
        return self.test("eq", self.op(f"and i64 {self.op(f'ptrtoint ptr {pointer} to i64')}, {bytes_ - 1}"), 0)

    def variable(self, type_: str, value: Value) -> str:
        """A place on the stack that becomes a register."""
        name = self.name_value()
        self.allocas.append(f"{name} = alloca {type_}")
        self.do(f"store {type_} {value}, ptr {name}")
        return name

    def get(self, variable: str, type_: str) -> str:
        """The value of a variable."""
        return self.op(f"load {type_}, ptr {variable}")

    def set(self, variable: str, type_: str, value: Value) -> None:
        """Change a variable."""
        self.do(f"store {type_} {value}, ptr {variable}")

    # Control.

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[str]:
        """Run the body for start, start + step, ... below stop; not at all if there is none."""
        self.count += 1
        k = self.count
        counter, following, first, more = (self.name_value() for _ in range(4))
        self.do(f"{first} = icmp slt i64 {start}, {stop}")
        self.do(f"br label %pre{k}")
        self.do(f"pre{k}:")
        self.do(f"br i1 {first}, label %body{k}, label %end{k}")
        self.do(f"body{k}:")
        self.do(f"{counter} = phi i64 [ {start}, %pre{k} ], [ {following}, %next{k} ]")
        yield counter
        self.do(f"br label %next{k}")
        self.do(f"next{k}:")
        self.do(f"{following} = add nsw i64 {counter}, {step}")
        self.do(f"{more} = icmp slt i64 {following}, {stop}")
        self.do(f"br i1 {more}, label %body{k}, label %end{k}")
        self.do(f"end{k}:")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Run the body if a condition holds."""
        self.count += 1
        k = self.count
        self.do(f"br i1 {condition}, label %then{k}, label %after{k}")
        self.do(f"then{k}:")
        yield
        self.do(f"br label %after{k}")
        self.do(f"after{k}:")

    def either(self, condition: str) -> tuple[int, str]:
        """Begin a two-way branch: write the first arm, then `otherwise`, the second arm, then `join`."""
        self.count += 1
        k = self.count
        self.do(f"br i1 {condition}, label %then{k}, label %else{k}")
        self.do(f"then{k}:")
        return k, condition

    def otherwise(self, branch: tuple[int, str]) -> None:
        """End the first arm, begin the second."""
        k, _ = branch
        self.do(f"br label %after{k}")
        self.do(f"else{k}:")

    def join(self, branch: tuple[int, str]) -> None:
        """End a two-way branch."""
        k, _ = branch
        self.do(f"br label %after{k}")
        self.do(f"after{k}:")
