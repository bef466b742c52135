"""Each round has a flag, but the receiver waits for the first one every time: from the second round on, for nothing.

It takes the flag of an earlier round for this one's, and reads while the sender writes.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/reuse"
N, ROUNDS = 64, 2


@triton.jit
def serve(context_tensor, inbox, flags, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.store(inbox + offsets, 100 * round + offsets, 1)  # first
        ctx.signal(flags + round, 1, 1)
        ctx.wait(flags + round, 1)  # the answer: the inbox has been read


@triton.jit
def answer(context_tensor, inbox, flags, result, N: tl.constexpr, ROUNDS: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        if BROKEN:
            ctx.wait(flags, 1)
        else:
            ctx.wait(flags + round, 1)
        values = tl.load(inbox + offsets)  # second
        tl.store(result + round * N + offsets, values)
        ctx.signal(flags + round, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    flags = ctx.zeros(ROUNDS, dtype=torch.int32)  # each rank's copy holds what the other has said
    ctx.barrier()
    if ctx.get_rank() == 0:
        serve[(1,)](ctx.get_device_context(), inbox, flags, N, ROUNDS)
    else:
        answer[(1,)](ctx.get_device_context(), inbox, flags, result, N, ROUNDS, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
