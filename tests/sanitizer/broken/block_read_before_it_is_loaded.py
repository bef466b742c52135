"""A program reads the block that TMA loads with a wait for the other block's mbarrier alone."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris

KIND = "race"
SIDE = 32
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def add(source, result, N: gl.constexpr, BROKEN: gl.constexpr):
    blocks = gl.allocate_shared_memory(source.dtype, [2, N, N], source.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.expect(loaded.index(i), source.block_type.nbytes)
        async_load(source, [i * N, 0], loaded.index(i), blocks.index(i))  # first
    mbarrier.wait(loaded.index(0), 0)
    if not BROKEN:
        mbarrier.wait(loaded.index(1), 0)
    total = blocks.index(0).load(TILE) + blocks.index(1).load(TILE)  # second
    i, j = gl.arange(0, N, gl.SliceLayout(1, TILE)), gl.arange(0, N, gl.SliceLayout(0, TILE))
    gl.store(result + i[:, None] * N + j[None, :], total)


def main(ctx: iris.Iris, broken: bool) -> None:
    source, result = torch.arange(2.0 * SIDE * SIDE).view(-1, SIDE), ctx.zeros(SIDE, SIDE)
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], gl.float32)
    add[(1,)](TensorDescriptor.from_tensor(source, [SIDE, SIDE], layout), result, SIDE, broken)
    ctx.barrier()
    assert broken or torch.equal(result, source[:SIDE] + source[SIDE:])


if __name__ == "__main__":
    command(main)
