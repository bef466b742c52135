"""The sender fills the same inbox in each round and does not wait until the last message was taken.

A fast sender overwrites what a slow receiver is still reading. Each round has a flag of its own, so none gets lost.
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
def send(context_tensor, inbox, full, taken, N: tl.constexpr, ROUNDS: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        if not BROKEN:
            ctx.wait(taken, round, cmp="ge")
        ctx.store(inbox + offsets, 100 * round + offsets, 1)  # second
        ctx.signal(full + round, 1, 1)


@triton.jit
def receive(context_tensor, inbox, full, taken, result, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(full + round, 1)
        values = tl.load(inbox + offsets)  # first
        tl.store(result + round * N + offsets, values)
        ctx.signal(taken, round + 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    full, taken = ctx.zeros(ROUNDS, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, full, taken, N, ROUNDS, broken)
    else:
        receive[(1,)](ctx.get_device_context(), inbox, full, taken, result, N, ROUNDS)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
