"""From IR text to machine code that can be called.

`jit` is the door: it finds code or has it compiled. `llvm` compiles, `elf` loads compiled code without LLVM, `store`
keeps it on disk, and `recall` finds the code of a problem without planning it again.
"""
