"""reduce: statistics of all ranks come together on the rank that writes the log.

Each rank has counted for itself; rank 0 gets the sums and the maxima. The others pass no output.

Over the link: each rank adds up a W-th of the sums and sends it to the root, so its own bytes once, in two steps.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config, ReduceOp

ROOT = 0


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 4
    counted = torch.empty(n, device=device)
    totals, largest = (torch.empty(n, device=device) if rank == ROOT else None for _ in range(2))

    def prepare(round: int) -> None:
        counted.copy_(pattern(n, rank, round, device))

    def call() -> None:
        ctx.ccl.reduce(totals, counted, dst=ROOT, config=config)
        ctx.ccl.reduce(largest, counted, dst=ROOT, op=ReduceOp.MAX, config=config)

    def check(round: int) -> None:
        everyone = torch.stack([pattern(n, peer, round, device) for peer in range(num_ranks)])
        if rank == ROOT:
            same(totals, everyone.sum(dim=0), f"rank {rank}, the sums")
            same(largest, everyone.amax(dim=0), f"rank {rank}, the maxima")
        same(counted, everyone[rank], f"rank {rank}, its own numbers")

    trial(ctx, "reduce", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
