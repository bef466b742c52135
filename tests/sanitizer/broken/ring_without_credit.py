"""A ring: each rank passes on what it got. It hears from the rank before it, and never from the one that it writes to.

That one may be slow: its inbox is overwritten before it has read it. A credit in the other direction tells.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/reuse"
RANKS = 3
N = 32


@triton.jit
def add_around(context_tensor, own, inbox, full, taken, total, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    following = (ctx.cur_rank + 1) % ctx.num_ranks
    previous = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
    values = tl.load(own + offsets)
    added = values
    for step in range(ctx.num_ranks - 1):
        if not BROKEN:
            if step > 0:
                ctx.wait(taken + step - 1, 1)
        ctx.store(inbox + offsets, values, following)  # second
        ctx.signal(full + step, 1, following)
        ctx.wait(full + step, 1)
        values = tl.load(inbox + offsets)  # first
        ctx.signal(taken + step, 1, previous)
        added += values
    tl.store(total + offsets, added)


def main(ctx: iris.Iris, broken: bool) -> None:
    num_ranks = ctx.get_num_ranks()
    own = ctx.full((N,), 10 + ctx.get_rank(), dtype=torch.int32)
    inbox, total = ctx.zeros_like(own), ctx.zeros_like(own)
    full, taken = ctx.zeros(num_ranks, dtype=torch.int32), ctx.zeros(num_ranks, dtype=torch.int32)
    ctx.barrier()
    add_around[(1,)](ctx.get_device_context(), own, inbox, full, taken, total, N, broken)
    ctx.barrier()
    if not broken:
        assert total.tolist() == [sum(10 + rank for rank in range(num_ranks))] * N


if __name__ == "__main__":
    command(main)
