"""Two partitions load one small block of shared memory; one waits for a peer's data, and the other reads those.

That both load the same tells neither anything. An mbarrier would.
"""

import time

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
def send(context_tensor, inbox, flag):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    i = gl.arange(0, 128, LINE)
    ctx.store(inbox + i, i, 1)  # first
    ctx.signal(flag, 1, 1)


@gluon.jit
def await_data(context_tensor, flag, scales, arrived, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    before = gl.sum(scales.load(LINE), 0)
    ctx.wait(flag, 1)
    gl.device_assert(gl.sum(scales.load(LINE), 0) == before)
    if not BROKEN:
        mbarrier.arrive(arrived, count=1)


@gluon.jit
def compute(inbox, result, scales, arrived, BROKEN: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    if not BROKEN:
        mbarrier.wait(arrived, 0)
    gl.store(result + i, gl.sum(scales.load(LINE), 0) * gl.load(inbox + i))  # second


@gluon.jit
def receive(context_tensor, inbox, flag, result, BROKEN: gl.constexpr):
    scales = gl.allocate_shared_memory(
        gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.full([4], 1, gl.int32, LINE)
    )
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    gl.warp_specialize(
        [
            (await_data, (context_tensor, flag, scales, arrived, BROKEN)),
            (compute, (inbox, result, scales, arrived, BROKEN)),
        ],
        [4],
        [24],
    )


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(COUNT, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(COUNT, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, flag)
    else:
        time.sleep(0.1)
        receive[(1,)](ctx.get_device_context(), inbox, flag, result, broken)
        assert broken or torch.equal(result, 4 * torch.arange(COUNT, dtype=torch.int32))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
