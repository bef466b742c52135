"""What a rank gets by a scatter tells it of the root alone, and not of the others that get something too."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
RANKS = 3
N = 64


@triton.jit
def read(data, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(data + i))  # first


@triton.jit
def overwrite(context_tensor, data, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(data + i, -i, 1)  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.ones(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    share, shares = torch.zeros(1), list(torch.ones(3).split(1))
    ctx.barrier()
    if ctx.get_rank() == 1:
        read[(1,)](data, result, N)
    dist.scatter(share, shares if ctx.get_rank() == 0 else None, 0)
    if not broken:
        dist.barrier()
    if ctx.get_rank() == 2:
        overwrite[(1,)](ctx.get_device_context(), data, N)
    ctx.barrier()
    assert broken or ctx.get_rank() != 1 or result.tolist() == [1] * N


if __name__ == "__main__":
    command(main)
