"""Each program has a flag, but all of them wait for that of program 0: `arrived` instead of `arrived + pid`."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race"
BLOCK, PROGRAMS = 32, 3


@gluon.jit
def exchange(context_tensor, source, inbox, result, arrived, BLOCK: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    pid = gl.program_id(0)
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    peer = 1 - ctx.cur_rank
    ctx.put_signal(source + offsets, inbox + offsets, arrived + pid, 1, peer)  # first
    if BROKEN:
        ctx.wait(arrived, 1)
    else:
        ctx.wait(arrived + pid, 1)
    values = gl.load(inbox + offsets)  # second
    gl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, n = ctx.get_rank(), PROGRAMS * BLOCK
    source = ctx.arange(1000 * rank, 1000 * rank + n, dtype=torch.int32)
    inbox, result = ctx.zeros_like(source), ctx.zeros_like(source)
    arrived = ctx.zeros(PROGRAMS, dtype=torch.int32)
    ctx.barrier()
    exchange[(PROGRAMS,)](ctx.get_device_context(), source, inbox, result, arrived, BLOCK, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [1000 * (1 - rank) + i for i in range(n)]


if __name__ == "__main__":
    command(main)
