"""One partition of a program waits for a peer's data, another reads them, and no mbarrier is between the two.

Partitions run side by side: the wait of one holds up no other, and orders nothing that another does.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import iris
from iris.gluon import IrisDeviceCtx

KIND = "race"
COUNT = 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def communicate(context_tensor, inbox, flag, arrived, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    i = gl.arange(0, 128, LINE)
    ctx.store(inbox + i, i + ctx.cur_rank, 1 - ctx.cur_rank)  # first
    ctx.signal(flag, 1, 1 - ctx.cur_rank)
    ctx.wait(flag, 1)
    if not BROKEN:
        mbarrier.arrive(arrived, count=1)


@gluon.jit
def compute(inbox, result, arrived, BROKEN: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    if not BROKEN:
        mbarrier.wait(arrived, 0)
    gl.store(result + i, 2 * gl.load(inbox + i))  # second


@gluon.jit
def exchange(context_tensor, inbox, flag, result, BROKEN: gl.constexpr):
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    gl.warp_specialize(
        [
            (communicate, (context_tensor, inbox, flag, arrived, BROKEN)),
            (compute, (inbox, result, arrived, BROKEN)),
        ],
        [4],
        [24],
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(COUNT, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(COUNT, dtype=torch.int32)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), inbox, flag, result, broken)
    ctx.barrier()
    if not broken:
        assert torch.equal(result, 2 * (torch.arange(COUNT, dtype=torch.int32) + 1 - ctx.get_rank()))


if __name__ == "__main__":
    command(main)
