"""A program without work leaves before it has written its partial sum; the kernel after it adds up all of them.

Who has nothing to add must write a zero.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "uninitialised"
N, BLOCK, PROGRAMS = 96, 32, 4


@gluon.jit
def add_block(source, partial, n, BLOCK: gl.constexpr, BROKEN: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    pid = gl.program_id(0)
    if BROKEN:
        busy = pid * BLOCK < n
    else:
        busy = pid >= 0
    if busy:
        offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
        values = gl.load(source + offsets, mask=offsets < n, other=0)
        gl.store(partial + pid, gl.sum(values, axis=0))


@gluon.jit
def add_partials(context_tensor, partial, result, PROGRAMS: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    total = 0
    for rank in range(ctx.num_ranks):
        for i in range(PROGRAMS):
            total += ctx.load(partial + i, rank)  # first
    gl.store(result, total)


def main(ctx: iris.Iris, broken: bool) -> None:
    source = ctx.full((N,), 1 + ctx.get_rank(), dtype=torch.int32)
    partial, result = ctx.empty(PROGRAMS, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    add_block[(PROGRAMS,)](source, partial, N, BLOCK, broken)
    ctx.barrier()
    add_partials[(1,)](ctx.get_device_context(), partial, result, PROGRAMS)
    ctx.barrier()
    if not broken:
        assert result.item() == (1 + 2) * N


if __name__ == "__main__":
    command(main)
