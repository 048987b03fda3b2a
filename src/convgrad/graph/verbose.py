"""Log lines with oneDNN's fields, through the standard `logging` module.

Loggers: `convgrad.graph.compile`, `convgrad.graph.exec` and `convgrad.graph.check`, all below `convgrad.graph`. The
variable ONEDNN_VERBOSE (or DNNL_VERBOSE), read when convgrad.graph is imported, prints what oneDNN would print::

    ONEDNN_VERBOSE=profile_exec    executions      ONEDNN_VERBOSE=profile_create   compilations
    ONEDNN_VERBOSE=profile (1, 2)  both            ONEDNN_VERBOSE=check, all       mistakes, everything
    ONEDNN_VERBOSE=all,filter=graph
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .logical import LogicalTensor

if TYPE_CHECKING:
    from .ops import Node

PREFIX = "onednn_verbose,v1,"
ROOT = logging.getLogger("convgrad.graph")
COMPILE = logging.getLogger("convgrad.graph.compile")
EXEC = logging.getLogger("convgrad.graph.exec")
CHECK = logging.getLogger("convgrad.graph.check")
_MODES = {
    "profile": (COMPILE, EXEC),
    "profile_create": (COMPILE,),
    "profile_exec": (EXEC,),
    "check": (CHECK,),
    "all": (COMPILE, EXEC, CHECK),
    "1": (EXEC,),
    "2": (COMPILE, EXEC),
    "none": (),
    "0": (),
}


def describe(
    partition: int,
    nodes: Sequence[Node],
    inputs: Iterable[LogicalTensor],
    outputs: Iterable[LogicalTensor],
    fpmath: str,
) -> str:
    """The fields that compile and exec lines share, from the partition's number to the mode of arithmetic."""
    formats = ""
    for key, word in (("data_format", "data"), ("weights_format", "filter")):
        found = [str(node.attrs[key]) for node in nodes if key in node.attrs]
        formats += f"{word}:{found[0]} " if found else ""
    tensors = [f"in{i}_{_tensor(t)}" for i, t in enumerate(inputs)]
    tensors += [f"out{i}_{_tensor(t)}" for i, t in enumerate(outputs)]
    names = ";".join(node.name for node in nodes)
    return f"{partition},misc_post_ops,{names},{formats},{' '.join(tensors)},fpm:{fpmath}"


def _tensor(t: LogicalTensor) -> str:
    shape = "" if t.shape is None else "x".join(str(n) if n >= 0 else "unknown" for n in t.shape)
    strides = "" if t.strides is None else "s".join(map(str, t.strides))
    return f"{t.dtype}:{t.id}:{t.layout_type}:{t.property_type}:{shape}:{strides}"


def profile(logger: logging.Logger, what: str, fields: str, seconds: float) -> None:
    """Write the line of one compilation or execution."""
    logger.info("%sgraph,%s,cpu,%s,scratchpad:0,convgrad,convgrad_backend,%.6g", PREFIX, what, fields, seconds * 1e3)


def set_up(environment: Mapping[str, str]) -> None:
    """Print the lines that the variables ask for. Words that are not known are ignored, as oneDNN does."""
    value = environment.get("ONEDNN_VERBOSE", environment.get("DNNL_VERBOSE", ""))
    wanted: set[logging.Logger] = set()
    for word in filter(None, value.split(",")):
        if word.startswith("filter="):
            try:
                if not re.search(word.removeprefix("filter="), "graph"):
                    return
            except re.error:
                return
        wanted |= set(_MODES.get(word, ()))
    if wanted:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        ROOT.addHandler(handler)
        for logger in wanted:
            logger.setLevel(logging.INFO)


set_up(os.environ)
