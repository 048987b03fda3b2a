"""The loop nest of weight gradients: each weight sums over all pixels."""
