"""reduce_scatter: gradients are added up where the optimiser needs them, when each rank updates its own shard.

Every rank has gradients for the whole weight, and gets the sum over all ranks for its W-th of it.

Over the link: (W - 1) / W times the bytes of the input, in one step.
"""

import torch
from trial import command, pattern, same, trial

import iris
from iris.ccl import Config


def main(ctx: iris.Iris, size: int, config: Config) -> None:
    rank, num_ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    n = size // 4 // num_ranks
    gradients = torch.empty(num_ranks * n, device=device)
    shard = torch.empty(n, device=device)

    def prepare(round: int) -> None:
        gradients.copy_(pattern(num_ranks * n, rank, round, device))

    def call() -> None:
        ctx.ccl.reduce_scatter(shard, gradients, config=config)

    def check(round: int) -> None:
        total = sum(pattern(num_ranks * n, peer, round, device) for peer in range(num_ranks))
        same(shard, total[rank * n : (rank + 1) * n], f"rank {rank}")

    trial(ctx, "reduce_scatter", size, prepare, call, check)


if __name__ == "__main__":
    command(main)
