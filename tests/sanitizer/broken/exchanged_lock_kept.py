"""A lock that is taken by exchange, and never given back: who waits writes all the time, and yet nothing changes."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"


@triton.jit
def add_one(context_tensor, total, lock, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    while ctx.atomic_xchg(lock, 1, 0, sem="acquire") != 0:  # first
        pass
    ctx.store(total, ctx.load(total, 0) + 1, 0)
    if not BROKEN:
        ctx.atomic_xchg(lock, 0, 0, sem="release")


def main(ctx: iris.Iris, broken: bool) -> None:
    total, lock = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    add_one[(3,)](ctx.get_device_context(), total, lock, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert total.item() == 3 * ctx.get_num_ranks()


if __name__ == "__main__":
    command(main)
