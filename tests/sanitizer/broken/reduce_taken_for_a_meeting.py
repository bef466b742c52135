"""Who is not the root of a reduction hears of nobody: of three ranks, one takes what another has stored before it."""

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
def store(data, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(data + i, 5 * i)  # first


@triton.jit
def fetch(context_tensor, data, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    tl.store(result + i, ctx.load(data + i, 1))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    counted = torch.ones(1)
    ctx.barrier()
    if ctx.get_rank() == 1:
        store[(1,)](data, N)
    if broken:
        dist.reduce(counted, 0)
    else:
        dist.all_reduce(counted)
    if ctx.get_rank() == 2:
        fetch[(1,)](ctx.get_device_context(), data, result, N)
        assert broken or result.tolist() == [5 * i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
