"""The receiver polls the flag with a relaxed atomic: it sees the flag, and nothing says that it sees what came before.

On a GPU the loads after the loop may have been served by a cache before the flag was up.
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
def send(context_tensor, source, data, flag, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    values = tl.load(source + offsets)
    ctx.store(data + offsets, values, 1)  # first
    ctx.signal(flag, 1, 1)


@triton.jit
def receive(context_tensor, data, flag, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    if BROKEN:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="relaxed") == 0:
            pass
    else:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="acquire") == 0:
            pass
    values = tl.load(data + offsets)  # second
    tl.store(result + offsets, 2 * values)


def main(ctx: iris.Iris, broken: bool) -> None:
    source, data, result = ctx.full((N,), 7.0), ctx.zeros(N), ctx.zeros(N)
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), source, data, flag, N)
    else:
        receive[(1,)](ctx.get_device_context(), data, flag, result, N, broken)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [14.0] * N


if __name__ == "__main__":
    command(main)
