"""The ranks meet after the first round's stores, and forget to do so after those of the second."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N, ROUNDS = 64, 2


@triton.jit
def put(context_tensor, data, round, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, 100 * round + offsets, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    for round in range(ROUNDS):
        put[(1,)](ctx.get_device_context(), data, round, N)
        if not (broken and round == 1):
            ctx.barrier()
        read = data.tolist()  # second
        assert broken or read == [100 * round + i for i in range(N)]
        ctx.barrier()


if __name__ == "__main__":
    command(main)
