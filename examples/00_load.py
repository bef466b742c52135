"""Loads: one rank reads a peer's memory, for every pair of ranks in turn.

Over the link: ``size`` bytes from the peer to the caller, in one step. The caller waits for each of its loads, so many
must be in flight at once; what arrives it writes to its own memory.
"""

import torch
import triton
import triton.language as tl
from microbenchmark import command, every_pair

import iris


@triton.jit
def load(source, target, n, rank, peer, heap_bases, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        values = iris.load(source + offsets, rank, peer, heap_bases, mask=mask)
        tl.store(target + offsets, values, mask=mask)


def outcome(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return theirs, torch.zeros_like(theirs)


def main(ctx: iris.Iris, size: int) -> None:
    every_pair(ctx, load, outcome, size)


if __name__ == "__main__":
    command(main, size_on_gpu=1 << 28, size_simulated=1 << 16)
