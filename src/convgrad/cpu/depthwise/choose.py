"""What decides which kernel computes a depthwise layer: one with g > 1 and cx = cy = 1.

A vector is filled with what is contiguous in memory:

- Channels (channels last): `ChannelsInLanes`, for y, x and w. Every load is a vector of neighbouring channels, so the
  tensors are read in place.
- Pixels of a row (channels first): `PixelsInLanes`, for y and x without a stride. The image of one channel is packed
  with its padding, so that every tap is a load of neighbouring pixels.

Both keep the taps in registers or write them out one by one, so both have a limit on the size of the kernel. What
neither serves goes to the general kernels, in gather/ and wgrad/. The registry asks for pixels first; channels and
pixels are contiguous at a time only in tensors that have a single pixel in a row, or repeat values.
"""

from __future__ import annotations

from math import prod

from ...spec.problem import Problem
from ..plan.bits import (
    CHANNELS_MOST_PHASES,
    CHANNELS_MOST_TAPS,
    PIXELS_IMAGE_PART,
    PIXELS_LEAST_FILLED,
    PIXELS_MOST_KERNEL_ROWS,
    PIXELS_MOST_TAPS,
)
from ..plan.records import up
from ..target import Target
from .records import PixelsInLanes


def is_depthwise(p: Problem) -> bool:
    """Whether each channel is computed on its own."""
    return p.g > 1 and p.cx == p.cy == 1


def channels_serve(p: Problem) -> bool:
    """Whether lanes are channels: they are contiguous, and the kernel and the strides are small."""
    phases = prod(p.stride) if p.wanted == "x" else 1
    contiguous = (p.x_strides[1], p.y_strides[1]) == (1, 1)
    return is_depthwise(p) and contiguous and phases <= CHANNELS_MOST_PHASES and 1 < prod(p.w) <= CHANNELS_MOST_TAPS


def pixels_serve(p: Problem) -> bool:
    """Whether lanes may be pixels of a row: they are contiguous, and there is no stride."""
    contiguous = (p.x_strides[-1], p.y_strides[-1]) == (1, 1)
    return is_depthwise(p) and p.wanted != "w" and set(p.stride) == {1} and contiguous


def pixels_fit(plan: PixelsInLanes, target: Target) -> bool:
    """Whether pixels fill half of the lanes or more, an image stays in the cache, and the kernel is small."""
    width = plan.result.sizes[2]
    filled = PIXELS_LEAST_FILLED * width >= up(width, plan.lanes)
    cached = plan.buffers[0].elements * plan.item <= target.l2 // PIXELS_IMAGE_PART
    kernel = plan.packed.kernel
    return filled and cached and 1 < prod(kernel) <= PIXELS_MOST_TAPS and kernel[1] <= PIXELS_MOST_KERNEL_ROWS
