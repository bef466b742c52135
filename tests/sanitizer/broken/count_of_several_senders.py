"""A count of the chunks that are there says nothing of which: they come from programs that are in no order.

This time the chunk may be among them, in whatever order the programs run.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
CHUNKS, N = 8, 64


@triton.jit
def send(context_tensor, data, inbox, counts, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    chunk = tl.program_id(0)
    i = chunk * N + tl.arange(0, N)
    ctx.put(data + i, inbox + i, 1)  # first
    ctx.signal(counts if BROKEN else counts + chunk, 1, 1, op="add")


@triton.jit
def receive(context_tensor, inbox, counts, result, CHUNKS: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for chunk in range(CHUNKS):
        if BROKEN:
            ctx.wait(counts, chunk + 1, cmp="ge")
        else:
            ctx.wait(counts + chunk, 1)
        i = chunk * N + tl.arange(0, N)
        tl.store(result + i, tl.load(inbox + i))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    data, result = torch.arange(CHUNKS * N), torch.zeros(CHUNKS * N, dtype=torch.int64)
    inbox, counts = ctx.zeros(CHUNKS * N, dtype=torch.int64), ctx.zeros(CHUNKS, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 0:
        send[(CHUNKS,)](ctx.get_device_context(), data, inbox, counts, N, broken)
    else:
        receive[(1,)](ctx.get_device_context(), inbox, counts, result, CHUNKS, N, broken)
        assert broken or torch.equal(result, data)
    ctx.barrier()


if __name__ == "__main__":
    command(main)
