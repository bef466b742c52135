"""The host adds up an ordinary tensor that a kernel writes beside it, launched by another thread as on another stream.

That the kernel may be over by then does not help.
"""

import threading

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def exchange(context_tensor, inbox, flag, result, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.store(inbox + i, 3 * i, 1 - ctx.cur_rank)
    ctx.signal(flag, 1, 1 - ctx.cur_rank)
    ctx.wait(flag, 1)
    tl.store(result + i, tl.load(inbox + i))  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag = ctx.zeros(N, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    result = torch.zeros(N, dtype=torch.int32)
    ctx.barrier()
    stream = threading.Thread(target=lambda: exchange[(1,)](ctx.get_device_context(), inbox, flag, result, N))
    stream.start()
    if not broken:
        stream.join()
    total = result.sum().item()  # second
    assert broken or total == 3 * N * (N - 1) // 2
    stream.join()
    ctx.barrier()


if __name__ == "__main__":
    command(main)
