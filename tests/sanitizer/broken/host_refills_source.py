"""The host fills its source for the next round as soon as its own kernel is over; the peer's may still be reading it.

One barrier a round says that the sources are full. A second one has to say that they have been read.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N, ROUNDS = 64, 3


@triton.jit
def pull(context_tensor, source, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.get(source + offsets, result + offsets, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    source, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(ROUNDS, N, dtype=torch.int32)
    for round in range(ROUNDS):
        source.fill_(10 * rank + round)  # second
        ctx.barrier()
        pull[(1,)](ctx.get_device_context(), source, result[round], N)
        if not broken:
            ctx.barrier()
    ctx.barrier()
    if not broken:
        assert result.tolist() == [[10 * (1 - rank) + round] * N for round in range(ROUNDS)]


if __name__ == "__main__":
    command(main)
