"""Which side of the sum is in the rows of a tile and which in its lanes, and how tiles read the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, gcd, prod

from ...dtypes import DTYPES
from ..plan.axes import Axis, Shape, offsets, valid_range
from ..plan.bits import (
    COPY,
    FEW_PIXELS,
    HALF_COST,
    HALF_COST_PAIRS,
    IN_PLACE_POINTWISE,
    IN_PLACE_ROWS,
    IN_PLACE_SHORT,
    IN_PLACE_SPREAD,
    PAIRS_FILLED,
    SPREAD_LINES,
    dots,
    fit_lane_groups,
    fitted,
    half_line,
    lane_group_steps,
    most_packed_stride,
    row_steps,
)
from ..plan.records import LaneGroups, up
from ..plan.tuning import CACHE_WAY, sums_tile, tuning
from ..target import LINE, Target
from .records import Mode, Modes, Roles
from .work import Work


def assign_roles(work: Work) -> tuple[Work, Roles]:
    """What the rows and the lanes of a tile hold, for vectors of the width with which that costs least."""
    p, shape, last = work.problem, work.shape, work.axes[-1]
    steps = {shape.x_channel[1], shape.y_channel[1]}
    contiguous = last.x_step == last.y_step == 1 and 1 not in steps  # pixels, and not channels
    dotted = p.dtype == "bf16" and dots(work.target)
    if fit_lane_groups(work.target, work.lanes, p.g, p.cx, p.cy, dotted and contiguous):
        return _groups_in_lanes(work)
    if dotted and (steps == {1} or contiguous):
        work = work._replace(shape=_by_images(shape))
    image_pairs = contiguous and last is not work.axes[-1]
    work = work._replace(pairs=dotted and work.axes[-1].y > 1, image_pairs=image_pairs)
    if not work.pointwise:
        cost = _fitted_cost(work)
        work = work._replace(target=fitted(work.target, cost, HALF_COST_PAIRS if dotted else HALF_COST))
    row_side = _row_side(work)
    row_channels, lane_channels = work.channels(row_side)
    most_rows, vectors = sums_tile(work.target, work.lanes, lane_channels)
    return work, Roles(
        row_side, row_channels, lane_channels, p.g, None, work.lanes, vectors, most_rows, work.pairs, work.image_pairs
    )


def _groups_in_lanes(work: Work) -> tuple[Work, Roles]:
    """Groups have so few channels that several share a vector; the rows are taps, times the channels of x."""
    p, shape = work.problem, work.shape
    lane_channels = p.g * p.cy

    def cost(target: Target, step: float) -> float:
        return step * lane_group_steps(target.lanes(work.item), lane_channels, p.cy)

    # All channels are of one group then, as the tensors lie.
    x_step, y_step = (
        channel if count > 1 else group
        for (group, channel), count in ((shape.x_channel, p.cx), (shape.y_channel, p.cy))
    )
    work = work._replace(
        target=fitted(work.target, cost, HALF_COST), shape=replace(shape, x_channel=(0, x_step), y_channel=(0, y_step))
    )
    vectors = work.target.tile[1] if work.target.tile else 1
    taps = max(1, tuning(work.target).tiles.group_sums // vectors // p.cx)
    taps = ceil(work.taps / ceil(work.taps / taps))
    return work, Roles(
        "x", p.cx, lane_channels, 1, LaneGroups(p.cx, p.cy), work.lanes, vectors, taps * p.cx, False, False
    )


def _by_images(shape: Shape) -> Shape:
    """The same problem with pairs of images innermost, if pairs along a row would often lack a partner.

    Any axis without a kernel serves as images.
    """
    *outer, row = shape.axes
    ends = [valid_range(o, row.stride, row.x, row.y) for o in offsets(row, True)]
    ranges = [(low, high) for low, high in ends if low < high]
    places = sum(2 * (ceil(high / 2) - low // 2) for low, high in ranges)
    filled = sum(high - low for low, high in ranges) > PAIRS_FILLED * places
    plain = [i for i, a in enumerate(outer) if a.plain and a.x % 2 == 0]
    unused = [i for i, a in enumerate(outer) if a.plain and a.x == 1]
    if filled or not plain or not unused:
        return shape
    images = outer[plain[-1]]
    pairs = images.x // 2
    outer[plain[-1]] = replace(images, x=pairs, y=pairs, x_step=2 * images.x_step, y_step=2 * images.y_step)
    del outer[unused[0]]
    return replace(shape, axes=(*outer, row, replace(images, x=2, y=2)))


def _fitted_cost(work: Work) -> Callable[[Target, float], float]:
    """What a pixel of y costs with the vectors of a target, given what a step does: products, and packing."""
    more = prod(a.x / a.y for a in work.axes)  # pixels of x for one of y

    def cost(target: Target, step: float) -> float:
        here = work._replace(target=target)
        side = _row_side(here)
        row_channels, lane_channels = work.channels(side)
        in_place, lanes_in_place = _in_place(here, side)
        rows, columns = (more, 1.0) if side == "x" else (1.0, more)
        found, _ = row_steps(target, here.lanes, lane_channels)
        products = work.taps * row_channels * step * found / (2 if work.pairs else 1)
        return products + COPY * (rows * row_channels * (not in_place) + columns * lane_channels * (not lanes_in_place))

    return cost


def _row_side(work: Work) -> str:
    """Whose channels are the rows of the tile: what wastes fewer lanes, then what is packed and written cheaply."""
    p = work.problem
    if work.pointwise:
        return "x"
    x_rows, y_rows = up(p.cy, work.lanes) * p.cx, up(p.cx, work.lanes) * p.cy  # products with the rows on that side
    if x_rows != y_rows:
        return "x" if x_rows < y_rows else "y"
    _, y_step, x_step = work.shape.w_channel
    if work.taps > 1 and x_step == 1 != y_step:
        return "y"  # channels of x are contiguous in w, as in PyTorch's channels_last: results are written by vectors
    if work.taps > 1:
        pairs_in_place = work.pairs and "y" in _paired_in_place(work.axes[-1]) and not _row_packable(work, "x")
        return "y" if pairs_in_place else "x"
    if p.n * prod(p.y) < FEW_PIXELS:
        return "y" if work.shape.w_channel[2] == 1 else "x"  # few pixels: results are written by vectors
    return "x" if p.cx >= p.cy else "y"  # the larger side need not be packed


# How tiles read the two sides.


def choose_modes(work: Work, roles: Roles) -> Modes:
    """Which sides are read in place, and whether rows are packed channel by channel."""
    if roles.lane_groups:
        return Modes(Mode.VECTORS, Mode.VECTORS)
    rows, lanes = _in_place(work, roles.row_side)
    packed_as = Mode.ROWS if _row_packable(work, roles.row_side) else Mode.VECTORS
    return Modes(Mode.IN_PLACE if rows else packed_as, Mode.IN_PLACE if lanes else Mode.VECTORS)


def _in_place(work: Work, row_side: str) -> tuple[bool, bool]:
    """Whether the rows and the lanes can be read in place, if the rows are of that side."""
    p, target, last = work.problem, work.target, work.axes[-1]
    (row_channels, lane_channels), lane_side = work.channels(row_side), "y" if row_side == "x" else "x"
    channel, pixel = work.channel_step(row_side), last.x_step if row_side == "x" else last.y_step
    # Rows are broadcast an element at a time, and each tap reads only what is inside x: nothing need be packed if
    # elements that are read one after another are contiguous.
    exact = DTYPES[p.dtype].numpy == DTYPES[p.dtype].accumulator
    rows = exact and (1 in (channel, pixel) or row_channels == 1)
    eight = work.lanes == row_channels == lane_channels == half_line(work.item) and target.registers >= 32
    evicting = not work.pointwise and same_sets(work, row_side)
    grouped = p.g > 1 and work.taps > 1
    if channel == 1 and grouped and (eight or (evicting and row_channels * work.item <= LINE)):
        rows = False  # half of each line would be used, or lines so far apart evict each other
    if channel == 1 and evicting and target.two_per_cycle:
        rows = False  # so they do for many rows, and products are too quick to wait
    rows = rows or (work.pairs and row_side in _paired_in_place(last))
    # With one tap the other side is read once for each tile of rows: for a few of them packing it would not pay.
    whole = work.taps == 1 == work.channel_step(lane_side) and lane_channels % work.lanes == 0
    return rows, rows and whole and not work.pairs and row_channels <= _few_rows(work, lane_side)


def lanes_readable(work: Work, roles: Roles, modes: Modes) -> bool:
    """Whether the lanes can be read in place, although they are packed: where tasks are so many that each of them would
    pack them for a few products. Boxes are cut as if they were packed, so that the bits stay.
    """
    lane_side = "y" if roles.row_side == "x" else "x"
    whole = work.channel_step(lane_side) == 1 and roles.lane_channels % roles.lanes == 0
    packed = modes.lanes is Mode.VECTORS and modes.rows is Mode.IN_PLACE
    return packed and whole and not (roles.pairs or same_sets(work, lane_side))


def _few_rows(work: Work, lane_side: str) -> int:
    """For how many rows the side in the lanes is read in place."""
    if not work.pointwise:
        return IN_PLACE_ROWS
    if work.lanes * work.item < LINE:
        return IN_PLACE_SHORT
    spread = gcd(_pixel_bytes(work, lane_side), CACHE_WAY) <= SPREAD_LINES * LINE
    return IN_PLACE_SPREAD if spread else IN_PLACE_POINTWISE


def same_sets(work: Work, side: str) -> bool:
    """Whether pixels of a side that are read one after another evict each other from the first-level cache."""
    step = _pixel_bytes(work, side)
    return step != 0 and step % CACHE_WAY == 0


def _pixel_bytes(work: Work, side: str) -> int:
    """Bytes between pixels that are read one after another, of a side that need not be converted."""
    last = work.axes[-1]
    return work.item * (last.x_step * last.stride if side == "x" else last.y_step)


def _paired_in_place(a: Axis) -> set[str]:
    """The sides whose pairs of neighbouring pixels are whole as they lie in memory: none is odd or has padding."""
    sides = {"y"} if a.y_step == 1 and a.y % 2 == 0 else set()
    return sides | ({"x"} if a.x_step == 1 and a.plain and a.x % 2 == 0 else set())


def _row_packable(work: Work, side: str) -> bool:
    """Whether a side can be packed channel by channel: the pixels of its rows are contiguous."""
    row = work.axes[-2 if work.image_pairs else -1]
    if side == "y":
        return row.y_step == 1 != work.channel_step("y")
    return row.x_step == 1 != work.channel_step("x") and row.stride <= most_packed_stride(work.target)
