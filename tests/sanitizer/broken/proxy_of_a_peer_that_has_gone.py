"""A kernel waits for a flag that a thread of its peer is to raise, which has nothing to do any more.

In the twin it is late, while its own rank is in the barrier: that it waits there does not mean that the rank is done.
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
    ctx.store(inbox, 7, 0)
    ctx.signal(flag, 1, 0)


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox, flag, result = *ctx.zeros(2, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        use[(1,)](ctx.get_device_context(), inbox, flag, result)
        assert result.item() == 7
    else:

        def proxy() -> None:
            if not broken:
                time.sleep(LATE_S)
                progress[(1,)](ctx.get_device_context(), inbox, flag)

        threading.Thread(target=proxy, daemon=True).start()
    ctx.barrier()


if __name__ == "__main__":
    command(main)
