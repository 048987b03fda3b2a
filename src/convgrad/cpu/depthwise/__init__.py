"""The loop nests of depthwise layers: channels in the lanes of a vector, or pixels in them."""
