"""The host sends its inbox to all as an object, and so pickles it, while the peer's put may be under way."""

import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def put(context_tensor, x, inbox, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.put(x + i, inbox + i, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x, inbox = ctx.ones(N), ctx.zeros(N)
    ctx.barrier()
    put[(1,)](ctx.get_device_context(), x, inbox, N)
    if not broken:
        ctx.barrier()
    found = [None, None]
    dist.all_gather_object(found, inbox)  # second
    ctx.barrier()


if __name__ == "__main__":
    command(main)
