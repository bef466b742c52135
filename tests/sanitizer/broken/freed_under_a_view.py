"""A tensor is freed while a view of it is still in use. `ctx.free` gives back the memory of all views, alive or not.

Without the call nothing would be wrong: memory comes back when the last view has died.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "freed"
N = 64


@gluon.jit
def fetch(context_tensor, source, result, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    values = ctx.load(source + offsets, 1 - ctx.cur_rank)  # first
    gl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    both = ctx.arange(1000 * rank, 1000 * rank + 2 * N, dtype=torch.int32)
    result = ctx.zeros(N, dtype=torch.int32)
    second_half = both[N:]
    if broken:
        ctx.free(both)
    ctx.barrier()
    fetch[(1,)](ctx.get_device_context(), second_half, result, N)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [1000 * (1 - rank) + N + i for i in range(N)]


if __name__ == "__main__":
    command(main)
