"""A stencil reads the left neighbour of each cell, and the first cell has none: element -1 is before the tensor.

Here the tensor before it ends just there, so that nothing faults and the first result is wrong.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
N = 64


@triton.jit
def difference(context_tensor, cells, result, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    theirs = ctx.translate(cells + offsets, 1 - ctx.cur_rank)
    if BROKEN:
        left = tl.load(theirs - 1)  # first
    else:
        left = tl.load(theirs - 1, mask=offsets > 0, other=0)
    tl.store(result + offsets, tl.load(theirs) - left)


def main(ctx: iris.Iris, broken: bool) -> None:
    before = ctx.full((256,), 9, dtype=torch.int32)  # 1024 bytes, the alignment of the heap
    cells, result = ctx.arange(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    difference[(1,)](ctx.get_device_context(), cells, result, N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [0] + [1] * (N - 1)
    assert before.tolist() == [9] * 256


if __name__ == "__main__":
    command(main)
