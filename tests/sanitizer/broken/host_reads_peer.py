"""The host looks at a peer's copy after its own kernel. That its own is over says nothing about the peer's."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def compute(values, rank, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(values + offsets, 50 * rank + offsets)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    peer = 1 - ctx.get_rank()
    values = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    compute[(1,)](values, ctx.get_rank(), N)
    if not broken:
        ctx.barrier()
    theirs = ctx.peer(values, peer).clone()  # second
    ctx.barrier()
    if not broken:
        assert theirs.tolist() == [50 * peer + i for i in range(N)]


if __name__ == "__main__":
    command(main)
