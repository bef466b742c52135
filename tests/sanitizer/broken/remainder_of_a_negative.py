"""The previous rank as `(rank - 1) % num_ranks`: right in Python, but -1 for rank 0 in a kernel, as in C.

On a GPU the word before the table of heaps is then taken for the address of one.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "rank"
N = 64


@triton.jit
def fetch(source, result, rank, num_ranks, heap_bases, N: tl.constexpr, BROKEN: tl.constexpr):
    offsets = tl.arange(0, N)
    if BROKEN:
        previous = (rank - 1) % num_ranks
    else:
        previous = (rank + num_ranks - 1) % num_ranks
    values = iris.load(source + offsets, rank, previous, heap_bases)  # first
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, num_ranks = ctx.get_rank(), ctx.get_num_ranks()
    source, result = ctx.full((N,), 4 + rank, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    fetch[(1,)](source, result, rank, num_ranks, ctx.get_heap_bases(), N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [4 + (rank - 1) % num_ranks] * N


if __name__ == "__main__":
    command(main)
