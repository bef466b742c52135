"""A loop of the kernel's own polls the flag by its number in bytes: there is no tensor where it looks."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
FLAGS = 1 << 14


@triton.jit
def send(context_tensor, flags, last):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.signal(flags + last, 1, 1)


@triton.jit
def receive(context_tensor, flags, last, result, SIZE: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    while tl.load(flags + last * SIZE, volatile=True) != 1:  # first
        pass
    tl.store(result, ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    flags, result = ctx.zeros(FLAGS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), flags, FLAGS - 1)
    else:
        receive[(1,)](ctx.get_device_context(), flags, FLAGS - 1, result, 4 if broken else 1)
        assert broken or result.item() == 1
    ctx.barrier()


if __name__ == "__main__":
    command(main)
