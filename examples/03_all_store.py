"""Stores by all: every rank writes into the memory of every other, all at once.

Over the link: ``size`` bytes from each rank to each peer, in ``num_ranks - 1`` steps. In step s a rank writes to the
rank s places ahead of it, so no rank is written by two at a time as long as all keep pace.
"""

import triton
import triton.language as tl
from microbenchmark import command, everyone

import iris


@triton.jit
def all_store(source, target, n, rank, num_ranks, heap_bases, BLOCK: tl.constexpr):
    # The row of this rank, in the target of whoever gets it.
    row = target + tl.cast(rank, tl.int64) * n
    for step in range(1, num_ranks):
        peer = (rank + step) % num_ranks
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < n
            values = tl.load(source + offsets, mask=mask)
            iris.store(row + offsets, values, from_rank=rank, to_rank=peer, heap_bases=heap_bases, mask=mask)


def main(ctx: iris.Iris, size: int) -> None:
    everyone(ctx, all_store, size)


if __name__ == "__main__":
    command(main, size_on_gpu=1 << 28, size_simulated=1 << 16)
