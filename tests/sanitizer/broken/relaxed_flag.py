"""The flag that follows the data is raised by a relaxed atomic, which orders nothing.

On a GPU the flag may arrive before the data, and the receiver then reads what was there before.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-release"
N = 64


@triton.jit
def send(context_tensor, data, flag, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, 10 + offsets, 1)  # first
    if BROKEN:
        ctx.atomic_xchg(flag, 1, 1, sem="relaxed")
    else:
        ctx.atomic_xchg(flag, 1, 1, sem="release")


@triton.jit
def receive(context_tensor, data, flag, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.wait(flag, 1)
    values = tl.load(data + offsets)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), data, flag, N, broken)
    else:
        receive[(1,)](ctx.get_device_context(), data, flag, result, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [10 + i for i in range(N)]


if __name__ == "__main__":
    command(main)
