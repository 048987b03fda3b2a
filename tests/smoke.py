"""What an installed convgrad must do, judged by itself alone: no PyTorch, no pytest.

    python -I tests/smoke.py

`-I` keeps what lies beside this file out of the way. A module of others that is loaded but not declared is a failure.
"""

# ruff: noqa: E402
import sys

# An environment may load modules of its own accord, before any of ours.
before = set(sys.modules)

from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np

import convgrad
from convgrad import reference
from convgrad.spec import Problem

X, W, Y = (2, 10, 9, 8), (14, 5, 3, 3), (2, 14, 5, 4)  # two groups of 5 and 7 channels
LAYER = dict(strides=2, pads_begin=1, pads_end=1, dilations=1, groups=2, data_format="NCX", weights_format="OIX")
LINE = "n2 g2 cx5 cy7 x9x8 w3x3 y5x4 s2x2 d1x1 p1x1"
DECLARED = {"convgrad", "numpy", "ml_dtypes", "llvmlite"}


def loaded() -> set[str]:
    """The packages of others that this process has loaded."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
    return {name.partition(".")[0] for name, file in files.items() if "site-packages" in file}


def main() -> None:
    """Compute a grouped convolution and its gradients, and compare them to the bit."""
    assert Path(convgrad.__file__).is_relative_to(sys.prefix), f"{convgrad.__file__} is not what was installed"
    assert convgrad.__version__ == version("convgrad")
    assert "llvmlite" not in sys.modules, "importing convgrad loads LLVM"

    rng = np.random.default_rng(0)
    for dtype, numpy_type in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
        # Small integers: every sum is exact, in whatever order.
        x, w, y = (rng.integers(-3, 4, shape).astype(numpy_type) for shape in (X, W, Y))
        results = {
            "y": convgrad.convolution(x, w, **LAYER),
            "x": convgrad.convolution_backward_data(y, w, X, **LAYER),
            "w": convgrad.convolution_backward_weights(x, y, W, **LAYER),
        }
        # (n, g, c, h, w), and for weights (g, cy, cx, h, w)
        given = {"x": x.reshape(2, 2, 5, 9, 8), "w": w.reshape(2, 7, 5, 3, 3), "y": y.reshape(2, 2, 7, 5, 4)}
        for wanted, result in results.items():
            problem = Problem.parse(f"{wanted} {dtype} {LINE}")
            assert "where   CPU" in convgrad.explain(str(problem)), f"{problem}: NumPy computes it, not generated code"
            expected = reference.compute(problem, {role: given[role] for role in problem.given})
            assert result.dtype == numpy_type
            assert result.tobytes() == expected.tobytes(), f"{problem}: other bits than the reference"

    assert loaded() <= DECLARED, f"loaded, but not declared: {', '.join(sorted(loaded() - DECLARED))}"
    print(f"convgrad {convgrad.__version__}: six results are right to the bit")


main()
