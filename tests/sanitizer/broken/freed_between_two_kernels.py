"""The workspace is given back as soon as the first kernel has filled it, before the second one reads it.

It still works: the memory is reused only when all ranks have freed it and met. But nothing holds it until then.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "freed"
N = 64


@triton.jit
def square(source, workspace, N: tl.constexpr):
    offsets = tl.arange(0, N)
    values = tl.load(source + offsets)
    tl.store(workspace + offsets, values * values)


@triton.jit
def negate(workspace, result, N: tl.constexpr):
    offsets = tl.arange(0, N)
    values = tl.load(workspace + offsets)  # first
    tl.store(result + offsets, -values)


def main(ctx: iris.Iris, broken: bool) -> None:
    source = ctx.arange(N, dtype=torch.int32)
    workspace, result = ctx.empty(N, dtype=torch.int32), ctx.empty(N, dtype=torch.int32)
    square[(1,)](source, workspace, N)
    if broken:
        ctx.free(workspace)
    negate[(1,)](workspace, result, N)
    if not broken:
        ctx.free(workspace)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [-i * i for i in range(N)]


if __name__ == "__main__":
    command(main)
