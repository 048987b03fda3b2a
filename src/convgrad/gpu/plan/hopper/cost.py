"""What a gather of Hopper's is expected to take."""

from __future__ import annotations

from math import ceil, prod

from ....dtypes import DTYPES
from ....spec.problem import Problem
from ...target import Target
from . import parts
from .boxes import Box, Shape
from .views import View, live_taps
from .ways import Way

LAUNCH = 3e-6  # seconds that a launch takes by itself
MATRIX_SHARE = 0.9  # of the matrix units' rate, that is reached within a tile
CACHE_BYTES = 64  # that a multiprocessor gets from the second cache in a cycle
SHORT_BYTES = 20  # the same, of parts whose channels take less than 128 bytes of a pixel
BANDWIDTH_SHARE = 0.8
OVERLAP = 0.1  # of products or copies, whichever take less, is not hidden
STEP = 24  # cycles of a block of the sum besides its products
APART = 1.2  # of products of parts: their sums leave the matrix units after every block
TALL = 1.03  # of a block, where a box of more than 128 positions comes for every tap
THIN = {2: 1.25, 3: 1.1, 4: 1.02}  # by the blocks that are on their way: what waiting for memory makes of one
FEW_BOXES = 1.05  # as long memory takes, where two boxes at most are on their way
TILE = 600  # cycles of a tile besides its sum
STORED_BYTES = {
    "copy": 64,
    "lines": 40,
    "rows": 20,
    "turned": 20,
    "apart": 1.1,
    "scattered": 0.4,
}  # of results, in a cycle, by how they are stored
PLAIN_BYTES = 5  # for each byte of a result, where nothing is done for neighbours
NARROW = {32: 1.5, 64: 1.15}  # by the bytes of a line of the input: pieces below 128 bytes come slower
SHORT = 1.02  # as long a box takes, whose lines of f32 are shorter than LONG: 146 microseconds became 155
LONG = 512  # bytes
START = 2000  # cycles of a program besides its tiles
EXACT = 4  # tiles of a program up to which the longest program is looked for, one by one


def seconds(p: Problem, way: Way, shape: Shape, box: Box, target: Target, store: str) -> float:
    """The time that a candidate is expected to take: of the program with most to do, or of memory."""
    blocks = ceil(way.window(p) / shape.depth)
    costs = [blocks * _box_cycles(way, shape, box, view, target) for view in way.views]
    item = DTYPES[p.out_dtype].size
    stored = shape.results * item / STORED_BYTES.get(store, PLAIN_BYTES * item)
    if store == "turned" or (store == "plain" and way.inner):  # memory comes in pieces of 32 bytes
        run, whole = box.size[3] * item * max(way.inner, 1), 32
        if store == "turned" and item == 4:
            whole = 64
            if way.steps[2] % 4:
                # Rows that are no multiple of 16 bytes leave in smaller pieces, which took several times as long.
                stored *= 64 / (item * (way.steps[2] & -way.steps[2]))
                whole = 32
        stored *= max(1.0, whole / run)
    tile = TILE + stored
    columns = way.column_tiles(p, shape.columns) if box.resident else 1
    programs = target.multiprocessors // columns * columns
    cycles = START + _longest(p, way, shape, box, programs, (costs, tile))
    moved, before = p.bytes, 0.0
    if way.operands.parts > 1:
        role = "x" if p.wanted == "y" else "y"
        moved += 2 * p.size(role)
        before = parts.seconds(p, parts.splitting(p, role, role, way.operands.parts), target)
    compute, memory = cycles / (target.clock * 1e9), moved / (target.bandwidth * 1e9 * BANDWIDTH_SHARE)
    memory *= FEW_BOXES if box.a_stages < 3 else 1.0
    # Of equals, the better one has less to compute.
    return max(compute, memory) + LAUNCH + before + compute / 100


def _box_cycles(way: Way, shape: Shape, box: Box, view: View, target: Target) -> float:
    """The cycles of a box of the input, and of all that is multiplied by it."""
    item = way.operands.item
    rows = box.rows if len(way.views) == 1 else min(box.rows, max(view.taps[1], 1))
    # Products are as long as the matrix units take, or as shared memory takes to feed them: by rows of 64.
    narrow = max(shape.columns / 2, (64 + shape.columns) / 4) * (2 * shape.half / 64) * (shape.depth * item / 32)
    uses = rows * way.operands.products
    products = uses * narrow * 4096 / target.matrix / MATRIX_SHARE
    products *= APART if way.operands.parts > 1 else 1.0
    loads = way.operands.parts * box.reads * shape.depth + (0 if box.resident else uses * shape.depth * shape.columns)
    short = way.operands.parts > 1 and shape.depth * item < 128
    copies = loads * item / (SHORT_BYTES if short else CACHE_BYTES)
    # Few blocks in flight wait for memory now and then.
    waiting = min(box.a_stages * rows, box.a_stages * rows if box.resident else box.b_stages)
    thin = THIN.get(waiting, 1.0)
    tall = TALL if rows == 1 and 2 * shape.half > 128 else 1.0
    return max(products, copies) * thin * tall + min(products, copies) * OVERLAP + STEP


def _longest(p: Problem, way: Way, shape: Shape, box: Box, programs: int, costs: tuple[list[float], float]) -> float:
    """The cycles of the program with most to do. `costs`: of a box of each view, of a tile."""
    outer = way.column_tiles(p, shape.columns) * ceil(p.n / box.size[2])
    live = [_live(way, view, box) for view in way.views]
    places = prod(len(axis) for axis in live[0])
    tiles = outer * places * (len(way.views) // way.loops)
    sums = [prod(sum(axis) for axis in axes) * cost for axes, cost in zip(live, costs[0], strict=True)]
    if tiles > EXACT * programs or len(way.views) > way.loops:
        uneven = ceil(tiles / programs) * programs / tiles if len(way.views) == way.loops else 1.0
        last = 0.0 if uneven > 1.0 else max(sums) / places / 2
        return (sum(sums) * outer + tiles * costs[1]) / programs * uneven + last
    columns = way.column_tiles(p, shape.columns)
    cycles = [costs[1]] * places
    for (planes, rows, pixels), cost in zip(live, costs[0], strict=True):
        more = [a * b * c * cost for a in planes for b in rows for c in pixels]
        cycles = [so_far + by for so_far, by in zip(cycles, more, strict=True)]
    busy = [0.0] * programs
    for number in range(tiles):
        busy[number % programs] += cycles[number // columns % places]
    return max(busy)


def _live(way: Way, view: View, box: Box) -> list[list[int]]:
    """On each axis, the boxes of the input that each box of results reads."""
    found = []
    for axis, extent in ((0, box.size[1]), (1, box.size[0]), (2, box.size[3])):
        starts = range(0, way.steps[axis], extent)
        if axis == 1 and box.rows > 1:
            found.append([ceil(view.taps[1] / box.rows)] * len(starts))
        elif box.resident:
            found.append([view.taps[axis]] * len(starts))
        else:
            reads = (view.taps[axis], view.first[axis], way.steps[axis])
            found.append([live_taps(at, extent, reads, way.step[axis], way.sizes[axis]) for at in starts])
    return found
