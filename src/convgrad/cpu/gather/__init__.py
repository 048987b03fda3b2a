"""The loop nest of results and data gradients: each output pixel gathers over kernel taps and channels."""
