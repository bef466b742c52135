"""The destination of a put is an ordinary tensor of torch, which lies elsewhere on each rank.

On a GPU the translated address is nonsense: a fault, or somebody else's memory.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "bounds"
N = 64


@triton.jit
def send(source, inbox, rank, heap_bases, N: tl.constexpr):
    offsets = tl.arange(0, N)
    iris.put(source + offsets, inbox + offsets, rank, 1 - rank, heap_bases)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    # The source is only read here, by its own rank: that may be any memory.
    source = torch.full((N,), 6 + rank, dtype=torch.int32, device=ctx.device)
    inbox = torch.zeros_like(source) if broken else ctx.zeros_like(source)
    ctx.barrier()
    send[(1,)](source, inbox, rank, ctx.get_heap_bases(), N)
    ctx.barrier()
    if not broken:
        assert inbox.tolist() == [6 + (1 - rank)] * N


if __name__ == "__main__":
    command(main)
