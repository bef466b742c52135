"""Rank 0 orders a copy from rank 1 to rank 2: whoever copies is one of the two."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "rank"
RANKS = 3
N = 64


@triton.jit
def move(context_tensor, source, target, caller, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    if ctx.cur_rank == caller:
        ctx.copy(source + i, target + i, 1, 2)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    source = torch.arange(N, dtype=torch.int16, device=ctx.get_device()) + 100 * ctx.get_rank()
    source = ctx.as_symmetric(source)
    target = ctx.zeros(N, dtype=torch.int16)
    ctx.barrier()
    move[(1,)](ctx.get_device_context(), source, target, 0 if broken else 1, N)
    ctx.barrier()
    if not broken:
        assert target.tolist() == ([100 + i for i in range(N)] if ctx.get_rank() == 2 else [0] * N)


if __name__ == "__main__":
    command(main)
