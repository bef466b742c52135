"""The host fills the tensor anew that a kernel reads beside it, after an event of the thread that launches the kernel.

It is set before the launch in the one, and after it in the twin.
"""

import queue
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
def send(context_tensor, x, inbox, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.arange(0, N)
    ctx.put(x + i, inbox + i, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    x, inbox = torch.arange(N), ctx.zeros(N, dtype=torch.int64)
    work, done = queue.Queue(), threading.Event()

    def stream() -> None:
        launch = work.get()
        if broken:
            done.set()
        launch()
        if not broken:
            done.set()

    ctx.barrier()
    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    work.put(lambda: send[(1,)](ctx.get_device_context(), x, inbox, N))
    done.wait()
    x.copy_(torch.zeros(N))  # second
    thread.join()
    ctx.barrier()
    assert broken or inbox.tolist() == list(range(N))


if __name__ == "__main__":
    command(main)
