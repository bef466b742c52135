"""No barrier between `ctx.zeros` and the peer's first store: the zeros of a slow rank overwrite what the peer has sent.

Making a tensor is local work, which meets nobody.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def send(context_tensor, inbox, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(inbox + offsets, ctx.cur_rank + offsets, 1 - ctx.cur_rank)  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox = ctx.zeros(N, dtype=torch.int32)  # first
    if not broken:
        ctx.barrier()
    send[(1,)](ctx.get_device_context(), inbox, N)
    ctx.barrier()
    if not broken:
        assert inbox.tolist() == [1 - ctx.get_rank() + i for i in range(N)]


if __name__ == "__main__":
    command(main)
