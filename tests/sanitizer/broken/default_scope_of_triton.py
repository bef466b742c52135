"""Triton's own atomic on a translated pointer, with the order right and the scope forgotten: Triton's default is gpu.

The atomics of Iris have scope sys by default, because the peer is another GPU.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/scope"
N = 64


@triton.jit
def send(context_tensor, data, arrived, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    tl.store(ctx.translate(data + offsets, 1), 9 * offsets)  # first
    if BROKEN:
        tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
        tl.atomic_add(ctx.translate(arrived, 1), 1, sem="release")
    else:
        ctx.atomic_add(arrived, 1, 1, sem="release")


@triton.jit
def receive(context_tensor, data, arrived, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.wait(arrived, 1, cmp="ge")
    values = tl.load(data + offsets)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    arrived = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), data, arrived, N, broken)
    else:
        receive[(1,)](ctx.get_device_context(), data, arrived, result, N)
    ctx.barrier()
    if not broken and ctx.get_rank() == 1:
        assert result.tolist() == [9 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
