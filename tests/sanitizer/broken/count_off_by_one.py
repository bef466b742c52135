"""Rank 0 waits until as many ranks have arrived as there are, but is one of them and does not signal itself."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "deadlock"
RANKS = 3


@triton.jit
def gather(rows, arrived, sum, rank, num_ranks, heap_bases, BROKEN: tl.constexpr):
    if rank > 0:
        iris.store(rows + rank, 10 * rank, rank, 0, heap_bases)
        iris.atomic_add(arrived, 1, rank, 0, heap_bases, sem="release")
    else:
        if BROKEN:
            expected = num_ranks
        else:
            expected = num_ranks - 1
        while iris.atomic_add(arrived, 0, 0, 0, heap_bases, sem="acquire") < expected:  # first
            pass
        total = 0
        for i in range(1, num_ranks):
            total += tl.load(rows + i)
        tl.store(sum, total)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, num_ranks = ctx.get_rank(), ctx.get_num_ranks()
    rows = ctx.zeros(num_ranks, dtype=torch.int32)
    arrived, sum = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    gather[(1,)](rows, arrived, sum, rank, num_ranks, ctx.get_heap_bases(), broken)
    ctx.barrier()
    if not broken and rank == 0:
        assert sum.item() == 10 + 20


if __name__ == "__main__":
    command(main)
