"""A partition waits for a peer's data after a copy by TMA that it has issued; another one waits for that copy alone.

The copy came before the wait. That it ends orders nothing of what was waited for meanwhile, late as it may end.
"""

import time

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race"
SIDE = 32
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))

# Triton 3.9 has another name for it.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def places(N: gl.constexpr):
    return gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def fetch(context_tensor, weights, flag, block, full, arrived, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    mbarrier.expect(full, weights.block_type.nbytes)
    async_load(weights, [0, 0], full, block)
    ctx.wait(flag, 1)
    mbarrier.arrive(arrived, count=1)


@gluon.jit
def add(inbox, result, block, full, arrived, N: gl.constexpr, BROKEN: gl.constexpr):
    if not BROKEN:
        mbarrier.wait(arrived, 0)
    mbarrier.wait(full, 0)
    gl.store(result + places(N), block.load(TILE) + gl.load(inbox + places(N)))  # second


@gluon.jit
def send(context_tensor, inbox, flag, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    ctx.store(inbox + places(N), places(N).to(gl.float32), 1)  # first
    ctx.signal(flag, 1, 1)


@gluon.jit
def receive(context_tensor, weights, inbox, flag, result, N: gl.constexpr, BROKEN: gl.constexpr):
    block = gl.allocate_shared_memory(weights.dtype, [N, N], weights.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full, arrived = barriers.index(0), barriers.index(1)
    mbarrier.init(full, count=1)
    mbarrier.init(arrived, count=1)
    gl.warp_specialize(
        [
            (fetch, (context_tensor, weights, flag, block, full, arrived, N)),
            (add, (inbox, result, block, full, arrived, N, BROKEN)),
        ],
        [4],
        [48],
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag, result = ctx.zeros(SIDE, SIDE), ctx.zeros(1, dtype=torch.int32), torch.zeros(SIDE, SIDE)
    layout = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], gl.float32)
    weights = TensorDescriptor.from_tensor(torch.ones(SIDE, SIDE), [SIDE, SIDE], layout)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, flag, SIDE)
    else:
        time.sleep(0.1)
        receive[(1,)](ctx.get_device_context(), weights, inbox, flag, result, SIDE, broken)
        assert broken or torch.equal(result, torch.arange(SIDE * SIDE).view(SIDE, SIDE) + 1.0)
    ctx.barrier()


if __name__ == "__main__":
    command(main)
