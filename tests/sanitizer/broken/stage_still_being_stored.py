"""A copy through two stages: what may be left under way is the store of just that stage which is loaded again.

TMA then writes what TMA still reads.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris

KIND = "race"
ROWS, COLUMNS, BLOCKS = 16, 32, 6

# Triton 3.9 has other names for them.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def copy(source, target, BLOCKS: gl.constexpr, ROWS: gl.constexpr, BROKEN: gl.constexpr):
    stages = gl.allocate_shared_memory(source.dtype, [2] + source.block_type.shape, source.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.expect(loaded.index(stage), source.block_type.nbytes)
        async_load(source, [stage * ROWS, 0], loaded.index(stage), stages.index(stage))
    for block in range(BLOCKS):
        stage = block % 2
        mbarrier.wait(loaded.index(stage), block // 2 & 1)
        async_store(target, [block * ROWS, 0], stages.index(stage))  # first
        tma.store_wait(1 if BROKEN else 0)
        more = block + 2 < BLOCKS
        mbarrier.expect(loaded.index(stage), source.block_type.nbytes, pred=more)
        async_load(source, [(block + 2) * ROWS, 0], loaded.index(stage), stages.index(stage), pred=more)  # second
    tma.store_wait(0)


def main(ctx: iris.Iris, broken: bool) -> None:
    source = torch.arange(BLOCKS * ROWS * COLUMNS).view(-1, COLUMNS).float()
    target, block = ctx.zeros(source.shape), [ROWS, COLUMNS]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    descriptors = (TensorDescriptor.from_tensor(tensor, block, layout) for tensor in (source, target))
    copy[(1,)](*descriptors, BLOCKS, ROWS, broken)
    ctx.barrier()
    assert broken or torch.equal(target, source)


if __name__ == "__main__":
    command(main)
