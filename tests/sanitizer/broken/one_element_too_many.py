"""The mask is `<=` instead of `<`: one element is written past the tensor.

It lands in what the heap adds for alignment, until somebody changes the size.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
N, BLOCK = 100, 64


@triton.jit
def send(context_tensor, inbox, n, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BROKEN:
        mask = offsets <= n
    else:
        mask = offsets < n
    ctx.store(inbox + offsets, 4 * offsets, 1 - ctx.cur_rank, mask=mask)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    inbox = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    send[(triton.cdiv(N, BLOCK),)](ctx.get_device_context(), inbox, N, BLOCK, broken)
    ctx.barrier()
    if not broken:
        assert inbox.tolist() == [4 * i for i in range(N)]


if __name__ == "__main__":
    command(main)
