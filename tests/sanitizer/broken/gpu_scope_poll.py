"""The receiver acquires at gpu scope, since "the flag is in my own memory". What counts is where the sender is.

A peer's stores may pass by the caches that an acquire of gpu scope looks at, so old data may be read.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race/scope"
N = 128


@gluon.jit
def exchange(context_tensor, source, inbox, result, flag, N: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    peer = 1 - ctx.cur_rank
    ctx.put_signal(source + offsets, inbox + offsets, flag, 1, peer)  # first
    if BROKEN:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="acquire", scope="gpu") == 0:
            pass
    else:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="acquire", scope="sys") == 0:
            pass
    values = gl.load(inbox + offsets)  # second
    gl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    source = ctx.full((N,), 20 + rank, dtype=torch.int32)
    inbox, result = ctx.zeros_like(source), ctx.zeros_like(source)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), source, inbox, result, flag, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [20 + (1 - rank)] * N


if __name__ == "__main__":
    command(main)
