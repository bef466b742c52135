"""Release and acquire are there, but the signal stands before the last store, and does not cover it.

On a GPU, and now and then in the simulator too, the receiver reads the old tail.
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
def send(context_tensor, data, tail, flag, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, offsets, 1)
    if BROKEN:
        ctx.signal(flag, 1, 1)
    ctx.store(tail, 77, 1)  # first
    if not BROKEN:
        ctx.signal(flag, 1, 1)


@triton.jit
def receive(context_tensor, data, tail, flag, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.wait(flag, 1)
    values = tl.load(data + offsets)
    last = tl.load(tail)  # second
    tl.store(result + offsets, values + last)


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    tail, flag = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), data, tail, flag, N, broken)
    else:
        receive[(1,)](ctx.get_device_context(), data, tail, flag, result, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [77 + i for i in range(N)]


if __name__ == "__main__":
    command(main)
