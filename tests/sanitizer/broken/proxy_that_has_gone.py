"""A kernel waits for a flag that another thread of its rank is to raise, which has nothing to do any more.

In the twin it is late, while the other rank is in the barrier: nobody knows what a thread will do, daemon or not.
"""

import threading
import time

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"
LATE_S = 2.5  # more than ranks that are stuck are given


@triton.jit
def use(context_tensor, inbox, flag, result):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.wait(flag, 1)  # first
    tl.store(result, tl.load(inbox))


@triton.jit
def progress(context_tensor, inbox, flag):
    ctx = DeviceContext.initialize(context_tensor)
    ctx.store(inbox, 7, ctx.cur_rank)
    ctx.signal(flag, 1, ctx.cur_rank)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag, result = *ctx.zeros(2, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:

        def proxy() -> None:
            if not broken:
                time.sleep(LATE_S)
                progress[(1,)](ctx.get_device_context(), inbox, flag)

        thread = threading.Thread(target=proxy, daemon=True)
        thread.start()
        use[(1,)](ctx.get_device_context(), inbox, flag, result)
        thread.join()
        assert result.item() == 7
    ctx.barrier()


if __name__ == "__main__":
    command(main)
