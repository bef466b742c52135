"""An exchange of all with all in which one rank sends another nothing tells that one nothing of the first."""

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
def push(context_tensor, inbox, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(inbox + i, 7 * i, 1)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, rank = ctx.zeros(N, dtype=torch.int32), ctx.get_rank()
    # Rank 0 sends as many tokens to rank 1 as this says; rank 1 sends one to either.
    tokens = 0 if broken else 1
    sent, got = ([2, tokens], [2, 1]) if rank == 0 else ([1, 1], [tokens, 1])
    ctx.barrier()
    if rank == 0:
        push[(1,)](ctx.get_device_context(), inbox, N)
    dist.all_to_all_single(torch.empty(sum(got)), torch.ones(sum(sent)), got, sent)
    if rank == 1:
        total = inbox.sum().item()  # second
        assert broken or total == 7 * N * (N - 1) // 2
    ctx.barrier()


if __name__ == "__main__":
    command(main)
