"""A host polls by a function of its own: the flag of its first peer, and reads what all have sent; or all flags."""

import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
RANKS = 3
N = 32


@triton.jit
def send(context_tensor, inbox, flags, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = ctx.cur_rank * N + tl.arange(0, N)
    ctx.store(inbox + i, i, 0)  # first
    ctx.signal(flags + ctx.cur_rank, 1, 0)


def are_there(flags: torch.Tensor) -> bool:
    return bool((flags == 1).all())


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flags, rank = ctx.zeros(3, N, dtype=torch.int32), ctx.zeros(3, dtype=torch.int32), ctx.get_rank()
    ctx.barrier()
    if rank > 0:
        time.sleep(0.1 * (rank - 1))
        send[(1,)](ctx.get_device_context(), inbox, flags, N)
    else:
        while not are_there(flags[1:2] if broken else flags[1:]):
            time.sleep(1e-3)
        total = inbox[1:].sum().item()  # second
        assert broken or total == sum(range(N, 3 * N))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
