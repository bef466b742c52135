"""The receiver polls the flag with a volatile load: that keeps the compiler from removing the loop, and is no acquire.

On a GPU the data may be read as they were before the flag; on AMD, before Triton 3.9, volatile is dropped altogether.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-acquire"
N = 128


@triton.jit
def exchange(context_tensor, source, inbox, result, flag, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    peer = 1 - ctx.cur_rank
    ctx.put(source + offsets, inbox + offsets, peer)  # first
    ctx.signal(flag, 1, peer)
    if BROKEN:
        while tl.load(flag, volatile=True) != 1:
            pass
    else:
        ctx.wait(flag, 1)
    values = tl.load(inbox + offsets)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    source = ctx.full((N,), 5 + rank, dtype=torch.int32)
    inbox, result = ctx.zeros_like(source), ctx.zeros_like(source)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    exchange[(1,)](ctx.get_device_context(), source, inbox, result, flag, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [5 + (1 - rank)] * N


if __name__ == "__main__":
    command(main)
