"""The root of a broadcast hears of nobody: the others may come to it, and to what they store before it, much later."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def fill(context_tensor, inbox, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(inbox + i, 3 * i, 0)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, word = ctx.zeros(N, dtype=torch.int32), torch.ones(1)
    ctx.barrier()
    if ctx.get_rank() == 1:
        fill[(1,)](ctx.get_device_context(), inbox, N)
    dist.broadcast(word, 0 if broken else 1)
    if ctx.get_rank() == 0:
        total = inbox.sum().item()  # second
        assert broken or total == 3 * N * (N - 1) // 2
    ctx.barrier()


if __name__ == "__main__":
    command(main)
