"""Each host sends its right neighbour a message, hears from the left one, and reads what that one has put.

The message tells of what its sender did before: the put has to be asked for before it, not after it.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
RANKS = 3
N = 16


@triton.jit
def put(context_tensor, x, inbox, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.put(x + i, inbox + i, (ctx.cur_rank + 1) % ctx.num_ranks)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x, inbox, sent, received = ctx.ones(N), ctx.zeros(N), torch.zeros(1), torch.zeros(1)
    left, right = ((ctx.get_rank() + step) % ctx.get_num_ranks() for step in (-1, 1))
    ctx.barrier()
    if not broken:
        put[(1,)](ctx.get_device_context(), x, inbox, N)
    request = dist.isend(sent, right)
    dist.recv(received, left)
    request.wait()
    if broken:
        put[(1,)](ctx.get_device_context(), x, inbox, N)
    total = inbox.sum().item()  # second
    ctx.barrier()
    assert broken or total == N


if __name__ == "__main__":
    command(main)
