"""An all-reduce in place: each rank adds up everyone's data and writes the sum over its own, while peers still read it.

The first barrier says that all data are there; a second one has to say that all have been read.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race/reuse"
BLOCK, PROGRAMS = 64, 2


@gluon.jit
def all_reduce(context_tensor, data, flags, BLOCK: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(data + offsets, (ctx.cur_rank + 1) * offsets)
    # A barrier of the programs of one number is enough: they are all that use this block.
    ctx.barrier(flags)
    total = gl.zeros([BLOCK], gl.int32, layout=layout)
    for peer in range(ctx.num_ranks):
        total += ctx.load(data + offsets, peer)  # first
    if not BROKEN:
        ctx.barrier(flags)
    gl.store(data + offsets, total)  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.zeros(PROGRAMS * BLOCK, dtype=torch.int32)
    flags = ctx.zeros(PROGRAMS, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    all_reduce[(PROGRAMS,)](ctx.get_device_context(), data, flags, BLOCK, broken)
    ctx.barrier()
    if not broken:
        assert data.tolist() == [(1 + 2) * i for i in range(PROGRAMS * BLOCK)]


if __name__ == "__main__":
    command(main)
