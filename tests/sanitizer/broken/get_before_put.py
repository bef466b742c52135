"""The results are fetched from the peer before it has made them. A barrier is there, but on the wrong side.

So this is no race: the order is certain, and wrong.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "uninitialised"
N = 64


@triton.jit
def compute(results, rank, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(results + offsets, 500 * rank + offsets)


@triton.jit
def fetch(results, fetched, rank, heap_bases, N: tl.constexpr):
    offsets = tl.arange(0, N)
    iris.get(results + offsets, fetched + offsets, rank, 1 - rank, heap_bases)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    results, fetched = ctx.empty(N, dtype=torch.int32), ctx.empty(N, dtype=torch.int32)
    ctx.barrier()
    if not broken:
        compute[(1,)](results, rank, N)
        ctx.barrier()
    fetch[(1,)](results, fetched, rank, ctx.get_heap_bases(), N)
    ctx.barrier()
    if broken:
        compute[(1,)](results, rank, N)
        ctx.barrier()
    else:
        assert fetched.tolist() == [500 * (1 - rank) + i for i in range(N)]


if __name__ == "__main__":
    command(main)
