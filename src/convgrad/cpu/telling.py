"""Plans told to a person: one function for each loop nest, listed in TELL, which reads only what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any

from ..backend import Estimate
from .amx.records import TileGather, TileSums
from .amx.split import Split
from .amx.tiles import Block
from .depthwise.records import ChannelsInLanes, PixelsInLanes
from .gather.records import Gather, TaskOrder
from .pack.box import PackBox
from .pack.unpack import Staging
from .pack.weights import PackWeights
from .plan.records import Made, up
from .target import Target
from .wgrad.records import WeightGradient

Names = Mapping[str, str]  # of the tensors, by role


@dataclass(frozen=True)
class Telling:
    """What a person may want to know of a plan."""

    nest: str
    how: str  # how a result comes about: a sentence without its full stop
    tile: str  # what is computed at a time
    lanes_used: float  # the share of vector lanes that have something to do
    tasks: str  # what threads take


def tell(plan: Made, names: Names) -> Telling:
    """A plan in words, with the names of the tensors."""
    return TELL[plan.nest](plan, names)


def reasons(plan: Made, names: Names) -> Iterator[str]:
    """Why the plan is as it is, with the names of the tensors: some reasons begin with one."""
    for reason in plan.why:
        first, space, rest = reason.partition(" ")
        yield f"{names.get(first, first)}{space}{rest}"


def _gather(plan: Gather, names: Names) -> Telling:
    layer, cut, fold = plan.layer, plan.cut, plan.tile.fold
    result, source = (names["y"], names["x"]) if layer.wanted == "y" else (names["x"], names["y"])
    how = f"each pixel of {result} collects its products with {source}, over the kernel and the channels"
    phases = prod(axis_map.out_stride for axis_map in cut.maps)
    if phases > 1:
        how += f"; the stride divides the pixels into {phases} kinds, each using only its own part of the kernel"
    columns = f"{plan.block} channels"
    if fold is not None:
        columns = f"{prod(fold.factors)} neighbours with {fold.channels} channels each"
    tile = f"{plan.rows} pixels x {columns}: {_sums(plan.rows * plan.vectors, plan.lanes)}"
    if cut.short_rows:
        tile += f"; {cut.short_rows} pixels at a time where fewer are left"
    return Telling(plan.nest, how, tile, layer.cout / up(layer.cout, plan.lanes), _gather_tasks(plan))


def _gather_tasks(plan: Gather) -> str:
    """What tasks of a gather are."""
    if plan.task.order is TaskOrder.CHANNEL:
        return f"{_tasks(plan)}, each a block of channels for all pixels"
    part = " and a part of the channels" if plan.task.parts > 1 else ""
    return f"{_tasks(plan)}, each a box of at most {prod(plan.cut.region)} pixels{part}"


def _weight_gradient(plan: WeightGradient, names: Names) -> Telling:
    roles, tensors = plan.roles, plan.tensors.names
    x, y, w = (names[role] for role in tensors)
    rows, lanes = (x, y) if roles.row_side == "x" else (y, x)
    if tensors == ("x", "y", "w"):
        how = f"each weight of {w} sums its products over all pixels of {x} and {y}"
        columns = f"{plan.block} channels of {lanes}"
        down = f"{plan.rows} taps and channels" if roles.lane_groups else f"{plan.rows} channels"
        tile = f"{down} of {rows} x {columns}"
    else:
        how = f"with a 1x1 kernel, {w} is one sum over channels for each pixel: a product of matrices"
        tile = f"{plan.rows} channels x {plan.block} pixels of {lanes}"
    tile += f": {_sums(plan.rows * plan.vectors, plan.lanes)}"
    tasks = f"{_tasks(plan)}, each a part of {w}"
    if plan.boxes.slices > 1:
        tasks += f" over one of {plan.boxes.slices} parts of the pixels"
    return Telling(plan.nest, how, tile, roles.lane_channels / up(roles.lane_channels, plan.lanes), tasks)


def _channels(plan: ChannelsInLanes, names: Names) -> Telling:
    layer = plan.layer
    how = f"each channel of {names[layer.wanted]} is computed on its own, from pixels that are read where they lie"
    tile = f"{plan.rows} x {plan.vectors} pixels: {_sums(plan.rows * plan.vectors, plan.lanes, 'channels')}"
    tasks = f"{_tasks(plan)}, each {'a part of the pixels' if layer.wanted == 'w' else 'some rows of pixels'}"
    return Telling(plan.nest, how, tile, layer.channels / plan.pitch, tasks)


def _pixels(plan: PixelsInLanes, names: Names) -> Telling:
    result, width = names[plan.layer.wanted], plan.result.sizes[2]
    how = f"each channel of {result} is computed on its own, one image after another, which is copied with its padding"
    tile = f"{plan.rows} rows x {plan.block} pixels: {_sums(plan.rows * plan.vectors, plan.lanes)}"
    images = "one image" if plan.task_images == 1 else f"at most {plan.task_images} images"
    tasks = f"{_tasks(plan)}, each {images} of one channel"
    return Telling(plan.nest, how, tile, width / up(width, plan.lanes), tasks)


def _tiles(plan: TileGather, names: Names) -> Telling:
    layer = plan.layer
    result, source = (names["y"], names["x"]) if layer.wanted == "y" else (names["x"], names["y"])
    how = f"each pixel of {result} collects its products with {source}, over the kernel and the channels"
    tile = f"{plan.tiles.height} pixels x {plan.block} channels: {_registers(plan)}"
    part = " and a part of the channels" if plan.parts.parts > 1 else ""
    tasks = f"{_tasks(plan)}, each a box of at most {prod(plan.positions.sizes)} pixels{part}"
    return Telling(plan.nest, how, tile, layer.cout / up(layer.cout, plan.lanes), tasks)


def _tile_sums(plan: TileSums, names: Names) -> Telling:
    how = f"each weight of {names['w']} sums its products over all pixels of {names['x']} and {names['y']}"
    rows, columns = (names["y"], names["x"]) if plan.sides.swapped else (names["x"], names["y"])
    tile = f"{plan.rows} channels of {rows} x {plan.block} of {columns}: {_registers(plan)}"
    tasks = f"{_tasks(plan)}, each a part of {names['w']}"
    if plan.parts.slices > 1:
        tasks += f" over one of {plan.parts.slices} parts of the pixels"
    channels = plan.sides.channels[1]
    return Telling(plan.nest, how, tile, channels / up(channels, plan.lanes), tasks)


def _registers(plan: TileGather | TileSums) -> str:
    down, across = plan.tiles.down, plan.tiles.across
    return f"{down} x {across} tile registers of {plan.tiles.rows} x {plan.lanes} sums"


def _tasks(plan: Made) -> str:
    return f"{plan.tasks} task{'s' if plan.tasks > 1 else ''}"


def _sums(vectors: int, lanes: int, what: str = "sums") -> str:
    return f"{vectors} vector{'s' if vectors > 1 else ''} of {lanes} {what} in registers"


TELL: Mapping[str, Callable[[Any, Names], Telling]] = {
    Gather.nest: _gather,
    WeightGradient.nest: _weight_gradient,
    ChannelsInLanes.nest: _channels,
    PixelsInLanes.nest: _pixels,
    TileGather.nest: _tiles,
    TileSums.nest: _tile_sums,
}
"""By loop nest, as the registry names it. A new nest has a function here, and words below for its fields."""

WORDS = {
    "Box.axes": "what positions read, along each axis",
    "Box.channels": "channels in rows and in columns that there is room for",
    "Box.entries": "where each tap begins in x",
    "Box.flat": "positions of the axes from this one on are one long row",
    "Box.pair_pitch": "pairs between pairs of positions",
    "Box.pair_block": "channels of x whose pairs lie together",
    "Box.pair_step": "entries between the pairs of x; 0: pairs are of y",
    "Box.row_pitch": "elements between channels in the rows",
    "Box.x_pack": "how x is packed",
    "Box.y_pack": "how y is packed, if it is",
    "Box.y_steps": "elements between positions of y before they are paired, along each axis",
    "Code.emulated": "plain code does what tile instructions do",
    "Code.rounds_bf16": "the machine rounds results to bf16",
    "Code.splits_bf16": "the machine makes bf16 of f32, and so pieces of numbers",
    "Parts.blocks": "blocks of channels in a task",
    "Parts.parts": "parts of the blocks of channels",
    "Parts.together": "blocks of channels that are computed for some positions before the next",
    "Sides.swapped": "rows are of y and columns of x",
    "TileGather.fetched_results": "the memory of results is prefetched",
    "TileSums.fetched_step": "what the next step loads is prefetched",
    "Positions.axes": "what positions read, along each axis",
    "Positions.flat": "positions of the axes from this one on are one long row",
    "Positions.pitch": "elements between neighbouring positions",
    "Positions.steps": "elements between positions along each axis",
    "Positions.taps": "taps of each phase, and where their input is packed",
    "Sides.channels": "channels in rows and in columns, in a group",
    "Sides.column_channel": "elements between groups, and between channels, of what is in the columns",
    "Sides.row_channel": "elements between groups, and between channels, of what is in the rows",
    "Sides.w_channel": "elements between groups, and channels in rows and in columns, of the weights",
    "SumParts.column_parts": "parts of the channels in the columns",
    "SumParts.columns": "channels in the columns of a part",
    "SumParts.row_parts": "parts of the channels in the rows",
    "SumParts.rows": "channels in the rows of a part",
    "SumParts.taps_inside": "taps are contiguous in the sums",
    "TileGather.layer": "the problem as a gather",
    "TileGather.sums": "how the sum over channels is taken",
    "TileGather.tile": "what the columns of tiles hold",
    "TileSums.weights": "where each tap lies in the weights",
    "Boxes.box": "pixels that are packed and summed at a time, along each axis",
    "Boxes.sizes": "pixels of y, along each axis",
    "Boxes.slices": "parts that the sum is cut into, added in order",
    "Cut.borders": "axes on which pixels at the border have tiles of their own",
    "Cut.rows": "rows of a register tile: pixels",
    "Cut.short_rows": "rows of a second tile, for what is left; 0: there is none",
    "Cut.steps": "steps that all threads are expected to take",
    "Images.sizes": "size of an image, along each axis",
    "Images.steps": "elements between neighbours, along each axis",
    "Images.strides": "elements between images, and between channels",
    "Layer.axes": "the axes, with the batch among them",
    "Layer.forward": "results are computed as y is",
    "Output.direct": "tiles write whole sums themselves",
    "Output.prefetch": "the memory of results is prefetched",
    "Output.strides": "elements between groups, rows and lanes of the result",
    "Output.writing": "how sums are written",
    "PackedImage.extents": "rows of a packed image, along the outer axes",
    "PackedImage.pitch": "elements between rows of a packed image",
    "PackedImage.taps": "where taps read along each axis, of a packed image",
    "Parts.lane_part": "blocks of lanes in a task",
    "Parts.lane_parts": "parts of the blocks of lanes",
    "Parts.lanes_in_place": "the lanes are read in place",
    "Parts.row_part": "channels in the rows, in a task",
    "Parts.row_parts": "parts of the channels in the rows",
    "Parts.saves_copies": "cut so that less is packed more than once",
    "Parts.tap_parts": "parts of the taps",
    "Parts.tap_step": "taps in a tile",
    "Parts.tiles": "tiles for a block of lanes",
    "Roles.image_pairs": "pairs are of two images",
    "Roles.lane_channels": "channels in the lanes, in a group",
    "Roles.lane_groups": "channels in and out of a group, if groups share a vector",
    "Roles.most_rows": "rows that a tile may have",
    "Roles.row_channels": "channels in the rows, in a group",
    "Roles.row_side": "whose channels are in the rows",
    "Side.at_once": "channels packed at a time",
    "Side.by_block": "packed for each block of lanes",
    "Side.channel": "elements between groups, and between channels",
    "Side.channels": "channels in a group",
    "Side.in_stride": "coordinates between neighbouring y, along each axis",
    "Side.low": "coordinate of the first packed pixel, along each axis",
    "Side.mode": "how tiles read it",
    "Side.name": "its name in the sum",
    "Side.packs": "how each axis is packed",
    "Side.pair": "pixels between those of a pair, and between pairs",
    "Side.pitch": "elements between packed pixels, or between channels of packed rows",
    "Side.starts": "where each packed axis starts",
    "Side.steps": "elements between what neighbouring y read, along each axis",
    "Source.channels": "channels that are packed for a pixel, if always as many",
    "Source.interleaved": "strided channels of the input are interleaved",
    "Source.sizes": "size of the input, along each axis",
    "Source.steps": "elements between neighbours, along each axis",
    "Source.unit": "type of a packed input",
    "Sums.channels": "channels summed over; an even number if in pairs",
    "Sums.most_pixels": "results that a box may have",
    "Sums.odd": "the last channel is paired with a zero",
    "Taps.entries": "where taps lie in the packed input",
    "Taps.ranges": "where each tap lies inside x",
    "Taps.weights": "where each kernel element lies in the weights",
    "Task.blocks": "blocks of channels that a task computes of a box",
    "Task.groups": "groups in a task",
    "Task.order": "the order of tasks",
    "Task.parts": "tasks that share a box, each with a part of the channels",
    "Task.weights": "who packs the weights",
    "Tensors.names": "the tensors that play x, y and w",
    "Tile.blocks": "blocks of channels, in a group",
    "Tile.lane_groups": "channels in and out of a group, if groups share a vector",
    "Tile.last_vectors": "vectors in a row for the last block, if fewer; else 0",
    "Tile.most_rows": "rows that a tile may have",
    "Tile.target": "the machine, perhaps with vectors of half the width",
    "accumulate": "results are added to what is there",
    "bias": "elements between bias values; None: no bias",
    "channels": "channels, each on its own",
    "chunk": "channels summed in one go",
    "cin": "channels summed over, in a group",
    "converts_f16": "the machine converts f16",
    "cout": "channels computed, in a group (neighbours side by side count)",
    "dtype": "type of the inputs",
    "estimate": "seconds and bytes that it is expected to take, and the bound of its error beside that of direct sums",
    "fold": "neighbouring results side by side in the lanes",
    "groups": "groups that are computed one after another",
    "images": "images",
    "in_channel": "elements between groups, and between channels, of the input",
    "in_place": "the input (or what is in the rows) is read where it lies",
    "kernel": "size of the kernel, along each axis",
    "lanes": "numbers in a vector",
    "low": "coordinate of the first packed input, along each axis",
    "maps": "which inputs results read, along each axis",
    "out_channel": "elements between groups, and between channels, of the result",
    "out_dtype": "type of the result",
    "pack": "how a box is packed",
    "packs": "how each axis of the input is packed",
    "pairs": "products of bf16 are taken two at a time",
    "phases": "pixels that share their taps",
    "pitch": "elements between pixels of the packed input",
    "prefetch": "memory that is prefetched",
    "ranges": "where each tap lies inside x",
    "repairs": "sums that padding has spoilt are taken again",
    "staging": "how sums that wait are written",
    "rows": "rows of a register tile",
    "slices": "parts that the sum is cut into, added in order",
    "staged": "results wait in a buffer before they are written",
    "split": "how numbers are split into those that tiles multiply",
    "stream": "results are written past the caches",
    "sum": "type of the sums",
    "tap_offsets": "where each kernel element lies in the weights",
    "tap_ranges": "where each tap lies inside x",
    "tap_table": "taps of each phase, and where their input is packed",
    "task_images": "images of one channel, in a task",
    "task_rows": "positions along the third axis, in a task",
    "threads": "threads that take part",
    "unrolled": "the sum over channels is written out, without a loop",
    "vectors": "vectors in a row of a tile",
    "w_step": "elements between channels of the weights",
    "w_strides": "elements between groups, outputs and inputs of the weights",
    "wanted": "the tensor computed, in y = conv(x, w)",
    "weights": "how weights are packed",
    "weights_step": "bytes between the weights that boxes prefetch; 0: none",
    "tiles": "how tile registers are used",
    "why": "reasons",
    "work": "cycles in which tiles are multiplied",
}
"""What the fields of plans are, for a stranger."""

BUFFERS = {
    "weights": "packed weights",
    "bias": "bias",
    "packed": "packed input",
    "raw_weights": "weights before they are split",
    "places": "where positions are written",
    "staging": "sums that wait to be written",
    "pixels": "where pixels are read and written",
    "lines": "memory to prefetch",
    "sums": "sums of all tasks",
    "accumulators": "sums of a task",
    "x": "packed x",
    "y": "packed y",
    "x_raw": "pixels of x before they are paired",
    "y_raw": "pixels of y before they are paired",
    "registers": "emulated tile registers",
}
"""What buffers hold."""


def values(plan: Made) -> dict[str, Any]:
    """Every field of a plan, as plain values."""
    return asdict(plan, dict_factory=lambda items: {k: v.value if isinstance(v, Enum) else v for k, v in items})


def leaves(plan: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every field of a plan, those of its records too: "parts.rows", where WORDS has it, and its value."""
    kind = type(plan)
    for field in fields(plan):
        name, value = prefix + field.name, getattr(plan, field.name)
        if not prefix and is_dataclass(value) and type(value).__module__ == kind.__module__:
            yield from leaves(value, f"{name}.")
        else:
            own = f"{kind.__name__}.{field.name}"
            yield name, own if own in WORDS else field.name, value


def details(plan: Made) -> list[tuple[str, str, str]]:
    """Every field of a plan but the reasons, for a person: name, value, what it is. Tables are counted."""
    told = [(name, _short(value), WORDS.get(key, "")) for name, key, value in leaves(plan) if name != "why"]
    for name, count, per_thread in plan.buffers:
        if count:
            each = ", in each thread" if per_thread else ""
            told.append((f"buffer {name}", f"{count * plan.item:,} bytes", f"{BUFFERS.get(name, name)}{each}"))
    return told


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Target):
        return f"{value.name}, vectors of {value.width} bytes"
    if isinstance(value, Block):
        return f"{value.down} x {value.across} tiles of {value.rows} rows, {value.pairs} pairs in a step"
    if isinstance(value, (PackBox, PackWeights)):
        return value.packer.name.replace("_", " ").lower()
    if isinstance(value, Estimate):
        return f"{value.seconds * 1e3:.3g} ms"
    if isinstance(value, Split):
        return "not at all" if value.whole else f"into {value.pieces}, of which {len(value.products)} products"
    if isinstance(value, Staging):
        return str(value.unpacker.value)
    if is_dataclass(value) or (isinstance(value, tuple) and not all(isinstance(v, (int, str)) for v in value)):
        count = len(value) if isinstance(value, tuple) else 0
        return f"{count} entries" if count else "yes"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if len(value) <= 4 else f"{len(value)} numbers"
    return str(value)
