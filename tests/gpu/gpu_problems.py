"""Problems that between them take every path of the GPU engine; small enough to be interpreted."""

from __future__ import annotations

NXC = "x@nxc y@nxc w@xio"

PROBLEMS = {
    "plain": "{} {} n2 g1 cx5 cy6 x7x6 w3x2 y6x6 s1x1 d1x1 p0x1",
    "last": f"{{}} {{}} n2 g1 cx18 cy17 x5x6 w3x3 y5x6 s1x1 d1x1 p1x1 {NXC}",
    "1d": "{} {} n2 g1 cx3 cy4 x19 w5 y8 s2 d2 p2",
    "3d": f"{{}} {{}} n1 g2 cx3 cy2 x4x3x5 w2x3x2 y2x3x4 s2x1x1 d1x1x1 p0x1x0 {NXC}",
    "strided": "{} {} n1 g1 cx4 cy3 x9x10 w3x4 y5x3 s2x3 d1x1 p1x0",
    "strides and dilations": "{} {} n1 g1 cx2 cy3 x17x13 w3x2 y3x5 s6x2 d4x3 p2x1",
    "stride beyond the kernel": f"{{}} {{}} n2 g1 cx3 cy3 x11x9 w2x1 y3x3 s4x4 d1x1 p0x0 {NXC}",
    "padding beyond the kernel": "{} {} n1 g1 cx2 cy2 x3x2 w2x2 y9x6 s1x1 d1x1 p5x3",
    "depthwise": f"{{}} {{}} n2 g20 cx1 cy1 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {NXC}",
    "depthwise, channels first": "{} {} n2 g6 cx1 cy2 x6x7 w3x3 y3x4 s2x2 d1x1 p1x1",
    "grouped": f"{{}} {{}} n1 g3 cx2 cy4 x5x5 w3x3 y5x5 s1x1 d1x1 p1x1 {NXC}",
    "pointwise": f"{{}} {{}} n3 g1 cx33 cy20 x4x4 w1x1 y4x4 s1x1 d1x1 p0x0 {NXC}",
    "pointwise, strided": "{} {} n2 g2 cx5 cy6 x7x6 w1x1 y4x3 s2x2 d1x1 p0x0",
    "no window reaches the end": "{} {} n1 g1 cx2 cy3 x12x5 w2x2 y3x2 s3x2 d1x1 p0x0",
    "strides of nobody": "{} {} n2 g1 cx3 cy4 x4x5 w2x2 y3x4 s1x1 d1x1 p0x0 "
    "x@200,0,1,-15,3 y@150,0,2,40,9 w@0,32,8,4,-1",
}
"""Lines without the wanted tensor and the type."""

_BOTH = "x@nxc y@nxc"
WALKED = {
    "channels": f"{{}} {{}} n2 g20 cx1 cy1 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {NXC}",
    "pixels": "{} {} n2 g8 cx1 cy1 x6x8 w3x3 y6x8 s1x1 d1x1 p1x1",
    "long rows of pixels": "{} {} n1 g5 cx1 cy1 x17x32 w5x7 y17x32 s1x1 d1x1 p2x3",
    "pixels, strided": "{} {} n1 g4 cx1 cy1 x16x16 w3x3 y8x8 s2x2 d1x1 p1x1",
    "channels, strided": f"{{}} {{}} n1 g4 cx1 cy1 x16x16 w5x5 y8x8 s2x2 d1x1 p2x2 {_BOTH}",
    "uneven strides": "{} {} n1 g5 cx1 cy1 x9x10 w3x4 y5x3 s2x3 d1x1 p1x0",
    "two results of a channel": "{} {} n2 g6 cx1 cy2 x6x7 w3x3 y3x4 s2x2 d1x1 p1x1",
    "two results side by side": f"{{}} {{}} n2 g6 cx1 cy2 x6x7 w3x3 y3x4 s2x2 d1x1 p1x1 {_BOTH}",
    "pairs": f"{{}} {{}} n2 g6 cx2 cy2 x9x7 w3x2 y4x4 s2x2 d1x1 p0x1 {_BOTH}",
    "two channels of a result": "{} {} n2 g6 cx2 cy1 x9x8 w3x2 y9x9 s1x1 d1x1 p1x1",
    "stride beyond the kernel": f"{{}} {{}} n2 g9 cx1 cy1 x11x9 w2x1 y3x3 s4x4 d1x1 p0x0 {_BOTH}",
    "padding beyond the kernel": "{} {} n2 g9 cx1 cy1 x3x2 w2x2 y9x6 s1x1 d1x1 p5x3",
    "dilated pixels": "{} {} n1 g4 cx1 cy1 x17x16 w3x3 y17x16 s1x1 d2x3 p2x3",
    "dilated channels": f"{{}} {{}} n1 g4 cx1 cy1 x17x13 w3x3 y17x13 s1x1 d2x2 p2x2 {_BOTH}",
    "no tap in the first rows": "{} {} n1 g4 cx1 cy1 x9x4 w1x1 y4x5 s3x1 d1x1 p2x1",
    "strides and dilations": f"{{}} {{}} n1 g4 cx1 cy1 x17x13 w3x2 y8x5 s2x2 d1x3 p2x1 {_BOTH}",
    "rows of odd length": "{} {} n1 g8 cx1 cy1 x40 w4 y43 s1 d1 p3",
    "1d": "{} {} n2 g8 cx1 cy1 x40 w4 y40 s1 d1 p3",
    "1d, channels": f"{{}} {{}} n2 g24 cx1 cy1 x40 w4 y40 s1 d1 p3 {_BOTH}",
    "1d, strided": f"{{}} {{}} n2 g24 cx1 cy1 x41 w5 y20 s2 d1 p1 {_BOTH}",
    "3d, channels": f"{{}} {{}} n1 g6 cx1 cy1 x4x3x5 w2x3x2 y2x3x4 s2x1x1 d1x1x1 p0x1x0 {_BOTH}",
    "3d, pixels": "{} {} n1 g6 cx1 cy1 x6x5x8 w3x2x3 y3x5x8 s2x1x1 d2x1x1 p1x1x1",
    "four channels of a group": f"{{}} {{}} n2 g5 cx4 cy4 x6x7 w3x3 y6x7 s1x1 d1x1 p1x1 {_BOTH}",
    "four channels, pixels": "{} {} n1 g3 cx4 cy4 x6x8 w3x3 y3x4 s2x2 d1x1 p1x1",
    "four and two channels": f"{{}} {{}} n1 g6 cx4 cy2 x9x7 w3x3 y5x4 s2x2 d1x1 p1x1 {_BOTH}",
    "strides of nobody": "{} {} n2 g4 cx1 cy1 x4x5 w2x2 y3x4 s1x1 d1x1 p0x0 "
    "x@200,1,0,-20,4 y@150,2,0,40,9 w@32,0,0,4,-1",
}
"""Depthwise layers and groups of few channels."""
