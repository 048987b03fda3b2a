"""Code for a Slide plan: depthwise layers, each channel on its own, tensors read where they lie.

A tile is a few neighbouring pixels of some rows, of the result, or of y for the weight gradient. The other tensor's
pixels are loaded once per row and serve all taps. What lies outside is left out: rows by a branch, columns by a mask.
All vectors of channels of a tile are computed one after another, so that memory is read along lines; meanwhile the
rows of the tile below are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from ..emit.frame import Frame, buffers
from ..emit.nan_repair import NanRepair
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import fma, size_of
from ..plan.records import Segment, Slide
from ..target import LINE

_PLACE = ("p:in", "p:weights", "p:out", "p:bias", "i:i0", "i:i1", "i:i2", "i:i3", "i:rows", "i:columns", "i:from")


def write(plan: Slide) -> str:
    """The IR of a kernel for this plan."""
    return _write_w(plan) if plan.wanted == "w" else _write_pixels(plan)


def _write_pixels(plan: Slide) -> str:
    """The IR for y or x."""
    m = Module()
    given = Elements(plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
    result = Elements(plan.out_dtype, plan.lanes, plan.sum, plan.converts_f16)
    phases = [combo for combo in product(*(w.segments for w in plan.maps)) if all(s.start < s.stop for s in combo)]
    tiles = [
        (_tile(m, f"tile{i}", plan, given, result, combo, masked=False),
         _tile(m, f"tile{i}_masked", plan, given, result, combo, masked=True))
        for i, combo in enumerate(phases)
    ]  # fmt: skip
    tap_weights = m.table("tap_weights", plan.taps)

    frame = Frame(m, buffers(plan.sizes), plan.sum)
    f, at, pointers = frame.f, frame.at, frame.tensors
    source, target = (pointers["x"], pointers["y"]) if plan.wanted == "y" else (pointers["y"], pointers["x"])
    _pack(frame, plan, given, tap_weights)

    maps = plan.maps
    counts = [max(s.stop for s in w.segments) for w in maps]
    bands = -(-counts[2] // plan.band)
    with frame.items("second", plan.tasks) as task:
        q0, q1, band = f.split(task, [counts[0], counts[1], bands])
        low = f.mul(band, plan.band)
        high = f.min(f.add(low, plan.band), counts[2])
        for combo, (plain, masked) in zip(phases, tiles, strict=True):
            inside = f.both(f.test("slt", q0, combo[0].stop), f.test("slt", q1, combo[1].stop))
            with f.when(inside):
                stop = f.min(high, combo[2].stop)
                with f.loop(low, stop, plan.rows) as q2, f.loop(0, combo[3].stop, plan.vectors) as q3:
                    _place(f, plan, given, result, combo, (plain, masked), source, target, at, (q0, q1, q2, q3), stop)
    return frame.end(stream=plan.stream)


def _pack(frame: Frame, plan: Slide, n: Elements, tap_weights: str) -> None:
    """Weights [tap][channel] and the bias in accumulators, channels rounded up to vectors; then a barrier."""
    f, at, pointers, pitch = frame.f, frame.at, frame.tensors, plan.pitch
    with frame.items("first", len(plan.taps) + 1) as tap:
        branch = f.either(f.test("slt", tap, len(plan.taps)))
        offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
        with f.loop(0, pitch) as c:
            channel = f.min(c, plan.channels - 1)
            value = n.load_one(f, f.at(pointers["w"], f.add(offset, f.mul(channel, plan.w_step)), n.storage))
            f.store(value, f.at(at["weights"], f.add(f.mul(tap, pitch), c), plan.sum), plan.sum, size_of(plan.sum))
        f.otherwise(branch)
        if plan.bias is not None:
            with f.loop(0, pitch) as c:
                channel = f.min(c, plan.channels - 1)
                value = n.load_one(f, f.at(pointers["bias"], f.mul(channel, plan.bias), n.storage))
                f.store(value, f.at(at["bias"], c, plan.sum), plan.sum, size_of(plan.sum))
        f.join(branch)
    frame.barrier()


def _place(
    f: Function, plan: Slide, given: Elements, result: Elements, combo: tuple[Segment, ...],
    tiles: tuple[Function, Function], source: str, target: str, at: dict[str, str], q: Sequence[Value], stop: Value,
) -> None:  # fmt: skip
    """Call the tile at some position of the result."""
    first = [f.mul(i, w.in_stride) for i, w in zip(q, plan.maps, strict=True)]
    read = f.at(source, f.add(*(f.mul(i, s) for i, s in zip(first, plan.in_steps, strict=True))), given.storage)
    axes = zip(q, plan.maps, combo, strict=True)
    out = [f.mul(f.add(f.mul(i, w.out_stride), s.residue), w.out_step) for i, w, s in axes]
    place = f.at(target, f.add(*out), result.storage)
    rows, columns = f.sub(stop, q[2]), f.sub(combo[3].stop, q[3])
    _choose(
        f, plan, combo, tiles, (read, at["weights"], place, at["bias"], *first, rows, columns), first[3], rows, columns
    )


def _tile(
    m: Module, name: str, plan: Slide, given: Elements, result: Elements, combo: tuple[Segment, ...], *, masked: bool
) -> Function:
    """A function that computes one tile for all channels from a given one on: see _PLACE for its arguments.

    (input at the first output's position, weights, place of the first output, bias, that position on each axis, rows
    and columns that are there, first channel.)
    """
    f = m.function(name, list(_PLACE))
    source, weights, out, bias, *position, rows, columns, first = f.args
    maps = plan.maps
    align = min(LINE, plan.lanes * plan.item & -(plan.lanes * plan.item))
    serve = _rows(plan, combo)
    width = maps[3].kernel
    inside = {row: _inside(f, plan, combo, position, row) for row in sorted(serve)}
    reads = _reads(plan, combo)
    new = set() if masked else _new_below(plan, serve)
    there = {}
    if masked:
        for j in reads:
            there[j] = f.test("ult", f.add(position[3], j), plan.in_sizes[3])
    stop = plan.channels if masked else plan.channels // plan.lanes * plan.lanes
    kind = given.vector
    with f.loop(first, stop, plan.lanes) as c:
        lanes = given.mask(f, f.sub(plan.channels, c)) if masked else None
        masks = {j: f.op(f"select i1 {ok}, <{plan.lanes} x i1> {lanes}, <{plan.lanes} x i1> zeroinitializer")
                 for j, ok in there.items()}  # fmt: skip
        start = "zeroinitializer"
        if plan.bias is not None:
            start = f.load(f.at(bias, c, plan.sum), kind, align)
        sums = [[f.variable(kind, start) for _ in range(plan.vectors)] for _ in range(plan.rows)]
        for row, served in sorted(serve.items()):
            with f.when(inside[row]):
                values = _loaded(f, plan, given, source, row, c, reads, masks, below=row in new)
                for r, kernel_row in served:
                    for k3, o3 in combo[3].taps:
                        tap = (kernel_row * width + k3) * plan.pitch
                        weight = f.load(f.at(weights, f.add(c, tap), plan.sum), kind, align)
                        for col in range(plan.vectors):
                            sum_ = sums[r][col]
                            value = values[col * maps[3].in_stride + o3]
                            f.set(sum_, kind, fma(f, value, weight, f.get(sum_, kind), plan.lanes, plan.sum))
        _store(f, plan, result, sums, f.at(out, c, result.storage), rows, columns, lanes)
    return f


def _rows(plan: Slide, combo: tuple[Segment, ...]) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """Rows of input, as offsets on the first three axes, with the rows of tile and kernel that each serves."""
    serve: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    _, n1, n2, _ = (w.kernel for w in plan.maps)
    for (k0, o0), (k1, o1), (k2, o2) in product(*(s.taps for s in combo[:3])):
        for r in range(plan.rows):
            serve.setdefault((o0, o1, r * plan.maps[2].in_stride + o2), []).append((r, (k0 * n1 + k1) * n2 + k2))
    return serve


def _reads(plan: Slide, combo: tuple[Segment, ...]) -> list[int]:
    """Columns of input that a tile meets, as offsets."""
    return sorted({c * plan.maps[3].in_stride + o for c in range(plan.vectors) for _, o in combo[3].taps})


def _loaded(
    f: Function, plan: Slide, n: Elements, source: str, row: tuple[int, int, int], channel: Value, reads: list[int],
    masks: Mapping[int, str | None], *, below: bool,
) -> dict[int, str]:  # fmt: skip
    """The vectors of one row of input, by their offset; if `below`, the same of the tile below are asked for."""
    offset = sum(o * s for o, s in zip(row, plan.in_steps, strict=False))
    line = f.at(source, f.add(offset, channel), n.storage)
    if below:
        further = f.at(line, plan.rows * plan.maps[2].in_stride * plan.in_steps[2], n.storage)
        # For the other columns the tile beside that one asks.
        for j in reads[: plan.vectors * plan.maps[3].in_stride]:
            f.prefetch(f.at(further, j * plan.in_steps[3], n.storage))
    return {j: n.load(f, f.at(line, j * plan.in_steps[3], n.storage), masks.get(j)) for j in reads}


def _new_below(plan: Slide, serve: Mapping[tuple[int, int, int], object]) -> set[tuple[int, int, int]]:
    """The rows of input for which the tile below reads one that this tile does not."""
    step = plan.rows * plan.maps[2].in_stride
    return {(o0, o1, o2) for o0, o1, o2 in serve if (o0, o1, o2 + step) not in serve}


def _inside(
    f: Function, plan: Slide, combo: tuple[Segment, ...], position: Sequence[Value], row: tuple[int, int, int]
) -> str:
    """Whether an input row lies in the tensor."""
    ok = "true"
    for axis, offset in enumerate(row):
        last = (combo[axis].stop - 1) * plan.maps[axis].in_stride
        if offset >= 0 and last + offset < plan.in_sizes[axis]:
            continue
        here = f.test("ult", f.add(position[axis], offset), plan.in_sizes[axis])
        ok = here if ok == "true" else f.both(ok, here)
    return ok


def _store(
    f: Function,
    plan: Slide,
    n: Elements,
    sums: list[list[str]],
    out: str,
    rows: Value,
    columns: Value,
    mask: str | None,
) -> None:
    """Round and write a tile; with a mask, only the rows and columns that are there."""
    steps = [w.out_step * w.out_stride for w in plan.maps]
    kind = n.vector

    def put(r: int, c: int, stream: bool) -> None:
        place = f.at(out, r * steps[2] + c * steps[3], n.storage)
        value = f.get(sums[r][c], kind)
        if stream:
            n.store(f, value, place, stream=True)
        else:
            Results(n, plan.accumulate).store(f, value, place, mask)

    places = list(product(range(plan.rows), range(plan.vectors)))
    if mask is not None:
        for r, c in places:
            with f.when(f.both(f.test("slt", r, rows), f.test("slt", c, columns))):
                put(r, c, stream=False)
        return
    if plan.stream:
        # Pixels lie whole vectors apart.
        branch = f.either(f.aligned(out, n.bytes))
        for r, c in places:
            put(r, c, stream=True)
        f.otherwise(branch)
    for r, c in places:
        put(r, c, stream=False)
    if plan.stream:
        f.join(branch)


# The weight gradient.

_SUMS = ("p:x", "p:y", "p:sums", "i:i0", "i:i1", "i:i2", "i:i3", "i:rows", "i:columns", "i:from")


def _write_w(plan: Slide) -> str:
    """The IR for w."""
    m = Module()
    given = Elements(plan.dtype, plan.lanes, plan.sum, plan.converts_f16)
    result = Elements(plan.out_dtype, plan.lanes, plan.sum, plan.converts_f16)
    combo = tuple(w.segments[0] for w in plan.maps)
    plain = _sum_tile(m, "tile", plan, given, combo, masked=False)
    masked = _sum_tile(m, "tile_masked", plan, given, combo, masked=True)
    tap_weights = m.table("tap_weights", plan.taps)
    if plan.tap_ranges is None:
        raise ValueError("the plan does not say what a weight meets")
    mend = NanRepair(m, plan.tap_ranges, given, (1, 1), (1, 1), 0)

    frame = Frame(m, buffers(plan.sizes), plan.sum)
    f, at, pointers = frame.f, frame.at, frame.tensors
    sums = at["sums"]
    slab = len(plan.taps) * plan.pitch
    counts = plan.counts
    rows = -(-counts[2] // plan.rows)
    total = counts[0] * counts[1] * rows
    each = -(-total // plan.slices)
    with frame.items("first", plan.slices) as part:
        mine = f.at(sums, f.mul(part, slab), plan.sum)
        with f.loop(0, slab, plan.lanes) as i:
            f.store("zeroinitializer", f.at(mine, i, plan.sum), given.vector, size_of(plan.sum))
        first = f.mul(part, each)
        with f.loop(first, f.min(f.add(first, each), total)) as index, f.loop(0, counts[3], plan.vectors) as q3:
            q0, q1, tile_row = f.split(index, [counts[0], counts[1], rows])
            _add(f, plan, given, combo, (plain, masked), pointers, mine, (q0, q1, f.mul(tile_row, plan.rows), q3))
    frame.barrier()
    with frame.items("second", len(plan.taps)) as tap:
        offset = f.load(f.at(tap_weights, tap, "i64"), "i64", 8)
        row = f.at(sums, f.mul(tap, plan.pitch), plan.sum)
        with f.loop(0, plan.pitch, plan.lanes) as c:
            sum_ = f.load(f.at(row, c, plan.sum), given.vector, size_of(plan.sum))
            for part_ in range(1, plan.slices):
                more = f.load(f.at(row, f.add(c, part_ * slab), plan.sum), given.vector, size_of(plan.sum))
                sum_ = f.op(f"fadd {given.vector} {sum_}, {more}")
            f.store(sum_, f.at(row, c, plan.sum), given.vector, size_of(plan.sum))
            x, y = (f.at(pointers[name], c, given.storage) for name in "xy")
            mend.repair(f, x, y, tap, f.at(row, c, plan.sum), f.sub(plan.channels, c))
        with f.loop(0, plan.channels) as c:
            value = f.load(f.at(row, c, plan.sum), plan.sum, size_of(plan.sum))
            place = f.at(pointers["w"], f.add(offset, f.mul(c, plan.w_step)), result.storage)
            Results(result, plan.accumulate).store_one(f, value, place)
    return frame.end()


def _add(
    f: Function, plan: Slide, n: Elements, combo: tuple[Segment, ...], tiles: tuple[Function, Function],
    pointers: dict[str, str], sums: str, q: Sequence[Value],
) -> None:  # fmt: skip
    """Call the tile of a weight gradient at some position of y."""
    first = [f.mul(i, w.in_stride) for i, w in zip(q, plan.maps, strict=True)]
    x = f.at(pointers["x"], f.add(*(f.mul(i, s) for i, s in zip(first, plan.in_steps, strict=True))), n.storage)
    y = f.at(pointers["y"], f.add(*(f.mul(i, w.out_step) for i, w in zip(q, plan.maps, strict=True))), n.storage)
    rows, columns = f.sub(plan.counts[2], q[2]), f.sub(plan.counts[3], q[3])
    _choose(f, plan, combo, tiles, (x, y, sums, *first, rows, columns), first[3], rows, columns)


def _choose(
    f: Function, plan: Slide, combo: tuple[Segment, ...], tiles: tuple[Function, Function],
    arguments: tuple[Value, ...], column: Value, rows: Value, columns: Value,
) -> None:  # fmt: skip
    """Call the tile without masks if all its pixels are there, but for channels that fill no vector."""
    plain, masked = tiles
    whole = plan.channels // plan.lanes * plan.lanes
    if not whole:
        f.call(masked, *arguments, 0)
        return
    reach = [o for _, o in combo[3].taps] or [0]
    low, high = min(reach), max(reach) + (plan.vectors - 1) * plan.maps[3].in_stride
    fits = f.both(f.test("sge", f.add(column, low), 0), f.test("slt", f.add(column, high), plan.in_sizes[3]))
    fits = f.both(fits, f.both(f.test("sge", rows, plan.rows), f.test("sge", columns, plan.vectors)))
    branch = f.either(fits)
    f.call(plain, *arguments, 0)
    if whole < plan.channels:
        f.call(masked, *arguments, whole)
    f.otherwise(branch)
    f.call(masked, *arguments, 0)
    f.join(branch)


def _sum_tile(m: Module, name: str, plan: Slide, n: Elements, combo: tuple[Segment, ...], *, masked: bool) -> Function:
    """A function that adds the products of one tile of y to the sums, for all channels from a given one on."""
    f = m.function(name, list(_SUMS))
    x, y, sums, *position, rows, columns, first = f.args
    maps = plan.maps
    align = min(LINE, plan.lanes * plan.item & -(plan.lanes * plan.item))
    serve = _rows(plan, combo)
    order = sorted(serve)
    inside = {row: _inside(f, plan, combo, position, row) for row in order}
    uses: dict[int, list[int]] = {}  # when each row of the kernel is used, among the rows of x
    for i, row in enumerate(order):
        for _, kernel_row in serve[row]:
            uses.setdefault(kernel_row, []).append(i)
    reads = _reads(plan, combo)
    new = set() if masked else _new_below(plan, serve)
    there, given = {}, {}
    if masked:
        there = {j: f.test("ult", f.add(position[3], j), plan.in_sizes[3]) for j in reads}
        for r, col in product(range(plan.rows), range(plan.vectors)):
            given[r, col] = f.both(f.test("slt", r, rows), f.test("slt", col, columns))
    kind, bits = n.vector, f"<{plan.lanes} x i1>"
    stop = plan.channels if masked else plan.channels // plan.lanes * plan.lanes
    with f.loop(first, stop, plan.lanes) as c:
        lanes = n.mask(f, f.sub(plan.channels, c)) if masked else None

        def mask(ok: str | None, lanes: str | None = lanes) -> str | None:
            return None if ok is None else f.op(f"select i1 {ok}, {bits} {lanes}, {bits} zeroinitializer")

        ys = {}
        for r, col in product(range(plan.rows), range(plan.vectors)):
            at = f.add(r * maps[2].out_step + col * maps[3].out_step, c)
            ys[r, col] = n.load(f, f.at(y, at, n.storage), mask(given.get((r, col))))
            if not masked:
                f.prefetch(f.at(y, f.add(at, plan.rows * maps[2].out_step), n.storage))
        masks = {j: mask(ok) for j, ok in there.items()}
        totals: dict[int, list[str]] = {}
        for i, row in enumerate(order):
            for kernel_row, when in uses.items():
                if when[0] == i:
                    places = [f.at(sums, f.add((kernel_row * maps[3].kernel + k) * plan.pitch, c), plan.sum)
                              for k in range(maps[3].kernel)]  # fmt: skip
                    totals[kernel_row] = [f.variable(kind, f.load(place, kind, align)) for place in places]
            with f.when(inside[row]):
                values = _loaded(f, plan, n, x, row, c, reads, masks, below=row in new)
                for r, kernel_row in serve[row]:
                    for k3, o3 in combo[3].taps:
                        total = totals[kernel_row][k3]
                        for col in range(plan.vectors):
                            value = values[col * maps[3].in_stride + o3]
                            f.set(total, kind, fma(f, value, ys[r, col], f.get(total, kind), plan.lanes, plan.sum))
            for kernel_row, when in uses.items():
                if when[-1] == i:
                    for k, done in enumerate(totals[kernel_row]):
                        place = f.at(sums, f.add((kernel_row * maps[3].kernel + k) * plan.pitch, c), plan.sum)
                        f.store(f.get(done, kind), place, kind, align)
    return f
