"""A signal after `store_wait`, which by default waits until the block has left shared memory, not until it arrives."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race"
ROWS, COLUMNS = 16, 32
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def exchange(context_tensor, inbox, flag, result, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    peer = 1 - ctx.cur_rank
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    place = row[:, None] * COLUMNS + column[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
    block = gl.allocate_shared_memory(gl.float16, [ROWS, COLUMNS], shared, (place + ctx.cur_rank).to(gl.float16))
    theirs = tma.make_tensor_descriptor(
        ctx.translate(inbox, peer), [ROWS, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], shared
    )
    fence_async_shared()
    async_store(theirs, [0, 0], block)  # first
    tma.store_wait(0, read_only=BROKEN)
    ctx.signal(flag, 1, peer)
    ctx.wait(flag, 1)
    gl.store(result + place, gl.load(inbox + place))  # second


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
