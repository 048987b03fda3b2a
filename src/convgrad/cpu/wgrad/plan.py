"""Plans for weight gradients, and for 1x1 convolutions as sums over channels.

`plan` shows the steps in order. Each is a function from what was decided before it to a record of records.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ...dtypes import DTYPES
from ...spec.problem import Ints, Problem
from ..ir.vectors import sum_type
from ..pack.box import transposable
from ..plan.axes import spans, tap_offsets, tap_ranges
from ..plan.prefetch import Prefetch, lines
from ..plan.tuning import converts_f16, half_width_text, streams, tuning
from ..target import Target
from . import pointwise
from .cut import cut_pixels, cut_sums
from .layout import lay_out
from .records import Boxes, Mode, Modes, Output, Parts, Roles, Taps, Tensors, WeightGradient, Writing
from .roles import assign_roles, choose_modes
from .work import Work, work_of


def plan(p: Problem, target: Target, threads: int) -> WeightGradient | None:
    """A plan for a weight gradient, or for a 1x1 convolution that can be computed as one; None for others."""
    is_sum = p.wanted == "w"
    sums = p if is_sum else pointwise.as_sum(p, target)
    if sums is None:
        return None
    work, roles = assign_roles(work_of(sums, target, pointwise=not is_sum))
    modes = choose_modes(work, roles)
    boxes = cut_pixels(work, roles, modes)
    taps = tap_offsets(work.axes)
    writing = _writing(work, roles, taps, _strides(work, roles))
    parts = cut_sums(work, roles, modes, boxes, threads, divides_taps=writing in (Writing.VECTORS, Writing.ELEMENTS))
    if parts.lanes_in_place:
        modes = Modes(modes.rows, Mode.IN_PLACE)
    x, y, entries = lay_out(work, roles, modes, boxes, parts)
    prefetch = plan_prefetch(work, roles, boxes, parts)
    output = plan_output(work, roles, boxes, parts, writing, prefetch is not None)
    names = ("x", "y", "w") if is_sum else pointwise.tensors(p)
    tensors = Tensors(names, p.dtype, p.out_dtype, sum_type(p.dtype), converts_f16(work.target))
    made = WeightGradient(
        tensors, roles, boxes, parts, x, y, Taps(taps, entries, tap_ranges(work.axes)), output, prefetch,
        threads=threads,
    )  # fmt: skip
    return replace(made, why=tuple(reasons(made, work)))


def plan_prefetch(work: Work, roles: Roles, boxes: Boxes, parts: Parts) -> Prefetch | None:
    """The lines of the next box, prefetched while one is summed; none if all tensors fit in the second-level cache."""
    p, shape = work.problem, work.shape
    if p.bytes <= work.target.l2:
        return None
    lane_channels = min(roles.lane_channels, parts.lane_part * roles.block)
    if roles.lane_groups:
        x_channels, y_channels = lane_channels // p.cy * p.cx, lane_channels
    else:
        x_channels, y_channels = parts.row_part, lane_channels
        if roles.row_side == "y":
            x_channels, y_channels = y_channels, x_channels
    calls = parts.lane_part * parts.tiles * (1 if roles.lane_groups else work.taps)
    counts, steps = zip(*(spans(a, b, forward=True) for a, b in zip(work.axes, boxes.box, strict=True)), strict=True)
    size = DTYPES[p.dtype].size
    x_lines = lines(counts, steps, x_channels, shape.x_channel[1], size)
    y_lines = lines(boxes.box, [a.y_step for a in work.axes], y_channels, shape.y_channel[1], size)
    regions = (y_lines,) if work.pointwise else (x_lines, y_lines)
    return Prefetch(regions, calls, prod(boxes.box) // roles.per_step)


def _strides(work: Work, roles: Roles) -> Ints:
    """Strides of (group, row, lane) in w."""
    group, y_step, x_step = work.shape.w_channel
    return (group, x_step, y_step) if roles.row_side == "x" else (group, y_step, x_step)


def plan_output(work: Work, roles: Roles, boxes: Boxes, parts: Parts, writing: Writing, prefetch: bool) -> Output:
    """How sums are written to w, and whether past the caches."""
    p, strides = work.problem, _strides(work, roles)
    whole = boxes.slices == work.taps == strides[2] == 1
    # Tiles of pairs are done so soon that they would wait for what is written past the caches.
    stream = streams(p, work.target) and not work.pairs
    size = parts.rows * roles.block * work.taps * DTYPES[p.out_dtype].size
    return Output(
        strides=strides,
        writing=writing,
        direct=whole and not (roles.lane_groups or p.accumulate),
        accumulate=p.accumulate,
        stream=stream,
        # Not so much that it would evict what is needed before.
        prefetch=prefetch and not stream and size <= tuning(work.target).wgrad.prefetched_results,
    )


def _writing(work: Work, roles: Roles, taps: Ints, strides: Ints) -> Writing:
    """How sums are written to w, given its strides of (group, row, lane)."""
    if roles.lane_groups:
        return Writing.GROUPS
    _, row_step, lane_step = strides
    if lane_step == 1:
        return Writing.VECTORS
    if not transposable(roles.lanes) or work.taps == 1 or taps != tuple(range(work.taps)):
        return Writing.ELEMENTS
    tiles = row_step == work.taps and not work.problem.accumulate
    return Writing.TRANSPOSED_TILES if tiles else Writing.TRANSPOSED_TAPS


def reasons(plan: WeightGradient, work: Work) -> Iterator[str]:
    """Why the plan is as it is."""
    roles, parts, (rows, lanes) = plan.roles, plan.parts, plan.sides
    if work.pointwise:
        yield "pixels in the lanes: a 1x1 convolution, and they are contiguous"
    if roles.lane_groups:
        side_by_side = roles.lanes // roles.lane_groups.outputs
        yield f"{side_by_side} groups side by side in a vector, {parts.tap_step} taps in a tile"
    if work.target.half_width:
        yield half_width_text(roles.lanes, roles.lane_channels)
    if rows.mode is Mode.IN_PLACE:
        yield f"{rows.name} is read in place: channels or pixels are contiguous, no conversion"
    if lanes.mode is Mode.IN_PLACE:
        yield "so is the other side, which fills whole vectors"
    if rows.mode is Mode.ROWS:
        yield f"{rows.name} is packed channel by channel, pixels side by side"
    if roles.pairs:
        yield "pixels of bf16 two at a time (avx512_bf16)"
    if plan.boxes.slices > 1:
        yield f"sums over pixels in {plan.boxes.slices} parts, added in order"
    if parts.saves_copies:
        yield "rows and lanes cut so that less is packed more than once"
    if plan.output.stream:
        yield "results go past the caches, which they exceed"
    if plan.prefetch is not None:
        yield "the next box is prefetched while one is summed"
