"""The receiver acknowledges a message when it has seen the flag, before it has read the data.

That releases what came before it, and the load comes after: the sender may overwrite the inbox while it is read.
"""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.gluon as iris_gl
from iris.gluon import IrisDeviceCtx

KIND = "race/reuse"
N, ROUNDS = 64, 3


@gluon.jit
def send(context_tensor, inbox, full, taken, N: gl.constexpr, ROUNDS: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    for round in range(ROUNDS):
        ctx.wait(taken, round, cmp="ge")
        ctx.store(inbox + offsets, 100 * round + offsets, 1)  # second
        ctx.signal(full, round + 1, 1)


@gluon.jit
def receive(context_tensor, inbox, full, taken, result, N: gl.constexpr, ROUNDS: gl.constexpr, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    layout: gl.constexpr = gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])
    offsets = gl.arange(0, N, layout=layout)
    for round in range(ROUNDS):
        ctx.wait(full, round + 1, cmp="ge")
        if BROKEN:
            ctx.signal(taken, round + 1, 0)
        values = gl.load(inbox + offsets)  # first
        if not BROKEN:
            ctx.signal(taken, round + 1, 0)
        gl.store(result + round * N + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    full, taken = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, full, taken, N, ROUNDS)
    else:
        receive[(1,)](ctx.get_device_context(), inbox, full, taken, result, N, ROUNDS, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
