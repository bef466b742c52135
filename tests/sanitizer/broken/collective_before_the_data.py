"""A kernel stores into the peers' tensors, and a collective takes them without waiting for that."""

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
    ctx.store(data + offsets, offsets * 1.0, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    data, total = ctx.zeros(N), ctx.zeros(N)
    # The first call of a collective meets on the host.
    ctx.ccl.all_reduce(total, data)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), data, N)
    if not broken:
        ctx.device_barrier()
    ctx.ccl.all_reduce(total, data)  # second
    ctx.barrier()
    if not broken:
        assert torch.equal(total.cpu(), 2.0 * torch.arange(N))


if __name__ == "__main__":
    command(main)
