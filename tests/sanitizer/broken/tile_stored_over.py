"""A program makes the next tile in the block that TMA still stores the last one from."""

from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris

KIND = "race"
ROWS, COLUMNS, TILES = 16, 32, 4
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def make(target, TILES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BROKEN: gl.constexpr):
    block = gl.allocate_shared_memory(target.dtype, [ROWS, COLUMNS], target.layout)
    for tile in range(TILES):
        if not BROKEN:
            tma.store_wait(0)
        block.store(gl.full([ROWS, COLUMNS], tile + 1, target.dtype, TILE))  # second
        fence_async_shared()
        async_store(target, [tile * ROWS, 0], block)  # first
    tma.store_wait(0)


def main(ctx: iris.Iris, broken: bool) -> None:
    target, block = ctx.zeros(TILES * ROWS, COLUMNS), [ROWS, COLUMNS]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    make[(1,)](TensorDescriptor.from_tensor(target, block, layout), TILES, ROWS, COLUMNS, broken)
    ctx.barrier()
    assert broken or target[:, 0].tolist() == [1.0 + row // ROWS for row in range(TILES * ROWS)]


if __name__ == "__main__":
    command(main)
