"""A ring of two stages in shared memory is addressed without its remainder.

On a GPU the third tile lands in whatever the block has after its stages.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
from iris.gluon import IrisDeviceCtx

KIND = "bounds"
COUNT, N = 3, 64
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def keep(stages, number, values, BROKEN: gl.constexpr):
    if BROKEN:
        stages.index(number).store(values)  # first
    else:
        stages.index(number % 2).store(values)


@gluon.jit
def pass_on(context_tensor, source, inbox, COUNT: gl.constexpr, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    i = gl.arange(0, N, LINE)
    stages = gl.allocate_shared_memory(gl.int32, [2, N], FLAT)
    for number in range(COUNT):
        keep(stages, number, gl.load(source + number * N + i), BROKEN)
        ctx.store(inbox + number * N + i, stages.index(number % 2).load(LINE), 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox = ctx.zeros(COUNT * N, dtype=torch.int32)
    source = torch.arange(COUNT * N, dtype=torch.int32) + ctx.get_rank()
    ctx.barrier()
    pass_on[(1,)](ctx.get_device_context(), source, inbox, COUNT, N, broken)
    ctx.barrier()
    assert torch.equal(inbox, torch.arange(COUNT * N, dtype=torch.int32) + 1 - ctx.get_rank())


if __name__ == "__main__":
    command(main)
