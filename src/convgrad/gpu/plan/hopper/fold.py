"""Windows without padding, read as if they were channels: pixels of a window lie side by side, channels and all.

Layers of patches have few channels and large strides: their windows, of 16 by 16 pixels say, make 16 rows of 16 times
as many channels, which are the positions of another axis. Only strides change, which may overlap; nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace

from ....spec.problem import Ints, Problem, extent, settle


def folded(p: Problem) -> Problem | None:
    """The same problem with the pixels of a window as channels, and its rows as planes; None if they cannot be."""
    if p.wanted != "y" or p.g > 1 or p.rank > 2 or any(p.pad) or max(p.w) == 1:
        return None
    axes = zip(p.x, p.y, p.w, p.stride, p.dilation, strict=True)
    inside = all((y - 1) * s + extent(k, d) <= x for x, y, k, s, d in axes)
    x_pixel, w_pixel = p.x_strides[-1], p.w_strides[-1]
    x_channel = p.x_strides[2] if p.cx > 1 else x_pixel
    w_channel = p.w_strides[2] if p.cx > 1 else w_pixel
    beside = p.w[-1] == 1 or (p.dilation[-1] == 1 and x_pixel == p.cx and w_pixel == p.cx * w_channel)
    if not inside or x_channel != 1 or not beside:
        return None

    def rows(*values: int) -> Ints:
        return values if p.rank == 2 else ()

    size = 2 * p.rank - 1
    changed = replace(
        p,
        cx=p.w[-1] * p.cx,
        x=(*rows(p.w[0], p.y[0]), p.y[-1]),
        w=(*rows(p.w[0], 1), 1),
        y=(*rows(1, p.y[0]), p.y[-1]),
        stride=(1,) * size,
        dilation=(1,) * size,
        pad=(0,) * size,
    )
    over = p.x_strides[3]
    x = (*p.x_strides[:2], 1, *rows(p.dilation[0] * over, p.stride[0] * over), p.stride[-1] * x_pixel)
    w = (*p.w_strides[:2], w_channel, *rows(p.w_strides[3], 0), 0)
    y = (*p.y_strides[:3], *rows(0, p.y_strides[3]), p.y_strides[-1])
    return replace(
        changed,
        x_strides=settle(changed.shape("x"), x),
        w_strides=settle(changed.shape("w"), w),
        y_strides=settle(changed.shape("y"), y),
    )
