"""The host makes a list of what a peer's kernel stores, without a barrier between."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def send(context_tensor, data, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, offsets + ctx.cur_rank, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    data = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), data, N)
    if not broken:
        ctx.barrier()
    values = data.tolist()  # second
    ctx.barrier()
    if not broken:
        assert values == [i + 1 - ctx.get_rank() for i in range(N)]


if __name__ == "__main__":
    command(main)
