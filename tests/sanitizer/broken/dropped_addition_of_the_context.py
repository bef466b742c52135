"""A kernel adds to a count and drops what it gives, so it does not know that it came second; the twin polls."""

import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def make(context_tensor, data, count, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    tl.store(data + i, 3 * i)  # first
    ctx.atomic_add(count, 1, 0)


@triton.jit
def take(context_tensor, data, count, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    if BROKEN:
        ctx.atomic_add(count, 1, 0)
    else:
        while ctx.atomic_add(count, 0, 0, sem="acquire") == 0:
            pass
    tl.store(result + i, ctx.load(data + i, 0))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, count = ctx.zeros(N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(N, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        make[(1,)](ctx.get_device_context(), data, count, N)
    else:
        time.sleep(0.2)
        take[(1,)](ctx.get_device_context(), data, count, result, N, broken)
        assert broken or result.tolist() == [3 * i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
