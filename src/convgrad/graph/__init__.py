"""oneDNN Graph's objects in Python: logical tensors, operations, graphs, partitions, and what runs them.

    graph = Graph()
    graph.add_op(Op(0, "Convolution", [src, weights], [dst], strides=[1, 1], ...))
    graph.finalize()
    for partition in graph.get_partitions():
        compiled = partition.compile(inputs, outputs, engine)
        compiled.execute(stream, tensors, results)

or, in one go, `graph.compile().execute(None, {0: array, 1: array})`. Files: `load`, `from_json`, `Graph.to_json`.
"""

from typing import TYPE_CHECKING, Any

from ..spec.table import BIAS_OPS
from .compiled import (
    CompiledPartition,
    get_compiled_partition_cache_capacity,
    get_constant_tensor_cache_capacity,
    set_compiled_partition_cache_capacity,
    set_constant_tensor_cache_capacity,
)
from .graphs import CompiledGraph, Graph, Partition
from .kinds import DataType, EngineKind, FpMathMode, LayoutType, Policy, PropertyType, Status
from .logical import SIZE_MAX, UNKNOWN_DIM, LogicalTensor
from .memory import Engine, Stream, Tensor
from .ops import Op
from .writer import set_dump_mode

if TYPE_CHECKING:
    from .reader import Document as Document
    from .reader import from_json as from_json
    from .reader import load as load
    from .reader import read as read
    from .reader import read_file as read_file

_READER = ("Document", "from_json", "load", "read", "read_file")


def __getattr__(name: str) -> Any:
    """Reading files needs an extra package, which building graphs does not: the reader is imported when it is used."""
    if name in _READER:
        from . import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BIAS_OPS",
    "SIZE_MAX",
    "UNKNOWN_DIM",
    "CompiledGraph",
    "CompiledPartition",
    "DataType",
    "Engine",
    "EngineKind",
    "FpMathMode",
    "Graph",
    "LayoutType",
    "LogicalTensor",
    "Op",
    "Partition",
    "Policy",
    "PropertyType",
    "Status",
    "Stream",
    "Tensor",
    "get_compiled_partition_cache_capacity",
    "get_constant_tensor_cache_capacity",
    "set_compiled_partition_cache_capacity",
    "set_constant_tensor_cache_capacity",
    "set_dump_mode",
]
