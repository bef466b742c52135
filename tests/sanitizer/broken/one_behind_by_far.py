"""A receiver of the first chunks is one ahead of what it waits for, and comes when the flag is up for all others."""

import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
CHUNKS, FIRST, N = 48, 4, 16


@triton.jit
def send(context_tensor, inbox, flag, CHUNKS: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for chunk in range(CHUNKS):
        i = chunk * N + tl.arange(0, N)
        ctx.store(inbox + i, i, 1)  # first
        ctx.signal(flag, chunk + 1, 1)


@triton.jit
def receive(context_tensor, inbox, flag, result, CHUNKS: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for chunk in range(CHUNKS):
        ctx.wait(flag, chunk if BROKEN else chunk + 1, cmp="ge")
        i = chunk * N + tl.arange(0, N)
        tl.store(result + i, tl.load(inbox + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(CHUNKS * N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(FIRST * N, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, flag, CHUNKS, N)
    else:
        time.sleep(0.2)
        receive[(1,)](ctx.get_device_context(), inbox, flag, result, FIRST, N, broken)
        assert broken or result.tolist() == list(range(FIRST * N))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
