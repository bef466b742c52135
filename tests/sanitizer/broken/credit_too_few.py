"""Three buffers and a count of those that are free again: the sender waits for one too few of them.

It may see more of them than it waits for, and then all is well, this time.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/reuse"
N, BUFFERS, ROUNDS = 32, 3, 8


@triton.jit
def send(context_tensor, buffers, full, taken, FREE: tl.constexpr, BUFFERS: tl.constexpr, N: tl.constexpr,
         ROUNDS: tl.constexpr):  # fmt: skip
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(taken, round - FREE, cmp="ge")
        ctx.store(buffers + (round % BUFFERS) * N + offsets, 100 * round + offsets, 1)  # second
        ctx.signal(full, round + 1, 1)


@triton.jit
def receive(context_tensor, buffers, full, taken, result, BUFFERS: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(full, round + 1, cmp="ge")
        values = tl.load(buffers + (round % BUFFERS) * N + offsets)  # first
        tl.store(result + round * N + offsets, values)
        ctx.signal(taken, 1, 0, op="add")


def main(ctx: iris.Iris, broken: bool) -> None:
    buffers, result = ctx.zeros(BUFFERS, N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    full, taken = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        free = BUFFERS if broken else BUFFERS - 1
        send[(1,)](ctx.get_device_context(), buffers, full, taken, free, BUFFERS, N, ROUNDS)
    else:
        receive[(1,)](ctx.get_device_context(), buffers, full, taken, result, BUFFERS, N, ROUNDS)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
