"""All programs take part in the barrier, but then read what a peer's program of another number has written.

The barrier lets program p meet program p of each rank, and is no barrier of the grid.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
BLOCK, PROGRAMS = 32, 2


@triton.jit
def mirror(context_tensor, blocks, result, flags, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    mirrored = tl.num_programs(0) - 1 - pid
    if BROKEN:
        written = pid
    else:
        written = mirrored  # the one that this number reads
    offsets = written * BLOCK + tl.arange(0, BLOCK)
    tl.store(blocks + offsets, 1000 * ctx.cur_rank + offsets)  # first
    ctx.barrier(flags)
    values = ctx.load(blocks + mirrored * BLOCK + tl.arange(0, BLOCK), 1 - ctx.cur_rank)  # second
    tl.store(result + pid * BLOCK + tl.arange(0, BLOCK), values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, n = ctx.get_rank(), PROGRAMS * BLOCK
    blocks, result = ctx.zeros(n, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)
    flags = ctx.zeros(PROGRAMS, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    mirror[(PROGRAMS,)](ctx.get_device_context(), blocks, result, flags, BLOCK, broken)
    ctx.barrier()
    if not broken:
        theirs = torch.arange(n, dtype=torch.int32).view(PROGRAMS, BLOCK) + 1000 * (1 - rank)
        torch.testing.assert_close(result.cpu().view(PROGRAMS, BLOCK), theirs.flip(0))


if __name__ == "__main__":
    command(main)
