"""Rank 1 posts the receive of a message that says that its inbox is full, and reads the inbox before it has waited."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 32


@triton.jit
def put(context_tensor, x, inbox, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.put(x + i, inbox + i, 1)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x, inbox, message = ctx.ones(N), ctx.zeros(N), torch.zeros(1)
    ctx.barrier()
    if ctx.get_rank() == 0:
        put[(1,)](ctx.get_device_context(), x, inbox, N)
        dist.send(message, 1)
    else:
        work = dist.irecv(message, 0)
        if not broken:
            work.wait()
        inbox.sum()  # second
        if broken:
            work.wait()
    ctx.barrier()


if __name__ == "__main__":
    command(main)
