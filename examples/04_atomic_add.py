"""Atomic additions: one rank adds to every element of a peer's tensor, for every pair of ranks in turn.

Over the link: ``size`` bytes of summands to the peer and ``size`` bytes of old values back, in one step. The rate
counts one direction. The additions are relaxed: they are atomic, and order nothing else.
"""

import torch
import triton
import triton.language as tl
from microbenchmark import LAUNCHES, command, every_pair

import iris


@triton.jit
def atomic_add(source, target, n, rank, peer, heap_bases, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        values = tl.load(source + offsets, mask=mask)
        old = iris.atomic_add(
            target + offsets, values, from_rank=rank, to_rank=peer, heap_bases=heap_bases, mask=mask, sem="relaxed"
        )
        tl.store(target + offsets, old, mask=mask)


def outcome(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mine * (LAUNCHES - 1), mine * LAUNCHES


def main(ctx: iris.Iris, size: int) -> None:
    every_pair(ctx, atomic_add, outcome, size)


if __name__ == "__main__":
    command(main, size_on_gpu=1 << 26, size_simulated=1 << 12)
