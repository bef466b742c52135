"""All-gather with a flag a rank: each rank raises its flag on its peers, and waits for all flags, also for its own."""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "deadlock"
N = 32


@triton.jit
def all_gather(context_tensor, own, rows, flags, N: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    columns = tl.arange(0, N)
    tl.store(rows + ctx.cur_rank * N + columns, tl.load(own + columns))
    for peer in range(ctx.num_ranks):
        if peer != ctx.cur_rank:
            ctx.put_signal(own + columns, rows + ctx.cur_rank * N + columns, flags + ctx.cur_rank, 1, peer)
    for peer in range(ctx.num_ranks):
        if BROKEN:
            ctx.wait(flags + peer, 1)  # first
        else:
            if peer != ctx.cur_rank:
                ctx.wait(flags + peer, 1)


def main(ctx: iris.Iris, broken: bool) -> None:
    num_ranks = ctx.get_num_ranks()
    own = ctx.full((N,), 60 + ctx.get_rank(), dtype=torch.int32)
    rows, flags = ctx.zeros(num_ranks, N, dtype=torch.int32), ctx.zeros(num_ranks, dtype=torch.int32)
    ctx.barrier()
    all_gather[(1,)](ctx.get_device_context(), own, rows, flags, N, broken)
    ctx.barrier()
    if not broken:
        assert rows.tolist() == [[60 + rank] * N for rank in range(num_ranks)]


if __name__ == "__main__":
    command(main)
