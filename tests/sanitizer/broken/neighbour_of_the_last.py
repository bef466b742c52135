"""A ring without its end: the last rank sends to rank num_ranks, which does not exist.

On a GPU the table of heaps is read past its end, and the data go to whatever address that word makes.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "rank"
N = 64


@gluon.jit
def send(context_tensor, source, inbox, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    following = ctx.cur_rank + 1
    if not BROKEN:
        following = following % ctx.num_ranks
    ctx.put(source + offsets, inbox + offsets, following)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, num_ranks = ctx.get_rank(), ctx.get_num_ranks()
    source, inbox = ctx.full((N,), 4 + rank, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), source, inbox, N, broken)
    ctx.barrier()
    if not broken:
        assert inbox.tolist() == [4 + (rank - 1) % num_ranks] * N


if __name__ == "__main__":
    command(main)
