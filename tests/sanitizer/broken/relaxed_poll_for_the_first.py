"""A relaxed poll with a fence after it ends with the first of three chunks, and the third is read; or with that."""

import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 32


@triton.jit
def send(context_tensor, inbox, count, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    for chunk in range(3):
        ctx.store(inbox + chunk * N + i, chunk + i, 1)  # first
        ctx.signal(count, chunk + 1, 1)


@triton.jit
def receive(context_tensor, inbox, count, result, awaited, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    while ctx.atomic_add(count, 0, ctx.cur_rank, sem="relaxed") < awaited:
        pass
    ctx.fence()
    i = tl.arange(0, N)
    tl.store(result + i, tl.load(inbox + 2 * N + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, count = ctx.zeros(3 * N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(N, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, count, N)
    else:
        time.sleep(0.2)
        receive[(1,)](ctx.get_device_context(), inbox, count, result, 1 if broken else 3, N)
        assert broken or result.tolist() == [2 + i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
