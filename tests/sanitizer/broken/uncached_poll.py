"""A poll by loads with the modifier ".cv" sees the flag change, but orders nothing after it: that takes a fence."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-acquire"
N = 16


@triton.jit
def exchange(context_tensor, inbox, flag, out, N: tl.constexpr, FENCE: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    peer = 1 - ctx.cur_rank
    ctx.store(inbox + i, i * 1.0, peer)  # first
    ctx.signal(flag, 1, peer)
    while tl.load(flag, cache_modifier=".cv") != 1:
        pass
    if FENCE:
        ctx.fence()
    tl.store(out + i, tl.load(inbox + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag, out = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32), ctx.zeros(N)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), inbox, flag, out, N, not broken)
    ctx.barrier()
    assert out.tolist() == list(range(N))


if __name__ == "__main__":
    command(main)
