"""A kernel in Gluon that copies blocks through shared memory by descriptors: what tests ask of launches."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def copying(source, target, notes, columns, BLOCK: gl.constexpr):
    """A block of columns, whatever the number of rows; and its number, noted."""
    number = gl.program_id(0)
    here = gl.allocate_shared_memory(source.dtype, [BLOCK, 64], source.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    at = number * 64
    mbarrier.expect(barrier, source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [0, at], barrier, here)
    mbarrier.wait(barrier, 0)
    mbarrier.invalidate(barrier)
    tma.async_copy_shared_to_global(target, [0, at], here)
    tma.store_wait(0)
    if at < columns:
        gl.store(notes + number, number.to(gl.float32))
