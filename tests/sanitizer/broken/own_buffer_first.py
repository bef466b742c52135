"""Each rank allocates its own buffer first, then those of its peers: the same sizes, in another order on each rank."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "asymmetric"


@triton.jit
def announce(context_tensor, buffer, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(buffer + offsets, N + offsets, 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    sizes = [64, 512]  # by the rank that sends
    order = [rank, 1 - rank] if broken else [0, 1]
    buffers = {owner: ctx.zeros(sizes[owner], dtype=torch.int32) for owner in order}
    ctx.barrier()
    announce[(1,)](ctx.get_device_context(), buffers[rank], sizes[rank])
    ctx.barrier()
    if not broken:
        received = buffers[1 - rank]
        assert received.tolist() == [len(received) + i for i in range(len(received))]


if __name__ == "__main__":
    command(main)
