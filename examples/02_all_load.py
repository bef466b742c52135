"""Loads by all: every rank reads the memory of every other, all at once.

Over the link: ``size`` bytes from each peer to each rank, in ``num_ranks - 1`` steps. In step s a rank reads from the
rank s places before it, so no rank is read by two at a time as long as all keep pace.
"""

import triton
import triton.language as tl
from microbenchmark import command, everyone

import iris


@triton.jit
def all_load(source, target, n, rank, num_ranks, heap_bases, BLOCK: tl.constexpr):
    for step in range(1, num_ranks):
        peer = (rank + num_ranks - step) % num_ranks
        row = target + peer.to(tl.int64) * n
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < n
            values = iris.load(source + offsets, rank, peer, heap_bases, mask=mask)
            tl.store(row + offsets, values, mask=mask)


def main(ctx: iris.Iris, size: int) -> None:
    everyone(ctx, all_load, size)


if __name__ == "__main__":
    command(main, size_on_gpu=1 << 28, size_simulated=1 << 16)
