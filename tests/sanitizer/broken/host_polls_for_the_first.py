"""A host polls for the first of three chunks, and reads the third, which may have come by then; or polls for that."""

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


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, count = ctx.zeros(3, N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(1,)](ctx.get_device_context(), inbox, count, N)
    else:
        time.sleep(0.3)
        awaited = 1 if broken else 3
        while count.item() < awaited:
            time.sleep(0.01)
        total = inbox[2].sum().item()  # second
        assert broken or total == sum(range(2, N + 2))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
