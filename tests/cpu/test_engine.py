"""The kernels against the reference, bit for bit: random problems, and sizes with a reason.

Every tensor and the workspace lie between unmapped pages, inputs cannot be written to, and the workspace is full of
NaNs. CONVGRAD_TEST_PROBLEMS=5000 checks so many problems; `python tests/cpu/campaign.py` replays one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from convgrad.cpu.nests import Declined, Gather, Plan, Plane, Reduce, Slide
from convgrad.cpu.plan import make_plan
from convgrad.cpu.target import Target
from convgrad.spec.problem import Problem
from marks import slow_but

from .campaign import INVENTED, run
from .problems import numbered, targets

TARGETS = targets()
NAMES = [*TARGETS, INVENTED]
EACH = -(-int(os.environ.get("CONVGRAD_TEST_PROBLEMS", "250")) // len(NAMES))


@pytest.mark.parametrize("name", slow_but(["native", "baseline", "native in small caches", "vector of 3"], NAMES))
def test_random_problems(name: str) -> None:
    """Each machine gets problems of its own."""
    first = NAMES.index(name) * EACH
    _, failures = run(name, range(first, first + EACH))
    assert not failures, "\n".join(failures)


# What each of these is about is in its name. Types and layouts are drawn in the random ones; here the sizes count.
NAMED = {
    "one channel, one pixel": "y f32 n1 g1 cx1 cy1 x1x1 w1x1 y1x1 s1x1 d1x1 p0x0",
    "one pixel, one tap in the padding": "x f32 n1 g1 cx3 cy5 x1 w2 y1 s1 d1 p1",
    "a width of 1": "w bf16 n3 g1 cx16 cy16 x5x1 w3x1 y5x1 s1x1 d1x1 p1x0 x@nxc y@nxc",
    "an odd width, in pairs": "w bf16 n2 g1 cx17 cy33 x5x7 w3x3 y5x7 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "an even width, in pairs": "w bf16 n2 g1 cx17 cy33 x5x8 w3x3 y5x8 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "pairs whose first pixel is padding": "w bf16 n1 g1 cx4 cy20 x9 w5 y15 s1 d2 p7",
    "groups of eight, tiles that fill rows": "x f32 n2 g3 cx8 cy8 x5x14 w3x3 y5x14 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "groups of eight, tiles that fill rows, over a stride": "x bf16 n2 g3 cx8 cy8 x6x28 w3x3 y3x14 s2x2 d1x1 p1x1",
    "a weight for each thread to pack": "x f32 n3 g1 cx20 cy70 x31x33 w2x3 y31x33 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "weights for each thread to pack, in parts": "y bf16 n3 g1 cx12 cy200 x31x33 w2x3 y31x33 s1x1 d1x1 p1x1",
    "weights for each thread to pack, in groups": "x bf16 n3 g3 cx24 cy8 x31x33 w3x1 y16x17 s2x2 d1x1 p1x0",
    "a bias for each thread to pack": "y f16 n3 g2 cx5 cy33 x31x33 w3x3 y31x33 s1x1 d1x1 p1x1 bias@1",
    "parts of the channels, one before another": "x f32 n1 g1 cx200 cy64 x9x11 w3x3 y9x11 s1x1 d1x1 p1x1",
    "parts of the channels of the same pixels": "x f32 n9 g1 cx200 cy3 x40x41 w1x1 y40x41 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "groups of eight in pairs": "y bf16 n2 g5 cx8 cy8 x9x14 w3x3 y9x14 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "groups of eight in pairs of pixels": "w bf16 n2 g5 cx8 cy8 x9x14 w3x3 y9x14 s1x1 d1x1 p1x1",
    "one vector, tiles that fill rows": "x f32 n2 g3 cx16 cy9 x5x28 w3x3 y5x28 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "one vector, tiles that fill rows, over a stride": "x bf16 n2 g1 cx16 cy9 x6x56 w3x3 y3x28 s2x2 d1x1 p1x1",
    "one vector of sums for sixteen rows": "w f32 n2 g2 cx33 cy16 x9x14 w3x3 y9x14 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "pixels that share a set of the cache": "w f32 n1 g1 cx1024 cy20 x3x5 w2x2 y3x5 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "few channels that lie together": "y f32 n2 g1 cx3 cy20 x17x23 w5x5 y9x12 s2x2 d1x1 p2x2 x@nxc y@nxc",
    "few channels that lie apart": "y f32 n2 g1 cx3 cy20 x17x23 w5x5 y9x12 s2x2 d1x1 p2x2",
    "few channels that lie apart, far taps": "y f16 n2 g1 cx4 cy20 x40 w2 y17 s2 d7 p1",
    "four channels that lie apart, over a stride of four": "y f16 n2 g1 cx4 cy32 x61 w1 y16 s4 d1 p0",
    "four channels that lie apart, over strides of four": "y f16 n1 g1 cx4 cy20 x9x61 w3x2 y2x15 s4x4 d1x1 p0x0",
    "few channels in groups": "x f32 n1 g3 cx20 cy5 x9x19 w3x3 y9x19 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "three channels in pairs": "y bf16 n2 g1 cx3 cy20 x17x23 w5x5 y9x12 s2x2 d1x1 p2x2 x@nxc y@nxc",
    "three channels in pairs, lying apart": "y bf16 n2 g1 cx3 cy20 x17x23 w5x5 y9x12 s2x2 d1x1 p2x2",
    "seven channels in pairs": "x bf16 n1 g1 cx40 cy7 x11x31 w3x3 y11x31 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "pairs under taps that lie evenly apart": "w bf16 n1 g1 cx20 cy33 x9x15 w3x4 y9x15 s1x1 d2x4 p2x6 x@nxc y@nxc",
    "pairs under such taps, an odd border": "w bf16 n3 g1 cx33 cy20 x9x16 w3x3 y9x15 s1x1 d1x2 p1x1 x@nxc y@nxc",
    "pairs under such taps, a run for each": "w bf16 n3 g1 cx20 cy33 x17 w3 y5 s1 d6 p0 x@nxc y@nxc",
    "pairs under such taps, in boxes": "w bf16 n1 g1 cx65 cy48 x7x1001 w1x3 y7x961 s1x1 d1x20 p0x0 x@nxc y@nxc",
    "pairs of wide rows": "w bf16 n2 g1 cx33 cy64 x11x259 w3x3 y11x259 s1x1 d1x1 p1x1",
    "pairs of images": "w bf16 n6 g1 cx20 cy33 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "pairs of images, over a stride": "w bf16 n4 g2 cx9 cy20 x13x9 w3x3 y7x5 s2x2 d1x1 p1x1 x@nxc y@nxc accumulate",
    "pairs of images, channels first": "w bf16 n6 g1 cx20 cy33 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1",
    "pairs of images, channels first, over a stride": "w bf16 n4 g2 cx9 cy20 x13x9 w3x3 y7x5 s2x2 d1x1 p1x1 accumulate",
    "pairs of images, channels first, far taps": "w bf16 n4 g1 cx9 cy20 x5x15 w3x3 y3x3 s1x2 d1x5 p0x0",
    "pairs of images, rows of y": "w bf16 n4 g1 cx33 cy7 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "pairs of images, always the same x": "w bf16 n4 g1 cx20 cy40 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@0,0,49,7,1",
    "pairs of images, always the same y": "w bf16 n4 g1 cx20 cy40 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 y@0,0,49,7,1",
    "channels and pixels of x on each other": "w bf16 n4 g1 cx20 cy40 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@1000,0,1,7,1",
    "channels and pixels of y on each other": "w bf16 n4 g1 cx20 cy40 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 y@1000,0,1,7,1",
    "rows as they lie, in pairs": "w bf16 n1 g1 cx20 cy40 x9x80 w3x3 y9x80 s1x1 d1x1 p1x1",
    "rows as they lie, in pairs, thinned": "w bf16 n1 g1 cx20 cy40 x9x81 w3x5 y5x27 s2x3 d1x1 p1x2",
    "rows as they lie, in pairs, thinned, an even width": "w bf16 n1 g1 cx20 cy40 x9x78 w3x5 y5x26 s2x3 d1x1 p1x2",
    "rows as they lie, in pairs, thinned by dilation": "w bf16 n1 g1 cx20 cy40 x90 w3 y43 s2 d2 p0",
    "rows as they lie, in pairs, a run for each tap": "w bf16 n1 g1 cx20 cy40 x900 w2 y100 s1 d800 p0 accumulate",
    "rows as they lie, in pairs, many runs": "w bf16 n1 g1 cx5 cy20 x900 w12 y20 s1 d80 p0",
    "rows as they lie, a long one": "w bf16 n1 g1 cx5 cy20 x3001 w3 y3001 s1 d1 p1",
    "rows as they lie, y": "w bf16 n1 g1 cx33 cy7 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 out:f32",
    "rows as they lie, converted": "w f16 n2 g1 cx20 cy40 x9x33 w3x3 y5x17 s2x2 d1x1 p1x1",
    "sums of a tile turned at once": "w f32 n1 g1 cx45 cy80 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "sums of a tile turned at once, rounded": "w bf16 n1 g1 cx45 cy80 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 out:bf16",
    "pairs of three channels, as one run": "w bf16 n2 g1 cx3 cy40 x9x24 w3x3 y9x24 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "the same over a stride": "w bf16 n2 g1 cx3 cy40 x11x31 w5x7 y6x16 s2x2 d1x1 p2x3 x@nxc y@nxc accumulate",
    "the same between far pads": "w bf16 n1 g1 cx5 cy40 x6 w3 y42 s1 d1 p19 x@nxc y@nxc",
    "pixels with three channels, as one run": "w f16 n2 g1 cx3 cy40 x9x24 w3x3 y9x24 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "a weight gradient of few boxes, in parts": "w bf16 n16 g1 cx16 cy48 x14x14 w5x5 y14x14 s1x1 d1x1 p2x2 x@nxc y@nxc",
    "parts of rows and of lanes": "w bf16 n2 g1 cx300 cy260 x40 w2 y20 s2 d1 p0",
    "pairs over a stride": "w bf16 n2 g1 cx9 cy20 x4x30 w2x3 y3x15 s2x2 d1x1 p1x1",
    "pairs of channels, one of them read in place": "y bf16 n2 g1 cx34 cy20 x6x6 w3x3 y4x4 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "few channels, backwards over a stride": "x f32 n2 g1 cx3 cy20 x21x20 w7x7 y11x10 s2x2 d1x1 p3x3",
    "few channels, a stride as wide as the kernel": "x bf16 n2 g1 cx3 cy5 x19x20 w4x4 y5x5 s4x4 d1x1 p0x0 x@nxc y@nxc",
    "few channels, forwards": "y f16 n2 g1 cx20 cy1 x21x20 w3x3 y21x20 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio bias",
    "few channels, forwards, dilated": "y f64 n2 g1 cx20 cy2 x21x20 w3x3 y21x20 s1x1 d2x2 p2x2 accumulate",
    "few channels in seven vectors of half the width": "x f32 n4 g1 cx1 cy64 x28x28 w7x7 y4x4 s7x7 d1x1 p0x0",
    "the same, channels together": "x f32 n4 g1 cx2 cy16 x25x25 w5x5 y5x5 s5x5 d1x1 p0x0 x@nxc y@nxc",
    "the same in pairs": "x bf16 n4 g1 cx6 cy16 x27x27 w3x3 y9x9 s3x3 d1x1 p0x0",
    "the same in f64": "x f64 n4 g1 cx3 cy16 x27x27 w3x3 y9x9 s3x3 d1x1 p0x0",
    "the same, a long kernel": "y f32 n4 g1 cx8 cy6 x9 w33 y9 s1 d1 p16",
    "groups of half a vector": "x f32 n2 g5 cx8 cy8 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "groups of half a vector, in pairs": "y bf16 n2 g5 cx8 cy8 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc bias",
    "groups of half a vector, weights": "w f32 n2 g5 cx8 cy8 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "five vectors of half the width": "x f32 n2 g1 cx40 cy20 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "five vectors of half the width, weights": "w bf16 n2 g1 cx40 cy40 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1",
    "small images": "x f32 n32 g1 cx20 cy30 x7x7 w5x5 y7x7 s1x1 d1x1 p2x2 x@nxc y@nxc",
    "few channels, sums in chunks": "x f32 n1 g1 cx3 cy1500 x9x9 w5x5 y9x9 s1x1 d1x1 p2x2 x@nxc y@nxc",
    "an odd number of channels, of each kind": "x bf16 n2 g1 cx20 cy35 x7x9 w3x3 y7x9 s1x1 d1x1 p1x1",
    "an odd number of channels, far apart": "y bf16 n2 g1 cx33 cy20 x6x6 w3x3 y4x4 s1x1 d1x1 p0x0 x@9504,0,8,48,288",
    "an odd number of channels, in pairs": "y bf16 n2 g1 cx33 cy20 x6x6 w3x3 y4x4 s1x1 d1x1 p0x0 x@nxc",
    "pairs as they lie": "w bf16 n1 g1 cx48 cy16 x70x70 w1x1 y70x70 s1x1 d1x1 p0x0",
    "a last block with fewer vectors": "x f32 n2 g1 cx80 cy7 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc bias",
    "a last block with fewer vectors, from a stage": "y f32 n2 g1 cx7 cy75 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 accumulate",
    "a last block with fewer vectors, weights": "w f32 n2 g1 cx7 cy75 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1",
    "a last block with fewer vectors, pixels in the lanes": "y f32 n2 g1 cx7 cy75 x8x10 w1x1 y8x10 s1x1 d1x1 p0x0",
    "lanes less one": "x f32 n2 g1 cx15 cy15 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "lanes and one": "x f32 n2 g1 cx17 cy17 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "two blocks and one": "x f32 n1 g1 cx129 cy5 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "two blocks and one, weights": "w f32 n1 g1 cx7 cy129 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1",
    "padding beyond the kernel": "y f32 n1 g1 cx5 cy6 x7x7 w3x3 y25x25 s1x1 d1x1 p10x10",
    "padding beyond the kernel, backwards": "x f32 n1 g1 cx5 cy6 x7x7 w3x3 y25x25 s1x1 d1x1 p10x10",
    "padding beyond the kernel, weights": "w f32 n1 g1 cx5 cy6 x7x7 w3x3 y25x25 s1x1 d1x1 p10x10",
    "x of one between far pads": "y f32 n2 g1 cx16 cy16 x1 w3 y199 s1 d1 p100",
    "a stride beyond the kernel": "x f32 n1 g1 cx5 cy6 x30x30 w2x3 y6x5 s5x7 d1x1 p0x1",
    "a stride beyond x": "x f32 n1 g1 cx5 cy6 x7x7 w3x3 y1x1 s50x60 d1x1 p1x1",
    "a dilation far beyond x": "y f32 n1 g1 cx5 cy6 x7 w3 y8 s1 d1000 p1000",
    "a dilation far beyond x, backwards": "x f32 n1 g1 cx5 cy6 x7 w3 y8 s1 d1000 p1000",
    "a dilation far beyond x, weights": "w f32 n1 g1 cx5 cy6 x7 w3 y8 s1 d1000 p1000",
    "x that no window reaches": "x f32 n2 g1 cx5 cy6 x20x40 w2x2 y2x2 s2x2 d1x1 p0x0",
    "x that no window meets": "x f32 n2 g1 cx5 cy6 x4 w2 y3 s1 d1 p9",
    "windows that meet nothing": "y f32 n2 g1 cx5 cy6 x4 w2 y3 s1 d1 p9 bias",
    "weights that meet nothing": "w f32 n2 g1 cx5 cy6 x4 w2 y3 s1 d1 p9 accumulate",
    "a kernel larger than x": "y f32 n1 g1 cx5 cy6 x3x2 w9x8 y3x4 s1x1 d1x1 p4x4",
    "a kernel larger than x, backwards": "x f32 n1 g1 cx5 cy6 x3x2 w9x8 y3x4 s1x1 d1x1 p4x4",
    "a kernel larger than x, weights": "w f32 n1 g1 cx5 cy6 x3x2 w9x8 y3x4 s1x1 d1x1 p4x4",
    "1x1, all axes one": "y f32 n3 g1 cx20 cy40 x5x7 w1x1 y5x7 s1x1 d1x1 p0x0 x@nxc y@nxc",
    "1x1, channels first": "x bf16 n3 g1 cx20 cy40 x5x7 w1x1 y5x7 s1x1 d1x1 p0x0",
    "1x1, pixels in the lanes": "y f32 n3 g1 cx20 cy41 x8x12 w1x1 y8x12 s1x1 d1x1 p0x0",
    "1x1, pixels in the lanes, in pairs": "x bf16 n2 g1 cx21 cy41 x12x16 w1x1 y12x16 s1x1 d1x1 p0x0",
    "1x1, pixels in the lanes, summed in boxes": "x f32 n2 g1 cx9 cy300 x191 w1 y191 s1 d1 p0",
    "1x1, pixels in the lanes, added": "x f16 n2 g1 cx9 cy300 x191 w1 y191 s1 d1 p0 accumulate out:f32",
    "1x1, weights of all axes": "w f64 n3 g1 cx20 cy40 x5x7x3 w1x1x1 y5x7x3 s1x1x1 d1x1x1 p0x0x0 x@nxc y@nxc",
    "a row of y that meets nothing": "w f64 n1 g1 cx3 cy33 x1x12 w1x1 y2x12 s2x1 d2x1 p0x0 x@nxc w@xio y@nxc",
    "1x1, both sides in place": "w f32 n2 g1 cx48 cy16 x50x50 w1x1 y50x50 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio",
    "1x1, both sides in place, over a stride": "w f32 n2 g1 cx48 cy80 x9x9 w1x1 y5x5 s2x2 d1x1 p0x0 x@nxc y@nxc",
    "1x1, both sides in place, in groups": "w f64 n2 g3 cx20 cy32 x7x9 w1x1 y7x9 s1x1 d1x1 p0x0 x@nxc y@nxc w@xio",
    "a long row": "w f32 n1 g1 cx3 cy4 x20000 w3 y20000 s1 d1 p1",
    "a long row, wide steps": "y f16 n1 g1 cx3 cy20 x9001 w7 y3000 s3 d64 p190",
    "depthwise": "x f32 n1 g33 cx1 cy1 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1 x@nxc y@nxc",
    "depthwise, channels first": "x f32 n1 g33 cx1 cy1 x9x9 w3x3 y5x5 s2x2 d1x1 p1x1",
    "depthwise, channels first, rows in the lanes": "x f32 n2 g5 cx1 cy1 x13x30 w3x3 y13x30 s1x1 d1x1 p1x1",
    "depthwise, channels first, far padding": "y bf16 n2 g3 cx1 cy1 x3x4 w3x3 y13x14 s1x1 d1x1 p6x6 bias out:f32",
    "depthwise, channels first, dilated": "x f64 n2 g3 cx1 cy1 x9x17 w5x3 y5x13 s1x1 d2x3 p2x1 accumulate",
    "depthwise, channels first, in 3D": "y f16 n2 g3 cx1 cy1 x4x5x33 w3x2x3 y4x4x33 s1x1x1 d1x1x1 p1x0x1",
    "depthwise, channels first, in 1D": "x bf16 n2 g3 cx1 cy1 x75 w7 y69 s1 d1 p0",
    "depthwise weights, channels first": "w f32 n2 g70 cx1 cy1 x9x9 w5x5 y9x9 s1x1 d1x1 p2x2",
    "depthwise, whole vectors": "x f32 n2 g64 cx1 cy1 x13x14 w3x3 y13x14 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "depthwise, a phase without taps": "x f32 n2 g17 cx1 cy1 x9x11 w2x1 y3x4 s3x2 d1x1 p0x0 x@nxc y@nxc bias",
    "whole squares to the end of memory, over a stride": "y f32 n1 g1 cx16 cy16 x31 w1 y16 s2 d1 p0",
    "whole squares to the end, over a longer stride": "y f16 n2 g1 cx32 cy16 x125 w1 y32 s4 d1 p0",
    "squares with all but a few pixels": "y f32 n1 g1 cx33 cy16 x2x15 w2x2 y1x14 s1x1 d1x1 p0x0",
    "squares of half the channels": "x f64 n1 g1 cx20 cy21 x5x23 w3x3 y5x23 s1x1 d1x1 p1x1",
    "weights turned, seven taps": "y f16 n1 g1 cx9 cy37 x12 w7 y6 s1 d1 p0",
    "weights turned, twenty taps": "x f32 n1 g1 cx37 cy9 x5x6 w4x5 y2x2 s1x1 d1x1 p0x0",
    "weights turned in pairs, thirty taps": "y bf16 n1 g1 cx10 cy37 x7x8 w5x6 y3x3 s1x1 d1x1 p0x0",
    "weights turned in pairs, channels apart": "x bf16 n1 g1 cx48 cy10 x7x8 w3x3 y7x8 s1x1 d1x1 p1x1",
    "pixels in the lanes, where they lie": "y f32 n3 g1 cx33 cy7 x8x32 w1x1 y8x32 s1x1 d1x1 p0x0 accumulate",
    "many pixels in the lanes, where they lie": "x f32 n2 g1 cx20 cy200 x30x64 w1x1 y30x64 s1x1 d1x1 p0x0",
    "depthwise, far padding": "y bf16 n2 g20 cx1 cy1 x3x4 w3x3 y13x14 s1x1 d1x1 p6x6 x@nxc y@nxc bias out:f32",
    "depthwise in 3D": "y f32 n2 g20 cx1 cy1 x5x6x7 w3x3x3 y3x3x4 s2x2x2 d1x1x1 p1x1x1 x@nxc y@nxc accumulate",
    "depthwise weights in 3D": "w f32 n2 g20 cx1 cy1 x5x6x7 w2x3x3 y4x6x7 s1x1x1 d1x1x1 p0x1x1 x@nxc y@nxc accumulate",
    "depthwise in 1D": "w f16 n2 g33 cx1 cy1 x50 w7 y25 s2 d3 p9 x@nxc y@nxc",
    "depthwise weights": "w bf16 n2 g70 cx1 cy1 x9x9 w5x5 y9x9 s1x1 d1x1 p2x2 x@nxc y@nxc out:f32",
    "groups side by side": "y f32 n2 g9 cx2 cy4 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1 x@nxc y@nxc bias",
    "groups one after another": "x f32 n2 g34 cx17 cy5 x5x6 w3x3 y5x6 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "groups one after another, in pairs": "y bf16 n2 g34 cx6 cy17 x5x6 w3x3 y5x6 s1x1 d1x1 p1x1 bias",
    "groups side by side, weights": "w f16 n2 g9 cx2 cy4 x6x6 w3x3 y6x6 s1x1 d1x1 p1x1",
    "sums in several chunks": "y f32 n1 g1 cx700 cy70 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@nxc y@nxc bias",
    "sums in several chunks of pairs": "x bf16 n1 g1 cx70 cy1538 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1",
    "many weights": "x f32 n2 g1 cx512 cy130 x6x5 w3x3 y6x5 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio",
    "many weights, in pairs": "y bf16 n1 g1 cx150 cy1024 x5x4 w3x3 y3x2 s1x1 d1x1 p0x0 bias",
    "many weights, in groups": "x f16 n2 g8 cx17 cy90 x9x7 w3x3 y5x4 s2x2 d1x1 p1x1 accumulate",
    "many weights, many boxes": "y f32 n3 g1 cx90 cy600 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc bias",
    "many weights, input in place": "y f32 n2 g1 cx150 cy512 x4x4 w3x3 y2x2 s1x1 d1x1 p0x0 x@nxc y@nxc bias",
    "rows shorter than the stride": "x f32 n3 g1 cx2 cy5 x2 w1 y1 s4 d1 p0",
    "rows with a gap, odd over a stride": "x f32 n1 g1 cx3 cy4 x5x9 w3x3 y3x5 s2x2 d1x1 p1x1 x@150,0,50,10,1",
    "many inputs, few of each group": "y f32 n8 g64 cx1 cy24 x9x9 w3x3 y9x9 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "a tile for what is left": "x f32 n1 g1 cx64 cy64 x9x11 w3x3 y9x11 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "a tile for what is left, the last block too": "y bf16 n2 g1 cx33 cy80 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 bias",
    "many boxes": "y f32 n4 g1 cx64 cy20 x40x40 w3x3 y40x40 s1x1 d1x1 p1x1",
    "parts of the weights": "w f32 n2 g1 cx384 cy400 x7x7 w3x3 y7x7 s1x1 d1x1 p1x1 x@nxc y@nxc",
    "slices of the sum": "w f32 n8 g1 cx3 cy16 x64x64 w3x3 y64x64 s1x1 d1x1 p1x1",
    "slices of the sum, in pairs": "w bf16 n8 g1 cx3 cy16 x64x63 w3x3 y64x63 s1x1 d1x1 p1x1 accumulate",
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["halves", "without halves", "vector of 3", "native in small caches"])
def test_sizes_with_a_reason(target: str) -> None:
    declined, failures = run(target, list(NAMED.values()))
    assert not failures, "\n".join(failures)
    assert not declined, "\n".join(declined)


@pytest.mark.slow
def test_few_channels_over_strides() -> None:
    """Each number of channels is packed by shuffles of its own, each stride by others."""
    texts = [
        f"y {dtype} n1 g1 cx{channels} cy32 x{15 * stride + kernel} w{kernel} y16 s{stride} d1 p0"
        for dtype in ("f32", "bf16", "f16")
        for channels in range(1, 7)
        for stride in range(1, 5)
        for kernel in (1, 2)
    ]
    _, failures = run("native", texts)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x f32 n1 g1 cx2 cy2 x200x200 w1x1 y3x3 s65x64 d1x1 p0x0", "phases"),
        ("x f32 n1 g1 cx2 cy2 x5 w1 y1 s100000 d1 p0", "phases"),
    ],
)
def test_what_the_engine_leaves_to_the_reference(text: str, reason: str) -> None:
    plan = make_plan(Problem.parse(text), TARGETS["native"], 2)
    assert isinstance(plan, Declined)
    assert reason in plan.reason
    assert str(plan).startswith("reference: ")


def _gather(test: Callable[[Gather], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, Gather) and test(plan)


def _reduce(test: Callable[[Reduce], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, Reduce) and test(plan)


def _plane(test: Callable[[Plane], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, Plane) and test(plan)


def _slide(test: Callable[[Slide], bool]) -> Callable[[Plan], bool]:
    return lambda plan: isinstance(plan, Slide) and test(plan)


def _narrow(plan: Plan) -> bool:
    """Whether vectors are of half the width."""
    return not isinstance(plan, Declined) and any(why.startswith("vectors of ") for why in plan.why)


# What the problems of this file must walk, so that the tests above mean something.
PATHS: dict[str, Callable[[Plan], bool]] = {
    "gather in place": _gather(lambda g: g.in_place),
    "gather in place, in pairs": _gather(lambda g: g.in_place and g.pairs),
    "gather packed, in pairs": _gather(lambda g: not g.in_place and g.pairs),
    "gather through a stage": _gather(lambda g: g.staged),
    "gather in chunks": _gather(lambda g: g.chunks > 1),
    "gather in chunks of pairs": _gather(lambda g: g.chunks > 1 and g.pairs),
    "a last chunk that is shorter": _gather(lambda g: g.chunks > 1 and g.cin % g.chunk != 0),
    "gather in boxes, the last one smaller": _gather(
        lambda g: any(w.boxes > 1 and -(-w.out // w.phi) % w.box for w in g.walks)
    ),
    "gather in blocks of channels": _gather(lambda g: g.blocks > 1 and g.block_groups > 1),
    "tasks with unequal blocks": _gather(lambda g: g.block_groups > 1 and g.blocks % g.block_groups != 0),
    "weights packed by each thread": _gather(lambda g: g.copies and g.boxes > 1),
    "weights packed by each thread, in blocks": _gather(lambda g: g.copies and g.blocks > 1),
    "weights packed by each thread, in groups": _gather(lambda g: g.copies and g.groups > 1 and g.pairs),
    "weights packed by each thread, and a bias": _gather(lambda g: g.copies and g.bias is not None),
    "parts first": _gather(lambda g: g.parts_first and g.boxes > 1),
    "parts of the same pixels": _gather(lambda g: g.block_groups > 1 and not g.parts_first and g.boxes > 1),
    "high tiles of one whole vector": _gather(lambda g: g.lanes == 16 and g.vectors == 1 and g.rows > 8),
    "high tiles of sums of one whole vector": _reduce(lambda r: r.lanes == 16 and r.vectors == 1 and r.rows > 8),
    "weights packed by who needs them": _gather(lambda g: g.own and g.blocks > 1 and g.chunks > 1),
    "weights packed by who needs them, in groups": _gather(lambda g: g.own and g.groups > 1),
    "weights packed by who needs them, in pairs": _gather(lambda g: g.own and g.pairs),
    "weights packed by who needs them, for many boxes": _gather(lambda g: g.own and g.boxes > 1 and g.chunks > 1),
    "weights packed by who needs them, input in place": _gather(lambda g: g.own and g.in_place and g.chunks > 1),
    "weights packed by who needs them, asking ahead": _gather(lambda g: g.own and g.ahead is not None),
    "weights packed by who needs them, asking for more": _gather(lambda g: g.weights_apart > 0 and g.boxes > 1),
    "weights packed by who needs them, for one box": _gather(lambda g: g.weights_apart > 0 and g.boxes == 1),
    "a shorter tile": _gather(lambda g: g.short > 0 and not g.tail),
    "a shorter tile of a narrower block": _gather(lambda g: g.short > 0 and g.tail > 0 and g.blocks > 1),
    "several groups in a task": _gather(lambda g: g.run > 1 and g.runs > 1 and g.ahead is not None),
    "several groups in a task, fewer in the last": _gather(lambda g: g.groups % g.run > 0),
    "gather with groups side by side": _gather(lambda g: g.share is not None),
    "gather with groups of several side by side": _gather(lambda g: g.share is not None and g.share[0] > 1),
    "phases of a stride": _gather(lambda g: any(w.phi > 1 for w in g.walks)),
    "phases without a tap": _gather(lambda g: any(p.count == 0 for p in g.phases)),
    "borders apart": _gather(lambda g: any(len(w.stretches) > w.phi for w in g.walks)),
    "runs of a band apart": _gather(lambda g: any(len(p.offsets) > 1 for p in g.packs)),
    "past the caches": _gather(lambda g: g.stream and not g.staged),
    "past the caches from a stage": _gather(lambda g: g.stream and g.staged),
    "past the caches, pixels in the lanes": _reduce(lambda r: r.stream and r.operands[0] == "w"),
    "asking ahead": _gather(lambda g: g.ahead is not None),
    "asking ahead for what is spread": _gather(lambda g: g.ahead is not None and g.ahead.each > 4),
    "asking ahead for both sides": _reduce(lambda r: r.ahead is not None and len(r.ahead.regions) == 2),
    "pixels in the lanes": _reduce(lambda r: r.operands == ("w", "x", "y") and not r.pairs),
    "a last block with fewer vectors": _gather(lambda g: g.tail > 0 and g.blocks > 1),
    "a last block with fewer vectors, weights": _reduce(lambda r: r.tail > 0 and r.lane_blocks > 1 and not r.direct),
    "a last block with fewer vectors, direct": _reduce(lambda r: r.tail > 0 and r.lane_blocks > 1 and r.direct),
    "pixels in the lanes, backwards": _reduce(lambda r: r.operands == ("w", "y", "x") and not r.pairs),
    "pixels in the lanes, in pairs": _reduce(lambda r: r.operands[0] == "w" and r.pairs),
    "pixels in the lanes, summed in boxes": _reduce(lambda r: r.direct and max(r.box_counts) > 1),
    "pixels in the lanes, where they lie": _reduce(lambda r: r.operands[0] == "w" and r.lanes_in_place),
    "pixels in the lanes, packed": _reduce(lambda r: r.operands[0] == "w" and not r.lanes_in_place),
    "pixels in the lanes, added": _reduce(lambda r: r.operands[0] == "w" and r.accumulate),
    "rows in place whose channels lie apart": _reduce(lambda r: r.in_place and r.row_step > 1),
    "few channels, y": _gather(lambda g: g.fold is not None and g.wanted == "y"),
    "few channels, x": _gather(lambda g: g.fold is not None and g.wanted == "x" and not g.pairs),
    "few channels, x in pairs": _gather(lambda g: g.fold is not None and g.wanted == "x" and g.pairs),
    "few channels in several vectors": _gather(lambda g: g.fold is not None and g.vectors > 1),
    "few channels, sums in chunks": _gather(lambda g: g.fold is not None and g.chunks > 1),
    "few channels, a last one cut off": _gather(
        lambda g: g.fold is not None and any(s % f for s, f in zip(g.fold.sizes, g.fold.factors, strict=True))
    ),
    "an odd number of channels in pairs": _gather(lambda g: g.given < g.cin),
    "channels on their own, y": _slide(lambda s: s.wanted == "y"),
    "channels on their own, x in phases": _slide(lambda s: s.wanted == "x" and max(w.phi for w in s.walks) > 1),
    "channels on their own, w": _slide(lambda s: s.wanted == "w" and s.slices > 1),
    "channels on their own, past the caches": _slide(lambda s: s.stream),
    "rows of one channel, y": _plane(lambda p: p.wanted == "y" and p.bias is not None),
    "rows of one channel, x": _plane(lambda p: p.wanted == "x" and p.tasks > 1),
    "rows of one channel, in three axes": _plane(lambda p: p.kernel[0] > 1),
    "rows of one channel, a last tile of fewer": _plane(lambda p: p.out_sizes[1] % p.rows > 0),
    "rows of one channel, several tiles wide": _plane(lambda p: p.out_sizes[2] > p.block),
    "reduce in place on x": _reduce(lambda r: r.in_place and r.row_side == "x"),
    "reduce in place on y": _reduce(lambda r: r.in_place and r.row_side == "y"),
    "reduce in place on both sides": _reduce(lambda r: r.lanes_in_place and r.row_side == "x"),
    "reduce in place on both sides, rows of y": _reduce(lambda r: r.lanes_in_place and r.row_side == "y"),
    "reduce packed, rows of x": _reduce(lambda r: not r.in_place and r.row_side == "x"),
    "reduce packed, rows of y": _reduce(lambda r: not r.in_place and r.row_side == "y"),
    "reduce in pairs": _reduce(lambda r: r.pairs),
    "pairs read in place on x": _reduce(lambda r: r.pairs and r.in_place and r.row_side == "x"),
    "pairs read in place on y": _reduce(lambda r: r.pairs and r.in_place and r.row_side == "y"),
    "pairs joined where channels lie together": _reduce(lambda r: "channels" in (r.joining("x"), r.joining("y"))),
    "pairs moved where they lie together": _reduce(lambda r: "pixels" in (r.joining("x"), r.joining("y"))),
    "pairs by way of a copy": _reduce(lambda r: "copy" in (r.joining("x"), r.joining("y"))),
    "pairs under taps that lie evenly apart": _reduce(
        lambda r: r.pairs and r.x_join == (1, 2) and not r.in_place and r.x_packs[3].count > r.box[3] + 1
    ),
    "pairs of images": _reduce(lambda r: r.pairs and r.sizes_y[-1] == 2 and r.sizes_y[0] > 1),
    "pairs of images, channels first": _reduce(lambda r: r.twins and r.strings("x") and r.joining("y") == "twins"),
    "pairs of images, rows of y": _reduce(lambda r: r.twins and r.strings("y") and r.joining("x") == "twins"),
    "pairs of images, a run for each tap": _reduce(lambda r: r.twins and len(r.x_packs[2].offsets) > 1),
    "rows as they lie": _reduce(lambda r: r.strings("x") and r.pairs and not r.twins),
    "rows as they lie, of y": _reduce(lambda r: r.strings("y") and r.pairs and not r.twins),
    "rows as they lie, converted": _reduce(lambda r: r.strung and not r.pairs),
    "rows as they lie, thinned": _reduce(
        lambda r: r.strings("x") and r.pairs and r.x_packs[3].step > 2 and r.x_packs[3].offsets == (0, 1, 2)
    ),
    "rows as they lie, many runs": _reduce(lambda r: r.strings("x") and r.pairs and len(r.x_packs[3].offsets) > 8),
    "rows of y that follow each other": _reduce(lambda r: len(r.packing("y").starts[-1]) > 1 and not r.lies("y")),
    "every other pixel the first of a pair": _reduce(lambda r: r.pairs and r.x_join[1] > 1),
    "reduce in pairs, an odd width": _reduce(lambda r: r.pairs and r.sizes_y[-1] % 2 == 1),
    "reduce in boxes, the last one smaller": _reduce(
        lambda r: any(n % b for n, b in zip(r.sizes_y, r.box, strict=True))
    ),
    "parts of the rows": _reduce(lambda r: r.row_parts > 1),
    "parts of the rows that overlap": _reduce(lambda r: r.row_parts > 1 and r.crow % r.row_part != 0),
    "parts of the lanes": _reduce(lambda r: r.lane_parts > 1),
    "slices of the sum": _reduce(lambda r: r.slices > 1),
    "slices of the sum, in pairs": _reduce(lambda r: r.slices > 1 and r.pairs),
    "reduce with groups side by side": _reduce(lambda r: r.share is not None),
    "reduce with groups side by side, slices": _reduce(lambda r: r.share is not None and r.slices > 1),
    "runs of the band of x apart": _reduce(lambda r: any(len(p.offsets) > 1 for p in r.x_packs)),
    "gather without a loop over channels": _gather(lambda g: g.unrolled and not g.pairs and g.groups > 1),
    "gather without a loop over channels, in pairs": _gather(lambda g: g.unrolled and g.pairs),
    "gather without a loop over channels, few channels": _gather(lambda g: g.unrolled and g.fold is not None),
    "gather by vectors of half the width": _gather(lambda g: _narrow(g) and g.blocks > 1),
    "gather by vectors of half the width, in pairs": _gather(lambda g: _narrow(g) and g.pairs),
    "gather by vectors of half the width, few channels": _gather(lambda g: _narrow(g) and g.fold is not None),
    "gather by vectors of half the width, side by side": _gather(lambda g: _narrow(g) and g.share is not None),
    "reduce by vectors of half the width": _reduce(lambda r: _narrow(r) and not r.pairs),
    "reduce by vectors of half the width, in pairs": _reduce(lambda r: _narrow(r) and r.pairs),
    "reduce by vectors of half the width, side by side": _reduce(lambda r: _narrow(r) and r.share is not None),
    "channels on their own, vectors of half the width": _slide(_narrow),
    "rows of one channel, vectors of half the width": _plane(_narrow),
    "a tile of taps that is not full": _reduce(lambda r: r.share is not None and len(r.taps) % r.tap_step != 0),
}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """The plans of all problems above; with pairs and vectors of half the width, even where this machine has none."""
    features = TARGETS["native"].features + ",+avx512bf16"
    paired = replace(TARGETS["native"], width=64, registers=32, features=features, halves=False)
    halves = replace(paired, halves=True)
    small = TARGETS["native in small caches"]
    machines: list[Target] = [
        paired if name == "native" else halves if name == "halves" else t for name, t in TARGETS.items()
    ]
    drawn = [(numbered(i * EACH + j), t) for i, t in enumerate(machines) for j in range(min(EACH, 25))]
    all_of_them = (paired, halves, TARGETS["vector of 3"], small)
    named = [(Problem.parse(text), t) for text in NAMED.values() for t in all_of_them]
    return [make_plan(p, t, threads) for p, t in [*drawn, *named] for threads in (1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_problems_walk_every_path(path: str, plans: list[Plan]) -> None:
    assert any(map(PATHS[path], plans))
