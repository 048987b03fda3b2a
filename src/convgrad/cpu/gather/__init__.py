"""The loop nest of y and x: each result gathers its products over kernel taps and channels.

`plan.py` decides, step by step, into `records.py`; `cut.py` has its steps about boxes and tasks. `kernel.py` writes the
loops, `tile.py` the register tiles inside them, `pixels.py` the list of a box's pixels. `fold.py` is for few channels.
"""
