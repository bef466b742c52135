"""Each rank's part is overwritten as soon as its own sum is done, while the peer may still read it.

Each signals by adding to the other's count that its part is there; what tells that the part has been read is missing.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race/reuse"
N, ROUNDS = 64, 3


@triton.jit
def add(context_tensor, parts, sums, ready, read, ROUNDS: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets, peer = tl.arange(0, N), 1 - ctx.cur_rank
    for round in range(1, ROUNDS + 1):
        tl.store(parts + offsets, round * (offsets + ctx.cur_rank))  # second
        ctx.signal(ready, 1, peer, op="add")
        ctx.wait(ready, round, cmp="ge")
        theirs = ctx.load(parts + offsets, peer)  # first
        tl.store(sums + round * N + offsets, theirs + round * (offsets + ctx.cur_rank))
        ctx.signal(read, 1, peer, op="add")
        if not BROKEN:
            ctx.wait(read, round, cmp="ge")


def main(ctx: iris.Iris, broken: bool) -> None:
    parts, sums = ctx.zeros(N, dtype=torch.int32), torch.zeros(ROUNDS + 1, N, dtype=torch.int32)
    ready, read = (ctx.zeros(1, dtype=torch.int32) for _ in range(2))
    ctx.barrier()
    add[(1,)](ctx.get_device_context(), parts, sums, ready, read, ROUNDS, N, broken)
    ctx.barrier()
    if not broken:
        assert sums.tolist() == [[round * (2 * i + 1) for i in range(N)] for round in range(ROUNDS + 1)]


if __name__ == "__main__":
    command(main)
