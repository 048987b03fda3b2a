"""Doubtful layouts: what to tell a caller who named the order of the data axes, but not that of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from .spec.bind import Binding
from .spec.dialects import Meaning


def is_doubtful(binding: Binding) -> bool:
    """Whether the default format of the weights may not be what was meant: other axes than in the data come first, or
    the kernel is not square.
    """
    return not binding.layout.agrees(binding.op) or len(set(binding.problem.w)) > 1


def advice(meaning: Meaning, binding: Binding, others: Sequence[Binding]) -> str:
    """What to tell about a format of weights that nobody asked for, or nothing.

    The text is the same for all shapes: a place in a program is warned of once.
    """
    op, layout = meaning.op, binding.layout
    attr = op.attr("weights_format")
    assert attr is not None
    told = {choice: f"{choice}, {text}" for choice, text in attr.choices.items()}
    text = f"weights_format was not given and defaults to {told[layout.weights]}, "
    if layout.agrees(op):
        meant = [other for other in others if len(set(other.problem.w)) == 1 < other.problem.w[0]]
        if not meant:
            return ""
        text += "so the kernel is not square. "
    else:
        meant = [other for other in others if other.layout.agrees(op)]
        order = "first" if layout.axes(op, "x").endswith("k") else "last"
        text += f"although data_format={layout.data!r} puts the channels {order}. "
    if meant:
        format = meant[0].layout.weights
        text += f"The shape of weights fits {told[format]}, too. Pass weights_format={format!r} if you mean that, or "
        text += f"weights_format={layout.weights!r} to keep the default without this warning."
    else:
        text += f"The shapes suggest that this is meant. Pass weights_format={layout.weights!r} to say so."
    return f"{meaning.name}: {meaning.tell(text)}"
