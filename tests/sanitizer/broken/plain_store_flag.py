"""The flag is written by a plain store, as if the stores of a kernel reached a peer in the order of the program.

They do not: the GPU may deliver the flag first, and even the flag alone is a race with the atomic that polls it.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/missing-release"
N = 128


@triton.jit
def exchange(inbox, result, flag, rank, heap_bases, N: tl.constexpr, BROKEN: tl.constexpr):
    offsets = tl.arange(0, N)
    peer = 1 - rank
    iris.store(inbox + offsets, 1000 * rank + offsets, rank, peer, heap_bases)  # first
    if BROKEN:
        iris.store(flag, 1, rank, peer, heap_bases)
    else:
        iris.atomic_xchg(flag, 1, rank, peer, heap_bases, sem="release")
    while iris.atomic_add(flag, 0, rank, rank, heap_bases, sem="acquire") == 0:
        pass
    values = tl.load(inbox + offsets)  # second
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
