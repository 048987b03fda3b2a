"""The launches of Hopper's gathers: what the kernels are given."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from ....dtypes import DTYPES
from ....spec.problem import Ints, Problem
from ...target import Target
from ..axes import LAST
from ..launches import channels
from ..records import Constants, Descriptor, Launch, Plan, Values
from .boxes import Box, Shape, power
from .parts import splitting
from .tensors import (
    PARTS,
    WEIGHTS,
    Seen,
    Weights,
    input_parts,
    natural,
    packed,
    rows_more,
    seen,
    seen_in_lines,
    views_of,
)
from .views import Space, arranged_strides
from .ways import Way, meeting

SOURCES = 8  # descriptors of the input that the kernel takes
RESULTS = 4  # those of the results
TURNED = 32  # columns of 32 bits that are turned at a time
FEW = 4  # channels of x that may come between pixels within a stride
PACK_ROWS, PACK_DEPTH = 32, 32  # of weights that a program packs


class Candidate(NamedTuple):
    """One way to compute, with the time that it is expected to take."""

    seconds: float
    way: Way
    shape: Shape
    box: Box
    tiles: Ints  # of columns, pixels, rows, planes, images and phases


def settle(p: Problem, s: Space, best: Candidate, target: Target) -> Plan:
    """The plan of the candidate that was chosen."""
    way, shape, box = best.way, best.shape, best.box
    weights = None if way.inner else natural(p, s)
    launches: tuple[Launch, ...] = ()
    areas: tuple[tuple[str, int], ...] = ()
    if weights is None:
        rows = best.tiles[0] * shape.columns
        taps = way.views[0].taps if way.inner else s.kernel
        depth = ceil(way.window(p) / shape.depth) * shape.depth
        weights = packed(rows, taps, depth, way.operands.parts)
        launches = (pack_launch(p, s, best, weights),)
        areas = ((WEIGHTS, prod(weights.shape) * way.operands.item),)
    if way.operands.parts > 1:
        splits = splitting(p, "x" if p.wanted == "y" else "y", PARTS, way.operands.parts)
        launches = (splits.launch, *launches)
        areas += ((PARTS, splits.size),)
    store = stored(p, s, way, shape.columns, box.has_lines(DTYPES[p.out_dtype].size))
    launches += (gather_launch(p, s, best, weights, store, target),)
    reads = (
        f"{box.rows} taps read one box of {'x'.join(map(str, (box.size[0] + box.more, *box.size[1:])))}"
        if box.rows > 1
        else f"each tap reads a box of {'x'.join(map(str, box.size))}"
    )
    notes = [
        f"{reads} (rows, planes, images, pixels), {box.a_stages} at once; blocks of {shape.depth} channels",
        f"weights {'stay in' if box.resident else 'pass through'} shared memory, {box.b_stages} blocks at once",
        f"{prod(best.tiles)} tiles for {target.multiprocessors} multiprocessors; results are stored by {store}",
    ]
    if way.operands.parts > 1:
        notes.append(
            f"f32 is taken apart first; {way.operands.products} products of parts in bf16, added by plain units"
        )
    if way.groups > 1:
        notes.append(f"channels of {way.groups} groups share a product, with zeros between them")
    if way.inner:
        notes.append(f"all {prod(s.stride)} positions within a stride are columns of one product")
    elif len(way.views) > 1:
        notes.append(f"{len(way.views)} phases of the stride")
    does = "matrix products by warps with roles, boxes brought by the copy engine"
    tile = (2 * shape.half, shape.columns, shape.depth)
    told = {1: "tf32", 3: "bf16x6"}[way.operands.parts] if p.dtype == "f32" else ""
    return Plan("hopper gather", does, launches, areas, best.seconds, tuple(notes), told, tile)


def result_strides(p: Problem, s: Space) -> Ints:
    """Strides of the result: those of its channels go on from group to group."""
    of = arranged_strides(p, p.wanted, s.order)
    return (*of[:2], of[1], *of[3:]) if p.g > 1 and channels(p)[1] == 1 else of


def stored(p: Problem, s: Space, way: Way, columns: int, lines: bool) -> str:
    """How results are stored: by the copy engine, in pieces of channels or pixels, or as matrix units leave them.

    `lines` says whether pixels of a box fill lines, which the copy engine may store as well.
    """
    size = DTYPES[p.out_dtype].size
    of = result_strides(p, s)
    steady = p.wanted == "y" or prod(s.stride) == 1
    turned = of[LAST] == 1 and of[2] != 1 and not way.inner and steady
    if size != 2:
        return "turned" if turned and size == 4 else "plain"
    if p.accumulate:  # what waits in shared memory has been rounded
        return "plain"
    # Copies write whole tiles of what lies side by side.
    dense = way.groups == p.g or way.columns % columns == 0
    few = p.wanted == "y" or (len(way.views) <= RESULTS and not way.inner)
    if dense and few and isinstance(seen(p, p.wanted, s.made, s.order), Seen):
        return "copy"
    whole = len(way.views) == way.loops and not way.inner
    if dense and lines and whole and isinstance(result_in_lines(p, s), Seen):
        return "lines"
    # Neighbouring columns are neighbours in memory, or neighbouring pixels.
    run = way.inner * (s.stride[2] if is_merged(p, s, way) else 1)
    if of[2] == 1 and run % 4 == 0:
        return "rows"
    return "turned" if turned else "plain"


def staged_bytes(p: Problem, shape: Shape, store: str) -> int:
    """Bytes of shared memory that results take on their way out; of 32 bits, some columns at a time."""
    item = DTYPES[p.out_dtype].size
    columns = shape.columns if item == 2 else min(TURNED, shape.columns)
    return 0 if store == "plain" else 2 * shape.half * columns * item


def result_in_lines(p: Problem, s: Space) -> Seen | str:
    """The result as the copy engine stores it where pixels lie side by side."""
    if p.wanted == "x" and s.stride[2] > 1:
        return "every pixel belongs to another phase than its neighbour"
    return seen_in_lines(p, p.wanted, s.made, s.order)


def scatters(p: Problem, s: Space, way: Way) -> bool:
    """Whether neither neighbouring columns nor neighbouring pixels of a tile are neighbours in memory."""
    of = result_strides(p, s)
    if of[2] == 1:
        return False
    phases = p.wanted == "x" and prod(s.stride) > 1 and not way.inner
    return of[LAST] != 1 or phases or way.inner > FEW


def stores(p: Problem, s: Space, way: Way, store: str) -> str:
    """What the model calls a way to store."""
    if store == "plain" and scatters(p, s, way):
        return "scattered"
    return "apart" if store == "plain" and result_strides(p, s)[2] != 1 and not way.inner else store


def inputs_of(p: Problem, s: Space, best: Candidate) -> tuple[Descriptor, ...]:
    """The boxes of the input for all views; with more rows than tiles have, those of these rows come after them."""
    given = (seen_in_lines if s.lines else seen)(p, "x" if p.wanted == "y" else "y", s.given, s.order)
    if best.way.operands.parts > 1:
        given = input_parts(p, s)
    assert isinstance(given, Seen)
    box = (*best.box.size, best.shape.depth)
    inputs = views_of(given, best.way.views, s.stride, box) if p.wanted == "y" else (given.descriptor(box),)
    if best.box.more:
        half = SOURCES // 2
        inputs += inputs[:1] * (half - len(inputs))
        return (*inputs, *(rows_more(input_, best.box.more) for input_ in inputs))
    return (*inputs, *inputs[:1] * (SOURCES - len(inputs)))


def results_of(p: Problem, s: Space, best: Candidate, store: str) -> tuple[Descriptor, ...]:
    """Halves of boxes of the results for all phases, if the copy engine stores them."""
    if store not in ("copy", "lines"):
        return inputs_of(p, s, best)[:1] * RESULTS
    made = result_in_lines(p, s) if store == "lines" else seen(p, p.wanted, s.made, s.order)
    assert isinstance(made, Seen)
    box = (*half(best.box.size), best.shape.columns)
    phases = [view.phase for view in best.way.views] if p.wanted == "x" else [(0, 0, 0)]
    found = tuple(made.descriptor(box, phase, s.stride if p.wanted == "x" else (1, 1, 1)) for phase in phases)
    return found + found[:1] * (RESULTS - len(found))


def is_merged(p: Problem, s: Space, way: Way) -> bool:
    """Whether the pixels of x within a stride lie side by side with their channels, and all of them are inside."""
    of = result_strides(p, s)
    return way.inner > 0 and of[2] in (0, 1) and of[LAST] == way.inner and s.made[2] % s.stride[2] == 0


def gather_launch(p: Problem, s: Space, best: Candidate, weights: Weights, store: str, target: Target) -> Launch:
    """The launch that takes the sums."""
    way, shape, box = best.way, best.shape, best.box
    inputs = inputs_of(p, s, best)
    out_strides = result_strides(p, s)
    unit = 2 if out_strides[2] == 1 else LAST if out_strides[LAST] == 1 else -1
    programs = min(prod(best.tiles), target.multiprocessors)
    if box.resident:
        programs = min(prod(best.tiles), target.multiprocessors // best.tiles[0] * best.tiles[0])
    values: Values = (
        ("tiles", best.tiles[:5]),
        ("sizes", way.sizes),
        ("steps", way.steps),
        ("out_sizes", s.made),
        ("out_strides", (out_strides[0], *out_strides[2:])),
        ("total", prod(best.tiles)),
        ("blocks", ceil(way.window(p) / shape.depth)),
        ("subtiles", ceil(way.columns / shape.columns)),
        ("window", way.groups * channels(p)[0]),
        ("share_made", way.columns),
        ("made", way.columns if way.inner else p.g * channels(p)[1]),
        ("images", p.n),
        ("taps", weights.shape[1] // way.operands.parts),
        ("bias_stride", p.bias_stride or 0),
    )
    constants: Constants = (
        ("VIEWS", tuple(view.entries if p.wanted == "x" else view.entries_of_y for view in way.views)),
        ("LOOPS", way.loops),
        ("TAP_STEPS", weights.tap_steps),
        ("KSTEP", way.tap_step),
        ("OSTEP", way.step),
        ("BOX", (*box.size, int(s.lines))),
        ("ROWS", box.rows),
        ("PARTS", way.operands.parts),
        ("MORE", box.more),
        ("DEPTH", shape.depth),
        ("COLUMNS", shape.columns),
        ("A_STAGES", box.a_stages),
        ("B_STAGES", box.b_stages),
        ("RESIDENT", box.resident),
        ("ACROSS", weights.across),
        ("STORE", store),
        ("STRIDE", s.stride if p.wanted == "x" else (1, 1, 1)),
        ("INNER", way.inner),
        ("MERGED", is_merged(p, s, way)),
        ("OUT_UNIT", unit),
        ("PIECE", min(16 // DTYPES[p.out_dtype].size, box.size[3], _power_of(way.steps[2])) if unit == LAST else 1),
        ("BIAS", p.bias_stride is not None),
        ("ACCUMULATE", p.accumulate),
        ("PROGRAMS", programs),
    )
    out = (p.wanted, p.out_dtype)
    tensors = (out, ("bias", p.dtype) if p.bias_stride is not None else out)
    descriptors = (
        *inputs,
        weights.descriptor(way.operands.dtype, shape.columns, shape.depth),
        *results_of(p, s, best, store),
    )
    return Launch("gather", programs, tensors, values, constants, 4, 1, "hopper.gather", descriptors)


def _power_of(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number


def half(size: Ints) -> Ints:
    """Half of a box: of its outermost axis that has more than one element."""
    at = next(axis for axis, extent in enumerate(size) if extent > 1)
    return tuple(extent // 2 if axis == at else extent for axis, extent in enumerate(size))


def pack_launch(p: Problem, s: Space, best: Candidate, weights: Weights) -> Launch:
    """The launch that packs weights."""
    way, shape = best.way, best.shape
    strides = arranged_strides(p, "w", s.order)
    if p.wanted == "x":
        strides = (strides[0], strides[2], strides[1], *strides[3:])
    summed, made = channels(p)
    first, _ = meeting(s)
    rows, count, depth = weights.shape
    count //= way.operands.parts
    values: Values = (
        ("strides", strides),
        ("kernel", s.kernel),
        ("taps", way.views[0].taps if way.inner else s.kernel),
        ("shift", tuple(pad - low * by for pad, low, by in zip(s.pad, first, s.stride, strict=True))),
        ("depth", depth),
        ("columns", shape.columns),
        ("subtiles", ceil(way.columns / shape.columns)),
        ("window", way.groups * summed),
        ("share_made", way.columns),
        ("group_made", made),
        ("group_summed", summed),
        ("made", way.columns if way.inner else p.g * made),
    )
    block = min(PACK_DEPTH, power(depth))
    constants: Constants = (
        ("STRIDE", s.stride),
        ("DILATION", s.dilation),
        ("INNER", way.inner),
        ("ROUND", way.operands.dtype == "f32"),
        ("EVEN_FIRST", s.lines and way.operands.dtype == "f32"),
        ("PARTS", way.operands.parts),
        ("ROWS", min(PACK_ROWS, shape.columns)),
        ("DEPTH", block if depth % block == 0 else 8),
    )
    programs = rows // min(PACK_ROWS, shape.columns) * count * (depth // constants[-1][1])
    tensors = (("w", p.dtype), (WEIGHTS, way.operands.dtype))
    return Launch("pack", programs, tensors, values, constants, 4, 1, "hopper.pack")
