"""Only program 0 takes part in the barrier, "since it synchronises the ranks". It synchronises programs, one by one.

What the other programs read may not have been written yet.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
BLOCK, PROGRAMS = 32, 3


@triton.jit
def exchange(context_tensor, inbox, result, flags, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    ctx.store(inbox + offsets, 1000 * ctx.cur_rank + offsets, 1 - ctx.cur_rank)  # first
    if BROKEN:
        if pid == 0:
            ctx.barrier(flags)
    else:
        ctx.barrier(flags)
    values = tl.load(inbox + offsets)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, n = ctx.get_rank(), PROGRAMS * BLOCK
    inbox, result = ctx.zeros(n, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)
    flags = ctx.zeros(PROGRAMS, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    exchange[(PROGRAMS,)](ctx.get_device_context(), inbox, result, flags, BLOCK, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [1000 * (1 - rank) + i for i in range(n)]


if __name__ == "__main__":
    command(main)
