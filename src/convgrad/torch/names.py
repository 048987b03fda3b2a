"""Names of arguments that are not quite right: answered with the name that was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ..spec.check import meant

P = ParamSpec("P")
R = TypeVar("R")


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """The function; of a name that it does not know, the error has the nearest one.

    That costs 0.3 us a call, which the functions that compute do not spend.
    """
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            strange = [name for name in kwargs if name not in known]
            hint = nearest(strange[0], known) if strange and "unexpected keyword argument" in str(error) else ""
            raise (TypeError(f"{error}; {hint}") if hint else error) from None

    return called


def nearest(name: str, known: list[str]) -> str:
    """A hint at a name that is spelled alike, or of which this is the beginning."""
    longer = [word for word in known if word.startswith(name)]
    return f"did you mean {longer[0]!r}?" if len(longer) == 1 else meant(name, known)
