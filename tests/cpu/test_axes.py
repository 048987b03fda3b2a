"""Where a tap meets the input, counted out for small axes."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import pytest

from convgrad.cpu.plan.axes import (
    AXES,
    Axis,
    axis_maps,
    inside,
    longest,
    offsets,
    packed,
    phase_of,
    simplify,
    tap_ranges,
    valid_range,
)
from convgrad.spec.problem import Problem


def drawn(rng: np.random.Generator) -> Axis:
    """Any small axis; windows may lie in the padding, or beyond x."""
    k, stride, dilation, x = (int(rng.integers(1, high)) for high in (5, 5, 4, 14))
    pad = int(rng.integers(0, k * dilation + 1))
    y = max(1, (x + 2 * pad - (k - 1) * dilation - 1) // stride + 1)
    return Axis(x, y + int(rng.integers(0, 2)), k, stride, dilation, pad, 1, 1, 1)


AXES_DRAWN = [drawn(np.random.default_rng(seed)) for seed in range(300)]


def met(a: Axis, forward: bool, position: int, k: int) -> int | None:
    """The input that a result meets with a tap, by the definition: x = y*stride + k*dilation - pad."""
    if forward:
        return position * a.stride + k * a.dilation - a.pad
    y, rest = divmod(position + a.pad - k * a.dilation, a.stride)
    return y if rest == 0 else None


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_a_valid_range_holds_what_is_inside(stride: int) -> None:
    for offset in range(-20, 21):
        for size in (1, 2, 9):
            low, high = valid_range(offset, stride, size, 7)
            assert [q for q in range(7) if 0 <= q * stride + offset < size] == list(range(low, high))


@pytest.mark.parametrize("forward", [False, True])
def test_each_result_reads_what_the_definition_says(forward: bool) -> None:
    """Every tap serves the results of one phase, and reads where its offset says."""
    for a in AXES_DRAWN:
        out, out_stride, in_stride = (a.y, 1, a.stride) if forward else (a.x, a.stride, 1)
        for k, offset in enumerate(offsets(a, forward)):
            phase = phase_of(a, k, forward)
            for position in range(out):
                q, rest = divmod(position - phase, out_stride)
                expected = met(a, forward, position, k)
                assert (expected is None) == (rest != 0)
                if expected is not None:
                    assert q * in_stride + offset == expected


@pytest.mark.parametrize("forward", [False, True])
def test_inside_means_that_no_padding_is_read(forward: bool) -> None:
    found = set()
    for a in AXES_DRAWN:
        out, size = (a.y, a.x) if forward else (a.x, a.y)
        reads = [met(a, forward, position, k) for position in range(out) for k in range(a.k)]
        assert inside(a, forward) == all(0 <= at < size for at in reads if at is not None)
        found.add(inside(a, forward))
    assert found == {False, True}


@pytest.mark.parametrize("thinned", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_packed_entries_hold_what_taps_read(forward: bool, split: bool, thinned: bool) -> None:
    """Of every result of every box; where borders are kept apart, with the taps that lie inside and no others."""
    rng = np.random.default_rng(11)
    for a in AXES_DRAWN:
        axes = (*[Axis(1, 1)] * (AXES - 1), a)
        box = int(rng.integers(1, 9))
        m = axis_maps(axes, forward, [1, 1, 1, box], [False, False, False, split], False, thinned)[-1]
        p = packed(a, m, forward, in_place=False)
        size = a.x if forward else a.y
        coordinates = [first + step * p.step for first in p.offsets for step in range(p.count)]
        for s in m.segments:
            for q in range(s.start, s.stop):
                start = q // box * box
                lowest = start * m.in_stride + m.low
                reads = {k: met(a, forward, q * m.out_stride + s.residue, k) for k in range(a.k)}
                reads = {k: at for k, at in reads.items() if at is not None}
                if split:
                    reads = {k: at for k, at in reads.items() if 0 <= at < size}
                entries = {k: entry + (q - start) * m.packed_stride for k, entry in s.taps}
                assert {k: lowest + coordinates[entry] for k, entry in entries.items()} == reads
        results = [q * m.out_stride + s.residue for s in m.segments for q in range(s.start, s.stop)]
        assert sorted(results) == list(range(m.out))


def test_weights_read_x_and_y_where_both_exist() -> None:
    for a in AXES_DRAWN:
        ranges = tap_ranges((a,))
        for k in range(a.k):
            ((low, high),) = ranges.valid[k]
            assert list(range(low, high)) == [o for o in range(a.y) if 0 <= (met(a, True, o, k) or 0) < a.x]
            assert all(ranges.starts[k] + o * ranges.x_steps[0] == met(a, True, o, k) for o in range(low, high))


def test_axes_without_a_kernel_become_one() -> None:
    shape = simplify(Problem.parse("y f32 n2 g1 cx8 cy8 x7x9 w1x1 y7x9 s1x1 d1x1 p0x0 x@nxc y@nxc"))
    assert len(shape.axes) == AXES
    assert [(a.x, a.y) for a in shape.axes] == [(1, 1), (1, 1), (1, 1), (2 * 7 * 9, 2 * 7 * 9)]
    kept = simplify(Problem.parse("y f32 n2 g1 cx8 cy8 x7x9 w1x3 y7x9 s1x1 d1x1 p0x1"))
    assert [(a.x, a.k) for a in kept.axes] == [(1, 1), (2, 1), (7, 1), (9, 3)]  # channels lie between images


def test_the_longest_piece_that_fits_leaves_pieces_of_about_one_length() -> None:
    assert longest(10, lambda n: n <= 10) == 10
    assert longest(10, lambda n: n <= 9) == 5
    assert longest(10, lambda n: n <= 4) == ceil(10 / 3)
    assert longest(10, lambda n: False) == 1
    assert prod(longest(n, lambda piece: piece <= 7) <= 7 for n in range(1, 100))
