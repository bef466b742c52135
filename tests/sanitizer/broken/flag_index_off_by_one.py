"""In each round the receiver waits for the flag of the next one: after the last round, for one that nobody raises."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"
N, ROUNDS = 32, 3


@triton.jit
def send(context_tensor, rows, flags, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.store(rows + round * N + columns, 100 * round + columns, 1)
        ctx.signal(flags + 1 + round, 1, 1)  # flag 0 is the other direction's


@triton.jit
def receive(context_tensor, rows, flags, result, N: tl.constexpr, ROUNDS: tl.constexpr, FIRST: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(flags + FIRST + round, 1)  # first
        tl.store(result + round * N + columns, tl.load(rows + round * N + columns))


def main(ctx: iris.Iris, broken: bool) -> None:
    rows, result = ctx.zeros(ROUNDS, N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    flags = ctx.zeros(1 + ROUNDS + 1, dtype=torch.int32)  # the last one is for a reset, which does not happen here
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), rows, flags, N, ROUNDS)
    else:
        receive[(1,)](ctx.get_device_context(), rows, flags, result, N, ROUNDS, 2 if broken else 1)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [[100 * round + i for i in range(N)] for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
