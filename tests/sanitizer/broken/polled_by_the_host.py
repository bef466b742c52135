"""A host polls the flag that a peer's kernel raises, which is no release: the data after it may come later.

The twin raises it by a signal, and who has seen that has acquired what it says.
"""

import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race/missing-release"
N = 64


@triton.jit
def send(context_tensor, inbox, flag, N: tl.constexpr, SEM: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(inbox + i, 3 * i, 1)  # first
    tl.debug_barrier()  # for Triton before 3.9, whose release is one thread's
    ctx.atomic_xchg(flag, 1, 1, sem=SEM)


@triton.jit
def double(inbox, result, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(result + i, 2 * tl.load(inbox + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(N, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        time.sleep(0.05)
        send[(1,)](ctx.get_device_context(), inbox, flag, N, "relaxed" if broken else "release")
    else:
        while flag.item() == 0:
            time.sleep(1e-3)
        double[(1,)](inbox, result, N)
        assert broken or result.tolist() == [6 * i for i in range(N)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
