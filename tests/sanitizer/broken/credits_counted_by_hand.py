"""A loop of the kernel's own goes on with one credit too few, whether or not more of them are there when it looks."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/reuse"
N, ROUNDS = 64, 4


@triton.jit
def produce(context_tensor, buffer, full, credits, N: tl.constexpr, ROUNDS: tl.constexpr, ENOUGH: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    for round in range(ROUNDS):
        while ctx.atomic_add(credits, 0, 0, sem="acquire", scope="sys") < round - 1 + ENOUGH:
            pass
        ctx.store(buffer + i, 100 * round + i, 1)  # second
        ctx.signal(full, round + 1, 1)


@triton.jit
def consume(context_tensor, buffer, full, credits, result, N: tl.constexpr, ROUNDS: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    for round in range(ROUNDS):
        ctx.wait(full, round + 1, cmp="ge")
        tl.store(result + round * N + i, tl.load(buffer + i))  # first
        ctx.signal(credits, 1, 0, op="add")


def main(ctx: iris.Iris, broken: bool) -> None:
    buffer, result = ctx.zeros(N, dtype=torch.int32), torch.zeros(ROUNDS * N, dtype=torch.int32)
    full, credits = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        produce[(1,)](ctx.get_device_context(), buffer, full, credits, N, ROUNDS, 0 if broken else 1)
    else:
        consume[(1,)](ctx.get_device_context(), buffer, full, credits, result, N, ROUNDS)
        assert broken or result.tolist() == [100 * round + i for round in range(ROUNDS) for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
