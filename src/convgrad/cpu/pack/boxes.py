"""Copies between tensors of any strides and dtype and dense buffers: boxes of pixels packed before the work, results
unpacked after it. Padding, layout and dtype are dealt with here and nowhere else in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from ..ir.builder import Function, Module, Value, vector
from ..ir.convert import Numbers, interleave, piece, row_order, shuffle, size_of, transpose, turn_pieces
from ..plan.records import Packed
from ..target import LINE


def zero(m: Module, n: Numbers, name: str = "zero") -> Function:
    """A function that clears whole vectors: (address, elements)."""
    f = m.function(name, ["p:to", "i:count"])
    to, count = f.args
    with f.loop(0, count, n.lanes) as i:
        f.store("zeroinitializer", f.at(to, i, n.sum), n.vector, size_of(n.sum))
    return f


def pack(
    m: Module, name: str, n: Numbers, axes: Sequence[Packed], channel_step: int, pitch: int, clear: Function,
    known: int | None = None, join: tuple[int, int] | None = None, blank: bool = False, twin: int | None = None,
    woven: bool = False,
) -> Function:  # fmt: skip
    """A function that packs a box: (tensor, band, start coordinate of each axis, channels).

    The band is [entries of the axes][pitch], the channels in front; whole vectors of it are written, and up to a vector
    of pixels beyond its end. Entries outside the tensor become zeros. `known` is the number of channels, if it is
    always the same. With `join` entries are pairs: see `_joined_run` if channels lie together, `_paired_run` if pixels
    do. With `woven` channels that lie apart are interleaved. `blank` has the rest of a last vector of channels, where
    vectors are copied, hold zeros. With `twin` entries are pairs of a pixel and the one so many elements further.
    """
    f = m.function(name, ["p:from", "p:to", "i:s0", "i:s1", "i:s2", "i:s3", "i:channels"])
    source, band, *starts, channels = f.args
    if join is None:
        pitch *= 1 if twin is None else 2
        run = _run(m, f"{name}_run", n, axes[-1], channel_step, pitch, clear, known, blank, twin, woven)
        width = axes[-1].extent * pitch
    else:
        if channel_step == 1:
            run = _joined_run(m, f"{name}_run", n, axes[-1], pitch, known, *join)
        else:
            run = _paired_run(m, f"{name}_run", n, axes[-1], channel_step, pitch, clear)
        width = axes[-1].extent // join[1] * pitch * 2
    with _rows(m, f, name, axes, starts) as (row, inside, offset):
        to = f.at(band, f.mul(row, width), n.sum)
        branch = f.either(inside)
        start_row = f.at(source, offset, n.storage)
        last = axes[-1]
        if len(last.offsets) == 1:
            f.call(run, start_row, to, f.add(starts[3], last.offsets[0]), channels)
        else:
            table = m.table(f"{name}_3", last.offsets)
            with f.loop(0, len(last.offsets)) as r:
                shift = f.load(f.at(table, r, "i64"), "i64", 8)
                segment = f.at(to, f.mul(r, width // len(last.offsets)), n.sum)
                f.call(run, start_row, segment, f.add(starts[3], shift), channels)
        f.otherwise(branch)
        f.call(clear, to, width)
        f.join(branch)
    return f


@contextmanager
def _rows(
    m: Module, f: Function, name: str, axes: Sequence[Packed], starts: Sequence[Value]
) -> Iterator[tuple[Value, str, Value]]:
    """Walk over the rows of a band: gives which it is, whether it lies in the tensor, and elements to where it does."""
    steps = [1, 1, 1]
    for i in (1, 0):
        steps[i] = steps[i + 1] * axes[i + 1].extent
    with f.loop(0, axes[0].extent) as e0, f.loop(0, axes[1].extent) as e1, f.loop(0, axes[2].extent) as e2:
        offset: Value = 0
        inside = ""
        row: Value = 0
        for entry, axis, start, step, index in zip((e0, e1, e2), axes, starts, steps, range(3), strict=False):
            at = _coordinate(m, f, f"{name}_{index}", axis, start, entry)
            ok = f.test("ult", at, axis.size)
            inside = ok if not inside else f.both(inside, ok)
            offset = f.add(offset, f.mul(at, axis.stride))
            row = f.add(row, f.mul(entry, step))
        yield row, inside, offset


def string(
    m: Module, name: str, n: Numbers, axes: Sequence[Packed], channel_step: int, pitch: int, clear: Function,
    first: int | None, twin: int | None = None,
) -> Function:  # fmt: skip
    """A function that packs a box channel by channel: (tensor, band, start coordinate of each axis, channels).

    The band is [channels][pitch], with the entries of the axes in front; whole vectors of it are written, and up to a
    vector beyond its end. Entries outside the tensor become zeros. Along the last axis pixels lie together in the
    tensor; `first` is where it starts, if that is always the same. With `twin` each entry is followed by that of the
    pixel so many elements further.
    """
    f = m.function(name, ["p:from", "p:to", "i:s0", "i:s1", "i:s2", "i:s3", "i:channels"])
    source, band, *starts, channels = f.args
    last = axes[-1]
    begin: Value = starts[3] if first is None else first
    shifts = _shifts(twin)
    twins = len(shifts)
    each = replace(n, lanes=n.lanes // twins)
    wide = replace(n, lanes=each.lanes * last.step)
    with f.loop(0, channels) as c, _rows(m, f, name, axes, starts) as (row, inside, offset):
        to = f.at(band, f.add(f.mul(c, pitch), f.mul(row, twins * last.extent)), n.sum)
        start_row = f.at(source, f.add(f.mul(c, channel_step), offset), n.storage)

        def move(i: Value, to: str, start: Value, start_row: str = start_row) -> None:
            at = f.add(start, f.mul(i, last.step))
            mask = wide.window(f, f.sub(0, at), f.sub(last.size, at))
            values = [_thin(f, each, f.at(start_row, f.add(at, s), n.storage), last.step, mask) for s in shifts]
            value = values[0] if twins == 1 else interleave(f, each.vector, each.lanes, *values)
            f.store(value, f.at(to, f.mul(i, twins), n.sum), n.vector, size_of(n.sum))

        def run(which: Value, shift: Value, to: str = to) -> None:
            to = f.at(to, f.mul(which, twins * last.count), n.sum)
            start = f.add(begin, shift)
            if last.count <= 8 * each.lanes:
                for i in range(0, last.count, each.lanes):
                    move(i, to, start)
                return
            with f.loop(0, last.count, each.lanes) as place:
                move(place, to, start)

        branch = f.either(inside)
        if len(last.offsets) <= 8:
            for r, shift in enumerate(last.offsets):
                run(r, shift)
        else:
            table = m.table(f"{name}_3", last.offsets)
            with f.loop(0, len(last.offsets)) as which:
                run(which, f.load(f.at(table, which, "i64"), "i64", 8))
        f.otherwise(branch)
        f.call(clear, to, twins * last.extent)
        f.join(branch)
    return f


def _shifts(twin: int | None) -> tuple[int, ...]:
    """How far from a pixel those that make its entry are."""
    return (0,) if twin is None else (0, twin)


def _thin(f: Function, n: Numbers, place: str, step: int, mask: str | None) -> str:
    """A vector of elements that lie `step` apart: a longer one is read, by a mask, thinned out and then widened.

    Widened first, four channels of f16 that are thinned to a fourth and interleaved come out wrong: LLVM 22 errs.
    """
    wide = replace(n, lanes=n.lanes * step, sum=n.storage)
    value = wide.load(f, place, mask)
    if step > 1:
        value = shuffle(f, wide.vector, value, value, [i * step for i in range(n.lanes)])
    return n.widen(f, value, n.lanes)


def _coordinate(m: Module, f: Function, name: str, axis: Packed, start: Value, entry: Value) -> Value:
    """The tensor's coordinate of a band entry."""
    if len(axis.offsets) == 1:
        return f.add(start, f.mul(entry, axis.step), axis.offsets[0])
    r, q = f.split(entry, [len(axis.offsets), axis.count])
    shift = f.load(f.at(m.table(name, axis.offsets), r, "i64"), "i64", 8)
    return f.add(start, f.mul(q, axis.step), shift)


def _run(
    m: Module, name: str, n: Numbers, axis: Packed, channel_step: int, pitch: int, clear: Function, known: int | None,
    blank: bool, twin: int | None, woven: bool,
) -> Function:  # fmt: skip
    """A function that packs pixels along the last axis: (row, band, first coordinate, channels)."""
    f = m.function(name, ["p:row", "p:to", "i:first", "i:channels"])
    row, to, first, channels = f.args
    step = axis.step
    below = f.max(f.sub(0, first), 0)
    left = f.max(f.sub(axis.size, first), 0)
    if step > 1:
        below, left = f.div(f.add(below, step - 1), step), f.div(f.add(left, step - 1), step)
    low = f.min(below, axis.count)
    high = f.max(low, f.min(left, axis.count))
    f.call(clear, to, f.mul(low, pitch))
    square = n.lanes >= 4 and n.lanes & (n.lanes - 1) == 0
    item = size_of(n.sum)
    shifts = _shifts(twin)
    if channel_step == 1 and _flat(axis, pitch, known):
        source = f.at(row, f.mul(f.add(first, low), pitch), n.storage)
        _copy(f, n, source, f.at(to, f.mul(low, pitch), n.sum), f.mul(f.sub(high, low), pitch), None)
    elif channel_step == 1 and blank and known == axis.stride == pitch - 1 and step == 1 and n.lanes % pitch == 0:
        # Pixels follow each other: several at a time, with a zero after each.
        together = n.lanes // pitch
        order = [n.lanes if c == known else i * known + c for i in range(together) for c in range(pitch)]
        with f.loop(low, high, together) as i:
            source = f.at(row, f.mul(f.add(first, i), known), n.storage)
            mask = n.mask(f, f.mul(f.min(f.sub(high, i), together), known))
            value = shuffle(f, n.vector, n.load(f, source, mask), "zeroinitializer", order)
            f.store(value, f.at(to, f.mul(i, pitch), n.sum), n.vector, item)
    elif channel_step == 1:
        with f.loop(low, high) as i:
            source = f.at(row, f.mul(f.add(first, f.mul(i, step)), axis.stride), n.storage)
            pixel = f.at(to, f.mul(i, pitch), n.sum)
            _copy(f, n, source, pixel, channels, known)
    elif woven and known is not None and axis.stride == 1 and step <= 4:
        weave = _weave(m, f"{name}_weave", n, known, channel_step, pitch, step)
        with f.loop(low, high, n.lanes) as i:
            source = f.at(row, f.add(first, f.mul(i, step)), n.storage)
            f.call(weave, source, f.at(to, f.mul(i, pitch), n.sum), f.sub(high, i))
    elif axis.stride == 1 and step <= 4 and square:
        # Channels lie apart and pixels together: turn squares. A short last square writes garbage beyond the run, which
        # whatever comes next overwrites.
        if twin is None:
            whole = known is not None and known % n.lanes == 0
            turn = _turn(m, f"{name}_turn", n, channel_step, pitch, step, blank, whole=whole)
        else:
            turn = _turn_twins(m, f"{name}_turn", n, channel_step, pitch, step, twin)
        last = f.sub(channels, 1)
        with f.loop(0, channels, n.lanes) as c, f.loop(low, high, n.lanes) as i:
            source = f.at(row, f.add(f.mul(c, channel_step), first, f.mul(i, step)), n.storage)
            target = f.at(to, f.add(f.mul(i, pitch), f.mul(c, len(shifts))), n.sum)
            f.call(turn, source, target, f.sub(high, i), f.sub(last, c))
    else:
        with f.loop(low, high) as i:
            source = f.at(row, f.mul(f.add(first, f.mul(i, step)), axis.stride), n.storage)
            pixel = f.at(to, f.mul(i, pitch), n.sum)
            with f.loop(0, channels) as c:
                for t, shift in enumerate(shifts):
                    value = n.load_one(f, f.at(source, f.add(f.mul(c, channel_step), shift), n.storage))
                    f.store(value, f.at(pixel, f.add(f.mul(c, len(shifts)), t), n.sum), n.sum, item)
    f.call(clear, f.at(to, f.mul(high, pitch), n.sum), f.mul(f.sub(axis.count, high), pitch))
    return f


def _flat(axis: Packed, pitch: int, known: int | None) -> bool:
    """Whether pixels follow each other without a gap, in the tensor as in the band, so that a run of them is copied as
    if it were one.
    """
    return pitch == known == axis.stride and axis.step == 1


def _joined_run(
    m: Module, name: str, n: Numbers, axis: Packed, pitch: int, known: int | None, apart: int, step: int
) -> Function:
    """A function that packs pairs of pixels along the last axis: (row, band, first coordinate, channels).

    Entry e holds the elements of pixels e*step and e*step + apart side by side, channel by channel.
    """
    f = m.function(name, ["p:row", "p:to", "i:first", "i:channels"])
    row, to, first, channels = f.args

    def join(c: Value, pixels: list[str], entry: str, masks: Sequence[str | None] = (None, None)) -> None:
        two = [n.load(f, f.at(p, c, n.storage), mask) for p, mask in zip(pixels, masks, strict=True)]
        place = f.at(entry, f.mul(c, 2), n.sum)
        f.store(interleave(f, n.vector, n.lanes, *two), place, f"<{2 * n.lanes} x {n.sum}>", size_of(n.sum))

    def join_all(count: Value, pixels: list[str], entry: str) -> None:
        _each_vector(f, n, count, 4, lambda c, mask: join(c, pixels, entry, [mask] * 2))

    def places(e: Value) -> tuple[list[str], list[str], str]:
        at = [f.add(first, f.mul(f.add(f.mul(e, step), shift), axis.step)) for shift in (0, apart)]
        pixels = [f.at(row, f.mul(i, axis.stride), n.storage) for i in at]
        return [f.test("ult", i, axis.size) for i in at], pixels, f.at(to, f.mul(e, 2 * pitch), n.sum)

    def join_there(inside: list[str], pixels: list[str], entry: str) -> None:
        """Of a pixel outside nothing is read."""
        there = [f.choose(i, channels, 0) for i in inside]
        with f.loop(0, channels, n.lanes) as c:
            join(c, pixels, entry, [n.mask(f, f.sub(count, c)) for count in there])

    entries = axis.extent // step
    if step == 1 and _flat(axis, pitch, known):
        # Entries follow each other like the pixels: all that lie inside are one.
        low = f.min(f.max(f.sub(0, first), 0), entries)
        high = f.max(low, f.min(f.sub(axis.size - apart, first), entries))
        with f.loop(0, low) as e:
            join_there(*places(e))
        run = [f.at(row, f.mul(f.add(first, low, shift), pitch), n.storage) for shift in (0, apart)]
        join_all(f.mul(f.sub(high, low), pitch), run, f.at(to, f.mul(low, 2 * pitch), n.sum))
        with f.loop(high, entries) as e:
            join_there(*places(e))
        return f
    with f.loop(0, entries) as e:
        inside, pixels, entry = places(e)
        branch = f.either(f.both(*inside))
        join_all(channels if known is None else known, pixels, entry)
        f.otherwise(branch)
        join_there(inside, pixels, entry)
        f.join(branch)
    return f


def _paired_run(
    m: Module, name: str, n: Numbers, axis: Packed, channel_step: int, pitch: int, clear: Function
) -> Function:
    """A function that packs pairs of neighbouring pixels, which lie together: (row, band, first coordinate, channels).

    Entry e holds the elements of pixels 2*e and 2*e + 1 side by side, channel by channel. The first coordinate is not
    negative. Squares of pairs are turned; a short last one writes garbage beyond, as in `_run`.
    """
    f = m.function(name, ["p:row", "p:to", "i:first", "i:channels"])
    row, to, first, channels = f.args
    there = f.min(f.max(f.sub(axis.size, first), 0), axis.count)
    entries = f.div(f.add(there, 1), 2)
    turn = _turn(m, f"{name}_turn", n, channel_step, pitch, pairs=True)
    last = f.sub(channels, 1)
    with f.loop(0, channels, n.lanes) as c, f.loop(0, entries, n.lanes) as e:
        source = f.at(row, f.add(f.mul(c, channel_step), first, f.mul(e, 2)), n.storage)
        target = f.at(to, f.mul(f.add(f.mul(e, pitch), c), 2), n.sum)
        f.call(turn, source, target, f.sub(there, f.mul(e, 2)), f.sub(last, c))
    width = 2 * pitch
    f.call(clear, f.at(to, f.mul(entries, width), n.sum), f.mul(f.sub(axis.count // 2, entries), width))
    return f


def _copy(f: Function, n: Numbers, source: str, to: str, channels: Value, known: int | None) -> None:
    """Copy channels that lie together, of a pixel or of a run: whole vectors, several at a time if it is `known` how
    many there are.
    """
    item = size_of(n.sum)

    def move(c: Value, mask: str | None = None) -> None:
        f.store(n.load(f, f.at(source, c, n.storage), mask), f.at(to, c, n.sum), n.vector, item)

    _each_vector(f, n, channels if known is None or known % n.lanes else known, 8, move)


def _each_vector(f: Function, n: Numbers, count: Value, most: int, do: Callable[[Value, str | None], None]) -> None:
    """Do something with so many elements, a vector at a time: at its first element, with a mask if it is not whole.

    If it is known how many there are, up to `most` vectors follow each other without a loop.
    """
    whole = f.mul(f.div(count, n.lanes), n.lanes)
    group = 1
    if isinstance(whole, int):
        group = next(g for g in (8, 4, 3, 2, 1) if g <= most and whole // n.lanes % g == 0)
    once = whole == group * n.lanes
    with nullcontext(0) if once else f.loop(0, whole, group * n.lanes) as c:
        for v in range(group):
            do(f.add(c, v * n.lanes), None)
    rest = f.sub(count, whole)
    if rest != 0:
        with f.when(f.test("ne", rest, 0)):
            do(whole, n.mask(f, rest))


def each_piece(f: Function, count: Value, size: int, do: Callable[[Value, Value], None]) -> None:
    """Do something with so many elements, a few at a time: with the first of them, and how many there are."""
    whole = f.mul(f.div(count, size), size)
    if isinstance(whole, int) and whole <= 2 * size:
        for first in range(0, whole, size):
            do(first, size)
    else:
        with f.loop(0, whole, size) as at:
            do(at, size)
    rest = f.sub(count, whole)
    if rest != 0:
        with nullcontext() if isinstance(rest, int) else f.when(f.test("sgt", rest, 0)):
            do(whole, rest)


def _turn(
    m: Module, name: str, n: Numbers, channel_step: int, pitch: int, step: int = 1, blank: bool = False,
    pairs: bool = False, whole: bool = False,
) -> Function:  # fmt: skip
    """A function that turns one square: (tensor, band, pixels there, last channel there). Channels beyond repeat it, or
    are zeros if `blank`; `whole` says that there are none.

    Pixels lie `step` apart: a longer vector is read and thinned out. A few are turned at a time, no more than there
    are, and then widened. With `pairs`, two neighbours of 16 bits are turned as one number of 32.
    """
    f = m.function(name, ["p:from", "p:to", "i:pixels", "i:last"])
    source, to, pixels, last = f.args
    unit, together = ("float", 2) if pairs else (n.storage, 1)
    few = piece(n.lanes, unit)
    kind = vector(few, unit)
    read = replace(n, lanes=together * few, sum=n.storage)
    wide = replace(read, lanes=read.lanes * step)
    element = unit if pairs else n.sum

    def turn(first: Value, count: Value, channels: Sequence[Value]) -> None:
        """Turn so many pixels of a piece. Channels that are all there are `known`."""
        mask = wide.window(f, 0, f.add(f.mul(f.sub(count, 1), step), 1))
        rows = []
        for i, channel in enumerate(channels):
            at = f.at(source, f.add(channel, f.mul(first, step)), n.storage)
            row = _thin(f, read, at, step, mask)
            if pairs:
                row = f.op(f"bitcast {read.vector} {row} to {kind}")
            if blank and channels is not known:
                row = f.op(f"select i1 {f.test('sle', i, last)}, {kind} {row}, {kind} zeroinitializer")
            rows.append(row)
        entry = f.div(first, together)
        for i, row in enumerate(turn_pieces(f, rows, unit)):
            value = row if pairs else n.widen(f, row, n.lanes)
            place = f.at(to, f.mul(f.add(entry, i), pitch), element)
            f.store(value, place, vector(n.lanes, element), size_of(element))

    known = [i * channel_step for i in range(n.lanes)]
    side = together * n.lanes
    full = f.test("sge", pixels, side)
    branch = f.either(full if whole else f.both(full, f.test("sge", last, n.lanes - 1)))
    for first in range(0, side, read.lanes):
        turn(first, read.lanes, known)
    f.otherwise(branch)
    there = known if whole else [f.mul(f.min(last, i), channel_step) for i in range(n.lanes)]
    each_piece(f, f.min(pixels, side), read.lanes, lambda first, count: turn(first, count, there))
    f.join(branch)
    return f


def _turn_twins(m: Module, name: str, n: Numbers, channel_step: int, pitch: int, step: int, twin: int) -> Function:
    """`_turn` for entries of a pixel and the one `twin` elements further: two elements are turned as one."""
    f = m.function(name, ["p:from", "p:to", "i:pixels", "i:last"])
    source, to, pixels, last = f.args
    wide = replace(n, lanes=n.lanes * step)
    mask = wide.mask(f, f.add(f.mul(f.sub(pixels, 1), step), 1))
    kind = vector(n.lanes, "float")
    rows = []
    for i in range(n.lanes):
        channel = f.mul(f.min(last, i), channel_step)
        two = [_thin(f, n, f.at(source, f.add(channel, s), n.storage), step, mask) for s in _shifts(twin)]
        both = interleave(f, n.vector, n.lanes, *two)
        rows.append(f.op(f"bitcast {vector(2 * n.lanes, n.sum)} {both} to {kind}"))
    for i, row in enumerate(transpose(f, rows, n.lanes, "float")):
        f.store(row, f.at(to, i * pitch, n.sum), kind, size_of(n.sum))
    return f


def _weave(m: Module, name: str, n: Numbers, channels: int, channel_step: int, pitch: int, step: int) -> Function:
    """A function that interleaves a vector of pixels of a few channels: (tensor, band, pixels there).

    Channels beyond those of the tensor are zeros.
    """
    f = m.function(name, ["p:from", "p:to", "i:pixels"])
    source, to, pixels = f.args
    wide = replace(n, lanes=n.lanes * step)
    mask = wide.mask(f, f.add(f.mul(f.sub(pixels, 1), step), 1))
    rows = [_thin(f, n, f.at(source, c * channel_step, n.storage), step, mask) for c in range(channels)]
    rows += ["zeroinitializer"] * (pitch - channels)
    for v in range(pitch):
        places = [divmod(v * n.lanes + lane, pitch) for lane in range(n.lanes)]  # (pixel, channel) of each lane
        value = shuffle(f, n.vector, rows[0], rows[0], [pixel for pixel, _ in places])
        for c, row in enumerate(rows[1:], start=1):
            order = [n.lanes + pixel if c == at else lane for lane, (pixel, at) in enumerate(places)]
            value = shuffle(f, n.vector, value, row, order)
        f.store(value, f.at(to, v * n.lanes, n.sum), n.vector, size_of(n.sum))
    return f


def unpack(
    m: Module, name: str, n: Numbers, steps: Sequence[int], extents: Sequence[int], channel_step: int, pitch: int,
    accumulate: bool, stream: bool, one_row: bool, twice: bool, whole_vectors: bool,
) -> Function:  # fmt: skip
    """A function that writes a stage to the tensor: (stage, tensor, counts of each axis, channels).

    The stage is [extents of the axes][pitch] in accumulators; counts say how much of it is there. With `one_row` rows
    follow each other, in the tensor as in the stage. For `twice` and `whole_vectors` see `turn_back`.
    """
    f = m.function(name, ["p:from", "p:to", "i:n0", "i:n1", "i:n2", "i:n3", "i:channels"])
    stage, to, *counts, channels = f.args
    n0, n1, n2, n3 = list[Value](counts)
    square = n.lanes >= 4 and n.lanes & (n.lanes - 1) == 0
    item = size_of(n.sum)
    turn, side = None, n.lanes
    if channel_step != 1 and steps[3] == 1 and square:
        if one_row:
            n2, n3 = 1, f.mul(n2, n3)
        side *= 2 if twice else 1
        turn = turn_back(
            m, f"{name}_turn", n, channel_step, pitch, accumulate, stream=stream, twice=twice, whole=whole_vectors
        )
    with f.loop(0, n0) as e0, f.loop(0, n1) as e1, f.loop(0, n2) as e2:
        row = f.add(f.mul(f.add(f.mul(f.add(f.mul(e0, extents[1]), e1), extents[2]), e2), extents[3] * pitch))
        source = f.at(stage, row, n.sum)
        target = f.at(to, f.add(f.mul(e0, steps[0]), f.mul(e1, steps[1]), f.mul(e2, steps[2])), n.storage)
        if turn is not None:
            with f.loop(0, channels, n.lanes) as c, f.loop(0, n3, side) as i:
                square_from = f.at(source, f.add(f.mul(i, pitch), c), n.sum)
                square_to = f.at(target, f.add(f.mul(c, channel_step), i), n.storage)
                f.call(turn, square_from, square_to, f.sub(n3, i), f.min(f.sub(channels, c), n.lanes))
        elif channel_step == 1:
            with f.loop(0, n3) as i:
                pixel = f.at(source, f.mul(i, pitch), n.sum)
                place = f.at(target, f.mul(i, steps[3]), n.storage)
                whole = f.mul(f.div(channels, n.lanes), n.lanes)
                with f.loop(0, whole, n.lanes) as c:
                    finish(f, n, f.load(f.at(pixel, c, n.sum), n.vector, item), f.at(place, c, n.storage), accumulate)
                rest = f.sub(channels, whole)
                with f.when(f.test("ne", rest, 0)):
                    value = f.load(f.at(pixel, whole, n.sum), n.vector, item)
                    finish(f, n, value, f.at(place, whole, n.storage), accumulate, n.mask(f, rest))
        else:
            with f.loop(0, n3) as i, f.loop(0, channels) as c:
                value = f.load(f.at(source, f.add(f.mul(i, pitch), c), n.sum), n.sum, item)
                place = f.at(target, f.add(f.mul(i, steps[3]), f.mul(c, channel_step)), n.storage)
                if accumulate:
                    value = f.op(f"fadd {n.sum} {value}, {n.load_one(f, place)}")
                n.store_one(f, value, place)
    return f


def finish(f: Function, n: Numbers, value: str, place: str, accumulate: bool, mask: str | None = None) -> None:
    """Write a vector of results, added to what is there if asked."""
    if accumulate:
        value = f.op(f"fadd {n.vector} {value}, {n.load(f, place, mask)}")
    n.store(f, value, place, mask)


def write_rows(
    f: Function, n: Numbers, values: Sequence[Sequence[str]], places: Sequence[str], left: Value, *, accumulate: bool,
    stream: bool,
) -> None:  # fmt: skip
    """Round and write the rows of a tile, each a run of vectors of which `left` lanes are there.

    To stream, all rows must be whole and aligned. When adding to what is there, all is read before any is written: rows
    may repeat.
    """
    vectors = range(len(values[0]))
    whole = f.test("eq", left, len(vectors) * n.lanes)
    for place in places if stream else ():
        whole = f.both(whole, f.aligned(place, n.run_align))

    def write(masks: Sequence[str | None]) -> None:
        at = [[f.at(place, v * n.lanes, n.storage) for v in vectors] for place in places]
        sums = [list(row) for row in values]
        if accumulate:
            for row, addresses in zip(sums, at, strict=True):
                for v in vectors:
                    row[v] = f.op(f"fadd {n.vector} {row[v]}, {n.load(f, addresses[v], masks[v])}")
        for row, addresses in zip(sums, at, strict=True):
            if masks[0] is None:
                n.store_run(f, row, addresses[0], stream=stream)
                continue
            for v in vectors:
                n.store(f, row[v], addresses[v], masks[v])

    branch = f.either(whole)
    write([None] * len(vectors))
    f.otherwise(branch)
    write([n.mask(f, f.sub(left, v * n.lanes)) for v in vectors])
    f.join(branch)


def put(f: Function, n: Numbers, value: str, place: str, left: Value) -> None:
    """Write a vector of results past the caches if it is whole and aligned, else what is left of it as usual."""
    branch = f.either(f.both(f.test("sge", left, n.lanes), f.aligned(place, n.bytes)))
    n.store(f, value, place, stream=True)
    f.otherwise(branch)
    n.store(f, value, place, n.mask(f, left))
    f.join(branch)


def turned(f: Function, n: Numbers, rows: Sequence[str]) -> tuple[list[str], Numbers]:
    """Vectors of sums, turned: for each lane a vector with its sum of each, and how it is written.

    As many vectors as lanes; or twice as many, of sums that are narrower in the tensor: they are rounded before, two to
    a vector.
    """
    if len(rows) == n.lanes:
        return transpose(f, list(rows), n.lanes, n.sum), n
    raw = Numbers(n.dtype, len(rows), "i16", n.half)
    twos = [n.narrow_two(f, rows[a], rows[b]) for a, b in row_order(n.lanes, 2, raw.sum)]
    return transpose(f, twos, raw.lanes, raw.sum), raw


def turn_back(
    m: Module, name: str, n: Numbers, channel_step: int, pitch: int, accumulate: bool, *, stream: bool = False,
    twice: bool = False, whole: bool = False,
) -> Function:  # fmt: skip
    """A function that turns one square of the stage into the tensor: (stage, tensor, pixels there, channels there).

    With `twice`, of narrow results that are not added to others, it is twice as many pixels as channels. `whole` says
    that channels are always as many as lanes.
    """
    f = m.function(name, ["p:from", "p:to", "i:pixels", "i:channels"])
    source, to, pixels, channels = f.args
    if twice and accumulate:
        raise ValueError("results that are added to others are not rounded before")
    out = n  # numbers as they are written
    rounded: list[str] = []
    if twice:
        rows = [f.load(f.at(source, i * pitch, n.sum), n.vector, size_of(n.sum)) for i in range(2 * n.lanes)]
        rounded, out = turned(f, n, rows)

    def vectors() -> Iterator[str]:
        """For each channel a vector of pixels; a few channels are turned when their turn comes."""
        yield from rounded
        few = piece(n.lanes, n.sum)
        for c in range(0, 0 if twice else n.lanes, few):
            places = [f.at(source, i * pitch + c, n.sum) for i in range(n.lanes)]
            yield from turn_pieces(f, [f.load(p, vector(few, n.sum), size_of(n.sum)) for p in places], n.sum)

    def from_memory(write: Callable[[str, str], None]) -> None:
        square = f.name_value()
        f.allocas.append(f"{square} = alloca [{n.lanes} x {out.vector}], align {LINE}")
        align = LINE if out.lanes * size_of(out.sum) >= LINE else size_of(out.sum)
        for i, lane in enumerate(vectors()):
            f.store(lane, f.at(square, i, out.vector), out.vector, align)
        with f.loop(0, channels) as c:
            value = f.load(f.at(square, c, out.vector), out.vector, size_of(out.sum))
            write(value, f.at(to, f.mul(c, channel_step), n.storage))

    if stream:
        # Channels may lie anyhow, so each row of the square is asked.
        from_memory(lambda value, place: put(f, out, value, place, pixels))
        return f
    mask = out.mask(f, pixels)
    if out.lanes * size_of(out.sum) < LINE:  # where vectors are short, masks may be many branches
        from_memory(lambda value, place: finish(f, out, value, place, accumulate, mask))
        return f
    branch = None if whole else f.either(f.test("sge", channels, n.lanes))
    for i, value in enumerate(vectors()):
        finish(f, out, value, f.at(to, i * channel_step, n.storage), accumulate, mask)
    if branch is not None:
        f.otherwise(branch)
        from_memory(lambda value, place: finish(f, out, value, place, accumulate, mask))
        f.join(branch)
    return f
