"""The host adds up a buffer of which kernels have written only a part: the rest is whatever was there before."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "uninitialised"
N = 64


@triton.jit
def send(context_tensor, inbox, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(inbox + ctx.cur_rank * N + i, 1.0 + i, 1 - ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    # A row for each rank; nobody sends to itself.
    inbox = ctx.empty(ctx.get_num_ranks(), N) if broken else ctx.zeros(ctx.get_num_ranks(), N)
    ctx.barrier()
    send[(1,)](ctx.get_device_context(), inbox, N)
    ctx.barrier()
    total = inbox.sum(dtype=torch.float64)  # first
    if not broken:
        assert total.item() == N * (N + 1) / 2


if __name__ == "__main__":
    command(main)
