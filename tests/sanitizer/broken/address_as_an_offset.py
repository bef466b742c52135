"""A peer's address is taken for an offset, and added to a pointer: it leads to where nothing is.

On a GPU this is an illegal memory access, which says neither where nor why, and ends the process.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
N = 16


@triton.jit
def fetch(context_tensor, data, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    there = ctx.translate(data, 1 - ctx.cur_rank)
    if BROKEN:
        there = data + there.to(tl.int64)
    tl.store(result + i, tl.load(there + i))  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.full((N,), 5 + ctx.get_rank(), dtype=torch.int32)
    result = torch.zeros(N, dtype=torch.int32)
    ctx.barrier()
    fetch[(1,)](ctx.get_device_context(), data, result, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [6 - ctx.get_rank()] * N


if __name__ == "__main__":
    command(main)
