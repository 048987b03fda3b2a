"""Weight gradients, and 1x1 convolutions as sums over channels: each result sums over all pixels, or channels."""
