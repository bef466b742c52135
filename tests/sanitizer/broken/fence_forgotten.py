"""The flag is a relaxed one on both sides, and the reader has no fence between the flag and the data.

Fences order what relaxed operations do not: one before the flag's writing, and one after its reading. Either
alone orders nothing, and a GPU may have read the data before it saw the flag.
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
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, 5 * offsets, 1)  # first
    ctx.fence()
    ctx.atomic_xchg(flag, 1, 1, sem="relaxed")


@triton.jit
def receive(context_tensor, data, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    seen = ctx.atomic_add(flag, 0, 1, sem="relaxed")
    while seen != 1:
        seen = ctx.atomic_add(flag, 0, 1, sem="relaxed")
    if not BROKEN:
        ctx.fence()
    values = tl.load(data + offsets)  # second
    tl.store(result + offsets, values)


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
        assert result.tolist() == [5 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
