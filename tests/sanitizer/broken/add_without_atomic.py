"""Both ranks add to rank 0's totals by load, addition and store. One of them overwrites what the other has added.

An atomic does the three in one, and needs no order here: the totals are read after a barrier.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def contribute(context_tensor, total, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    mine = (ctx.cur_rank + 1) * offsets
    if BROKEN:
        values = ctx.load(total + offsets, 0)  # first
        ctx.store(total + offsets, values + mine, 0)  # second
    else:
        ctx.atomic_add(total + offsets, mine, 0, sem="relaxed")


def main(ctx: iris.Iris, broken: bool) -> None:
    total = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    contribute[(1,)](ctx.get_device_context(), total, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert total.tolist() == [3 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
