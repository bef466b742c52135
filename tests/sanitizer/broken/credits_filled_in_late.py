"""The host fills in a queue's credits after the barrier, when a peer may have spent one already: it is back again."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
CREDITS = 4


@triton.jit
def spend(context_tensor, credits, seen):
    ctx = DeviceContext.initialize(context_tensor)
    tl.store(seen, ctx.atomic_sub(credits, 1, 1 - ctx.cur_rank))  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    credits, seen = ctx.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    if broken:
        ctx.barrier()
    credits.fill_(CREDITS)  # second
    if not broken:
        ctx.barrier()
    spend[(1,)](ctx.get_device_context(), credits, seen)
    ctx.barrier()
    if not broken:
        assert (seen.item(), credits.item()) == (CREDITS, CREDITS - 1)


if __name__ == "__main__":
    command(main)
