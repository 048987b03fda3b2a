"""The code of a `PixelsInLanes` plan: y or x, one image of one channel after another.

The image is packed with its padding, and converted on the way. A tile is some rows of neighbouring pixels, a few
vectors wide. For each column of the kernel its weights stay in registers, and each vector that is loaded serves all
rows of the tile that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..emit.frame import Frame
from ..emit.store import Results
from ..ir.builder import Function, Module, Value
from ..ir.convert import Elements
from ..ir.vectors import fma, size_of, splat
from .records import PixelsInLanes


class _Functions(NamedTuple):
    """What an image is computed with."""

    inputs: Elements
    results: Elements
    tap_weights: str  # table of the taps' places in w
    pack: Function
    tiles: dict[int, Function]  # by rows


def write(plan: PixelsInLanes) -> str:
    """The IR of a kernel for this plan."""
    m = Module()
    functions = _functions(m, plan)
    frame = Frame(m, plan.buffers, plan.sum)
    f, images = frame.f, plan.images * plan.layer.channels
    with frame.items("first", plan.tasks) as task:
        first = f.mul(task, plan.task_images)
        with f.loop(first, f.min(f.add(first, plan.task_images), images)) as index:
            _image(frame, plan, functions, index)
    return frame.end()


def _functions(m: Module, plan: PixelsInLanes) -> _Functions:
    """Write the functions of a plan."""
    layer, height = plan.layer, plan.result.sizes[1]
    inputs, out = (Elements(t, plan.lanes, plan.sum, layer.converts_f16) for t in (layer.dtype, layer.out_dtype))
    tap_weights = m.table("tap_weights", layer.tap_offsets)
    pack = _pack_image(m, plan, inputs)
    heights = [rows for rows in (plan.rows, height % plan.rows) if rows]
    tiles = {rows: _tile(m, plan, out, rows) for rows in heights if rows <= height}
    return _Functions(inputs, out, tap_weights, pack, tiles)


def _image(frame: Frame, plan: PixelsInLanes, functions: _Functions, index: Value) -> None:
    """Pack and compute an image of one channel."""
    f, layer, elements, out = frame.f, plan.layer, functions.inputs, functions.results
    inputs, results = (frame.tensors[name] for name in ("xy" if layer.wanted == "y" else "yx"))
    image, channel = f.split(index, [plan.images, layer.channels])
    _widen_weights(frame, plan, elements, functions.tap_weights, channel)
    read, place = (
        f.add(*(f.mul(i, s) for i, s in zip((image, channel), t.strides, strict=True)))
        for t in (plan.source, plan.result)
    )
    f.call(functions.pack, f.at(inputs, read, elements.storage), frame.at["packed"])
    _compute(frame, plan, functions.tiles, f.at(results, place, out.storage), out.storage)


def _widen_weights(frame: Frame, plan: PixelsInLanes, n: Elements, tap_weights: str, channel: Value) -> None:
    """Copy the weights of a channel and its bias, which comes last, as accumulators."""
    f, layer, sum_ = frame.f, plan.layer, plan.sum
    weights = frame.at["weights"]
    with f.loop(0, len(layer.tap_offsets)) as tap:
        offset = f.add(f.load(f.at(tap_weights, tap, "i64"), "i64", 8), f.mul(channel, layer.w_step))
        value = n.load_one(f, f.at(frame.tensors["w"], offset, n.storage))
        f.store(value, f.at(weights, tap, sum_), sum_, size_of(sum_))
    bias = "0.0"
    if layer.bias is not None:
        bias = n.load_one(f, f.at(frame.tensors["bias"], f.mul(channel, layer.bias), n.storage))
    f.store(bias, f.at(weights, len(layer.tap_offsets), sum_), sum_, size_of(sum_))


def _compute(frame: Frame, plan: PixelsInLanes, tiles: dict[int, Function], results: str, storage: str) -> None:
    """Compute an image of one channel, tile by tile; those of the last rows may be lower."""
    f, at, packed = frame.f, frame.at, plan.packed
    depth, height, width = plan.result.sizes
    whole = height // plan.rows * plan.rows
    with f.loop(0, depth) as d:
        for rows, tile in tiles.items():
            ends = (0, whole) if rows == plan.rows else (whole, height)
            with f.loop(*ends, rows) as h, f.loop(0, width, plan.block) as w:
                read = f.add(f.mul(f.add(f.mul(d, packed.extents[1]), h), packed.pitch), w)
                place = f.add(f.mul(d, plan.result.steps[0]), f.mul(h, plan.result.steps[1]), w)
                there = f.at(results, place, storage)
                f.call(tile, f.at(at["packed"], read, plan.sum), at["weights"], there, f.sub(width, w))


def _pack_image(m: Module, plan: PixelsInLanes, n: Elements) -> Function:
    """A function that packs an image, with zeros for padding: (image, packed image)."""
    f = m.function("pack", ["p:from", "p:to"])
    source, to = f.args
    packed, sizes, steps = plan.packed, plan.source.sizes, plan.source.steps
    with f.loop(0, packed.extents[0]) as d, f.loop(0, packed.extents[1]) as h:
        row = f.at(to, f.mul(f.add(f.mul(d, packed.extents[1]), h), packed.pitch), plan.sum)
        place = [f.add(d, packed.low[0]), f.add(h, packed.low[1])]
        # A negative coordinate is a large one.
        inside = f.both(*(f.test("ult", at, size) for at, size in zip(place, sizes[:2], strict=True)))
        branch = f.either(inside)
        start = f.add(*(f.mul(at, step) for at, step in zip(place, steps[:2], strict=True)))
        _pack_row(f, plan, n, f.at(source, start, n.storage), row)
        f.otherwise(branch)
        with f.loop(0, packed.pitch, plan.lanes) as c:
            f.store("zeroinitializer", f.at(row, c, plan.sum), n.vector, size_of(plan.sum))
        f.join(branch)
    return f


def _pack_row(f: Function, plan: PixelsInLanes, n: Elements, source_row: str, packed_row: str) -> None:
    """Pack a row that lies inside the image, and prefetch that of the next image."""
    low, width, bits = plan.packed.low[2], plan.source.sizes[2], f"<{plan.lanes} x i1>"

    def copy(at: Value, c: Value, mask: str | None = None) -> None:
        value = n.load(f, f.at(source_row, at, n.storage), mask)
        f.store(value, f.at(packed_row, c, plan.sum), n.vector, size_of(plan.sum))

    with f.loop(0, plan.packed.pitch, plan.lanes) as c:
        at = f.add(c, low)
        f.prefetch(f.at(source_row, f.add(at, plan.source.strides[1]), n.storage))
        whole = f.either(f.both(f.test("sge", at, 0), f.test("sle", at, width - plan.lanes)))
        copy(at, c)
        f.otherwise(whole)
        before, until = n.mask(f, f.sub(0, at)), n.mask(f, f.sub(width, at))
        copy(at, c, f.op(f"xor {bits} {before}, {f.op(f'or {bits} {before}, {until}')}"))
        f.join(whole)


def _tile(m: Module, plan: PixelsInLanes, n: Elements, rows: int) -> Function:
    """A function that computes some rows of pixels, a few vectors wide: (packed image, weights, place, pixels left).

    The bias comes after the weights.
    """
    f = m.function(f"tile{rows}", ["p:packed", "p:weights", "p:place", "i:left"])
    packed, weights, place, left = f.args
    lanes, sum_, item, pitch = plan.lanes, plan.sum, size_of(plan.sum), plan.packed.pitch
    columns = range(plan.vectors)
    start = splat(f, lanes, sum_, f.load(f.at(weights, len(plan.layer.tap_offsets), sum_), sum_, item))
    sums = [[f.variable(n.vector, start) for _ in columns] for _ in range(rows)]
    kd, kh, kw = plan.packed.kernel
    (first_d, step_d), _, (first_w, step_w) = plan.packed.taps
    with f.loop(0, kd) as d, f.loop(0, kw) as w:
        plane = f.mul(f.add(f.mul(d, step_d), first_d), plan.packed.extents[1] * pitch)
        entry = f.add(plane, f.mul(w, step_w), first_w)
        taps = f.at(weights, f.add(f.mul(d, kh * kw), w), sum_)
        column = [splat(f, lanes, sum_, f.load(f.at(taps, k * kw, sum_), sum_, item)) for k in range(kh)]
        here = f.at(packed, entry, sum_)
        for row, served in sorted(_served(plan, rows).items()):
            for v in columns:
                value = f.load(f.at(here, row * pitch + v * lanes, sum_), n.vector, item)
                for r, k in served:
                    total = f.get(sums[r][v], n.vector)
                    f.set(sums[r][v], n.vector, fma(f, column[k], value, total, lanes, sum_))
    masks = [n.mask(f, f.sub(left, v * lanes)) for v in columns]
    whole = f.either(f.test("sge", left, plan.block))
    _store(f, plan, sums, place, [None] * plan.vectors)
    f.otherwise(whole)
    _store(f, plan, sums, place, masks)
    f.join(whole)
    return f


def _served(plan: PixelsInLanes, rows: int) -> dict[int, list[tuple[int, int]]]:
    """The rows of the packed image that a tile reads, each with the (row of the tile, row of the kernel) it serves."""
    first, step = plan.packed.taps[1]
    served: dict[int, list[tuple[int, int]]] = {}
    for k in range(plan.packed.kernel[1]):
        for r in range(rows):
            served.setdefault(r + first + step * k, []).append((r, k))
    return served


def _store(f: Function, plan: PixelsInLanes, sums: list[list[str]], place: str, masks: Sequence[str | None]) -> None:
    """Round and write the rows of a tile."""
    layer = plan.layer
    n = Elements(layer.out_dtype, plan.lanes, plan.sum, layer.converts_f16)
    for r, row in enumerate(sums):
        for v, (variable, mask) in enumerate(zip(row, masks, strict=True)):
            value = f.get(variable, n.vector)
            at = f.at(place, r * plan.result.steps[1] + v * plan.lanes, n.storage)
            Results(n, layer.accumulate).store(f, value, at, mask)
