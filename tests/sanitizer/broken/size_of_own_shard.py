"""Each rank allocates as much as its own shard takes, and the shards are not equal: the offsets after them differ.

A peer's stores then land in other tensors than the owner's. The largest shard is what all must allocate.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "asymmetric"
TOTAL, BLOCK = 700, 512


@triton.jit
def fetch(context_tensor, shard, length, result, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    peer = 1 - ctx.cur_rank
    n = ctx.load(length, peer)
    values = ctx.load(shard + offsets, peer, mask=offsets < n, other=0)
    tl.store(result + offsets, values)


def main(ctx: iris.Iris, broken: bool) -> None:
    rank = ctx.get_rank()
    lengths = [500, TOTAL - 500]
    shard = ctx.full((lengths[rank] if broken else max(lengths),), 1 + rank, dtype=torch.int32)
    length = ctx.full((1,), lengths[rank], dtype=torch.int32)
    result = ctx.zeros(BLOCK, dtype=torch.int32)
    ctx.barrier()
    fetch[(1,)](ctx.get_device_context(), shard, length, result, BLOCK)
    ctx.barrier()
    if not broken:
        assert result.sum().item() == (1 + (1 - rank)) * lengths[1 - rank]


if __name__ == "__main__":
    command(main)
