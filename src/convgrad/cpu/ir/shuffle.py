"""Shuffles: lanes of two vectors interleaved, and squares of vectors transposed.

A transpose goes by pieces, which are the elements of 16 bytes: shuffles within 16 bytes are quick.
"""

from __future__ import annotations

from .builder import Function, vector
from .vectors import size_of


def shuffle(f: Function, kind: str, a: str, b: str, order: list[int]) -> str:
    """Lanes of two vectors in a given order."""
    picks = ", ".join(f"i32 {i}" for i in order)
    return f.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(order)} x i32> <{picks}>")


def interleave(f: Function, kind: str, lanes: int, a: str, b: str) -> str:
    """The lanes of two vectors alternately, in one vector of twice the length."""
    return shuffle(f, kind, a, b, [i // 2 + lanes * (i % 2) for i in range(2 * lanes)])


def transpose(f: Function, rows: list[str], lanes: int, type_: str) -> list[str]:
    """Transpose rows: for each element of a row, the vector that holds this element of every row.

    A row has as many elements as there are vectors, a power of two. Where vectors have more lanes than that, each holds
    several rows, one after another; `row_order` says which.
    """
    kind, many = vector(lanes, type_), len(rows)
    size = piece(many, type_)
    # First within pieces; then groups of vectors, whose blocks have the same elements, exchange pieces two by two.
    groups = [[_interleaved(f, rows[i : i + size], lanes, type_)] for i in range(0, many, size)]
    part = many
    while len(groups) > 1:
        halves = [[i for i in range(2 * lanes) if i % part // (part // 2) == half] for half in range(2)]
        groups = [
            [[shuffle(f, kind, *two, order) for two in zip(*both, strict=True)] for both in pairs for order in halves]
            for pairs in (list(zip(a, b, strict=True)) for a, b in zip(groups[::2], groups[1::2], strict=True))
        ]
        part //= 2
    return [column for block in groups[0] for column in block]


def row_order(many: int, parts: int, type_: str) -> list[list[int]]:
    """The rows that each vector given to `transpose` holds: `many` vectors, of `parts` rows each."""
    size = piece(many, type_)
    return [[(i // size * parts + part) * size + i % size for part in range(parts)] for i in range(many)]


def piece(lanes: int, type_: str) -> int:
    """Elements of a piece: 16 bytes of them."""
    return min(16 // size_of(type_), lanes)


def transpose_pieces(f: Function, rows: list[str], type_: str) -> list[str]:
    """Transpose one piece of each row: for each element of a piece, the vector that holds it of every row.

    There are a power of two rows. For a square in memory this is quicker than `transpose`: loads put the pieces in
    their places already, and half of the shuffles remain.
    """
    lanes = len(rows)
    size = piece(lanes, type_)
    # Pieces of rows that are `size` apart come to lie in one vector.
    columns = [rows[i::size] for i in range(size)]
    width = size
    while width < lanes:
        kind, order = vector(width, type_), list(range(2 * width))
        columns = [[shuffle(f, kind, a, b, order) for a, b in zip(c[::2], c[1::2], strict=True)] for c in columns]
        width *= 2
    return _interleaved(f, [column[0] for column in columns], lanes, type_)


def _interleaved(f: Function, rows: list[str], lanes: int, type_: str) -> list[str]:
    """Transpose within pieces of as many elements as there are rows: interleave one half of the rows with the other,
    once for each time that their number can be halved.
    """
    kind, size = vector(lanes, type_), len(rows)
    low = [at + i // 2 + lanes * (i % 2) for at in range(0, lanes, size) for i in range(size)]
    high = [i + size // 2 for i in low]
    for _ in range(size.bit_length() - 1):
        pairs = list(zip(rows[: size // 2], rows[size // 2 :], strict=True))
        rows = [shuffle(f, kind, a, b, order) for a, b in pairs for order in (low, high)]
    return rows
