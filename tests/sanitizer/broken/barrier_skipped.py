"""A program without work leaves before the barrier. Rank 1 has one such program, for whose twin rank 0 waits for ever.

A barrier is for all programs of all ranks, also for those that have nothing to do.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"
BLOCK, PROGRAMS = 32, 3


@triton.jit
def exchange(context_tensor, inbox, result, flags, n, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    if BROKEN:
        if pid * BLOCK >= n:
            return
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    ctx.store(inbox + offsets, 1 + offsets, 1 - ctx.cur_rank, mask=offsets < n)
    ctx.barrier(flags)  # first
    values = tl.load(inbox + offsets)
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    room = PROGRAMS * BLOCK
    lengths = [room, room - BLOCK]
    inbox, result = ctx.zeros(room, dtype=torch.int32), ctx.zeros(room, dtype=torch.int32)
    flags = ctx.zeros(PROGRAMS, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    exchange[(PROGRAMS,)](ctx.get_device_context(), inbox, result, flags, lengths[ctx.get_rank()], BLOCK, broken)
    ctx.barrier()
    if not broken:
        n = lengths[1 - ctx.get_rank()]
        assert result.tolist() == [1 + i for i in range(n)] + [0] * (room - n)


if __name__ == "__main__":
    command(main)
