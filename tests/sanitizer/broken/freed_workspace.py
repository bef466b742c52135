"""The workspace is given back before the kernel that uses it. The next allocation may get the same memory."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "freed"
N = 64


@triton.jit
def scatter(context_tensor, workspace, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(workspace + offsets, 30 + offsets, 1 - ctx.cur_rank)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    workspace = ctx.zeros(N, dtype=torch.int32)
    if broken:
        ctx.free(workspace)
    ctx.barrier()
    scatter[(1,)](ctx.get_device_context(), workspace, N)
    ctx.barrier()
    if not broken:
        assert workspace.tolist() == [30 + i for i in range(N)]
        ctx.free(workspace)
    ctx.barrier()


if __name__ == "__main__":
    command(main)
