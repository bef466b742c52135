"""A thread of Python has launched a kernel, which still runs; another thread reads what that kernel writes."""

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
def fill(context_tensor, x, begun, flag, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.signal(begun, 1, 1)
    tl.store(x + i, i * 1.0)  # first
    ctx.wait(flag, 1)


@triton.jit
def let_go(context_tensor, begun, flag):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(begun, 1)
    ctx.signal(flag, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    x, begun, flag = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    message = torch.zeros(1)
    ctx.barrier()
    if ctx.get_rank() == 0:
        thread = threading.Thread(target=lambda: fill[(1,)](ctx.get_device_context(), x, begun, flag, N))
        thread.start()
        if broken:
            dist.recv(message, 1)
            x.sum()  # second
        dist.send(message, 1)
        thread.join()
        x.sum()
    else:
        if broken:
            has_begun[(1,)](ctx.get_device_context(), begun)
            dist.send(message, 0)
        dist.recv(message, 0)
        let_go[(1,)](ctx.get_device_context(), begun, flag)
    ctx.barrier()


@triton.jit
def has_begun(context_tensor, begun):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(begun, 1)


if __name__ == "__main__":
    command(main)
