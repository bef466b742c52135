"""Two ranks set one flag of a third, each when its half is there; either ends the wait of who takes both halves."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
RANKS = 3
N = 64


@triton.jit
def gather(context_tensor, halves, flags, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    if ctx.cur_rank != 2:
        half = ctx.cur_rank * N
        ctx.store(halves + half + i, half + i, 2)  # first
        ctx.signal(flags if BROKEN else flags + ctx.cur_rank, 1, 2)
    else:
        ctx.wait(flags, 1)
        if not BROKEN:
            ctx.wait(flags + 1, 1)
        for half in range(2):
            tl.store(result + half * N + i, tl.load(halves + half * N + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    halves, flags = ctx.zeros(2 * N, dtype=torch.int32), ctx.zeros(2, dtype=torch.int32)
    result = torch.zeros(2 * N, dtype=torch.int32)
    ctx.barrier()
    gather[(1,)](ctx.get_device_context(), halves, flags, result, N, broken)
    assert broken or ctx.get_rank() != 2 or result.tolist() == list(range(2 * N))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
