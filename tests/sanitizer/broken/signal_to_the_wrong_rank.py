"""The data go to rank 1 and the signal to rank 0, the sender itself: rank 1 waits for ever."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "deadlock"
N = 64


@gluon.jit
def send(context_tensor, data, flag, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    ctx.store(data + offsets, offsets, 1)
    if BROKEN:
        ctx.signal(flag, 1, ctx.cur_rank)
    else:
        ctx.signal(flag, 1, 1)


@gluon.jit
def receive(context_tensor, data, flag, result, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    ctx.wait(flag, 1)  # first
    gl.store(result + offsets, gl.load(data + offsets))


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), data, flag, N, broken)
    else:
        receive[(1,)](ctx.get_device_context(), data, flag, result, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == list(range(N))


if __name__ == "__main__":
    command(main)
