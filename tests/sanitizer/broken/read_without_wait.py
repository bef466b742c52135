"""The receiver reads its inbox and has forgotten to wait for the flag. In tests the data were always there already."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
N = 64


@triton.jit
def exchange(inbox, result, flag, rank, heap_bases, N: tl.constexpr, BROKEN: tl.constexpr):
    offsets = tl.arange(0, N)
    peer = 1 - rank
    iris.store(inbox + offsets, 1000 * rank + offsets, rank, peer, heap_bases)  # first
    iris.atomic_xchg(flag, 1, rank, peer, heap_bases, sem="release")
    if not BROKEN:
        while iris.atomic_add(flag, 0, rank, rank, heap_bases, sem="acquire") == 0:
            pass
    values = iris.load(inbox + offsets, rank, rank, heap_bases)  # second
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    inbox, result = ctx.zeros(N, dtype=torch.int32), ctx.zeros(N, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    exchange[(1,)](inbox, result, flag, rank, ctx.get_heap_bases(), N, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [1000 * (1 - rank) + i for i in range(N)]


if __name__ == "__main__":
    command(main)
