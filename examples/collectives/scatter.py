"""scatter: rank 0 has read a batch, and deals its samples out to all ranks.

Rank r gets the r-th of W equal parts. The others pass no input.

Over the link: (W - 1) / W times the bytes of the batch out of the root, in one step.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config

ROOT = 0


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 4 // num_ranks
    batch = torch.empty(num_ranks * n, device=device) if rank == ROOT else None
    samples = ctx.empty(n)

    def prepare(round: int) -> None:
        if batch is not None:
            batch.copy_(pattern(num_ranks * n, ROOT, round, device))

    def call() -> None:
        ctx.ccl.scatter(samples, batch, src=ROOT, config=config)

    def check(round: int) -> None:
        whole = pattern(num_ranks * n, ROOT, round, device)
        same(samples, whole[rank * n : (rank + 1) * n], f"rank {rank}")

    trial(ctx, "scatter", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
