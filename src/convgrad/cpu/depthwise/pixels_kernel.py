"""Code for a Plane plan: depthwise layers whose pixels lie together along rows, one image of one channel after another.

The image is copied into a band with its padding, converted on the way. A tile is some rows of neighbouring pixels, a
few vectors wide. For each column of the kernel its weights stay in registers, and each vector that is loaded serves all
rows of the tile that meet it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..emit.frame import Frame, buffers
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import fma, size_of, splat
from ..plan.records import Plane


def write(plan: Plane) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    given = Elements(plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
    result = Elements(plan.out_dtype, plan.lanes, plan.sum, plan.converts_f16)
    tap_weights = m.table("tap_weights", plan.taps)
    copy = _copy(m, plan, given)
    depth, height, width = plan.out_sizes
    heights = [rows for rows in (plan.rows, height % plan.rows) if rows]
    tiles = {rows: _tile(m, f"tile{rows}", plan, result, rows) for rows in heights if rows <= height}

    frame = Frame(m, buffers(plan.sizes), plan.sum)
    f, at, pointers = frame.f, frame.at, frame.tensors
    source, target = (pointers["x"], pointers["y"]) if plan.wanted == "y" else (pointers["y"], pointers["x"])
    band, weights = at["band"], at["weights"]
    with frame.items("first", plan.tasks) as task:
        first = f.mul(task, plan.each)
        with f.loop(first, f.min(f.add(first, plan.each), plan.images * plan.channels)) as index:
            image, channel = f.split(index, [plan.images, plan.channels])
            with f.loop(0, len(plan.taps)) as tap:
                offset = f.add(f.load(f.at(tap_weights, tap, "i64"), "i64", 8), f.mul(channel, plan.w_step))
                value = given.load_one(f, f.at(pointers["w"], offset, given.storage))
                f.store(value, f.at(weights, tap, plan.sum), plan.sum, size_of(plan.sum))
            bias = "0.0"
            if plan.bias is not None:
                bias = given.load_one(f, f.at(pointers["bias"], f.mul(channel, plan.bias), given.storage))
            f.store(bias, f.at(weights, len(plan.taps), plan.sum), plan.sum, size_of(plan.sum))
            plane_in, plane_out = (
                f.add(f.mul(image, steps[0]), f.mul(channel, steps[1])) for steps in (plan.in_plane, plan.out_plane)
            )
            f.call(copy, f.at(source, plane_in, given.storage), band)
            base = f.at(target, plane_out, result.storage)
            with f.loop(0, depth) as d:
                for rows, tile in tiles.items():
                    whole = height // plan.rows * plan.rows
                    ends = (0, whole) if rows == plan.rows else (whole, height)
                    with f.loop(*ends, rows) as h, f.loop(0, width, plan.block) as w:
                        read = f.add(f.mul(f.add(f.mul(d, plan.extents[1]), h), plan.pitch), w)
                        places = f.add(f.mul(d, plan.out_steps[0]), f.mul(h, plan.out_steps[1]), w)
                        there = f.at(base, places, result.storage)
                        f.call(tile, f.at(band, read, plan.sum), weights, there, f.sub(width, w))
    return frame.end()


def _copy(m: Module, plan: Plane, n: Elements) -> Function:
    """A function that copies an image into the band, what lies outside as zeros: (image, band)."""
    f = m.function("copy", ["p:from", "p:to"])
    source, to = f.args
    item = size_of(plan.sum)
    width, low = plan.in_sizes[2], plan.low[2]
    with f.loop(0, plan.extents[0]) as d, f.loop(0, plan.extents[1]) as h:
        row = f.at(to, f.mul(f.add(f.mul(d, plan.extents[1]), h), plan.pitch), plan.sum)
        place = [f.add(d, plan.low[0]), f.add(h, plan.low[1])]
        # A negative coordinate is a large one.
        inside = f.both(*(f.test("ult", at, size) for at, size in zip(place, plan.in_sizes[:2], strict=True)))
        branch = f.either(inside)
        start = f.add(*(f.mul(at, step) for at, step in zip(place, plan.in_steps[:2], strict=True)))
        line = f.at(source, start, n.storage)
        with f.loop(0, plan.pitch, plan.lanes) as c:
            at = f.add(c, low)
            # The next image is asked for meanwhile.
            f.prefetch(f.at(line, f.add(at, plan.in_plane[1]), n.storage))
            whole = f.both(f.test("sge", at, 0), f.test("sle", at, width - plan.lanes))
            arm = f.either(whole)
            f.store(n.load(f, f.at(line, at, n.storage)), f.at(row, c, plan.sum), n.vector, item)
            f.otherwise(arm)
            before, until = n.mask(f, f.sub(0, at)), n.mask(f, f.sub(width, at))
            bits = f"<{plan.lanes} x i1>"
            mask = f.op(f"xor {bits} {before}, {f.op(f'or {bits} {before}, {until}')}")
            f.store(n.load(f, f.at(line, at, n.storage), mask), f.at(row, c, plan.sum), n.vector, item)
            f.join(arm)
        f.otherwise(branch)
        with f.loop(0, plan.pitch, plan.lanes) as c:
            f.store("zeroinitializer", f.at(row, c, plan.sum), n.vector, item)
        f.join(branch)
    return f


def _tile(m: Module, name: str, plan: Plane, out: Elements, rows: int) -> Function:
    """A function that computes some rows of pixels, a few vectors wide: (band, weights, place, pixels left).

    The bias lies after the weights.
    """
    f = m.function(name, ["p:band", "p:weights", "p:place", "i:left"])
    band, weights, place, left = f.args
    item = size_of(plan.sum)
    columns = range(plan.vectors)
    start = splat(f, plan.lanes, plan.sum, f.load(f.at(weights, len(plan.taps), plan.sum), plan.sum, item))
    sums = [[f.variable(out.vector, start) for _ in columns] for _ in range(rows)]
    kd, kh, kw = plan.kernel
    (first_d, step_d), (first_h, step_h), (first_w, step_w) = plan.entries
    met: dict[int, list[tuple[int, int]]] = {}  # row of the band → (row of the tile, row of the kernel)
    for k in range(kh):
        for r in range(rows):
            met.setdefault(r + first_h + step_h * k, []).append((r, k))
    with f.loop(0, kd) as d, f.loop(0, kw) as w:
        entry = f.add(f.mul(f.add(f.mul(d, step_d), first_d), plan.extents[1] * plan.pitch), f.mul(w, step_w), first_w)
        taps = f.at(weights, f.add(f.mul(d, kh * kw), w), plan.sum)
        own = [splat(f, plan.lanes, plan.sum, f.load(f.at(taps, k * kw, plan.sum), plan.sum, item)) for k in range(kh)]
        here = f.at(band, entry, plan.sum)
        for row, meetings in sorted(met.items()):
            for v in columns:
                value = f.load(f.at(here, row * plan.pitch + v * plan.lanes, plan.sum), out.vector, item)
                for r, k in meetings:
                    sum_ = f.get(sums[r][v], out.vector)
                    f.set(sums[r][v], out.vector, fma(f, own[k], value, sum_, plan.lanes, plan.sum))
    masks = [out.mask(f, f.sub(left, v * plan.lanes)) for v in columns]
    whole = f.either(f.test("sge", left, plan.block))
    _put(f, plan, out, sums, place, [None] * plan.vectors)
    f.otherwise(whole)
    _put(f, plan, out, sums, place, masks)
    f.join(whole)
    return f


def _put(f: Function, plan: Plane, n: Elements, sums: list[list[str]], place: str, masks: Sequence[str | None]) -> None:
    """Write the rows of a tile."""
    for r, row in enumerate(sums):
        for v, (variable, mask) in enumerate(zip(row, masks, strict=True)):
            at: Value = r * plan.out_steps[1] + v * plan.lanes
            Results(n, plan.accumulate).store(f, f.get(variable, n.vector), f.at(place, at, n.storage), mask)
