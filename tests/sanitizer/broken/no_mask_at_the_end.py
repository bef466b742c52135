"""The load from the peer has no mask, and the length is no multiple of the block: the last block reads past the end.

What it finds there is not stored, but a GPU may fault, and pays for the bytes on the link.
"""

import triton
import triton.language as tl
from program import command

import iris

KIND = "bounds"
N, BLOCK = 200, 64


@triton.jit
def fetch(source, result, n, rank, heap_bases, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if BROKEN:
        values = iris.load(source + offsets, rank, 1 - rank, heap_bases)  # first
    else:
        values = iris.load(source + offsets, rank, 1 - rank, heap_bases, mask=mask)
    tl.store(result + offsets, values, mask=mask)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    source, result = ctx.full((N,), 1.5 + rank), ctx.zeros(N)
    ctx.barrier()
    fetch[(triton.cdiv(N, BLOCK),)](source, result, N, rank, ctx.get_heap_bases(), BLOCK, broken)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [1.5 + (1 - rank)] * N


if __name__ == "__main__":
    command(main)
