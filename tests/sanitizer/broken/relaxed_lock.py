"""A lock is taken by a relaxed compare-and-swap: one rank at a time is inside, and may not see what the last one did.

On a GPU the load inside may be from before the lock was given back, and an addition is lost.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-acquire"
N = 32


@triton.jit
def accumulate(context_tensor, total, lock, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    if BROKEN:
        while ctx.atomic_cas(lock, 0, 1, 0, sem="relaxed") != 0:
            pass
    else:
        while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire") != 0:
            pass
    values = ctx.load(total + offsets, 0)  # second
    ctx.store(total + offsets, values + ctx.cur_rank + 1, 0)  # first
    ctx.atomic_xchg(lock, 0, 0, sem="release")


def main(ctx: iris.Iris, broken: bool) -> None:
    total, lock = ctx.zeros(N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    accumulate[(1,)](ctx.get_device_context(), total, lock, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 0:
        assert total.tolist() == [1 + 2] * N


if __name__ == "__main__":
    command(main)
