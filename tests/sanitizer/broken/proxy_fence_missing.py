"""TMA fetches what has been waited for, with nothing in between that makes the wait count for it.

It accesses memory through the async proxy, and what an acquire orders are loads and stores, through the generic one. So
TMA may fetch what was there before.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race/missing-proxy-fence"
ROWS, COLUMNS = 16, 32
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def exchange(context_tensor, inbox, flag, result, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    peer = 1 - ctx.cur_rank
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    place = row[:, None] * COLUMNS + column[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
    block = gl.allocate_shared_memory(gl.float16, [ROWS, COLUMNS], shared)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    own = tma.make_tensor_descriptor(inbox, [ROWS, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], shared)
    ctx.store(inbox + place, (place + ctx.cur_rank).to(gl.float16), peer)  # first
    ctx.signal(flag, 1, peer)
    ctx.wait(flag, 1)
    if not BROKEN:
        ctx.order_bulk_copies()
    mbarrier.expect(loaded, own.block_type.nbytes)
    async_load(own, [0, 0], loaded, block)  # second
    mbarrier.wait(loaded, 0)
    gl.store(result + place, block.load(LAYOUT))


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox = ctx.zeros(ROWS, COLUMNS, dtype=torch.float16)
    flag, result = ctx.zeros(1, dtype=torch.int32), torch.zeros(ROWS, COLUMNS, dtype=torch.float16)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), inbox, flag, result, ROWS, COLUMNS, broken)
    ctx.barrier()
    if not broken:
        assert torch.equal(result, torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).half() + 1 - ctx.get_rank())


if __name__ == "__main__":
    command(main)
