"""Every rank adds to every rank's sums, atomically, and reads its own before it knows that all have added."""

import torch
import triton
import triton.language as tl
from program import command

import iris

KIND = "race"
RANKS = 3
N = 64


@triton.jit
def add(context_tensor, sums, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    for peer in range(ctx.num_ranks):
        ctx.atomic_add(sums + offsets, offsets + ctx.cur_rank, peer, sem="relaxed")  # first


@triton.jit
def copy(sums, result, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(result + offsets, tl.load(sums + offsets))  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    sums, result = ctx.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32, device=ctx.device)
    ctx.barrier()
    add[(1,)](ctx.get_device_context(), sums, N)
    if not broken:
        ctx.device_barrier()
    copy[(1,)](sums, result, N)
    ctx.barrier()
    if not broken:
        assert result.tolist() == [3 * i + 3 for i in range(N)]


if __name__ == "__main__":
    command(main)
