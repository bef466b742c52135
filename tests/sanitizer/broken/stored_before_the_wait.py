"""TMA's store into a peer's buffer is issued before the wait for the peer's leave, and may be done before it, too.

That it is awaited after the leave does not help.
"""

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
def exchange(context_tensor, inbox, leave, flag, result, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
             BROKEN: gl.constexpr):  # fmt: skip
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
    before = gl.load(inbox + place)  # first
    fence_async_shared()
    ctx.signal(leave, 1, peer)
    if not BROKEN:
        ctx.wait(leave, 1)
    async_store(theirs, [0, 0], block)  # second
    if BROKEN:
        ctx.wait(leave, 1)
    tma.store_wait(0, read_only=False)
    ctx.signal(flag, 1, peer)
    ctx.wait(flag, 1)
    gl.store(result + place, before + gl.load(inbox + place))


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, leave, flag = ctx.zeros(ROWS, COLUMNS, dtype=torch.float16), *ctx.zeros(2, 1, dtype=torch.int32)
    result = torch.zeros(ROWS, COLUMNS, dtype=torch.float16)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), inbox, leave, flag, result, ROWS, COLUMNS, broken)
    ctx.barrier()
    assert broken or torch.equal(result, torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).half() + 1 - ctx.get_rank())


if __name__ == "__main__":
    command(main)
