"""f32 taken apart: a tensor of f32 as so many in bf16, whose sum it is, with their channels side by side."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from ....spec.problem import Ints, Problem, Role
from ...target import Target
from ..axes import factors, is_wide, strides, three, unit
from ..copies import WIDE, View, merged
from ..records import Constants, Launch, Values

ELEMENTS = 4096  # of a tile
ALIGNED = 8  # channels of a pixel: 16 bytes of each part
BANDWIDTH_SHARE = 0.8
LAUNCH = 3e-6  # seconds that a launch takes by itself
TURNED = 1.15  # times as long where neighbours in space become neighbours in channels


class Splitting(NamedTuple):
    """A launch that takes a tensor apart, and how its parts lie: part, image, three axes, channel."""

    launch: Launch
    shape: Ints

    @property
    def strides(self) -> Ints:
        """Strides of the parts: of an image, of three axes and of a channel. Parts follow each other as images."""
        _, _, s0, s1, s2, width = self.shape
        return (s0 * s1 * s2 * width, s1 * s2 * width, s2 * width, width, 1)

    @property
    def size(self) -> int:
        """Bytes of the parts."""
        return 2 * prod(self.shape)


def splitting(p: Problem, role: Role, area: str, parts: int) -> Splitting:
    """How a tensor of a problem is taken apart, whatever its layout. Channels of all groups lie side by side."""
    of, sizes, group = strides(p, role), three(p).sizes(role), p.shape(role)[2]
    width = ceil(p.g * group / ALIGNED) * ALIGNED
    shape = (parts, p.n, *sizes, width)
    channels = group if p.g == 1 or (group > 1 and of[1] != of[2] * group) else p.g * group
    step = of[2] if group > 1 or p.g == 1 else of[1]
    given = View(role, p.dtype, (p.n, p.g * group // channels, channels, *sizes), (*of[:2], step, *of[3:]))
    made = View(area, "bf16", (p.n, 1, width, *sizes), (prod(sizes) * width, 0, 1, *_dense(sizes, width)))
    given, made = _joined(*merged(given, made))
    images, groups, pixels = given.shape[0], given.shape[1], prod(given.shape[3:])
    columns = min(64, 1 << (width - 1).bit_length())
    rows = ELEMENTS // columns
    values: Values = (
        ("given_strides", given.strides),
        ("sizes", given.shape[3:]),
        ("size_factors", factors(given.shape[3:])),
        ("group_channels", channels),
        ("all_channels", p.g * group),
        ("made", width),
        ("part_stride", prod(shape) // parts),
    )
    constants: Constants = (
        ("GIVEN_UNIT", unit(given.strides)),
        ("GROUPED", groups > 1),
        ("MERGED", given.shape[3:5] == (1, 1)),
        ("PARTS", parts),
        ("PIXELS", rows),
        ("CHANNELS", columns),
        ("WIDE", is_wide(p) or prod(shape) // parts >= WIDE),
    )
    programs = ceil(pixels / rows) * ceil(width / columns) * images
    launch = Launch("split", programs, ((role, p.dtype), (area, "bf16")), values, constants, 4, 1, "hopper.split")
    return Splitting(launch, shape)


def seconds(p: Problem, splits: Splitting, target: Target) -> float:
    """The time that it takes: of reading a tensor and of writing its parts."""
    role, _ = splits.launch.tensors[0]
    moved = p.size(role) * 4 + splits.size
    turned = TURNED if splits.launch.constant("GIVEN_UNIT") != 2 else 1.0
    return moved / (target.bandwidth * 1e9 * BANDWIDTH_SHARE) * turned + LAUNCH


def _dense(sizes: Ints, width: int) -> Ints:
    return (sizes[1] * sizes[2] * width, sizes[2] * width, width)


def _joined(given: View, made: View) -> tuple[View, View]:
    """The same with images and pixels as one axis, if they are one in memory: tiles then waste nothing at its end."""
    images, pixels = given.shape[0], given.shape[5]
    if given.shape[3:5] != (1, 1) or images == 1:
        return given, made
    if any(view.strides[0] != view.strides[5] * pixels for view in (given, made)):
        return given, made

    def joined(view: View) -> View:
        return view._replace(shape=(1, *view.shape[1:5], images * pixels), strides=(0, *view.strides[1:]))

    return joined(given), joined(made)
