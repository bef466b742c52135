"""The flag is polled by a plain load, and nothing of what comes after it is ordered.

A compiler may hoist such a load out of the loop, which then never ends, and a GPU may have read the data before.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-acquire"
N = 64


@triton.jit
def send(context_tensor, data, flag, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(data + i, 3 * i, 1)  # first
    ctx.signal(flag, 1, 1)


@triton.jit
def receive(context_tensor, data, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    if BROKEN:
        while tl.load(flag) != 1:
            pass
    else:
        ctx.wait(flag, 1)
    tl.store(result + i, tl.load(data + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), data, flag, N)
    else:
        receive[(1,)](ctx.get_device_context(), data, flag, result, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [3 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
