"""A collective of torch has ended here; that it has ended on the peer, whose result is looked at, nobody has said."""

import torch
import torch.distributed as dist
from program import command

import iris

KIND = "race"
N = 48


def main(ctx: iris.Iris, broken: bool) -> None:
    rank, num_ranks = ctx.get_rank(), ctx.get_num_ranks()
    gathered = ctx.zeros(num_ranks, N)
    parts = list(gathered.unbind())
    ctx.barrier()
    dist.all_gather(parts, torch.full((N,), 1.0 + rank))  # first
    if not broken:
        ctx.barrier()
    theirs = ctx.peer(gathered, (rank + 1) % num_ranks).sum(1)  # second
    assert broken or theirs.tolist() == [N * (1.0 + r) for r in range(num_ranks)]
    ctx.barrier()


if __name__ == "__main__":
    command(main)
