"""One thread of Python has launched a kernel that stores and then waits; another reads before that kernel has ended."""

import threading

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 16


@triton.jit
def fill(context_tensor, x, filled, flag, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    tl.store(x + i, i * 1.0)  # first
    ctx.signal(filled, 1, 1)
    ctx.wait(flag, 1)


@triton.jit
def let_go(context_tensor, filled, flag):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(filled, 1)
    ctx.signal(flag, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    x, filled, flag = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    message = torch.zeros(1)
    ctx.barrier()
    if ctx.get_rank() == 0:
        thread = threading.Thread(target=lambda: fill[(1,)](ctx.get_device_context(), x, filled, flag, N))
        thread.start()
        if broken:
            dist.recv(message, 1)
            x.sum()  # second
        dist.send(message, 1)
        thread.join()
        x.sum()
    else:
        if broken:
            has_filled[(1,)](ctx.get_device_context(), filled)
            dist.send(message, 0)
        dist.recv(message, 0)
        let_go[(1,)](ctx.get_device_context(), filled, flag)
    ctx.barrier()


@triton.jit
def has_filled(context_tensor, filled):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(filled, 1)


if __name__ == "__main__":
    command(main)
