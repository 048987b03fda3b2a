"""What the policy "fast" of convgrad.torch makes of what benchmarks/gpu.py has measured.

    python benchmarks/gpu_policy.py gpu.json

Prints the layers on which cuDNN was ahead and which are taken all the same, and those that are left to it though it was
behind: what a rule in torch/policy.py should say, and what it should not. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_layers import LAYERS, Layer
from gpu_table import mean, read

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from convgrad.spec import Problem
from convgrad.torch import policy
from convgrad.torch.plans import Geometry, Result, describe

AHEAD = 0.95  # the ratio below which cuDNN is ahead by more than two runs of the same differ
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PRECISIONS = {"f32": "default"}

Row = Mapping[str, Any]


def problem(layer: Layer, direction: str, dtype: str, layout: str) -> Problem:
    """The problem that a gradient of a layer comes to."""
    rank = len(layer.space)
    kind = DTYPES.get(dtype, torch.float32)
    how = [[value] * rank for value in (layer.stride, layer.padding, layer.dilation)]
    channels = (layer.filters, layer.channels // layer.groups)
    if layer.transposed:
        channels = (layer.channels, layer.filters // layer.groups)

    def tensor(shape: Sequence[int]) -> torch.Tensor:
        made = torch.empty(shape, dtype=kind, device="meta")
        return made.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "NXC" else made

    x, w = tensor((layer.images, layer.channels, *layer.space)), tensor((*channels, *[layer.kernel] * rank))
    y = tensor(torch.ops.aten.convolution(x, w, None, *how, layer.transposed, [0] * rank, layer.groups).shape)
    role = {"forward": "y", "data": "x", "weights": "w"}[direction]
    tensors = {"x": x, "w": w, "y": y}
    like = tensors[role]
    if layer.transposed:  # what PyTorch calls the input is y of the geometry
        tensors["x"], tensors["y"] = y, x
        role = {"x": "y", "y": "x"}.get(role, role)
    given = {name: tensor for name, tensor in tensors.items() if name != role}
    geometry = Geometry(*(tuple(values) for values in how), layer.groups)
    return describe(role, given, None, Result(tuple(like.shape), like.stride(), like.dtype), geometry)


def judged(results: Sequence[Row]) -> Iterator[tuple[Row, float, str]]:
    """Each result with its ratio, and why it is left to PyTorch, if it is."""
    layers = {layer.name: layer for layer in LAYERS}
    for row in results:
        asked = problem(layers[row["layer"]], row["direction"], row["dtype"], row["layout"])
        precision = PRECISIONS.get(row["dtype"], row["dtype"])
        yield row, row["theirs"] / row["ours"], policy.on_gpu(asked, precision, row["direction"] == "forward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="+", help="of benchmarks/gpu.py; later files replace what earlier ones have")
    given = parser.parse_args()
    known = list(judged(read(given.json)))
    for title, wrong in (
        ("taken, though cuDNN was ahead", lambda ratio, left: not left and ratio < AHEAD),
        ("left, though cuDNN was behind", lambda ratio, left: bool(left) and ratio > 1 / AHEAD),
    ):
        print(f"{title}:")
        for row, ratio, left in known:
            if wrong(ratio, left):
                print(f"  {ratio:5.2f} {row['dtype']:4} {row['direction']:7} {row['layout']} {row['layer']:30} {left}")
    ratios = [1.0 if left else ratio for _, ratio, left in known]
    taken = sum(not left for *_, left in known)
    print(f"{taken} of {len(known)} taken; the mean ratio is {mean(ratios):.2f}, where 1.00 stands for what is left")


if __name__ == "__main__":
    main()
