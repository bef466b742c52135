"""Rank 0 reads the sum without having waited for those that add to it.

That the additions are atomic does not help: the load comes at any time between them.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race"
RANKS = 3
N = 32


@gluon.jit
def reduce(context_tensor, total, arrived, result, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    if ctx.cur_rank != 0:
        ctx.atomic_add(total + offsets, ctx.cur_rank + 1, 0, sem="relaxed")  # first
        ctx.signal(arrived, 1, 0, op="add")  # releases the additions, relaxed as they are
    else:
        if not BROKEN:
            ctx.wait(arrived, ctx.num_ranks - 1)
        values = gl.load(total + offsets)  # second
        gl.store(result + offsets, 1 + values)


def main(ctx: iris.Iris, broken: bool) -> None:
    total, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    arrived = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    reduce[(1,)](ctx.get_device_context(), total, arrived, result, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert result.tolist() == [1 + 2 + 3] * N


if __name__ == "__main__":
    command(main)
