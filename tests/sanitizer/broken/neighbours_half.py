"""Each rank computes half of the cells and fetches the other half from its neighbour, which may not have it yet.

It takes a barrier between the two, also among programs that began together.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race"
HALF = 64


@gluon.jit
def share(context_tensor, cells, result, flags, HALF: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, HALF, layout=layout)
    peer = 1 - ctx.cur_rank
    mine, theirs = ctx.cur_rank * HALF + offsets, peer * HALF + offsets
    gl.store(cells + mine, 10 * mine)  # first
    if not BROKEN:
        ctx.barrier(flags)
    values = ctx.load(cells + theirs, peer)  # second
    gl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    cells, result = ctx.zeros(2 * HALF, dtype=torch.int32), ctx.zeros(HALF, dtype=torch.int32)
    flags = ctx.zeros(1, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    share[(1,)](ctx.get_device_context(), cells, result, flags, HALF, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [10 * ((1 - ctx.get_rank()) * HALF + i) for i in range(HALF)]


if __name__ == "__main__":
    command(main)
