"""What convgrad raises and warns of: one family of errors, each with oneDNN's status name, and one warning."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TypeVar

E = TypeVar("E", bound="ConvgradError")


class ConvgradError(Exception):
    """The root of every exception that convgrad raises on purpose.

    `status` is the name that oneDNN gives to the failure (`invalid_shape`, `unimplemented`, ...).
    """

    status = "runtime_error"

    def within(self: E, operation: str) -> E:
        """The same error with the name of an operation in front."""
        return type(self)(f"{operation}: {self}")


class SpecError(ConvgradError, ValueError):
    """A call that the specification forbids: who, what, rule, got.

    `operation` is the name of the operation, `argument` the input or attribute at fault, `rule` the key of the broken
    rule in `convgrad.spec.RULES`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: str = "invalid_arguments",
        rule: str = "",
        argument: str = "",
        operation: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.rule = rule
        self.argument = argument
        self.operation = operation

    def __str__(self) -> str:
        return f"{self.operation}: {self.message}" if self.operation else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.status, self.rule, self.argument, self.operation))


def _rebuild(kind: type[SpecError], message: str, status: str, rule: str, argument: str, operation: str) -> SpecError:
    """Make a pickled error again; an error must survive the way back from a worker process."""
    return kind(message, status=status, rule=rule, argument=argument, operation=operation)


class UnsupportedError(ConvgradError):
    """A valid problem that no back end here can run."""

    status = "unimplemented"


class OutOfMemoryError(ConvgradError, MemoryError):
    """Tensors that this machine has no memory for; raised before any of it is taken."""

    status = "out_of_memory"


class CompileError(ConvgradError):
    """convgrad's own fault: generated code that did not compile or load. Please report it."""

    status = "runtime_error"


class LayoutWarning(UserWarning):
    """A function was told the order of the data axes but not that of the weights, and the two defaults do not match."""


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line that called convgrad."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


_HERE = os.path.dirname(__file__) + os.sep
