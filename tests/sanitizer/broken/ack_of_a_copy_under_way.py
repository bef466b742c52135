"""A partition acknowledges what TMA fetches for it before it has waited for the copy.

The sender then stores the next round into what the copy, which another partition has issued, still reads.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race/reuse"
SIDE, ROUNDS = 32, 3
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def places(N: gl.constexpr):
    return gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def send(context_tensor, inbox, arrived, read, rounds, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    i, peer = places(N), 1 - ctx.cur_rank
    for number in range(rounds):
        ctx.wait(read, number, cmp="ge")
        ctx.store(inbox + i, (i + number).to(gl.float32), peer)  # second
        ctx.signal(arrived, number + 1, peer)


@gluon.jit
def fetch(context_tensor, blocks, arrived, block, full, empty, rounds):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    for number in range(rounds):
        ctx.wait(arrived, number + 1, cmp="ge")
        ctx.order_bulk_copies()
        mbarrier.wait(empty, number & 1 ^ 1)
        mbarrier.expect(full, blocks.block_type.nbytes)
        async_load(blocks, [0, 0], full, block)  # first


@gluon.jit
def add(context_tensor, total, read, block, full, empty, rounds, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    acc = gl.zeros([N, N], gl.float32, TILE)
    for number in range(rounds):
        if BROKEN:
            ctx.signal(read, number + 1, 1 - ctx.cur_rank)
        mbarrier.wait(full, number & 1)
        acc += block.load(TILE)
        mbarrier.arrive(empty, count=1)
        if not BROKEN:
            ctx.signal(read, number + 1, 1 - ctx.cur_rank)
    gl.store(total + places(N), acc)


@gluon.jit
def exchange(context_tensor, inbox, blocks, arrived, read, total, rounds, N: gl.constexpr, BROKEN: gl.constexpr):
    block = gl.allocate_shared_memory(blocks.dtype, [N, N], blocks.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full, empty = barriers.index(0), barriers.index(1)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (add, (context_tensor, total, read, block, full, empty, rounds, N, BROKEN)),
            (fetch, (context_tensor, blocks, arrived, block, full, empty, rounds)),
            (send, (context_tensor, inbox, arrived, read, rounds, N)),
        ],
        [1, 4],
        [24, 48],
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, total = ctx.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    arrived, read = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    block = [SIDE, SIDE]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    blocks = TensorDescriptor.from_tensor(inbox, block, layout)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), inbox, blocks, arrived, read, total, ROUNDS, SIDE, broken)
    ctx.barrier()
    if not broken:
        assert torch.equal(total, ROUNDS * torch.arange(SIDE * SIDE).view(block) + sum(range(ROUNDS)))


if __name__ == "__main__":
    command(main)
