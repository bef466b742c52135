"""Each rank waits for the other before it signals: both wait for ever."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"


@triton.jit
def greet_left(context_tensor, flag, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    if BROKEN:
        ctx.wait(flag, 1)  # first
        ctx.signal(flag, 1, 1)
    else:
        ctx.signal(flag, 1, 1)
        ctx.wait(flag, 1)


@triton.jit
def greet_right(context_tensor, flag):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.wait(flag, 1)  # second
    ctx.signal(flag, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        greet_left[(1,)](ctx.get_device_context(), flag, broken)
    else:
        greet_right[(1,)](ctx.get_device_context(), flag)
    ctx.barrier()
    if not broken:
        assert flag.item() == 1


if __name__ == "__main__":
    command(main)
