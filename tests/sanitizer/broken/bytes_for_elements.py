"""The number of bytes is given where the kernel wants the number of elements: it fills four times the tensor."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "bounds"
N, BLOCK = 48, 32


@triton.jit
def fill(context_tensor, target, value, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ctx.store(target + offsets, value, 1 - ctx.cur_rank, mask=offsets < n)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    target = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    n = target.nbytes if broken else target.numel()
    fill[(1,)](ctx.get_device_context(), target, 2 + ctx.get_rank(), n, BLOCK)
    ctx.barrier()
    if not broken:
        assert target.tolist() == [2 + (1 - ctx.get_rank())] * N


if __name__ == "__main__":
    command(main)
