"""A tensor is used that was freed so long ago that another one has its memory: each access is to memory in use."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "freed"
N = 64


@triton.jit
def send(context_tensor, data, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, 30 + offsets, 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    former = ctx.zeros(N, dtype=torch.int32)
    if broken:
        ctx.free(former)
    ctx.barrier()
    later = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), former, N)  # first
    ctx.barrier()
    total = former.sum().item()
    ctx.barrier()
    if not broken:
        assert (total, later.sum().item()) == (sum(range(30, 30 + N)), 0)
        ctx.free(former)


if __name__ == "__main__":
    command(main)
