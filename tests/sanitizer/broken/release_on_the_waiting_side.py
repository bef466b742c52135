"""The consumer takes a ticket by compare-and-swap with a release, where it needs an acquire: the pair is two releases.

Nothing keeps the loads of the data after the swap.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race/missing-acquire"
N = 64


@gluon.jit
def produce(context_tensor, box, ticket, N: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    gl.store(box + offsets, 40 + offsets)  # first
    ctx.signal(ticket, 1, ctx.cur_rank)  # the box stays here; the consumer comes for it


@gluon.jit
def consume(context_tensor, box, ticket, result, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    if BROKEN:
        while ctx.atomic_cas(ticket, 1, 2, 0, sem="release") != 1:
            pass
    else:
        while ctx.atomic_cas(ticket, 1, 2, 0, sem="acquire") != 1:
            pass
    values = ctx.load(box + offsets, 0)  # second
    gl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    box, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    ticket = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        produce[(1,)](ctx.get_device_context(), box, ticket, N)
    else:
        consume[(1,)](ctx.get_device_context(), box, ticket, result, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [40 + i for i in range(N)]


if __name__ == "__main__":
    command(main)
