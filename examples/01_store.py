"""Stores: one rank writes into a peer's memory, for every pair of ranks in turn.

Over the link: ``size`` bytes from the caller to the peer, in one step. Nobody waits for a store, which is why
stores are faster than loads of the same size.
"""

import torch
import triton
import triton.language as tl
from microbenchmark import command, every_pair

import iris


@triton.jit
def store(source, target, n, rank, peer, heap_bases, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        values = tl.load(source + offsets, mask=mask)
        iris.store(target + offsets, values, from_rank=rank, to_rank=peer, heap_bases=heap_bases, mask=mask)


def outcome(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(mine), mine


def main(ctx: iris.Iris, size: int) -> None:
    every_pair(ctx, store, outcome, size)


if __name__ == "__main__":
    command(main, size_on_gpu=1 << 28, size_simulated=1 << 16)
